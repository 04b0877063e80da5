//! The process that keeps the domain open. It starts the victims, steps through their calls, kills
//! them, and continues with the objects that each leaves.

use std::time::Instant;

use rdma_core_sys::IBV_WC_SUCCESS;

use super::Path;
use crate::device::{Device, Domain, Op, Pair, Queue, Region, Retries, Shared, Wc};
use crate::leftovers::Leftovers;
use crate::link::Link;
use crate::notice::LIMIT;
use crate::random::pattern;
use crate::remains::{UNTOUCHED, await_error, is_written};
use crate::steps::trace::Victim;

/// Number of receives of the shared queue, and bytes of each.
const RECEIVES: u64 = 8;
const ROOM: usize = 128 << 10;
/// Offset of the written bytes; the bytes around them must not change.
const WRITTEN_AT: usize = 4096;

/// The result of a victim's run.
pub(super) struct Outcome {
    pub(super) steps: usize,
    pub(super) ended: bool,
    pub(super) delivered: bool,
}

pub(super) struct Survivor {
    device: Device,
    inbox: Queue,
    outbox: Queue,
    domain: Domain,
    shared: Shared,
    number: u32,
    receives: Region,
    target_region: Region,
    scratch: Region,
    file: String,
    other_file: String,
    leftovers: Leftovers,
}

fn file(name: &str) -> String {
    let path = std::env::temp_dir().join(format!("weft-fault-xrc-{}-{name}", std::process::id()));
    std::fs::write(&path, "").expect("a file");
    path.to_str().expect("a path").to_owned()
}

impl Survivor {
    pub(super) fn new() -> Self {
        let device = Device::open();
        let (inbox, outbox) = (device.queue(64), device.queue(64));
        let (file, other_file) = (file("domain"), file("other"));
        let domain = device
            .domain(&file, libc::O_CREAT | libc::O_EXCL)
            .expect("a domain");
        let (shared, number) = device.shared_in(domain, &inbox, RECEIVES as u32);
        let survivor = Self {
            device,
            inbox,
            outbox,
            domain,
            shared,
            number,
            receives: device.region(ROOM * RECEIVES as usize),
            target_region: device.region(64 << 10),
            scratch: device.region(ROOM),
            file,
            other_file,
            leftovers: Leftovers::default(),
        };
        for id in 0..RECEIVES {
            survivor.receive(id);
        }
        survivor
    }

    fn receive(&self, id: u64) {
        let offset = ROOM * id as usize;
        self.shared.receive(id, &self.receives, offset, ROOM);
    }

    /// Destroys all objects of the domain, and closes it.
    pub(super) fn end(self) {
        self.shared.destroy().expect("ibv_destroy_srq");
        self.domain.leave().expect("ibv_close_xrcd");
        let again = self.device.domain(&self.file, 0).map(|_| ());
        let none = again.expect_err("a domain that nobody has");
        assert_eq!(none.raw_os_error(), Some(libc::EAGAIN));
        for file in [&self.file, &self.other_file] {
            let _ = std::fs::remove_file(file);
        }
    }

    /// Starts a victim, kills it after `most` instructions of its call, and checks the remaining
    /// state.
    pub(super) fn round(&mut self, path: Path, most: usize, tag: u64) -> Outcome {
        self.target_region.fill(UNTOUCHED);
        let target = self.device.target(self.domain);
        let mut victim = self.start(path, &target, tag);
        let mut got = Vec::new();
        // a first message waits for the ring, which a polling process creates
        let begin = Instant::now();
        while path.sends() && got.is_empty() {
            self.inbox.poll(&mut got);
            assert!(begin.elapsed() < LIMIT, "no message before the call");
        }
        let (steps, ended) = victim.walk(most);
        victim.kill();
        self.domains(path);
        if path.sends() {
            // a process that holds a target detects the end of its initiator
            await_error(&target, &self.outbox);
        }
        let delivered = self.check(path, tag, &mut got, ended);
        let number = target.number();
        self.device.drain_events();
        target.destroy();
        let gone = self.device.hold(self.domain, number).map(|_| ());
        let gone = gone.expect_err("a dead process holds a target");
        assert_eq!(gone.raw_os_error(), Some(libc::EINVAL));
        self.go_on(tag, got);
        self.leftovers.check();
        Outcome {
            steps,
            ended,
            delivered,
        }
    }

