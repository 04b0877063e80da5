//! `weft-fi`: the provider as libfabric loads it.
//!
//! The only crate that uses libfabric's C structures, and the composition root: it passes the
//! system's verbs and the embedded device to the engine. Entry points are `fi_prov_ini` and the
//! tables of functions in each fid; all of them use `ffi`.
//!
//! A file has the name of a fid, of a manual page, or of its subject. Endpoints have two folders:
//! `data` has the calls that transfer data, `ep` the objects and all other calls.
//!
//! Some objects have two files: `domain` is the object, `domain_ops` its tables of calls and its
//! opening. The tables name the objects that their calls open or bind, and these objects refer to
//! the domain: with the tables in `domain`, the files would use each other. The same holds for
//! `fabric`, `pep` and the endpoints.
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
mod av;
mod cntr;
mod connreq;
mod cq;
mod data;
mod devices;
mod domain;
mod domain_ops;
mod ep;
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
mod opened;
mod pep;
mod pep_ops;
mod poll;
mod poll_members;
mod provider;
mod weft_mr_ops;
mod xrcd;
