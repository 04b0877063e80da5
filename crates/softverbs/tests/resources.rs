//! The device's use of system resources: it returns all of them, continues after a refusal, and has
//! room for many objects.
//!
//! The calls that allocate memory and descriptors are defined here, before those of the C library,
//! so that a test can refuse each of them.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("open_close_cycles", wait_for_child, cycles_child),
        ("refused_memory", wait_for_child, refused_child),
        ("many_connections", wait_for_child, many_child),
        ("no_memory_for_a_queue", wait_for_child, no_memory_child),
        ("a_refused_watch", watch_parent, watched_child),
        ("doorbells_of_one_process", sleeping_parent, ringing_child),
        (
            "killed_before_the_first_message",
            wait_for_child,
            killed_child,
        ),
    ];
    run(cases);
}

/// The child must be a process without any earlier call of the device.
fn wait_for_child(link: &mut Link) {
    link.expect("done");
}

/// Number of the call that is refused; 0: none.
static REFUSED: AtomicU32 = AtomicU32::new(0);

/// Whether this call is the one to refuse.
fn refuse(errno: i32) -> bool {
    let mut now = REFUSED.load(Ordering::Relaxed);
    while now > 0 {
        match REFUSED.compare_exchange(now, now - 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(1) => {
                // SAFETY: the calling thread's own.
                unsafe { *libc::__errno_location() = errno };
                return true;
            }
            Ok(_) => return false,
            Err(other) => now = other,
        }
    }
    false
}

macro_rules! in_front {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $ret:ty, $call:ident, $errno:ident;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $kind),*) -> $ret {
            if refuse(libc::$errno) {
                return -1isize as $ret;
            }
            // SAFETY: the caller's own arguments.
            unsafe { libc::syscall(libc::$call, $($arg),*) as $ret }
        }
    )*};
}

