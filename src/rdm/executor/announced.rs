//! Fast path of long messages on a device that executes READs in their call: an announcement that
//! is the next packet of its peer is taken, read and answered without entries in the tables, and
//! so is the answer. `docs/rdm.md`, "Rings".

#![allow(
    unsafe_code,
    reason = "reads packets in a ring, and into the application's buffers"
)]

use std::time::Instant;

use super::super::completions::Reader;
use super::super::core::{Core, Origin};
use super::super::link::LinkKey;
use super::super::link_ring::RingPost;
use super::super::operations::{Kind, TxKey};
use super::super::peer::PeerKey;
use super::super::receives::{AtSender, Envelope, Receive, RxKey, completion_of, index_of};
use super::pull::READ_BYTES;
use super::rings::MANY;
use super::{Executor, Todo};
use crate::flags::Flags;
use crate::matching::{Found, Matched};
use crate::verbs::{Message as RingMessage, Next, RemoteAddr, RingProbe, Rkey, Run, Sge};
use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::ring::{Announced, Source};
use crate::wire::rdm::{Credit, Header, OpId, ring};

/// An announcement: the header, the tag and the CQ data of its message, and the source.
struct Announcement {
    header: Header,
    envelope: (Option<u64>, Option<u32>),
    source: Source,
}

/// The receive of a message.
enum Match {
    /// It is still posted.
    Recent(Found<RxKey>),
    /// It is not posted any more.
    Removed(Matched<RxKey>),
}

/// An announcement in a ring, or the end of a message. `None`: another packet.
///
/// # Safety
/// The ring holds the payload.
#[inline(always)]
unsafe fn as_announced(message: &RingMessage) -> Option<(Header, Announced)> {
    let word = |at: usize| {
        // SAFETY: the caller's promise; a hostile peer may change the bytes.
        let word = unsafe { message.payload().add(at).cast::<u64>().read_unaligned() };
        u64::from_le(word)
    };
    ring::as_announced(&message.words(), message.len(), word)
}

