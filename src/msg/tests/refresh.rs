//! Regions whose pages appear and change (`fi_mr_refresh(3)`), on a device that pins memory.
//!
//! The tests with unmapped memory run in a separate process without on-demand paging
//! (`SOFTVERBS_ODP=0`).

use std::process::Command;

use super::keys::{TARGET, connect, in_form, kind};
use super::*;
use crate::mr::{NO_DESCRIPTOR, OLD_KERNEL};

const ROLE: &str = "WEFT_TEST_REFRESH";
const PAGE: usize = 4096;
const PAGES: usize = 64;

/// A reserved address range, initially without memory.
struct Space(*mut u8, usize);

impl Space {
    fn new() -> Self {
        Self::of(PAGES)
    }

    fn of(pages: usize) -> Self {
        Self(map(std::ptr::null_mut(), pages, libc::PROT_NONE), pages)
    }

    /// Maps new pages of zeros.
    fn back(&self, first: usize, count: usize) {
        map(self.page(first), count, libc::PROT_READ | libc::PROT_WRITE);
    }

    /// Removes the pages.
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
        unsafe { Region::register(domain.mr(), &config) }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(self.0.cast(), self.1 * PAGE) };
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

/// Entry point of the other process; does nothing in an ordinary run of the tests.
#[test]
fn role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    holes_are_refused_and_filled();
    the_pages_of_a_short_file_are_absent_alone();
    growth_moves_nobody();
    parts_are_not_counted();
    pages_stay_if_no_descriptor_is_free();
    // before Linux 6.11
    OLD_KERNEL.set(true);
    pages_stay_if_no_descriptor_is_free();
    holes_are_refused_and_filled();
    the_pages_of_a_short_file_are_absent_alone();
    parts_are_not_counted();
    pages_stay_if_a_file_has_an_odd_name();
    OLD_KERNEL.set(false);
    lists_that_change_hurt_no_writer();
    operations_go_over_many_parts();
}

const FORM: Mode = Mode::LOCAL.union(Mode::MMU_NOTIFY);

/// Which pages are present cannot be read for the moment: the refresh fails, and peers access the
/// pages of before.
fn pages_stay_if_no_descriptor_is_free() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, PAGE);
    let space = Space::new();
    space.back(0, 1);
    space.back(2, 1);
    NO_DESCRIPTOR.set(true);
    let refused = space.region(&server.domain, 0, 3).map(drop);
    // all pages of this one are present, so nothing has to be read
    let whole = space.region(&server.domain, 2, 1);
    let renewed = whole.as_ref().map(|region| region.refresh(&[]));
    NO_DESCRIPTOR.set(false);
    assert_eq!(refused, Err(FiErrno::EMFILE));
    assert_eq!(renewed, Ok(Ok(())));
    whole.unwrap().close().unwrap();
    let region = space.region(&server.domain, 0, 3).unwrap();
    space.back(1, 1);
    space.unback(0, 1);
    NO_DESCRIPTOR.set(true);
    let refused = region.refresh(&[]);
    NO_DESCRIPTOR.set(false);
    assert_eq!(refused, Err(FiErrno::EMFILE));
    assert_eq!(poke(&client, &mut source, 2 * PAGE, 4), Ok(()));
    assert_eq!(space.word(2 * PAGE), 4);
    assert_eq!(poke(&client, &mut source, PAGE, 5), Err(FiErrno::EACCES));
    region.refresh(&[]).unwrap();
    assert_eq!(poke(&client, &mut source, PAGE, 6), Ok(()));
    region.close().unwrap();
}

