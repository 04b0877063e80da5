//! Packets through the rings of links, and beside them through the queue pairs, in one process.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::Random;
use super::endpoints::{End, config, domain, wait, wait_for};
use crate::av::FiAddr;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::{Completion, EntryWriter};
use crate::rdm::link::links::IDLE_RINGS;
use crate::rdm::{EndpointConfig, LocalIov};

const LONGEST: usize = 20_000;

/// Whether the device has rings.
fn has_rings() -> bool {
    std::env::var_os("SOFTVERBS_RING").is_none_or(|value| value != "0")
}

/// The message of a number: its number, and bytes that depend on it.
fn message(number: usize, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len.max(8)).map(|at| (at * 3 + number) as u8).collect();
    bytes[..8].copy_from_slice(&(number as u64).to_ne_bytes());
    bytes
}

/// The remote CQ data of a message of an exchange: none, of 32 bits, and of more.
fn data_of(number: usize) -> Option<u64> {
    match number % 6 {
        0 => Some(number as u64),
        1 => Some(u32::MAX.into()),
        2 => Some(number as u64 | 1 << 32),
        _ => None,
    }
}

/// Sends a message; `false`: too many are under way.
fn send(end: &End, to: FiAddr, bytes: &[u8], data: Option<u64>) -> bool {
    let iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    // SAFETY: the callers keep the buffer until the completion.
    let posted = unsafe { end.ep.send(to, None, local, data, 1, None) };
    assert!(
        matches!(posted, Ok(()) | Err(FiErrno::EAGAIN)),
        "{posted:?}"
    );
    posted.is_ok()
}

fn inject(end: &End, to: FiAddr, bytes: &[u8], data: Option<u64>) -> bool {
    // SAFETY: the buffer is readable during the call.
    let posted = unsafe {
        end.ep
            .inject(to, None, bytes.as_ptr().cast(), bytes.len(), data)
    };
    assert!(
        matches!(posted, Ok(()) | Err(FiErrno::EAGAIN)),
        "{posted:?}"
    );
    posted.is_ok()
}

/// One direction of traffic.
struct Stream<'a> {
    from: &'a End,
    to: &'a End,
    addr: FiAddr,
    lens: Vec<usize>,
    posted: usize,
    /// Messages of which the sender has the entry, or that have none.
    complete: usize,
    received: usize,
    buffer: Vec<u8>,
    waits: bool,
    messages: Vec<Vec<u8>>,
}

impl<'a> Stream<'a> {
    fn new(from: &'a End, to: &'a End, lens: Vec<usize>) -> Self {
        let addr = from.knows(to);
        let messages = lens
            .iter()
            .enumerate()
            .map(|(number, len)| message(number, *len));
        let messages = messages.collect();
        Self {
            from,
            to,
            addr,
            lens,
            posted: 0,
            complete: 0,
            received: 0,
            buffer: vec![0; LONGEST],
            waits: false,
            messages,
        }
    }

    /// Posts the next message, injected or not.
    fn post(&mut self, random: &mut Random) {
        let Some(bytes) = self.messages.get(self.posted) else {
            return;
        };
        let data = data_of(self.posted);
        if bytes.len() <= 4096 && random.one_in(2) {
            let posted = usize::from(inject(self.from, self.addr, bytes, data));
            self.posted += posted;
            self.complete += posted;
        } else {
            self.posted += usize::from(send(self.from, self.addr, bytes, data));
        }
    }

    fn receive(&mut self) {
        if !self.waits && self.received < self.lens.len() {
            self.to.recv(None, &mut self.buffer, 2);
            self.waits = true;
        }
    }

    /// The entry of a receive.
    fn arrived(&mut self, completion: &Completion) {
        let want = &self.messages[self.received];
        assert_eq!(completion.len, want.len(), "{}", self.received);
        assert!(self.buffer[..want.len()] == want[..], "{}", self.received);
        let flagged = completion.flags.contains(Flags::REMOTE_CQ_DATA);
        let data = flagged.then_some(completion.data);
        assert_eq!(data, data_of(self.received), "{}", self.received);
        (self.received, self.waits) = (self.received + 1, false);
    }
}

