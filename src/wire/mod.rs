//! Formats of what goes over the wire; `docs/protocol.md` is their description.

pub mod cm_data;
pub mod introduction;
pub mod list;
pub mod raw_key;
pub mod records;
