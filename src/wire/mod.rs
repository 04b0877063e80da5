//! Formats of the data on the wire, as specified in `docs/protocol.md`.

pub mod cm_data;
pub mod introduction;
pub mod msg_xrc;
pub mod raw_key;
pub mod rdm;
pub mod records;
pub mod segment_list;