/// Both directions at once, with messages of both ways in any order. `disturb` is called between
/// the steps.
fn exchange(a: &End, b: &End, seed: u64, count: usize, mut disturb: impl FnMut(&mut Random)) {
    let mut random = Random(seed);
    let mut lens = || {
        let len = |random: &mut Random| match random.below(8) {
            0 => 4_000 + random.below(200) as usize,
            1 => 8 + random.below(8_184) as usize,
            2 => 8_000 + random.below(12_000) as usize,
            _ => 8 + random.below(100) as usize,
        };
        (0..count).map(|_| len(&mut random)).collect()
    };
    let mut streams = [Stream::new(a, b, lens()), Stream::new(b, a, lens())];
    let limit = Instant::now() + Duration::from_secs(60);
    while streams
        .iter()
        .any(|it| it.received < count || it.complete < count)
    {
        for stream in &mut streams {
            match random.below(3) {
                0 => (0..random.below(40)).for_each(|_| stream.post(&mut random)),
                1 => stream.receive(),
                _ => {}
            }
        }
        for end in [0, 1] {
            let polls = random.below(4);
            for _ in 0..polls {
                let Some(completion) = [a, b][end].poll() else {
                    continue;
                };
                match completion.context {
                    1 => streams[end].complete += 1,
                    _ => streams[1 - end].arrived(&completion),
                }
            }
        }
        disturb(&mut random);
        let counts = streams
            .each_ref()
            .map(|it| (it.posted, it.complete, it.received));
        assert!(Instant::now() < limit, "seed {seed}: {counts:?}");
    }
}

#[test]
fn rings_and_queue_pairs_keep_the_order() {
    let domain = domain();
    for seed in 0..6 {
        let (a, b) = (End::open(&domain), End::open(&domain));
        exchange(&a, &b, seed, 1_000, |_| {});
        if has_rings() {
            for end in [&a, &b] {
                let guard = end.ep.shared().lock();
                let hot = guard.as_ref().unwrap().io.links.hot.len();
                assert!(hot > 0, "no ring was used");
            }
        }
    }
}

/// Each side is the first to dial once.
#[test]
fn an_endpoint_without_rings_gets_no_packet_in_one() {
    let domain = domain();
    for dialler in [0, 1] {
        let without = End::with_rings(&domain, config(), 0, false);
        let ends = [without, End::open(&domain)];
        let (from, to) = (&ends[dialler], &ends[1 - dialler]);
        let mut buffers = [[0; 8]; 2];
        from.recv(None, &mut buffers[0], 2);
        to.recv(None, &mut buffers[1], 2);
        from.send(from.knows(to), None, &[1; 8], 1);
        wait([from, to], [1, 1]);
        to.send(to.knows(from), None, &[2; 8], 1);
        wait([from, to], [1, 1]);
        assert_eq!(buffers, [[2; 8], [1; 8]]);
        exchange(from, to, 7, 200, |_| {});
    }
}

#[test]
fn a_break_of_a_link_with_rings_loses_and_repeats_nothing() {
    let domain = domain();
    for seed in 0..6 {
        let (a, b) = (End::open(&domain), End::open(&domain));
        let mut breaks = 0;
        exchange(&a, &b, seed, 1_000, |random| {
            if breaks == 20 || !random.one_in(200) {
                return;
            }
            let end = if random.one_in(2) { &a } else { &b };
            end.ep.shared().apply_event(|core, io| {
                let links: Vec<_> = io.links.keys().collect();
                for link in links {
                    breaks += 1;
                    core.broken(link, io);
                }
            });
        });
        assert!(breaks > 3);
    }
}

/// A receiver that takes nothing: its ring is full, then packets go through the queue pair, and
/// then there is no credit.
#[test]
fn a_full_ring_is_no_end() {
    const COUNT: usize = 60;
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut buffer = vec![0; 4_000];
    for len in [8, 1_000, 4_000] {
        // the link, and a window of the largest size
        for number in 0..200 {
            let bytes = message(number, len);
            a.send(to_b, None, &bytes, 1);
            b.recv(None, &mut buffer, 2);
            wait([&a, &b], [1, 1]);
        }
        let messages: Vec<_> = (0..COUNT).map(|number| message(number, len)).collect();
        for message in &messages {
            a.send(to_b, None, message, 1);
        }
        let mut sent = 0;
        for _ in 0..1_000 {
            sent += usize::from(a.poll().is_some());
        }
        for message in &messages {
            b.recv(None, &mut buffer, 2);
            let [found, _] = wait([&a, &b], [0, 1]);
            sent += found.len();
            assert!(buffer[..len] == message[..]);
        }
        wait([&a, &b], [COUNT - sent, 0]);
    }
}

