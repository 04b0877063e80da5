//! The structures that librdmacm writes to the kernel's file `rdma_cm`, and the answers of the
//! kernel (`rdma_user_cm.h`, `ib_user_verbs.h` and `ib_user_sa.h` of Linux, version 4 of the ABI).
//!
//! Invariant: the layouts are those of the C headers, where these are installed: the test at the
//! bottom compiles a C program that compares them.

use libc::sockaddr_in6;

/// Bytes of private data in each structure that contains some.
pub(super) const PRIVATE_DATA: usize = 256;

/// Numbers of the commands.
pub(super) mod number {
    pub(in super::super) const CREATE_ID: u32 = 0;
    pub(in super::super) const DESTROY_ID: u32 = 1;
    pub(in super::super) const BIND_IP: u32 = 2;
    pub(in super::super) const RESOLVE_IP: u32 = 3;
    pub(in super::super) const RESOLVE_ROUTE: u32 = 4;
    pub(in super::super) const QUERY_ROUTE: u32 = 5;
    pub(in super::super) const CONNECT: u32 = 6;
    pub(in super::super) const LISTEN: u32 = 7;
    pub(in super::super) const ACCEPT: u32 = 8;
    pub(in super::super) const REJECT: u32 = 9;
    pub(in super::super) const DISCONNECT: u32 = 10;
    pub(in super::super) const INIT_QP_ATTR: u32 = 11;
    pub(in super::super) const GET_EVENT: u32 = 12;
    pub(in super::super) const SET_OPTION: u32 = 14;
    pub(in super::super) const NOTIFY: u32 = 15;
    pub(in super::super) const MIGRATE_ID: u32 = 18;
    pub(in super::super) const BIND: u32 = 20;
}

/// A structure of bytes and integers, for which every pattern of bits is a value.
///
/// # Safety
/// The type is `repr(C)`, has no padding that is not a field, and has only such fields.
pub(super) unsafe trait Plain: Copy {
    /// All bytes zero.
    fn zero() -> Self {
        // SAFETY: the trait promises that this is a value.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! structures {
    ($($(#[$meta:meta])* $name:ident = $c:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(super) struct $name { $(pub(super) $field: $type),* }

            // no implicit padding
            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*);

            // SAFETY: integers, arrays of them, structures of this file; no padding (above).
            unsafe impl Plain for $name {}
        )*

        /// A C program that compiles if and only if the headers have these layouts.
        #[cfg(test)]
        pub(super) fn layout() -> String {
            use std::mem::offset_of;
            let mut out = String::new();
            $(
                if !$c.is_empty() {
                    out += &format!("SIZE({}, {});\n", $c, size_of::<$name>());
                    $(
                        let field = stringify!($field);
                        if !field.starts_with("hole") {
                            out += &format!("AT({}, {field}, {});\n", $c, offset_of!($name, $field));
                        }
                    )*
                }
            )*
            out
        }
    };
}

structures! {
    /// The head of each command. `len_in`: bytes of the command behind it; `len_out`: bytes of the
    /// caller's room for the answer.
    Header = "" { cmd: u32, len_in: u16, len_out: u16 }
    CreateId = "rdma_ucm_create_id" { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5] }
    /// Also the beginning of other commands with an answer about an id.
    DestroyId = "rdma_ucm_destroy_id" { response: u64, id: u32, reserved: u32 }
    BindIp = "rdma_ucm_bind_ip" { response: u64, addr: Address, id: u32 }
    ResolveIp = "rdma_ucm_resolve_ip" { src_addr: Address, dst_addr: Address, id: u32, timeout_ms: u32 }
    ResolveRoute = "rdma_ucm_resolve_route" { id: u32, timeout_ms: u32 }
    Query = "rdma_ucm_query" { response: u64, id: u32, option: u32 }
    ConnParam = "rdma_ucm_conn_param" {
        qp_num: u32, qkey: u32, private_data: [u8; PRIVATE_DATA], private_data_len: u8, srq: u8,
        responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8,
        rnr_retry_count: u8, valid: u8,
    }
    Ece = "rdma_ucm_ece" { vendor_id: u32, attr_mod: u32 }
    Connect = "rdma_ucm_connect" { conn_param: ConnParam, id: u32, reserved: u32, ece: Ece }
    Listen = "rdma_ucm_listen" { id: u32, backlog: u32 }
    Accept = "rdma_ucm_accept" { uid: u64, conn_param: ConnParam, id: u32, reserved: u32, ece: Ece }
    Reject = "rdma_ucm_reject" {
        id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; PRIVATE_DATA],
    }
    Disconnect = "rdma_ucm_disconnect" { id: u32 }
    InitQpAttr = "rdma_ucm_init_qp_attr" { response: u64, id: u32, qp_state: u32 }
    GetEvent = "rdma_ucm_get_event" { response: u64 }
    SetOption = "rdma_ucm_set_option" { optval: u64, id: u32, level: u32, optname: u32, optlen: u32 }
    Notify = "rdma_ucm_notify" { id: u32, event: u32 }
    MigrateId = "rdma_ucm_migrate_id" { response: u64, id: u32, fd: u32 }
    /// The answer to CREATE_ID, DESTROY_ID and MIGRATE_ID: an id, or a count of events.
    One = "rdma_ucm_create_id_resp" { id: u32 }
    PathRec = "ib_user_path_rec" {
        dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, raw_traffic: u32, flow_label: u32,
        reversible: u32, mtu: u32, pkey: u16, hop_limit: u8, traffic_class: u8, numb_path: u8,
        sl: u8, mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8,
        packet_life_time: u8, preference: u8,
    }
    Route = "rdma_ucm_query_route_resp" {
        node_guid: u64, ib_route: [PathRec; 2], src_addr: Address, dst_addr: Address, num_paths: u32,
        port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32,
    }
    GlobalRoute = "ib_uverbs_global_route" {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
    }
    AhAttr = "ib_uverbs_ah_attr" {
        grh: GlobalRoute, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8,
        port_num: u8, reserved: u8,
    }
    QpAttr = "ib_uverbs_qp_attr" {
        qp_attr_mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32,
        qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32,
        ah_attr: AhAttr, alt_ah_attr: AhAttr, max_send_wr: u32, max_recv_wr: u32,
        max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, pkey_index: u16,
        alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8,
        max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8,
        rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5],
    }
    UdParam = "rdma_ucm_ud_param" {
        qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; PRIVATE_DATA],
        private_data_len: u8, reserved: [u8; 7],
    }
}

