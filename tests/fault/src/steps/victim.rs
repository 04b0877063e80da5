//! The process that is single-stepped and killed.

use rdma_core_sys::{IBV_QPT_RC, IBV_QPT_UD};

use std::time::Duration;

use super::path::Path;
use super::trace;
use crate::device::{Device, Handle, Op, Pair, Queue, Region, Retries};
use crate::link::{Link, numbers};
use crate::random::pattern;

const REGION: usize = 1 << 20;
/// Offset of the receives in the victim's region; requests use the bytes at its beginning.
const RECEIVES: usize = 1 << 19;
/// First number of the datagrams that fill a ring.
const FILL_AT: u64 = 500;
const RETRIES: Retries = Retries {
    timeout: 14,
    count: 7,
};

/// `victim PATH TAG RC SHARED UD ADDR RKEY WINDOW`: the survivor's numbers, its region, and the key
/// of its window.
pub(crate) fn run(arguments: &[String]) {
    let path = Path::of_name(&arguments[0]).expect("a path");
    let given = numbers(&arguments[1..].join(" "));
    let (tag, addr, rkey) = (given[0], given[4], given[5] as u32);
    let theirs: Vec<u32> = given[1..4].iter().map(|&n| n as u32).collect();
    let mut link = Link::of_child();
    if path == Path::Open {
        link.say("0 0 0 0 0");
        link.hear();
        trace::begin();
        Device::open();
        trace::end();
        return;
    }
    let device = Device::open();
    let queue = if path == Path::PollExtended {
        device.extended_queue(256)
    } else {
        device.queue(256)
    };
    let region = device.region(REGION);
    region.write(0, &pattern(tag, path.len()));
    let shared = device.shared(16);
    let pair = |kind, shared| {
        if path.builds() {
            device.builder_pair(kind, &queue, shared)
        } else {
            device.pair(kind, &queue, shared)
        }
    };
    let rc = pair(path.kind(), None);
    let on_shared = pair(IBV_QPT_RC, Some(&shared));
    let ud = pair(IBV_QPT_UD, None);
    let handle = device.handle();
    if path.is_connected() && path != Path::Connect {
        device.connect(&rc, theirs[0], RETRIES);
        device.connect(&on_shared, theirs[1], RETRIES);
    }
    if path.is_sent_to() {
        rc.receive(1, &region, RECEIVES, 4096);
    }
    link.say(&format!(
        "{} {} {} {} {}",
        rc.number(),
        on_shared.number(),
        ud.number(),
        region.addr(0),
        region.rkey()
    ));
    link.hear();
    if path.is_warm() {
        let at = 1 << 18;
        region.write(at, &pattern(tag ^ 1, 48));
        send(&queue, &rc, Op::Inline, &region, at);
        send(&queue, &on_shared, Op::Inline, &region, at);
        send(&queue, &ud, Op::Datagram(handle, theirs[2]), &region, at);
    }
    let len = path.len();
    let post = |pair: &Pair, op: Op| {
        trace::begin();
        pair.post(7, op, &region, 0, len);
        trace::end();
    };
    let doomed = device.region(4096);
    match path {
        Path::SendFirst | Path::SendInline | Path::SendWakes | Path::SendUnreliable => {
            post(&rc, Op::Inline);
        }
        Path::SendRing => post(&rc, Op::SendImm(tag as u32)),
        Path::SendLarge => post(&rc, Op::Send),
        Path::SendShared | Path::SendSharedLarge => post(&on_shared, Op::Send),
        Path::SendInvalidate => post(&rc, Op::SendInvalidate(given[6] as u32)),
        Path::Datagram | Path::DatagramFirst => post(&ud, Op::Datagram(handle, theirs[2])),
        Path::DatagramWaits => {
            fill_ring(&queue, &ud, handle, theirs[2], &region, 0);
            post(&ud, Op::Datagram(handle, theirs[2]));
        }
        Path::DatagramAwaited => poll(&queue),
        Path::Write => post(&rc, Op::Write(addr, rkey)),
        Path::WriteImm => post(&rc, Op::WriteImm(addr, rkey, tag as u32)),
        Path::Read => post(&rc, Op::Read(addr, rkey)),
        Path::WriteRefused => post(&rc, Op::Write(addr, rkey ^ 0x40)),
        Path::Add | Path::Swap => {
            // the word precedes the written bytes
            let op = if path == Path::Add {
                Op::Add(addr - 4096, rkey, 1)
            } else {
                Op::Swap(addr - 4096, rkey, 0, 1)
            };
            trace::begin();
            rc.post(7, op, &region, 0, 8);
            trace::end();
        }
        Path::Receive | Path::ReceiveAwaited => {
            trace::begin();
            rc.receive(1, &region, RECEIVES, 4096);
            trace::end();
        }
        Path::SharedReceiveAwaited => {
            trace::begin();
            shared.receive(1, &region, RECEIVES, 4096);
            trace::end();
        }
        Path::BuildInline => {
            trace::begin();
            rc.batch().send(7, None).inline(&region, 0, len).post();
            trace::end();
        }
        Path::BuildBatch => {
            trace::begin();
            let batch = rc.batch().write(7, addr, rkey).piece(&region, 0, len);
            let batch = batch.send(8, Some(tag as u32));
            batch.pieces(&region, 0, len).post();
            trace::end();
        }
        Path::BuildDatagram => {
            trace::begin();
            let batch = ud.batch().send(7, None).to(handle, theirs[2]);
            batch.piece(&region, 0, len).post();
            trace::end();
        }
        Path::BuildAdd => {
            trace::begin();
            let batch = rc.batch().add(7, addr - 4096, rkey);
            batch.piece(&region, 0, 8).post();
            trace::end();
        }
        Path::BuildAtomicWrite => {
            trace::begin();
            rc.batch().atomic_write(7, addr - 4096, rkey, 1).post();
            trace::end();
        }
        Path::BuildFlush => {
            trace::begin();
            rc.batch().flush(7, addr, rkey, len).post();
            trace::end();
        }
        Path::BuildBind => {
            let window = device.window();
            trace::begin();
            let batch = rc.batch();
            batch.bind_and_invalidate(7, window, &region).post();
            trace::end();
        }
        Path::BuildAbort => {
            trace::begin();
            let batch = rc.batch().send(7, None);
            batch.inline(&region, 0, len).give_up();
            trace::end();
        }
        Path::PollMessage => poll(&queue),
        Path::PollExtended => {
            rc.post(7, Op::Read(addr, rkey), &region, 0, len);
            trace::begin();
            let count = queue.poll_extended();
            assert_eq!(count, 2);
            trace::end();
        }
        Path::Pull | Path::PullLarge | Path::PullShared => {
            if path == Path::PullShared {
                shared.receive(1, &region, RECEIVES, len);
            } else {
                rc.receive(1, &region, RECEIVES, len);
            }
            // gives the sender, whose doorbell was rung, time to send first
            std::thread::sleep(Duration::from_millis(2));
            let mut wcs = Vec::with_capacity(16);
            trace::begin();
            // not every empty poll checks for pending messages
            while wcs.is_empty() {
                queue.poll(&mut wcs);
            }
            trace::end();
        }
        Path::PullArm | Path::PullEvent => {
            if path == Path::PullEvent {
                queue.arm();
            }
            rc.receive(1, &region, RECEIVES, len);
            std::thread::sleep(Duration::from_millis(2));
            trace::begin();
            if path == Path::PullArm {
                queue.arm();
            } else {
                queue.event();
            }
            trace::end();
        }
        Path::Resize => {
            rc.post(7, Op::Read(addr, rkey), &region, 0, len);
            rc.post(8, Op::Read(addr, rkey), &region, 0, len);
            trace::begin();
            queue.resize(512);
            trace::end();
        }
        Path::Reregister => {
            trace::begin();
            region.change_access();
            trace::end();
        }
        Path::PollSend => {
            rc.post(7, Op::Read(addr, rkey), &region, 0, len);
            poll(&queue);
        }
        Path::PollFlush => {
            rc.receive(1, &region, RECEIVES, 4096);
            rc.fail();
            poll(&queue);
        }
        Path::Arm => {
            trace::begin();
            queue.arm();
            trace::end();
        }
        Path::GetEvent => {
            queue.arm();
            trace::begin();
            queue.event();
            trace::end();
        }
        Path::Deregister => {
            trace::begin();
            let _ = doomed.deregister();
            trace::end();
        }
        Path::Fail => {
            rc.receive(1, &region, RECEIVES, 4096);
            trace::begin();
            rc.fail();
            trace::end();
        }
        Path::Destroy => {
            trace::begin();
            rc.destroy();
            trace::end();
        }
        Path::Connect => {
            trace::begin();
            device.connect(&rc, theirs[0], RETRIES);
            trace::end();
        }
        Path::Open => {}
    }
}

