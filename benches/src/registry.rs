//! The list of cases. A new feature adds its cases here, and its operation in [`crate::op`].

use crate::op::Op;
use crate::subject::Kind;

/// A subject with which a case is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Peer {
    pub(crate) kind: Kind,
    pub(crate) op: Op,
    /// Target: maximum ratio of the times, weft / peer.
    pub(crate) target: Option<f64>,
}

/// One case: a line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Bytes of each operation; 0 if the operation has no length.
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    pub(crate) op: Op,
    pub(crate) peers: Vec<Peer>,
    /// Target of a case without a peer: maximum time in nanoseconds.
    pub(crate) limit: Option<f64>,
}

const SIZES: [usize; 6] = [8, 64, 512, 4 << 10, 64 << 10, 1 << 20];
/// Maximum processor time of an idle process per second, in nanoseconds: the cost of measuring it.
const IDLE_NS: f64 = 200_000.0;
/// Maximum time of registering and closing a region on demand, in nanoseconds, for any length.
const REGISTER_NS: f64 = 5_000.0;

fn peer(kind: Kind, op: Op, target: impl Into<Option<f64>>) -> Peer {
    let target = target.into();
    Peer { kind, op, target }
}

fn case(group: &str, kind: Kind, op: Op, len: usize, peers: Vec<Peer>) -> Case {
    let bytes = match len {
        0 => String::new(),
        len => format!("/{len}"),
    };
    Case {
        name: format!("{group}/{op}{bytes}"),
        len,
        kind,
        op,
        peers,
        limit: None,
    }
}

fn idle(group: &str, kind: Kind) -> Case {
    Case {
        limit: Some(IDLE_NS),
        ..case(group, kind, Op::Idle, 0, Vec::new())
    }
}

/// The device without libfabric, compared with the machine's own operations.
fn device() -> Vec<Case> {
    use Kind::{Device, Machine};
    let mut cases = vec![
        // the machine's own time, for comparison with the other cases
        case("machine", Machine, Op::Handover, 0, Vec::new()),
    ];
    for len in SIZES {
        let copies = || {
            let by_kernel = if len >= 1 << 20 { Some(1.1) } else { None };
            vec![
                peer(Machine, Op::VmWrite, by_kernel),
                peer(Machine, Op::Memcpy, None),
            ]
        };
        let handed_over = if len == 8 { Some(1.5) } else { None };
        let handover = peer(Machine, Op::Handover, handed_over);
        let mut peers = vec![handover];
        peers.extend(copies().into_iter().filter(|_| len > 512));
        cases.push(case("verbs", Device, Op::Pingpong, len, peers.clone()));
        cases.push(case("verbs", Device, Op::Stream, len, peers));
        let wanted = match len {
            8 => Some(1.3),
            len if len >= 1 << 20 => Some(1.1),
            _ => None,
        };
        let by_kernel = |op| vec![peer(Machine, op, wanted)];
        cases.push(case(
            "verbs",
            Device,
            Op::Write,
            len,
            by_kernel(Op::VmWrite),
        ));
        cases.push(case("verbs", Device, Op::Read, len, by_kernel(Op::VmRead)));
    }
    cases.push(idle("verbs", Device));
    cases.extend(direct());
    cases.extend(shared());
    cases.extend(ring());
    cases
}

/// Receive rings, compared with posted receives and with the machine.
fn ring() -> Vec<Case> {
    use Kind::{Device, DeviceRing, Machine};
    let mut cases = Vec::new();
    for len in [8, 64, 512, 4 << 10] {
        let peers = vec![
            peer(Device, Op::Pingpong, 1.0),
            peer(Machine, Op::Handover, None),
        ];
        cases.push(case("ring", DeviceRing, Op::Pingpong, len, peers));
    }
    let peers = vec![peer(Device, Op::Stream, 1.0)];
    cases.push(case("ring", DeviceRing, Op::Stream, 8, peers));
    cases
}

