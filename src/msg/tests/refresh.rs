//! Regions whose pages come and change (`fi_mr_refresh(3)`), on a device that pins.
//!
//! Those over memory that is not there run in a process of its own, without on-demand paging (`SOFTVERBS_ODP=0`).

use std::process::Command;

use super::keys::{TARGET, connect, in_form, kind};
use super::*;

const ROLE: &str = "WEFT_TEST_REFRESH";
const PAGE: usize = 4096;
const PAGES: usize = 64;

/// Addresses of their own, at first without memory.
struct Space(*mut u8);

impl Space {
    fn new() -> Self {
        Self(map(std::ptr::null_mut(), PAGES, libc::PROT_NONE))
    }

    /// Puts new pages of zeros there.
    fn back(&self, first: usize, count: usize) {
        map(self.page(first), count, libc::PROT_READ | libc::PROT_WRITE);
    }

    /// Takes them away.
    fn unback(&self, first: usize, count: usize) {
        map(self.page(first), count, libc::PROT_NONE);
    }

    fn page(&self, index: usize) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.0.add(index * PAGE) }
    }

    fn range(&self, first: usize, count: usize) -> crate::mr::Buffer {
        crate::mr::Buffer {
            addr: self.page(first).cast(),
            len: count * PAGE,
        }
    }

    fn word(&self, at: usize) -> u64 {
        // SAFETY: backed by the test; devices write to it.
        unsafe { self.0.add(at).cast::<u64>().read_volatile() }
    }

    fn region(&self, domain: &Arc<Domain>, first: usize, count: usize) -> Result<Arc<Region>> {
        let buffers = [self.range(first, count)];
        let config = RegionConfig {
            buffers: &buffers,
            access: Access::all(),
            requested_key: 7,
            ..RegionConfig::default()
        };
        // SAFETY: tests drop the region before the addresses.
        unsafe { Region::register(domain, &config) }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: of `new`.
        unsafe { libc::munmap(self.0.cast(), PAGES * PAGE) };
    }
}

fn map(at: *mut u8, pages: usize, rights: i32) -> *mut u8 {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: a new mapping, or pages of the test's own.
    let new = unsafe { libc::mmap(at.cast(), pages * PAGE, rights, flags, -1, 0) };
    assert_ne!(new, libc::MAP_FAILED);
    new.cast()
}

/// A write of one word, which must succeed or be refused.
fn poke(
    client: &Side,
    source: &mut Buffer,
    at: usize,
    value: u64,
) -> std::result::Result<(), FiErrno> {
    source.memory[..8].copy_from_slice(&value.to_ne_bytes());
    client.write(source, 8, at as u64, 7, 1).unwrap();
    client.completion().map(|_| ()).map_err(|error| error.err)
}

#[test]
fn memory_that_comes_piece_by_piece() {
    let test = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "msg::tests::refresh::role"])
        .env(ROLE, "1")
        .env("SOFTVERBS_ODP", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&test.stderr);
    assert!(test.status.success(), "{said}");
}

/// What the other process runs; does nothing in an ordinary run of the tests.
#[test]
fn role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    holes_are_refused_and_filled();
    growth_moves_nobody();
    too_many_pieces_change_nothing();
}

const FORM: Mode = Mode::LOCAL.union(Mode::MMU_NOTIFY);

