//! Announcements behind one that was read (`executor::announced`): the messages of those that are
//! in the ring already are read by one call of the device. A message of 16 KiB in a stream takes a
//! quarter less time so: entering the kernel and finding the peer's memory are paid once.
//! `docs/rdm.md`, "Rings".

#![allow(
    unsafe_code,
    reason = "reads packets in a ring, and into the application's buffers"
)]

use super::Executor;
use super::announced::{Announcement, as_announced};
use crate::matching::Matched;
use crate::mr::Following;
use crate::rdm::completions::Reader;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::{Core, Origin};
use crate::rdm::receive::Receive;
use crate::rdm::receives::{AtSender, Envelope, index_of};
use crate::rdm::table_keys::RxKey;
use crate::verbs::{Next, RemoteAddr, Rkey, Run, Sge};
use crate::wire::rdm::Credit;
use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::ring::{Announced, Source};

/// Most messages that are read by one call of the device.
const MOST: usize = 8;

/// An announcement whose packet was taken. Its receive is not found by other messages any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    pub(super) origin: Origin,
    pub(super) source: Source,
    pub(super) envelope: Envelope,
    pub(super) matched: Matched<RxKey>,
}

/// Messages that are taken together. Those that are read have a receive, an sge and an address; the
/// last one may have none.
#[derive(Debug, Default)]
pub(in crate::rdm) struct List {
    messages: Vec<Listed>,
    receives: Vec<Receive>,
    sges: Vec<Sge>,
    addrs: Vec<RemoteAddr>,
    rkeys: Vec<Rkey>,
    /// The descriptors of the receives, until the messages are read.
    follows: Following<'static>,
    bytes: u64,
    /// The link on which they are read, and whether the lkeys of the receives are checked.
    way: Option<(LinkKey, bool)>,
}

impl List {
    pub(super) fn new() -> Self {
        Self {
            messages: Vec::with_capacity(MOST),
            receives: Vec::with_capacity(MOST),
            sges: Vec::with_capacity(MOST),
            addrs: Vec::with_capacity(MOST),
            rkeys: Vec::with_capacity(MOST),
            ..Self::default()
        }
    }

    fn clear(&mut self) {
        (self.bytes, self.way) = (0, None);
        self.messages.clear();
        self.receives.clear();
        self.sges.clear();
        self.addrs.clear();
        self.rkeys.clear();
        self.follows = Following::default();
    }
}

impl Executor {
    /// Takes the announcements behind one that was read, as far as they are in the run and the
    /// reader has room for their entries, and reads their messages. Returns whether the peer has
    /// used half of its credit.
    ///
    /// # Safety
    /// As [`Self::read_run`]; the run is in the ring of this link.
    #[inline(always)]
    pub(super) unsafe fn read_list(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        run: &mut Run,
        reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        let room = reader.as_ref().map_or(MOST, |reader| reader.left());
        // SAFETY: the caller's promise.
        if room == 0 || !matches!(unsafe { run.peek() }, Next::Message(_)) {
            return false;
        }
        // SAFETY: as above.
        unsafe { self.read_more(core, key, run, (room, reader)) }
    }

    /// [`Self::read_list`] of at most `room` messages; there is a packet.
    ///
    /// # Safety
    /// As [`Self::read_list`].
    #[inline(never)]
    unsafe fn read_more(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        run: &mut Run,
        (room, reader): (usize, Option<&mut Reader<'_, '_>>),
    ) -> bool {
        let mut list = std::mem::take(&mut self.list);
        while list.messages.len() < room.min(MOST) {
            // SAFETY: as above.
            let Next::Message(message) = (unsafe { run.peek() }) else {
                break;
            };
            // SAFETY: nothing of the ring is consumed meanwhile.
            let packet = unsafe { as_announced(&message) };
            let Some((header, Announced::Rts(tag, data, source))) = packet else {
                break;
            };
            let announcement = Announcement {
                header,
                envelope: (tag, data),
                source,
            };
            let Some(listed) = self.take_next(core, key, &announcement, &mut list) else {
                break;
            };
            run.take(&message);
            run.prefetch();
            if !listed {
                break;
            }
        }
        let half = self.read_listed(core, key, &list, reader);
        list.clear();
        self.list = list;
        half
    }

