//! libFuzzer around one target, which `FUZZ_TARGET` names: one program for all, so that it is linked once.

#![no_main]

use std::sync::LazyLock;

use fuzz_targets::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    match fuzz_targets::target(&name) {
        Some(target) => target,
        None => {
            let known: Vec<_> = fuzz_targets::TARGETS.iter().map(|target| target.name).collect();
            #[expect(clippy::panic, reason = "nothing to fuzz")]
            {
                panic!("FUZZ_TARGET must be one of {known:?}, not `{name}`")
            }
        }
    }
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
