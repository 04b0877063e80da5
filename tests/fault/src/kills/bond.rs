//! A worker's connection with one other worker: three queue pairs and their operations.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_QPS_ERR, IBV_QPT_RC, IBV_QPT_UD, IBV_WC_RECV_RDMA_WITH_IMM};

use super::layout::{Kind, ROOM, id_of, own, target};
use super::message::{HEADER, Header, tag};
use super::moment;
use crate::device::{Device, Handle, Op, Pair, Queue, Region, Retries, Shared, Wc};
use crate::random::{Random, pattern};

/// Outstanding data messages.
const WINDOW: u64 = 2;
/// A datagram's receive begins with a global route header.
const GRH: usize = 40;

/// The two directions of a connected queue pair.
#[derive(Debug, Default)]
struct Stream {
    next: u64,
    sent: u64,
    acked: u64,
    expected: u64,
    received: u64,
    owes: bool,
    free: Vec<usize>,
}

/// Counts of checks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sums {
    pub(crate) messages: u64,
    pub(crate) shared: u64,
    pub(crate) datagrams: u64,
    pub(crate) accesses: u64,
    pub(crate) atomics: u64,
    pub(crate) bytes: u64,
}

/// Objects of the worker that all connections share.
pub(crate) struct Common {
    pub(crate) device: Device,
    pub(crate) queue: Queue,
    pub(crate) shared: Shared,
    pub(crate) handle: Handle,
    pub(crate) target: Region,
    pub(crate) number: u8,
    pub(crate) random: Random,
    pub(crate) sums: Sums,
}

pub(crate) struct Bond {
    pub(crate) nonce: u32,
    pub(crate) other: u8,
    me: u8,
    rc: Pair,
    pub(crate) on_shared: Pair,
    ud: Pair,
    region: Region,
    /// The peer's target region and datagram queue pair.
    addr: u64,
    rkey: u32,
    their_ud: u32,
    pub(crate) connected: bool,
    /// Whether this side may send: the peer is connected, or dead.
    pub(crate) goes: bool,
    /// Time of the first error.
    pub(crate) failed: Option<Instant>,
    /// Outstanding requests and receives.
    outstanding: usize,
    streams: [Stream; 2],
    /// Number of datagrams sent, and the next number that may arrive.
    datagrams: (u64, u64),
    datagram_busy: bool,
    access_busy: bool,
    /// Whether new requests are held back until all outstanding ones are checked.
    pub(crate) rests: bool,
    written: u64,
    swapped: Option<u64>,
    added: Option<u32>,
    their_added: u32,
    heard: Instant,
}

impl Bond {
    pub(crate) fn new(common: &Common, other: u8, nonce: u32) -> Self {
        let device = &common.device;
        let region = device.region(own::LEN);
        let rc = device.pair(IBV_QPT_RC, &common.queue, None);
        let on_shared = device.pair(IBV_QPT_RC, &common.queue, Some(&common.shared));
        let ud = device.pair(IBV_QPT_UD, &common.queue, None);
        let stream = || Stream {
            free: (0..own::SENDS).collect(),
            ..Stream::default()
        };
        let mut bond = Self {
            nonce,
            other,
            me: common.number,
            rc,
            on_shared,
            ud,
            region,
            addr: 0,
            rkey: 0,
            their_ud: 0,
            connected: false,
            goes: false,
            failed: None,
            outstanding: 0,
            streams: [stream(), stream()],
            datagrams: (0, 0),
            datagram_busy: false,
            access_busy: false,
            rests: false,
            written: 0,
            swapped: None,
            added: None,
            their_added: 0,
            heard: Instant::now(),
        };
        (0..own::RECEIVES).for_each(|place| bond.post_receive(place));
        (0..own::DATAGRAMS).for_each(|place| bond.post_datagram_receive(place));
        bond
    }

    fn post_receive(&mut self, place: usize) {
        let id = id_of(self.nonce, Kind::Receive, place);
        self.rc.receive(id, &self.region, place * ROOM, ROOM);
        self.outstanding += 1;
    }

    fn post_datagram_receive(&self, place: usize) {
        let id = id_of(self.nonce, Kind::DatagramReceive, place);
        let at = own::DATAGRAMS_AT + place * own::DATAGRAM_ROOM;
        self.ud.receive(id, &self.region, at, own::DATAGRAM_ROOM);
    }

