//! Long messages: those that are read, those that are streamed through rings, and which way is the
//! fastest.

pub(super) mod paces;
pub(super) mod pulls;
pub(super) mod streams;
