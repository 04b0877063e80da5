//! The last messages of a connection, or to a shared receive queue of XRC, which its owner ends at
//! the same time.

use loom::thread;
use rdma_core_sys::{IBV_QPS_ERR, IBV_QPS_RTS};

use super::check;
use super::ring::{message, ring};
use crate::segment::Mapping;
use crate::segment::layout::{SEGMENT_SIZE, StateWord, qp, srq};
use crate::signal;
use crate::sync::atomic::Ordering;
use crate::sync::{heavy_fence, light_fence};

const QP: usize = qp::AT + 2 * qp::STRIDE;
const STAMP: usize = srq::AT + srq::STRIDE + srq::STAMP;

/// The sender publishes a message, and then reads the word that states whether the owner will
/// process it. The owner changes the word, and then processes messages for the last time. If the
/// sender finds the word unchanged, its message was processed.
fn last(
    end: impl Fn(&Mapping) + Send + Sync + 'static,
    lives: impl Fn(&Mapping) -> bool + Send + Sync + Copy + 'static,
) {
    check(move || {
        let map = Mapping::model(SEGMENT_SIZE);
        map.prepare([STAMP], [QP + qp::STATE]);
        let word = StateWord::new(IBV_QPS_RTS, 5, 0, 1);
        map.u64(QP + qp::STATE).store(word.0, Ordering::Relaxed);
        map.u32(STAMP).store(7, Ordering::Relaxed);
        let (mut producer, mut consumer) = ring();
        let theirs = map.again();
        let sender = thread::spawn(move || {
            assert!(producer.push(&message(1), |_| {}));
            light_fence(true);
            lives(&theirs)
        });
        end(&map);
        heavy_fence();
        let taken = consumer.peek().unwrap().is_some();
        let relies = sender.join().unwrap();
        assert!(taken || !relies);
    });
}

#[test]
fn who_finds_the_state_unchanged_was_heard() {
    let word = StateWord::new(IBV_QPS_RTS, 5, 0, 1);
    last(
        move |map| {
            assert!(signal::move_state(
                map,
                QP,
                word,
                word.with_state(IBV_QPS_ERR)
            ))
        },
        move |map| map.u64(QP + qp::STATE).load(Ordering::Acquire) == word.0,
    );
}

#[test]
fn who_finds_the_stamp_unchanged_was_heard() {
    last(
        |map| map.u32(STAMP).store(0, Ordering::SeqCst),
        |map| map.u32(STAMP).load(Ordering::Acquire) == 7,
    );
}
