//! A third process, which uses the objects that the victim has used.

use rdma_core_sys::IBV_QPT_RC;

use crate::device::{Device, Op, Pair, Queue, Retries};
use crate::link::Link;
use crate::random::pattern;

/// Bytes of its messages.
pub(crate) const LEN: usize = 12_000;

/// `bystander RC`: the number of the survivor's queue pair. Its commands: `send TAG COUNT`, and
/// `add ADDR RKEY`, which prints the former value of the word.
pub(crate) fn run(arguments: &[String]) {
    let mut link = Link::of_child();
    let device = Device::open();
    let queue = device.queue(64);
    let region = device.region(1 << 16);
    let rc = device.pair(IBV_QPT_RC, &queue, None);
    let retries = Retries {
        timeout: 14,
        count: 7,
    };
    let theirs = arguments[0].parse().expect("a number");
    device.connect(&rc, theirs, retries);
    link.say(&rc.number().to_string());
    // ends when its parent ends
    while let Ok(line) = link.hear_within(std::time::Duration::from_secs(3600)) {
        let Some(line) = line else { continue };
        let (command, rest) = line.split_once(' ').expect("a command");
        let given = crate::link::numbers(rest);
        if command == "send" {
            for i in 0..given[1] {
                region.write(0, &pattern(given[0] + i, LEN));
                finish(&queue, &rc, Op::Send, &region, LEN);
            }
            link.say("sent");
        } else {
            let op = Op::Add(given[0], given[1] as u32, 0);
            finish(&queue, &rc, op, &region, 8);
            link.say(&region.read_word(0).to_string());
        }
    }
}

fn finish(queue: &Queue, pair: &Pair, op: Op, region: &crate::device::Region, len: usize) {
    pair.post(1, op, region, 0, len);
    let mut wcs = Vec::new();
    let begin = std::time::Instant::now();
    while wcs.is_empty() {
        queue.poll(&mut wcs);
        assert!(
            begin.elapsed() < crate::notice::LIMIT,
            "the bystander can't go on"
        );
        if wcs.is_empty() {
            std::thread::yield_now();
        }
    }
    assert_eq!(wcs[0].status, 0, "the bystander's request");
}
