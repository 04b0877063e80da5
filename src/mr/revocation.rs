//! Revocations, as processed by the owner of a directory: which peers have acknowledged them, how
//! long the owner waits, and which parts of a registration are retained until all peers have
//! acknowledged. `docs/protocol.md`, "Stale keys".

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection_block::holders;
use super::directory::{Directory, Inner, Look, Peer};
use super::directory_peers::DirectoryPeer;
use crate::errno::FiErrno;
use crate::log::{info_log, warn_log};
use crate::queue::event_cell::Cell;
use crate::verbs::{Mr, WordRange, Words};

/// Time limit of one wait for all peers, after the first [`SPINS`] polls.
const ACKNOWLEDGEMENT_WAIT: Duration = Duration::from_secs(1);
/// Polls without progress before the first sleep.
const SPINS: u32 = 500;
/// Initial and maximum sleep between polls.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);
/// Maximum number of retired regions. Beyond it, the owner ends the connections of the peers that
/// the oldest ones wait for.
pub(super) const MAX_RETIRED: usize = 4096;
/// Limits of what retired regions retain, with the same effect: registrations of the device, at
/// most a quarter of its own limit, and words of segment lists (16 MiB). A region of several
/// segments has more than one registration.
const MAX_RETIRED_MRS: usize = 16_384;
const MAX_RETIRED_WORDS: usize = 2 << 20;

/// Parts of a region that are retained while a peer may use its old records.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    /// Ended registrations that only reserve their keys.
    pub(crate) keys: Vec<Mr>,
    /// Segment lists that a peer may still read.
    pub(crate) lists: Vec<Words>,
    /// Event cell that a peer may still add to.
    pub(crate) cell: Option<Arc<Cell>>,
}

impl Retired {
    /// Number of registrations of the device.
    fn registrations(&self) -> usize {
        self.keys.len() + self.lists.len()
    }

    /// Number of words of the lists.
    fn words(&self) -> usize {
        self.lists.iter().map(Words::len).sum()
    }

    fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.lists.is_empty() && self.cell.is_none()
    }

    /// Ends the registrations without a wait. Returns whether all have ended; if not, the caller
    /// can repeat the call.
    fn end_now(&mut self) -> bool {
        let keys = std::mem::take(&mut self.keys).into_iter();
        self.keys = keys.filter_map(|mr| mr.deregister_now().err()).collect();
        self.lists.retain_mut(|list| !list.end_now());
        self.keys.is_empty() && self.lists.is_empty()
    }
}

/// Sums of what the retired regions of a directory retain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retained {
    registrations: usize,
    words: usize,
    /// Maximum of `registrations`.
    pub(super) most: usize,
}

impl Retained {
    /// Sums of 0, for a device that can have `max_mr` registrations.
    pub(super) fn none(max_mr: usize) -> Self {
        Self {
            registrations: 0,
            words: 0,
            most: match max_mr / 4 {
                0 => MAX_RETIRED_MRS,
                quarter => MAX_RETIRED_MRS.min(quarter),
            },
        }
    }

    /// Whether these sums with `more` further registrations exceed a limit.
    fn exceeds(&self, more: usize) -> bool {
        self.registrations + more > self.most || self.words > MAX_RETIRED_WORDS
    }
}

/// What can be ended when no access to it is under way.
#[derive(Debug)]
pub(super) enum Ending {
    /// A connection block and its number.
    Block(WordRange, usize),
    Retired(Retired),
}

impl Ending {
    pub(super) fn end_now(&mut self) -> bool {
        match self {
            Self::Block(access, _) => access.end_now(),
            Self::Retired(retired) => retired.end_now(),
        }
    }
}

/// Result of deregistering memory.
pub(crate) enum Deregistration {
    /// The memory is no longer registered; the registration only reserves its key.
    Reserved(Mr),
    Done,
    /// An access is under way; the registration has not ended.
    Busy(Mr),
}

/// A peer that is looked at: the number of its connection block, and whether it is awaited.
struct Member {
    number: usize,
    peer: Arc<dyn Peer>,
    awaited: bool,
}

/// A revocation for which the owner has waited ([`Directory::await_acknowledgements`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct AwaitedRevocation<'a> {
    directory: &'a Directory,
    wanted: u64,
    /// Whether peers may still use older records: the owner has given up waiting for them, or their
    /// connections have ended.
    lagging: bool,
}

