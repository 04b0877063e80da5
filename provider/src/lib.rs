//! `weft-fi`: the provider as libfabric loads it.
//!
//! The only crate that uses libfabric's C structures, and the composition root: it passes the
//! system's verbs and the embedded device to the engine. Entry points are `fi_prov_ini` and the
//! tables of functions in each fid; all of them use `ffi`.
//!
//! Invariants:
//! - A body runs under [`ffi::guard`]: no panic leaves the library, errors are negative errno.
//! - A handle is checked before it is used ([`ffi::fid`]), except on the fast path.
//! - Everything is validated before anything is consumed; outputs are written last.
//! - An object that another one uses can't be closed (`-FI_EBUSY`) until the user is closed.

#![allow(
    unsafe_code,
    reason = "a C interface: its callers promise that their pointers are valid"
)]

mod addr;
mod atomic;
mod atomic_call;
mod av;
mod cm;
mod cntr;
mod connreq;
mod cq;
mod devices;
mod domain;
mod domain_ops;
mod ep;
mod ep_bind;
mod ep_common;
mod ep_control;
mod ep_ops;
mod ep_opt;
mod ep_traits;
mod eq;
pub mod exports;
mod fabric;
mod fabric_ops;
mod ffi;
mod getinfo;
mod identity;
mod monitor;
mod mr;
mod mr_attr;
mod msg;
mod msg_atomic;
mod op_flags;
mod opened;
mod pep;
mod pep_ops;
mod poll;
mod poll_members;
mod provider;
mod rdm_atomic;
mod rdm_ep;
mod rdm_ep_ops;
mod rdm_srx;
mod rdm_srx_ops;
mod rdm_tables;
mod rma;
mod srx;
mod tagged;
mod weft_mr_ops;
mod xrcd;
