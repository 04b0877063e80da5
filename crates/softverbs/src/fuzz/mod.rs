//! Properties of code with an algebra, and of code that reads data of other processes, driven by
//! bytes.
//!
//! Each function here is two things: a property test, which gets random bytes in `cargo test` and
//! finds the shortest input that fails, and a fuzz target (`make fuzz TARGET=ring`), which gets
//! bytes that lead to new code. It panics if a property does not hold. The fuzz targets run under
//! `AddressSanitizer`.

mod agent;
mod arena;
mod packets;
mod pending;
mod region;
mod registry;
mod ring;
mod srq;
mod states;
pub(crate) mod stranger;
mod stranger_xrc;
mod tables;
mod xrc;

pub use agent::agent;
pub use arena::arena;
pub use packets::cm_message;
pub use pending::pending;
pub use region::regions;
pub use registry::registry;
pub use ring::{ring, ring_rubbish};
pub use srq::srq;
pub use states::states;
pub use stranger::stranger;
pub use stranger_xrc::stranger_xrc;
pub use tables::tables;

use crate::testing::Input;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Tests of these names, each with a number of inputs and a maximum length.
    macro_rules! properties {
        ($($name:ident: $cases:literal of $bytes:literal;)+) => {$(
            #[test]
            fn $name() {
                let config = ProptestConfig {
                    cases: $cases,
                    // A failing input is added as a separate test. Nothing is written to the tree.
                    failure_persistence: None,
                    ..ProptestConfig::default()
                };
                proptest!(config, |(data in prop::collection::vec(any::<u8>(), 0..$bytes))| {
                    super::$name(&data);
                });
            }
        )+};
    }

    properties! {
        agent: 96 of 1200;
        arena: 256 of 600;
        cm_message: 2000 of 300;
        pending: 512 of 400;
        regions: 128 of 2000;
        registry: 200 of 400;
        ring: 128 of 4000;
        ring_rubbish: 256 of 1000;
        srq: 128 of 1000;
        states: 128 of 400;
        stranger: 96 of 600;
        stranger_xrc: 128 of 1500;
        tables: 256 of 600;
    }
}