/// SENDs that have completed do not keep the next message from the ring, although the application
/// has not polled since.
#[test]
fn a_post_finds_that_the_sends_before_it_have_completed() {
    const LEN: usize = 4_000;
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let bytes = message(0, LEN);
    let mut buffer = vec![0; LEN];
    for _ in 0..200 {
        a.send(to_b, None, &bytes, 1);
        b.recv(None, &mut buffer, 2);
        wait([&a, &b], [1, 1]);
    }
    let waits = || {
        let mut guard = a.ep.shared().lock();
        let links = &mut guard.as_mut().unwrap().io.links;
        let keys: Vec<_> = links.keys().collect();
        let mut keys = keys.into_iter();
        keys.any(|key| links.get_mut(key).is_some_and(|link| link.ring_waits()))
    };
    let mut sent = 0;
    while !waits() {
        assert!(sent < 100, "the ring is not full");
        a.send(to_b, None, &bytes, 1);
        sent += 1;
    }
    for _ in 0..sent {
        b.recv(None, &mut buffer, 2);
        wait_for(&b, 1);
    }
    a.send(to_b, None, &bytes, 1);
    assert!(!waits());
    b.recv(None, &mut buffer, 2);
    wait([&a, &b], [sent + 1, 1]);
}

/// Both sides sleep until the other one has answered.
#[test]
fn sleeping_readers_of_rings_wake() {
    const ROUNDS: usize = 300;
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let (to_b, to_a) = (a.knows(&b), b.knows(&a));
    let take = |end: &End| {
        let limit = Some(Duration::from_secs(20));
        let count = end.cq.sread(1, 1, limit, &mut |_: &Completion| {});
        assert_eq!(count, Ok(1));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 8_192];
            for round in 0..ROUNDS {
                b.recv(None, &mut buffer, 2);
                take(&b);
                let len = [8, 2_000, 8_000][round % 3];
                assert!(buffer[..len] == message(round, len));
                while !inject(&b, to_a, &message(round, 16), None) {}
            }
        });
        let mut buffer = vec![0; 8_192];
        for round in 0..ROUNDS {
            a.recv(None, &mut buffer, 2);
            let bytes = message(round, [8, 2_000, 8_000][round % 3]);
            a.send(to_b, None, &bytes, 1);
            take(&a);
            take(&a);
            assert!(buffer[..16] == message(round, 16));
        }
    });
}

/// Rings in which nothing arrives become cold; messages in them arrive nevertheless.
#[test]
fn unused_rings_become_cold() {
    const PEERS: usize = 14;
    let domain = domain();
    let a = End::open(&domain);
    let peers: Vec<_> = (0..PEERS).map(|_| End::open(&domain)).collect();
    let to_a: Vec<_> = peers.iter().map(|peer| peer.knows(&a)).collect();
    let mut buffer = vec![0; 64];
    let mut all_send = |round: usize| {
        for (peer, addr) in peers.iter().zip(&to_a) {
            let bytes = message(round, 16);
            a.recv(None, &mut buffer, 2);
            let limit = Instant::now() + Duration::from_secs(20);
            while !inject(peer, *addr, &bytes, None) {
                assert!(Instant::now() < limit);
            }
            wait([&a, peer], [1, 0]);
            assert_eq!(buffer[..16], bytes);
        }
    };
    let hot = || {
        let guard = a.ep.shared().lock();
        guard.as_ref().map_or(0, |state| state.io.links.hot.len())
    };
    // the first message of a peer goes through the queue pair, the second makes the ring hot
    for round in 0..3 {
        all_send(round);
    }
    assert_eq!(hot(), PEERS);
    let limit = Instant::now() + Duration::from_secs(20);
    while hot() > IDLE_RINGS {
        assert_eq!(a.cq.read(1, &mut |_: &Completion| {}), Err(FiErrno::EAGAIN));
        assert!(Instant::now() < limit, "{} are hot", hot());
    }
    for round in 3..6 {
        all_send(round);
    }
    assert_eq!(hot(), PEERS);
}