impl Directory {
    /// Waits until the peers have acknowledged revocation number `wanted`, or for about
    /// [`ACKNOWLEDGEMENT_WAIT`] in total, and then gives up waiting for the others, whatever they
    /// write meanwhile. The caller must hold no lock of a peer or of an endpoint.
    pub(crate) fn await_acknowledgements(&self, wanted: u64) -> AwaitedRevocation<'_> {
        let mut deadline = None;
        let mut pause = SHORTEST;
        let mut round = 0;
        let mut late = false;
        loop {
            let mut inner = self.inner.lock();
            let awaited = |member: &DirectoryPeer| member.is_awaited(wanted);
            if late || !inner.peers.any_unconfirmed(awaited) {
                let lagging = inner.peers.any_unconfirmed(|member| member.lags(wanted));
                let ending = inner.take_ending();
                drop(inner);
                self.end(ending);
                return AwaitedRevocation {
                    directory: self,
                    wanted,
                    lagging,
                };
            }
            if round < SPINS {
                drop(inner);
                round += 1;
                std::hint::spin_loop();
                continue;
            }
            late = Instant::now()
                >= *deadline.get_or_insert_with(|| Instant::now() + ACKNOWLEDGEMENT_WAIT);
            drop(inner);
            self.look(wanted, late);
            if late {
                self.inner.lock().give_up(wanted);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST);
        }
    }

    /// Acknowledges the revocations of all peers, and reads the progress of the awaited peers.
    /// Gives up waiting for peers whose connections have ended. While another thread does the same,
    /// whose looks serve this one too, it has no effect; the last look waits for that thread.
    ///
    /// Both post requests, which the device may execute in the call: the directory's lock, for
    /// which other closes and registrations wait, is not held meanwhile. `looking` is: one read of
    /// a peer's word is under way at a time, and its result belongs to the last count that
    /// [`DirectoryPeer::asked`] has recorded.
    fn look(&self, wanted: u64, is_last: bool) {
        let looking = match self.looking.try_lock() {
            Some(looking) => looking,
            None if is_last => self.looking.lock(),
            None => return,
        };
        let (count, members) = {
            let inner = self.inner.lock();
            (inner.revocations, inner.members(wanted))
        };
        let mut looks = Vec::new();
        for Member {
            number,
            peer,
            awaited,
        } in members
        {
            // the peer may itself wait for this side's acknowledgement, possibly in another thread
            // of this process
            peer.acknowledge();
            if awaited {
                let look = peer.look();
                looks.push((number, peer, look));
            }
        }
        let mut inner = self.inner.lock();
        for (number, peer, look) in &looks {
            inner.looked(*number, peer, look, count);
        }
        drop(inner);
        // the last references may be among them, whose drop acquires the directory's lock
        drop(looks);
        drop(looking);
    }

    /// Waits for the thread that looks at the peers, which may use one that was removed meanwhile.
    pub(super) fn wait_for_look(&self) {
        drop(self.looking.lock());
    }

    /// Removes and returns the former registrations of a refreshed region that could not be ended.
    /// `generation` is the region's.
    pub(crate) fn take_stuck(&self, generation: u64) -> Vec<Mr> {
        let mut inner = self.inner.lock();
        let stuck = inner.stuck.extract_if(.., |(of, _)| *of == generation);
        stuck.map(|(_, mr)| mr).collect()
    }
}

impl AwaitedRevocation<'_> {
    /// Ends a registration: afterwards no access to the memory through it is possible, and as long
    /// as peers may use its key, no other memory has that key. `reserved`: the number of
    /// registrations of the region that reserve their keys already.
    pub(crate) fn deregister(&self, mut mr: Mr, reserved: usize) -> Deregistration {
        if self.lagging && mr.may_lose_key() {
            // first, because then another registration may have the key at once
            self.cut_off();
        } else if self.lagging && self.make_room(reserved + 1) {
            match mr.reserve_key() {
                Ok(()) => return Deregistration::Reserved(mr),
                Err(FiErrno::EBUSY) => return Deregistration::Busy(mr),
                Err(error) => {
                    info_log!(
                        Mr,
                        "rkey {:#x} of a closed region could not be reserved: {error}; \
                         peers that have not acknowledged its revocation are disconnected",
                        mr.rkey().get()
                    );
                    // also of one whose late acknowledgement of an older revocation has arrived
                    // since the owner gave it up
                    self.directory.inner.lock().sever(self.wanted, |_| true);
                }
            }
        }
        match mr.deregister() {
            Ok(()) => Deregistration::Done,
            Err(mr) => Deregistration::Busy(mr),
        }
    }

    /// If the retired regions with `more` registrations exceed a limit, ends the connections of the
    /// peers that the oldest ones wait for. Returns whether peers may still use the records of this
    /// region.
    fn make_room(&self, more: usize) -> bool {
        let mut inner = self.directory.inner.lock();
        if !inner.retained.exceeds(more) {
            return true;
        }
        let ending = inner.end_oldest(self.wanted, |inner| inner.retained.exceeds(more));
        let lagging = inner
            .peers
            .any_unconfirmed(|member| member.lags(self.wanted));
        drop(inner);
        self.directory.end(ending);
        lagging
    }

    /// Retains the remains of a withdrawn region until every peer has acknowledged. Its
    /// registrations have been ended.
    pub(crate) fn retire(&self, retired: Retired) {
        if !self.lagging || retired.is_empty() {
            return;
        }
        let mut inner = self.directory.inner.lock();
        inner.add_retired(self.wanted, retired);
        let ending = inner.end_oldest(self.wanted, |inner| {
            inner.retired.len() > MAX_RETIRED || inner.retained.exceeds(0)
        });
        drop(inner);
        self.directory.end(ending);
    }

    /// Ends the connections of the peers that may still use older records: a registration stays,
    /// with its rights.
    pub(crate) fn cut_off(&self) {
        if self.lagging {
            self.directory.inner.lock().sever(self.wanted, |_| true);
        }
    }

    /// As [`Self::deregister`], for the former registrations of a refreshed region. A registration
    /// with an access under way is ended when the region is closed ([`Directory::take_stuck`]).
    /// Returns the registrations that reserve their keys.
    pub(crate) fn deregister_replaced(&self, mrs: Vec<Mr>, generation: u64) -> Vec<Mr> {
        let mut keys = Vec::new();
        for mr in mrs {
            match self.deregister(mr, keys.len()) {
                Deregistration::Reserved(mr) => keys.push(mr),
                Deregistration::Busy(mr) => {
                    self.directory.inner.lock().stuck.push((generation, mr))
                }
                Deregistration::Done => {}
            }
        }
        keys
    }
}