/// An IPv4 or IPv6 address, in the room of an IPv6 one.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) sockaddr_in6);

// SAFETY: integers and an array of bytes, without padding.
unsafe impl Plain for Address {}

/// Offset of `param` in `rdma_ucm_event_resp`, the answer to GET_EVENT. `uid`, `id`, `event` and
/// `status` precede it.
pub(super) const EVENT_PARAM: usize = 20;

/// Size of that answer without the 4 reserved bytes and the ECE options at its end, which older
/// callers have no room for.
pub(super) const EVENT_LEAST: usize = EVENT_PARAM + size_of::<UdParam>();

/// Size of that answer. The device has no ECE: its options are 0.
pub(super) const EVENT: usize = EVENT_LEAST + 4 + size_of::<Ece>();

/// The bytes of a structure.
pub(super) fn bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the type has no padding, so all its bytes are initialized.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn the_layouts_are_those_of_the_headers() {
        let headers = ["rdma/rdma_user_cm.h", "rdma/ib_user_verbs.h"];
        if !headers
            .iter()
            .all(|h| std::path::Path::new("/usr/include").join(h).exists())
        {
            eprintln!("skipped: no rdma/rdma_user_cm.h is installed (Debian: libibverbs-dev)");
            return;
        }
        let mut program = String::from(
            "#include <stddef.h>\n#include <netinet/in.h>\n#include <linux/types.h>\n\
             #define _LINUX_IN6_H\n#include <rdma/rdma_user_cm.h>\n#include <rdma/ib_user_verbs.h>\n\
             #define SIZE(t, n) _Static_assert(sizeof(struct t) == n, #t)\n\
             #define AT(t, f, n) _Static_assert(offsetof(struct t, f) == n, #t #f)\n",
        );
        program += &layout();
        program += &format!("AT(rdma_ucm_event_resp, param, {EVENT_PARAM});\n");
        program += &format!("SIZE(rdma_ucm_event_resp, {EVENT});\n");
        let mut cc = Command::new("cc")
            .args(["-fsyntax-only", "-xc", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let text = program.into_bytes();
        cc.stdin.take().unwrap().write_all(&text).unwrap();
        assert!(cc.wait().unwrap().success());
    }
}
