//! Wait objects of queues and counters, poll sets, and fi_trywait(3).

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};
use std::time::{Duration, Instant};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, cq_attr, open_cq};
use abi_tests::pair::{LIMIT, Pair, Role};
use libfabric_sys::*;

use super::setup;

const CQ: usize = 0xc0;
const CNTR: usize = 0xca;
const AGAIN: isize = -(FI_EAGAIN as isize);

unsafe fn open_cntr(setup: &Setup, wait_obj: fi_wait_obj) -> *mut fid_cntr {
    let mut attr = fi_cntr_attr {
        events: FI_CNTR_EVENTS_COMP,
        wait_obj,
        wait_set: null_mut(),
        flags: 0,
    };
    let mut cntr = null_mut();
    let domain = setup.domain;
    // SAFETY: an open domain.
    let ret = unsafe {
        call!(
            (*domain).ops,
            cntr_open,
            domain,
            &raw mut attr,
            &raw mut cntr,
            without_provenance_mut(CNTR)
        )
    };
    assert_eq!(ret, 0, "fi_cntr_open");
    cntr
}

unsafe fn trywait<T>(setup: &Setup, object: *mut T) -> c_int {
    let mut list = [object.cast::<fid>()];
    // SAFETY: open objects.
    unsafe {
        let fabric = setup.fabric;
        call!((*fabric).ops, trywait, fabric, list.as_mut_ptr(), 1)
    }
}

unsafe fn descriptor<T>(object: *mut T) -> c_int {
    let mut fd: c_int = -1;
    // SAFETY: an open object.
    unsafe {
        assert_eq!(control(object, FI_GETWAIT, (&raw mut fd).cast()), 0);
    }
    assert!(fd >= 0);
    fd
}

fn readable(fd: c_int, timeout: Duration) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let millis = c_int::try_from(timeout.as_millis()).expect("not long");
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut entry, 1, millis) > 0 }
}

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |_| {});
    // SAFETY: fids as they are opened.
    unsafe {
        // the completion queue of the counted operations has no wait object
        let silent = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE));
        let awake = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_TAGGED, FI_WAIT_FD));
        (*awake).fid.context = without_provenance_mut(CQ);
        let cntr = open_cntr(&setup, FI_WAIT_FD);
        let pair = Pair::connect(lib, &setup, setup.info.first(), |ep, role| {
            if role == Role::Client {
                assert_eq!(bind(ep, silent, FI_TRANSMIT | FI_RECV), 0);
                assert_eq!(bind(ep, cntr, FI_RECV), 0);
            } else {
                assert_eq!(bind(ep, awake, FI_TRANSMIT | FI_RECV), 0);
            }
        });
        counter_wakes(&setup, &pair, cntr);
        poll_set(&setup, &pair, awake, cntr);
        queue_wakes(&setup, &pair, awake);
        assert_eq!(close(cntr), -FI_EBUSY);
        pair.close();
        assert_eq!(close(cntr), 0);
        assert_eq!(close(silent), 0);
        assert_eq!(close(awake), 0);
        let none = open_cntr(&setup, FI_WAIT_NONE);
        assert_eq!(trywait(&setup, none), -FI_EINVAL, "no wait object");
        let mut fd: c_int = -1;
        let ret = control(none, FI_GETWAIT, (&raw mut fd).cast());
        assert_eq!((ret, fd), (-FI_ENODATA, -1));
        assert_eq!(close(none), 0);
    }
    setup.close();
}

unsafe fn send(pair: &Pair) {
    // SAFETY: a connected pair.
    unsafe {
        let one = 1_u64;
        let (from, to) = (pair.server, pair.client);
        let ret = call!(
            (*to).msg,
            recv,
            to,
            null_mut(),
            0,
            null_mut(),
            0,
            null_mut()
        );
        assert_eq!(ret, 0);
        let buf = (&raw const one).cast();
        assert_eq!(call!((*from).msg, inject, from, buf, 0, 0), 0);
    }
}