in_front! {
    fallocate(fd: i32, mode: i32, offset: i64, len: i64) -> i32, SYS_fallocate, ENOSPC;
    memfd_create(name: *const i8, flags: u32) -> i32, SYS_memfd_create, ENOMEM;
    ftruncate(fd: i32, len: i64) -> i32, SYS_ftruncate, ENOMEM;
    mmap(addr: *mut u8, len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut u8, SYS_mmap, ENOMEM;
    pipe2(fds: *mut i32, flags: i32) -> i32, SYS_pipe2, EMFILE;
    epoll_create1(flags: i32) -> i32, SYS_epoll_create1, EMFILE;
    timerfd_create(clock: i32, flags: i32) -> i32, SYS_timerfd_create, ENOMEM;
    epoll_ctl(set: i32, what: i32, fd: i32, event: *mut u8) -> i32, SYS_epoll_ctl, ENOSPC;
}

/// Descriptors, threads, mappings of the device's files, and all mappings of this process.
fn resources() -> [usize; 4] {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_files = maps.lines().filter(|line| line.contains("softverbs"));
    // AddressSanitizer's allocator maps a part of each of its arenas at a time, and keeps freed
    // memory.
    let sanitized = std::env::var_os("ASAN_OPTIONS").is_some();
    [
        count("/proc/self/fd"),
        count("/proc/self/task"),
        of_files.count(),
        if sanitized { 0 } else { maps.lines().count() },
    ]
}

/// Undoes the steps in reverse order.
#[derive(Default)]
struct Made(Vec<Box<dyn FnOnce() -> i32>>);

impl Made {
    fn and(&mut self, undo: impl FnOnce() -> i32 + 'static) {
        self.0.push(Box::new(undo));
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        while let Some(undo) = self.0.pop() {
            assert_eq!(undo(), 0);
        }
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn live<T>(object: *mut T) -> Result<*mut T, i32> {
    if object.is_null() {
        Err(errno())
    } else {
        Ok(object)
    }
}

fn zero(ret: i32) -> Result<(), i32> {
    if ret == 0 { Ok(()) } else { Err(ret) }
}

/// Uses every kind of object: two connected queue pairs, a message between them that waits for its
/// receive, and an identifier. Closes all of them; returns an errno if a call was refused.
fn everything() -> Result<(), i32> {
    let fns = verbs();
    let cm = &softverbs::backend().cm;
    let mut made = Made::default();
    // SAFETY: every object is live until it is ended, in the opposite order; all zeros is a value
    // of the structures.
    unsafe {
        let mut count = 0;
        let list = live((fns.ibv_get_device_list)(&raw mut count))?;
        let context = (fns.ibv_open_device)(*list);
        let why = errno();
        (fns.ibv_free_device_list)(list);
        if context.is_null() {
            return Err(why);
        }
        made.and(move || (fns.ibv_close_device)(context));
        let pd = live((fns.ibv_alloc_pd)(context))?;
        made.and(move || (fns.ibv_dealloc_pd)(pd));
        let memory = Box::into_raw(Box::new([0u8; 64]));
        made.and(move || {
            drop(Box::from_raw(memory));
            0
        });
        let access = IBV_ACCESS_LOCAL_WRITE.cast_signed();
        let mr = live((fns.ibv_reg_mr)(pd, memory.cast(), 64, access))?;
        made.and(move || (fns.ibv_dereg_mr)(mr));
        let channel = live((fns.ibv_create_comp_channel)(context))?;
        made.and(move || (fns.ibv_destroy_comp_channel)(channel));
        let cq = live((fns.ibv_create_cq)(
            context,
            16,
            std::ptr::null_mut(),
            channel,
            0,
        ))?;
        made.and(move || (fns.ibv_destroy_cq)(cq));
        let mut init: ibv_srq_init_attr = std::mem::zeroed();
        init.attr.max_wr = 4;
        init.attr.max_sge = 1;
        let srq = live((fns.ibv_create_srq)(pd, &raw mut init))?;
        made.and(move || (fns.ibv_destroy_srq)(srq));
        let mut pair = Vec::new();
        for srq in [srq, std::ptr::null_mut()] {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.srq = srq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 4;
            init.cap.max_recv_wr = 4;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            let qp = live((fns.ibv_create_qp)(pd, &raw mut init))?;
            made.and(move || (fns.ibv_destroy_qp)(qp));
            pair.push(End::of_parts(context, channel, pd, cq, qp));
        }
        let events = live((cm.rdma_create_event_channel)())?;
        made.and(move || {
            (cm.rdma_destroy_event_channel)(events);
            0
        });
        let mut id = std::ptr::null_mut();
        let ret = (cm.rdma_create_id)(events, &raw mut id, std::ptr::null_mut(), RDMA_PS_TCP);
        if ret != 0 {
            return Err(errno());
        }
        made.and(move || (cm.rdma_destroy_id)(id));

        let [to, from] = &mut pair[..] else {
            return Err(0);
        };
        to.enter_init();
        from.enter_init();
        zero(to.try_enter_rtr(from.address()))?;
        zero(from.try_enter_rtr(to.address()))?;
        to.enter_rts();
        from.enter_rts();
        let mut sge = ibv_sge {
            addr: memory as u64,
            length: 8,
            lkey: (*mr).lkey,
        };
        let mut send: ibv_send_wr = std::mem::zeroed();
        send.sg_list = &raw mut sge;
        send.num_sge = 1;
        send.opcode = IBV_WR_SEND;
        send.send_flags = IBV_SEND_SIGNALED;
        let mut bad = std::ptr::null_mut();
        zero(ibv_post_send(from.qp, &raw mut send, &raw mut bad))?;
        let mut receive = ibv_recv_wr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        zero(ibv_post_srq_recv(srq, &raw mut receive, &raw mut bad))?;
        for _ in 0..2 {
            match from.wait(LIMIT).status {
                IBV_WC_SUCCESS => {}
                // the ring could not be opened
                IBV_WC_LOC_QP_OP_ERR => return Err(libc::ENOMEM),
                status => panic!("status {status}"),
            }
        }
    }
    Ok(())
}

fn cycles_child(link: &mut Link) {
    let cycle = |times: u32| {
        for _ in 0..times {
            assert_eq!(everything(), Ok(()));
        }
        resources()
    };
    let after_ten = cycle(10);
    assert_eq!(cycle(990), after_ten);
    eprintln!("descriptors, threads, mappings of files, mappings: {after_ten:?}");
    link.say("done");
}

/// In a separate process: whether `everything` returns the error of the refused call with this
/// number, works without a refusal afterwards, and keeps nothing. `None`: there are fewer calls.
fn refused(number: u32) -> Option<bool> {
    // SAFETY: this process has one thread; the child ends without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let result = std::panic::catch_unwind(|| {
            REFUSED.store(number, Ordering::Relaxed);
            let first = everything();
            if REFUSED.swap(0, Ordering::Relaxed) > 0 {
                return 2;
            }
            let good = matches!(
                first,
                Ok(()) | Err(libc::ENOMEM | libc::EMFILE | libc::ENOSPC)
            );
            assert!(good, "call {number}: {first:?}");
            assert_eq!(everything(), Ok(()), "after call {number}");
            let once = resources();
            assert_eq!(everything(), Ok(()));
            assert_eq!(resources()[..3], once[..3]);
            // as many as without a refusal; the allocator's own mappings may differ
            let expected = EXPECTED.get().copied().unwrap_or(once);
            assert_eq!(once[..3], expected[..3], "call {number}: {first:?}");
            0
        });
        // SAFETY: ends the process.
        unsafe { libc::_exit(result.unwrap_or(1)) };
    }
    let mut status = 0;
    // SAFETY: the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(libc::WIFEXITED(status), "call {number}: status {status:#x}");
    match libc::WEXITSTATUS(status) {
        2 => None,
        code => Some(code == 0),
    }
}