    /// Numbers of its queue pairs.
    pub(crate) fn numbers(&self) -> String {
        let (rc, on_shared) = (self.rc.number(), self.on_shared.number());
        format!("{rc} {on_shared} {}", self.ud.number())
    }

    /// Connects to the peer's queue pairs and region.
    pub(crate) fn connect(&mut self, device: &Device, theirs: &[u64]) {
        let retries = Retries {
            timeout: 14,
            count: 7,
        };
        device.connect(&self.rc, theirs[0] as u32, retries);
        device.connect(&self.on_shared, theirs[1] as u32, retries);
        self.their_ud = theirs[2] as u32;
        (self.addr, self.rkey) = (theirs[3], theirs[4] as u32);
        self.connected = true;
        self.heard = Instant::now();
    }

    /// Whether a message of the first stream has arrived.
    pub(crate) fn heard_anything(&self) -> bool {
        self.streams[0].expected > 0
    }

    /// Sends the messages that may be sent.
    pub(crate) fn pump(&mut self, random: &mut Random) {
        if !self.goes || self.failed.is_some() || self.rests {
            return;
        }
        for which in 0..2 {
            while self.streams[which].sent - self.streams[which].acked < WINDOW
                && self.send(which, true, random)
            {}
            if self.streams[which].owes {
                self.send(which, false, random);
            }
        }
        assert!(
            self.heard.elapsed() < Duration::from_secs(40),
            "nothing came from living process {}",
            self.other
        );
    }

    /// Returns false if no send buffer is free.
    fn send(&mut self, which: usize, is_data: bool, random: &mut Random) -> bool {
        let stream = &mut self.streams[which];
        let Some(place) = stream.free.pop() else {
            return false;
        };
        let seq = stream.next;
        stream.next += 1;
        stream.sent += u64::from(is_data);
        let ack = stream.received;
        let choice = if is_data { random.below(10) } else { 0 };
        let at = own::SENDS_AT + (which * own::SENDS + place) * ROOM;
        self.outstanding += 1;
        if which == 0 && choice == 5 {
            // it has no header, and so acknowledges nothing: the acknowledgement is sent later
            let len = random.range(1, target::NOTICED_ROOM);
            let bytes = pattern(tag(self.me, self.other, 0, self.nonce, seq), len);
            self.region.write(at, &bytes);
            let to = self.addr + target::noticed(self.me, seq) as u64;
            let op = Op::WriteImm(to, self.rkey, seq as u32);
            let id = id_of(self.nonce, Kind::Send, place);
            self.rc.post(id, op, &self.region, at, len);
            return true;
        }
        self.streams[which].owes = false;
        let len = match choice {
            0..6 => random.range(HEADER, 65),
            6..8 => random.range(65, 8193),
            _ => random.range(8193, ROOM),
        };
        let header = Header {
            from: self.me,
            to: self.other,
            stream: which as u8,
            is_data,
            nonce: self.nonce,
            len: len as u32,
            seq,
            ack,
        };
        self.region.write(at, &header.to_bytes());
        let op = if len <= 64 { Op::Inline } else { Op::Send };
        if which == 1 && choice >= 8 {
            moment::note_post();
        }
        let (pair, kind) = if which == 0 {
            (&self.rc, Kind::Send)
        } else {
            (&self.on_shared, Kind::SharedSend)
        };
        pair.post(id_of(self.nonce, kind, place), op, &self.region, at, len);
        true
    }

