//! What endpoints on XRC have beside their links: circuits, targets, tags. `docs/xrc.md`.

pub(super) mod circuit_cm;
pub(super) mod circuit_queue;
pub(super) mod circuits;
pub(super) mod endpoint;
pub(super) mod ports;
