//! The states of a queue pair, driven through the calls of verbs.

use std::collections::VecDeque;

use rdma_core_sys::*;

use super::Input;
use crate::testing::{Buffer, End, RECVS, SENDS, attributes};

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
    let mut case = Case::new(&mut input);
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => case.change_state(&mut input),
            3 => case.post_receive(&mut input),
            4..=5 => case.post_send(&mut input),
            _ => case.drain(),
        }
    }
    case.flush();
}

/// A queue pair, and the model of it.
struct Case {
    kind: u32,
    end: End,
    buffer: Buffer,
    dest: u32,
    state: u32,
    /// Requests and receives that are not complete.
    sends: VecDeque<u64>,
    recvs: VecDeque<u64>,
    id: u64,
}

impl Case {
    fn new(input: &mut Input<'_>) -> Self {
        let kind = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD][input.below(3)];
        let end = End::new(kind, false);
        // Connected to itself, or to a queue pair that does not exist.
        let dest = if input.u8().is_multiple_of(4) {
            end.number() ^ 1
        } else {
            end.number()
        };
        Self {
            kind,
            end,
            buffer: Buffer::new(256),
            dest,
            state: IBV_QPS_RESET,
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            id: 0,
        }
    }

    /// Modifies the queue pair: in most cases to the next state up to RTS.
    fn change_state(&mut self, input: &mut Input<'_>) {
        let (kind, state) = (self.kind, self.state);
        let to = match input.u8() % 4 {
            0 => STATES[input.below(STATES.len())],
            _ => STATES[(state as usize + 1).min(3)],
        };
        let mut attr = attributes(self.dest);
        attr.qp_state = to;
        attr.rnr_retry = 1;
        let (mask, allowed) = spoil(input, &mut attr, needs(kind, state, to));
        // Polls first, because a completion may have moved the queue pair to ERR.
        self.drain();
        let now = self.end.state();
        if now != state {
            assert!(
                matches!(now, IBV_QPS_ERR | IBV_QPS_SQE) && state != IBV_QPS_RESET,
                "{state} became {now} by itself"
            );
            self.state = now;
            return;
        }
        let ret = self.end.modify(&mut attr, mask);
        let expected = if allowed { to } else { state };
        let now = self.end.state();
        if now != expected {
            // A request that waited has failed in the meantime.
            assert!(
                matches!(now, IBV_QPS_ERR | IBV_QPS_SQE)
                    && state != IBV_QPS_RESET
                    && !(self.sends.is_empty() && self.recvs.is_empty()),
                "{kind}: {state} to {to} became {now}"
            );
            self.state = now;
            return;
        }
        assert_eq!(
            ret == 0,
            allowed,
            "{kind}: {state} to {to}, mask {mask:#x}: {ret}"
        );
        self.state = expected;
        if allowed && to == IBV_QPS_RESET {
            self.sends.clear();
            self.recvs.clear();
            assert!(
                self.end.poll().is_none(),
                "a completion of before the reset"
            );
        }
    }

    fn post_receive(&mut self, input: &mut Input<'_>) {
        let mut sges = [self.buffer.piece(input)];
        let ret = self.end.post_recv(&mut sges, self.id);
        if self.state == IBV_QPS_RESET {
            assert_eq!(ret, libc::EINVAL);
        } else {
            assert!(ret == 0 || self.recvs.len() >= RECVS as usize, "{ret}");
        }
        if ret == 0 {
            self.recvs.push_back(self.id);
            self.id += 1;
        }
    }

    fn post_send(&mut self, input: &mut Input<'_>) {
        let mut sges = [self.buffer.piece(input)];
        // SAFETY: all zeros is a value of it.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.id;
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = 1;
        wr.opcode = IBV_WR_SEND;
        if self.kind == IBV_QPT_UD {
            // A send needs an address handle. A read is refused instead.
            wr.opcode = IBV_WR_RDMA_READ;
            assert_ne!(self.end.post_send(&mut wr), 0);
            return;
        }
        let ret = self.end.post_send(&mut wr);
        match self.end.state() {
            IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR => assert_eq!(ret, libc::EINVAL),
            _ => {
                let full = self.sends.len() >= SENDS as usize;
                assert!(ret == 0 || full || sges[0].length > 256);
            }
        }
        if ret == 0 {
            self.sends.push_back(self.id);
            self.id += 1;
        }
    }

    /// Polls all completions. Of each queue the oldest request must complete first.
    fn drain(&mut self) {
        while let Some(wc) = self.end.poll() {
            if self.sends.front() == Some(&wc.wr_id) {
                self.sends.pop_front();
            } else {
                let sends = &self.sends;
                assert_eq!(self.recvs.pop_front(), Some(wc.wr_id), "sends {sends:?}");
            }
        }
    }

    /// All requests are flushed in ERR.
    fn flush(mut self) {
        if self.end.state() == IBV_QPS_RESET {
            return;
        }
        let mut attr = attributes(self.dest);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(self.end.modify(&mut attr, IBV_QP_STATE), 0);
        // A poll that finds messages for queue pairs of other tests leaves the flush to the next
        // poll.
        for _ in 0..1000 {
            self.drain();
            if self.sends.is_empty() && self.recvs.is_empty() {
                break;
            }
            std::thread::yield_now();
        }
        let (sends, recvs) = (&self.sends, &self.recvs);
        assert!(
            sends.is_empty() && recvs.is_empty(),
            "{sends:?} {recvs:?} were not flushed"
        );
    }
}

/// The mask for a transition that needs these attributes, and whether the transition is allowed:
/// with one attribute too few, one too many, or a value out of range in 1 of 8 cases each.
fn spoil(input: &mut Input<'_>, attr: &mut ibv_qp_attr, needed: Option<u32>) -> (u32, bool) {
    let mask = IBV_QP_STATE | needed.unwrap_or(0);
    match input.u8() % 8 {
        // Without one of the required attributes.
        0 if needed.is_some_and(|needed| needed != 0) => {
            let first = 1 << (mask & !IBV_QP_STATE).trailing_zeros();
            (mask & !first, false)
        }
        // With an attribute that no transition permits.
        1 => (mask | IBV_QP_CAP, false),
        2 if mask & IBV_QP_PORT != 0 => {
            attr.port_num = 7;
            (mask, false)
        }
        _ => (mask, needed.is_some()),
    }
}
