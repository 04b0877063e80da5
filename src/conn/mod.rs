//! Connections: the steps of the connection manager (`rdma_cm(7)`) on either side, and the objects
//! that take part in them.

mod request;
mod state;
mod tuning;

pub use request::ConnectRequest;
pub(crate) use request::Taken;
pub(crate) use state::{AtomicState, State};
pub use tuning::Tuning;