    /// Occasionally posts a datagram, and one of the one-sided operations.
    fn access(&mut self, handle: Handle, random: &mut Random) {
        if self.failed.is_some() || self.rests {
            return;
        }
        if !self.datagram_busy && random.below(4) == 0 {
            let header = Header {
                from: self.me,
                to: self.other,
                stream: 2,
                is_data: true,
                nonce: self.nonce,
                len: random.range(HEADER, 4097) as u32,
                seq: self.datagrams.0,
                ack: 0,
            };
            self.datagrams.0 += 1;
            self.datagram_busy = true;
            self.region.write(own::DATAGRAM_AT, &header.to_bytes());
            let op = Op::Datagram(handle, self.their_ud);
            let id = id_of(self.nonce, Kind::Datagram, 0);
            let len = header.len as usize;
            self.ud.post(id, op, &self.region, own::DATAGRAM_AT, len);
        }
        if self.access_busy || random.below(3) != 0 {
            return;
        }
        self.access_busy = true;
        let me = usize::from(self.me);
        match random.below(3) {
            0 => {
                self.outstanding += 1;
                self.written += 1;
                let (at, len) = self.slice();
                let bytes = pattern(self.written, len);
                self.region.write(own::WRITTEN_AT + at, &bytes);
                let op = Op::Write(self.addr + (me * target::SLICE + at) as u64, self.rkey);
                let id = id_of(self.nonce, Kind::Write, 0);
                self.rc
                    .post(id, op, &self.region, own::WRITTEN_AT + at, len);
            }
            1 => {
                self.outstanding += 1;
                let word = self.addr + (target::SWAPPED_AT + 8 * me) as u64;
                // the first operation reads the value that an earlier process with this number left
                let old = self.swapped.unwrap_or(0);
                let op = Op::Swap(word, self.rkey, old, old + 1);
                let id = id_of(self.nonce, Kind::Swap, 0);
                self.on_shared.post(id, op, &self.region, own::RESULT_AT, 8);
            }
            _ => {
                let word = self.addr + (target::ADDED_AT + 8 * (me / 2)) as u64;
                let op = Op::Add(word, self.rkey, 1 << (32 * (me % 2)));
                // many at once, so that the other process's additions are executed between them
                self.outstanding += own::ADDITIONS;
                moment::note_post();
                for place in 0..own::ADDITIONS {
                    let id = id_of(self.nonce, Kind::Add, place);
                    let at = own::RESULT_AT + 8 * place;
                    self.rc.post(id, op, &self.region, at, 8);
                }
            }
        }
    }

    /// The part of its slice that the last write changes.
    fn slice(&self) -> (usize, usize) {
        let mut random = Random::new(self.written);
        let at = random.range(0, target::SLICE - 1);
        (at, random.range(1, target::SLICE - at + 1))
    }

    /// Handles a failed completion.
    pub(crate) fn note_error(&mut self, kind: Kind, wc: &Wc) {
        assert!(self.connected, "an error without a connection: {wc:?}");
        assert!(
            !matches!(kind, Kind::Datagram | Kind::DatagramReceive),
            "a datagram that failed: {wc:?}"
        );
        self.outstanding -= 1;
        self.failed.get_or_insert_with(Instant::now);
    }

    /// Handles a successful completion, except of receives of the shared queue.
    pub(crate) fn complete(&mut self, kind: Kind, place: usize, wc: &Wc, common: &mut Common) {
        match kind {
            Kind::Receive => {
                self.outstanding -= 1;
                if wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM {
                    self.receive_notice(wc, &common.target);
                } else {
                    let bytes = self.region.read(place * ROOM, wc.len);
                    self.receive(0, &bytes);
                }
                common.sums.messages += 1;
                common.sums.bytes += wc.len as u64;
                self.post_receive(place);
                self.access(common.handle, &mut common.random);
            }
            Kind::Send | Kind::SharedSend => {
                self.outstanding -= 1;
                let which = usize::from(kind == Kind::SharedSend);
                self.streams[which].free.push(place);
            }
            Kind::Datagram => self.datagram_busy = false,
            Kind::DatagramReceive => {
                let at = own::DATAGRAMS_AT + place * own::DATAGRAM_ROOM;
                let header = Header::of_bytes(&self.region.read(at + GRH, wc.len - GRH));
                self.expect_from(&header, 2);
                assert!(
                    header.seq >= self.datagrams.1,
                    "a datagram that came twice: {header:?}"
                );
                self.datagrams.1 = header.seq + 1;
                self.post_datagram_receive(place);
                common.sums.datagrams += 1;
            }
            Kind::Write if self.failed.is_some() => self.outstanding -= 1,
            Kind::Write => {
                let (at, len) = self.slice();
                let from = self.addr + (usize::from(self.me) * target::SLICE + at) as u64;
                let op = Op::Read(from, self.rkey);
                let id = id_of(self.nonce, Kind::Read, 0);
                self.rc.post(id, op, &self.region, own::READ_AT + at, len);
            }
            Kind::Read => {
                let (at, len) = self.slice();
                let found = self.region.read(own::READ_AT + at, len);
                assert!(
                    found == pattern(self.written, len),
                    "what was read is not what was written"
                );
                common.sums.accesses += 2;
                self.accessed();
            }
            Kind::Swap => {
                let found = self.region.read_word(own::RESULT_AT);
                let expected = self.swapped.unwrap_or(found);
                assert_eq!(found, expected, "a word that nobody else swaps");
                // the first swap took effect only if the word was 0
                let took = self.swapped.is_some() || found == 0;
                self.swapped = Some(found + u64::from(took));
                common.sums.atomics += 1;
                self.accessed();
            }
            Kind::Add => {
                let found = self.region.read_word(own::RESULT_AT + 8 * place);
                let shift = 32 * (self.me % 2);
                let (mine, their) = ((found >> shift) as u32, (found >> (32 - shift)) as u32);
                let expected = self.added.unwrap_or(mine);
                assert_eq!(mine, expected, "additions got lost or doubled");
                assert!(
                    their >= self.their_added,
                    "additions of another process got lost"
                );
                self.added = Some(mine.wrapping_add(1));
                self.their_added = their;
                common.sums.atomics += 1;
                self.outstanding -= 1;
                self.access_busy = place + 1 < own::ADDITIONS;
            }
            Kind::SharedReceive => unreachable!("the worker's"),
        }
    }