/// A mapped file has a name that is not UTF-8: the present pages of a region are found.
fn pages_stay_if_a_file_has_an_odd_name() {
    // SAFETY: a C string.
    let fd = unsafe { libc::memfd_create(c"\xff\xfe".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the new descriptor, which nothing else owns.
    let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    file.set_len(PAGE as u64).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let named = Space::of(1);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the page of `named`.
    let at = unsafe { libc::mmap(named.0.cast(), PAGE, rights, flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    holes_are_refused_and_filled();
}

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
    // half of the target is not mapped
    for at in [3 * PAGE - 4, 5 * PAGE - 4] {
        assert_eq!(
            poke(&client, &mut source, at, 3),
            Err(FiErrno::EACCES),
            "{at}"
        );
    }
    // new pages can be accessed after a refresh
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
    // all pages; an operation over several registrations writes to each of them
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
    // the region can be one local buffer, too
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
    // removed pages are refused as remote and as local buffers
    space.unback(6, 1);
    region.refresh(&[space.range(6, 1)]).unwrap();
    assert_eq!(
        poke(&client, &mut source, 6 * PAGE, 8),
        Err(FiErrno::EACCES)
    );
    assert_eq!(poke(&client, &mut source, 7 * PAGE, 9), Ok(()));
    // SAFETY: the call is refused.
    let refused = unsafe { server.ep.send(LocalIov::single(&iov, &desc), 4) };
    assert_eq!(refused, Err(FiErrno::EINVAL));
    drop(region);
    assert_eq!(
        poke(&client, &mut source, 3 * PAGE, 10),
        Err(FiErrno::EKEYREJECTED)
    );
}

/// A file that is shorter than its mapping, between other memory: the pages behind its end cannot
/// be pinned, all others are accessible.
fn the_pages_of_a_short_file_are_absent_alone() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, 16 * PAGE);
    let space = Space::new();
    space.back(0, 3);
    let file = short_file(3 * PAGE);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: pages of this test's own; the device alone accesses them.
    let at = unsafe {
        use std::os::fd::AsRawFd;
        let at = space.page(3).cast();
        libc::mmap(at, 9 * PAGE, rights, flags, file.as_raw_fd(), 0)
    };
    assert_eq!(at, space.page(3).cast());
    space.back(12, 4);
    let region = space.region(&server.domain, 0, 16).unwrap();
    for round in 0..2 {
        for page in 0..16 {
            let expected = match page {
                6..12 => Err(FiErrno::EACCES),
                _ => Ok(()),
            };
            let done = poke(&client, &mut source, page * PAGE, page as u64);
            assert_eq!(done, expected, "{round} {page}");
        }
        region.refresh(&[space.range(0, 16)]).unwrap();
    }
    file.set_len(7 * PAGE as u64).unwrap();
    region.refresh(&[space.range(3, 9)]).unwrap();
    assert_eq!(poke(&client, &mut source, 9 * PAGE, 1), Ok(()));
    assert_eq!(
        poke(&client, &mut source, 10 * PAGE, 1),
        Err(FiErrno::EACCES)
    );
}

/// A file in memory, without a name.
fn short_file(len: usize) -> std::fs::File {
    use std::os::fd::FromRawFd;
    // SAFETY: a name that ends with 0; the descriptor is new.
    let file = unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"short".as_ptr(), 0)) };
    file.set_len(len as u64).unwrap();
    file
}

/// Memory grows page by page. A receive that was posted before completes, although registrations
/// were merged meanwhile.
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

/// The number of separate page ranges is not limited: peers reach each range, and are refused
/// between them.
fn parts_are_not_counted() {
    let (client, server) = in_form(FORM);
    let mut source = Buffer::all(&client.domain, PAGE);
    let space = Space::new();
    let region = space.region(&server.domain, 0, PAGES).unwrap();
    let check = |source: &mut Buffer, backed: &dyn Fn(usize) -> bool| {
        for page in 0..PAGES {
            let wanted = match backed(page) {
                true => Ok(()),
                false => Err(FiErrno::EACCES),
            };
            let at = page * PAGE;
            assert_eq!(poke(&client, source, at, page as u64), wanted, "{page}");
            assert!(wanted.is_err() || space.word(at) == page as u64);
        }
    };
    for page in (0..PAGES).step_by(2) {
        space.back(page, 1);
        region.refresh(&[space.range(page, 1)]).unwrap();
    }
    check(&mut source, &|page| page.is_multiple_of(2));
    // a region can be registered over such memory, and a call without ranges refreshes all of it
    drop(region);
    let region = space.region(&server.domain, 0, PAGES).unwrap();
    check(&mut source, &|page| page.is_multiple_of(2));
    for page in (0..PAGES).step_by(4) {
        space.unback(page, 1);
    }
    region.refresh(&[]).unwrap();
    check(&mut source, &|page| page % 4 == 2);
    // one range again: an operation is one request
    space.back(0, PAGES);
    region.refresh(&[]).unwrap();
    check(&mut source, &|_| true);
    drop(region);
}

