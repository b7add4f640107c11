//! Which addresses an upstream may have.
//!
//! Upstreams come from the config alone, never from a request. What is left to an attacker is a name: who holds its DNS
//! can let it point at this machine, at what stands beside it, or at the service that hands out the machine's own
//! credentials (server-side request forgery, DNS rebinding). So each address is judged twice: as it is written, and
//! whenever a name has been looked up.
//!
//! - **Never**: link-local addresses and the metadata services of the clouds, in whatever notation, and what is
//!   nobody's address (unspecified, multicast, broadcast). No key allows them.
//! - **Private** (loopback, RFC 1918, shared address space, unique local): allowed where the config says so, and it says
//!   so by writing the address itself, by a name that cannot be a public one (`localhost`, `vllm`, `x.internal`), or by
//!   `private: true`. A name that looks public and turns out to be private is refused.
//!
//! Deliberately absent: redirects. None is followed, so no answer can lead elsewhere.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Names of the clouds' metadata services. Most of them are link-local anyway; the rest is said here.
const METADATA_NAMES: [&str; 6] = [
    "metadata.google.internal",
    "metadata.goog",
    "metadata",
    "instance-data",
    "instance-data.ec2.internal",
    "metadata.azure.internal",
];
/// Metadata services that are not link-local: Alibaba's, Oracle's and Azure's.
const METADATA_V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(192, 0, 0, 192), Ipv4Addr::new(168, 63, 129, 16)];
/// Amazon's over IPv6.
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
/// Google's over IPv6.
const METADATA_V6_GOOGLE: Ipv6Addr = Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254);
/// Ends of names that no public DNS gives out (RFC 2606, 6761, 6762, 8375 and ICANN's `internal`), and Kubernetes'.
const LOCAL_ENDS: [&str; 7] = [".localhost", ".local", ".internal", ".lan", ".home.arpa", ".svc", ".test"];

/// Whose an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Anybody's.
    Public,
    /// This machine's, or its network's.
    Private,
    /// Link-local, a metadata service, or nobody's.
    Never,
}

/// Whose this address is.
#[must_use]
pub fn range_of(address: IpAddr) -> Range {
    match address {
        IpAddr::V4(v4) => range_of_v4(v4),
        IpAddr::V6(v6) => embedded(v6).map_or_else(|| range_of_v6(v6), range_of_v4),
    }
}

fn range_of_v4(address: Ipv4Addr) -> Range {
    let [first, second, ..] = address.octets();
    if METADATA_V4.contains(&address)
        || address.is_link_local()
        || address.is_multicast()
        || first == 0
        || first >= 240
    {
        return Range::Never;
    }
    // Shared address space (RFC 6598): carriers' networks, and overlay networks such as Tailscale's.
    let shared = first == 100 && (64..128).contains(&second);
    if address.is_private() || address.is_loopback() || shared { Range::Private } else { Range::Public }
}

fn range_of_v6(address: Ipv6Addr) -> Range {
    let never = [METADATA_V6, METADATA_V6_GOOGLE, Ipv6Addr::UNSPECIFIED].contains(&address)
        || address.is_unicast_link_local()
        || address.is_multicast();
    if never {
        Range::Never
    } else if address.is_unique_local() || address.is_loopback() {
        Range::Private
    } else {
        Range::Public
    }
}

/// The IPv4 address that an IPv6 address stands for: mapped, compatible, NAT64 (RFC 6052) or 6to4 (RFC 3056).
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Ipv4Addr::new(a, b, c, d)
    };
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// Whether the service that this name or address stands for may never be called; judged as it is written.
#[must_use]
pub fn is_never(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => range_of(address) == Range::Never,
        Err(_) => METADATA_NAMES.contains(&plain(host).as_str()),
    }
}

/// Whether a host says by itself that it is no public one: an address, or a name that public DNS does not know.
#[must_use]
pub fn is_local(host: &str) -> bool {
    let name = plain(host);
    host.parse::<IpAddr>().is_ok() || !name.contains('.') || LOCAL_ENDS.iter().any(|end| name.ends_with(end))
}

/// In small letters, without the dot of the root.
fn plain(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Range {
        range_of(text.parse().unwrap())
    }

    #[test]
    fn link_local_addresses_and_metadata_services_are_never_called_in_any_notation() {
        for text in [
            "169.254.169.254",
            "169.254.0.1",
            "169.254.170.2",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
            "febf::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "::",
            "ff02::1",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::1",
        ] {
            assert_eq!(range(text), Range::Never, "{text}");
            assert!(is_never(text), "{text}");
        }
        for name in ["metadata.google.internal", "Metadata.Google.Internal.", "metadata", "instance-data"] {
            assert!(is_never(name), "{name}");
        }
    }

    #[test]
    fn private_addresses_are_told_from_public_ones() {
        for text in [
            "127.0.0.1",
            "127.8.8.8",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "100.127.255.255",
            "::1",
            "fc00::1",
            "fd12:3456::1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
        ] {
            assert_eq!(range(text), Range::Private, "{text}");
        }
        for text in
            ["1.1.1.1", "172.32.0.1", "172.15.0.1", "100.63.0.1", "100.128.0.1", "192.0.2.1", "2606:4700::1"]
        {
            assert_eq!(range(text), Range::Public, "{text}");
        }
    }

    #[test]
    fn a_name_that_public_dns_does_not_know_says_that_it_is_local() {
        for local in
            ["localhost", "LOCALHOST.", "vllm", "vllm.svc", "gpu1.lan", "a.b.internal", "127.0.0.1", "::1"]
        {
            assert!(is_local(local), "{local}");
        }
        for public in ["api.example.com", "localhost.example.com", "internal.example", "example.com."] {
            assert!(!is_local(public), "{public}");
        }
    }
}
