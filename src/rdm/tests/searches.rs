//! Searches of messages that have arrived, in one process.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::contexts::{bound, context};
use super::endpoints::{End, config, domain, wait, wait_for};
use crate::av::FiAddr;
use crate::domain::Domain;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::Completion;
use crate::rdm::{AddressVector, LocalIov, SharedRx};

/// Messages of each sender: the first window has 4 slots. A poll takes at most 64 completions of
/// the device.
const MESSAGES: u64 = 3;
const SENDERS: u64 = 30;

/// An endpoint without rings.
fn plain(domain: &Arc<Domain>) -> End {
    End::with_rings(domain, config(), 0, false)
}

/// Several senders have sent messages, and the receiver has not polled since. The first peek finds
/// the last one. `context`: that of the receiver.
fn peek_finds_the_last_message(b: &End, context: Option<&SharedRx>) {
    let domain = Arc::clone(&b.ep.shared().domain);
    let receive = |tag: u64, bytes: &mut [u8], flags| {
        let list = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let (local, any) = (LocalIov::single(&list, &Desc::NULL), FiAddr(u64::MAX));
        // SAFETY: the buffer lives until the completion.
        let posted = unsafe {
            match context {
                Some(context) => context.recv(any, Some((tag, 0)), local, 7, Some(flags)),
                None => b.ep.recv(any, Some((tag, 0)), local, 7, Some(flags)),
            }
        };
        posted.unwrap();
    };
    let senders = (0..SENDERS).map(|number| {
        let (a, mut byte) = (plain(&domain), [0; 1]);
        let to_b = a.knows(b);
        receive(1000 + number, &mut byte, Flags::empty());
        a.send(to_b, Some(1000 + number), &[1], 0);
        wait([&a, b], [1, 1]);
        (a, to_b)
    });
    let senders: Vec<_> = senders.collect();
    for (number, (a, to_b)) in senders.iter().enumerate() {
        for message in 0..MESSAGES {
            let tag = number as u64 * MESSAGES + message;
            a.send(*to_b, Some(tag), &[], 0);
        }
        // they have arrived
        wait_for(a, MESSAGES as usize);
    }
    let last = SENDERS * MESSAGES - 1;
    receive(last, &mut [], Flags::PEEK);
    let mut found = 0;
    let read = b.cq.read(1, &mut |it: &Completion| found = it.tag);
    let error = b.cq.read_error().map(|error| error.err);
    assert_eq!((read, found, error), (Ok(1), last, Err(FiErrno::EAGAIN)));
}

#[test]
fn a_peek_of_an_endpoint_finds_a_message_behind_many_others() {
    peek_finds_the_last_message(&plain(&domain()), None);
}

#[test]
fn a_peek_of_a_context_finds_a_message_behind_many_others() {
    let domain = domain();
    let context = context(&domain, 16);
    let av = AddressVector::open(4).unwrap();
    let member = bound(&domain, &context, &av, true);
    member.ep.shared().no_rings.store(true, Ordering::Relaxed);
    member.ep.enable().unwrap();
    peek_finds_the_last_message(&member, Some(&context));
}
