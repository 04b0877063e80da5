//! Fast path of long messages on a device that executes READs in their call: an announcement that
//! is the next packet of its peer is taken, read and answered without entries in the tables, and
//! so is the answer. Of a message that both sides copy (`executor::push`) only the receiver has an
//! entry. `docs/rdm.md`, "Rings".

#![allow(
    unsafe_code,
    reason = "reads packets in a ring, and into the application's buffers"
)]

use std::time::{Duration, Instant};

use super::announced_list::Listed;
use super::pull::READ_BYTES;
use super::rings::MANY;
use super::{Executor, Todo};
use crate::matching::{Found, Matched};
use crate::mr::Following;
use crate::rdm::completions::Reader;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Core, Origin};
use crate::rdm::link::ring::RingPost;
use crate::rdm::long::paces::Way;
use crate::rdm::receive::Receive;
use crate::rdm::receives::{Envelope, index_of};
use crate::rdm::table_keys::{RxKey, TxKey};
use crate::verbs::{Message as RingMessage, RemoteAddr, Rkey, Run, Sge};
use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::ring::{Announced, Source};
use crate::wire::rdm::{Credit, Header, OpId, ring};

/// An announcement: the header, the tag and the CQ data of its message, and the source.
pub(super) struct Announcement {
    pub(super) header: Header,
    pub(super) envelope: (Option<u64>, Option<u32>),
    pub(super) source: Source,
}

impl Announcement {
    /// The message, from this peer.
    #[inline(always)]
    pub(super) fn envelope_of(&self, peer: PeerKey) -> Envelope {
        let (tag, data) = self.envelope;
        Envelope {
            peer,
            tag,
            data: data.map(u64::from),
            len: self.source.len,
        }
    }
}

