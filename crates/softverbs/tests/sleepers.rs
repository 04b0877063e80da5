//! Programs that sleep on descriptors, and threads that share a channel.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::collections::HashSet;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn main() {
    run(&[
        // in the parent's process, before any other call of it has slept
        (
            "a_remote_failure_is_seen_asleep",
            failed_parent,
            failing_child,
        ),
        (
            "a_descriptor_is_readable_for_events_only",
            unread_parent,
            unread_child,
        ),
        ("a_message_behind_an_event_is_none", late_parent, late_child),
        ("retries_end_while_asleep", retries_parent, idle_child),
        ("barriers_are_refused_later", echoing_parent, refused_child),
        ("another_program", another_parent, another_child),
        ("events_and_destroyed_queues", destroyed_parent, nothing),
        ("events_and_destroyed_queue_pairs", fatal_parent, nothing),
    ]);
}

/// Whether the descriptor becomes readable.
fn readable(fd: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element.
    unsafe { libc::poll(&raw mut poll, 1, LIMIT.as_millis() as i32) == 1 }
}

/// Arms, posts, and sleeps on the descriptor without a further call of the device.
fn retries_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.rnr_retry = 1;
    end.join(link);
    let mut buffer = end.buffer(&[1; 8]);
    // SAFETY: live queue.
    assert_eq!(unsafe { ibv_req_notify_cq(end.cq, 0) }, 0);
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 6);
    // SAFETY: live channel.
    assert!(readable(unsafe { (*end.channel).fd }), "no clock was set");
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_RNR_RETRY_EXC_ERR, 6));
    link.say("done");
}

fn idle_child(link: &mut Link) {
    let _end = End::connect(link, 16, 16, 1);
    link.expect("done");
}

/// Number of messages in each direction.
const ECHOES: u32 = 200;

fn echoing_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let (receive, mut message) = (end.buffer(&[0; 8]), end.buffer(&[1; 8]));
    end.recv(&receive, 1);
    end.join(link);
    for _ in 0..ECHOES {
        assert_eq!(end.sleep(LIMIT).wr_id, 1);
        end.recv(&receive, 1);
        end.send(&mut message, 8, None, 0, 2);
    }
    link.expect("done");
}

/// Whether the kernel has barriers, and the environment permits them.
fn has_barriers() -> bool {
    const QUERY: i32 = 0;
    const GLOBAL_EXPEDITED: i64 = 1 << 1;
    // SAFETY: a query without memory.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, QUERY, 0) };
    let forbidden = std::env::var_os("SOFTVERBS_NO_MEMBARRIER").is_some();
    !forbidden && commands > 0 && commands & GLOBAL_EXPEDITED != 0
}

/// A filter of system calls takes the barriers away while the device is in use: this process sleeps
/// before each message, and says once what it does.
fn refused_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let (receive, mut message) = (end.buffer(&[0; 8]), end.buffer(&[1; 8]));
    end.recv(&receive, 1);
    end.join(link);
    let had = has_barriers();
    refuse::refuse(&[libc::SYS_membarrier]);
    let lines = std::env::temp_dir().join(format!("softverbs-said-{}", std::process::id()));
    let file = std::fs::File::create(&lines).unwrap();
    // SAFETY: two descriptors of this process; the output on its standard error stream is read
    // below.
    let old = unsafe {
        let old = libc::dup(2);
        assert!(libc::dup2(file.as_raw_fd(), 2) == 2);
        old
    };
    for _ in 0..ECHOES {
        end.send(&mut message, 8, None, 0, 2);
        assert_eq!(end.sleep(LIMIT).wr_id, 1);
        end.recv(&receive, 1);
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::dup2(old, 2) }, 2);
    let said = std::fs::read_to_string(&lines).unwrap();
    std::fs::remove_file(&lines).unwrap();
    assert_eq!(
        said.matches("membarrier").count(),
        usize::from(had),
        "{said}"
    );
    link.say("done");
}

/// The other end fails this end's queue pair; no queue here was ever armed.
fn failed_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    link.say("go");
    link.expect("failed");
    // SAFETY: live context.
    assert!(readable(unsafe { (*end.context).async_fd }), "nobody rang");
    assert_eq!(end.async_event(), IBV_EVENT_QP_ACCESS_ERR);
    link.say("done");
}

