//! What stands in a journal: records, framed so that a torn tail shows.
//!
//! `[length u32 LE][crc32 u32 LE][payload]`, the payload in postcard's wire format with the variant
//! first. Only append variants and fields at the end of a variant list: old journals are replayed by
//! newer binaries.

use filters::ids::AccountId;
use filters::money::{Amount, Settlement};
use filters::stream::usage::Usage;
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

/// The longest payload that is written or believed, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// Of a frame: length and checksum.
pub(super) const HEADER_BYTES: usize = 8;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Money was set aside.
    Hold(Hold),
    /// What an open hold has cost so far, in nano-dollars.
    Progress {
        /// The hold.
        id: u128,
        /// Nano-dollars.
        cost: i64,
    },
    /// A hold ended.
    Settled(Settled),
    /// Nothing happened: written to see whether the disk takes records again.
    Probe,
    /// Money was set aside in a pool that nodes share.
    PooledHold(Pool, Hold),
    /// A hold in a pool ended.
    PooledSettled(Pool, Settled),
    /// What the boot's ring has before this place stands in its log (`journal::ring`).
    Drained {
        /// Bytes of ring since the boot began.
        upto: u64,
    },
}

/// A record as it is written while somebody else has it: variant for variant what [`Record`] is.
#[derive(Serialize)]
pub(crate) enum Lent<'a> {
    Hold(&'a Hold),
    #[expect(dead_code, reason = "it takes the place that progress has in a record")]
    Progress,
    Settled(&'a Settled),
    #[expect(dead_code, reason = "it takes the place that a probe has in a record")]
    Probe,
    PooledHold(Pool, &'a Hold),
    PooledSettled(Pool, &'a Settled),
}

/// Money of one account that the ledger has leased to one incarnation of a Redis server, for all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pool {
    /// The part of the key space that the account lives in: below 256.
    pub shard: u16,
    /// Which incarnation: counted by the ledger, one up whenever another process answers for the shard.
    pub epoch: i64,
}

/// Money set aside for one call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The hold's id.
    pub id: u128,
    /// The account's number in the ledger.
    pub account: i64,
    /// Nano-dollars.
    pub amount: i64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The request id.
    pub request: String,
    /// The model asked for.
    pub model: String,
    /// The digest of the key that it was placed with.
    pub key: [u8; 32],
    /// The version of the price list that it was sized by.
    pub price_version: u32,
    /// The pool that it is in; `None`: the lease of this boot. In a journal the record's kind says it.
    #[serde(skip)]
    pub pool: Option<Pool>,
}

/// How a hold ended; everything that the ledger books of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settled {
    /// The hold's id.
    pub id: u128,
    /// The account's number in the ledger.
    pub account: i64,
    /// The request id.
    pub request: String,
    /// The model asked for.
    pub model: String,
    /// The endpoint that answered; empty when none did.
    pub endpoint: String,
    /// How many attempts there were.
    pub attempts: u32,
    /// In nano-dollars: held, captured, released, excess, shortfall.
    pub parts: [i64; 5],
    /// Our cost at the provider, in nano-dollars.
    pub provider_cost: i64,
    /// Our cost at the provider for a call that was left before its answer, in nano-dollars.
    pub abandoned: i64,
    /// The digest of the key that it was placed with.
    pub key: [u8; 32],
    /// When the hold was placed: the window of a budget that it counts in.
    pub held_ms: i64,
    /// The version of the price list that hold and charge were computed by.
    pub price_version: u32,
    /// Tokens: input, cache read, cache writes for 5 minutes and 1 hour, audio input, output, reasoning.
    pub tokens: [u64; 7],
    /// The counts are our own.
    pub estimated: bool,
    /// The provider's report was not plausible.
    pub anomaly: bool,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The pool that it was in; `None`: the lease of its boot. In a journal the record's kind says it.
    #[serde(skip)]
    pub pool: Option<Pool>,
}

impl Record {
    /// As it is written: with the pool, where there is one.
    #[must_use]
    pub fn of_hold(hold: Hold) -> Self {
        match hold.pool {
            Some(pool) => Self::PooledHold(pool, hold),
            None => Self::Hold(hold),
        }
    }

    /// As it is written: with the pool, where there is one.
    #[must_use]
    pub fn of_settled(settled: Settled) -> Self {
        match settled.pool {
            Some(pool) => Self::PooledSettled(pool, settled),
            None => Self::Settled(settled),
        }
    }
}

impl Hold {
    /// As it is written: with the pool, where there is one.
    pub(super) fn lent(&self) -> Lent<'_> {
        match self.pool {
            Some(pool) => Lent::PooledHold(pool, self),
            None => Lent::Hold(self),
        }
    }
}

