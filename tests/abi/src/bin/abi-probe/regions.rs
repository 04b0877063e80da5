//! Regions that are bound and enabled: what `fi_getinfo` says of them, the errnos of each step, and the order of
//! closing (`fi_mr(3)`, `fi_mr_bind`, `fi_mr_enable`).

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::{Infos, getinfo, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{
    Setup, bind, close, control, cq_attr, open_cq, open_domain, open_ep, open_eq, open_fabric,
};
use libfabric_sys::*;

const INVALID: i32 = -FI_EINVAL;
const FLAGS: i32 = -FI_EBADFLAGS;
const BUSY: i32 = -FI_EBUSY;
const STATE: i32 = -FI_EOPBADSTATE;
const BASIC: i32 = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
const REMOTE: u64 = FI_REMOTE_READ | FI_REMOTE_WRITE;

/// Hints that offer these bits and ask for these capabilities.
fn asking(lib: &Lib, mr_mode: i32, caps: u64) -> Infos {
    let hints = hints(lib);
    // SAFETY: hints have all their parts.
    unsafe {
        (*hints.first()).caps = caps;
        (*(*hints.first()).domain_attr).mr_mode = mr_mode;
    }
    hints
}

/// The forms that come back, and their capabilities.
fn forms(lib: &Lib, mr_mode: i32, caps: u64) -> Vec<(i32, u64)> {
    let hints = asking(lib, mr_mode, caps);
    let list = getinfo(
        lib,
        lib.version,
        Some("127.0.0.1"),
        None,
        FI_SOURCE,
        Some(&hints),
    );
    let list = list.map(|list| {
        list.all()
            .iter()
            // SAFETY: what libfabric returns is whole.
            .map(|info| (unsafe { (*info.domain_attr).mr_mode }, info.caps))
            .collect()
    });
    list.unwrap_or_default()
}

pub(crate) fn run(lib: &Lib) {
    offered(lib);
    counted(lib);
    owned(lib);
    plain(lib);
    println!("regions are bound and enabled in their order");
}

/// The capability needs the bit, and the bit alone is not chosen.
fn offered(lib: &Lib) {
    let rma = FI_MSG | FI_RMA;
    assert!(forms(lib, BASIC, rma | FI_RMA_EVENT).is_empty());
    let asked = forms(lib, BASIC | FI_MR_RMA_EVENT, rma | FI_RMA_EVENT);
    assert!(!asked.is_empty());
    for (mode, caps) in asked {
        assert_eq!(mode & FI_MR_RMA_EVENT, FI_MR_RMA_EVENT);
        assert_eq!(caps & FI_RMA_EVENT, FI_RMA_EVENT);
    }
    let special = FI_MR_RMA_EVENT | FI_MR_ENDPOINT | FI_MR_RAW;
    let all = forms(lib, BASIC | special, rma);
    assert_eq!(all[0].0, BASIC, "never merely because they were offered");
    let first = all.iter().position(|(mode, _)| mode & special != 0);
    let rest = &all[first.expect("forms with each of them")..];
    assert!(rest.iter().all(|(mode, _)| mode & special != 0), "last");
    for (mode, caps) in &all {
        assert_eq!(mode & FI_MR_RMA_EVENT != 0, caps & FI_RMA_EVENT != 0);
    }
}

unsafe fn counter(setup: &Setup) -> *mut fid_cntr {
    let (domain, mut cntr) = (setup.domain, null_mut());
    // SAFETY: an open domain.
    let ret = unsafe {
        let (attr, out, context) = (null_mut(), &raw mut cntr, null_mut());
        call!((*domain).ops, cntr_open, domain, attr, out, context)
    };
    assert_eq!(ret, 0, "fi_cntr_open");
    cntr
}

unsafe fn reg(setup: &Setup, memory: &mut [u8], flags: u64) -> Result<*mut fid_mr, i32> {
    let (domain, mut mr) = (setup.domain, null_mut());
    // SAFETY: an open domain, and memory that outlives the region.
    let ret = unsafe {
        let (fid, buf) = (&raw mut (*domain).fid, memory.as_mut_ptr().cast());
        let (out, context) = (&raw mut mr, null_mut());
        let reg = (*(*domain).mr).reg.expect("a slot");
        reg(fid, buf, memory.len(), REMOTE, 0, 0, flags, out, context)
    };
    if ret == 0 { Ok(mr) } else { Err(ret) }
}

fn open(lib: &Lib, mr_mode: i32, caps: u64) -> Setup {
    let hints = asking(lib, mr_mode, caps);
    Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints)
}