impl Inner {
    /// Sends the revocation count to the peers that hold keys. Reads one word of each connection
    /// block, and visits only those peers.
    pub(super) fn notify(&mut self) {
        for (slab, words) in self.blocks.iter().enumerate() {
            for number in holders(slab, words) {
                self.peers.notify(number, self.revocations);
            }
        }
    }

    /// The peers of the directory.
    fn members(&self, wanted: u64) -> Vec<Member> {
        let members = self.peers.iter().filter_map(|(number, member)| {
            Some(Member {
                number,
                peer: member.peer.upgrade()?,
                awaited: member.is_awaited(wanted),
            })
        });
        members.collect()
    }

    /// Records a look at a peer that had begun when the revocation count was `count`, unless the
    /// peer has left since.
    pub(super) fn looked(&mut self, number: usize, peer: &Arc<dyn Peer>, look: &Look, count: u64) {
        let member = self.peers.get_mut(number);
        let Some(member) = member.filter(|member| member.is(peer)) else {
            return;
        };
        if let Some(settled) = look.answer {
            member.answered(settled);
        }
        if look.asked {
            member.asked(count);
        }
        if !look.up {
            member.give_up();
        }
    }

    /// Gives up waiting for all awaited peers.
    fn give_up(&mut self, wanted: u64) {
        for member in self.peers.iter_mut() {
            if member.is_awaited(wanted) && member.peer.strong_count() != 0 {
                warn_log!(
                    Mr,
                    "revocation {wanted}: a peer did not acknowledge it within {ACKNOWLEDGEMENT_WAIT:?}; \
                     fi_close no longer waits for this peer"
                );
                member.give_up();
            }
        }
    }

    /// As [`Self::take_ending`]. While a limit is exceeded afterwards, ends the connections of the
    /// peers that the oldest retired region waits for (without a retired region: those that lag
    /// behind revocation `wanted`), and repeats this with the next one, which may wait for other
    /// peers. Stops if there is no such peer.
    #[must_use]
    fn end_oldest(&mut self, wanted: u64, exceeds: impl Fn(&Self) -> bool) -> Vec<Ending> {
        let mut ending = self.take_ending();
        while exceeds(self) {
            let oldest = self.retired.front().map_or(wanted, |(of, _)| *of);
            if !self.sever(oldest, DirectoryPeer::is_given_up) {
                break;
            }
            ending.extend(self.take_ending());
        }
        ending
    }

    /// Ends the connections of the peers that lag behind revocation `wanted` and that `concerns`
    /// accepts. Returns whether there was one.
    fn sever(&mut self, wanted: u64, concerns: impl Fn(&DirectoryPeer) -> bool) -> bool {
        let mut severed = false;
        self.peers.remove_unconfirmed(|member| {
            let ends = member.lags(wanted) && concerns(member);
            if ends && let Some(peer) = member.peer.upgrade() {
                warn_log!(
                    Mr,
                    "revocation {wanted}: a peer did not acknowledge it; its connection is ended"
                );
                peer.sever();
            }
            severed |= ends;
            ends
        });
        severed
    }

    /// Adds a retired region behind those of earlier revocations.
    pub(super) fn add_retired(&mut self, wanted: u64, retired: Retired) {
        self.retained.registrations += retired.registrations();
        self.retained.words += retired.words();
        let at = self.retired.partition_point(|(of, _)| *of <= wanted);
        self.retired.insert(at, (wanted, retired));
    }

    /// Removes the retired registrations that every peer has acknowledged, and those that had an
    /// access under way. The caller passes them to [`Directory::end`] after it has released the
    /// directory's lock.
    #[must_use]
    pub(super) fn take_ending(&mut self) -> Vec<Ending> {
        let mut ending = std::mem::take(&mut self.ending);
        while let Some(&(wanted, _)) = self.retired.front() {
            let lags =
                |member: &DirectoryPeer| member.peer.strong_count() != 0 && member.lags(wanted);
            if self.peers.any_unconfirmed(lags) {
                break;
            }
            let Some((_, oldest)) = self.retired.pop_front() else {
                break;
            };
            self.retained.registrations -= oldest.registrations();
            self.retained.words -= oldest.words();
            ending.push(Ending::Retired(oldest));
        }
        ending
    }
}