fn failing_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let buffer = end.buffer(&[1; 8]);
    link.expect("go");
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, 0x1000, 0x00de_ad00, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
    link.say("failed");
    link.expect("done");
}

/// Whether the descriptor is readable now.
fn is_readable(fd: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// The descriptor is blocking: a call without an event would not return.
fn unread_parent(link: &mut Link) {
    for at in 0..4 {
        let mut end = End::connect(link, 16, 16, 1);
        // SAFETY: live context.
        let fd = unsafe { (*end.context).async_fd };
        link.say("go");
        link.expect("failed");
        assert!(readable(fd), "nobody rang");
        if at % 2 == 1 {
            // SAFETY: live, and not used any more.
            assert_eq!(unsafe { (verbs().ibv_destroy_qp)(end.qp) }, 0);
        } else {
            assert_eq!(end.async_event(), IBV_EVENT_QP_ACCESS_ERR);
        }
        assert!(!is_readable(fd), "{at}");
        link.say("done");
    }
}

fn unread_child(link: &mut Link) {
    for _ in 0..4 {
        failing_child(link);
    }
}

/// A message arrives behind that of an event that was not taken yet, while the queue is not armed.
/// The call that takes the event takes the message too, so that it makes the channel not readable.
fn late_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    end.recv(&receive, 2);
    end.join(link);
    // SAFETY: live context, and queues of this test; all zeros is a value of the structure.
    unsafe {
        let other = (verbs().ibv_create_cq)(end.context, 4, null_mut(), null_mut(), 0);
        assert!(!other.is_null());
        assert_eq!(ibv_req_notify_cq(end.cq, 0), 0);
        link.say("armed");
        link.expect("sent");
        let fd = (*end.channel).fd;
        let begin = Instant::now();
        while !is_readable(fd) {
            assert!(begin.elapsed() < LIMIT, "no event");
        }
        // takes the first message, for which an event is queued
        let mut wc: ibv_wc = std::mem::zeroed();
        assert_eq!(ibv_poll_cq(other, 1, &raw mut wc), 0);
        link.say("taken");
        link.expect("sent");
        let (mut cq, mut context) = (null_mut(), null_mut());
        let got = (verbs().ibv_get_cq_event)(end.channel, &raw mut cq, &raw mut context);
        assert_eq!((got, cq), (0, end.cq));
        (verbs().ibv_ack_cq_events)(cq, 1);
        assert!(!is_readable(fd));
        assert_eq!(ibv_req_notify_cq(cq, 0), 0);
        assert_eq!([end.wait(LIMIT).wr_id, end.wait(LIMIT).wr_id], [1, 2]);
        assert!(!is_readable(fd));
    }
    link.say("done");
}

fn late_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&[1; 8]);
    for before in ["armed", "taken"] {
        link.expect(before);
        end.send(&mut buffer, 8, None, 0, 6);
        link.say("sent");
    }
    link.expect("done");
}

/// The other process executes another program: only its pid stays the same.
fn another_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 9);
    let (addr, rkey) = link.numbers();
    let wc = end.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 9));
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    end.rdma(IBV_WR_RDMA_WRITE, &receive, 8, addr, rkey as u32, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_WR_FLUSH_ERR);
    link.kill();
}

fn another_child(link: &mut Link) {
    let end = End::connect(link, 16, 16, 1);
    let target = end.buffer(&[0; 8]);
    link.say_numbers(target.addr(), u64::from(target.rkey()));
    let error = std::process::Command::new("sleep").arg("60").exec();
    panic!("{error}");
}

fn nothing(_link: &mut Link) {}