/// A read gets the entries of messages directly while it has room; behind an entry that waits, they
/// wait too. Every fifth receive is too short.
#[test]
fn entries_are_in_the_order_of_the_messages() {
    const COUNT: usize = 40;
    let domain = domain();
    let plain = EndpointConfig {
        source: false,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, plain, 0));
    let to_b = a.knows(&b);
    let limit = Instant::now() + Duration::from_secs(20);
    let mut sizes = [1, 3, 20, 2, 16].into_iter().cycle();
    for round in 0..6 {
        let len = |number: usize| if number % 5 == 4 { 8 } else { 16 };
        let mut buffers: Vec<_> = (0..COUNT).map(|number| vec![0; len(number)]).collect();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            b.recv(None, buffer, number);
        }
        let messages: Vec<_> = (0..COUNT).map(|at| message(at + round, 16)).collect();
        let (mut sent, mut contexts) = (0, Vec::new());
        while contexts.len() < COUNT {
            assert!(Instant::now() < limit, "{contexts:?}");
            // as many as a ring holds, or some at a time
            let most = if round % 2 == 0 { COUNT } else { sent + 7 };
            while sent < COUNT.min(most) && inject(&a, to_b, &messages[sent], None) {
                sent += 1;
            }
            a.poll();
            let size = sizes.next().unwrap();
            let mut count = 0;
            let read = b.cq.read(size, &mut |completion: &Completion| {
                contexts.push(completion.context);
                count += 1;
            });
            match read {
                Ok(entries) => assert!(entries == count && count <= size),
                Err(FiErrno::EAVAIL) => {
                    let error = b.cq.read_error().unwrap();
                    assert_eq!((error.err, error.olen), (FiErrno::ETRUNC, 8));
                    contexts.push(error.completion.context);
                }
                Err(error) => assert_eq!(error, FiErrno::EAGAIN),
            }
        }
        assert!(contexts.iter().copied().eq(0..COUNT), "{contexts:?}");
        for (buffer, message) in buffers.iter().zip(&messages) {
            assert_eq!(buffer[..], message[..buffer.len()]);
        }
    }
}

/// Reads one entry by a writer that does not use the addresses of the senders.
struct WithoutSources(usize);

impl EntryWriter for WithoutSources {
    fn write(&mut self, _: &Completion) {
        self.0 += 1;
    }

    fn uses_sources(&self) -> bool {
        false
    }
}

/// Sends messages of 8 bytes, each after the receive of the one before; `read` reads one entry.
fn one_by_one(a: &End, b: &End, count: usize, mut read: impl FnMut() -> bool) {
    let to_b = a.knows(b);
    let mut buffer = vec![0; 64];
    for number in 0..count {
        b.recv(None, &mut buffer, 2);
        assert!(inject(a, to_b, &message(number, 8), None));
        let limit = Instant::now() + Duration::from_secs(20);
        while !read() {
            assert_eq!(a.cq.read(1, &mut |_: &Completion| {}), Err(FiErrno::EAGAIN));
            assert!(Instant::now() < limit);
        }
        assert_eq!(buffer[..8], message(number, 8));
    }
}

/// A read that gets an entry leaves what follows to the next one that gets none.
#[test]
fn room_and_credit_follow_the_entry() {
    let domain = domain();
    let plain = EndpointConfig {
        source: false,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, plain, 0));
    let behind = || {
        let guard = b.ep.shared().lock();
        guard.as_ref().is_some_and(|state| state.behind.is_some())
    };
    let mut later = 0;
    one_by_one(&a, &b, 300, || {
        match b.cq.read(1, &mut |_: &Completion| {}) {
            Ok(count) => {
                later += usize::from(behind());
                count == 1
            }
            Err(error) => {
                assert_eq!(error, FiErrno::EAGAIN);
                assert!(!behind(), "an empty read");
                false
            }
        }
    });
    assert!(later > 150, "{later} of 300");
}

/// `fi_cq_read` of an endpoint with `FI_SOURCE` gets entries as one without; `fi_cq_readfrom` gets
/// the addresses.
#[test]
fn addresses_are_found_for_those_who_use_them() {
    let domain = domain();
    let with = EndpointConfig {
        source: true,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, with, 0));
    let from_a = b.knows(&a);
    for _ in 0..20 {
        let mut plain = WithoutSources(0);
        one_by_one(&a, &b, 4, || b.cq.read(1, &mut plain).is_ok());
        assert_eq!(plain.0, 4);
        let mut sources = Vec::new();
        one_by_one(&a, &b, 4, || {
            let mut writer = |it: &Completion| sources.push(it.src_addr);
            b.cq.read(1, &mut writer).is_ok()
        });
        assert_eq!(sources, [from_a.0; 4]);
    }
}

