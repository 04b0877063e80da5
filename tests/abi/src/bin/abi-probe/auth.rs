//! Authorization keys in `fi_getinfo`, of domains and of endpoints (`fi_domain(3)`,
//! `fi_endpoint(3)`, *auth_key*).

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::{getinfo, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, close, open_ep};
use libfabric_sys::*;

/// A copy that `fi_freeinfo` frees.
unsafe fn copy(bytes: &[u8]) -> *mut u8 {
    // SAFETY: new memory of that size.
    unsafe {
        let to: *mut u8 = libc::malloc(bytes.len()).cast();
        assert!(!to.is_null());
        to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        to
    }
}

/// The key in a structure with an authorization key.
unsafe fn key<'a>(at: *const u8, size: usize) -> &'a [u8] {
    if size == 0 {
        return &[];
    }
    assert!(!at.is_null());
    // SAFETY: the contract of fi_getinfo(3).
    unsafe { std::slice::from_raw_parts(at, size) }
}

unsafe fn cm_data_size(ops: *mut fi_ops_ep, handle: *mut fid) -> usize {
    let (mut value, mut len) = (0_usize, size_of::<usize>());
    let (to, name) = ((&raw mut value).cast(), FI_OPT_CM_DATA_SIZE.cast_signed());
    // SAFETY: an open endpoint of either kind.
    let ret = unsafe { call!(ops, getopt, handle, 0, name, to, &raw mut len) };
    assert_eq!(ret, 0, "fi_getopt");
    value
}

pub(crate) fn run(lib: &Lib) {
    let long = [9_u8; 65];
    for (of_domain, of_ep, found) in [
        (&b""[..], &b""[..], true),
        (b"job 7", b"", true),
        (b"", &long[..64], true),
        (&long[..64], b"x", true),
        (&long, b"", false),
        (b"", &long, false),
    ] {
        let asked = hints(lib);
        // SAFETY: hints have all their parts, and are freed as a whole.
        unsafe {
            let info = asked.first();
            (*info).caps = FI_MSG | FI_RMA;
            let (domain, ep) = ((*info).domain_attr, (*info).ep_attr);
            (*domain).mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            if !of_domain.is_empty() {
                ((*domain).auth_key, (*domain).auth_key_size) = (copy(of_domain), of_domain.len());
            }
            if !of_ep.is_empty() {
                ((*ep).auth_key, (*ep).auth_key_size) = (copy(of_ep), of_ep.len());
            }
        }
        let node = Some("127.0.0.1");
        let list = getinfo(lib, lib.version, node, None, FI_SOURCE, Some(&asked));
        let Ok(list) = list else {
            assert!(!found, "{of_domain:?} {of_ep:?}");
            continue;
        };
        assert!(found, "{of_domain:?} {of_ep:?}");
        for info in list.all() {
            // SAFETY: what libfabric returns is whole.
            unsafe {
                let (domain, ep) = (info.domain_attr, info.ep_attr);
                assert_eq!(key((*domain).auth_key, (*domain).auth_key_size), of_domain);
                assert_eq!(key((*ep).auth_key, (*ep).auth_key_size), of_ep);
            }
        }
        let setup = Setup::new(lib, node, None, FI_SOURCE, &asked);
        let keyed = !of_domain.is_empty() || !of_ep.is_empty();
        // SAFETY: fids as they are opened; an info of ours, changed for a moment.
        unsafe {
            let (fabric, info) = (setup.fabric, setup.info.first());
            let room = if keyed { 27 } else { 35 };
            let ep = open_ep(&setup, info);
            assert_eq!(cm_data_size((*ep).ops, ep.cast()), room);
            assert_eq!(close(ep), 0);
            let mut pep = null_mut();
            let open = (*(*fabric).ops).passive_ep.expect("a slot");
            assert_eq!(open(fabric, info, &raw mut pep, null_mut()), 0);
            // of a request event: peers that are not weft send more than endpoints of weft
            assert_eq!(cm_data_size((*pep).ops, pep.cast()), 55);
            assert_eq!(close(pep), 0);
            let attr = (*info).domain_attr;
            let was = ((*attr).auth_key, (*attr).auth_key_size);
            ((*attr).auth_key, (*attr).auth_key_size) = (long.as_ptr().cast_mut(), long.len());
            let mut domain = null_mut();
            let open = (*(*fabric).ops).domain.expect("a slot");
            let ret = open(fabric, info, &raw mut domain, null_mut());
            ((*attr).auth_key, (*attr).auth_key_size) = was;
            assert_eq!(ret, -FI_EINVAL, "a long key");
        }
        setup.close();
    }
    println!("authorization keys are taken and handed back");
}
