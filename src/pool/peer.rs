//! A provider's address as Pingora's peer: the one place where upstream connections get their settings.
//!
//! Pingora finds a pooled connection by a hash over its peer, so an attempt and whatever else opens connections
//! must make their peers here. Most of its defaults are wrong for us: no timeout at all, HTTP/1.1 alone, one stream
//! on an HTTP/2 connection, no pings; an empty server name switches the verification off.

use std::net::SocketAddr;
use std::time::Duration;

use pingora::upstreams::peer::{ALPN, HttpPeer};

use crate::config::checked::Provider;
use crate::config::reach::Http;

/// Streams on one HTTP/2 connection. Pingora's default is one.
const H2_STREAMS_MAX: usize = 100;
/// How often a connection of HTTP/2 is pinged: more seldom than any edge drops an idle one, often enough that a
/// dead one is known (Pingora waits 5 s for the answer) before a call is sent on it.
const H2_PING: Duration = Duration::from_secs(25);
/// An idle upstream connection is dropped before the provider's edge does it (60 s and up).
pub const UPSTREAM_IDLE: Duration = Duration::from_secs(55);
/// A connection that no other call can find is not kept longer than this.
pub(super) const UNFOUND_IDLE: Duration = Duration::from_secs(1);

/// Which connections will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// One of the pool's, or a new one.
    Pool,
    /// A new one: what the pool holds may be dead. The number keeps it apart from all others.
    New(u64),
}

/// The peer at one of a provider's addresses. `connect`: how long it may take until the connection stands, TLS included.
/// What is done on it has the clocks of whoever does it.
#[must_use]
pub fn peer(provider: &Provider, address: SocketAddr, via: Via, connect: Duration) -> Box<HttpPeer> {
    let (base, reach) = (&provider.base, &provider.reach);
    let mut peer = Box::new(HttpPeer::new(address, base.tls, reach.server_name.clone()));
    peer.client_cert_key.clone_from(&reach.identity);
    // Whom we trust is not part of Pingora's hash.
    peer.group_key = reach.group;
    let options = &mut peer.options;
    options.ca.clone_from(&reach.authorities);
    options.alpn = match (reach.http, base.tls) {
        (Http::Auto, true) => ALPN::H2H1,
        (Http::Auto, false) | (Http::One, _) => ALPN::H1,
        (Http::Two, _) => ALPN::H2,
    };
    options.connection_timeout = Some(connect);
    options.total_connection_timeout = Some(connect);
    options.idle_timeout = Some(UPSTREAM_IDLE);
    options.max_h2_streams = H2_STREAMS_MAX;
    options.h2_ping_interval = Some(H2_PING);
    if let Via::New(number) = via {
        peer.group_key = number;
        peer.options.idle_timeout = Some(UNFOUND_IDLE);
    }
    peer
}

#[cfg(test)]
mod tests {
    use pingora::upstreams::peer::Peer as _;

    use super::*;
    use crate::config;

    fn made(provider: &str, via: Via) -> Box<HttpPeer> {
        let text = format!(
            "listen: {{ http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }}\n\
             store: {{ embedded: {{ path: ./data }} }}\n\
             providers: {{ p: {{ dialect: openai, {provider} }} }}\n\
             models: {{ m: {{ price: {{ input: 1, output: 1 }}, limits: {{ context: 9, output: 9 }}, routes: [{{ provider: p }}] }} }}\n"
        );
        let config = config::parse(&text, |_| None).unwrap_or_else(|e| panic!("{e}"));
        let address = SocketAddr::from(([127, 0, 0, 1], 9));
        peer(&config.catalogue.endpoints[0].provider, address, via, Duration::from_secs(2))
    }

    #[test]
    fn nothing_is_left_to_defaults_that_hang_or_trust() {
        let peer = made("base_url: \"https://host.example/v1\"", Via::Pool);
        let options = &peer.options;
        assert!(options.connection_timeout.is_some() && options.total_connection_timeout.is_some());
        assert!(options.idle_timeout.is_some() && options.h2_ping_interval.is_some());
        assert!(options.max_h2_streams > 1 && options.verify_cert && options.verify_hostname);
        assert_eq!(peer.sni, "host.example", "an empty one switches the verification off");
    }

    #[test]
    fn http_says_what_is_negotiated() {
        for (provider, versions) in [
            ("base_url: \"https://h\"", (2, 1)),
            ("base_url: \"https://h\", http: h1", (1, 1)),
            ("base_url: \"https://h\", http: h2", (2, 2)),
            ("base_url: \"http://h\"", (1, 1)),
            ("base_url: \"http://h\", http: h2c", (2, 2)),
        ] {
            let alpn = made(provider, Via::Pool).options.alpn;
            assert_eq!((alpn.get_max_http_version(), alpn.get_min_http_version()), versions, "{provider}");
        }
    }

    #[test]
    fn a_new_connection_is_found_by_nobody_else() {
        let provider = "base_url: \"https://h\"";
        let pooled = made(provider, Via::Pool).reuse_hash();
        assert_eq!(pooled, made(provider, Via::Pool).reuse_hash());
        let new = [made(provider, Via::New(1)).reuse_hash(), made(provider, Via::New(2)).reuse_hash()];
        assert!(new[0] != pooled && new[0] != new[1]);
    }
}
