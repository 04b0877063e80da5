//! `ibv_modify_qp` over all transitions and, for each, valid and invalid masks.
//!
//! The table is that of `ibv_modify_qp(3)` and the InfiniBand specification (11.2.5.2, table 91),
//! as in the kernel's `ib_modify_qp_is_ok`. A line names the states, and for each type the required
//! attributes and, after a bar, the optional ones.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use common::*;
use rdma_core_sys::*;

const TABLE: &str = "
RESET INIT
  UD PKEY_INDEX PORT QKEY |
  UC PKEY_INDEX PORT ACCESS_FLAGS |
  RC PKEY_INDEX PORT ACCESS_FLAGS |
INIT INIT
  UD | PKEY_INDEX PORT QKEY
  UC | PKEY_INDEX PORT ACCESS_FLAGS
  RC | PKEY_INDEX PORT ACCESS_FLAGS
INIT RTR
  UD | PKEY_INDEX QKEY
  UC AV PATH_MTU DEST_QPN RQ_PSN | ALT_PATH ACCESS_FLAGS PKEY_INDEX
  RC AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER | ALT_PATH ACCESS_FLAGS PKEY_INDEX
RTR RTS
  UD SQ_PSN | CUR_STATE QKEY
  UC SQ_PSN | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
  RC TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
RTS RTS
  UD | CUR_STATE QKEY
  UC | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE
  RC | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER
RTS SQD
  UD | EN_SQD_ASYNC_NOTIFY
  UC | EN_SQD_ASYNC_NOTIFY
  RC | EN_SQD_ASYNC_NOTIFY
SQD RTS
  UD | CUR_STATE QKEY
  UC | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
  RC | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
SQD SQD
  UD | PKEY_INDEX QKEY
  UC | AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE
  RC | PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE
SQE RTS
  UD | CUR_STATE QKEY
  UC | CUR_STATE ACCESS_FLAGS
";

const STATES: [(&str, u32); 7] = [
    ("RESET", IBV_QPS_RESET),
    ("INIT", IBV_QPS_INIT),
    ("RTR", IBV_QPS_RTR),
    ("RTS", IBV_QPS_RTS),
    ("SQD", IBV_QPS_SQD),
    ("SQE", IBV_QPS_SQE),
    ("ERR", IBV_QPS_ERR),
];

const KINDS: [(&str, u32); 3] = [("RC", IBV_QPT_RC), ("UC", IBV_QPT_UC), ("UD", IBV_QPT_UD)];

const ATTRIBUTES: [(&str, u32); 20] = [
    ("CUR_STATE", IBV_QP_CUR_STATE),
    ("EN_SQD_ASYNC_NOTIFY", IBV_QP_EN_SQD_ASYNC_NOTIFY),
    ("ACCESS_FLAGS", IBV_QP_ACCESS_FLAGS),
    ("PKEY_INDEX", IBV_QP_PKEY_INDEX),
    ("PORT", IBV_QP_PORT),
    ("QKEY", IBV_QP_QKEY),
    ("AV", IBV_QP_AV),
    ("PATH_MTU", IBV_QP_PATH_MTU),
    ("TIMEOUT", IBV_QP_TIMEOUT),
    ("RETRY_CNT", IBV_QP_RETRY_CNT),
    ("RNR_RETRY", IBV_QP_RNR_RETRY),
    ("RQ_PSN", IBV_QP_RQ_PSN),
    ("MAX_QP_RD_ATOMIC", IBV_QP_MAX_QP_RD_ATOMIC),
    ("ALT_PATH", IBV_QP_ALT_PATH),
    ("MIN_RNR_TIMER", IBV_QP_MIN_RNR_TIMER),
    ("SQ_PSN", IBV_QP_SQ_PSN),
    ("MAX_DEST_RD_ATOMIC", IBV_QP_MAX_DEST_RD_ATOMIC),
    ("PATH_MIG_STATE", IBV_QP_PATH_MIG_STATE),
    ("DEST_QPN", IBV_QP_DEST_QPN),
    ("RATE_LIMIT", IBV_QP_RATE_LIMIT),
];

fn number(list: &[(&str, u32)], name: &str) -> u32 {
    list.iter().find(|(n, _)| *n == name).expect(name).1
}

fn bits(names: &str) -> u32 {
    names
        .split_whitespace()
        .map(|name| number(&ATTRIBUTES, name))
        .sum()
}

