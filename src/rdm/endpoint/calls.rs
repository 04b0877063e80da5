//! The operations of an endpoint: sends, receives, searches and cancels.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use biased_lock::MutexGuard;

use super::Endpoint;
use crate::PeerIndex;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::local::buffer;
use crate::initiator::{LocalIov, TRANSMIT_FLAGS};
use crate::matching::Want;
use crate::mr::Desc;
use crate::rdm::completions::Side;
use crate::rdm::core::SendOp;
use crate::rdm::core::ops::Uses;
use crate::rdm::executor::EntryRequest;
use crate::rdm::iov::Iov;
use crate::rdm::limits::Limits;
use crate::rdm::link::ring::RingPost;
use crate::rdm::operations::{Kind, Operation};
use crate::rdm::receive::Receive;
use crate::rdm::receives::{Target, index_of};
use crate::rdm::recv::{SEARCHES, is_multi, plain_receive, receive_of, want_of};
use crate::rdm::search::Search;
use crate::rdm::shared::State;
use crate::wire::rdm::packet::Message;

/// A message to be posted.
struct Outgoing<'a> {
    to: FiAddr,
    message: Message,
    local: LocalIov<'a>,
    flags: Flags,
    context: usize,
    /// Whether success has an entry for the application.
    wanted: bool,
}

impl Endpoint {
    /// The flags of a transmit operation: those of its call, or the default flags.
    ///
    /// # Errors
    /// `EBADFLAGS`: one of the call that is not in `accepted`.
    #[inline(always)]
    pub(super) fn tx_flags(&self, flags: Option<Flags>, accepted: Flags) -> Result<Flags> {
        match flags {
            Some(flags) if flags.intersects(accepted.complement()) => Err(FiErrno::EBADFLAGS),
            Some(flags) => Ok(flags),
            None => Ok(self.op_flags().tx()),
        }
    }

    /// `fi_send`, `fi_tsend` and their forms with vectors and data. `tag`: `None` for an untagged
    /// message. `flags`: `None` for the default flags.
    ///
    /// # Errors
    /// - `EAGAIN`: `tx_size` operations are under way.
    /// - `EINVAL`: more buffers than [`Limits::iov_limit`], a buffer at NULL with a length, or the
    ///   address is not in the address vector.
    /// - `EMSGSIZE`: longer than the maximum, or injected and longer than the inject size.
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - `ECONNABORTED`: the link has ended during the call, and there was no memory for the
    ///   message, which may have been delivered.
    /// - `EOPBADSTATE`: not enabled, or closed.
    ///
    /// # Safety
    /// The buffers stay valid until the operation completes; injected ones during the call.
    #[inline(always)]
    pub unsafe fn send(
        &self,
        to: FiAddr,
        tag: Option<u64>,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let flags = self.tx_flags(flags, TRANSMIT_FLAGS)?;
        let selected = flags.contains(Flags::COMPLETION);
        let wanted = selected || self.common.tx_all.load(Ordering::Relaxed);
        let message = Message {
            tag,
            data,
            ack: flags.contains(Flags::DELIVERY_COMPLETE),
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            self.post(Outgoing {
                to,
                message,
                local,
                flags,
                context,
                wanted,
            })
        }
    }