static EXPECTED: std::sync::OnceLock<[usize; 4]> = std::sync::OnceLock::new();

fn refused_child(link: &mut Link) {
    let mut reader = [0; 2];
    // SAFETY: room for two descriptors; the child writes once and ends.
    let expected = unsafe {
        libc::pipe(reader.as_mut_ptr());
        if libc::fork() == 0 {
            assert_eq!(everything(), Ok(()));
            assert_eq!(everything(), Ok(()));
            let now = resources();
            libc::write(reader[1], (&raw const now).cast(), size_of_val(&now));
            libc::_exit(0);
        }
        let mut expected = [0usize; 4];
        let len = size_of_val(&expected);
        let got = libc::read(reader[0], (&raw mut expected).cast(), len);
        assert_eq!(got, len.cast_signed());
        expected
    };
    EXPECTED.set(expected).unwrap();
    let mut calls = 0;
    while let Some(good) = refused(calls + 1) {
        calls += 1;
        assert!(good, "the refusal of call {calls}");
    }
    eprintln!("{calls} calls, each refused once");
    assert!(calls > 20, "{calls} calls");
    link.say("done");
}

/// Queues of the maximum size, in a process that gets no more memory.
fn no_memory_child(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: live objects, valid attributes; plain data.
    unsafe {
        let mut init: ibv_srq_init_attr = std::mem::zeroed();
        init.attr.max_wr = 1 << 15;
        init.attr.max_sge = 32;
        let mut qp_init: ibv_qp_init_attr = std::mem::zeroed();
        qp_init.send_cq = end.cq;
        qp_init.recv_cq = end.cq;
        qp_init.qp_type = IBV_QPT_RC;
        qp_init.cap.max_recv_wr = 1 << 15;
        qp_init.cap.max_recv_sge = 32;
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_AS, &raw mut limit);
        let small = libc::rlimit {
            rlim_cur: pages * 4096 + (4 << 20),
            rlim_max: limit.rlim_max,
        };
        libc::setrlimit(libc::RLIMIT_AS, &raw const small);
        let refused = [
            (verbs().ibv_create_srq)(end.pd, &raw mut init).is_null() && errno() == libc::ENOMEM,
            (verbs().ibv_create_qp)(end.pd, &raw mut qp_init).is_null() && errno() == libc::ENOMEM,
            (verbs().ibv_resize_cq)(end.cq, 1 << 20) == libc::ENOMEM,
        ];
        libc::setrlimit(libc::RLIMIT_AS, &raw const limit);
        assert_eq!(refused, [true; 3]);
        let srq = (verbs().ibv_create_srq)(end.pd, &raw mut init);
        assert!(!srq.is_null());
        assert_eq!((verbs().ibv_destroy_srq)(srq), 0);
    }
    link.say("done");
}

