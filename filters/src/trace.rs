//! Traces: whose a call is, and whether its spans are kept.
//!
//! A caller may name its trace (`traceparent`, W3C Trace Context) and say whether it is sampled: then that counts. Of all others a
//! share is kept, as OpenTelemetry's `parentbased_traceidratio` does: the low 56 bits of the trace's id are a number that nobody
//! chose, and it is kept where that number is not below `2^56` less the share of it. Whoever asks with the same share comes to the
//! same answer, and what a small share keeps a larger one keeps too. A call that failed may be kept in any case, which is known at its end.

use std::num::{NonZeroU64, NonZeroU128};

/// Millionths of the whole.
const WHOLE: u32 = 1_000_000;
/// The bits of an id that are random, whoever made it.
const RANDOM_BITS: u32 = 56;

/// The id of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub NonZeroU128);

/// The id of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub NonZeroU64);

/// What a caller says of its own tracing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The trace that the call belongs to.
    pub trace: TraceId,
    /// The span that it was made in.
    pub span: SpanId,
    /// Whether the trace is kept.
    pub is_sampled: bool,
}

/// A share of all traces: those whose low bits are not below this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u128);

/// Which calls are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Of calls whose caller has not decided.
    pub share: Share,
    /// Of those also every one that fails.
    pub failed: bool,
}

/// What becomes of a call's spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// They are kept.
    Kept,
    /// They are kept if the call fails.
    KeptIfFailed,
    /// They are not even made.
    Dropped,
}

impl Parent {
    /// Reads a `traceparent`. Whatever is not exactly one of version 00 is none.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let parts: Vec<&str> = std::str::from_utf8(text).ok()?.splitn(5, '-').collect();
        let ["00", trace, span, flags] = parts.as_slice() else { return None };
        let is_hex = |part: &str, length: usize| {
            part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        if !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
            return None;
        }
        let flags = u8::from_str_radix(flags, 16).ok()?;
        Some(Self {
            trace: TraceId(NonZeroU128::new(u128::from_str_radix(trace, 16).ok()?)?),
            span: SpanId(NonZeroU64::new(u64::from_str_radix(span, 16).ok()?)?),
            is_sampled: flags & 1 == 1,
        })
    }
}

impl Share {
    /// Every trace.
    pub const ALL: Self = Self(0);

    /// So many of a million. `None`: there are no more than all.
    #[must_use]
    pub fn of_millionths(millionths: u32) -> Option<Self> {
        let others = u128::from(WHOLE.checked_sub(millionths)?);
        Some(Self((others << RANDOM_BITS) / u128::from(WHOLE)))
    }

    /// Whether a trace is one of it.
    #[must_use]
    pub const fn keeps(self, trace: TraceId) -> bool {
        trace.0.get() & ((1 << RANDOM_BITS) - 1) >= self.0
    }
}

impl Sampling {
    /// What becomes of a call, whose caller said this or whose own trace is `own`.
    #[must_use]
    pub fn fate(self, parent: Option<&Parent>, own: TraceId) -> Fate {
        match parent {
            Some(Parent { is_sampled: true, .. }) => Fate::Kept,
            Some(Parent { is_sampled: false, .. }) => Fate::Dropped,
            None if self.share.keeps(own) => Fate::Kept,
            None if self.failed => Fate::KeptIfFailed,
            None => Fate::Dropped,
        }
    }
}