/// A queue is destroyed before its event is returned, or waits for the event's acknowledgement.
fn destroyed_parent(_link: &mut Link) {
    let first = End::with(4, 4, 1);
    let channel = first.channel as usize;
    let (over, gone) = (AtomicBool::new(false), Mutex::new(HashSet::new()));
    // SAFETY: objects of this test, live during their use, except a destroyed queue, which the test
    // must not get back.
    unsafe {
        let fd = (*first.channel).fd;
        libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                    let channel = channel as *mut ibv_comp_channel;
                    let got = (verbs().ibv_get_cq_event)(channel, &raw mut cq, &raw mut context);
                    if got == 0 {
                        assert!(
                            !gone.lock().unwrap().contains(&(cq as usize)),
                            "an event of a destroyed queue"
                        );
                        (verbs().ibv_ack_cq_events)(cq, 1);
                    }
                }
            });
            for _ in 0..4000 {
                let cq = (verbs().ibv_create_cq)(
                    first.context,
                    8,
                    std::ptr::null_mut(),
                    channel as *mut ibv_comp_channel,
                    0,
                );
                assert!(!cq.is_null());
                gone.lock().unwrap().remove(&(cq as usize));
                assert_eq!(ibv_req_notify_cq(cq, 0), 0);
                complete(&first, cq);
                assert_eq!((verbs().ibv_destroy_cq)(cq), 0);
                gone.lock().unwrap().insert(cq as usize);
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}

/// A queue pair is destroyed while other threads fail it and poll. Its event is not delivered
/// afterwards, and the destruction does not wait for it forever.
fn fatal_parent(_link: &mut Link) {
    let first = End::with(4, 4, 1);
    let (context, cq) = (first.context as usize, first.cq as usize);
    let (over, gone) = (AtomicBool::new(false), Mutex::new(HashSet::new()));
    let given = AtomicU32::new(0);
    let page = first.buffer(&[0; 8]);
    // SAFETY: objects of this test, which are live during their use; all zeros is a value of the
    // structures.
    unsafe {
        let fd = (*first.context).async_fd;
        libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let mut wc: ibv_wc = std::mem::zeroed();
                    ibv_poll_cq(cq as *mut ibv_cq, 1, &raw mut wc);
                }
            });
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let mut event: ibv_async_event = std::mem::zeroed();
                    let context = context as *mut ibv_context;
                    if (verbs().ibv_get_async_event)(context, &raw mut event) == 0 {
                        let qp = event.element.qp as usize;
                        assert!(
                            !gone.lock().unwrap().contains(&qp),
                            "an event of a destroyed queue pair"
                        );
                        given.fetch_add(1, Ordering::Relaxed);
                        (verbs().ibv_ack_async_event)(&raw mut event);
                    }
                }
            });
            for round in 0..4000u32 {
                let mut pair = [(); 2].map(|()| {
                    let mut init: ibv_qp_init_attr = std::mem::zeroed();
                    init.send_cq = first.cq;
                    init.recv_cq = first.cq;
                    init.qp_type = IBV_QPT_RC;
                    init.cap.max_send_wr = 1;
                    init.cap.max_send_sge = 1;
                    let qp = (verbs().ibv_create_qp)(first.pd, &raw mut init);
                    assert!(!qp.is_null());
                    gone.lock().unwrap().remove(&(qp as usize));
                    first.with_qp(qp)
                });
                let [target, initiator] = &mut pair;
                target.enter_rtr(initiator.address());
                initiator.enter_rtr(target.address());
                initiator.enter_rts();
                initiator.rdma(IBV_WR_RDMA_WRITE, &page, 8, 0x1000, 0x00de_ad00, None);
                for _ in 0..round % 64 * 16 {
                    std::hint::spin_loop();
                }
                for end in &pair {
                    assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0);
                    gone.lock().unwrap().insert(end.qp as usize);
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }
    eprintln!("{} events of 4000", given.load(Ordering::Relaxed));
}

/// Causes a completion and an event on `cq`; the queue pair is destroyed afterwards.
///
/// # Safety
/// `cq` must be live.
unsafe fn complete(first: &End, cq: *mut ibv_cq) {
    // SAFETY: all zeros is a value of the structures; live objects of one context.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = cq;
        init.recv_cq = cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_recv_wr = 1;
        init.cap.max_recv_sge = 1;
        let qp = (verbs().ibv_create_qp)(first.pd, &raw mut init);
        assert!(!qp.is_null());
        let mut end = End::of_parts(first.context, first.channel, first.pd, cq, qp);
        end.enter_init();
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_ERR;
        end.modify(&mut attr, IBV_QP_STATE);
        let mut wr: ibv_recv_wr = std::mem::zeroed();
        let mut bad = std::ptr::null_mut();
        assert_eq!(ibv_post_recv(qp, &raw mut wr, &raw mut bad), 0);
        assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
    }
}
