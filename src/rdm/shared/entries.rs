//! The way of an endpoint's entries to a completion queue.

use super::State;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::matching::Release;
use crate::queue::Completion;
use crate::queue::source::Sink;
use crate::rdm::completions::{Entry, Side, error_of};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::listening::scoped;
use crate::rdm::receives::MultiBuffer;
use crate::wire::rdm::Credit;

impl State {
    /// The `fi_addr_t` of a peer.
    fn source_of(&mut self, peer: PeerKey) -> u64 {
        let Some((vector, scope)) = &self.io.vector else {
            return Completion::NO_ADDR;
        };
        // the generation and the count only grow, so each change of either one changes the sum
        let generation = vector.generation().wrapping_add(self.core.names());
        let place = peer.place();
        if let Some((seen, addr)) = self.source_addresses.get(place)
            && *seen == generation
        {
            return *addr;
        }
        // a link-local address may have been inserted without its scope
        let both = |addr| [scoped(addr, *scope), addr];
        let first = self.core.source_address(peer);
        let found = first.and_then(|first| vector.source(&both(first)));
        let found = found.or_else(|| {
            let all = self.core.addresses(peer).into_iter();
            let all: Vec<_> = all.flat_map(both).collect();
            vector.source(&all)
        });
        let addr = found.map_or(Completion::NO_ADDR, |addr| addr.0);
        if self.source_addresses.len() <= place {
            self.source_addresses.resize(place + 1, (u64::MAX, 0));
        }
        self.source_addresses[place] = (generation, addr);
        addr
    }

    /// The core has freed peers: their places name others later.
    pub(super) fn forget_freed(&mut self) {
        for peer in self.io.freed.drain(..) {
            if let Some(source) = self.source_addresses.get_mut(peer.place()) {
                *source = (u64::MAX, 0);
            }
        }
    }

    /// Passes on at most `max` entries of a direction. Returns their number. `has_sources`: the
    /// endpoint has `FI_SOURCE`; the entries that need the addresses of the senders get them.
    #[inline]
    pub(in crate::rdm) fn pass(
        &mut self,
        side: Side,
        has_sources: bool,
        sink: &mut Sink<'_>,
        max: usize,
    ) -> usize {
        let mut count = 0;
        while count < max
            && let Some((_, entry)) = self.io.completions.of(side).front()
        {
            // an error before it lets another read take the entry, which may use the address
            let sources = || has_sources && sink.uses_sources(1);
            match entry {
                Entry::Done(completion, None) => sink.complete(completion),
                Entry::Done(completion, _) if !sources() => sink.complete(completion),
                _ => {
                    let sources = sources();
                    let entry = *entry;
                    self.pass_with_peer(&entry, sources, sink);
                }
            }
            self.io.completions.of(side).pop_front();
            count += 1;
        }
        count
    }

    /// Passes on an entry that has an effect on its peer, or whose source is wanted, or an error.
    fn pass_with_peer(&mut self, entry: &Entry, sources: bool, sink: &mut Sink<'_>) {
        match *entry {
            Entry::Done(mut completion, peer) | Entry::Held(mut completion, peer, ..) => {
                if let Entry::Held(.., origin, credit) = *entry {
                    self.core.give_back(origin, credit);
                }
                if let Some(peer) = peer.filter(|_| sources) {
                    completion.src_addr = self.source_of(peer);
                }
                sink.complete(&completion);
            }
            Entry::Part(mut completion, peer, origin, credit, buffer) => {
                if credit != Credit::ZERO {
                    self.core.give_back(origin, credit);
                }
                if sources {
                    completion.src_addr = self.source_of(peer);
                }
                self.part_taken(&mut completion, buffer);
                sink.complete(&completion);
            }
            Entry::Failed(error) => sink.fail(error),
            Entry::FailedPart(mut completion, olen, error, buffer) => {
                self.part_taken(&mut completion, buffer);
                sink.fail(error_of(completion, olen, error));
            }
        }
    }

    /// An entry of a multi-receive buffer of a shared receive context is taken: the last one has
    /// `FI_MULTI_RECV`, or is followed by that of the receive, which was cancelled.
    fn part_taken(&mut self, completion: &mut Completion, buffer: MultiBuffer) {
        let tagged = completion.flags.contains(Flags::TAGGED);
        match self.io.rx.finished(tagged, buffer) {
            Release::Held => {}
            Release::Last => completion.flags |= Flags::MULTI_RECV,
            Release::Cancelled => {
                let kind = Flags::RECV | Flags::MSG | Flags::TAGGED;
                let flags = (completion.flags & kind) | Flags::MULTI_RECV;
                let end = Completion::new(completion.context, flags);
                self.io.completions.failed(end, 0, FiErrno::ECANCELED);
            }
        }
    }
}