impl Executor {
    /// Processes the next packet in a ring, if it is the announcement of a message that this call
    /// can read, or the end of one, and nothing else follows from it than what is done here.
    /// `None`: nothing has changed. Otherwise whether [`Self::end_run`] must follow at once; if
    /// not, it follows later. What follows from a message whose READ is not executed now is in
    /// [`Executor::todo`].
    ///
    /// # Safety
    /// As [`Self::read_run`].
    pub(in crate::rdm) unsafe fn read_announced(
        &mut self,
        core: &mut Core<Self>,
        (key, ring): (LinkKey, RingProbe),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Option<bool> {
        // SAFETY: the caller's promise, and below no link is removed and no ring read.
        let run = unsafe { ring.run() };
        // SAFETY: as above.
        let Next::Message(message) = (unsafe { run.peek() }) else {
            return None;
        };
        // SAFETY: nothing of the ring is consumed meanwhile.
        let (header, announced) = unsafe { as_announced(&message) }?;
        // the lines of later packets arrive while this one is copied
        run.prefetch();
        let half = match announced {
            Announced::Rts(tag, data, source) => {
                let announcement = Announcement {
                    header,
                    envelope: (tag, data),
                    source,
                };
                self.announced(core, key, &announcement, reader)?
            }
            Announced::Fin(op, status) => {
                let (origin, _) = core.answered(key, &header, Credit::ZERO)?;
                core.take_answered(key, Credit::ZERO, Credit::ZERO);
                if self.fin_of(origin, TxKey::from_number(op.get()), status) {
                    core.release(origin.peer, self);
                }
                false
            }
        };
        // SAFETY: as above.
        let behind = unsafe { self.leave(key, run, &message) };
        Some(half || behind >= MANY)
    }

    /// Takes the message from its run, and leaves that. Returns the number of slots whose room is
    /// not given back.
    ///
    /// # Safety
    /// As [`Self::read_run`]; the run is at this message.
    #[inline(always)]
    unsafe fn leave(&mut self, key: LinkKey, mut run: Run, message: &RingMessage) -> u32 {
        run.take(message);
        // SAFETY: the caller's promise.
        unsafe { run.leave() }.unwrap_or_else(|slots| self.give_back(key, slots))
    }

    /// Takes an announcement, and reads the message, if its receive is there. `None`: nothing has
    /// changed. Otherwise whether the peer has used half of its credit.
    fn announced(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        announcement: &Announcement,
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Option<bool> {
        let &Announcement {
            header,
            envelope: (tag, data),
            source:
                Source {
                    op,
                    addr,
                    len,
                    rkey,
                },
        } = announcement;
        let (origin, out) = core.answered(key, &header, RTS_CREDIT)?;
        let peer = origin.peer;
        let left = READ_BYTES.saturating_sub(self.bytes_copied);
        // a shorter one asks for a larger window
        let read = !addr.is_null()
            && len > u64::from(core.eager())
            && len <= left
            && self.executes_reads()
            && self.rx.own().is_some()
            && self.pulls.reads_from(peer)
            && !self.pulls.has_waiting(peer);
        if !read {
            return None;
        }
        let measured = match self.streams.may_stream() {
            true => self.paces.reads(peer, len)?,
            false => false,
        };
        let envelope = Envelope {
            peer,
            tag,
            data: data.map(u64::from),
            len,
        };
        let store = self.rx.own()?;
        let index = index_of(peer);
        let (found, receive) = match store.recent(tag, index) {
            Some((found, receive)) => (Match::Recent(found), Some(*receive)),
            None => {
                let matched = store.find(&envelope, index)?;
                let whole = matched.piece.is_none();
                let receive = store.receive(matched.receive).filter(|_| whole).copied();
                (Match::Removed(matched), receive)
            }
        };
        let begin = measured.then(Instant::now);
        let done =
            receive.filter(|receive| self.read_whole(out, receive, (addr, rkey), len as usize));
        let Some(receive) = done else {
            // the way of all other messages
            let Match::Removed(matched) = found else {
                return None;
            };
            let target = self.rx.own().and_then(|store| store.target(&matched));
            let half = core.take_answered(key, RTS_CREDIT, Credit::new(0, 1));
            if let Some(target) = target {
                let at = AtSender {
                    op,
                    addr,
                    rkey,
                    link: Some(key),
                };
                self.begin_arrival(origin, at, envelope, target);
            }
            return Some(half);
        };
        if let Some(begin) = begin {
            self.paces.has_read(peer, len, begin.elapsed());
        }
        self.paces.interrupted();
        self.pulls.succeeded(peer);
        if let Some(store) = self.rx.own() {
            match found {
                Match::Recent(found) => store.take_recent(tag.is_some(), &found),
                Match::Removed(matched) => store.release(matched.receive),
            }
        }
        #[cfg(test)]
        {
            self.read_in_ring += 1;
        }
        let half = core.take_answered(key, RTS_CREDIT, RTS_CREDIT);
        self.end_at_sender(core, origin, op);
        let mut completion = completion_of(&receive);
        // within the receive, whose length is a usize
        (completion.len, completion.tag) = (len as usize, tag.unwrap_or_default());
        if let Some(data) = data {
            completion.data = data.into();
            completion.flags |= Flags::REMOTE_CQ_DATA;
        }
        self.completions
            .received(&completion, peer, receive.wanted, reader);
        Some(half)
    }

    /// Whether the device can execute READs in their call.
    #[inline(always)]
    fn executes_reads(&self) -> bool {
        #[cfg(test)]
        if self.refuse_reads.is_some() || self.posts_reads {
            return false;
        }
        self.pulls.copies && self.xrc.is_none()
    }

    /// Reads a message of `len` bytes into a receive in this call. `false`: the receive has several
    /// buffers or is too short, or the READ has to be posted.
    #[inline]
    fn read_whole(
        &mut self,
        out: LinkKey,
        receive: &Receive,
        from: (RemoteAddr, Rkey),
        len: usize,
    ) -> bool {
        let Some(to) = receive.iov.first(len) else {
            return false;
        };
        let to = libc::iovec {
            iov_base: to.cast(),
            iov_len: len,
        };
        // SAFETY: the application keeps the buffer, and the region of its descriptor, until the
        // receive is reported.
        let key = unsafe { self.pulls.key_at_once(receive, &to) };
        let (Some((lkey, keyed)), Some(link)) = (key, self.links.get_mut(out)) else {
            return false;
        };
        let sge = Sge {
            addr: to.iov_base as u64,
            // at most 4 MiB
            length: len as u32,
            lkey,
        };
        // SAFETY: as above.
        let done = unsafe { link.read_at_once((&sge, keyed), from) };
        if done {
            self.bytes_copied += len as u64;
            #[cfg(test)]
            {
                self.read_at_once += 1;
            }
        }
        done
    }

    /// Posts FIN for a message that was read.
    #[inline]
    fn end_at_sender(&mut self, core: &mut Core<Self>, origin: Origin, op: OpId) {
        if !self.fin_to_ring(core, origin.peer, op) {
            self.answer(origin, Kind::Fin { op, status: 0 });
        }
    }

    /// Posts FIN to a ring without an operation. `false`: it has to be posted as an operation next.
    #[inline]
    fn fin_to_ring(&mut self, core: &mut Core<Self>, peer: PeerKey, op: OpId) -> bool {
        let Some(direct) = core.direct_answer(peer) else {
            return false;
        };
        let ring = self.links.get_mut(direct.link);
        let Some(ring) = ring.and_then(|link| link.free_ring()) else {
            return false;
        };
        let posted = ring.post_packet(&ring::fin(&direct.header, op, 0));
        if posted == RingPost::Sent {
            direct.sent();
        }
        posted == RingPost::Sent
    }

    /// FIN of a message of this side. Returns whether the peer is not needed for it any more.
    pub(super) fn fin_of(&mut self, origin: Origin, key: TxKey, status: u16) -> bool {
        let Some(op) = self.tx.get_mut(key) else {
            return false;
        };
        let ends = op.is_announced() && op.peer == origin.peer && op.fin.is_none();
        if ends {
            op.fin = Some(status);
            self.finish_if_over(key);
        }
        ends
    }

    pub(super) fn fin(&mut self, origin: Origin, key: TxKey, status: u16) {
        if self.fin_of(origin, key, status) {
            self.todo.push_back(Todo::Release(origin.peer));
        }
    }
}
