//! `fid_ep`: endpoints and shared receive contexts, `fi_endpoint(3)` and `fi_cm(3)`.
//!
//! The prefix of a file is the kind: `msg_` connected endpoints (`FI_EP_MSG`), `rdm_` endpoints
//! with many peers (`FI_EP_RDM`). The files without a prefix are for both; [`cm`] and [`opt`] serve
//! passive endpoints too. Of each kind, `_ep` is the object with the operations of the traits of
//! [`data`](crate::data), `_ep_ops` its other tables of calls and its opening; `_srx` is the shared
//! receive context, of which only `rdm_` has `_srx_ops`, because [`opt`] has calls of it. In
//! [`data`](crate::data), `msg` is `fi_msg(3)`.

mod bind;
pub(crate) mod cm;
mod common;
mod control;
mod msg_atomic;
pub(crate) mod msg_ep;
mod msg_ep_ops;
pub(crate) mod msg_srx;
mod op_flags;
pub(crate) mod open;
pub(crate) mod opt;
pub(crate) mod query_atomic;
mod rdm_atomic;
pub(crate) mod rdm_ep;
mod rdm_ep_ops;
mod rdm_srx;
pub(crate) mod rdm_srx_ops;
mod rdm_tables;