    /// `fi_inject`, `fi_tinject` and their forms with data: no entry in the completion queue.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Safety
    /// The buffer is readable during the call.
    #[inline(always)]
    pub unsafe fn inject(
        &self,
        to: FiAddr,
        tag: Option<u64>,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()> {
        // fi_endpoint(3): an error without an operation's context has that of the endpoint
        let context = self.shared().config.context;
        let iov = buffer(buf, len);
        let local = LocalIov::single(&iov, &Desc::NULL);
        let message = Message {
            tag,
            data,
            ack: false,
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            self.post(Outgoing {
                to,
                message,
                local,
                flags: Flags::INJECT,
                context,
                wanted: false,
            })
        }
    }

    /// Posts a message. Fast path: a message of one buffer to a known address, on an idle link with
    /// a ring that has room. All others are posted by [`Self::post_any`].
    ///
    /// # Safety
    /// As [`Self::send`].
    #[allow(
        clippy::needless_pass_by_value,
        reason = "its fields stay in registers on the fast path"
    )]
    #[inline(always)]
    unsafe fn post(&self, outgoing: Outgoing<'_>) -> Result<()> {
        let shared = self.shared();
        let config = &shared.config;
        let message = &outgoing.message;
        let inject = outgoing.flags.contains(Flags::INJECT);
        let mut guard = shared.lock();
        let mut posted = RingPost::No;
        if !outgoing.flags.contains(Flags::FENCE)
            && let Some(state) = guard.as_mut()
            && let [only] = outgoing.local.iov()
            && !only.iov_base.is_null()
            && let Some(data) = message.narrow()
            && !(inject && only.iov_len > config.inject_size)
            && state.io.outstanding() < config.tx_size
            && let Some(peer) = state.known_peer(outgoing.to)
        {
            let buffer = (only.iov_base.cast::<u8>().cast_const(), only.iov_len);
            let (core, io) = (&mut state.core, &mut state.io);
            // SAFETY: the caller keeps the contract of this function.
            posted = unsafe { io.send_buffer(core, (peer, message.tag, data), buffer) };
            if posted == RingPost::Sent {
                io.completions.sent_direct(
                    message.tag.is_some(),
                    outgoing.context,
                    outgoing.wanted,
                );
                shared.wake_readers(state);
                return Ok(());
            }
            if posted == RingPost::No && !inject && only.iov_len <= Limits::max_msg_size(config.xrc)
            {
                let (core, io) = (&mut state.core, &mut state.io);
                let message = (peer, message.tag, data);
                let entry = EntryRequest {
                    context: outgoing.context,
                    wanted: outgoing.wanted,
                };
                // SAFETY: as above.
                let announced = unsafe { io.announce(core, message, only, entry) };
                if matches!(announced, RingPost::Sent | RingPost::Ended) {
                    shared.follow_announcement(state);
                    return Ok(());
                }
            }
        }
        // a copy, so that the fast path stores nothing of it
        let outgoing = Outgoing { ..outgoing };
        // SAFETY: as above.
        unsafe { self.post_any(guard, &outgoing, posted) }
    }

    /// As [`Self::post`], for all messages. `tried` is the result of a post to the ring; it is not
    /// [`RingPost::Sent`].
    ///
    /// # Safety
    /// As [`Self::send`].
    #[inline(never)]
    unsafe fn post_any(
        &self,
        mut guard: MutexGuard<'_, Option<State>>,
        outgoing: &Outgoing<'_>,
        tried: RingPost,
    ) -> Result<()> {
        let Outgoing {
            to,
            message,
            flags,
            context,
            wanted,
            ..
        } = *outgoing;
        let iov = Iov::of_transfer(&outgoing.local)?;
        let shared = self.shared();
        let config = &shared.config;
        let inject = flags.contains(Flags::INJECT);
        let most = match inject {
            true => config.inject_size,
            false => Limits::max_msg_size(config.xrc),
        };
        if iov.len() > most {
            return Err(FiErrno::EMSGSIZE);
        }
        guard = shared.reserve_tx(guard)?;
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        let peer = state.peer_of(to)?;
        let peer = state.core.resolve(peer);
        // SAFETY: the caller keeps the contract of this function.
        let posted = match tried {
            RingPost::Ended => tried,
            // it may have to wait (`Executor::waits_for_rma`)
            _ if flags.contains(Flags::FENCE) => tried,
            // SAFETY: the caller keeps the contract of this function.
            _ => unsafe { state.send_direct(peer, &message, &iov) },
        };
        if posted == RingPost::Sent {
            state.io.completions.sent(&message, context, wanted);
            shared.wake_driver_and_readers(state);
            return Ok(());
        }
        // progress may have found that it is another address of a peer
        let peer = state.core.resolve(peer);
        let mut op = Operation::new(Kind::Message, peer);
        (op.context, op.wanted, op.message) = (context, wanted, message);
        (op.order, op.fence) = (state.io.rma.next_order(), flags.contains(Flags::FENCE));
        (op.iov, op.len) = (iov, iov.len());
        if !state.core.is_up(peer) {
            state.core.set_now(shared.now());
        }
        // SAFETY: the caller keeps the contract of this function.
        let mut result = unsafe { Self::begin(state, op, inject) };
        if result.is_err() && posted == RingPost::Ended {
            // the message may have arrived with a number that the next one would have, and the
            // caller must not repeat it
            result = Err(FiErrno::ECONNABORTED);
            let (core, io) = (&mut state.core, &mut state.io);
            core.fail(peer, FiErrno::ECONNABORTED, io);
        }
        state.run_todo();
        shared.end_post(guard, result)
    }

    /// Begins an operation.
    ///
    /// # Safety
    /// As [`Self::send`].
    #[inline]
    unsafe fn begin(state: &mut State, mut op: Operation, inject: bool) -> Result<()> {
        if inject {
            // SAFETY: the caller keeps the contract of this function.
            unsafe { state.io.copy_payload(&mut op) }?;
            // also an empty message: a close awaits what the application cannot repeat
            op.copied = true;
        }
        let (peer, ack) = (op.peer, op.message.ack);
        let uses = Uses::Message(op.len as u64);
        let op = state.io.begin(op)?;
        let send = SendOp { op, uses, ack };
        let sent = state.core.send(peer, send, &mut state.io);
        sent.inspect_err(|_| state.io.abandon(op))
    }

    /// `fi_recv`, `fi_trecv` and their forms with vectors. `tag`: `None` for an untagged message,
    /// otherwise the tag and the ignored bits. `flags`: `None` for the default flags. With
    /// `FI_CLAIM`, `context` is the address of a `struct fi_context`, which a peek writes and the
    /// receive of the message reads.
    ///
    /// # Errors
    /// - `EAGAIN`: `rx_size` receives are posted.
    /// - `EINVAL`: more buffers than [`Limits::iov_limit`], or several with `FI_MULTI_RECV`; a
    ///   directed receive from an address that is not in the address vector; a claim of no message.
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - `EOPBADSTATE`: not enabled, or closed.
    ///
    /// # Safety
    /// The buffers stay valid until the operation completes.
    #[inline(always)]
    pub unsafe fn recv(
        &self,
        from: FiAddr,
        tag: Option<(u64, u64)>,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let flags = flags.unwrap_or_else(|| self.op_flags().rx());
        let shared = self.shared();
        let mut guard = shared.lock();
        if let Some(state) = guard.as_mut()
            && let Some(mut receive) = plain_receive(tag.is_some(), &local, context, flags)
            && state.io.rx.len() + state.io.completions.len(Side::Rx) < shared.config.rx_size
            && let Some(from) =
                Self::known_source(state, shared.config.directed.source(tag.is_some(), from))
            && let Some(store) = state.io.rx.own()
        {
            receive.wanted |= self.common.rx_all.load(Ordering::Relaxed);
            if store.post_first(&want_of(tag, from), receive).is_some() {
                return Ok(());
            }
        }
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.recv_any(guard, from, tag, local, (context, flags)) }
    }

    /// The index of the peer of a directed receive; `Some(None)`: any peer. `None`: no call has
    /// used the address before.
    #[inline(always)]
    fn known_source(state: &State, from: Option<FiAddr>) -> Option<Option<PeerIndex>> {
        let Some(from) = from else {
            return Some(None);
        };
        let peer = state.known_peer(from)?;
        Some(Some(index_of(state.core.resolve(peer))))
    }

    /// As [`Self::recv`], for all receives and searches.
    ///
    /// # Safety
    /// As [`Self::recv`].
    #[inline(never)]
    unsafe fn recv_any(
        &self,
        mut guard: MutexGuard<'_, Option<State>>,
        from: FiAddr,
        tag: Option<(u64, u64)>,
        local: LocalIov<'_>,
        (context, flags): (usize, Flags),
    ) -> Result<()> {
        let mut receive = receive_of(tag.is_some(), &local, context, flags)?;
        receive.wanted |= self.common.rx_all.load(Ordering::Relaxed);
        let shared = self.shared();
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        let from = match shared.config.directed.source(tag.is_some(), from) {
            Some(from) => {
                let peer = state.peer_of(from)?;
                Some(index_of(state.core.resolve(peer)))
            }
            None => None,
        };
        let want = want_of(tag, from);
        let result = if flags.intersects(SEARCHES) {
            // SAFETY: the caller passes the address of a `struct fi_context` with `FI_CLAIM`.
            unsafe { Self::search(state, &want, receive, flags) }
        } else {
            self.post_receive(state, &want, receive, is_multi(&receive, flags))
        };
        state.run_todo();
        if (state.sleepers || shared.config.auto) && state.core.has_reports() {
            // neither a thread that sleeps on the queue nor the driver, which may sleep, reports it
            state.report();
        }
        shared.wake_driver_and_readers(state);
        if result == Err(FiErrno::EAGAIN) {
            drop(guard);
            shared.domain.queues().help_from_poll();
        }
        result
    }

    #[inline]
    fn post_receive(
        &self,
        state: &mut State,
        want: &Want,
        receive: Receive,
        multi: bool,
    ) -> Result<()> {
        let posted = state.io.rx.len() + state.io.completions.len(Side::Rx);
        if posted >= self.shared().config.rx_size {
            state.poll()?;
            let posted = state.io.rx.len() + state.io.completions.len(Side::Rx);
            if posted >= self.shared().config.rx_size {
                return Err(FiErrno::EAGAIN);
            }
        }
        // receives are posted to a shared receive context
        let store = state.io.rx.own().ok_or(FiErrno::EOPBADSTATE)?;
        if multi {
            let taken = store.post_multi(want, receive, self.min_multi_recv());
            for (stored, target) in taken.map_err(|()| FiErrno::EAGAIN)? {
                state.io.deliver_stored(stored, target);
            }
        } else {
            let stored = store.post(want, receive);
            if let Some(stored) = stored.map_err(|()| FiErrno::EAGAIN)? {
                let target = Target {
                    receive,
                    multi: None,
                    posting: None,
                };
                state.io.deliver_stored(stored, target);
            }
        }
        Ok(())
    }

    /// `FI_PEEK`, `FI_CLAIM`, `FI_DISCARD` (`fi_tagged(3)`).
    ///
    /// # Safety
    /// With `FI_CLAIM`, the context of the receive is the address of a `struct fi_context`.
    unsafe fn search(state: &mut State, want: &Want, receive: Receive, flags: Flags) -> Result<()> {
        let search = Search::of(flags, receive.context)?;
        if !search.is_of_claim() {
            state.poll_before_search()?;
        }
        let store = state.io.rx.own().ok_or(FiErrno::EOPBADSTATE)?;
        // SAFETY: the caller keeps the contract of this function.
        let found = unsafe { store.search(search, want, &receive) };
        state.conclude_search(search, want, receive, found)
    }

    /// `fi_cancel(3)`: the receive with this context completes with `ECANCELED`, if it is posted
    /// and has no message yet.
    ///
    /// # Errors
    /// `ENOENT`: no such receive. `EOPBADSTATE`: not enabled, or closed.
    pub fn cancel(&self, context: usize) -> Result<()> {
        let shared = self.shared();
        let mut guard = shared.lock();
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        // without an entry: it follows when the messages in a multi-receive buffer are complete
        let store = state.io.rx.own().ok_or(FiErrno::ENOENT)?;
        if let Some(completion) = store.cancel(context).ok_or(FiErrno::ENOENT)? {
            state
                .io
                .completions
                .failed(completion, 0, FiErrno::ECANCELED);
        }
        shared.wake_driver_and_readers(state);
        Ok(())
    }
}
