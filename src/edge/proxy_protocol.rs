//! Whose connection is it, where a load balancer stands in between? (PROXY protocol, versions 1 and 2.)
//!
//! Only the word of a trusted source counts, and only its bytes are read at all: what an untrusted one
//! sends is HTTP or TLS, and fails as such when it is neither. The crate `ppp` reads a header; how many
//! bytes one may have, and that not one byte behind it is taken, is decided here.

use std::net::{IpAddr, SocketAddr};

use ppp::{v1, v2};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::Refused;
use crate::config::checked::ProxyProtocol;

/// The longest header of version 1, as its specification says.
const V1_BYTES_MAX: usize = 107;
/// The longest header of version 2 that is read, in bytes; the extensions behind the addresses could fill 64 KiB.
const V2_BYTES_MAX: usize = 4096;
const V1_BEGIN: &[u8] = b"PROXY ";
/// Version 2's begin, up to and with the length of its rest.
const V2_HEAD_BYTES: usize = 16;

/// What came in front of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// It is this caller's.
    Caller(SocketAddr),
    /// It is the load balancer's own.
    Own,
    /// Nothing; these bytes belong to what follows.
    Nothing(Vec<u8>),
}

/// Whether the source may say whose its connections are.
pub(super) fn is_trusted(rule: &ProxyProtocol, source: IpAddr) -> bool {
    let source = source.to_canonical();
    rule.trusted.iter().any(|network| network.contains(&source))
}

/// Reads what a trusted source says.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Said, Refused> {
    let mut read = vec![];
    let (v1, v2) = (V1_BEGIN, v2::PROTOCOL_PREFIX);
    loop {
        read.push(stream.read_u8().await.map_err(|_| Refused::Left)?);
        if read == v1 {
            return rest_of_v1(stream, read).await;
        }
        if read == v2 {
            return rest_of_v2(stream, read).await;
        }
        if !v1.starts_with(&read) && !v2.starts_with(&read) {
            return Ok(Said::Nothing(read));
        }
    }
}

async fn rest_of_v1(stream: &mut (impl AsyncRead + Unpin), mut read: Vec<u8>) -> Result<Said, Refused> {
    while !read.ends_with(b"\r\n") {
        if read.len() >= V1_BYTES_MAX {
            return Err(Refused::ProxyProtocol);
        }
        read.push(stream.read_u8().await.map_err(|_| Refused::Left)?);
    }
    let header = v1::Header::try_from(read.as_slice()).map_err(|_| Refused::ProxyProtocol)?;
    Ok(match header.addresses {
        v1::Addresses::Tcp4(tcp) => Said::Caller((tcp.source_address, tcp.source_port).into()),
        v1::Addresses::Tcp6(tcp) => Said::Caller((tcp.source_address, tcp.source_port).into()),
        v1::Addresses::Unknown => Said::Own,
    })
}