/// A peer that reads a long list while its blocks are split, joined and rewritten reaches each page
/// that stays.
fn lists_that_change_hurt_no_writer() {
    const MANY: usize = 1000;
    let (client, server) = in_form(FORM);
    let space = Space::of(MANY);
    for page in (0..MANY).step_by(4) {
        space.back(page, 1);
    }
    let region = space.region(&server.domain, 0, MANY).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    let count = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut source = Buffer::all(&client.domain, PAGE);
            while !over.load(relaxed) {
                let round = count.fetch_add(1, relaxed);
                let at = round * 68 % MANY / 4 * 4 * PAGE;
                assert_eq!(poke(&client, &mut source, at, round as u64), Ok(()));
            }
        });
        let begun = std::time::Instant::now();
        let mut round = 0;
        while round < 100 || (count.load(relaxed) < 500 && begun.elapsed().as_secs() < 30) {
            let first = round * 37 % (MANY / 4) * 4 + 1;
            for page in (first..MANY).step_by(4).take(60) {
                match round % 2 {
                    0 => space.back(page, 1),
                    _ => space.unback(page, 1),
                }
                region.refresh(&[space.range(page, 1)]).unwrap();
            }
            round += 1;
        }
        over.store(true, relaxed);
    });
    assert!(count.load(relaxed) >= 500, "the writer hardly ran");
    drop(region);
}

/// Operations with more parts than the queue has slots, and operations behind them, with and
/// without polling for the list of parts.
fn operations_go_over_many_parts() {
    use crate::initiator::qp_link::{POLL_LIMIT, POLLS};
    for polls in [POLL_LIMIT, 0] {
        POLLS.set(polls);
        let (client, server) = in_form(FORM);
        let mut source = Buffer::all(&client.domain, PAGES * PAGE);
        let mut target = Buffer::with_key(&client.domain, PAGES * PAGE, Access::all(), 8);
        let space = Space::new();
        let region = space.region(&server.domain, 0, PAGES).unwrap();
        for page in 0..PAGES {
            space.back(page, 1);
            region.refresh(&[space.range(page, 1)]).unwrap();
        }
        for (i, byte) in source.memory.iter_mut().enumerate() {
            *byte = (i * 7 + (i >> 12)) as u8;
        }
        let len = PAGES * PAGE - 100;
        client.write(&source, len, 50, 7, 1).unwrap();
        client.write(&source, 8, 0, 7, 2).unwrap();
        client.read(&target, len, 50, 7, 3).unwrap();
        for context in 1..=3 {
            assert_eq!(client.completion().unwrap().context, context, "{polls}");
        }
        assert!(source.memory[..len] == target.memory[..len]);
        assert_eq!(space.word(0).to_ne_bytes(), source.memory[..8]);
        // with a gap anywhere, the operation writes nothing
        space.unback(40, 1);
        region.refresh(&[space.range(40, 1)]).unwrap();
        target.fill(0xff);
        client.write(&target, len, 50, 7, 4).unwrap();
        assert_eq!(client.completion().unwrap_err().err, FiErrno::EACCES);
        assert_eq!(
            space.word(PAGE).to_ne_bytes(),
            source.memory[PAGE - 50..][..8]
        );
        drop(region);
        POLLS.set(POLL_LIMIT);
    }
}

/// Pages are replaced at the same addresses; all pages are present at first.
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
        // on demand: a refresh prefetches
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
        let pinned = mode.contains(Mode::ALLOCATED) && !mode.contains(Mode::MMU_NOTIFY);
        let expected = if pinned {
            Err(FiErrno::EOPNOTSUPP)
        } else {
            Ok(())
        };
        for (at, len) in [(0, 3 * PAGE), (3 * PAGE - 1, 1), (17, 4000)] {
            assert_eq!(refresh(at, len), expected);
        }
        assert_eq!(buffer.region.refresh(&[]), expected, "all of it");
    }
}

/// The pages of a region as a local buffer.
fn local(space: &Space, region: &Arc<Region>, first: usize, count: usize) -> (libc::iovec, Desc) {
    let iov = libc::iovec {
        iov_base: space.page(first).cast(),
        iov_len: count * PAGE,
    };
    (iov, Desc(region.desc()))
}

