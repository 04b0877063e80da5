//! The result of `ibv_query_device_ex` is true: each flag has a test that uses it, and each limit
//! holds.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use common::*;
use rdma_core_sys::*;

/// Flags, and the test of each: a file of this directory, and a text in it.
const TESTED: &[(u32, &str, &str)] = &[
    (
        IBV_DEVICE_CURR_QP_STATE_MOD,
        include_str!("transitions.rs"),
        "mask & IBV_QP_CUR_STATE",
    ),
    (
        IBV_DEVICE_SYS_IMAGE_GUID,
        include_str!("capabilities.rs"),
        "attr.sys_image_guid",
    ),
    (
        IBV_DEVICE_RC_RNR_NAK_GEN,
        include_str!("two_processes.rs"),
        "IBV_WC_RNR_RETRY_EXC_ERR",
    ),
    (
        IBV_DEVICE_XRC,
        include_str!("xrc.rs"),
        "one_connection_for_several_processes",
    ),
    (
        IBV_DEVICE_MEM_WINDOW,
        include_str!("windows.rs"),
        "for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2]",
    ),
    (
        IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        include_str!("windows.rs"),
        "how == \"another\"",
    ),
];

fn attributes(end: &End) -> ibv_device_attr {
    // SAFETY: all zeros is a value of it; a live context.
    unsafe {
        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        assert_eq!(ibv_query_device_ex(verbs(), end.context, &raw mut attr), 0);
        let mut plain: ibv_device_attr = std::mem::zeroed();
        assert_eq!((verbs().ibv_query_device)(end.context, &raw mut plain), 0);
        assert_eq!(plain.device_cap_flags, attr.orig_attr.device_cap_flags);
        plain
    }
}

#[test]
fn every_flag_has_a_test() {
    let attr = attributes(&End::with(4, 4, 1));
    for bit in (0..32).map(|i| 1u32 << i) {
        if attr.device_cap_flags & bit == 0 {
            continue;
        }
        let tested = TESTED.iter().find(|(flag, ..)| *flag == bit);
        let (_, text, what) = tested.unwrap_or_else(|| panic!("flag {bit:#x} has no test"));
        assert!(text.contains(what), "{what}");
    }
    assert_ne!(attr.sys_image_guid, 0);
    // the device has one port, which is the whole system
    assert_eq!(attr.sys_image_guid, attr.node_guid);
    assert_eq!(attr.phys_port_cnt, 1);
}

/// Whether a queue pair can be created; it is destroyed at once.
fn queue_pair(end: &End, change: impl FnOnce(&mut ibv_qp_cap)) -> bool {
    // SAFETY: live objects of one context; all zeros is a value of it.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 1;
        init.cap.max_recv_wr = 1;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        change(&mut init.cap);
        let asked = init.cap;
        let qp = (verbs().ibv_create_qp)(end.pd, &raw mut init);
        if qp.is_null() {
            let why = std::io::Error::last_os_error();
            assert_eq!(why.raw_os_error(), Some(libc::EINVAL));
            return false;
        }
        assert!(init.cap.max_send_wr >= asked.max_send_wr);
        assert!(init.cap.max_recv_wr >= asked.max_recv_wr);
        assert!(init.cap.max_send_sge >= asked.max_send_sge);
        assert!(init.cap.max_recv_sge >= asked.max_recv_sge);
        assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
        true
    }
}

fn shared_queue(end: &End, count: i32, pieces: i32) -> bool {
    // SAFETY: a live domain; all zeros is a value of it.
    unsafe {
        let mut init: ibv_srq_init_attr = std::mem::zeroed();
        init.attr.max_wr = count as u32;
        init.attr.max_sge = pieces as u32;
        let srq = (verbs().ibv_create_srq)(end.pd, &raw mut init);
        !srq.is_null() && (verbs().ibv_destroy_srq)(srq) == 0
    }
}

/// `ibv_create_qp(3)` names the types that a shared receive queue may have.
#[test]
fn an_unreliable_connection_has_no_shared_receive_queue() {
    let end = End::with(4, 4, 1);
    let srq = end.create_srq(4);
    for (kind, good) in [(IBV_QPT_RC, true), (IBV_QPT_UD, true), (IBV_QPT_UC, false)] {
        // SAFETY: live objects of one context; all zeros is a value of it.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq) = (end.cq, end.cq);
            (init.qp_type, init.srq) = (kind, srq);
            init.cap.max_send_wr = 1;
            let qp = (verbs().ibv_create_qp)(end.pd, &raw mut init);
            let why = std::io::Error::last_os_error();
            assert_eq!(!qp.is_null(), good, "{kind}");
            if good {
                assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
            } else {
                assert_eq!(why.raw_os_error(), Some(libc::EINVAL));
            }
        }
    }
    // SAFETY: live, and not used any more.
    assert_eq!(unsafe { (verbs().ibv_destroy_srq)(srq) }, 0);
}

fn completion_queue(end: &End, count: i32) -> bool {
    // SAFETY: a live context.
    unsafe {
        let none = std::ptr::null_mut();
        let cq = (verbs().ibv_create_cq)(end.context, count, none, std::ptr::null_mut(), 0);
        !cq.is_null() && (verbs().ibv_destroy_cq)(cq) == 0
    }
}

#[test]
fn every_limit_is_reached_and_not_passed() {
    let end = End::with(4, 4, 1);
    let attr = attributes(&end);
    let (wr, sge) = (attr.max_qp_wr as u32, attr.max_sge as u32);
    assert!(queue_pair(&end, |cap| cap.max_send_wr = wr));
    assert!(!queue_pair(&end, |cap| cap.max_send_wr = wr + 1));
    assert!(queue_pair(&end, |cap| cap.max_recv_wr = wr));
    assert!(!queue_pair(&end, |cap| cap.max_recv_wr = wr + 1));
    assert!(queue_pair(&end, |cap| cap.max_send_sge = sge));
    assert!(!queue_pair(&end, |cap| cap.max_send_sge = sge + 1));
    assert!(queue_pair(&end, |cap| cap.max_recv_sge = sge));
    assert!(!queue_pair(&end, |cap| cap.max_recv_sge = sge + 1));
    let (wr, sge) = (attr.max_srq_wr, attr.max_srq_sge);
    assert!(shared_queue(&end, wr, 1) && shared_queue(&end, 1, sge));
    assert!(!shared_queue(&end, wr + 1, 1) && !shared_queue(&end, 1, sge + 1));
    let most = attr.max_srq as usize;
    // SAFETY: live objects, which are destroyed once.
    unsafe {
        let srqs: Vec<_> = (0..most).map(|_| end.create_srq(1)).collect();
        let mut init: ibv_srq_init_attr = std::mem::zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (1, 1);
        assert!((verbs().ibv_create_srq)(end.pd, &raw mut init).is_null());
        for srq in srqs {
            assert_eq!((verbs().ibv_destroy_srq)(srq), 0);
        }
    }
    assert!(completion_queue(&end, attr.max_cqe));
    assert!(!completion_queue(&end, attr.max_cqe + 1));
}