/// Receives of a shared queue, and XRC, compared with queue pairs that have receive queues.
fn shared() -> Vec<Case> {
    use Kind::{Device, DeviceShared, DeviceXrc};
    let mut cases = Vec::new();
    for len in [8, 512, 4 << 10, 64 << 10] {
        for op in [Op::Pingpong, Op::Stream, Op::Write] {
            let rc = |wanted| vec![peer(Device, op, wanted)];
            // A shared receive must be claimed atomically, because other queue pairs may claim it.
            if op != Op::Write {
                cases.push(case("srq", DeviceShared, op, len, rc(None)));
            }
            cases.push(case("xrc", DeviceXrc, op, len, rc(Some(1.1))));
        }
    }
    cases
}

/// Memory that the device allocates, and registration on demand.
fn direct() -> Vec<Case> {
    use Kind::{Device, DeviceBuffer, Machine};
    let few = |len| if len == 8 { Some(3.0) } else { None };
    let copy = |len| if len >= 1 << 20 { Some(1.1) } else { None };
    let mut cases = Vec::new();
    for len in [8, 4 << 10, 1 << 20] {
        let peers = vec![
            peer(Machine, Op::Handover, few(len)),
            peer(Machine, Op::Memcpy, copy(len)),
        ];
        cases.push(case("buffer", DeviceBuffer, Op::Write, len, peers));
    }
    let handover = |wanted| vec![peer(Machine, Op::Handover, wanted)];
    cases.push(case(
        "buffer",
        DeviceBuffer,
        Op::Atomic,
        8,
        handover(Some(3.0)),
    ));
    cases.push(case("verbs", Device, Op::Atomic, 8, handover(None)));
    for len in [4 << 10, 1 << 20, 1 << 30, 1 << 40] {
        cases.push(Case {
            limit: Some(REGISTER_NS),
            ..case("verbs", Device, Op::Register, len, Vec::new())
        });
    }
    cases
}

/// Message endpoints on `soft0`, compared with libfabric's own providers.
fn msg() -> Vec<Case> {
    use Kind::{Shm, Tcp, VerbsAtomic, VerbsMsg, WeftAtomic, WeftMsg};
    let mut cases = Vec::new();
    for len in SIZES.into_iter().chain([4 << 20]) {
        for op in [
            Op::Pingpong,
            Op::PingpongSend,
            Op::Stream,
            Op::Write,
            Op::WriteStream,
            Op::Read,
        ] {
            let below_shm = (len == 8 && op == Op::Pingpong).then_some(1.0);
            let peers = vec![
                peer(Shm, op, below_shm),
                peer(VerbsMsg, op, 1.0),
                peer(Tcp, op, 1.0),
            ];
            cases.push(case("msg", WeftMsg, op, len, peers));
        }
    }
    for len in [8, 64, 512, 4 << 10] {
        let peers = vec![
            peer(WeftMsg, Op::WriteStream, None),
            peer(WeftMsg, Op::Write, 0.5),
            peer(Shm, Op::WriteStream, None),
            peer(VerbsMsg, Op::WriteStreamMore, 1.0),
        ];
        cases.push(case("msg", WeftMsg, Op::WriteStreamMore, len, peers));
        let peers = vec![
            peer(WeftMsg, Op::Write, 0.5),
            peer(VerbsMsg, Op::WriteStreamNext, 1.0),
        ];
        cases.push(case("msg", WeftMsg, Op::WriteStreamNext, len, peers));
    }
    let verbs = vec![peer(VerbsAtomic, Op::FetchAdd, 1.0)];
    cases.push(case("msg", WeftAtomic, Op::FetchAdd, 8, verbs));
    cases.push(idle("msg", WeftMsg));
    cases
}

/// Target of tagged messages beside `verbs;ofi_rxm`: two thirds of its time up to 4 KiB.
fn below_rxm(len: usize) -> f64 {
    if len <= 4 << 10 { 1.0 / 1.5 } else { 1.0 }
}

/// Reliable datagram endpoints on `soft0`: tagged messages, compared with `shm` and with
/// `verbs;ofi_rxm`.
fn rdm() -> Vec<Case> {
    use Kind::{RxmTagged, ShmTagged, WeftTagged};
    const SIZES: [usize; 9] = [
        8,
        64,
        512,
        4 << 10,
        16 << 10,
        64 << 10,
        256 << 10,
        1 << 20,
        4 << 20,
    ];
    let mut cases = Vec::new();
    for len in SIZES {
        for op in [Op::Pingpong, Op::PingpongSend, Op::Stream] {
            let wanted = match (op, len) {
                (Op::PingpongSend, _) => None,
                // at least 1.2 times the rate
                (Op::Stream, 8) => Some(1.0 / 1.2),
                (_, 8) => Some(0.8),
                // at least 1.33 times the bandwidth
                (_, len) if len >= 1 << 20 => Some(0.75),
                _ => Some(1.0),
            };
            let peers = vec![
                peer(ShmTagged, op, wanted),
                peer(RxmTagged, op, below_rxm(len)),
            ];
            cases.push(case("rdm", WeftTagged, op, len, peers));
        }
    }
    cases.push(idle("rdm", WeftTagged));
    cases
}