    fn start(&self, path: Path, target: &Pair, tag: u64) -> Victim {
        let arguments = [
            "xrc-victim".to_owned(),
            path.name(),
            self.file.clone(),
            self.other_file.clone(),
            tag.to_string(),
            self.number.to_string(),
            target.number().to_string(),
            self.target_region.addr(WRITTEN_AT).to_string(),
            self.target_region.rkey().to_string(),
        ];
        let (child, mut link) = Link::start(&arguments);
        let victim = Victim::new(&child);
        let initiator = link.hear_numbers()[0] as u32;
        if path.sends() {
            self.device.connect_target(target, initiator);
        }
        link.say("go");
        victim
    }

    /// No dead process keeps a domain or a lock.
    fn domains(&self, path: Path) {
        let begin = Instant::now();
        if path == Path::Make {
            let flags = libc::O_CREAT | libc::O_EXCL;
            let other = self.device.domain(&self.other_file, flags);
            let other = other.expect("a domain of the dead");
            other.leave().expect("ibv_close_xrcd");
        }
        let again = self.device.domain(&self.file, 0).expect("the own domain");
        again.leave().expect("ibv_close_xrcd");
        assert!(begin.elapsed() < LIMIT / 4, "a lock of the dead");
    }

    /// The victim's message has arrived as a whole or not at all.
    fn check(&self, path: Path, tag: u64, got: &mut Vec<Wc>, ended: bool) -> bool {
        self.inbox.poll(got);
        let warm = usize::from(path.sends());
        let sends = matches!(path, Path::Send | Path::SendLarge);
        assert!(
            got.len() >= warm && got.len() <= warm + usize::from(sends),
            "{got:?}"
        );
        for (i, wc) in got.iter().enumerate() {
            let (tag, len) = if i < warm {
                (tag ^ 1, 48)
            } else {
                (tag, path.len())
            };
            assert_eq!((wc.status, wc.len), (IBV_WC_SUCCESS, len), "{wc:?}");
            let bytes = self.receives.read(ROOM * wc.id as usize, len);
            assert!(bytes == pattern(tag, len), "payload of message {i}");
        }
        let delivered = got.len() > warm;
        assert!(delivered || !sends || !ended, "what was sent got lost");
        let len = if path == Path::Write { path.len() } else { 48 };
        let written = is_written(&self.target_region, WRITTEN_AT, &pattern(tag, len));
        assert!(
            written == (path == Path::Write) || !ended,
            "a write that got lost, or was not asked for"
        );
        delivered
    }

    /// A new connection through the same domain can consume every receive of the shared queue.
    fn go_on(&self, tag: u64, got: Vec<Wc>) {
        for wc in got {
            self.receive(wc.id);
        }
        let target = self.device.target(self.domain);
        let initiator = self.device.initiator(&self.outbox);
        self.device.connect_target(&target, initiator.number());
        let retries = Retries {
            timeout: 14,
            count: 7,
        };
        self.device.connect(&initiator, target.number(), retries);
        self.scratch.write(0, &pattern(tag, 300));
        let mut seen = [false; RECEIVES as usize];
        let mut wcs = Vec::new();
        for id in 0..RECEIVES {
            initiator.post_to(id, Op::Send, self.number, &self.scratch, 0, 300);
        }
        let begin = Instant::now();
        let mut sent = Vec::new();
        while wcs.len() < RECEIVES as usize || sent.len() < RECEIVES as usize {
            self.inbox.poll(&mut wcs);
            self.outbox.poll(&mut sent);
            assert!(
                begin.elapsed() < LIMIT,
                "{} of {RECEIVES} receives are to be had",
                wcs.len()
            );
        }
        for wc in wcs.iter().chain(&sent) {
            assert_eq!(wc.status, IBV_WC_SUCCESS, "{wc:?}");
        }
        for wc in wcs {
            assert!(
                !std::mem::replace(&mut seen[wc.id as usize], true),
                "taken twice"
            );
            let bytes = self.receives.read(ROOM * wc.id as usize, 300);
            assert!(bytes == pattern(tag, 300));
            self.receive(wc.id);
        }
        initiator.destroy();
        target.destroy();
    }
}
