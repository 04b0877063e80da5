//! Keys of closed regions: no write through them reaches other memory, even if the device reuses
//! its rkeys, and whether the initiator runs or is stopped.
//!
//! Each test runs in a process of its own, on a device that reuses rkeys immediately
//! (`SOFTVERBS_REUSE_KEYS`).

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::keys::{TARGET, connect, kind};
use super::*;
use crate::verbs::Buf;

const ROLE: &str = "WEFT_TEST_STALE";
const FORM: Mode = Mode::ALLOCATED.union(Mode::LOCAL);
/// The key that is reused, and the key of the bystander.
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

/// Entry point of the other processes; does nothing in an ordinary run of the tests.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "reuse" => reuse(),
        "stopped" => stopped(),
        "resumed" => resumed(),
        "killed" => killed(),
        writer => write_until_the_end(&Writer::parse(writer)),
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

#[test]
fn a_region_is_closed_when_a_stopped_initiator_has_gone_on_and_not_before() {
    assert!(start("resumed").wait().unwrap().success());
}

#[test]
fn a_killed_initiator_is_not_waited_for() {
    assert!(start("killed").wait().unwrap().success());
}

/// The task of an initiator: writes its bytes to a region until the connection ends.
#[derive(Clone, Copy, Debug)]
struct Writer {
    to: SocketAddr,
    form: Mode,
    key: u64,
    at: u64,
    len: usize,
}

impl Writer {
    fn start(&self) -> Child {
        let Self {
            to,
            form,
            key,
            at,
            len,
        } = self;
        start(&format!("{to} {} {key} {at} {len}", form.bits()))
    }

    fn parse(text: &str) -> Self {
        let mut words = text.split(' ');
        let mut next = || words.next().unwrap();
        Self {
            to: next().parse().unwrap(),
            form: Mode::from_bits_retain(next().parse().unwrap()),
            key: next().parse().unwrap(),
            at: next().parse().unwrap(),
            len: next().parse().unwrap(),
        }
    }
}

fn write(side: &Side, source: &Buffer, to: &Writer) -> std::result::Result<(), FiErrno> {
    let (iov, desc) = source.part(0, to.len);
    // SAFETY: the buffer outlives the operation.
    unsafe {
        let local = LocalIov::single(&iov, &desc);
        side.ep.write(local, to.at, to.key, 1)?;
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
        // the time for which this process was stopped does not count
        let now = Instant::now();
        waited += (now - last).min(Duration::from_millis(100));
        last = now;
        assert!(waited < LIMIT, "an operation is lost");
    }
}

