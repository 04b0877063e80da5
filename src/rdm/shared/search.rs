//! The results of searches of the stored messages.

use super::State;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::matching::Want;
use crate::rdm::receive::{Receive, completion_of};
use crate::rdm::receives::Target;
use crate::rdm::search::{Found, Search};

impl State {
    /// Reports what a search has found; `None`: nothing.
    ///
    /// # Errors
    /// `EINVAL`: the claim is of no message.
    pub(in crate::rdm) fn conclude_search(
        &mut self,
        search: Search,
        want: &Want,
        receive: Receive,
        found: Option<Found>,
    ) -> Result<()> {
        let io = &mut self.io;
        let mut completion = completion_of(&receive);
        let Some(found) = found else {
            if search.is_of_claim() {
                return Err(FiErrno::EINVAL);
            }
            completion.tag = want.tag;
            io.completions.not_found(completion);
            return Ok(());
        };
        completion.tag = found.tag;
        match search {
            Search::Redeem => {
                let target = Target {
                    receive,
                    multi: None,
                    // a claimed message has no other
                    posting: None,
                };
                io.deliver_stored(found.key, target);
                return Ok(());
            }
            Search::DiscardClaimed => {
                io.discard_stored(found.key);
                let wanted = receive.wanted || io.rx.reports_all();
                io.completions.done(completion, None, wanted);
                return Ok(());
            }
            Search::Peek | Search::Claim | Search::Discard => {}
        }
        // a message is in memory
        completion.len = found.len as usize;
        if let Some(data) = found.envelope.and_then(|envelope| envelope.data) {
            completion.data = data;
            completion.flags |= Flags::REMOTE_CQ_DATA;
        }
        if search == Search::Discard {
            io.discard_stored(found.key);
        }
        let peer = found.envelope.map(|envelope| envelope.peer);
        io.completions.peeked(completion, peer);
        Ok(())
    }
}
