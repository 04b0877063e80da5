//! Receives of a shared receive context whose messages are arriving at an endpoint that closes:
//! they are posted again, for messages of the other endpoints.

use super::{Envelope, Home, Receive, Receives, SharedState, StoredKey, Target};
use crate::PeerIndex;
use crate::matching::Want;

impl SharedState {
    /// As [`super::Store::post`]; remembers what the receive matches.
    pub(in crate::rdm) fn post(
        &mut self,
        want: &Want,
        receive: Receive,
    ) -> Result<Option<StoredKey>, ()> {
        let key = self.store.posted.insert(receive).ok_or(())?;
        let place = key.place();
        if self.wants.len() <= place {
            self.wants.resize(place + 1, *want);
        }
        self.wants[place] = *want;
        let messages = self.store.messages(receive.tagged);
        let Some(message) = messages.receive(want, receive.context, key) else {
            return Ok(None);
        };
        self.store.posted.remove(key);
        Ok(Some(message.payload))
    }

    /// As [`super::Store::arrive`]; stores in `found` what the receive matches.
    pub(super) fn arrive(
        &mut self,
        envelope: &Envelope,
        peer: PeerIndex,
        found: &mut Option<Want>,
    ) -> Option<Target> {
        let matched = self.store.find(envelope, peer)?;
        *found = self.wants.get(matched.receive.place()).copied();
        self.store.target(&matched)
    }
}

impl Receives {
    /// The receives whose messages are arriving, and what they match. Those of multi-receive
    /// buffers are not among them: the buffer is posted still, or ends with its messages.
    pub(super) fn incomplete(&self) -> Vec<(Want, Receive)> {
        if let Home::Own(_) = self.home {
            return Vec::new();
        }
        let keys = self.arrivals.keys_where(|it| it.target.multi.is_none());
        let arrivals = keys.into_iter().filter_map(|key| self.arrivals.get(key));
        let again = arrivals.filter_map(|it| Some((it.want?, it.target.receive)));
        again.collect()
    }
}
