//! Operations on regions beyond `fi_mr(3)`: the engine's part of `weft_mr_ops` (`include/weft.h`).

mod advise;
mod grant;
mod memory;
mod share;

pub use advise::AdvisedRange;
pub use grant::HANDLE_SIZE;
pub use memory::{Hint, SharedMemory};
pub(super) use share::ExportedMemory;