fn holes_are_refused_and_filled() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, 16 * PAGE);
    let space = Space::new();
    space.back(3, 2);
    let region = space.region(&server.domain, 0, 20).unwrap();
    assert_eq!(poke(&client, &mut source, 3 * PAGE, 1), Ok(()));
    assert_eq!(space.word(3 * PAGE), 1);
    for at in [0, 3 * PAGE - 8, 5 * PAGE, 20 * PAGE - 8] {
        assert_eq!(
            poke(&client, &mut source, at, 2),
            Err(FiErrno::EACCES),
            "{at}"
        );
    }
    // half of it lies where nothing is
    for at in [3 * PAGE - 4, 5 * PAGE - 4] {
        assert_eq!(
            poke(&client, &mut source, at, 3),
            Err(FiErrno::EACCES),
            "{at}"
        );
    }
    // pages that came are reached once that was said
    space.back(8, 4);
    assert_eq!(
        poke(&client, &mut source, 8 * PAGE, 4),
        Err(FiErrno::EACCES)
    );
    region.refresh(&[space.range(8, 1)]).unwrap();
    assert_eq!(poke(&client, &mut source, 8 * PAGE, 4), Ok(()));
    assert_eq!(space.word(8 * PAGE), 4);
    assert_eq!(
        poke(&client, &mut source, 9 * PAGE, 5),
        Err(FiErrno::EACCES)
    );
    // all of them; an operation over several pieces lands in each
    for (first, count) in [(0, 3), (5, 3), (12, 8)] {
        space.back(first, count);
    }
    region.refresh(&[space.range(0, 20)]).unwrap();
    region
        .refresh(&[space.range(4, 1), space.range(11, 2)])
        .unwrap();
    source.fill(7);
    client.write(&source, 16 * PAGE, 8, 7, 1).unwrap();
    client.completion().unwrap();
    for at in (0..16 * PAGE).step_by(8) {
        let sent = u64::from_ne_bytes(*source.memory[at..].first_chunk().unwrap());
        assert_eq!(space.word(8 + at), sent, "{at}");
    }
    // as a local buffer it is one, too
    let land = Buffer::with_key(&client.domain, 16 * PAGE, Access::RECV, 1);
    let iov = libc::iovec {
        iov_base: space.page(2).cast(),
        iov_len: 14 * PAGE,
    };
    let desc = Desc(region.desc());
    client.recv(&land, 16 * PAGE, 2).unwrap();
    // SAFETY: the buffer outlives the operation.
    unsafe { server.ep.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
    assert_eq!(client.completion().unwrap().len, 14 * PAGE);
    server.completion().unwrap();
    assert_eq!(land.memory[..8], space.word(2 * PAGE).to_ne_bytes());
    // what has gone is refused, here and there
    space.unback(6, 1);
    region.refresh(&[space.range(6, 1)]).unwrap();
    assert_eq!(
        poke(&client, &mut source, 6 * PAGE, 8),
        Err(FiErrno::EACCES)
    );
    assert_eq!(poke(&client, &mut source, 7 * PAGE, 9), Ok(()));
    // SAFETY: it is refused.
    let refused = unsafe { server.ep.send(LocalIov::single(&iov, &desc), 4) };
    assert_eq!(refused, Err(FiErrno::EINVAL));
    drop(region);
    assert_eq!(
        poke(&client, &mut source, 3 * PAGE, 10),
        Err(FiErrno::EKEYREJECTED)
    );
}

/// Memory grows page by page. A receive that was posted before lands, whatever was merged meanwhile.
fn growth_moves_nobody() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, PAGE);
    source.fill(3);
    let space = Space::new();
    space.back(0, 1);
    let region = space.region(&server.domain, 0, PAGES).unwrap();
    let iov = libc::iovec {
        iov_base: space.page(0).cast(),
        iov_len: PAGE,
    };
    let desc = Desc(region.desc());
    // SAFETY: the buffer outlives the operation.
    unsafe { server.ep.recv(LocalIov::single(&iov, &desc), 5) }.unwrap();
    for page in 1..PAGES {
        space.back(page, 1);
        region.refresh(&[space.range(page, 1)]).unwrap();
        assert_eq!(poke(&client, &mut source, page * PAGE, page as u64), Ok(()));
        // across the boundary
        let at = page * PAGE - 4;
        assert_eq!(poke(&client, &mut source, at, 0), Ok(()));
    }
    source.fill(3);
    client.send(&source, PAGE, 6).unwrap();
    assert_eq!(server.completion().unwrap().context, 5);
    client.completion().unwrap();
    assert_eq!(space.word(0).to_ne_bytes(), source.memory[..8]);
    drop(region);
}

fn too_many_pieces_change_nothing() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, PAGE);
    let space = Space::new();
    let region = space.region(&server.domain, 0, PAGES).unwrap();
    let mut reached = 0;
    for page in (0..PAGES).step_by(2) {
        space.back(page, 1);
        match region.refresh(&[space.range(page, 1)]) {
            Ok(()) => reached += 1,
            Err(error) => {
                assert_eq!(error, FiErrno::ENOMEM);
                break;
            }
        }
    }
    // eight parts, every other one a gap
    assert_eq!(reached, 4);
    for page in 0..PAGES {
        let expected = if page % 2 == 0 && page < 8 {
            Ok(())
        } else {
            Err(FiErrno::EACCES)
        };
        assert_eq!(
            poke(&client, &mut source, page * PAGE, 1),
            expected,
            "{page}"
        );
    }
    drop(region);
    // nor is that a region that can be made
    assert_eq!(
        {
            for page in (0..PAGES).step_by(2) {
                space.back(page, 1);
            }
            space.region(&server.domain, 0, PAGES).err()
        },
        Some(FiErrno::ENOMEM)
    );
}