/// A counter has no operation flags: reading them gives 0, and nothing else can be set.
unsafe fn operation_flags(cntr: *mut fid_cntr) {
    let invalid = -FI_EINVAL;
    // SAFETY: an open counter.
    unsafe {
        let mut flags = 99_u64;
        assert_eq!(control(cntr, FI_GETOPSFLAG, (&raw mut flags).cast()), 0);
        assert_eq!(flags, 0);
        assert_eq!(control(cntr, FI_SETOPSFLAG, (&raw mut flags).cast()), 0);
        flags = FI_COMPLETION;
        let ret = control(cntr, FI_SETOPSFLAG, (&raw mut flags).cast());
        assert_eq!(ret, -FI_EBADFLAGS);
        for command in [FI_GETOPSFLAG, FI_SETOPSFLAG] {
            assert_eq!(control(cntr, command, null_mut()), invalid);
        }
    }
}

unsafe fn counter_wakes(setup: &Setup, pair: &Pair, cntr: *mut fid_cntr) {
    // SAFETY: open objects.
    unsafe {
        let fd = descriptor(cntr);
        let mut kind = 99;
        assert_eq!(control(cntr, FI_GETWAITOBJ, (&raw mut kind).cast()), 0);
        assert_eq!(kind, FI_WAIT_FD);
        operation_flags(cntr);
        for round in 1..=3_u64 {
            assert_eq!(trywait(setup, cntr), 0);
            send(pair);
            let start = Instant::now();
            assert!(readable(fd, LIMIT), "a message woke nobody");
            while call!((*cntr).ops, read, cntr) < round {
                assert!(start.elapsed() < LIMIT);
            }
        }
        // a completion between the read and the wait is reported
        send(pair);
        let start = Instant::now();
        while trywait(setup, cntr) != -FI_EAGAIN {
            assert!(start.elapsed() < LIMIT);
        }
        assert_eq!(trywait(setup, cntr), 0, "told once");
        // so is a change of the counter by the application in between
        assert_eq!(call!((*cntr).ops, add, cntr, 5), 0);
        assert!(readable(fd, LIMIT));
        assert_eq!(call!((*cntr).ops, read, cntr), 9);
    }
}

unsafe fn poll_set(setup: &Setup, pair: &Pair, cq: *mut fid_cq, cntr: *mut fid_cntr) {
    // SAFETY: open objects.
    unsafe {
        let domain = setup.domain;
        let mut set = null_mut();
        let open = (*(*domain).ops).poll_open.expect("a slot");
        let mut attr = fi_poll_attr { flags: 1 };
        assert_eq!(open(domain, &raw mut attr, &raw mut set), -FI_EBADFLAGS);
        assert_eq!(open(domain, null_mut(), null_mut()), -FI_EINVAL);
        assert!(set.is_null());
        attr.flags = 0;
        assert_eq!(open(domain, &raw mut attr, &raw mut set), 0);
        assert_eq!((*set).fid.fclass, FI_CLASS_POLL);
        let ops = (*set).ops;
        let (queue, counter) = (&raw mut (*cq).fid, &raw mut (*cntr).fid);
        assert_eq!(call!(ops, poll_add, set, queue, 1), -FI_EBADFLAGS);
        let wrong = &raw mut (*setup.eq).fid;
        assert_eq!(call!(ops, poll_add, set, wrong, 0), -FI_EINVAL);
        assert_eq!(call!(ops, poll_add, set, null_mut(), 0), -FI_EINVAL);
        assert_eq!(call!(ops, poll_del, set, queue, 0), -FI_EINVAL, "no member");
        assert_eq!(call!(ops, poll_add, set, queue, 0), 0);
        assert_eq!(call!(ops, poll_add, set, counter, 0), 0);
        assert_eq!(close(cq), -FI_EBUSY);

        let mut contexts = [null_mut::<c_void>(); 2];
        let out = contexts.as_mut_ptr();
        let poll = |count| call!(ops, poll, set, out, count);
        assert_eq!(poll(-1), -FI_EINVAL);
        assert_eq!(call!(ops, poll, set, null_mut(), 1), -FI_EINVAL);
        while poll(2) != 0 {} // what came before
        send(pair);
        let start = Instant::now();
        while poll(2) != 1 {
            assert!(start.elapsed() < LIMIT, "the counter was not found");
        }
        assert_eq!(out.read().addr(), CNTR);
        assert_eq!(poll(2), 0, "a counter's news is told once");
        let client = pair.client;
        let server = pair.server;
        let ret = call!(
            (*server).msg,
            recv,
            server,
            null_mut(),
            0,
            null_mut(),
            0,
            null_mut()
        );
        assert_eq!(ret, 0);
        assert_eq!(call!((*client).msg, inject, client, out.cast(), 0, 0), 0);
        assert_eq!(call!((*cntr).ops, add, cntr, 1), 0);
        let start = Instant::now();
        while poll(2) != 2 {
            assert_eq!(call!((*cntr).ops, add, cntr, 1), 0);
            assert!(start.elapsed() < LIMIT, "both were not found");
        }
        assert_eq!(poll(1), 1, "a queue is found until it is read");
        assert_eq!(out.read().addr(), CQ);
        let mut entry = std::mem::zeroed::<fi_cq_tagged_entry>();
        let ret = call!((*cq).ops, read, cq, (&raw mut entry).cast(), 1);
        assert_eq!((ret, entry.flags), (1, FI_RECV | FI_MSG));
        assert_eq!(poll(2), 0);
        assert_eq!(call!(ops, poll_del, set, queue, 0), 0);
        assert_eq!(close(set), 0);
        assert_eq!(close(set), -FI_EINVAL);
    }
}

