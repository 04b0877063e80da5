//! The order of the entries of a completion queue that has those of sends and of receives.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::endpoints::{End, config, domain};
use crate::av::FiAddr;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::Completion;
use crate::rdm::LocalIov;

const REQUEST: usize = 1;
const ANSWER: usize = 2;

fn send(end: &End, to: FiAddr, bytes: &[u8], context: usize, flags: Flags) {
    let iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    // SAFETY: the caller keeps the buffer until the completion.
    unsafe { end.ep.send(to, None, local, None, context, Some(flags)) }.unwrap();
}

/// Reads the contexts of at most `max` entries.
fn read(end: &End, max: usize, contexts: &mut Vec<usize>) {
    let mut take = |it: &Completion| contexts.push(it.context);
    let _ = end.cq.read(max, &mut take);
}

/// An endpoint that answers each message as soon as it has the message. The entry of the message
/// is in front of that of the answer, however its sender reads them.
#[test]
fn the_entry_of_a_message_is_in_front_of_its_answer() {
    let cases = [
        (80, Flags::empty()),
        (80, Flags::DELIVERY_COMPLETE),
        (20_000, Flags::empty()),
        (20_000, Flags::DELIVERY_COMPLETE),
    ];
    for ((len, flags), rings) in cases
        .into_iter()
        .flat_map(|case| [(case, true), (case, false)])
    {
        let domain = domain();
        let open = || End::with_rings(&domain, config(), 0, rings);
        let (a, b) = (open(), open());
        let (to_b, to_a) = (a.knows(&b), b.knows(&a));
        let request = vec![7; len];
        let (mut at_b, mut at_a) = (vec![0; len], vec![0; 8]);
        for round in 0..60 {
            a.recv(None, &mut at_a, ANSWER);
            b.recv(None, &mut at_b, REQUEST);
            send(&a, to_b, &request, REQUEST, flags);
            let begin = Instant::now();
            let limit = begin + Duration::from_secs(20);
            let max = [1, 2, 8][round % 3];
            let (mut order, mut served) = (Vec::new(), Vec::new());
            while !served.contains(&REQUEST) {
                read(&b, 8, &mut served);
                // in some rounds everything has arrived when the sender reads first, if the message
                // needs none of its reads
                if round % 2 == 0 || begin.elapsed() > Duration::from_millis(20) {
                    read(&a, max, &mut order);
                }
                assert!(Instant::now() < limit);
            }
            send(&b, to_a, &at_b[..8], ANSWER, Flags::empty());
            while order.len() < 2 || !served.contains(&ANSWER) {
                read(&b, 8, &mut served);
                read(&a, max, &mut order);
                assert!(Instant::now() < limit, "{order:?} {served:?}");
            }
            assert_eq!(order, [REQUEST, ANSWER], "{len} {flags:?} {rings} {round}");
        }
    }
}