/// 4096 connections in one process, with a /dev/shm as small as in a container.
fn many_child(link: &mut Link) {
    const PAIRS: usize = 4096;
    // SAFETY: this process has one thread; C strings.
    let small = unsafe {
        let root = libc::geteuid() == 0;
        let flags = libc::CLONE_NEWNS | if root { 0 } else { libc::CLONE_NEWUSER };
        let none = std::ptr::null();
        let private = libc::MS_REC | libc::MS_PRIVATE;
        libc::unshare(flags) == 0
            && libc::mount(none, c"/".as_ptr(), none, private, std::ptr::null()) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/dev/shm".as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=64m".as_ptr().cast(),
            ) == 0
    };
    if !small {
        eprintln!("no mount namespace here: with the machine's own /dev/shm");
    }
    let first = End::with(8, 8, 1);
    let receive = first.buffer(&[0; 8]);
    let make = || {
        // SAFETY: live objects of one context; all zeros is a value of it.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = first.cq;
            init.recv_cq = first.cq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 16;
            init.cap.max_recv_wr = 16;
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            let qp = (verbs().ibv_create_qp)(first.pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            first.with_qp(qp)
        }
    };
    let mut pairs: Vec<_> = (0..PAIRS).map(|_| (make(), make())).collect();
    for (i, (from, to)) in pairs.iter_mut().enumerate() {
        from.enter_rtr(to.address());
        to.enter_rtr(from.address());
        from.enter_rts();
        to.enter_rts();
        to.recv(&receive, i as u64);
    }
    for (i, (from, to)) in pairs.iter_mut().enumerate() {
        let flags = IBV_SEND_INLINE;
        from.send_unregistered(&mut [1; 8], Some(i as u32), flags, 0);
        let wc = to.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i as u64));
        assert_eq!(wc.imm, Some(i as u32));
    }
    for (from, to) in pairs {
        // SAFETY: live, and not used any more.
        unsafe {
            assert_eq!((verbs().ibv_destroy_qp)(from.qp), 0);
            assert_eq!((verbs().ibv_destroy_qp)(to.qp), 0);
        }
    }
    link.say("done");
}

/// After any refused call during the opening of a process, a later successful opening detects the
/// process's end.
fn watch_parent(link: &mut Link) {
    let mut end = End::create(link, 4, 4, 1);
    let other = end.exchange(link);
    link.expect("connected");
    let mut refusals = Vec::new();
    for number in 1.. {
        REFUSED.store(number, Ordering::Relaxed);
        let ret = end.try_enter_rtr(other);
        REFUSED.store(0, Ordering::Relaxed);
        if ret == 0 {
            break;
        }
        refusals.push(ret);
    }
    // the pidfd and the life pipe
    let watches = refusals.iter().filter(|&&errno| errno == libc::ENOSPC);
    assert_eq!(watches.count(), 2, "{refusals:?}");
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 3);
    link.kill();
    let flushed = end.sleep(LIMIT);
    assert_eq!((flushed.wr_id, flushed.status), (3, IBV_WC_WR_FLUSH_ERR));
}

