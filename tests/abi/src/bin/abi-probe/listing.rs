//! libfabric finds the provider, and its `fi_info` is complete.

use abi_tests::fabric::{getinfo, hints, text};
use abi_tests::load::Lib;
use libfabric_sys::*;

pub(crate) fn run(lib: &Lib) {
    // API versions that applications request, up to the library's own
    for version in [
        fi_version(1, 5),
        fi_version(1, 11),
        fi_version(1, 17),
        fi_version(1, 21),
        fi_version(2, 1),
        lib.version,
    ] {
        if version > lib.version {
            continue;
        }
        let list = getinfo(lib, version, None, None, 0, Some(&hints(lib))).expect("a list");
        for info in list.all() {
            check(info, version);
        }
        // SAFETY: an fi_info of this library; the copy is freed at once; `fi_tostr` returns its own
        // buffer.
        unsafe {
            let copy = (lib.dupinfo)(list.first());
            assert!(!copy.is_null());
            check(&*copy, version);
            let printed = text((lib.tostr)(copy.cast_const().cast(), FI_TYPE_INFO));
            for word in ["soft0", "FI_EP_MSG", "fi_device_attr", "FI_LINK_UP"] {
                assert!(printed.contains(word), "no {word} in\n{printed}");
            }
            (lib.freeinfo)(copy);
        }
    }
    let everything = getinfo(lib, lib.version, None, None, 0, None).expect("a list");
    let ours = everything
        .all()
        .iter()
        // SAFETY: parts of a list of libfabric's.
        .filter(|info| unsafe { text((*info.fabric_attr).prov_name) } == "weft")
        .count();
    assert!(ours > 0, "not listed without hints");
    println!(
        "listed by libfabric {}.{}",
        fi_major(lib.version),
        fi_minor(lib.version)
    );
}

fn check(info: &fi_info, version: u32) {
    // SAFETY: parts of an fi_info of libfabric's; its name, domain and addresses are ours.
    unsafe {
        assert_eq!(text((*info.fabric_attr).prov_name), "weft");
        assert!(!text((*info.fabric_attr).name).is_empty());
        assert_eq!((*info.fabric_attr).api_version, version);
        assert!(!text((*info.domain_attr).name).is_empty());
        assert_eq!((*info.ep_attr).type_, FI_EP_MSG);
        assert!(!info.src_addr.is_null() && info.src_addrlen >= 16);
        assert_eq!(info.caps & (FI_MSG | FI_RMA), FI_MSG | FI_RMA);
        assert!((*info.tx_attr).size > 0 && (*info.rx_attr).size > 0);
        assert!((*info.ep_attr).max_msg_size > 0);
        assert!(!info.nic.is_null());
        assert_eq!(
            text((*(*info.nic).device_attr).name),
            text((*info.domain_attr).name)
        );
    }
}