impl Fate {
    /// Whether the spans of a call are kept that has ended.
    #[must_use]
    pub const fn is_kept(self, failed: bool) -> bool {
        match self {
            Self::Kept => true,
            Self::KeptIfFailed => failed,
            Self::Dropped => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_core::RngCore as _;

    use super::*;

    fn trace(id: u128) -> TraceId {
        TraceId(NonZeroU128::new(id).unwrap())
    }

    fn share(millionths: u32) -> Share {
        Share::of_millionths(millionths).unwrap()
    }

    #[test]
    fn a_traceparent_is_taken_only_where_it_is_exactly_one() {
        let sane = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = Parent::parse(sane.as_bytes()).unwrap();
        assert_eq!(parent.trace, trace(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736));
        assert_eq!(parent.span.0.get(), 0x00f0_67aa_0ba9_02b7);
        assert!(parent.is_sampled);
        assert!(!Parent::parse(sane.replace("-01", "-00").as_bytes()).unwrap().is_sampled);
        // The flag of level 2 that says how the id was made.
        assert!(Parent::parse(sane.replace("-01", "-03").as_bytes()).unwrap().is_sampled);
        for insane in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert!(Parent::parse(insane.as_bytes()).is_none(), "{insane}");
        }
    }

    #[test]
    fn ids_are_kept_from_the_top_of_their_low_bits() {
        // A tenth: from 0xe6666666666666 on, as OpenTelemetry's threshold for it has it.
        let tenth = share(100_000);
        assert!(tenth.keeps(trace(0xe6_6666_6666_6666)));
        assert!(!tenth.keeps(trace(0xe6_6666_6666_6665)));
        // What stands above says nothing.
        assert!(!tenth.keeps(trace(u128::MAX << RANDOM_BITS)));
        assert!(share(500_000).keeps(trace(0x80_0000_0000_0000)));
        assert!(!share(500_000).keeps(trace(0x7f_ffff_ffff_ffff)));
        assert_eq!(Share::of_millionths(1_000_001), None);
    }

    #[test]
    fn the_callers_word_counts_before_the_share() {
        let said =
            |flags: &str| Parent::parse(format!("00-{:032x}-{:016x}-{flags}", 1, 1).as_bytes()).unwrap();
        let (none, all) = (share(0), Share::ALL);
        for failed in [false, true] {
            let fate = |share, parent: Option<&Parent>| Sampling { share, failed }.fate(parent, trace(1));
            assert_eq!(fate(none, Some(&said("01"))), Fate::Kept);
            assert_eq!(fate(all, Some(&said("00"))), Fate::Dropped, "whatever becomes of it");
            assert_eq!(fate(all, None), Fate::Kept);
            assert_eq!(fate(none, None), if failed { Fate::KeptIfFailed } else { Fate::Dropped });
        }
        let kept = |fate: Fate| [fate.is_kept(false), fate.is_kept(true)];
        assert_eq!(kept(Fate::Kept), [true, true]);
        assert_eq!(kept(Fate::KeptIfFailed), [false, true]);
        assert_eq!(kept(Fate::Dropped), [false, false]);
    }

    #[test]
    fn a_share_is_kept_of_ids_that_nobody_chose() {
        let mut rng = rand_pcg::Pcg64Mcg::new(7);
        let ids: Vec<u64> = std::iter::repeat_with(|| rng.next_u64() | 1).take(10_000).collect();
        for (millionths, wanted) in [(1_000, 10_u64), (100_000, 1_000), (500_000, 5_000), (990_000, 9_900)] {
            let kept = ids.iter().filter(|id| share(millionths).keeps(trace(u128::from(**id)))).count();
            // Four standard deviations of the most uncertain one are 200.
            assert!(u64::try_from(kept).unwrap().abs_diff(wanted) < 200, "{kept} of {wanted}");
        }
    }

    proptest! {
        #[test]
        fn a_larger_share_keeps_what_a_smaller_one_does(id in 1..=u128::MAX, a in 0..=WHOLE, b in 0..=WHOLE) {
            let (small, large) = (share(a.min(b)), share(a.max(b)));
            prop_assert!(!small.keeps(trace(id)) || large.keeps(trace(id)));
            prop_assert!(Share::ALL.keeps(trace(id)) && !share(0).keeps(trace(id)));
        }

        #[test]
        fn arbitrary_bytes_are_no_traceparent_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _read = Parent::parse(&bytes);
        }
    }
}
