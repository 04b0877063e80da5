//! A supplier that publishes and then checks for sleepers, against a process that announces its
//! sleep and then checks for work. And queue pairs that peers move to ERR.

use loom::thread;
use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_RTR, IBV_QPS_RTS};

use super::check;
use crate::segment::Mapping;
use crate::segment::layout::{
    ARMED_ANY, ARMED_SOLICITED, Credit, SEGMENT_SIZE, StateWord, announce, arena, cq, header, qp,
};
use crate::signal::{self, Attention};
use crate::sync::atomic::Ordering;
use crate::sync::{heavy_fence, light_fence};

/// The word of the work that a model waits for.
const WORK: usize = arena::AT;
const DESCRIPTOR: usize = arena::AT + 64;
const QP: usize = qp::AT + 2 * qp::STRIDE;

fn maps() -> (Mapping, Mapping) {
    let map = Mapping::model(SEGMENT_SIZE);
    map.prepare(
        [
            WORK,
            DESCRIPTOR,
            header::SLEEPS,
            header::ATTENTION,
            cq::AT + cq::ARMED,
            QP + qp::WAITING,
        ],
        [
            announce::AT + announce::GRANTED,
            announce::AT + announce::RING_WANTED_BY,
            QP + qp::STATE,
            QP + qp::CREDIT,
        ],
    );
    (map.again(), map)
}

#[test]
fn a_process_that_sleeps_finds_its_work_or_is_rung() {
    check(|| {
        let (own, map) = maps();
        let supplier = thread::spawn(move || {
            map.u32(WORK).store(1, Ordering::Relaxed);
            signal::must_ring(&map)
        });
        signal::will_sleep(&own);
        heavy_fence();
        let found = own.u32(WORK).load(Ordering::Relaxed) == 1;
        let rung = supplier.join().unwrap();
        assert!(found || rung);
    });
}

#[test]
fn of_several_suppliers_one_rings() {
    check(|| {
        let (own, map) = maps();
        signal::will_sleep(&own);
        let other = thread::spawn(move || signal::must_ring(&map));
        let this = signal::must_ring(&own);
        assert!(other.join().unwrap() ^ this);
    });
}

#[test]
fn an_armed_queue_has_its_message_or_is_rung() {
    check(|| {
        let (own, map) = maps();
        let sender = thread::spawn(move || {
            map.u32(WORK).store(1, Ordering::Release);
            signal::must_notify(&map, cq::AT, false, true)
        });
        signal::arm(&own, cq::AT, ARMED_ANY);
        heavy_fence();
        let found = own.u32(WORK).load(Ordering::Acquire) == 1;
        assert!(sender.join().unwrap() || found);
    });
}

#[test]
fn a_late_weaker_request_replaces_no_stronger_one() {
    check(|| {
        let (own, map) = maps();
        let late = thread::spawn(move || signal::arm(&map, cq::AT, ARMED_SOLICITED));
        signal::arm(&own, cq::AT, ARMED_ANY);
        late.join().unwrap();
        assert!(signal::must_notify(&own, cq::AT, false, true));
    });
}

#[test]
fn a_sender_without_a_receive_finds_one_or_is_rung() {
    check(|| {
        let (own, map) = maps();
        let credit = Credit {
            posted: 1,
            least: 64,
        };
        let receiver = thread::spawn(move || {
            own.u32(DESCRIPTOR).store(64, Ordering::Relaxed);
            own.u64(QP + qp::CREDIT)
                .store(credit.to_word(), Ordering::Release);
            light_fence(true);
            signal::asks(&own, QP + qp::WAITING)
        });
        signal::ask(&map, QP + qp::WAITING, 9);
        heavy_fence();
        let seen = Credit::from_word(map.u64(QP + qp::CREDIT).load(Ordering::Acquire));
        if seen == credit {
            assert_eq!(map.u32(DESCRIPTOR).load(Ordering::Relaxed), 64);
        }
        assert!(receiver.join().unwrap() || seen == credit);
    });
}

/// The receiver makes the ring for another reason than the request.
#[test]
fn a_sender_that_requests_a_ring_finds_it_or_is_rung() {
    check(|| {
        const COOKIE: u64 = 9;
        const GRANTED: usize = announce::AT + announce::GRANTED;
        const WANTED: usize = announce::AT + announce::RING_WANTED_BY;
        let (own, map) = maps();
        let sender = thread::spawn(move || {
            let (granted, wanted) = (map.u64(GRANTED), map.u64(WANTED));
            let mut called = false;
            let finds = signal::is_granted(granted, wanted, COOKIE, || called = true);
            if finds {
                assert_eq!(map.u32(WORK).load(Ordering::Relaxed), 1);
            }
            assert!(finds ^ called);
            finds
        });
        own.u32(WORK).store(1, Ordering::Relaxed);
        let rings = signal::grant(own.u64(GRANTED), own.u64(WANTED), COOKIE);
        assert!(sender.join().unwrap() || rings);
    });
}

/// A peer fails a queue pair while its owner changes the state.
#[test]
fn a_failed_queue_pair_stays_failed_and_its_owner_hears_of_it() {
    check(|| {
        let (own, map) = maps();
        let old = StateWord::new(IBV_QPS_RTR, 5, 0, 1);
        own.u64(QP + qp::STATE).store(old.0, Ordering::Relaxed);
        let state =
            |map: &Mapping| StateWord(map.u64(QP + qp::STATE).load(Ordering::Acquire)).state();
        let peer = thread::spawn(move || {
            let word = StateWord(map.u64(QP + qp::STATE).load(Ordering::Acquire));
            let failed = signal::move_state(&map, QP, word, word.with_state(IBV_QPS_ERR));
            if failed {
                signal::call_attention(&map);
            }
            (failed, failed && signal::must_ring(&map))
        });
        let attention = Attention::default();
        let moved = signal::move_state(&own, QP, old, old.with_state(IBV_QPS_RTS));
        signal::will_sleep(&own);
        heavy_fence();
        let called = attention.called(&own);
        if called {
            assert_eq!(state(&own), IBV_QPS_ERR);
        }
        let (failed, rung) = peer.join().unwrap();
        assert!(failed || moved);
        if failed {
            assert_eq!(state(&own), IBV_QPS_ERR);
            assert!(called || rung);
            assert!(called ^ attention.called(&own));
        }
    });
}
