//! Automatic progress (`FI_PROGRESS_AUTO`): the driver sleeps, and a call of the application that
//! frees credit is the last one.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::endpoints::{End, config, domain, wait};
use crate::av::FiAddr;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::Completion;
use crate::rdm::completions::Side;
use crate::rdm::{EndpointConfig, LocalIov};

const LIMIT: Duration = Duration::from_secs(20);
/// After this time without a call the driver does not poll any more.
const SLEEP: Duration = Duration::from_millis(20);

/// A sender with manual progress, which is connected to a receiver with automatic progress.
fn connected() -> (End, End, FiAddr) {
    let domain = domain();
    let receiver = EndpointConfig {
        auto: true,
        rx_size: 1024,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, receiver, 0));
    let to_b = a.knows(&b);
    let mut bytes = [0; 8];
    b.recv(Some((77, 0)), &mut bytes, 2);
    a.send(to_b, Some(77), &[1; 8], 1);
    wait([&a, &b], [1, 1]);
    (a, b, to_b)
}

/// The sender has filled the window of the receiver, which sleeps, with messages that no receive
/// has matched.
fn with_stored_messages() -> (End, End) {
    let (a, b, to_b) = connected();
    // the messages behind the window wait for credit, and are not announced
    b.state(|state| state.core.pool.take_reserve());
    let message = [7; 1000];
    let mut idle = 0;
    while idle < 1000 {
        idle += 1;
        if a.state(|state| state.io.outstanding()) < 60 {
            a.send(to_b, Some(5), &message, 0);
            idle = 0;
        }
        let _ = (a.poll(), b.poll());
    }
    std::thread::sleep(SLEEP);
    (a, b)
}

/// Receives that match stored messages report the credit of these, by the same call.
#[test]
fn a_receive_reports_the_credit_that_it_frees() {
    let mut target = vec![0; 1000];
    let (a, b) = with_stored_messages();
    let before = a.state(|state| state.io.outstanding());
    for number in 0..500 {
        b.recv(Some((5, 0)), &mut target, number);
    }
    assert!(!b.state(|state| state.core.has_reports()));
    // nothing is called at the receiver
    let begin = Instant::now();
    while a.state(|state| state.io.outstanding()) >= before {
        a.poll();
        assert!(begin.elapsed() < LIMIT, "no credit");
    }
}

/// A panic may have left the state in the middle of a change: nothing is posted of it.
#[test]
fn a_receive_reports_nothing_after_a_panic() {
    let mut target = vec![0; 1000];
    let (_a, b) = with_stored_messages();
    assert!(!b.state(|state| state.core.has_reports()));
    b.ep.shared().fail(FiErrno::EOTHER);
    for number in 0..500 {
        b.recv(Some((5, 0)), &mut target, number);
    }
    assert!(b.state(|state| state.core.has_reports()));
}

/// A read of entries that hold credit reports it, also without a poll.
#[test]
fn a_read_of_entries_reports_the_credit_that_it_frees() {
    let (a, b, to_b) = connected();
    let mut buffer = vec![0; 4096];
    let iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let (local, any) = (LocalIov::single(&iov, &Desc::NULL), FiAddr(u64::MAX));
    let multi = Some(Flags::MULTI_RECV | Flags::COMPLETION);
    // SAFETY: the buffer lives until the endpoint is closed.
    unsafe { b.ep.recv(any, None, local, 2, multi) }.unwrap();
    // SAFETY: the message is empty.
    let inject = || unsafe { a.ep.inject(to_b, None, [].as_ptr(), 0, None) };
    let (mut sent, mut refused) = (0, 0);
    while refused < 300 {
        match inject() {
            Ok(()) => sent += 1,
            Err(error) => {
                assert_eq!(error, FiErrno::EAGAIN);
                refused += 1;
            }
        }
        b.state(|state| state.poll().unwrap());
        assert_eq!(a.poll(), None);
        assert!(sent < 400_000, "not bounded");
    }
    std::thread::sleep(SLEEP);
    let entries = b.state(|state| {
        // the read does not poll the device
        state.device_turn = 0;
        state.io.completions.len(Side::Rx)
    });
    let read = b.cq.read(entries, &mut |_: &Completion| {});
    assert_eq!(read, Ok(entries));
    assert!(!b.state(|state| state.core.has_reports()));
    // nothing more is called at the receiver
    let begin = Instant::now();
    while inject().is_err() {
        assert_eq!(a.poll(), None);
        assert!(begin.elapsed() < LIMIT, "no credit");
    }
    for end in [&a, &b] {
        end.ep.close();
    }
}