fn counted(lib: &Lib) {
    let caps = FI_MSG | FI_RMA | FI_RMA_EVENT;
    let setup = open(lib, BASIC | FI_MR_RMA_EVENT, caps);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let (writes, reads) = (counter(&setup), counter(&setup));
        let mr = reg(&setup, &mut memory, FI_RMA_EVENT).expect("a region");
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "disabled");
        assert!(!(*mr).mem_desc.is_null(), "the descriptor is there at once");
        for flags in [0, FI_SEND, FI_REMOTE_WRITE | FI_SEND] {
            assert_eq!(bind(mr, writes, flags), FLAGS);
        }
        assert_eq!(bind(mr, null_mut::<fid_cntr>(), FI_REMOTE_WRITE), INVALID);
        assert_eq!(bind(mr, setup.cq, FI_REMOTE_WRITE), INVALID);
        assert_eq!(bind(mr, writes, FI_REMOTE_WRITE), 0);
        assert_eq!(bind(mr, reads, FI_REMOTE_WRITE), INVALID, "it has one");
        assert_eq!(close(reads), 0, "what was not bound is free");
        let reads = counter(&setup);
        assert_eq!(bind(mr, reads, FI_REMOTE_READ), 0);
        let ep = open_ep(&setup, setup.info.first());
        assert_eq!(bind(mr, ep, 0), -FI_EOPNOTSUPP, "regions are the domain's");
        assert_eq!(close(ep), 0);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), 0);
        assert_ne!((*mr).key, FI_KEY_NOTAVAIL);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE, "twice");
        assert_eq!(bind(mr, reads, FI_REMOTE_READ), STATE, "after enabling");
        for cntr in [writes, reads] {
            assert_eq!(close(cntr), BUSY, "a region is bound to it");
        }
        // registered without the intention: enabled at once
        let other = reg(&setup, &mut memory, 0).expect("a region");
        assert_ne!((*other).key, FI_KEY_NOTAVAIL);
        assert_eq!(bind(other, reads, FI_REMOTE_READ), STATE);
        assert_eq!(close(other), 0);
        assert_eq!(close(mr), 0);
        // never enabled
        let mr = reg(&setup, &mut memory, FI_RMA_EVENT).expect("a region");
        assert_eq!(bind(mr, writes, REMOTE), 0);
        assert_eq!(close(writes), BUSY);
        assert_eq!(close(mr), 0);
        for cntr in [writes, reads] {
            assert_eq!(close(cntr), 0);
        }
    }
    setup.close();
}

fn owned(lib: &Lib) {
    // forms with endpoints' regions come last
    let hints = asking(lib, BASIC | FI_MR_ENDPOINT, FI_MSG | FI_RMA);
    let (node, flags) = (Some("127.0.0.1"), FI_SOURCE);
    let list = getinfo(lib, lib.version, node, None, flags, Some(&hints)).expect("a list");
    let chosen = list.all().into_iter().find(|info| {
        // SAFETY: what libfabric returns is whole.
        unsafe { (*info.domain_attr).mr_mode & FI_MR_ENDPOINT != 0 }
    });
    let info = std::ptr::from_ref(chosen.expect("a form with endpoints' regions")).cast_mut();
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let fabric = open_fabric(lib, info);
        let domain = open_domain(fabric, info);
        let own = Setup {
            fabric,
            domain,
            eq: open_eq(fabric),
            cq: open_cq(domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_UNSPEC)),
            info: list,
        };
        let (ep, other) = (open_ep(&own, info), open_ep(&own, info));
        let mr = reg(&own, &mut memory, 0).expect("a region");
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "disabled");
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE, "no endpoint");
        assert_eq!(bind(mr, ep, 1), FLAGS);
        assert_eq!(bind(mr, ep, 0), 0);
        assert_eq!(bind(mr, other, 0), INVALID, "it has one");
        assert_eq!(close(other), 0);
        assert_eq!(close(ep), BUSY, "a region is bound to it");
        assert_eq!(control(mr, FI_ENABLE, null_mut()), 0);
        assert_ne!((*mr).key, FI_KEY_NOTAVAIL);
        assert_eq!(bind(mr, ep, 0), STATE);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE);
        assert_eq!(close(ep), BUSY);
        assert_eq!(
            control(ep, FI_ENABLE, null_mut()),
            0,
            "a busy one still works"
        );
        let refused = reg(&own, &mut memory, FI_RMA_EVENT);
        assert_eq!(refused.err(), Some(FLAGS), "the form has no events");
        assert_eq!(close(mr), 0);
        assert_eq!(close(ep), 0);
        own.close();
    }
}

fn plain(lib: &Lib) {
    let setup = open(lib, BASIC, FI_MSG | FI_RMA);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let cntr = counter(&setup);
        let mr = reg(&setup, &mut memory, 0).expect("a region");
        assert_eq!(
            bind(mr, cntr, FI_REMOTE_WRITE),
            -FI_EOPNOTSUPP,
            "without the endpoint's FI_RMA_EVENT"
        );
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE);
        assert_eq!(reg(&setup, &mut memory, FI_RMA_EVENT).err(), Some(FLAGS));
        assert_eq!(close(cntr), 0);
        assert_eq!(close(mr), 0);
    }
    setup.close();
}