    fn accessed(&mut self) {
        self.outstanding -= 1;
        self.access_busy = false;
    }

    fn expect_from(&self, header: &Header, stream: u8) {
        let got = (header.from, header.to, header.stream, header.nonce);
        assert_eq!(got, (self.other, self.me, stream, self.nonce), "{header:?}");
    }

    /// Handles a message of a connected stream.
    pub(crate) fn receive(&mut self, which: usize, bytes: &[u8]) {
        let header = Header::of_bytes(bytes);
        self.expect_from(&header, which as u8);
        self.heard = Instant::now();
        let stream = &mut self.streams[which];
        assert_eq!(
            header.seq, stream.expected,
            "a message that got lost or came twice: {header:?}"
        );
        assert!(header.ack >= stream.acked && header.ack <= stream.sent);
        stream.expected += 1;
        stream.acked = header.ack;
        stream.received += u64::from(header.is_data);
        stream.owes |= header.is_data;
    }

    /// A write with immediate has no header: the immediate contains its number.
    fn receive_notice(&mut self, wc: &Wc, written: &Region) {
        let stream = &mut self.streams[0];
        let seq = stream.expected;
        assert_eq!(wc.imm, seq as u32, "a notice that got lost or came twice");
        let expected = pattern(tag(self.other, self.me, 0, self.nonce, seq), wc.len);
        let found = written.read(target::noticed(self.other, seq), wc.len);
        assert!(found == expected, "a notice without its data");
        stream.expected += 1;
        stream.received += 1;
        stream.owes = true;
    }

    /// A text of its state, for diagnosis.
    pub(crate) fn show(&self) -> String {
        let states = (self.rc.state(), self.on_shared.state());
        format!(
            "with {}: nonce {}, connected {}, failed {:?}, states {states:?}, {} outstanding, silent for {:?}, {:?}",
            self.other,
            self.nonce,
            self.connected,
            self.failed.map(|at| at.elapsed()),
            self.outstanding,
            self.heard.elapsed(),
            self.streams
        )
    }

    /// Whether all its requests have completed.
    pub(crate) fn is_idle(&self) -> bool {
        let sends = self.streams.iter().map(|stream| stream.free.len()).sum();
        !self.access_busy && !self.datagram_busy && 2 * own::SENDS == sends
    }

    /// Whether all operations of a failed connection have completed.
    pub(crate) fn is_flushed(&self) -> bool {
        self.failed.is_some() && self.outstanding == 0
    }

    /// Whether it can be destroyed.
    pub(crate) fn is_over(&self) -> bool {
        self.is_flushed() && self.on_shared.state() == IBV_QPS_ERR
    }

    /// If the other process ended between the connections of the two queue pairs, this process gets
    /// no event for the second one: as on a wire, it must send a request to detect the end.
    pub(crate) fn ask(&mut self, random: &mut Random) {
        let patience = Duration::from_secs(1);
        let late = self.failed.is_some_and(|at| at.elapsed() > patience);
        if late && self.is_flushed() && !self.is_over() {
            self.send(1, true, random);
        }
    }

    pub(crate) fn destroy(self, device: &Device) {
        device.drain_events();
        self.rc.destroy();
        self.on_shared.destroy();
        self.ud.destroy();
        let begin = Instant::now();
        self.region.release();
        assert!(
            begin.elapsed() < Duration::from_secs(2),
            "a dead process was waited for"
        );
    }
}