/// RMA and atomics of reliable datagram endpoints on `soft0`, compared with `shm` and with
/// `verbs;ofi_rxm`.
fn rdm_rma() -> Vec<Case> {
    use Kind::{RxmRdm, ShmRdm, WeftRdm, WeftRdmAllocated};
    const SIZES: [usize; 8] = [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20];
    let mut cases = Vec::new();
    for len in SIZES {
        for op in [Op::Write, Op::WritePingpong, Op::Read, Op::WriteStream] {
            let wanted = (op != Op::WriteStream || len >= 16 << 10).then_some(1.0);
            let peers = vec![peer(ShmRdm, op, wanted), peer(RxmRdm, op, 1.0)];
            cases.push(case("rdm", WeftRdm, op, len, peers));
        }
        if len <= 4 << 10 {
            let peers = vec![
                peer(WeftRdm, Op::WriteStream, None),
                peer(WeftRdm, Op::Write, 0.5),
                peer(ShmRdm, Op::WriteStream, None),
                peer(RxmRdm, Op::WriteStreamMore, 1.0),
            ];
            cases.push(case("rdm", WeftRdm, Op::WriteStreamMore, len, peers));
            let peers = vec![
                peer(WeftRdm, Op::Write, 0.5),
                peer(RxmRdm, Op::WriteStreamNext, 1.0),
            ];
            cases.push(case("rdm", WeftRdm, Op::WriteStreamNext, len, peers));
        }
    }
    let shm = |wanted| {
        vec![
            peer(ShmRdm, Op::FetchAdd, wanted),
            peer(RxmRdm, Op::FetchAdd, 1.0),
        ]
    };
    cases.push(case("rdm", WeftRdm, Op::FetchAdd, 8, shm(None)));
    let allocated = shm(Some(1.0));
    cases.push(case(
        "rdm-allocated",
        WeftRdmAllocated,
        Op::FetchAdd,
        8,
        allocated,
    ));
    cases
}

/// Reliable datagram endpoints on XRC, compared with those on RC. An endpoint on XRC has no receive
/// rings, so its peer has none either.
fn rdm_xrc() -> Vec<Case> {
    use Kind::{WeftRdmRc, WeftRdmXrc, WeftTaggedRc, WeftTaggedXrc};
    let mut cases = Vec::new();
    for len in [8, 512, 4 << 10, 64 << 10, 1 << 20] {
        let wanted = (len == 8).then_some(1.1);
        for op in [Op::Pingpong, Op::Stream] {
            let peers = vec![peer(WeftTaggedRc, op, wanted)];
            cases.push(case("rdm-xrc", WeftTaggedXrc, op, len, peers));
        }
        for op in [Op::Write, Op::Read, Op::WriteStream] {
            let peers = vec![peer(WeftRdmRc, op, wanted)];
            cases.push(case("rdm-xrc", WeftRdmXrc, op, len, peers));
        }
    }
    let peers = vec![peer(WeftRdmRc, Op::FetchAdd, 1.1)];
    cases.push(case("rdm-xrc", WeftRdmXrc, Op::FetchAdd, 8, peers));
    cases
}

/// All cases, in the order in which they run.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = [device(), msg(), rdm(), rdm_rma(), rdm_xrc()].concat();
    for case in &mut cases {
        case.peers.retain(|peer| peer.kind.is_available());
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_operations_can_be_named() {
        let cases = cases();
        for (i, case) in cases.iter().enumerate() {
            assert_eq!(case.op.to_string().parse(), Ok(case.op));
            assert!(
                cases[..i].iter().all(|other| other.name != case.name),
                "{} is there twice",
                case.name
            );
        }
    }
}
