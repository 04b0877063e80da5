//! Progress of the rings of an endpoint's links. `docs/rdm.md`, "Rings".

#![allow(unsafe_code, reason = "passes buffers on")]

use super::completions::Reader;
use super::iov::Iov;
use super::link::LinkKey;
use super::link_ring::RingPost;
use super::peer::PeerKey;
use super::shared::State;
use crate::errno::Result;
use crate::wire::rdm::packet::Message;

/// Maximum number of packets of one ring that one progress call processes.
const BATCH: usize = 16;
/// Of so many calls without a packet in a hot ring, one polls the device.
const EMPTY: u32 = 4;
/// Of so many calls with packets in hot rings, one polls the device.
const BUSY: u32 = 16;
/// Of so many polls of the device, one looks for hot rings that are not used.
const COOLING: u32 = 1024;

impl State {
    /// As [`Self::poll`]; most calls examine the hot rings alone, if there are any. Not for a
    /// caller that may sleep afterwards. `reader` gets entries of received messages directly, as
    /// long as it has room.
    #[inline]
    pub(super) fn poll_hot(&mut self, reader: Option<&mut Reader<'_, '_>>) -> Result<bool> {
        self.io.streams.polled = true;
        let (found, all) = self.read_hot(reader);
        if !self.io.streams.is_empty() {
            self.run_streams();
        }
        self.turn += if found { 1 } else { BUSY / EMPTY };
        let reads = self.io.bytes_read != 0;
        if self.turn >= BUSY || reads || self.io.links.hot.is_empty() {
            self.turn = 0;
            return self.poll();
        }
        if self.core.has_reports() {
            self.flush_reports();
        }
        Ok(all)
    }

    #[inline(never)]
    fn run_streams(&mut self) {
        self.io.run_streams(&mut self.core);
        self.settle();
    }

    /// The application does not poll any more.
    pub(super) fn stop_streams(&mut self) {
        self.io.stop_streams();
        self.settle();
    }

    #[cold]
    fn flush_reports(&mut self) {
        self.core.flush(&mut self.io);
        self.settle();
        self.post_receives();
    }

    /// As [`Executor::send_direct`](super::executor::Executor::send_direct), after progress if
    /// something was in the way.
    ///
    /// # Safety
    /// The buffers are readable.
    #[inline]
    pub(super) unsafe fn send_direct(
        &mut self,
        peer: PeerKey,
        message: &Message,
        iov: &Iov,
    ) -> RingPost {
        // SAFETY: the caller promises the buffers.
        let posted = unsafe { self.io.send_direct(&mut self.core, peer, message, iov) };
        if posted != RingPost::No {
            return posted;
        }
        // the entries of such messages need no poll, so the credit may be in a ring
        self.poll_rings();
        // SAFETY: as above.
        unsafe { self.io.send_direct(&mut self.core, peer, message, iov) }
    }

    /// Counts a progress call that had enough entries without a poll.
    #[inline]
    pub(super) fn skip_poll(&mut self) {
        self.turn += 1;
        if self.turn >= BUSY {
            self.turn = 0;
            // a call without entries reports a failure
            let _ = self.poll();
        }
    }

    /// Processes packets in all rings. Returns whether all were taken.
    pub(super) fn poll_rings(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(COOLING) {
            self.io.links.cool();
        }
        let mut all = !self.io.find_arrivals();
        all &= self.read_hot(None).1;
        for at in (0..self.io.links.cold.len()).rev() {
            if let Some(link) = self.io.links.cold.get(at).copied() {
                let read = self.read(link, None);
                all &= read;
                // a packet that has to wait for one of the shared receive queue stays
                if read && !self.io.links.ring_is_ready(link) {
                    self.io.links.cold.swap_remove(at);
                }
            }
        }
        for at in 0..self.io.links.ending().len() {
            if let Some(link) = self.io.links.ending().get(at).copied() {
                // also finds the end of the ring
                all &= self.read(link, None);
            }
        }
        all
    }

    /// Processes packets in the hot rings. Returns whether there were any, and whether all were
    /// taken.
    #[inline]
    fn read_hot(&mut self, mut reader: Option<&mut Reader<'_, '_>>) -> (bool, bool) {
        let (mut found, mut all) = (false, true);
        for at in 0..self.io.links.hot.len() {
            if let Some(link) = self.io.links.hot.get(at).copied()
                && self.io.links.ring_is_ready(link)
            {
                found = true;
                all &= self.read(link, reader.as_deref_mut());
            }
        }
        (found, all)
    }

    /// Processes packets in a ring. Returns whether all were taken.
    #[inline]
    fn read(&mut self, link: LinkKey, mut reader: Option<&mut Reader<'_, '_>>) -> bool {
        for _ in 0..BATCH {
            let reader = reader.as_deref_mut();
            let read = self.io.read_ring(&mut self.core, link, reader);
            self.settle();
            if !read || !self.io.links.ring_is_ready(link) {
                return true;
            }
        }
        false
    }
}
