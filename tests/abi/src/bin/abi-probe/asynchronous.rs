//! Asynchronous registration: an event queue bound to the domain with `FI_REG_MR`
//! (`fi_domain_bind`, `fi_mr(3)`), its events and errors, and regions that are closed before their
//! registration completes.

use std::ffi::c_void;
use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control};
use libfabric_sys::*;

const REMOTE: u64 = FI_REMOTE_READ | FI_REMOTE_WRITE;
const PAGE: usize = 4096;
/// Large enough that several threads fetch its pages.
const LARGE: usize = 96 << 20;

/// Anonymous memory without present pages.
fn map(len: usize, protection: i32) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at
}

/// # Safety
/// The memory outlives the region.
unsafe fn reg(setup: &Setup, at: *mut c_void, len: usize, context: usize) -> (i32, *mut fid_mr) {
    let mut mr = null_mut();
    // SAFETY: an open domain.
    let ret = unsafe {
        let domain = setup.domain;
        let fid = &raw mut (*domain).fid;
        let reg = (*(*domain).mr).reg.expect("a slot");
        let (out, context) = (&raw mut mr, std::ptr::without_provenance_mut(context));
        reg(fid, at, len, REMOTE, 0, 0, 0, out, context)
    };
    (ret, mr)
}

/// The next event, within 30 s: its number and entry.
fn next(eq: *mut fid_eq) -> Result<(u32, fi_eq_entry), isize> {
    let mut event = 0;
    // SAFETY: all zeros is a value of it; the queue is open.
    unsafe {
        let mut entry: fi_eq_entry = std::mem::zeroed();
        let (buf, len) = ((&raw mut entry).cast(), size_of::<fi_eq_entry>());
        let got = call!((*eq).ops, sread, eq, &raw mut event, buf, len, 30_000, 0);
        if got < 0 {
            return Err(got);
        }
        assert_eq!(got, len as isize);
        Ok((event, entry))
    }
}

fn error(eq: *mut fid_eq) -> fi_eq_err_entry {
    // SAFETY: all zeros is a value of it; the queue is open.
    unsafe {
        let mut entry: fi_eq_err_entry = std::mem::zeroed();
        let got = call!((*eq).ops, readerr, eq, &raw mut entry, 0);
        assert!(got > 0, "fi_eq_readerr: {got}");
        entry
    }
}

fn nothing_more(eq: *mut fid_eq) {
    let (mut event, mut entry) = (0, [0_u64; 8]);
    // SAFETY: an open queue.
    let got = unsafe {
        let (buf, len) = (entry.as_mut_ptr().cast(), size_of_val(&entry));
        call!((*eq).ops, read, eq, &raw mut event, buf, len, 0)
    };
    assert_eq!(got, -(FI_EAGAIN as isize));
}

pub(crate) fn run(lib: &Lib) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let eq = setup.eq;
        assert_eq!(bind(setup.domain, eq, FI_SEND), -FI_EBADFLAGS);
        assert_eq!(bind(setup.domain, setup.cq, FI_REG_MR), -FI_EINVAL);
        assert_eq!(
            bind(setup.domain, null_mut::<fid_eq>(), FI_REG_MR),
            -FI_EINVAL
        );
        assert_eq!(bind(setup.domain, eq, FI_REG_MR), 0);
        assert_eq!(
            bind(setup.domain, eq, FI_REG_MR),
            -FI_EINVAL,
            "one is bound"
        );
        assert_eq!(close(eq), -FI_EBUSY, "the domain uses it");
        each_once(&setup, eq);
        refused(&setup, eq);
        withdrawn(&setup, eq);
    }
    setup.close();
    keys(lib);
    println!("regions are registered in the background");
}

