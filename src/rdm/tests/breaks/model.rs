//! The model of the operations, and the memory that they access.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use atomic_ops::{Datatype, Family, Op as Operator, Operation as Arithmetic};

use super::super::Random;
use super::super::endpoints::{End, queue_pair};
use crate::av::FiAddr;
use crate::domain::{Domain, DomainConfig};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Desc, Form, Mode, MrConfig, Region};
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::endpoint::AtomicCall;
use crate::rdm::executor::Executor;
use crate::rdm::{Endpoint, LocalIov, RemoteIov};

/// Bytes of a region: those that are read, the words of atomics, those that are written.
pub(super) const LEN: usize = 256 << 10;
pub(super) const READ: usize = 16 << 10;
pub(super) const WORDS: usize = 8;
pub(super) const WRITTEN: usize = READ + 8 * WORDS;
/// Longest message in bytes, and receives of an endpoint.
pub(super) const MESSAGE: usize = 20_000;
pub(super) const RECEIVES: usize = 8;
/// Contexts of receives begin here; those of operations are their numbers.
pub(super) const RECEIVE: usize = 1 << 32;
/// Longest time in which all operations of a seed end.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// Memory that the device accesses.
pub(in crate::rdm::tests) struct Memory(Box<[AtomicU8]>);

impl Memory {
    pub(in crate::rdm::tests) fn new(len: usize) -> Self {
        Self((0..len).map(|_| AtomicU8::new(0)).collect())
    }

    pub(in crate::rdm::tests) fn addr(&self) -> usize {
        self.0.as_ptr() as usize
    }

    pub(in crate::rdm::tests) fn set(&self, at: usize, bytes: &[u8]) {
        for (to, byte) in self.0[at..].iter().zip(bytes) {
            to.store(*byte, Ordering::Relaxed);
        }
    }

    pub(super) fn get(&self, at: usize, len: usize) -> Vec<u8> {
        let bytes = self.0[at..at + len].iter();
        bytes.map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    pub(in crate::rdm::tests) fn is(&self, at: usize, bytes: &[u8]) -> bool {
        let found = self.0[at..at + bytes.len()].iter();
        found
            .zip(bytes)
            .all(|(it, byte)| it.load(Ordering::Relaxed) == *byte)
    }

    pub(in crate::rdm::tests) fn iov(&self) -> libc::iovec {
        libc::iovec {
            iov_base: self.0.as_ptr().cast_mut().cast(),
            iov_len: self.0.len(),
        }
    }
}

/// Byte `i` of a seed, not 0.
pub(super) fn byte(seed: usize, i: usize) -> u8 {
    ((seed * 31 + i * 7 + (i >> 8)) % 255 + 1) as u8
}

pub(in crate::rdm::tests) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| byte(seed, i)).collect()
}

/// What may happen in a seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) nodes: usize,
    pub(super) steps: usize,
    /// Keys of the device, or of a directory.
    pub(super) native: bool,
    pub(super) rings: bool,
    /// Few packets have receives, so that requests wait behind them.
    pub(super) few_receives: bool,
    /// As a device on a network: acknowledgements are lost, and a flushed request shows nothing.
    pub(super) lossy: bool,
    pub(super) wrong_keys: bool,
    pub(super) sessions: bool,
    pub(super) restarts: bool,
    pub(super) after_sends: bool,
    pub(super) before_sends: bool,
    /// Atomics are executed by the device, or by the processor of the target.
    pub(super) device_atomics: bool,
    /// The regions count the operations of peers, by requests behind these: some can be lost
    /// although the operation was executed.
    pub(super) counted: bool,
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut random = Random(!seed);
        let nodes = 2 + random.below(2) as usize;
        let mut plan = Self {
            nodes,
            steps: 10 + random.below(30) as usize,
            native: random.one_in(2),
            rings: random.one_in(2),
            few_receives: random.one_in(2),
            lossy: random.one_in(2),
            wrong_keys: random.one_in(2),
            sessions: random.one_in(6),
            restarts: random.one_in(6),
            after_sends: random.one_in(2),
            before_sends: random.one_in(2),
            device_atomics: random.one_in(2),
            counted: false,
        };
        plan.counted = random.one_in(2) && !plan.native;
        plan
    }

    /// Whether operations without fault of their own may fail.
    pub(super) fn disrupts(&self) -> bool {
        self.sessions || self.restarts
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// `taken`: the target changes the bytes when they have arrived.
    Write {
        data: bool,
        inject: bool,
        taken: bool,
    },
    /// Of a key that does not exist.
    Wrong,
    Read,
    /// Of the bytes of a write, with a fence.
    ReadBack(usize),
    /// To so many words, each a range of its own.
    Add {
        word: usize,
        ranges: usize,
        fetch: bool,
    },
    Message {
        number: usize,
    },
}

