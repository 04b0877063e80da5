//! The calls that transfer data, on endpoints of any kind: `fi_msg(3)`, `fi_tagged(3)`, `fi_rma(3)`
//! and `fi_atomic(3)`. Each file has the entry points and the tables of one of them; [`traits`] has
//! what a kind implements for them.

pub(crate) mod atomic;
pub(crate) mod atomic_call;
pub(crate) mod msg;
pub(crate) mod rma;
pub(crate) mod tagged;
pub(crate) mod traits;
