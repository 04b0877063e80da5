//! Datagram services: a client asks a listener for the number and the key of its queue pair
//! (InfiniBand: service ID resolution, SIDR).
//!
//! Invariant: there is no connection. After the answer the service's id is in phase `Served`, and
//! the client's in `Served` or, after a refusal, in `Failed`. The client has the event of the
//! answer; neither id has further ones.

use std::net::SocketAddr;
use std::sync::Arc;

use rdma_core_sys::*;

use super::conversation::Link;
use super::device;
use super::event::Kind;
use super::id::Shared;
use super::qp;
use super::state::{Phase, State};
use super::wire::{Message, Private, SIDR_REP_DATA, SidrRep, SidrReq, sidr};
use crate::process::Process;
use crate::segment::layout::split_qp_num;
use crate::sys::{Errno, Res};

impl SidrRep {
    /// An answer without a queue pair.
    pub(super) fn refusal(status: u8) -> Self {
        Self {
            status,
            qp_num: 0,
            qkey: 0,
            gid: [0; 16],
            data: Private::EMPTY,
        }
    }

    /// The parameters of the event. Those of a refusal are zero.
    pub(super) fn param(&self, traffic_class: u8) -> rdma_ud_param {
        let mut param = rdma_ud_param::default();
        if self.status == sidr::SUCCESS {
            param.qp_num = self.qp_num;
            param.qkey = self.qkey;
            param.ah_attr.is_global = 1;
            param.ah_attr.port_num = device::PORT;
            param.ah_attr.grh.dgid = device::gid_from(self.gid);
            param.ah_attr.grh.hop_limit = 64;
            param.ah_attr.grh.traffic_class = traffic_class;
        }
        param
    }
}

/// The number of the id's queue pair, else that in the parameters.
pub(super) fn qp_num(id: &Shared, param: Option<&rdma_conn_param>) -> Option<u32> {
    let own = qp::of(id.handle());
    let number = if own.is_null() {
        param?.qp_num
    } else {
        // SAFETY: the application keeps a queue pair alive while its id has it.
        unsafe { (*own).qp_num }
    };
    Some(number & 0x00ff_ffff)
}

/// The client's message.
///
/// # Errors
/// `EINVAL`: private data of more than 180 bytes.
pub(super) fn request(
    state: &State,
    qp_num: u32,
    (source, destination): (SocketAddr, SocketAddr),
    data: &[u8],
) -> Res<Message> {
    let invalid = Errno(libc::EINVAL);
    let device = state.device.as_ref().ok_or(invalid)?;
    Ok(Message::SidrReq(SidrReq {
        gid: device.gid,
        qp_num,
        source,
        destination,
        data: Private::new(data).ok_or(invalid)?,
    }))
}

/// Creates the ring for the datagrams of the peer, whose message has named a queue pair. Its first
/// datagram needs no progress of this process then. Without resources the ring is created when the
/// peer requests it. None is created unless the queue pair is of the process that has connected the
/// socket or has begun to listen (`SO_PEERCRED`): a peer cannot make this process open others.
fn await_datagrams(link: Option<&Link>, qp_num: u32) {
    let (Some(process), Some(link)) = (Process::current(), link) else {
        return;
    };
    if qp_num == 0 {
        return; // the other side has no queue pair
    }
    let (slot, _) = split_qp_num(qp_num);
    let owner = process.pid_of(slot);
    if owner.is_none() || owner != link.peer_pid() {
        return;
    }
    if let Ok(peer) = process.peer(slot) {
        process.clean_up_dead_peers();
        let _ = process.grant_ring(&peer);
    }
}

/// Answers a client with a queue pair.
///
/// # Errors
/// `EINVAL`: private data of more than 136 bytes.
pub(super) fn accept(state: &mut State, id: &Arc<Shared>, qp_num: u32, data: &[u8]) -> Res<()> {
    let invalid = Errno(libc::EINVAL);
    let answer = SidrRep {
        status: sidr::SUCCESS,
        qp_num,
        qkey: device::QKEY,
        gid: state.device.as_ref().ok_or(invalid)?.gid,
        data: Private::new(data).ok_or(invalid)?,
    };
    await_datagrams(state.link.as_ref(), state.client_qp);
    // A client that has ended needs no answer.
    let _ = state.say(id, &Message::SidrRep(answer));
    state.phase = Phase::Served;
    Ok(())
}

/// Refuses a client.
pub(super) fn reject(state: &mut State, id: &Arc<Shared>, data: Private<SIDR_REP_DATA>) {
    let answer = SidrRep {
        data,
        ..SidrRep::refusal(sidr::REJECT)
    };
    let _ = state.say(id, &Message::SidrRep(answer));
    state.phase = Phase::Served;
}

/// The client has its answer, or the service has ended.
pub(super) fn answered(state: &mut State, id: &Arc<Shared>, answer: SidrRep) {
    state.phase = if answer.status == sidr::SUCCESS {
        state.peer_gid = Some(answer.gid);
        await_datagrams(state.link.as_ref(), answer.qp_num);
        Phase::Served
    } else {
        Phase::Failed
    };
    state.close_link();
    state.push(id, Kind::Service(answer));
}