fn watched_child(link: &mut Link) {
    let mut end = End::create(link, 4, 4, 1);
    let other = end.exchange(link);
    end.enter_rtr(other);
    link.say("connected");
    link.wait_end();
}

/// Number of channels that a process sleeps on. The descriptors that its senders need for it are
/// bounded.
const CHANNELS: usize = 150;

fn ringing_child(link: &mut Link) {
    let before = resources()[0];
    for _ in 0..CHANNELS {
        let mut end = End::connect(link, 4, 4, 1);
        link.expect("asleep");
        end.send_unregistered(&mut [1; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        link.expect("awake");
        // SAFETY: live, and not used any more.
        unsafe {
            assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0);
            assert_eq!((verbs().ibv_destroy_cq)(end.cq), 0);
            assert_eq!((verbs().ibv_destroy_comp_channel)(end.channel), 0);
            assert_eq!((verbs().ibv_dealloc_pd)(end.pd), 0);
            assert_eq!((verbs().ibv_close_device)(end.context), 0);
        }
    }
    let more = resources()[0] - before;
    // 64 doorbells, and the descriptors of the device and of the other process
    assert!((65..90).contains(&more), "{more} descriptors");
}

fn sleeping_parent(link: &mut Link) {
    let mut kept = Vec::new();
    for _ in 0..CHANNELS {
        let mut end = End::connect(link, 4, 4, 1);
        let receive = end.buffer(&[0; 8]);
        end.recv(&receive, 1);
        // SAFETY: live queue.
        assert_eq!(unsafe { ibv_req_notify_cq(end.cq, 0) }, 0);
        link.say("asleep");
        assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
        link.say("awake");
        kept.push(end);
    }
}

/// A process ends between a receive and the first message for it, so its ring can no longer be
/// opened. This is not an error of the sender.
fn killed_child(link: &mut Link) {
    for round in 0..50 {
        let mut end = End::with(4, 4, 1);
        let address = end.address();
        let (mut there, mut back) = ([0; 2], [0; 2]);
        // SAFETY: room for two descriptors each; this process has one thread, and the child opens
        // its own device.
        let child = unsafe {
            assert_eq!(libc::pipe(there.as_mut_ptr()), 0);
            assert_eq!(libc::pipe(back.as_mut_ptr()), 0);
            libc::fork()
        };
        let mut bytes = [0u8; 20];
        if child == 0 {
            let mut other = End::with(4, 4, 1);
            let own = other.address();
            bytes[..4].copy_from_slice(&own.qpn.to_ne_bytes());
            bytes[4..].copy_from_slice(&own.gid.to_ne_bytes());
            other.enter_rtr(address);
            let receive = other.buffer(&[0; 8]);
            // SAFETY: readable bytes, and room for one; ends here.
            unsafe {
                libc::write(back[1], bytes.as_ptr().cast(), bytes.len());
                libc::read(there[0], bytes.as_mut_ptr().cast(), 1);
                other.recv(&receive, 1);
                libc::kill(libc::getpid(), libc::SIGKILL);
                unreachable!();
            }
        }
        // SAFETY: room for this number of bytes, and one readable byte; the child made above, which
        // is waited for once.
        unsafe {
            libc::close(back[1]);
            assert_eq!(
                libc::read(back[0], bytes.as_mut_ptr().cast(), bytes.len()),
                20
            );
            let (qpn, gid) = bytes.split_at(4);
            end.enter_rtr(Address {
                qpn: u32::from_ne_bytes(qpn.try_into().unwrap()),
                gid: u128::from_ne_bytes(gid.try_into().unwrap()),
            });
            end.enter_rts();
            end.send_unregistered(&mut [1; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 1);
            assert_eq!(libc::write(there[1], [1u8].as_ptr().cast(), 1), 1);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            let status = end.wait(LIMIT).status;
            assert_eq!(status, IBV_WC_RETRY_EXC_ERR, "round {round}");
            for fd in [there[0], there[1], back[0]] {
                libc::close(fd);
            }
        }
    }
    link.say("done");
}