/// A posted receive keeps the registration that a refresh replaces, and its end ends it.
#[test]
fn a_replaced_registration_ends_with_its_operations() {
    let (client, server) = in_form(Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY);
    let mut source = Buffer::all(&client.domain, PAGE);
    let space = Space::new();
    space.back(0, 8);
    let region = space.region(&server.domain, 0, 8).unwrap();
    let (iov, desc) = local(&space, &region, 2, 1);
    // SAFETY: the memory outlives the operations.
    let recv = |context| unsafe { server.ep.recv(LocalIov::single(&iov, &desc), context) }.unwrap();
    assert_eq!(region.registrations(), 1);
    for round in 0..3 {
        recv(2 * round);
        region.refresh(&[]).unwrap();
        recv(2 * round + 1);
        // the first receive has the replaced registration, the second one the new one
        assert_eq!(region.registrations(), 2);
        for context in [2 * round, 2 * round + 1] {
            source.fill(context as u8);
            client.send(&source, PAGE, 9).unwrap();
            client.completion().unwrap();
            assert_eq!(server.completion().unwrap().context, context);
            assert_eq!(space.word(2 * PAGE).to_ne_bytes(), source.memory[..8]);
        }
    }
    // the next receive releases the registrations of the receives that are complete
    region.refresh(&[]).unwrap();
    recv(20);
    assert_eq!(region.registrations(), 1);
    // the end of the region ends all of them
    region.refresh(&[]).unwrap();
    assert_eq!(region.registrations(), 2);
    region.close().unwrap();
    assert_eq!(region.registrations(), 0);
}

/// As long as operations across segments alternate with refreshes, the number of registrations does
/// not grow.
#[test]
fn joined_registrations_are_replaced() {
    for access in [Access::all(), Access::SEND | Access::RECV] {
        let (client, server) = in_form(Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY);
        let target = Buffer::with_key(&client.domain, 3 * PAGE, Access::RECV, 1);
        let space = Space::new();
        space.back(0, 16);
        let config = RegionConfig {
            buffers: &[space.range(0, 16)],
            access,
            requested_key: 7,
            ..RegionConfig::default()
        };
        // SAFETY: the region is dropped before the memory.
        let region = unsafe { Region::register(server.domain.mr(), &config) }.unwrap();
        for round in 0..50 {
            space.back(5, 1);
            // SAFETY: the page was mapped above.
            unsafe { space.page(5).write_bytes(round, 8) };
            region.refresh(&[space.range(5, 1)]).unwrap();
            for (first, count) in [(4, 3), (5, 1), (4, 2), (2, 3)] {
                client.recv(&target, 3 * PAGE, 1).unwrap();
                let (iov, desc) = local(&space, &region, first, count);
                // SAFETY: the memory outlives the operation.
                unsafe { server.ep.send(LocalIov::single(&iov, &desc), 2) }.unwrap();
                client.completion().unwrap();
                server.completion().unwrap();
                if let Some(at) = (5 - first < count).then_some((5 - first) * PAGE) {
                    assert_eq!(target.memory[at..at + 8], [round; 8]);
                }
            }
            // the page, the pages around it, the joined registration, and one that the last send
            // has used
            let alive = region.registrations();
            assert!(alive <= 4, "{access:?} {round}: {alive}");
        }
    }
}

/// Registrations of runs that become shorter, of each of which a page is left, do not pin more
/// than twice the region.
#[test]
fn joined_registrations_are_bounded() {
    let (client, server) = in_form(Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY);
    let target = Buffer::with_key(&client.domain, PAGES * PAGE, Access::RECV, 1);
    let space = Space::new();
    space.back(0, PAGES);
    let region = space.region(&server.domain, 0, PAGES).unwrap();
    for last in (3..PAGES).rev().step_by(2) {
        // the page before the last is absent, so the last one is a run of its own
        region.refresh(&[space.range(0, 1)]).unwrap();
        let (iov, desc) = local(&space, &region, 0, last + 1);
        client.recv(&target, PAGES * PAGE, 1).unwrap();
        // SAFETY: the memory outlives the operation.
        unsafe { server.ep.send(LocalIov::single(&iov, &desc), 2) }.unwrap();
        client.completion().unwrap();
        server.completion().unwrap();
        space.unback(last - 1, 1);
        region.refresh(&[space.range(last - 1, 1)]).unwrap();
    }
    let alive = region.registrations();
    assert!(alive <= 8, "{alive}");
}
