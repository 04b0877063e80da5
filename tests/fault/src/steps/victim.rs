//! The process that is stepped through and killed.

use rdma_core_sys::{IBV_QPT_RC, IBV_QPT_UD};

use super::path::Path;
use super::trace;
use crate::device::{Device, Op, Pair, Queue, Region, Retries};
use crate::link::{Link, numbers};
use crate::random::pattern;

const REGION: usize = 1 << 20;
/// Where in the victim's region receives lie; requests take their bytes from its beginning.
const RECEIVES: usize = 1 << 19;
const RETRIES: Retries = Retries {
    timeout: 14,
    count: 7,
};

/// `victim PATH TAG RC SHARED UD ADDR RKEY`: the survivor's numbers and its region.
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
    let queue = device.queue(256);
    let region = device.region(REGION);
    region.write(0, &pattern(tag, path.len()));
    let shared = device.shared(16);
    let rc = device.pair(IBV_QPT_RC, &queue, None);
    let on_shared = device.pair(IBV_QPT_RC, &queue, Some(&shared));
    let ud = device.pair(IBV_QPT_UD, &queue, None);
    let handle = device.handle();
    if path.is_connected() && path != Path::Connect {
        device.connect(&rc, theirs[0], RETRIES);
        device.connect(&on_shared, theirs[1], RETRIES);
    }
    if path == Path::PollMessage {
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
        Path::SendFirst | Path::SendInline | Path::SendWakes => post(&rc, Op::Inline),
        Path::SendRing => post(&rc, Op::SendImm(tag as u32)),
        Path::SendLarge => post(&rc, Op::Send),
        Path::SendShared | Path::SendSharedLarge => post(&on_shared, Op::Send),
        Path::Datagram | Path::DatagramFirst => post(&ud, Op::Datagram(handle, theirs[2])),
        Path::Write => post(&rc, Op::Write(addr, rkey)),
        Path::WriteImm => post(&rc, Op::WriteImm(addr, rkey, tag as u32)),
        Path::Read => post(&rc, Op::Read(addr, rkey)),
        Path::WriteRefused => post(&rc, Op::Write(addr, rkey ^ 0x40)),
        Path::Add | Path::Swap => {
            // The word is in front of what is written.
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
        Path::PollMessage => poll(&queue),
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

/// A message of 48 bytes, and its completion.
fn send(queue: &Queue, pair: &Pair, op: Op, region: &Region, at: usize) {
    pair.post(1, op, region, at, 48);
    let mut wcs = Vec::new();
    while wcs.is_empty() {
        queue.poll(&mut wcs);
    }
    assert_eq!(wcs[0].status, 0, "a warm-up");
}