impl Lent<'_> {
    /// Its frame, in `room`.
    ///
    /// # Errors
    /// [`BadFrame::Damaged`] when it does not fit.
    pub(super) fn frame<'r>(&self, room: &'r mut [u8]) -> Result<&'r [u8], BadFrame> {
        let (front, rest) = room.split_at_mut_checked(HEADER_BYTES).ok_or(BadFrame::Damaged)?;
        let payload = postcard::to_slice(self, rest).map_err(|_| BadFrame::Damaged)?;
        front.copy_from_slice(&header(payload)?);
        let end = HEADER_BYTES + payload.len();
        room.get(..end).ok_or(BadFrame::Damaged)
    }

    /// Appends its frame to `out`.
    ///
    /// # Errors
    /// [`BadFrame::Damaged`] when it is too long to be read again.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), BadFrame> {
        append(self, out)
    }
}

impl Settled {
    /// As it is written: with the pool, where there is one.
    pub(super) fn lent(&self) -> Lent<'_> {
        match self.pool {
            Some(pool) => Lent::PooledSettled(pool, self),
            None => Lent::Settled(self),
        }
    }

    /// Whose money it was.
    #[must_use]
    pub fn account(&self) -> AccountId {
        AccountId(self.account)
    }

    /// The money.
    #[must_use]
    pub fn settlement(&self) -> Settlement {
        let [held, captured, released, excess, shortfall] = self.parts.map(Amount::from_nano);
        Settlement { held, captured, released, excess, shortfall }
    }

    /// The money, as it is stored.
    #[must_use]
    pub fn parts_of(settlement: &Settlement) -> [i64; 5] {
        let Settlement { held, captured, released, excess, shortfall } = *settlement;
        [held, captured, released, excess, shortfall].map(Amount::nano)
    }

    /// The counts, as they are stored.
    #[must_use]
    pub fn tokens_of(usage: &Usage) -> [u64; 7] {
        let Usage { input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning } =
            *usage;
        [input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning]
    }

    /// The counts.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let [input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning] = self.tokens;
        Usage { input, cache_read, cache_write_5m, cache_write_1h, audio_input, output, reasoning }
    }
}

/// Why a frame cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// The file ends inside it.
    #[error("the record is cut off")]
    Torn,
    /// Its checksum or its content is wrong.
    #[error("the record is damaged")]
    Damaged,
}

/// Appends a record's frame to `out`. A record too long to be read again is left out and reported.
///
/// # Errors
/// [`BadFrame::Damaged`] when it cannot be written so that it can be read.
pub fn encode(record: &Record, out: &mut Vec<u8>) -> Result<(), BadFrame> {
    append(record, out)
}

fn append(record: &impl Serialize, out: &mut Vec<u8>) -> Result<(), BadFrame> {
    let from = out.len();
    let framed = append_frame(record, out, from);
    if framed.is_err() {
        out.truncate(from);
    }
    framed
}

/// The same; what an error leaves behind `from` is nothing.
fn append_frame(record: &impl Serialize, out: &mut Vec<u8>, from: usize) -> Result<(), BadFrame> {
    out.extend_from_slice(&[0; HEADER_BYTES]);
    postcard::serialize_with_flavor(record, Tail(out)).map_err(|_| BadFrame::Damaged)?;
    let frame = out.get_mut(from..).ok_or(BadFrame::Damaged)?;
    let (front, payload) = frame.split_at_mut_checked(HEADER_BYTES).ok_or(BadFrame::Damaged)?;
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(BadFrame::Damaged);
    }
    front.copy_from_slice(&header(payload)?);
    Ok(())
}

/// Where a payload is written to: behind what is there.
struct Tail<'a>(&'a mut Vec<u8>);

impl Flavor for Tail<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

fn header(payload: &[u8]) -> Result<[u8; HEADER_BYTES], BadFrame> {
    let length = u32::try_from(payload.len()).map_err(|_| BadFrame::Damaged)?;
    let (length, crc) = (u64::from(length), u64::from(crc32fast::hash(payload)));
    Ok((crc << 32 | length).to_le_bytes())
}