async fn rest_of_v2(stream: &mut (impl AsyncRead + Unpin), mut read: Vec<u8>) -> Result<Said, Refused> {
    read.resize(V2_HEAD_BYTES, 0);
    let begun = v2::PROTOCOL_PREFIX.len();
    let head = read.get_mut(begun..).ok_or(Refused::ProxyProtocol)?;
    stream.read_exact(head).await.map_err(|_| Refused::Left)?;
    let length = match *head {
        [_, _, high, low] => usize::from(u16::from_be_bytes([high, low])),
        _ => return Err(Refused::ProxyProtocol),
    };
    if V2_HEAD_BYTES + length > V2_BYTES_MAX {
        return Err(Refused::ProxyProtocol);
    }
    read.resize(V2_HEAD_BYTES + length, 0);
    let rest = read.get_mut(V2_HEAD_BYTES..).ok_or(Refused::ProxyProtocol)?;
    stream.read_exact(rest).await.map_err(|_| Refused::Left)?;
    let header = v2::Header::try_from(read.as_slice()).map_err(|_| Refused::ProxyProtocol)?;
    Ok(match (header.command, header.addresses) {
        (v2::Command::Local, _) => Said::Own,
        (v2::Command::Proxy, v2::Addresses::IPv4(ip)) => {
            Said::Caller((ip.source_address, ip.source_port).into())
        }
        (v2::Command::Proxy, v2::Addresses::IPv6(ip)) => {
            Said::Caller((ip.source_address, ip.source_port).into())
        }
        (v2::Command::Proxy, v2::Addresses::Unspecified | v2::Addresses::Unix(_)) => Said::Own,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said, and what is left to read behind it.
    async fn said(bytes: &[u8]) -> (Result<Said, Refused>, Vec<u8>) {
        let mut rest = bytes;
        let said = read(&mut rest).await;
        (said, rest.to_vec())
    }

    fn caller(address: &str) -> Result<Said, Refused> {
        Ok(Said::Caller(address.parse().unwrap()))
    }

    fn v2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let length = u16::try_from(addresses.len()).unwrap().to_be_bytes();
        [v2::PROTOCOL_PREFIX, &[command, family], &length, addresses, b"GET"].concat()
    }

    #[tokio::test]
    async fn both_versions_name_the_caller_and_not_a_byte_behind_them_is_taken() {
        let four = [192, 0, 2, 9, 127, 0, 0, 1, 0xd4, 0x31, 0x1f, 0x90];
        let mut six = [0; 36];
        six[..2].copy_from_slice(&[0x20, 0x01]);
        six[33] = 7;
        for (bytes, expected) in [
            (b"PROXY TCP4 192.0.2.9 127.0.0.1 54321 8080\r\nGET".to_vec(), "192.0.2.9:54321"),
            (b"PROXY TCP6 2001:db8::9 ::1 54321 8080\r\nGET".to_vec(), "[2001:db8::9]:54321"),
            (v2(0x21, 0x11, &four), "192.0.2.9:54321"),
            (v2(0x21, 0x21, &six), "[2001::]:7"),
            // Extensions behind the addresses.
            (v2(0x21, 0x11, &[&four[..], &[4, 0, 1, 0]].concat()), "192.0.2.9:54321"),
        ] {
            assert_eq!(said(&bytes).await, (caller(expected), b"GET".to_vec()), "{expected}");
        }
    }

    #[tokio::test]
    async fn a_load_balancer_may_speak_for_itself() {
        assert_eq!(said(b"PROXY UNKNOWN\r\nGET").await.0, Ok(Said::Own));
        assert_eq!(said(&v2(0x20, 0x00, &[])).await.0, Ok(Said::Own));
    }

    #[tokio::test]
    async fn what_is_no_header_is_left_to_whoever_reads_next() {
        for bytes in ["POST /v1/chat/completions", "PROPFIND / HTTP/1.1", "\r\n\r\nGET", "\u{16}\u{3}\u{1}"] {
            let (said, rest) = said(bytes.as_bytes()).await;
            let Ok(Said::Nothing(read)) = said else { panic!("{bytes}: {said:?}") };
            assert_eq!([read, rest].concat(), bytes.as_bytes());
        }
    }

    #[tokio::test]
    async fn a_header_that_is_none_or_has_no_end_is_refused() {
        let long = [b"PROXY TCP4 ".as_slice(), &[b'1'; 200]].concat();
        for bytes in [
            long,
            b"PROXY TCP4 nobody 127.0.0.1 1 2\r\n".to_vec(),
            b"PROXY TCP4 192.0.2.9 127.0.0.1 99999 2\r\n".to_vec(),
            v2(0x31, 0x11, &[0; 12]),
            v2(0x21, 0x11, &[0; 3]),
            v2(0x21, 0x11, &[0; 5000]),
        ] {
            assert_eq!(said(&bytes).await.0, Err(Refused::ProxyProtocol), "{}", bytes.escape_ascii());
        }
        assert_eq!(said(b"PROXY TCP4 192").await.0, Err(Refused::Left));
    }

    #[test]
    fn only_the_named_networks_are_trusted() {
        let trusted = ["10.0.0.0/8", "fd00::/8"].map(|n| n.parse().unwrap()).to_vec();
        let rule = ProxyProtocol { required: false, trusted };
        for (source, expected) in [
            ("10.9.8.7", true),
            ("::ffff:10.9.8.7", true),
            ("fd00::1", true),
            ("11.0.0.1", false),
            ("fe80::1", false),
        ] {
            assert_eq!(is_trusted(&rule, source.parse().unwrap()), expected, "{source}");
        }
    }
}
