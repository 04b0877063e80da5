//! The process that is single-stepped and killed.

use super::Path;
use crate::device::{Device, Op, Retries};
use crate::link::{Link, numbers};
use crate::random::pattern;
use crate::steps::trace;

const REGION: usize = 1 << 20;

/// `xrc-victim PATH FILE OTHER-FILE TAG SRQ TARGET ADDR RKEY`.
pub(crate) fn run(arguments: &[String]) {
    let path = Path::of_name(&arguments[0]).expect("a path");
    let (file, other_file) = (&arguments[1], &arguments[2]);
    let given = numbers(&arguments[3..].join(" "));
    let (tag, srq, number) = (given[0], given[1] as u32, given[2] as u32);
    let (addr, rkey) = (given[3], given[4] as u32);
    let mut link = Link::of_child();
    let device = Device::open();
    let queue = device.queue(64);
    let region = device.region(REGION);
    let initiator = device.initiator(&queue);
    let traced = |call: &mut dyn FnMut()| {
        trace::begin();
        call();
        trace::end();
    };
    let join = || device.domain(file, 0).expect("the survivor's domain");
    let domain = match path {
        Path::Make | Path::Join => None,
        _ => Some(join()),
    };
    link.say(&initiator.number().to_string());
    link.hear();
    if path.sends() {
        let retries = Retries {
            timeout: 14,
            count: 7,
        };
        device.connect(&initiator, number, retries);
        region.write(0, &pattern(tag ^ 1, 48));
        initiator.post_to(1, Op::Send, srq, &region, 0, 48);
        let mut wcs = Vec::new();
        while wcs.is_empty() {
            queue.poll(&mut wcs);
        }
        assert_eq!(wcs[0].status, 0, "a warm-up");
    }
    let len = path.len();
    region.write(0, &pattern(tag, len));
    let Some(domain) = domain else {
        let file = if path == Path::Make { other_file } else { file };
        let flags = if path == Path::Make { libc::O_CREAT } else { 0 };
        traced(&mut || {
            device.domain(file, flags).expect("a domain");
        });
        return;
    };
    match path {
        Path::Make | Path::Join => {}
        Path::Leave => traced(&mut || domain.leave().expect("ibv_close_xrcd")),
        Path::Target => traced(&mut || {
            device.target(domain);
        }),
        Path::Hold => traced(&mut || {
            device.hold(domain, number).expect("ibv_open_qp");
        }),
        Path::Connect => {
            let target = device.hold(domain, number).expect("ibv_open_qp");
            traced(&mut || device.connect_target(&target, initiator.number()));
        }
        Path::Release => {
            let target = device.hold(domain, number).expect("ibv_open_qp");
            traced(&mut || target.destroy());
        }
        Path::Destroy => {
            let target = device.target(domain);
            traced(&mut || target.destroy());
        }
        Path::Queue => traced(&mut || {
            device.shared_in(domain, &queue, 16);
        }),
        Path::EndQueue => {
            let (shared, _) = device.shared_in(domain, &queue, 16);
            shared.receive(1, &region, 0, 4096);
            traced(&mut || shared.destroy().expect("ibv_destroy_srq"));
        }
        Path::Send | Path::SendLarge => {
            traced(&mut || initiator.post_to(7, Op::Send, srq, &region, 0, len));
        }
        Path::Write => {
            let op = Op::Write(addr, rkey);
            traced(&mut || initiator.post_to(7, op, srq, &region, 0, len));
        }
        Path::Refused => {
            traced(&mut || initiator.post_to(7, Op::Send, srq + 1, &region, 0, len));
        }
    }
}
