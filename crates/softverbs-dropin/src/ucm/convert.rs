//! Conversions between the structures of verbs and those of the kernel's ABI, and the functions of
//! libibverbs that librdmacm calls for them.

use rdma_core_sys::bindings::*;

use super::abi::{AhAttr, GlobalRoute, PathRec, Plain, QpAttr};

/// The bytes of a GID.
fn raw(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: a GID is 16 bytes, of which each is initialized.
    unsafe { (&raw const *gid).cast::<[u8; 16]>().read() }
}

/// A GID of 16 bytes.
fn gid(bytes: [u8; 16]) -> ibv_gid {
    // SAFETY: every pattern of 16 bytes is a GID.
    unsafe { (&raw const bytes).cast::<ibv_gid>().read_unaligned() }
}

pub(super) fn ah_to_kernel(attr: &ibv_ah_attr) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid: raw(&attr.grh.dgid),
            flow_label: attr.grh.flow_label,
            sgid_index: attr.grh.sgid_index,
            hop_limit: attr.grh.hop_limit,
            traffic_class: attr.grh.traffic_class,
            reserved: 0,
        },
        dlid: attr.dlid,
        sl: attr.sl,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        is_global: attr.is_global,
        port_num: attr.port_num,
        reserved: 0,
    }
}

fn ah_from_kernel(attr: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: gid(attr.grh.dgid),
            flow_label: attr.grh.flow_label,
            sgid_index: attr.grh.sgid_index,
            hop_limit: attr.grh.hop_limit,
            traffic_class: attr.grh.traffic_class,
        },
        dlid: attr.dlid,
        sl: attr.sl,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        is_global: attr.is_global,
        port_num: attr.port_num,
    }
}

pub(super) fn qp_to_kernel(attr: &ibv_qp_attr, mask: u32) -> QpAttr {
    QpAttr {
        qp_attr_mask: mask,
        qp_state: attr.qp_state,
        cur_qp_state: attr.cur_qp_state,
        path_mtu: attr.path_mtu,
        path_mig_state: attr.path_mig_state,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qp_num,
        qp_access_flags: attr.qp_access_flags,
        ah_attr: ah_to_kernel(&attr.ah_attr),
        alt_ah_attr: ah_to_kernel(&attr.alt_ah_attr),
        pkey_index: attr.pkey_index,
        alt_pkey_index: attr.alt_pkey_index,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: attr.alt_port_num,
        alt_timeout: attr.alt_timeout,
        // the connection manager has no capacities of a queue pair
        ..QpAttr::zero()
    }
}

pub(super) fn path_to_kernel(path: &ibv_sa_path_rec) -> PathRec {
    PathRec {
        dgid: raw(&path.dgid),
        sgid: raw(&path.sgid),
        dlid: path.dlid,
        slid: path.slid,
        raw_traffic: path.raw_traffic.cast_unsigned(),
        flow_label: path.flow_label,
        reversible: path.reversible.cast_unsigned(),
        mtu: u32::from(path.mtu),
        pkey: path.pkey,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        numb_path: path.numb_path,
        sl: path.sl,
        mtu_selector: path.mtu_selector,
        rate_selector: path.rate_selector,
        rate: path.rate,
        packet_life_time_selector: path.packet_life_time_selector,
        packet_life_time: path.packet_life_time,
        preference: path.preference,
    }
}

/// A path of which only the addresses and the partition are known.
pub(super) fn addresses_to_kernel(addr: &rdma_ib_addr) -> PathRec {
    PathRec {
        dgid: raw(&addr.dgid),
        sgid: raw(&addr.sgid),
        pkey: addr.pkey,
        ..PathRec::zero()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *const AhAttr) {
    // SAFETY: the caller passes two structures, the first one for writing.
    unsafe { dst.write(ah_from_kernel(&src.read())) }
}

/// Does not write the state of the queue pair, as in rdma-core: librdmacm passes the same structure
/// with the wanted state to `ibv_modify_qp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *const QpAttr) {
    // SAFETY: the caller passes a structure, and one for writing of which the state is set.
    let (src, qp_state) = unsafe { (src.read(), (&raw const (*dst).qp_state).read()) };
    let attr = ibv_qp_attr {
        qp_state,
        cur_qp_state: src.cur_qp_state,
        path_mtu: src.path_mtu,
        path_mig_state: src.path_mig_state,
        qkey: src.qkey,
        rq_psn: src.rq_psn,
        sq_psn: src.sq_psn,
        dest_qp_num: src.dest_qp_num,
        qp_access_flags: src.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: src.max_send_wr,
            max_recv_wr: src.max_recv_wr,
            max_send_sge: src.max_send_sge,
            max_recv_sge: src.max_recv_sge,
            max_inline_data: src.max_inline_data,
        },
        ah_attr: ah_from_kernel(&src.ah_attr),
        alt_ah_attr: ah_from_kernel(&src.alt_ah_attr),
        pkey_index: src.pkey_index,
        alt_pkey_index: src.alt_pkey_index,
        en_sqd_async_notify: src.en_sqd_async_notify,
        sq_draining: src.sq_draining,
        max_rd_atomic: src.max_rd_atomic,
        max_dest_rd_atomic: src.max_dest_rd_atomic,
        min_rnr_timer: src.min_rnr_timer,
        port_num: src.port_num,
        timeout: src.timeout,
        retry_cnt: src.retry_cnt,
        rnr_retry: src.rnr_retry,
        alt_port_num: src.alt_port_num,
        alt_timeout: src.alt_timeout,
        rate_limit: 0,
    };
    // SAFETY: the caller passes a structure for writing.
    unsafe { dst.write(attr) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_path_rec_from_kern(dst: *mut ibv_sa_path_rec, src: *const PathRec) {
    // SAFETY: the caller passes a structure.
    let src = unsafe { src.read() };
    let path = ibv_sa_path_rec {
        dgid: gid(src.dgid),
        sgid: gid(src.sgid),
        dlid: src.dlid,
        slid: src.slid,
        raw_traffic: src.raw_traffic.cast_signed(),
        flow_label: src.flow_label,
        hop_limit: src.hop_limit,
        traffic_class: src.traffic_class,
        reversible: src.reversible.cast_signed(),
        numb_path: src.numb_path,
        pkey: src.pkey,
        sl: src.sl,
        mtu_selector: src.mtu_selector,
        mtu: src.mtu as u8,
        rate_selector: src.rate_selector,
        rate: src.rate,
        packet_life_time_selector: src.packet_life_time_selector,
        packet_life_time: src.packet_life_time,
        preference: src.preference,
    };
    // SAFETY: the caller passes a structure for writing.
    unsafe { dst.write(path) }
}
