//! The edge: from an accepted socket to a request that Pingora may read.
//!
//! Pingora reads HTTP. What comes before is ours, since Pingora 0.9.1 bounds neither how many connections there are
//! nor how long a head may take, knows no PROXY protocol (its hook before TLS is not called on plain listeners), and
//! leaves it to chance which thread gets a connection.
//! `doorman` accepts and chooses the thread; `door` lets a connection in, step by step; `connections` counts; `proxy_protocol` says whose it is;
//! `tls` shows our certificate, the newest good one; `line` is the stream that Pingora reads from, with
//! a clock on heads and writes; `requests` waits for each request of HTTP/1.1; `connection` is what a request may know of its connection.
//!
//! A connection that is not let in is closed without a word: who speaks no HTTP yet cannot be answered.

mod connection;
mod connections;
mod door;
mod doorman;
mod line;
mod proxy_protocol;
mod requests;
mod tls;

pub use connection::Connection;
pub use connections::Connections;
pub use door::{Door, Listener};
pub use doorman::{Arrival, Arrivals, Doorman, Seat};
pub use tls::Tls;

/// Why a connection was not let in, or was ended by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// `bounds.connections_max` are open.
    AllTaken,
    /// `bounds.connections_per_address_max` of its address are open.
    AddressTaken,
    /// It had to say whose it is, and did not, or may not.
    ProxyProtocol,
    /// The TLS handshake failed.
    Tls,
    /// `bounds.head_timeout` ran out.
    TooSlow,
    /// What it sent is no head of HTTP/1.1.
    Unreadable,
    /// It did not take what was written within `bounds.write_timeout`.
    NotReading,
    /// It was gone before it was let in.
    Left,
}

impl Refused {
    /// The label in metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::AllTaken => "all_taken",
            Self::AddressTaken => "address_taken",
            Self::ProxyProtocol => "proxy_protocol",
            Self::Tls => "tls",
            Self::TooSlow => "too_slow",
            Self::Unreadable => "unreadable",
            Self::NotReading => "not_reading",
            Self::Left => "left",
        }
    }
}
