//! A ring that is written faster than it is read: each call takes at most a few times the capacity
//! of the ring.
//!
//! A thread of the receiver's own process repeatedly writes the messages of a real sender into the
//! ring. The number of messages that a call took is read in the ring, where the receiver publishes
//! its position. No clock is used.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

/// Limit of a flooded process's test.
const LIMIT: Duration = Duration::from_secs(240);
const SLOTS: u32 = 2048;
/// Offset of the slots, and of the receiver's position.
const SLOTS_AT: usize = 4096;
const CONSUMED_AT: usize = 64;
const RING_SIZE: usize = SLOTS_AT + 64 * SLOTS as usize;
/// The first word of a ring.
const RING_MAGIC: [u8; 8] = *b"ovring\x01\0";
const PROCESSES: u64 = 1024;
/// More messages than a poll takes from the ring of a living sender.
const BATCH: u32 = 128;
/// The payload of the first message, which identifies its ring.
const MARK: [u8; 8] = *b"flooded!";

fn main() {
    run(&[
        ("events_come_out", events_parent, sender),
        ("a_dead_senders_ring_is_let_go", dead_parent, sender),
    ]);
}

/// The ring from the child to this process, mapped once more.
struct Ring(*mut u8);

// SAFETY: memory that is only accessed through atomics, and stays.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// The ring whose first message contains [`MARK`].
    fn find() -> Self {
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let name = std::fs::read_link(entry.path()).unwrap_or_default();
            if !name.to_string_lossy().starts_with("/memfd:softverbs (") {
                continue;
            }
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(entry.path())
                .unwrap();
            // The rings are the last part of the file.
            let end = file.metadata().unwrap().len();
            let begin = end - (RING_SIZE as u64 * PROCESSES + (1 << 16));
            for at in (begin..end).step_by(4096) {
                let mut magic = [0; 8];
                file.read_exact_at(&mut magic, at).unwrap();
                if magic != RING_MAGIC {
                    continue;
                }
                let ring = Self::map(&file, at);
                let payload = ring.word(0, 4).load(Ordering::Relaxed);
                if payload == u64::from_ne_bytes(MARK) {
                    return ring;
                }
            }
        }
        panic!("no ring has the message");
    }

    fn map(file: &std::fs::File, at: u64) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which stays.
        let addr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                RING_SIZE,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                at.cast_signed(),
            )
        };
        assert_ne!(addr, libc::MAP_FAILED);
        Self(addr.cast())
    }

    fn word(&self, position: u32, number: usize) -> &AtomicU64 {
        let at = SLOTS_AT + 64 * (position % SLOTS) as usize + 8 * number;
        // SAFETY: inside the mapping, and aligned.
        unsafe { &*self.0.add(at).cast::<AtomicU64>() }
    }

    fn consumed(&self) -> u32 {
        // SAFETY: as above.
        let consumed = unsafe { &*self.0.add(CONSUMED_AT).cast::<AtomicU32>() };
        consumed.load(Ordering::Acquire)
    }

    /// The header that was written at this position.
    fn header(&self, position: u32) -> [u64; 4] {
        std::array::from_fn(|number| self.word(position, number).load(Ordering::Relaxed))
    }

    /// Publishes a message of one slot.
    fn write(&self, position: u32, header: [u64; 4]) {
        for (number, &word) in header.iter().enumerate().skip(1) {
            self.word(position, number).store(word, Ordering::Relaxed);
        }
        let sequence = u64::from(position << 1 | 1);
        let first = header[0] & !u64::from(u32::MAX) | sequence;
        self.word(position, 0).store(first, Ordering::Release);
    }
}