/// Regions with one key are registered and closed while a thread writes to that key. After each
/// close, memory that must stay zero is registered, most likely with the rkey of the closed region.
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
                let to = Writer {
                    to: address(&device),
                    form: FORM,
                    key: KEY,
                    at: 0,
                    len: 64,
                };
                while !over.load(Ordering::Relaxed) {
                    match write(&client, &source, &to) {
                        Ok(()) => written.fetch_add(1, Ordering::Relaxed),
                        Err(FiErrno::EKEYREJECTED) if client.ep.peer_addr().is_ok() => 0,
                        // closing the region while the write is under way ends the connection
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
                // SAFETY: the memory is live; the volatile read sees writes of a device.
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

/// The initiator of the tests below.
fn write_until_the_end(to: &Writer) {
    let domain = Domain::open(&device(), kind(to.form)).unwrap();
    let client = Side::new_in(domain, config(CLIENT), false);
    client.ep.connect(Some(to.to), b"hello").unwrap();
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
    let mut source = Buffer::new(&client.domain, to.len, Access::WRITE);
    source.memory.fill(0x5a);
    while matches!(
        write(&client, &source, to),
        Ok(()) | Err(FiErrno::EKEYREJECTED)
    ) {}
}

/// Memory of the device, to which initiators write by plain copies: a stopped initiator is usually
/// in the middle of a copy.
struct DeviceMemory {
    domain: Arc<Domain>,
    at: *mut u8,
    len: usize,
    _buf: Buf,
}

impl DeviceMemory {
    fn new(domain: &Arc<Domain>, len: usize) -> Self {
        let buf = Buf::alloc(domain.pd(), len);
        Self {
            domain: Arc::clone(domain),
            at: buf.addr,
            len,
            _buf: buf,
        }
    }

    fn register(&self) -> Arc<Region> {
        let config = RegionConfig {
            buffers: &[crate::mr::Buffer {
                addr: self.at.cast(),
                len: self.len,
            }],
            access: TARGET,
            requested_key: KEY,
            ..RegionConfig::default()
        };
        // SAFETY: the memory stays until the region is closed, below.
        unsafe { Region::register(self.domain.mr(), &config) }.unwrap()
    }

    fn clear(&self) {
        // SAFETY: the memory is live; initiators may write at the same time.
        (0..self.len).for_each(|i| unsafe { self.at.add(i).write_volatile(0) });
    }

    fn is_clear(&self) -> bool {
        // SAFETY: as above.
        (0..self.len).all(|i| unsafe { self.at.add(i).read_volatile() } == 0)
    }
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Stops the child, and returns when it is stopped.
fn stop(child: &Child) {
    signal(child, libc::SIGSTOP);
    let mut status = 0;
    // SAFETY: as above; the status is writable.
    let who = unsafe { libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert!(who == child.id() as i32 && libc::WIFSTOPPED(status));
}

/// A stopped initiator, and the other end of its connection.
struct Caught {
    child: Child,
    server: Side,
}

/// Starts an initiator that writes to all of `region`, and stops it after its first write.
fn stop_a_writer(memory: &DeviceMemory, region: &Arc<Region>, form: Mode) -> Caught {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, to) = listener(&device, &eq);
    let at = if form.contains(Mode::VIRT_ADDR) {
        memory.at as u64
    } else {
        0
    };
    memory.clear();
    let writer = Writer {
        to,
        form,
        key: region.key(),
        at,
        len: memory.len,
    };
    let child = writer.start();
    let (request, _) = next_request(&eq);
    let ep = Endpoint::from_request(&memory.domain, config(SERVER), request);
    let domain = Arc::clone(&memory.domain);
    let server = Side::bound(domain, ep.map_err(|(error, _)| error).unwrap(), false);
    server.ep.accept(b"welcome").unwrap();
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    let start = Instant::now();
    while memory.is_clear() {
        assert!(start.elapsed() < LIMIT, "the initiator does not write");
        std::thread::yield_now();
    }
    stop(&child);
    Caught { child, server }
}

/// Continues the stopped peer and closes the connection; the peer exits when it detects the end.
fn go_on(mut caught: Caught) {
    signal(&caught.child, libc::SIGCONT);
    caught.server.ep.close();
    assert!(caught.child.wait().unwrap().success());
}

/// Stops initiators until one is in the middle of a write: then closing the region fails. The other
/// initiators must not write after the close.
fn catch(memory: &DeviceMemory, form: Mode) -> (Arc<Region>, Caught) {
    for _ in 0..100 {
        let region = memory.register();
        let caught = stop_a_writer(memory, &region, form);
        let start = Instant::now();
        let closed = region.close();
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        match closed {
            Err(FiErrno::EBUSY) => return (region, caught),
            result => result.unwrap(),
        }
        memory.clear();
        go_on(caught);
        assert!(memory.is_clear(), "{form:?}: written after it was closed");
    }
    panic!("no initiator was stopped in the middle of a write");
}

/// Native keys, whose registrations are closed at once, and published keys, whose registrations
/// lose their remote access first.
const FORMS: [Mode; 2] = [Mode::NATIVE.union(Mode::LOCAL), FORM];

/// An initiator is stopped in the middle of a write. Closing is refused until it continues; after
/// the close it writes nothing.
fn resumed() {
    for form in FORMS {
        let domain = Domain::open(&device(), kind(form)).unwrap();
        let memory = DeviceMemory::new(&domain, 1 << 20);
        let (region, caught) = catch(&memory, form);
        assert_eq!(region.enable(), Err(FiErrno::EOPBADSTATE));
        assert_eq!(region.close(), Err(FiErrno::EBUSY), "{form:?}");
        signal(&caught.child, libc::SIGCONT);
        let start = Instant::now();
        while let Err(error) = region.close() {
            assert_eq!(error, FiErrno::EBUSY);
            assert!(start.elapsed() < LIMIT, "{form:?}: busy for ever");
        }
        memory.clear();
        go_on(caught);
        assert!(memory.is_clear(), "{form:?}: written after it was closed");
        assert_eq!(region.close(), Ok(()), "once more does no harm");
        drop(region);
        // the key is free again
        memory.register().close().unwrap();
    }
}

/// As [`resumed`], but the initiator is killed.
fn killed() {
    for form in FORMS {
        let domain = Domain::open(&device(), kind(form)).unwrap();
        let memory = DeviceMemory::new(&domain, 1 << 20);
        let (region, mut caught) = catch(&memory, form);
        signal(&caught.child, libc::SIGKILL);
        // the child is not waited for: a zombie does not write
        let start = Instant::now();
        while let Err(error) = region.close() {
            assert_eq!(error, FiErrno::EBUSY);
            assert!(start.elapsed() < LIMIT, "{form:?}: waits for the dead");
        }
        memory.clear();
        assert!(!caught.child.wait().unwrap().success());
        assert!(memory.is_clear(), "{form:?}: written after it was closed");
        caught.server.ep.close();
    }
}

/// The initiator is stopped in the middle of a write. More regions are closed and registered than
/// may wait for its acknowledgement; after it continues, it reaches none of them.
fn stopped() {
    let domain = Domain::open(&device(), kind(FORM)).unwrap();
    let memory = DeviceMemory::new(&domain, 64);
    let region = memory.register();
    let caught = stop_a_writer(&memory, &region, FORM);
    let start = Instant::now();
    let closed = region.close();
    assert!(start.elapsed() < LIMIT / 2, "{:?}", start.elapsed());
    memory.clear();
    let mut bystanders = Vec::new();
    for key in 0..5000 {
        let bystander = Buffer::with_key(&domain, 64, TARGET, 100 + key);
        if key % 50 == 0 {
            bystanders.push(bystander);
        }
    }
    // 1 s of waiting for the initiator, and 5000 registrations on a machine that may be busy
    assert!(start.elapsed() < LIMIT * 6, "{:?}", start.elapsed());
    match closed {
        Ok(()) => {
            go_on(caught);
            assert!(memory.is_clear(), "written after it was closed");
        }
        Err(error) => {
            assert_eq!(error, FiErrno::EBUSY);
            go_on(caught);
            region.close().unwrap();
        }
    }
    for bystander in &bystanders {
        assert!(bystander.memory.iter().all(|byte| *byte == 0));
    }
}