/// Other pages under the same addresses, with all of them there at first.
#[test]
fn pages_that_change_are_followed() {
    let (client, server) = in_form(Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY);
    let mut source = Buffer::all(&client.domain, PAGE);
    let space = Space::new();
    assert_eq!(
        space.region(&server.domain, 0, 8).err(),
        Some(FiErrno::EFAULT),
        "not there"
    );
    space.back(0, 8);
    let region = space.region(&server.domain, 0, 8).unwrap();
    for round in 1..50_usize {
        let page = round * 5 % 8;
        assert_eq!(poke(&client, &mut source, page * PAGE, 1), Ok(()));
        space.back(page, 1);
        assert_eq!(space.word(page * PAGE), 0);
        region.refresh(&[space.range(page, 1)]).unwrap();
        for page in 0..8 {
            let value = (round * 10 + page) as u64;
            assert_eq!(poke(&client, &mut source, page * PAGE + 8, value), Ok(()));
            assert_eq!(space.word(page * PAGE + 8), value);
        }
    }
    drop(region);
}

/// Keys and contents stay while one thread refreshes and another one writes.
#[test]
fn refreshing_hurts_no_writer() {
    let mode = Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY;
    let device = device();
    let server = Domain::open(&device, kind(mode)).unwrap();
    let client = Domain::open(&device, kind(mode)).unwrap();
    let (client, _server) = connect(client, Arc::clone(&server));
    let memory = Buffer::with_key(&server, 8 * PAGE + 100, TARGET, 7);
    let over = std::sync::atomic::AtomicBool::new(false);
    let written = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut source = Buffer::all(&client.domain, PAGE);
            let mut value = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                value += 1;
                let at = value as usize * 24 % (8 * PAGE);
                assert_eq!(poke(&client, &mut source, at, value), Ok(()));
                written.store(value, std::sync::atomic::Ordering::Relaxed);
            }
        });
        // On a loaded machine the writer may not run during the first 300 rounds.
        let is_enough =
            |round: usize| round >= 300 && written.load(std::sync::atomic::Ordering::Relaxed) > 10;
        for round in (0_usize..).take_while(|round| !is_enough(*round)) {
            assert!(!writer.is_finished(), "the writer has failed");
            let range = crate::mr::Buffer {
                addr: memory.memory[round * 700 % (8 * PAGE)..].as_ptr().cast(),
                len: 1 + round % 100,
            };
            memory.region.refresh(&[range]).unwrap();
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn ranges_are_checked() {
    for mode in [
        Mode::LOCAL | Mode::NATIVE | Mode::MMU_NOTIFY,
        Mode::LOCAL | Mode::NATIVE,
        // on demand: fetched
        Mode::LOCAL | Mode::PROV_KEY | Mode::VIRT_ADDR,
    ] {
        let domain = Domain::open(&device(), kind(mode)).unwrap();
        let buffer = Buffer::all(&domain, 3 * PAGE);
        let refresh = |at: usize, len: usize| {
            let range = crate::mr::Buffer {
                addr: buffer.memory.as_ptr().wrapping_add(at).cast(),
                len,
            };
            buffer.region.refresh(&[range])
        };
        for (at, len) in [
            (0, 0),
            (0, 3 * PAGE + 1),
            (3 * PAGE, 1),
            (usize::MAX, 2),
            (1, usize::MAX),
        ] {
            assert_eq!(refresh(at, len), Err(FiErrno::EINVAL), "{at} {len}");
        }
        assert_eq!(buffer.region.refresh(&[]), Err(FiErrno::EINVAL));
        let pinned = mode.contains(Mode::ALLOCATED) && !mode.contains(Mode::MMU_NOTIFY);
        let expected = if pinned {
            Err(FiErrno::EOPNOTSUPP)
        } else {
            Ok(())
        };
        for (at, len) in [(0, 3 * PAGE), (3 * PAGE - 1, 1), (17, 4000)] {
            assert_eq!(refresh(at, len), expected);
        }
    }
}