/// Sends one datagram to each of two queue pairs, and stays alive.
fn sender(link: &mut Link) {
    let mut end = datagram_end();
    let buffer = end.buffer(&MARK);
    let others = [end.exchange(link), end.exchange(link)];
    for other in others {
        let ah = address_handle(&end, other);
        send_datagram(&mut end, &buffer, MARK.len(), (ah, other.qpn, QKEY));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    loop {
        // datagrams that had no ring are sent while this process polls
        assert!(end.poll().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two queue pairs without receives, after the first datagram of each has arrived.
fn receivers(link: &mut Link) -> [End; 2] {
    let mut ends = [datagram_end(), datagram_end()];
    for end in &mut ends {
        let receive = end.buffer(&[0; 48]);
        end.recv(&receive, 1);
        end.exchange(link);
    }
    for end in &mut ends {
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    ends
}

/// Threads that wait for events get them, or return without one.
fn events_parent(link: &mut Link) {
    let [mut end, _other] = receivers(link);
    let ring = Ring::find();
    let header = ring.header(0);
    let own = end.address();
    let to_itself = (address_handle(&end, own), own.qpn, QKEY);
    // not the mark: the ring to itself stays when this test has ended
    let buffer = end.buffer(&[0; MARK.len()]);
    // the first datagram requests a ring
    send_datagram(&mut end, &buffer, MARK.len(), to_itself);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    let (over, begin) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let (ring, over) = (&ring, &over);
        scope.spawn(move || {
            let mut head = ring.consumed();
            while !over.load(Ordering::Relaxed) {
                while head.wrapping_sub(ring.consumed()) < SLOTS {
                    ring.write(head, header);
                    head = head.wrapping_add(1);
                }
            }
        });
        let took = |call: &str, done: &mut dyn FnMut()| {
            let before = ring.consumed();
            done();
            let count = ring.consumed().wrapping_sub(before);
            over.fetch_or(count > 3 * SLOTS, Ordering::Relaxed);
            assert!(count <= 3 * SLOTS, "{call} took {count} messages");
            count
        };
        // SAFETY: live objects, writable outputs; all zeros is a value of them.
        unsafe {
            for fd in [(*end.channel).fd, (*end.context).async_fd] {
                libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
            }
            let (mut total, mut rounds) = (0u64, 0);
            // long enough for the device to detect the flood
            while rounds < 300 || total < 50 * u64::from(SLOTS) {
                rounds += 1;
                total += u64::from(took("ibv_get_cq_event", &mut || {
                    let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                    let get = verbs().ibv_get_cq_event;
                    assert_eq!(get(end.channel, &raw mut cq, &raw mut context), -1);
                }));
                total += u64::from(took("ibv_get_async_event", &mut || {
                    let mut event: ibv_async_event = std::mem::zeroed();
                    let get = verbs().ibv_get_async_event;
                    assert_eq!(get(end.context, &raw mut event), -1);
                }));
                assert_eq!(ibv_req_notify_cq(end.cq, 0), 0);
                send_datagram(&mut end, &buffer, MARK.len(), to_itself);
                total += u64::from(took("ibv_get_cq_event", &mut || {
                    let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                    let get = verbs().ibv_get_cq_event;
                    assert_eq!(get(end.channel, &raw mut cq, &raw mut context), 0);
                    (verbs().ibv_ack_cq_events)(cq, 1);
                }));
                assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
                assert!(begin.elapsed() < LIMIT, "{total} messages in {rounds}");
            }
            println!("{total} messages in {rounds} rounds");
        }
        over.store(true, Ordering::Relaxed);
    });
    link.kill();
}

/// The message that shows the receiver's position.
const SHOWS: u32 = 1000;

/// Adds the messages that the receiver has taken once more, behind the others, as soon as it has
/// copied the message with the number [`SHOWS`] to `shown`. The receiver is taking messages then.
fn refill(ring: &Ring, begin: u32, header: [u64; 4], shown: &AtomicU64, over: &AtomicBool) -> bool {
    while shown.load(Ordering::Acquire) == 0 {
        if over.load(Ordering::Relaxed) {
            return false;
        }
        std::hint::spin_loop();
    }
    for i in 0..SHOWS {
        ring.write(begin.wrapping_add(SLOTS + i), header);
    }
    true
}

/// The sender has ended, and another process continues to write into its ring.
fn dead_parent(link: &mut Link) {
    let [mut end, other] = receivers(link);
    let ring = Ring::find();
    let (header, shown) = (ring.header(0), ring.header(1));
    let begin = ring.consumed();
    for i in 0..SLOTS {
        let header = if i == SHOWS { shown } else { header };
        ring.write(begin.wrapping_add(i), header);
    }
    let show = other.buffer(&[0; 48]);
    let mut sge = ibv_sge {
        addr: show.addr(),
        length: 48,
        lkey: show.lkey(),
    };
    let mut wr = ibv_recv_wr {
        sg_list: &raw mut sge,
        num_sge: 1,
        ..Default::default()
    };
    // SAFETY: live queue pair, a chain of one, a writable pointer.
    let posted = unsafe { ibv_post_recv(other.qp, &raw mut wr, &mut std::ptr::null_mut()) };
    assert_eq!(posted, 0);
    // the begin of the GRH is not 0
    let shown = std::ptr::with_exposed_provenance_mut(show.addr() as usize);
    // SAFETY: aligned, inside a buffer that lives until the end; this process reads it by atomics.
    let shown = unsafe { AtomicU64::from_ptr(shown) };
    let again = Ring::find();
    let over = AtomicBool::new(false);
    let mut last = begin;
    let refilled = std::thread::scope(|scope| {
        let thread = scope.spawn(|| refill(&again, begin, header, shown, &over));
        link.kill();
        let since = Instant::now();
        let mut changed = since;
        // A poll detects the end of the process within 50 ms (`tests/fault`). 5,000 polls can
        // take less than that.
        while changed.elapsed() < Duration::from_millis(500) || last.wrapping_sub(begin) <= SHOWS {
            assert!(end.poll().is_none());
            let now = ring.consumed();
            let count = now.wrapping_sub(last);
            assert!(count <= BATCH + SLOTS, "a poll took {count} messages");
            if now != last {
                (last, changed) = (now, Instant::now());
            }
            let taken = last.wrapping_sub(begin);
            assert!(since.elapsed() < LIMIT, "{taken} messages were taken");
        }
        over.store(true, Ordering::Relaxed);
        thread.join().unwrap()
    });
    assert!(refilled);
    println!("{} messages were taken", last.wrapping_sub(begin));
    // no message of it is taken any more
    for i in 0..SLOTS {
        ring.write(last.wrapping_add(i), header);
    }
    for _ in 0..5000 {
        assert!(end.poll().is_none());
    }
    assert_eq!(ring.consumed(), last);
}
