//! Keys of closed regions: no write through one reaches other memory, whatever the device does with its
//! rkeys, and whether the initiator runs or is stopped.
//!
//! Each test runs in a process of its own, on a device that gives rkeys out again at once
//! (`SOFTVERBS_REUSE_KEYS`).

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::keys::{TARGET, connect, kind};
use super::*;

const ROLE: &str = "WEFT_TEST_STALE";
const FORM: Mode = Mode::ALLOCATED.union(Mode::LOCAL);
/// The key that is used again and again, and the one of the bystander.
const KEY: u64 = 7;
const OTHER: u64 = 8;

fn start(role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "msg::tests::stale::role"])
        .env(ROLE, role)
        .env("SOFTVERBS_REUSE_KEYS", "1")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// What the other processes run; does nothing in an ordinary run of the tests.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "reuse" => reuse(),
        "stopped" => stopped(),
        addr => write_until_the_end(addr.parse().unwrap()),
    }
}

#[test]
fn keys_used_again_under_concurrent_writers_hurt_nobody() {
    assert!(start("reuse").wait().unwrap().success());
}

#[test]
fn a_stopped_initiator_holds_nobody_up_and_hurts_nobody() {
    assert!(start("stopped").wait().unwrap().success());
}

fn write(side: &Side, source: &Buffer) -> std::result::Result<(), FiErrno> {
    let (iov, desc) = source.part(0, 64);
    // SAFETY: the buffer outlives the operation.
    unsafe {
        let local = LocalIov::single(&iov, &desc);
        side.ep.write(local, 0, KEY, 1)?;
    }
    let mut done = false;
    let (mut waited, mut last) = (Duration::ZERO, Instant::now());
    loop {
        match side.cq.read(1, &mut |_: &Completion| done = true) {
            Ok(_) if done => return Ok(()),
            Err(FiErrno::EAVAIL) => return Err(side.cq.read_error().unwrap().err),
            Ok(_) | Err(FiErrno::EAGAIN) => {}
            Err(error) => return Err(error),
        }
        // the time that this process was stopped is not time that it waited
        let now = Instant::now();
        waited += (now - last).min(Duration::from_millis(100));
        last = now;
        assert!(waited < LIMIT, "an operation is lost");
    }
}

/// Regions come and go under one key while a thread writes to it. Whenever one has gone, memory that must
/// stay zero is registered, most likely under the rkey that the closed one had.
fn reuse() {
    const ROUNDS: u64 = 100_000;
    let device = device();
    let domain = || Domain::open(&device, kind(FORM)).unwrap();
    let (client_domain, server_domain) = (domain(), domain());
    let (rounds, written, ended) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    while rounds.load(Ordering::Relaxed) < ROUNDS {
        let (client, _server) = connect(Arc::clone(&client_domain), Arc::clone(&server_domain));
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut source = Buffer::new(&client.domain, 64, Access::WRITE);
                source.fill(0x5a);
                while !over.load(Ordering::Relaxed) {
                    match write(&client, &source) {
                        Ok(()) => written.fetch_add(1, Ordering::Relaxed),
                        Err(FiErrno::EKEYREJECTED) if client.ep.peer_addr().is_ok() => 0,
                        // the region went while the write was under way: that ends the connection
                        Err(_) => {
                            over.store(true, Ordering::Relaxed);
                            ended.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                }
            });
            while !over.load(Ordering::Relaxed) {
                let target = Buffer::with_key(&server_domain, 64, TARGET, KEY);
                if rounds.load(Ordering::Relaxed).is_multiple_of(16) {
                    std::thread::yield_now();
                }
                drop(target);
                let bystander = Buffer::with_key(&server_domain, 64, TARGET, OTHER);
                std::hint::spin_loop();
                let memory = bystander.memory.as_ptr();
                // SAFETY: the memory is there; should a device write to it, this must be seen.
                let touched = (0..64).any(|i| unsafe { memory.add(i).read_volatile() } != 0);
                assert!(!touched, "a stale key reached other memory");
                if rounds.fetch_add(1, Ordering::Relaxed) == ROUNDS {
                    over.store(true, Ordering::Relaxed);
                }
            }
        });
    }
    assert!(
        written.load(Ordering::Relaxed) > 0,
        "nothing was written at all"
    );
}

/// The initiator of [`stopped`].
fn write_until_the_end(addr: SocketAddr) {
    let domain = Domain::open(&device(), kind(FORM)).unwrap();
    let client = Side::new_in(domain, config(CLIENT), false);
    client.ep.connect(Some(addr), b"hello").unwrap();
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
    let mut source = Buffer::new(&client.domain, 64, Access::WRITE);
    source.fill(0x5a);
    while matches!(write(&client, &source), Ok(()) | Err(FiErrno::EKEYREJECTED)) {}
}

/// The initiator is stopped in the middle of writing. Regions are closed and made, more of them than may
/// wait for its acknowledgement; when it goes on, it reaches none.
fn stopped() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let mut child = start(&addr.to_string());
    let (request, _) = next_request(&eq);
    let domain = Domain::open(&device, kind(FORM)).unwrap();
    let ep = Endpoint::from_request(&domain, config(SERVER), request);
    let server = Side::bound(domain, ep.map_err(|(error, _)| error).unwrap(), false);
    let target = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    server.ep.accept(b"welcome").unwrap();
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    let start = Instant::now();
    // SAFETY: the memory is there; the initiator writes to it.
    while unsafe { target.memory.as_ptr().read_volatile() } == 0 {
        assert!(start.elapsed() < LIMIT, "the initiator does not write");
        std::thread::yield_now();
    }
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) }, 0);
    let start = Instant::now();
    // An access that was under way is waited for with a bound, and may still come then (docs/protocol.md, "Stale
    // keys"): the log says so, and the memory has to stay.
    let Buffer { region, memory } = target;
    drop(region);
    assert!(start.elapsed() < LIMIT / 2, "{:?}", start.elapsed());
    let mut bystanders = Vec::new();
    for key in 0..5000 {
        let bystander = Buffer::with_key(&server.domain, 64, TARGET, 100 + key);
        if key % 50 == 0 {
            bystanders.push(bystander);
        }
    }
    // a second of patience, and the work of five thousand registrations on a machine that may be busy
    assert!(start.elapsed() < LIMIT * 6, "{:?}", start.elapsed());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGCONT) }, 0);
    server.ep.close();
    assert!(child.wait().unwrap().success());
    drop(memory);
    for bystander in &bystanders {
        assert!(bystander.memory.iter().all(|byte| *byte == 0));
    }
}
