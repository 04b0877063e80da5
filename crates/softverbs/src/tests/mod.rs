//! Tests that use the whole device through the table of verbs and change its inner state.

#[cfg(not(loom))]
mod agents;
mod failures;
mod late_claims;
mod locks;
mod objects;
