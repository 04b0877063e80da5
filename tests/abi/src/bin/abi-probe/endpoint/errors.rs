//! Error entries of completion queues, fi_cq_readerr(3): as large as the structure of the
//! application's API version, and with the device's own code if the application requests it. And
//! fi_cq_signal(3), which wakes every waiting thread.

use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::time::{Duration, Instant};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, cq_attr, open_cq};
use libfabric_sys::*;

use super::setup;

const CONTEXT: usize = 0xe44;
/// The value of bytes that the provider must not write.
const UNTOUCHED: u8 = 0xa5;

const fn version(minor: u32) -> u32 {
    1 << 16 | minor
}

pub(super) fn run(lib: &Lib) {
    // `err_data_size` was added in 1.5, `src_addr` in 1.20
    for (minor, size) in [
        (5, offset_of!(fi_cq_err_entry, src_addr)),
        (19, offset_of!(fi_cq_err_entry, src_addr)),
        (20, size_of::<fi_cq_err_entry>()),
    ] {
        let mut old = *lib;
        old.version = version(minor);
        if old.version <= lib.version {
            entries(&old, size);
        }
    }
    signal(lib);
}

/// Produces an error entry: cancels a receive that was not passed to a device.
unsafe fn fail(setup: &Setup) {
    // SAFETY: a whole info and open objects; its address is put back.
    unsafe {
        let info = setup.info.first();
        let (src, len) = ((*info).src_addr, (*info).src_addrlen);
        ((*info).src_addr, (*info).src_addrlen) = (null_mut(), 0);
        let mut ep = null_mut();
        let domain = setup.domain;
        let ret = call!(
            (*domain).ops,
            endpoint,
            domain,
            info,
            &raw mut ep,
            null_mut()
        );
        ((*info).src_addr, (*info).src_addrlen) = (src, len);
        assert_eq!(ret, 0, "fi_endpoint");
        assert_eq!(bind(ep, setup.eq, 0), 0);
        assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        let (none, context) = (null_mut::<c_void>(), without_provenance_mut(CONTEXT));
        assert_eq!(call!((*ep).msg, recv, ep, none, 0, none, 0, context), 0);
        let fid = &raw mut (*ep).fid;
        assert_eq!(call!((*ep).ops, cancel, fid, context), 0);
        assert_eq!(close(ep), 0);
    }
}

#[repr(C, align(8))]
struct Memory([u8; 2 * size_of::<fi_cq_err_entry>()]);

fn entries(lib: &Lib, size: usize) {
    let setup = setup(lib, |_| {});
    // SAFETY: memory with room for the entry, and for the error data that it is told of.
    unsafe {
        for room in [0, 2, 64] {
            fail(&setup);
            let mut memory = Memory([UNTOUCHED; _]);
            let mut data = [UNTOUCHED; 64];
            let entry = memory.0.as_mut_ptr().cast::<fi_cq_err_entry>();
            (*entry).err_data = data.as_mut_ptr().cast();
            (*entry).err_data_size = room;
            let cq = setup.cq;
            assert_eq!(call!((*cq).ops, readerr, cq, entry, 0), 1);
            assert_eq!((*entry).op_context.addr(), CONTEXT);
            assert_eq!((*entry).err, FI_ECANCELED);
            assert_eq!((*entry).flags, FI_RECV | FI_MSG);
            assert_eq!((*entry).olen, 0);
            if room == 0 {
                // memory of the provider, valid until the next read of the queue
                assert_ne!((*entry).err_data.cast_const(), data.as_ptr().cast());
                assert_eq!((*entry).err_data_size, 4);
                let code = (*entry).err_data.cast::<u32>().read_unaligned();
                assert_eq!(code, 0, "the device has reported nothing");
            } else {
                assert_eq!((*entry).err_data_size, room.min(4));
                assert!(data[room.min(4)..].iter().all(|&byte| byte == UNTOUCHED));
            }
            let rest = &memory.0[size..];
            assert!(rest.iter().all(|&byte| byte == UNTOUCHED), "{rest:?}");
            let text = call!(
                (*cq).ops,
                strerror,
                cq,
                (*entry).prov_errno,
                null(),
                null_mut(),
                0
            );
            assert!(!text.is_null() && *text != 0);
            assert_eq!(
                call!((*cq).ops, readerr, cq, entry, 0),
                -(FI_EAGAIN as isize)
            );
        }
        // no buffer: nothing is copied, whatever the size (fi_cq(3))
        fail(&setup);
        let mut entry = std::mem::zeroed::<fi_cq_err_entry>();
        entry.err_data_size = 64;
        let cq = setup.cq;
        assert_eq!(call!((*cq).ops, readerr, cq, &raw mut entry, 0), 1);
        assert!(entry.err_data.is_null());
        assert_eq!(entry.err_data_size, 0, "bytes copied");
    }
    setup.close();
}

/// A reader that is signalled before or while it waits returns long before its timeout; the next
/// reader waits.
fn signal(lib: &Lib) {
    let setup = setup(lib, |_| {});
    let long = 20_000;
    // SAFETY: open queues; the thread ends before they are closed.
    unsafe {
        let cq = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_FD));
        let address = cq.expose_provenance();
        let read = |millis| {
            let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
            let start = Instant::now();
            let to = (&raw mut entry).cast();
            let ret = call!((*cq).ops, sread, cq, to, 1, null(), millis);
            assert_eq!(ret, -(FI_EAGAIN as isize));
            start.elapsed()
        };
        assert_eq!(call!((*cq).ops, signal, cq), 0);
        assert!(read(long) < Duration::from_secs(10), "signalled before");
        assert!(read(50) >= Duration::from_millis(50), "not signalled again");
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let cq = std::ptr::with_exposed_provenance_mut::<fid_cq>(address);
            assert_eq!(call!((*cq).ops, signal, cq), 0);
        });
        assert!(read(long) < Duration::from_secs(10), "signalled meanwhile");
        thread.join().expect("fi_cq_signal");
        assert_eq!(close(cq), 0);
        let cq = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_NONE));
        assert_eq!(call!((*cq).ops, signal, cq), -FI_ENOSYS, "nobody can wait");
        assert_eq!(close(cq), 0);
    }
    setup.close();
}
