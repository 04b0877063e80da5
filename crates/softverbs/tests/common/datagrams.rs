//! Datagram queue pairs.

use std::collections::VecDeque;

use rdma_core_sys::*;

use super::{Address, Buffer, End, verbs};

pub const QKEY: u32 = 0x1111_1111;

/// A datagram queue pair in RTS.
pub fn datagram_end() -> End {
    ready_for_datagrams(End::of_type(IBV_QPT_UD, 16, 16, 2))
}

/// Another one in the same process, which uses the receives of `srq`.
pub fn datagram_end_on(first: &End, srq: *mut ibv_srq) -> End {
    // SAFETY: all zeros is a value of it; all objects are live and of one context.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = first.cq;
        init.recv_cq = first.cq;
        init.srq = srq;
        init.qp_type = IBV_QPT_UD;
        init.cap.max_send_wr = 4;
        init.cap.max_send_sge = 1;
        let qp = (verbs().ibv_create_qp)(first.pd, &raw mut init);
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        ready_for_datagrams(End {
            qp,
            polled: VecDeque::new(),
            ..*first
        })
    }
}

pub fn ready_for_datagrams(mut end: End) -> End {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qkey = QKEY;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    end.modify(&mut attr, mask);
    attr.qp_state = IBV_QPS_RTR;
    end.modify(&mut attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    end.modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    end
}

pub fn address_handle(end: &End, to: Address) -> *mut ibv_ah {
    // SAFETY: all zeros is a value of it; a GID is 16 bytes; the domain is live.
    unsafe {
        let mut attr: ibv_ah_attr = std::mem::zeroed();
        attr.port_num = 1;
        let ah = (verbs().ibv_create_ah)(end.pd, &raw mut attr);
        assert!(ah.is_null(), "an Ethernet port needs a global route");
        attr.is_global = 1;
        attr.grh.traffic_class = 5;
        attr.grh.flow_label = 0x12345;
        (&raw mut attr.grh.dgid)
            .cast::<u128>()
            .write_unaligned(to.gid);
        let ah = (verbs().ibv_create_ah)(end.pd, &raw mut attr);
        assert!(!ah.is_null(), "{}", std::io::Error::last_os_error());
        ah
    }
}

pub fn send_datagram(end: &mut End, buffer: &Buffer, len: usize, to: (*mut ibv_ah, u32, u32)) {
    post_datagram(end, buffer, len, to, IBV_SEND_SIGNALED);
}

pub fn post_datagram(
    end: &mut End,
    buffer: &Buffer,
    len: usize,
    to: (*mut ibv_ah, u32, u32),
    flags: u32,
) {
    let mut sge = ibv_sge {
        addr: buffer.addr(),
        length: len as u32,
        lkey: buffer.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.send_flags = flags;
    wr.__bindgen_anon_1.bindgen_union_field = len as u32;
    wr.wr.ud.ah = to.0;
    wr.wr.ud.remote_qpn = to.1;
    wr.wr.ud.remote_qkey = to.2;
    end.post(&mut wr);
}