/// A read that does not use addresses meets an error. The entries behind it, which it has found
/// too, have their addresses for the next one.
#[test]
fn entries_behind_an_error_have_their_addresses() {
    let domain = domain();
    let with = EndpointConfig {
        source: true,
        ..config()
    };
    let (a, b) = (End::open(&domain), End::with(&domain, with, 0));
    let (from_a, to_b) = (b.knows(&a), a.knows(&b));
    for _ in 0..20 {
        let mut buffers = [vec![0; 2], vec![0; 64], vec![0; 64], vec![0; 64]];
        for buffer in &mut buffers {
            b.recv(None, buffer, 2);
        }
        for number in 0..4 {
            assert!(inject(&a, to_b, &message(number, 8), None));
        }
        let limit = Instant::now() + Duration::from_secs(20);
        let mut plain = WithoutSources(0);
        while b.cq.read(8, &mut plain) != Err(FiErrno::EAVAIL) {
            let _ = a.cq.read(1, &mut |_: &Completion| {});
            assert!(Instant::now() < limit);
        }
        assert_eq!(b.cq.read_error().unwrap().err, FiErrno::ETRUNC);
        let mut sources = Vec::new();
        while plain.0 + sources.len() < 3 {
            let mut writer = |it: &Completion| sources.push(it.src_addr);
            let _ = b.cq.read(8, &mut writer);
            let _ = a.cq.read(1, &mut |_: &Completion| {});
            assert!(Instant::now() < limit);
        }
        assert_eq!((plain.0, sources), (0, vec![from_a.0; 3]));
    }
}

/// A reader that computes or yields the processor between its calls polls the device in each of
/// them, and one that does not, in every 64th call without a packet.
#[test]
fn slow_readers_poll_the_device_in_each_call() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    b.knows(&a);
    one_by_one(&a, &b, 4, || b.cq.read(1, &mut |_: &Completion| ()).is_ok());
    let steps_after = |pause: Option<Duration>| {
        for _ in 0..200 {
            assert_eq!(b.poll(), None);
            if let Some(pause) = pause {
                std::thread::sleep(pause);
            }
        }
        b.ep.shared().lock().as_ref().unwrap().step
    };
    // the test may lose the processor, so it repeats what is to be fast
    let is_fast = || (0..1000).any(|_| steps_after(None) == 1);
    assert!(is_fast());
    assert_eq!(steps_after(Some(Duration::from_micros(20))), 64);
    assert!(is_fast());
}

/// The link of an endpoint ends during its next post to the ring, in which the packet arrives.
fn end_at_next_post(end: &End) {
    end.state(|state| {
        let links: Vec<_> = state.io.links.keys().collect();
        for link in links {
            let ring = state.io.links.get_mut(link).and_then(|it| it.ring.as_mut());
            ring.unwrap().ends_next = Some(true);
        }
    });
}