/// What has become of an announcement, and whether the peer has used half of its credit.
pub(super) enum Taken {
    /// The message was read.
    Read(bool),
    /// It arrives as all other messages.
    Begun(bool),
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
pub(super) unsafe fn as_announced(message: &RingMessage) -> Option<(Header, Announced)> {
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
    /// As [`Self::read_run`]; the message is that of [`Run::peek`].
    pub(in crate::rdm) unsafe fn read_announced(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        (mut run, message): (Run, &RingMessage),
        mut reader: Option<&mut Reader<'_, '_>>,
    ) -> Option<bool> {
        // Below no link is removed and no ring read.
        // SAFETY: nothing of the ring is consumed meanwhile.
        let (header, announced) = unsafe { as_announced(message) }?;
        let half = match announced {
            Announced::Rts(tag, data, source) => {
                let announcement = Announcement {
                    header,
                    envelope: (tag, data),
                    source,
                };
                let taken = self.announced(core, key, &announcement, reader.as_deref_mut())?;
                run.take(message);
                match taken {
                    Taken::Begun(half) => half,
                    Taken::Read(half) => {
                        // SAFETY: as above.
                        half | unsafe { self.read_list(core, key, &mut run, reader) }
                    }
                }
            }
            Announced::Push(end) => {
                self.asked_in_ring(core, key, (&header, &end))?;
                run.take(message);
                false
            }
            Announced::Pushed(op, written) => {
                let packet = (&header, op, written);
                let half = self.pushed_in_ring(core, key, packet, reader)?;
                run.take(message);
                half
            }
            Announced::Fin(op, status) => {
                let (origin, _) = core.answered(key, &header, Credit::ZERO)?;
                let ends = self.fin_of(origin, TxKey::from_number(op.get()), status);
                core.take_end(origin.peer, ends);
                run.take(message);
                run.prefetch_next();
                false
            }
        };
        // SAFETY: as above.
        let behind = unsafe { run.leave() }.unwrap_or_else(|slots| self.give_back(key, slots));
        Some(half || behind >= MANY)
    }

    /// The peer of an announcement and its out-link, if the announcement is the next packet of the
    /// peer, and the device may read the message in this call, after `more` other bytes.
    #[inline(always)]
    pub(super) fn may_read(
        &self,
        core: &Core<Self>,
        key: LinkKey,
        announcement: &Announcement,
        more: u64,
    ) -> Option<(Origin, LinkKey)> {
        let Announcement { header, source, .. } = announcement;
        let (origin, out) = core.answered(key, header, RTS_CREDIT)?;
        let left = READ_BYTES.saturating_sub(self.bytes_copied + more);
        // a shorter one asks for a larger window
        let read = !source.addr.is_null()
            && source.len > u64::from(core.eager())
            && source.len <= left
            && self.executes_reads()
            && self.pulls.reads_from(origin.peer)
            && !self.pulls.has_waiting(origin.peer);
        read.then_some((origin, out))
    }

    /// Takes an announcement, and reads the message, if its receive is there. `None`: nothing has
    /// changed.
    fn announced(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        announcement: &Announcement,
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Option<Taken> {
        let source = announcement.source;
        let Source {
            op,
            addr,
            len,
            rkey,
        } = source;
        let (origin, out) = self.may_read(core, key, announcement, 0)?;
        let peer = origin.peer;
        let measured = match self.streams.may_stream() {
            true => match self.paces.next(peer, len) {
                (Way::Read, measured) => measured,
                (Way::Both, _) => {
                    return self.announced_to_both(core, key, announcement, (origin, out));
                }
                (Way::Stream, _) => return None,
            },
            false => false,
        };
        let envelope = announcement.envelope_of(peer);
        let tag = envelope.tag;
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
            let half = core.take_answered(peer, RTS_CREDIT, Credit::new(0, 1));
            let listed = Listed {
                origin,
                source,
                envelope,
                matched,
            };
            self.begin_unread(key, &listed);
            return Some(Taken::Begun(half));
        };
        let time = begin.map(|begin| begin.elapsed());
        if let Some(store) = self.rx.own() {
            match found {
                Match::Recent(found) => store.take_recent(tag.is_some(), &found),
                Match::Removed(matched) => store.release(matched.receive),
            }
        }
        let half = core.take_answered(peer, RTS_CREDIT, RTS_CREDIT);
        self.was_read(core, (origin, op), (&envelope, time), &receive, reader);
        Some(Taken::Read(half))
    }

    /// A message was read into its receive, which is not posted any more, in this time, if it was
    /// measured: the sender gets FIN, and the application its entry.
    #[inline(always)]
    pub(super) fn was_read(
        &mut self,
        core: &mut Core<Self>,
        (origin, op): (Origin, OpId),
        (envelope, time): (&Envelope, Option<Duration>),
        receive: &Receive,
        reader: Option<&mut Reader<'_, '_>>,
    ) {
        #[cfg(test)]
        {
            self.tests.read_in_ring += 1;
        }
        let peer = origin.peer;
        self.paces.has_read(peer, envelope.len, time);
        self.pulls.succeeded(peer);
        self.end_at_sender(core, origin, op);
        self.pass_received(envelope, receive, reader);
    }

    /// The entry of a message that is complete in a receive of its own.
    #[inline(always)]
    pub(super) fn pass_received(
        &mut self,
        envelope: &Envelope,
        receive: &Receive,
        reader: Option<&mut Reader<'_, '_>>,
    ) {
        // within the receive, whose length is a usize
        let len = envelope.len as usize;
        let completion = receive.completion(envelope.tag, envelope.data, len);
        self.completions
            .received(&completion, envelope.peer, receive.wanted, reader);
    }

    /// Whether the device can execute READs in their call.
    #[inline(always)]
    fn executes_reads(&self) -> bool {
        #[cfg(test)]
        if self.tests.refuse_reads.is_some() || self.tests.posts_reads {
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
        let mut follows = Following::default();
        let sge = self.sge_at_once(receive, len, &mut follows);
        let (Some((sge, keyed)), Some(link)) = (sge, self.links.get_mut(out)) else {
            return false;
        };
        // SAFETY: the application keeps the buffer until the receive is reported.
        let done = unsafe { link.read_at_once((&sge, keyed), from) };
        if done {
            self.bytes_copied += len as u64;
            #[cfg(test)]
            {
                self.tests.read_at_once += 1;
            }
        }
        done
    }

    /// The buffer for a message of `len` bytes, at most what may be copied in one call, and whether
    /// its lkey is checked. `None`: the receive has several buffers or is too short, or the
    /// READ has to be posted. The caller keeps `follows` until the message is read.
    #[inline]
    pub(super) fn sge_at_once(
        &mut self,
        receive: &Receive,
        len: usize,
        follows: &mut Following<'static>,
    ) -> Option<(Sge, bool)> {
        let to = libc::iovec {
            iov_base: receive.iov.first(len)?.cast(),
            iov_len: len,
        };
        // SAFETY: the application keeps the buffer until the receive is reported. The region of its
        // descriptor may be closed: the caller keeps `follows`.
        let (lkey, keyed) = unsafe { self.pulls.key_at_once(receive, &to, follows) }?;
        let sge = Sge {
            addr: to.iov_base as u64,
            // at most 4 MiB
            length: len as u32,
            lkey,
        };
        Some((sge, keyed))
    }

    /// Posts FIN for a message that is complete.
    #[inline]
    pub(super) fn end_at_sender(&mut self, core: &mut Core<Self>, origin: Origin, op: OpId) {
        if !self.fin_to_ring(core, origin.peer, op) {
            self.post_fin(origin, op, 0, false);
        }
    }

    /// Posts FIN to a ring without an operation. `false`: it has to be posted as an operation next.
    #[inline]
    fn fin_to_ring(&mut self, core: &mut Core<Self>, peer: PeerKey, op: OpId) -> bool {
        self.answer_to_ring(core, (peer, Credit::ZERO), |header| {
            ring::fin(header, op, 0)
        })
    }

    /// Posts an answer to a ring without an operation. `false`: it has to be posted as an operation
    /// next.
    #[inline]
    pub(super) fn answer_to_ring<const N: usize>(
        &mut self,
        core: &mut Core<Self>,
        (peer, uses): (PeerKey, Credit),
        packet: impl FnOnce(&Header) -> (ring::Words, [u8; N]),
    ) -> bool {
        let Some(direct) = core.direct_answer(peer, uses) else {
            return false;
        };
        let ring = self.links.get_mut(direct.link);
        let Some(ring) = ring.and_then(|link| link.free_ring()) else {
            return false;
        };
        let posted = ring.post_packet(&packet(&direct.header));
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
        if !ends {
            return false;
        }
        op.fin = Some(status);
        let usual = status == 0 && op.is_over() && op.slot.is_none() && self.rma.fences == 0;
        if !usual {
            self.finish_if_over(key);
            return true;
        }
        // as `Self::finish`
        let source = op.source.take();
        self.messages -= 1;
        self.completions.sent(&op.message, op.context, op.wanted);
        self.tx.free(key);
        if let Some(source) = source {
            self.release_source(source);
        }
        true
    }

    pub(super) fn fin(&mut self, origin: Origin, key: TxKey, status: u16) {
        if self.fin_of(origin, key, status) {
            self.todo.push_back(Todo::Release(origin.peer));
        }
    }
}