/// The required and optional attributes of a transition; `None`: there is no such transition.
fn rule(kind: &str, from: &str, to: &str) -> Option<(u32, u32)> {
    // every state can move to RESET, and every state except RESET to ERR, without other attributes
    if to == "RESET" || to == "ERR" && from != "RESET" {
        return Some((0, 0));
    }
    let head = format!("{from} {to}");
    let line = TABLE
        .lines()
        .skip_while(|line| *line != head)
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        .find_map(|line| line.trim().strip_prefix(kind))?;
    let (must, may) = line.split_once('|').unwrap();
    Some((bits(must), bits(may)))
}

/// Valid values for all attributes. The queue pair is connected to itself.
fn good(end: &End, from: u32, to: u32) -> ibv_qp_attr {
    let own = end.address();
    // SAFETY: all zeros is a value of it; a GID is 16 bytes.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = to;
    attr.cur_qp_state = from;
    attr.port_num = 1;
    attr.alt_port_num = 1;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = own.qpn;
    attr.min_rnr_timer = 12;
    attr.timeout = 14;
    for ah in [&mut attr.ah_attr, &mut attr.alt_ah_attr] {
        ah.is_global = 1;
        ah.port_num = 1;
        // SAFETY: as above.
        unsafe {
            (&raw mut ah.grh.dgid)
                .cast::<u128>()
                .write_unaligned(own.gid);
        }
    }
    attr
}

fn modify(end: &End, attr: &mut ibv_qp_attr, mask: u32) -> i32 {
    // SAFETY: a live queue pair, valid attributes.
    unsafe { (verbs().ibv_modify_qp)(end.qp, attr, mask.cast_signed()) }
}

/// Moves from RESET to a state by the shortest path; returns false if this type has no such state.
fn bring(end: &mut End, kind: &str, state: &str) -> bool {
    let way: &[&str] = match state {
        "RESET" => &[],
        "INIT" => &["INIT"],
        "RTR" => &["INIT", "RTR"],
        "RTS" | "SQE" => &["INIT", "RTR", "RTS"],
        "SQD" => &["INIT", "RTR", "RTS", "SQD"],
        _ => &["INIT", "ERR"],
    };
    let mut from = "RESET";
    for to in way {
        let (must, _) = rule(kind, from, to).unwrap();
        let mut attr = good(end, number(&STATES, from), number(&STATES, to));
        assert_eq!(modify(end, &mut attr, IBV_QP_STATE | must), 0);
        from = to;
    }
    if state == "SQE" {
        if kind == "RC" {
            return false;
        }
        // a request that fails: its memory is not registered
        let mut byte = [0u8; 1];
        if kind == "UD" {
            let ah = address_handle(end, end.address());
            let mut sge = ibv_sge {
                addr: byte.as_mut_ptr() as u64,
                length: 1,
                lkey: 0,
            };
            // SAFETY: all zeros is a value of it; live objects.
            unsafe {
                let mut wr: ibv_send_wr = std::mem::zeroed();
                wr.sg_list = &raw mut sge;
                wr.num_sge = 1;
                wr.opcode = IBV_WR_SEND;
                wr.wr.ud.ah = ah;
                wr.wr.ud.remote_qpn = end.address().qpn;
                end.post(&mut wr);
                assert_eq!((verbs().ibv_destroy_ah)(ah), 0);
            }
        } else {
            end.send_unregistered(&mut byte, None, 0, 0);
        }
        assert_eq!(end.state(), IBV_QPS_SQE);
    }
    true
}

/// Masks derived from a rule: the required attributes, with each and with all optional ones,
/// without each required one, with each one that is not permitted; and unrelated masks.
fn masks(must: u32, may: u32, seed: &mut u64) -> Vec<u32> {
    let all = ATTRIBUTES.iter().map(|&(_, bit)| bit);
    let mut masks = vec![must, must | may];
    masks.extend(all.clone().map(|bit| must ^ bit));
    masks.extend(all.map(|bit| (must | may) ^ bit));
    for _ in 0..16 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        masks.push(
            *seed as u32 & bits("QKEY AV PORT ACCESS_FLAGS SQ_PSN TIMEOUT CUR_STATE DEST_QPN"),
        );
    }
    masks
}