/// The word of an atomic at a place among its ranges.
pub(super) fn word_of(first: usize, place: usize) -> usize {
    (first + 3 * place) % WORDS
}

/// Adds 1 to the word of each range.
///
/// # Safety
/// As [`Endpoint::atomic`].
pub(in crate::rdm::tests) unsafe fn add(
    ep: &Endpoint,
    to: FiAddr,
    targets: &[RemoteIov],
    result: LocalIov<'_>,
    (context, flags): (usize, Flags),
) -> Result<(), FiErrno> {
    let ones = vec![1_u64; targets.len()];
    let operands = libc::iovec {
        iov_base: ones.as_ptr().cast_mut().cast(),
        iov_len: 8 * ones.len(),
    };
    let call = AtomicCall {
        family: match result.count() {
            0 => Family::Base,
            _ => Family::Fetch,
        },
        operation: Arithmetic::new(Operator::Sum, Datatype::Uint64).unwrap(),
        count: ones.len(),
        operands: LocalIov::single(&operands, &Desc::NULL),
        compare: LocalIov::NONE,
        result,
        targets,
        context,
        flags: Some(flags),
        injected: false,
    };
    // SAFETY: as this function.
    unsafe { ep.atomic(to, &call) }
}

/// Breaks a link in one of four ways. On a circuit, a queue pair that fails is that of all its
/// links.
pub(super) fn break_one(
    core: &mut Core<Executor>,
    io: &mut Executor,
    link: LinkKey,
    kind: u64,
    (lossy, sessions): (bool, bool),
) {
    let (lossy, record) = (lossy && kind != 0, io.links.get_mut(link).unwrap());
    record.loses |= lossy;
    let port = record.port.as_ref();
    let (circuit, from) = port.map_or((None, None), |port| (port.circuit, port.from));
    if let Some(circuit) = circuit {
        let links = io.links.of_circuit(circuit);
        links.for_each(|record| record.loses |= lossy);
    }
    if kind == 1 || lossy && circuit.is_some() {
        // the core learns of it by a completion or an event
        let _ = queue_pair(io, link).map(|qp| qp.set_error());
    }
    match (kind, circuit, from) {
        (1, ..) => {}
        (_, Some(circuit), _) if lossy => io.break_circuit(circuit),
        (3, _, Some(from)) => io.break_target(from),
        (2, ..) if sessions => {
            if let Some(peer) = core.peer_of(link) {
                core.fail(peer, FiErrno::ECONNABORTED, io);
            }
        }
        _ => core.broken(link, io),
    }
}

#[derive(Debug)]
pub(super) struct Op {
    pub(super) what: What,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) fence: bool,
    /// Offset at the target, and length; length of the first of two remote ranges, or 0.
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) cut: usize,
    pub(super) result: Option<Result<(), FiErrno>>,
    /// How often the bytes of each range were found at the target, and at the failure.
    pub(super) arrived: [u32; 2],
    pub(super) at_failure: Option<([u32; 2], Vec<u8>)>,
    /// Remote CQ data at the target.
    pub(super) notices: u32,
    /// A later operation with a fence that has ended before.
    pub(super) overtaken_by: Option<usize>,
}

impl Op {
    /// Whether each range has been written once.
    pub(super) fn has_arrived(&self) -> bool {
        self.arrived == [u32::from(self.cut != 0), 1]
    }
}

/// An endpoint from its opening to its close.
pub(super) struct Life {
    pub(super) node: usize,
    pub(super) end: Option<End>,
    pub(super) memory: Memory,
    pub(super) region: Option<Arc<Region>>,
    /// First byte that no operation has written.
    pub(super) next: usize,
    /// The receives, and how many were posted before.
    pub(super) receives: Vec<(Memory, usize)>,
    pub(super) posted: usize,
    /// The messages by the number of the sender's life, each behind the place of its receive.
    pub(super) got: HashMap<usize, Vec<(usize, usize)>>,
    pub(super) sent: HashMap<usize, usize>,
    pub(super) addrs: HashMap<usize, FiAddr>,
}

/// A domain with keys of the device, or of a directory.
pub(in crate::rdm::tests) fn domain(native: bool) -> Arc<Domain> {
    open_domain(native, false)
}

/// A domain with keys of a directory, whose regions can have counters.
pub(in crate::rdm::tests) fn counting_domain() -> Arc<Domain> {
    open_domain(false, true)
}

fn open_domain(native: bool, events: bool) -> Arc<Domain> {
    let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
    let mode = if native { Mode::NATIVE } else { Mode::empty() };
    let mr = MrConfig {
        form: Form::new(mode, false),
        events,
        ..MrConfig::default()
    };
    let config = DomainConfig {
        mr,
        ..DomainConfig::default()
    };
    Domain::open(&device, config).unwrap()
}
