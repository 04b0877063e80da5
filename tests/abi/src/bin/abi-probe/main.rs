//! One role of a test in one libfabric: `abi-probe LIBFABRIC ROLE [ARGUMENT...]`. Panics if a check
//! fails.

#![allow(unsafe_code, reason = "calls a C library as an application does")]

mod advise;
mod asynchronous;
mod auth;
mod backlog;
mod bad_input;
mod endpoint;
mod fault;
mod hints;
mod listing;
mod matrix;
mod order;
mod quiet;
mod regions;
mod shared;
mod slots;
mod transfer;
mod unregistered;
mod xrcd;

use abi_tests::load::Lib;
use libfabric_sys::{FI_EP_MSG, FI_EP_RDM};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("the path of a libfabric");
    let role = args.next().expect("a role");
    let rest = args.collect::<Vec<_>>();
    let lib = Lib::open(&path);
    match role.as_str() {
        "advise" => advise::run(&lib),
        "advise-refused" => advise::refused(&lib),
        "advise-disabled" => advise::disabled(&lib),
        "shared" => shared::run(&lib),
        "shared-exporter" => shared::exporter(&lib),
        "shared-importer" => shared::importer(&lib, &rest[0]),
        "shared-storer" => shared::storer(&lib, &rest[0]),
        "shared-stranger" => shared::stranger(&lib, &rest[0]),
        "unregistered" => unregistered::run(&lib),
        "xrcd" => xrcd::run(&lib),
        "xrcd-find" => xrcd::find(&lib, &rest[0]),
        "list" => listing::run(&lib),
        "hints" => hints::run(&lib),
        "bad-input" => bad_input::run(&lib),
        "endpoint" => endpoint::run(&lib),
        "matrix" => matrix::run(&lib, FI_EP_MSG, false),
        "matrix-xrc" => matrix::run(&lib, FI_EP_MSG, true),
        "matrix-rdm" => matrix::run(&lib, FI_EP_RDM, false),
        "matrix-rdm-xrc" => matrix::run(&lib, FI_EP_RDM, true),
        "matrix-both" => {
            matrix::run(&lib, FI_EP_MSG, false);
            matrix::run(&lib, FI_EP_RDM, false);
        }
        "slots" => slots::run(&lib),
        "order" => order::run(&lib),
        "quiet" => quiet::run(&lib),
        "asynchronous" => asynchronous::run(&lib),
        "regions" => regions::run(&lib),
        "fault" => fault::run(&lib, &rest[0]),
        "backlog" => backlog::run(&lib, rest[0].parse().expect("a number")),
        "serve" => transfer::serve(&lib),
        "access" => transfer::access(&lib, &rest[0]),
        other => panic!("no role is called {other}"),
    }
    // The library's destructor calls the provider's clean-up; then the process exits normally.
    lib.close();
}