/// A grant arrives in the ring of a link that ends during its post. The next one has a number of
/// its own: the peer would drop another grant with the same one, and wait for credit.
#[test]
fn no_grant_has_the_number_of_one_at_the_end_of_its_link() {
    if !has_rings() {
        return;
    }
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut buffer = [0; 64];
    for _ in 0..4 {
        b.recv(None, &mut buffer, 2);
        a.send(to_b, None, &[1; 8], 1);
        wait([&a, &b], [1, 1]);
    }
    // no link follows before the receives are posted
    let ends = [&a, &b];
    let dials = ends.map(|end| end.state(|state| std::mem::take(&mut state.core.config.dials)));
    end_at_next_post(&b);
    let waits = || {
        b.state(|state| {
            let links = &mut state.io.links;
            let keys: Vec<_> = links.keys().collect();
            let rings = keys
                .iter()
                .filter_map(|key| links.get_mut(*key)?.ring.as_ref().map(|it| it.ends_next));
            rings.flatten().count() != 0
        })
    };
    let mut sent = 0;
    while waits() {
        assert!(sent < 100, "no grant");
        assert!(inject(&a, to_b, &message(sent, 32), None));
        sent += 1;
        assert_eq!(b.poll(), None);
    }
    // credit returns that the first grant did not have
    for _ in 0..sent {
        b.recv(None, &mut buffer, 2);
    }
    for (end, dials) in ends.iter().zip(dials) {
        end.ep.shared().apply_event(|core, io| {
            core.config.dials = dials;
            core.advance_changed(io);
        });
    }
    b.recv(None, &mut buffer, 2);
    a.send(to_b, None, &[1; 8], 1);
    wait([&a, &b], [1, sent + 1]);
    let grants = || {
        let audit = |end: &End| {
            end.state(|state| {
                let peer = state.core.peer_keys().next().unwrap();
                state.core.audit(peer).unwrap()
            })
        };
        (Some(audit(&a).grant), audit(&b).granted)
    };
    let limit = Instant::now() + Duration::from_secs(5);
    while grants().0 != grants().1 {
        assert_eq!((a.poll(), b.poll()), (None, None));
        assert!(Instant::now() < limit, "{:?}", grants());
    }
}

/// The link ends when an injected message is in its ring, and there is no memory to post it again.
/// The call does not return that the application is to repeat it.
#[test]
fn a_message_that_may_have_arrived_is_not_to_be_repeated() {
    if !has_rings() {
        return;
    }
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let other = End::with_rings(&domain, config(), 0, false);
    let (to_b, to_other) = (a.knows(&b), a.knows(&other));
    let mut buffers = vec![[0; 2_000]; 12];
    for buffer in &mut buffers {
        b.recv(None, buffer, 2);
    }
    for buffer in &mut buffers {
        other.recv(None, buffer, 2);
    }
    for _ in 0..4 {
        a.send(to_b, None, &[1; 8], 1);
        wait([&a, &b], [1, 1]);
        a.send(to_other, None, &[1; 8], 1);
        wait([&a, &other], [1, 1]);
    }
    a.state(|state| {
        let io = &mut state.io;
        io.memory.exhaust(1);
    });
    // its packet gives the last slot back
    assert!(inject(&a, to_other, &[1; 2_000], None));
    end_at_next_post(&a);
    let bytes = message(7, 100);
    let post = || {
        // SAFETY: the buffer is readable during the call.
        unsafe { a.ep.inject(to_b, None, bytes.as_ptr().cast(), 100, None) }
    };
    let limit = Instant::now() + Duration::from_secs(20);
    let posted = loop {
        match post() {
            Err(FiErrno::EAGAIN) => assert!(Instant::now() < limit),
            other => break other,
        }
    };
    assert_eq!(posted, Err(FiErrno::ECONNABORTED));
    wait_for(&b, 1);
    for _ in 0..2_000 {
        assert_eq!((a.poll(), b.poll()), (None, None), "delivered twice");
    }
}

/// A packet with a later number waits in the ring for those before it, for a limited time.
#[test]
fn a_packet_that_waits_in_vain_ends_its_link() {
    let domain = domain();
    let (a, b) = (End::open(&domain), End::open(&domain));
    let to_b = a.knows(&b);
    let mut buffer = [0; 8];
    let mut exchange = |value: u8| {
        b.recv(None, &mut buffer, 2);
        a.send(to_b, None, &[value; 8], 1);
        wait([&a, &b], [1, 1]);
        assert_eq!(buffer, [value; 8]);
    };
    (0..4).for_each(&mut exchange);
    a.state(|state| {
        let peer = state.core.peer_keys().next().unwrap();
        let peer = state.core.peers.get_mut(peer).unwrap();
        peer.next = peer.next.next();
    });
    let begin = Instant::now();
    a.send(to_b, None, &[9; 8], 1);
    while b.state(|state| state.core.violations) == 0 {
        assert_eq!(b.poll(), None);
        assert!(begin.elapsed() < Duration::from_secs(10), "it waits");
    }
    wait_for(&a, 1);
    if has_rings() {
        assert!(begin.elapsed() >= Duration::from_secs(1), "not at once");
    }
    while a.state(|state| state.io.links.keys().next().is_some()) {
        assert_eq!((a.poll(), b.poll()), (None, None));
    }
    // the sender has counted a packet that there is not, so another session begins
    exchange(5);
}