#[test]
fn every_transition_takes_what_the_table_says() {
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let mut tried = 0;
    let mut allowed = 0;
    for (kind, qpt) in KINDS {
        let mut end = End::of_type_in_reset(qpt);
        for (from, from_state) in STATES {
            for (to, to_state) in STATES {
                let rule = rule(kind, from, to);
                let (must, may) = rule.unwrap_or((0, 0));
                for mask in masks(must, may, &mut seed) {
                    let mut attr = good(&end, 0, IBV_QPS_RESET);
                    assert_eq!(modify(&end, &mut attr, IBV_QP_STATE), 0);
                    if !bring(&mut end, kind, from) {
                        continue;
                    }
                    while end.poll().is_some() {}
                    let mut attr = good(&end, from_state, to_state);
                    let ret = modify(&end, &mut attr, IBV_QP_STATE | mask);
                    let cur = mask & IBV_QP_CUR_STATE == 0
                        || matches!(from, "RTR" | "RTS" | "SQD" | "SQE");
                    // a device without IBV_DEVICE_AUTO_PATH_MIG has no alternate path
                    let lacking = mask & IBV_QP_ALT_PATH != 0;
                    let allowed_bits = mask & must == must && mask & !(must | may) == 0;
                    let good = rule.is_some() && cur && !lacking && allowed_bits;
                    let expected = if mask & IBV_QP_RATE_LIMIT != 0 {
                        libc::EOPNOTSUPP
                    } else if good {
                        0
                    } else {
                        libc::EINVAL
                    };
                    assert_eq!(ret, expected, "{kind} {from} to {to} with {mask:#x}");
                    let now = if good { to_state } else { from_state };
                    assert_eq!(end.state(), now, "{kind} {from} to {to} with {mask:#x}");
                    tried += 1;
                    allowed += u32::from(good);
                }
            }
        }
    }
    println!("{tried} calls, {allowed} allowed");
    assert!(tried > 5000 && allowed > 200);
}

/// Without `IBV_QP_STATE` the state stays, and the rule of its transition to itself applies.
#[test]
fn attributes_change_without_a_state() {
    let mut end = End::of_type_in_reset(IBV_QPT_RC);
    assert!(bring(&mut end, "RC", "RTS"));
    let mut attr = good(&end, IBV_QPS_RTS, IBV_QPS_RESET);
    attr.min_rnr_timer = 5;
    assert_eq!(modify(&end, &mut attr, IBV_QP_MIN_RNR_TIMER), 0);
    assert_eq!(modify(&end, &mut attr, IBV_QP_PATH_MTU), libc::EINVAL);
    attr.cur_qp_state = IBV_QPS_SQD;
    assert_eq!(modify(&end, &mut attr, IBV_QP_CUR_STATE), libc::EINVAL);
    // attributes that the device does not have, also beside those that the state does not permit
    for bit in 21..32 {
        for mask in [1 << bit, 1 << bit | IBV_QP_PATH_MTU] {
            assert_eq!(modify(&end, &mut attr, mask), libc::EOPNOTSUPP, "{bit}");
        }
    }
    assert_eq!(modify(&end, &mut attr, IBV_QP_CAP), libc::EINVAL);
    assert_eq!(end.state(), IBV_QPS_RTS);
}

/// As on mlx5 and rxe: the bits above are not in a packet.
#[test]
fn packet_sequence_numbers_have_24_bits() {
    let mut end = End::of_type_in_reset(IBV_QPT_RC);
    for (from, to) in [("RESET", "INIT"), ("INIT", "RTR"), ("RTR", "RTS")] {
        let mut attr = good(&end, number(&STATES, from), number(&STATES, to));
        (attr.rq_psn, attr.sq_psn) = (0x0100_0005, 0xffff_fff7);
        let (must, _) = rule("RC", from, to).unwrap();
        assert_eq!(modify(&end, &mut attr, IBV_QP_STATE | must), 0);
    }
    // SAFETY: live queue pair, writable outputs; all zeros is a value of both.
    let attr = unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        let mask = (IBV_QP_RQ_PSN | IBV_QP_SQ_PSN).cast_signed();
        let query = verbs().ibv_query_qp;
        assert_eq!(query(end.qp, &raw mut attr, mask, &raw mut init), 0);
        attr
    };
    assert_eq!((attr.rq_psn, attr.sq_psn), (5, 0x00ff_fff7));
    end.reset();
}
