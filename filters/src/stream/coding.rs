//! An answer that comes coded although it was asked for plain.
//!
//! Every request says `accept-encoding: identity`; some upstreams, or what stands before them, answer with
//! gzip all the same. It is decoded piece by piece, so that an event comes out as soon as the upstream has
//! flushed it.
//!
//! Bounded: a piece that swells beyond [`PIECE_BYTES_MAX`] is a bomb and no answer. An end without the
//! checksum is let pass: whether an answer is whole says its dialect. Deliberately absent: Brotli and
//! zstd, which nobody was seen to send unasked; such an answer is refused as one of the wrong type.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::{MultiGzDecoder, ZlibDecoder};

/// What one piece may swell to, in bytes.
pub const PIECE_BYTES_MAX: usize = 8 << 20;

/// Decodes one body. Boxed: few answers are coded, and all have room for it.
#[derive(Debug)]
pub struct Decoder(Box<Coding>);

/// What comes is not what its head says, or is a bomb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the coding of the answer is broken")]
pub struct Undecodable;

#[derive(Debug)]
enum Coding {
    Gzip(MultiGzDecoder<Piece>),
    Deflate(ZlibDecoder<Piece>),
}

/// What one piece has become.
#[derive(Debug, Default)]
struct Piece(Vec<u8>);

impl Decoder {
    /// For a `content-encoding` (RFC 9110 §8.4.1).
    ///
    /// # Errors
    /// [`Undecodable`] for a coding that is not known here.
    pub fn of(encoding: Option<&str>) -> Result<Option<Self>, Undecodable> {
        let Some(encoding) = encoding.map(str::trim).filter(|encoding| !encoding.is_empty()) else {
            return Ok(None);
        };
        let is = |name: &str| encoding.eq_ignore_ascii_case(name);
        if is("identity") {
            Ok(None)
        } else if is("gzip") || is("x-gzip") {
            Ok(Some(Self(Box::new(Coding::Gzip(MultiGzDecoder::new(Piece::default()))))))
        } else if is("deflate") {
            Ok(Some(Self(Box::new(Coding::Deflate(ZlibDecoder::new(Piece::default()))))))
        } else {
            Err(Undecodable)
        }
    }

    /// What a piece of the coded body says; may be nothing yet.
    ///
    /// # Errors
    /// [`Undecodable`]; the body is of no use from there on.
    pub fn decode(&mut self, coded: &[u8]) -> Result<Bytes, Undecodable> {
        let plain = match self.0.as_mut() {
            Coding::Gzip(gzip) => push(gzip, coded).map(|()| std::mem::take(&mut gzip.get_mut().0)),
            Coding::Deflate(zlib) => push(zlib, coded).map(|()| std::mem::take(&mut zlib.get_mut().0)),
        };
        plain.map(Bytes::from).map_err(|_| Undecodable)
    }
}

fn push(decoder: &mut impl Write, coded: &[u8]) -> io::Result<()> {
    decoder.write_all(coded)?;
    // What was decoded must come out now, not with the next piece.
    decoder.flush()
}

impl Write for Piece {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > PIECE_BYTES_MAX {
            return Err(io::Error::other("a bomb"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};
    use proptest::prelude::*;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(vec![], Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn decoder(encoding: &str) -> Decoder {
        Decoder::of(Some(encoding)).unwrap().unwrap()
    }

    #[test]
    fn a_plain_answer_needs_no_decoder_and_an_unknown_coding_is_refused() {
        assert!(Decoder::of(None).unwrap().is_none());
        assert!(Decoder::of(Some("Identity")).unwrap().is_none());
        assert!(Decoder::of(Some("X-GZIP")).unwrap().is_some());
        for unknown in ["br", "zstd", "gzip, gzip", "nonsense"] {
            assert!(Decoder::of(Some(unknown)).is_err(), "{unknown}");
        }
    }

    #[test]
    fn what_was_flushed_comes_out_at_once() {
        let mut encoder = GzEncoder::new(vec![], Compression::default());
        let mut decoder = decoder("gzip");
        for event in ["data: a\n\n", "data: bb\n\n"] {
            encoder.write_all(event.as_bytes()).unwrap();
            encoder.flush().unwrap();
            let coded = std::mem::take(encoder.get_mut());
            assert_eq!(decoder.decode(&coded).unwrap(), event);
        }
    }

    #[test]
    fn several_members_and_zlib_are_read_too() {
        let two = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(decoder("gzip").decode(&two).unwrap(), "one two");
        let mut encoder = ZlibEncoder::new(vec![], Compression::default());
        encoder.write_all(b"text").unwrap();
        assert_eq!(decoder("deflate").decode(&encoder.finish().unwrap()).unwrap(), "text");
    }

    #[test]
    fn a_bomb_is_no_answer() {
        let bomb = gzip(&vec![0; PIECE_BYTES_MAX + 1]);
        assert!(bomb.len() < 64 << 10);
        assert_eq!(decoder("gzip").decode(&bomb), Err(Undecodable));
        assert_eq!(decoder("gzip").decode(b"plain text"), Err(Undecodable));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_come_to_the_same_text(
            text in prop::collection::vec(any::<u8>(), 0..2_000), size in 1_usize..64,
        ) {
            let mut decoder = decoder("gzip");
            let mut plain = vec![];
            for piece in gzip(&text).chunks(size) {
                plain.extend_from_slice(&decoder.decode(piece).unwrap());
            }
            prop_assert_eq!(plain, text);
        }
    }
}
