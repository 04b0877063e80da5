//! Fast path of a long message at its sender: the source is registered and the announcement written
//! to the ring in the call of the application, without the lists of the core. The message has an
//! operation until FIN. `docs/rdm.md`, "Rings".

#![allow(unsafe_code, reason = "registers the application's buffer")]

use super::{Executor, Step, Todo};
use crate::mr;
use crate::rdm::core::Core;
use crate::rdm::core::ops::Form;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::iov::Iov;
use crate::rdm::link::ring::RingPost;
use crate::rdm::operations::{Kind, Operation};
use crate::verbs::RemoteAddr;
use crate::wire::rdm::OpId;
use crate::wire::rdm::packet::Message;
use crate::wire::rdm::ring::{self, Source};

/// The entry of an operation in the completion queue.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct EntryRequest {
    pub(in crate::rdm) context: usize,
    /// Success has an entry.
    pub(in crate::rdm) wanted: bool,
}

impl Executor {
    /// Announces a message of one buffer that is too long for EAGER, without ACK and with CQ data
    /// of at most 32 bits ([`Message::narrow`]), if its packet can be written to a ring now. With
    /// [`RingPost::Sent`] and [`RingPost::Ended`] the operation is begun, and in the second case
    /// [`Executor::todo`] has what follows. Otherwise nothing has changed, except that the
    /// registration of the buffer may stay for later messages.
    ///
    /// # Safety
    /// The buffer is not at NULL, and stays readable until the operation completes.
    #[inline(never)]
    pub(in crate::rdm) unsafe fn announce(
        &mut self,
        core: &mut Core<Self>,
        (peer, tag, data): (PeerKey, Option<u64>, Option<u32>),
        buffer: &libc::iovec,
        EntryRequest { context, wanted }: EntryRequest,
    ) -> RingPost {
        // the message may have to wait (`Self::waits_for_rma`)
        if self.rma.ops.len() != 0 || self.rma.fences != 0 || self.tx.is_full() {
            return RingPost::No;
        }
        let len = buffer.iov_len;
        let Some(direct) = core.direct_announcement(peer, len) else {
            return RingPost::No;
        };
        let link = direct.link;
        let record = self.links.get_mut(link);
        let Some(ring) = record.and_then(|record| record.free_ring()) else {
            return RingPost::No;
        };
        // SAFETY: the caller keeps the buffer until the operation completes; see
        // `Self::register_source`.
        let registered = unsafe { self.source_keys.register(buffer) }.ok();
        if let Some(old) = self.source_keys.replaced() {
            self.steps.push(Step::Withdraw(Some(old), None));
        }
        // without a registration the receiver asks for parts
        let rkey = registered.as_ref().map(mr::Source::rkey);
        let addr = rkey.map_or(RemoteAddr::NULL, |_| {
            RemoteAddr::new(buffer.iov_base as u64)
        });
        let message = Message {
            tag,
            data: data.map(u64::from),
            ack: false,
        };
        let op = Operation {
            order: self.rma.next_order(),
            context,
            wanted,
            message,
            iov: Iov::single_buffer(buffer),
            len,
            form: Form::Rts,
            posted: true,
            in_core: false,
            source: registered,
            ..Operation::new(Kind::Message, peer)
        };
        let Some(key) = self.tx.insert(op) else {
            // not full, as examined above
            return RingPost::No;
        };
        self.messages += 1;
        let source = Source {
            op: OpId::new(key.number()),
            addr,
            len: len as u64,
            rkey: rkey.unwrap_or_default(),
        };
        let posted = ring.post_packet(&ring::rts(&direct.header, (tag, data), &source));
        match posted {
            RingPost::Sent => {
                #[cfg(test)]
                {
                    self.tests.announced += 1;
                }
                direct.announced();
                core.await_answer();
            }
            RingPost::Ended => {
                if let Some(op) = self.tx.get_mut(key) {
                    op.in_core = true;
                }
                core.announced_at_end(peer, key, len as u64);
                self.todo.push_back(Todo::Broken(link));
            }
            RingPost::No | RingPost::Full => self.abandon(key),
        }
        posted
    }
}