unsafe fn queue_wakes(setup: &Setup, pair: &Pair, cq: *mut fid_cq) {
    // SAFETY: open objects.
    unsafe {
        let fd = descriptor(cq);
        let mut entry = std::mem::zeroed::<fi_cq_tagged_entry>();
        let to = (&raw mut entry).cast::<c_void>();
        let mut source = 0_u64;
        let start = Instant::now();
        // this side's sends complete in the queue too: read these completions
        while trywait(setup, cq) != 0 {
            call!((*cq).ops, read, cq, to, 1);
            assert!(start.elapsed() < LIMIT);
        }
        let server = pair.server;
        let ret = call!(
            (*server).msg,
            recv,
            server,
            null_mut(),
            0,
            null_mut(),
            0,
            without_provenance_mut(7)
        );
        assert_eq!(ret, 0);
        assert!(!readable(fd, Duration::ZERO));
        let client = pair.client;
        assert_eq!(call!((*client).msg, inject, client, to, 0, 0), 0);
        assert!(readable(fd, LIMIT));
        let ret = call!((*cq).ops, readfrom, cq, to, 1, &raw mut source);
        assert_eq!((ret, source), (1, FI_ADDR_NOTAVAIL));
        assert_eq!(entry.op_context.addr(), 7);
        let none = std::ptr::null();
        let ret = call!((*cq).ops, sread, cq, to, 1, none, 0);
        assert_eq!(ret, AGAIN);
        let start = Instant::now();
        let ret = call!((*cq).ops, sreadfrom, cq, to, 1, &raw mut source, none, 30);
        assert_eq!(ret, AGAIN);
        assert!(start.elapsed() >= Duration::from_millis(30));
        let waiting = cq.expose_provenance();
        let waiter = std::thread::spawn(move || {
            let cq = std::ptr::with_exposed_provenance_mut::<fid_cq>(waiting);
            let mut entry = std::mem::zeroed::<fi_cq_tagged_entry>();
            call!(
                (*cq).ops,
                sread,
                cq,
                (&raw mut entry).cast(),
                1,
                std::ptr::null(),
                -1
            )
        });
        assert_eq!(call!((*cq).ops, signal, cq), 0);
        assert_eq!(waiter.join().expect("the waiter"), AGAIN, "a signal wakes");
    }
}