/// Reads the record at the front of `bytes`; answers it and the length of its frame.
///
/// # Errors
/// [`BadFrame`].
pub fn decode(bytes: &[u8]) -> Result<(Record, usize), BadFrame> {
    let word = |at: usize| {
        let bytes = bytes.get(at..at + 4)?;
        <[u8; 4]>::try_from(bytes).ok().map(u32::from_le_bytes)
    };
    let (length, crc) = (word(0).ok_or(BadFrame::Torn)?, word(4).ok_or(BadFrame::Torn)?);
    let length = usize::try_from(length).map_err(|_| BadFrame::Damaged)?;
    // No record is empty: zeros are what a file system leaves behind a crash.
    if length == 0 || length > PAYLOAD_BYTES_MAX {
        return Err(BadFrame::Damaged);
    }
    let end = HEADER_BYTES + length;
    let payload = bytes.get(HEADER_BYTES..end).ok_or(BadFrame::Torn)?;
    if crc32fast::hash(payload) != crc {
        return Err(BadFrame::Damaged);
    }
    let mut record = postcard::from_bytes(payload).map_err(|_| BadFrame::Damaged)?;
    match &mut record {
        Record::PooledHold(pool, hold) => hold.pool = Some(*pool),
        Record::PooledSettled(pool, settled) => settled.pool = Some(*pool),
        Record::Hold(_)
        | Record::Settled(_)
        | Record::Progress { .. }
        | Record::Probe
        | Record::Drained { .. } => {}
    }
    Ok((record, end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn settled() -> Settled {
        Settled {
            id: 7,
            account: 1,
            request: "r".into(),
            model: "m".into(),
            endpoint: "e".into(),
            attempts: 2,
            parts: [5, 4, 1, 0, 0],
            provider_cost: 3,
            abandoned: 0,
            key: [3; 32],
            held_ms: 9,
            price_version: 4,
            tokens: [1, 2, 3, 4, 5, 6, 7],
            estimated: true,
            anomaly: false,
            at_ms: 11,
            pool: None,
        }
    }

    #[test]
    fn a_record_survives_its_frame() {
        let hold = Hold {
            id: 7,
            account: 1,
            amount: 5,
            at_ms: 9,
            request: "r".into(),
            model: "m".into(),
            key: [3; 32],
            price_version: 4,
            pool: None,
        };
        let pooled = Hold { pool: Some(Pool { shard: 17, epoch: 3 }), ..hold.clone() };
        let records = [Record::of_hold(hold), Record::Progress { id: 7, cost: 3 }, Record::of_hold(pooled)];
        let mut bytes = vec![];
        records.iter().for_each(|record| encode(record, &mut bytes).unwrap());
        let mut at = 0;
        for record in records {
            let (read, length) = decode(&bytes[at..]).unwrap();
            assert_eq!(read, record);
            at += length;
        }
    }

    #[test]
    fn what_is_lent_is_written_as_what_is_owned() {
        let hold = Hold {
            id: 7,
            account: 1,
            amount: 5,
            at_ms: 9,
            request: "r".into(),
            model: "m".into(),
            key: [3; 32],
            price_version: 4,
            pool: None,
        };
        let settled = settled();
        for pool in [None, Some(Pool { shard: 17, epoch: 3 })] {
            let (hold, settled) = (Hold { pool, ..hold.clone() }, Settled { pool, ..settled.clone() });
            let (mut owned, mut lent, mut room) = (vec![], vec![], [0; 512]);
            encode(&Record::of_hold(hold.clone()), &mut owned).unwrap();
            hold.lent().encode(&mut lent).unwrap();
            assert_eq!(
                (lent.as_slice(), hold.lent().frame(&mut room)),
                (owned.as_slice(), Ok(owned.as_slice()))
            );
            let (mut owned, mut lent) = (vec![], vec![]);
            encode(&Record::of_settled(settled.clone()), &mut owned).unwrap();
            settled.lent().encode(&mut lent).unwrap();
            assert_eq!(
                (lent.as_slice(), settled.lent().frame(&mut room)),
                (owned.as_slice(), Ok(owned.as_slice()))
            );
            for short in 0..owned.len() {
                assert_eq!(settled.lent().frame(&mut room[..short]), Err(BadFrame::Damaged), "{short}");
            }
        }
    }

    #[test]
    fn a_frame_is_put_behind_what_is_there_and_one_that_is_too_long_leaves_nothing() {
        let record = |model: usize| Record::Settled(Settled { model: "m".repeat(model), ..settled() });
        let mut out = b"there".to_vec();
        encode(&record(300), &mut out).unwrap();
        let payload = postcard::to_stdvec(&record(300)).unwrap();
        let expected = [b"there".as_slice(), &header(&payload).unwrap(), &payload].concat();
        assert_eq!(out, expected);
        assert_eq!(encode(&record(PAYLOAD_BYTES_MAX), &mut out), Err(BadFrame::Damaged));
        assert_eq!(out, expected);
    }

    #[test]
    fn a_cut_and_a_flipped_bit_show() {
        let mut bytes = vec![];
        encode(&Record::Progress { id: 7, cost: 3 }, &mut bytes).unwrap();
        for cut in 0..bytes.len() {
            assert_eq!(decode(&bytes[..cut]), Err(BadFrame::Torn), "{cut}");
        }
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(decode(&bytes), Err(BadFrame::Damaged));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert!(decode(&bytes).is_err() || bytes.len() >= HEADER_BYTES);
        }
    }
}