fn poll(queue: &Queue) {
    let mut wcs = Vec::with_capacity(16);
    trace::begin();
    queue.poll(&mut wcs);
    trace::end();
}

/// Sends as many datagrams of 4096 bytes as a ring holds, to a queue pair that does not exist in
/// the process of queue pair `number`.
pub(super) fn fill_ring(
    queue: &Queue,
    ud: &Pair,
    handle: Handle,
    number: u32,
    region: &Region,
    at: usize,
) {
    // each takes 65 slots of the ring's 2048, part of which are in use already
    const COUNT: u64 = 31;
    let mut wcs = Vec::new();
    for id in 0..COUNT {
        let nobody = Op::Datagram(handle, number ^ 1 << 13);
        ud.post(FILL_AT + id, nobody, region, at, 4096);
    }
    while wcs.len() < COUNT as usize {
        queue.poll(&mut wcs);
    }
    assert!(wcs.iter().all(|wc| wc.status == 0), "no room: {wcs:?}");
}

/// Sends a message of 48 bytes and waits for its completion.
fn send(queue: &Queue, pair: &Pair, op: Op, region: &Region, at: usize) {
    pair.post(1, op, region, at, 48);
    let mut wcs = Vec::new();
    while wcs.is_empty() {
        queue.poll(&mut wcs);
    }
    assert_eq!(wcs[0].status, 0, "a warm-up");
}
