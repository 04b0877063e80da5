//! The states of a queue pair, driven through the calls of verbs.

use std::collections::VecDeque;

use rdma_core_sys::*;

use super::Input;
use super::device::{Buffer, End, RECVS, SENDS, attributes};

const STATES: [u32; 7] = [
    IBV_QPS_RESET,
    IBV_QPS_INIT,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_ERR,
];

/// The attributes that `ibv_modify_qp` requires for a transition, according to its man page.
/// `None`: there is no such transition.
fn needs(kind: u32, from: u32, to: u32) -> Option<u32> {
    let first = IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    match (from, to) {
        (_, IBV_QPS_RESET) => Some(0),
        (from, IBV_QPS_ERR) => (from != IBV_QPS_RESET).then_some(0),
        (IBV_QPS_RESET, IBV_QPS_INIT) if kind == IBV_QPT_UD => Some(first | IBV_QP_QKEY),
        (IBV_QPS_RESET, IBV_QPS_INIT) => Some(first | IBV_QP_ACCESS_FLAGS),
        (IBV_QPS_INIT, IBV_QPS_INIT) => Some(0),
        (IBV_QPS_INIT, IBV_QPS_RTR) => Some(match kind {
            IBV_QPT_UD => 0,
            IBV_QPT_UC => path,
            _ => path | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        }),
        (IBV_QPS_RTR, IBV_QPS_RTS) => Some(match kind {
            IBV_QPT_RC => {
                IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_SQ_PSN
                    | IBV_QP_MAX_QP_RD_ATOMIC
            }
            _ => IBV_QP_SQ_PSN,
        }),
        (IBV_QPS_RTS, IBV_QPS_RTS | IBV_QPS_SQD) => Some(0),
        (IBV_QPS_SQD, IBV_QPS_RTS | IBV_QPS_SQD) => Some(0),
        (IBV_QPS_SQE, IBV_QPS_RTS) if kind != IBV_QPT_RC => Some(0),
        _ => None,
    }
}

/// A queue pair is in the state that the table gives, accepts requests in the states that permit
/// it, and completes each of them once, in order, unless a reset removed it.
///
/// # Panics
/// If this property does not hold.
pub fn states(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD][input.below(3)];
    let end = End::new(kind, false);
    let buffer = Buffer::new(256);
    // Connected to itself, or to a queue pair that does not exist.
    let dest = if input.u8().is_multiple_of(4) {
        end.number() ^ 1
    } else {
        end.number()
    };
    let mut state = IBV_QPS_RESET;
    let (mut sends, mut recvs) = (VecDeque::new(), VecDeque::new());
    let mut id = 0;
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => {
                // In most cases the next state up to RTS.
                let to = match input.u8() % 4 {
                    0 => STATES[input.below(STATES.len())],
                    _ => STATES[(state as usize + 1).min(3)],
                };
                let mut attr = attributes(dest);
                attr.qp_state = to;
                attr.rnr_retry = 1;
                let needed = needs(kind, state, to);
                let mut mask = IBV_QP_STATE | needed.unwrap_or(0);
                let mut allowed = needed.is_some();
                match input.u8() % 8 {
                    // Without one of the required attributes.
                    0 if needed.is_some_and(|needed| needed != 0) => {
                        mask &= !(1 << (mask & !IBV_QP_STATE).trailing_zeros());
                        allowed = false;
                    }
                    // With an attribute that no transition permits.
                    1 => {
                        mask |= IBV_QP_CAP;
                        allowed = false;
                    }
                    // With an attribute whose value is out of range.
                    2 if mask & IBV_QP_PORT != 0 => {
                        attr.port_num = 7;
                        allowed = false;
                    }
                    _ => {}
                }
                // Polls first, because a completion may have moved the queue pair to ERR.
                drain(&end, &mut sends, &mut recvs);
                if end.state() != state {
                    let now = end.state();
                    assert!(
                        matches!(now, IBV_QPS_ERR | IBV_QPS_SQE) && state != IBV_QPS_RESET,
                        "{state} became {now} by itself"
                    );
                    state = now;
                    continue;
                }
                let ret = end.modify(&mut attr, mask);
                let expected = if allowed { to } else { state };
                let now = end.state();
                if now != expected {
                    // A request that waited has failed in the meantime.
                    assert!(
                        matches!(now, IBV_QPS_ERR | IBV_QPS_SQE)
                            && state != IBV_QPS_RESET
                            && !(sends.is_empty() && recvs.is_empty()),
                        "{kind}: {state} to {to} became {now}"
                    );
                    state = now;
                    continue;
                }
                assert_eq!(
                    ret == 0,
                    allowed,
                    "{kind}: {state} to {to}, mask {mask:#x}: {ret}"
                );
                state = expected;
                if allowed && to == IBV_QPS_RESET {
                    sends.clear();
                    recvs.clear();
                    assert!(end.poll().is_none(), "a completion of before the reset");
                }
            }
            3 => {
                let mut sges = [buffer.piece(&mut input)];
                let ret = end.post_recv(&mut sges, id);
                if state == IBV_QPS_RESET {
                    assert_eq!(ret, libc::EINVAL);
                } else {
                    assert!(ret == 0 || recvs.len() >= RECVS as usize, "{ret}");
                }
                if ret == 0 {
                    recvs.push_back(id);
                    id += 1;
                }
            }
            4..=5 => {
                let mut sges = [buffer.piece(&mut input)];
                // SAFETY: all zeros is a value of it.
                let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
                wr.wr_id = id;
                wr.sg_list = sges.as_mut_ptr();
                wr.num_sge = 1;
                wr.opcode = IBV_WR_SEND;
                if kind == IBV_QPT_UD {
                    // A send needs an address handle. A read is refused instead.
                    wr.opcode = IBV_WR_RDMA_READ;
                    assert_ne!(end.post_send(&mut wr), 0);
                    continue;
                }
                let ret = end.post_send(&mut wr);
                match end.state() {
                    IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR => assert_eq!(ret, libc::EINVAL),
                    _ => assert!(ret == 0 || sends.len() >= SENDS as usize || sges[0].length > 256),
                }
                if ret == 0 {
                    sends.push_back(id);
                    id += 1;
                }
            }
            _ => {
                drain(&end, &mut sends, &mut recvs);
            }
        }
    }
    if end.state() != IBV_QPS_RESET {
        let mut attr = attributes(dest);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(end.modify(&mut attr, IBV_QP_STATE), 0);
        // A poll that finds messages for queue pairs of other tests leaves the flush to the next
        // poll.
        for _ in 0..1000 {
            drain(&end, &mut sends, &mut recvs);
            if sends.is_empty() && recvs.is_empty() {
                break;
            }
            std::thread::yield_now();
        }
        assert!(
            sends.is_empty() && recvs.is_empty(),
            "{sends:?} {recvs:?} were not flushed"
        );
    }
}

/// Polls all completions. Of each queue the oldest request must complete first.
fn drain(end: &End, sends: &mut VecDeque<u64>, recvs: &mut VecDeque<u64>) {
    while let Some(wc) = end.poll() {
        if sends.front() == Some(&wc.wr_id) {
            sends.pop_front();
        } else {
            assert_eq!(recvs.pop_front(), Some(wc.wr_id), "sends {sends:?}");
        }
    }
}