    /// Takes an announcement, if its message may be read with those of the list. `None`: nothing
    /// has changed. `false`: it is the last one of the list, and has no sge.
    fn take_next(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        announcement: &Announcement,
        list: &mut List,
    ) -> Option<bool> {
        let (origin, out) = self.may_read(core, key, announcement, list.bytes)?;
        let source = announcement.source;
        if self.streams.may_stream() && !self.paces.reads_more(origin.peer, source.len) {
            return None;
        }
        let envelope = announcement.envelope_of(origin.peer);
        let store = self.rx.own()?;
        let matched = store.find(&envelope, index_of(origin.peer))?;
        let receive = store.receive(matched.receive).copied();
        let receive = receive.filter(|_| matched.piece.is_none());
        core.take_answered(origin.peer, RTS_CREDIT, Credit::ZERO);
        list.messages.push(Listed {
            origin,
            source,
            envelope,
            matched,
        });
        let Some(receive) = receive else {
            return Some(false);
        };
        // at most what may be copied in one call
        let to = self.sge_at_once(&receive, source.len as usize, &mut list.follows);
        let Some((sge, keyed)) = to else {
            return Some(false);
        };
        let way = (out, keyed);
        if *list.way.get_or_insert(way) != way {
            return Some(false);
        }
        list.receives.push(receive);
        list.sges.push(sge);
        list.addrs.push(source.addr);
        list.rkeys.push(source.rkey);
        list.bytes += source.len;
        Some(true)
    }

    /// Reads the messages of a list. One that is not read arrives as all other messages. Returns
    /// whether the peer has used half of its credit.
    fn read_listed(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        list: &List,
        mut reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        let read = self.read_sges(list);
        let mut half = false;
        for (at, listed) in list.messages.iter().enumerate() {
            let receive = list.receives.get(at).filter(|_| at < read);
            let Some(receive) = receive else {
                half |= core.give_back_answered(listed.origin.peer, Credit::new(0, 1));
                self.begin_unread(key, listed);
                continue;
            };
            self.bytes_copied += listed.source.len;
            if let Some(store) = self.rx.own() {
                store.release(listed.matched.receive);
            }
            half |= core.give_back_answered(listed.origin.peer, RTS_CREDIT);
            let answer = (listed.origin, listed.source.op);
            let to = reader.as_deref_mut();
            self.was_read(core, answer, (&listed.envelope, None), receive, to);
        }
        #[cfg(test)]
        {
            // at most `MOST`
            self.tests.read_at_once += read as u32;
            self.tests.read_in_lists += read as u32;
        }
        half
    }

    /// Reads as many messages of a list as possible. Returns their number.
    fn read_sges(&mut self, list: &List) -> usize {
        let Some((out, keyed)) = list.way else {
            return 0;
        };
        let mut read = 0;
        // a call executes as many as the device can execute together
        while read < list.sges.len()
            && let Some(link) = self.links.get_mut(out)
        {
            let (sges, keys) = (&list.sges[read..], &list.rkeys[read..]);
            let from = (&list.addrs[read..], keys);
            // SAFETY: the application keeps the buffers until the receives are reported.
            match unsafe { link.read_list((sges, keyed), from) } {
                0 => break,
                more => read += more,
            }
        }
        read
    }

    /// A message that was taken, and was not read in its call, arrives as all other messages.
    pub(super) fn begin_unread(&mut self, key: LinkKey, listed: &Listed) {
        let target = self
            .rx
            .own()
            .and_then(|store| store.target(&listed.matched));
        if let Some(target) = target {
            let Source { op, addr, rkey, .. } = listed.source;
            let at = AtSender {
                op,
                addr,
                rkey,
                link: Some(key),
            };
            self.begin_arrival(listed.origin, at, listed.envelope, target);
        }
    }
}
