//! What verbs can do with regions beyond `fi_mr(3)`: the provider's `weft_mr_ops`.

mod advise;
mod grant;
mod memory;
mod share;

pub use advise::AdvisedRange;
pub use grant::HANDLE_SIZE;
pub use memory::{Hint, SharedMemory};
pub(super) use share::Shared;