/// "A return value of FI_KEY_NOTAVAIL will be returned if the registration has not completed"
/// (fi_mr(3)): also for keys that the application chooses.
fn keys(lib: &Lib) {
    const COUNT: usize = 8;
    let hints = hints(lib);
    // SAFETY: hints have all their parts; fids as they are opened; the memory outlives its regions.
    unsafe {
        (*(*hints.first()).domain_attr).mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED;
        let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
        assert_eq!(bind(setup.domain, setup.eq, FI_REG_MR), 0);
        let at = map(LARGE, libc::PROT_READ | libc::PROT_WRITE);
        let mut early = 0;
        let regions: Vec<_> = (0..COUNT)
            .map(|key| {
                let domain = setup.domain;
                let reg = (*(*domain).mr).reg.expect("a slot");
                let (fid, mut mr) = (&raw mut (*domain).fid, null_mut());
                let (out, context) = (&raw mut mr, null_mut());
                let ret = reg(fid, at, LARGE, REMOTE, 0, key as u64, 0, out, context);
                assert_eq!(ret, 0);
                let shown = (*mr).key;
                assert!([FI_KEY_NOTAVAIL, key as u64].contains(&shown), "{shown:#x}");
                early += usize::from(shown != FI_KEY_NOTAVAIL);
                mr
            })
            .collect();
        assert!(early < COUNT, "the keys of all were there at once");
        for _ in 0..COUNT {
            assert_eq!(next(setup.eq).expect("an event").0, FI_MR_COMPLETE);
        }
        for (mr, key) in regions.into_iter().zip(0..) {
            assert_eq!((*mr).key, key);
            assert_eq!(close(mr), 0);
        }
        libc::munmap(at, LARGE);
        setup.close();
    }
}

/// # Safety
/// Open fids.
unsafe fn each_once(setup: &Setup, eq: *mut fid_eq) {
    let mut open = Vec::new();
    for i in 0..40 {
        let len = if i % 13 == 7 { LARGE } else { PAGE * (1 + i) };
        let at = map(len, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the caller's promise; unmapped behind the close below.
        let (ret, mr) = unsafe { reg(setup, at, len, 1000 + i) };
        assert_eq!(ret, 0);
        assert!(!mr.is_null(), "there when the call returns");
        open.push((mr, at, len, false));
    }
    for _ in 0..open.len() {
        let (event, entry) = next(eq).expect("an event");
        assert_eq!(event, FI_MR_COMPLETE);
        let context = entry.context.addr();
        let (mr, .., told) = &mut open[context - 1000];
        assert!(std::ptr::addr_eq(entry.fid, *mr));
        assert!(!std::mem::replace(told, true), "told once");
        // SAFETY: an open region.
        unsafe {
            assert_ne!((**mr).key, FI_KEY_NOTAVAIL);
            assert_eq!(control(*mr, FI_ENABLE, null_mut()), -FI_EOPBADSTATE);
        }
    }
    nothing_more(eq);
    for (mr, at, len, _) in open {
        // SAFETY: open, and nobody uses the memory.
        unsafe {
            assert_eq!(close(mr), 0);
            libc::munmap(at, len);
        }
    }
}

/// Errors in the arguments are returned by the call; other errors are reported in the queue, and
/// the application must close the region in either case.
///
/// # Safety
/// Open fids.
unsafe fn refused(setup: &Setup, eq: *mut fid_eq) {
    // SAFETY: the caller's promise; the memory outlives the regions.
    unsafe {
        let readable = map(PAGE, libc::PROT_READ);
        assert_eq!(reg(setup, readable, 0, 1).0, -FI_EINVAL);
        nothing_more(eq);
        let (ret, mr) = reg(setup, readable, PAGE, 0x77);
        assert_eq!(ret, 0);
        assert_eq!(next(eq).map(|_| ()), Err(-(FI_EAVAIL as isize)));
        let error = error(eq);
        assert!(std::ptr::addr_eq(error.fid, mr));
        assert_eq!(error.context.addr(), 0x77);
        assert_eq!(error.err, libc::EFAULT);
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL);
        assert_eq!(close(mr), 0);
        libc::munmap(readable, PAGE);
    }
}

/// Many regions, closed at once and at the same time: no region reports an event, and no
/// registration of the memory remains.
///
/// # Safety
/// Open fids.
unsafe fn withdrawn(setup: &Setup, eq: *mut fid_eq) {
    for round in 0..30 {
        let len = if round % 3 == 0 { LARGE } else { 8 * PAGE };
        let at = map(len, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the caller's promise; unmapped behind the close.
        unsafe {
            let (ret, first) = reg(setup, at, len, 1);
            assert_eq!(ret, 0);
            let (ret, second) = reg(setup, at, len, 2);
            assert_eq!(ret, 0);
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            assert_eq!(close(second), 0);
            assert_eq!(close(first), 0);
            libc::munmap(at, len);
        }
        nothing_more(eq);
    }
}
