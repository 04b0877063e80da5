//! All fuzz targets in one program, called by libFuzzer. `FUZZ_TARGET` selects the target.

#![no_main]

mod getinfo;

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 19] = [
    ("agent", softverbs::fuzz::agent),
    ("arena", softverbs::fuzz::arena),
    ("cm_message", softverbs::fuzz::cm_message),
    ("pending", softverbs::fuzz::pending),
    ("regions", softverbs::fuzz::regions),
    ("registry", softverbs::fuzz::registry),
    ("ring", softverbs::fuzz::ring),
    ("ring_rubbish", softverbs::fuzz::ring_rubbish),
    ("srq", softverbs::fuzz::srq),
    ("states", softverbs::fuzz::states),
    ("stranger", softverbs::fuzz::stranger),
    ("stranger_xrc", softverbs::fuzz::stranger_xrc),
    ("tables", softverbs::fuzz::tables),
    ("slots", weft::fuzz::slots),
    ("cm_data", weft::fuzz::cm_data),
    ("lookup", weft::fuzz::lookup),
    ("rdm_peer", weft::fuzz::rdm_peer),
    ("rdm_wire", weft::fuzz::rdm_wire),
    ("getinfo", getinfo::getinfo),
];

fn target() -> Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    *TARGET.get_or_init(|| {
        let wanted = std::env::var("FUZZ_TARGET").unwrap_or_default();
        TARGETS
            .iter()
            .find(|(name, _)| *name == wanted)
            .unwrap_or_else(|| panic!("no target is called `{wanted}`"))
            .1
    })
}

fuzz_target!(|data: &[u8]| {
    // the provider's panic hook suppresses the message, also for panics of a target
    if let Err(panic) = std::panic::catch_unwind(|| target()(data)) {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        eprintln!("panicked: {}", text.unwrap_or("?"));
        std::process::abort();
    }
});
