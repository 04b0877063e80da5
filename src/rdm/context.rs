//! Shared receive contexts, `fi_srx_context(3)`: receives that all endpoints of a context consume.
//!
//! A context has the posted receives and the stored messages of its endpoints ([`SharedStore`]);
//! everything else belongs to the endpoint at which a message arrives, also its entry in a
//! completion queue. A thread that posts a receive finds the stored message under the store's lock,
//! releases it, and delivers the message under the lock of the message's endpoint. If that endpoint
//! was closed meanwhile, the receive is posted again.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::completions::Side;
use super::config::MIN_MULTI_RECV;
use super::limits::Limits;
use super::number_map::NumberMap;
use super::receive::{Receive, completion_of};
use super::receives::{Cancel, EndedReceives, Membership, Owner, SharedStore, Target};
use super::recv::{Directed, SEARCHES, is_multi, receive_of, want_of};
use super::search::Search;
use super::shared::{Shared, State};
use super::table_keys::StoredKey;
use super::vector::{AddressVector, VectorUser};
use crate::PeerIndex;
use crate::av::FiAddr;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::LocalIov;
use crate::matching::{Release, Want};
use crate::mr::random;
use crate::queue::Completion;

/// Attributes of a new shared receive context (`fi_srx_context(3)`).
#[derive(Clone, Copy, Debug)]
pub struct SharedRxConfig {
    /// Maximum number of posted receives.
    pub size: usize,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub op_flags: Flags,
    /// Which receives compare the source.
    pub directed: Directed,
}

/// An endpoint of a context.
#[derive(Debug)]
struct Member {
    owner: Owner,
    shared: Weak<Shared>,
}

/// A context as a user of an address vector that its endpoints have: it learns of removals also
/// while no endpoint is enabled.
struct Removals {
    context: Weak<SharedRx>,
    vector: Weak<AddressVector>,
}

impl VectorUser for Removals {
    fn removed(&self, addr: FiAddr) {
        if let Some(context) = self.context.upgrade()
            && context.may_have(&self.vector)
        {
            context.forget(addr);
        }
    }
}

/// The peer of an address from which receives were directed.
#[derive(Clone, Copy, Debug)]
struct Source {
    index: PeerIndex,
    /// So many endpoints had joined when all of them had found the address in the address vector.
    /// If further ones have joined since then, the next use looks again, and if the address is
    /// inserted later, its insertion.
    found_by: u32,
}

/// The address vector of the endpoints of a context.
#[derive(Default)]
struct Vector {
    of: Option<Weak<AddressVector>>,
    /// Number of endpoints that have it, or are being enabled.
    endpoints: usize,
}

/// The use of a context's address vector by one endpoint, until it is dropped.
pub(super) struct VectorUse(Arc<SharedRx>);

impl Drop for VectorUse {
    fn drop(&mut self) {
        self.0.vector.lock().endpoints -= 1;
    }
}

/// A shared receive context. Thread safe. Receives that are posted when it is dropped end without
/// an entry; by then it has no endpoint.
pub struct SharedRx {
    domain: Arc<Domain>,
    config: SharedRxConfig,
    store: Arc<SharedStore>,
    members: Mutex<Vec<Member>>,
    /// The address vector of all endpoints (`fi_endpoint(3)`, "Shared contexts"), by the first one.
    vector: Mutex<Vector>,
    /// The address vectors of endpoints that are bound, enabled or not.
    removals: Mutex<Vec<Arc<Removals>>>,
    /// The peers of addresses from which receives were directed. Before the first endpoint is
    /// enabled no address vector is known, and each address below 2^32 is accepted: a map, so that
    /// its memory depends on the number of the addresses only.
    peers: Mutex<NumberMap<Source>>,
    /// Number of endpoints that have joined, open or not; wraps.
    joined: AtomicU32,
    /// Whether an endpoint has not found an address of `peers` in the address vector.
    lacks_addresses: AtomicBool,
    owners: AtomicU32,
    /// Number of receives that are not posted any more, but keep their place: their message is
    /// arriving, or their entry was not taken.
    entries: AtomicUsize,
    /// Entries of receives that have ended without an endpoint, which the next one reports.
    unreported: Mutex<Vec<Completion>>,
    min_multi_recv: AtomicUsize,
}

impl std::fmt::Debug for SharedRx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedRx").finish_non_exhaustive()
    }
}

impl SharedRx {
    /// Opens a shared receive context (`fi_srx_context(3)`).
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the device has no [`Limits`]. Those of getrandom(2).
    pub fn open(domain: &Arc<Domain>, mut config: SharedRxConfig) -> Result<Arc<Self>> {
        let limits = Limits::of(domain.device()).ok_or(FiErrno::EOPNOTSUPP)?;
        config.size = config.size.clamp(1, limits.rx_size);
        Self::with(domain, config, MIN_MULTI_RECV)
    }

    /// Opens a context. `min_multi_recv`: the default of `FI_OPT_MIN_MULTI_RECV`.
    pub(super) fn with(
        domain: &Arc<Domain>,
        config: SharedRxConfig,
        min_multi_recv: usize,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            domain: Arc::clone(domain),
            config,
            store: Arc::new(SharedStore::new(random()?)),
            members: Mutex::default(),
            vector: Mutex::default(),
            removals: Mutex::default(),
            peers: Mutex::default(),
            joined: AtomicU32::new(0),
            lacks_addresses: AtomicBool::new(false),
            owners: AtomicU32::new(1),
            entries: AtomicUsize::new(0),
            unreported: Mutex::default(),
            min_multi_recv: AtomicUsize::new(min_multi_recv),
        }))
    }

    /// The domain of the context.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Minimum free space of a multi-receive buffer in bytes (`FI_OPT_MIN_MULTI_RECV`).
    pub fn min_multi_recv(&self) -> usize {
        self.min_multi_recv.load(Ordering::Relaxed)
    }

    /// Changes what [`Self::min_multi_recv`] returns, for buffers that are posted later.
    pub fn set_min_multi_recv(&self, bytes: usize) {
        self.min_multi_recv.store(bytes, Ordering::Relaxed);
    }

    // ---- endpoints ----

    /// An endpoint is bound that has this address vector: its removals count from now on, because
    /// receives may be posted before the endpoint is enabled.
    pub(super) fn attach(self: &Arc<Self>, vector: &Arc<AddressVector>) {
        self.forget_former(&mut self.vector.lock(), Some(vector));
        let mut removals = self.removals.lock();
        removals.retain(|of| of.vector.strong_count() != 0);
        let of = Arc::downgrade(vector);
        if removals.iter().any(|known| known.vector.ptr_eq(&of)) {
            return;
        }
        let new = Arc::new(Removals {
            context: Arc::downgrade(self),
            vector: of,
        });
        removals.push(Arc::clone(&new));
        let user: Arc<dyn VectorUser> = new;
        // under the lock: another thread that finds the vector known relies on it
        vector.attach(Arc::downgrade(&user));
    }

    /// Forgets the vector of former endpoints if it is closed, or if it is not `next` and no
    /// endpoint uses it. Receives that were directed to its addresses match none of the next one.
    fn forget_former(&self, known: &mut Vector, next: Option<&Arc<AddressVector>>) {
        let Some(of) = &known.of else {
            return;
        };
        let other = next.is_some_and(|next| of.as_ptr() != Arc::as_ptr(next));
        if of.strong_count() == 0 || other && known.endpoints == 0 {
            known.of = None;
            self.peers.lock().clear();
        }
    }

    /// Whether the vector is that of the endpoints, or may be that of the first enabled one.
    fn may_have(&self, vector: &Weak<AddressVector>) -> bool {
        let known = self.vector.lock();
        let known = known.of.as_ref().filter(|of| of.strong_count() != 0);
        known.is_none_or(|of| of.ptr_eq(vector))
    }

    /// Checks that an endpoint has the address vector of the others. Without others it has any. The
    /// endpoint keeps the result until it is closed.
    ///
    /// # Errors
    /// `EINVAL`: it has not.
    pub(super) fn check_vector(self: &Arc<Self>, vector: &Arc<AddressVector>) -> Result<VectorUse> {
        let mut known = self.vector.lock();
        self.forget_former(&mut known, Some(vector));
        let of = known.of.get_or_insert_with(|| Arc::downgrade(vector));
        if of.as_ptr() != Arc::as_ptr(vector) {
            return Err(FiErrno::EINVAL);
        }
        known.endpoints += 1;
        Ok(VectorUse(Arc::clone(self)))
    }

    /// The place of a new endpoint. `all`: each success has an entry.
    pub(super) fn membership(&self, all: bool) -> Membership {
        let owner = self.owners.fetch_add(1, Ordering::Relaxed);
        Membership::new(&self.store, owner, all)
    }

    /// Adds an endpoint, whose state has the membership with this number.
    pub(super) fn join(&self, owner: Owner, shared: &Shared) {
        {
            let mut members = self.members.lock();
            members.push(Member {
                owner,
                shared: shared.weak(),
            });
            self.joined.fetch_add(1, Ordering::Release);
        }
        // receives that are directed already match messages of this endpoint too
        let peers = self.peers.lock().clone();
        for (addr, source) in peers {
            if !self.identify(shared, addr, source.index) {
                self.find_source(addr, source.index);
            }
        }
        self.report_ended();
    }

    /// Removes an endpoint, whose state does not exist any more.
    pub(super) fn leave(&self, shared: &Shared) {
        let leaving = shared.weak();
        self.members
            .lock()
            .retain(|member| !member.shared.ptr_eq(&leaving));
    }

    /// An address was removed from the vector.
    fn forget(&self, addr: FiAddr) {
        if let Ok(number) = u32::try_from(addr.0) {
            self.peers.lock().remove(&number);
        }
    }

    /// Follows a change of an endpoint: `before` and now are the numbers of its receives that are
    /// not posted but keep their place.
    pub(super) fn follow(&self, before: &mut usize, state: &State) {
        let now = state.io.rx.unposted() + state.io.completions.len(Side::Rx);
        let change = now.wrapping_sub(*before);
        if change != 0 {
            self.entries.fetch_add(change, Ordering::Relaxed);
            *before = now;
        }
    }

    /// An endpoint has ended with so many receives that kept their place.
    pub(super) fn return_places(&self, entries: usize) {
        self.entries.fetch_sub(entries, Ordering::Relaxed);
    }

    /// Wakes the drivers of all endpoints, if one of them has found a receive for a message of
    /// another one.
    pub(super) fn call_others(&self) {
        if self.store.lock().has_pending() {
            for member in self.enabled() {
                member.driver().wake(&member.driver_turn);
            }
        }
    }

    fn enabled(&self) -> Vec<Arc<Shared>> {
        let members = self.members.lock();
        let open = members.iter().filter_map(|member| member.shared.upgrade());
        open.collect()
    }

    /// Calls `act` with the state of an endpoint. `None`: it is closed, or has panicked.
    fn at<T>(&self, owner: Owner, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let member = {
            let members = self.members.lock();
            let member = members.iter().find(|member| member.owner == owner)?;
            member.shared.upgrade()?
        };
        Self::change(&member, act)
    }

    /// As [`Self::at`].
    fn change<T>(member: &Shared, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut guard = member.lock();
        let state = guard.as_mut().filter(|state| !state.has_panicked())?;
        state.core.set_now(member.now());
        let result = act(state);
        state.run_todo();
        if state.core.has_reports() {
            // the calling thread may sleep on the queue of another endpoint
            state.report();
        }
        member.wake_driver_and_readers(state);
        Some(result)
    }

    /// Calls `act` with the state of the endpoint that was enabled first, of those that are not
    /// closing and whose receives have a completion queue; if there is none, a counter. `None`:
    /// there is none of either kind.
    fn at_first<T>(&self, mut act: impl FnMut(&mut State) -> T) -> Option<T> {
        let members = self.enabled();
        let mut at = |is: fn(&Shared, &State) -> bool| {
            members.iter().find_map(|member| {
                let act = |state: &mut State| is(member, state).then(|| act(state));
                Self::change(member, act).flatten()
            })
        };
        at(|_, state| state.io.completions.bound[Side::Rx as usize])
            .or_else(|| at(|member, _| member.counters.rx().is_some()))
    }

    /// Makes progress at all endpoints by this poll. One that has failed does not keep others from
    /// receiving: a read of its queue returns the error.
    ///
    /// # Errors
    /// All endpoints have failed: why one has.
    fn progress(&self, poll: impl Fn(&mut State) -> Result<()>) -> Result<()> {
        let (mut served, mut failure) = (false, None);
        for member in self.enabled() {
            match Self::change(&member, &poll) {
                Some(Ok(())) => served = true,
                Some(Err(error)) => failure = Some(error),
                // closed, or it has panicked
                None => failure = failure.or(member.lock().as_ref().and_then(|it| it.failed)),
            }
        }
        failure.filter(|_| !served).map_or(Ok(()), Err)
    }

    // ---- peers ----

    /// The peer of an address, at all endpoints.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the address vector, or is none that a vector returns.
    fn peer_of(&self, addr: FiAddr) -> Result<PeerIndex> {
        let vector = {
            let mut known = self.vector.lock();
            self.forget_former(&mut known, None);
            known.of.as_ref().and_then(Weak::upgrade)
        };
        if let Some(vector) = &vector {
            vector.lookup(addr)?;
        }
        // a vector has fewer than 2^32 addresses
        let number = u32::try_from(addr.0).map_err(|_| FiErrno::EINVAL)?;
        let known = self.peers.lock().get(&number).copied();
        let source = match known {
            Some(source) => source,
            None => self.add_source(addr, number, vector.as_deref())?,
        };
        if source.found_by != self.joined.load(Ordering::Acquire) {
            self.find_source(number, source.index);
        }
        Ok(self.store.lock().find(source.index))
    }

    /// A new peer of an address, unless another thread adds one meanwhile, with which it posts its
    /// receive.
    ///
    /// # Errors
    /// `EINVAL`: the address was removed meanwhile.
    #[cold]
    fn add_source(
        &self,
        addr: FiAddr,
        number: u32,
        vector: Option<&AddressVector>,
    ) -> Result<Source> {
        let index = self.store.lock().add_peer();
        let mut peers = self.peers.lock();
        if let Some(vector) = vector {
            // `forget` of a later removal waits for the lock, and finds the entry
            vector.lookup(addr)?;
        }
        let new = Source { index, found_by: 0 };
        Ok(*peers.entry(number).or_insert(new))
    }

    /// Makes the peers of an address at all endpoints the one with this index; if an endpoint does
    /// not find the address, its insertion does.
    #[cold]
    fn find_source(&self, number: u32, index: PeerIndex) {
        if self.is_found(number, index) {
            return;
        }
        self.lacks_addresses.store(true, Ordering::SeqCst);
        // an insertion that has not seen this is behind the look-up, or this finds its address
        self.is_found(number, index);
    }

    fn is_found(&self, number: u32, index: PeerIndex) -> bool {
        // before the endpoints are listed
        let joined = self.joined.load(Ordering::Acquire);
        let mut found = true;
        for member in self.enabled() {
            found &= self.identify(&member, number, index);
        }
        if found
            && let Some(source) = self.peers.lock().get_mut(&number)
            // the address may have been removed, and inserted again
            && source.index == index
        {
            source.found_by = joined;
        }
        found
    }

    /// Addresses were inserted in the vector: receives from them may be posted already.
    pub(super) fn addresses_inserted(&self) {
        if !self.lacks_addresses.load(Ordering::SeqCst)
            || !self.lacks_addresses.swap(false, Ordering::SeqCst)
        {
            return;
        }
        let joined = self.joined.load(Ordering::Acquire);
        let lacking: Vec<_> = {
            let peers = self.peers.lock();
            let lacking = peers.iter().filter(|(_, it)| it.found_by != joined);
            lacking.map(|(number, it)| (*number, it.index)).collect()
        };
        for (number, index) in lacking {
            self.find_source(number, index);
        }
    }

    /// The peer of an endpoint at this address is the one with this index. `false`: the endpoint
    /// has not found the address, and a later call may find it.
    fn identify(&self, member: &Shared, number: u32, index: PeerIndex) -> bool {
        let addr = FiAddr(number.into());
        let own = Self::change(member, |state| {
            if state.failed.is_some() {
                // it gets no message any more
                return Ok(None);
            }
            let peer = state.peer_of(addr)?;
            let peer = state.core.resolve(peer);
            Ok::<_, FiErrno>(state.io.rx.shared_index(peer))
        });
        let own = match own {
            Some(Ok(own)) => own,
            Some(Err(_)) => return false,
            // it is closed, or has panicked
            None => None,
        };
        if let Some(own) = own {
            {
                // Under the lock, for which a removal of the address waits: if the address has been
                // removed since, the endpoint may have found another peer at it.
                let peers = self.peers.lock();
                if peers.get(&number).is_none_or(|it| it.index != index) {
                    return false;
                }
                self.store.lock().merge(own, index);
            }
            self.deliver_pending();
        }
        true
    }

    /// Delivers the messages for which a receive was found without their endpoint's lock.
    fn deliver_pending(&self) {
        let owners = self.store.lock().pending_owners();
        for owner in owners {
            // a closing endpoint has posted the receives again; one that has panicked does so at
            // the close
            self.at(owner, |state| {
                for (key, target) in state.io.rx.take_pending() {
                    state.io.deliver_stored(key, target);
                }
            });
        }
    }

    // ---- receives ----

    /// `fi_recv`, `fi_trecv` and their forms, as [`Endpoint::recv`](super::Endpoint::recv).
    ///
    /// # Errors
    /// - `EAGAIN`: the maximum number of receives is posted.
    /// - `EINVAL`: too many buffers, or several with `FI_MULTI_RECV`; a directed receive from an
    ///   address that is not in the address vector; a claim of no message.
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - `EOPBADSTATE`: a search, and the context has no endpoint that is enabled and reports
    ///   receives.
    ///
    /// # Safety
    /// The buffers stay valid until the operation completes or the context is dropped. With
    /// `FI_CLAIM`, `context` is the address of a `struct fi_context`.
    pub unsafe fn recv(
        &self,
        from: FiAddr,
        tag: Option<(u64, u64)>,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let flags = flags.unwrap_or(self.config.op_flags);
        let receive = receive_of(tag.is_some(), &local, context, flags)?;
        let from = match self.config.directed.source(tag.is_some(), from) {
            Some(from) => Some(self.peer_of(from)?),
            None => None,
        };
        let want = want_of(tag, from);
        if flags.intersects(SEARCHES) {
            // SAFETY: the caller keeps the contract of this function.
            return unsafe { self.search(&want, receive, flags) };
        }
        if self.is_full() {
            self.progress(|state| state.poll().map(drop))?;
            if self.is_full() {
                self.domain.queues().help_from_poll();
                return Err(FiErrno::EAGAIN);
            }
        }
        match is_multi(&receive, flags) {
            true => self.post_multi(&want, receive),
            false => self.post(&want, receive),
        }
    }

    fn is_full(&self) -> bool {
        let posted = self.store.lock().store.posted();
        posted + self.entries.load(Ordering::Relaxed) >= self.config.size
    }

    fn post(&self, want: &Want, receive: Receive) -> Result<()> {
        let mut number = None;
        loop {
            let found = {
                let mut state = self.store.lock();
                let want = state.current(want);
                let found = state.post(&want, receive, number);
                found.map_err(|()| FiErrno::EAGAIN)?
            };
            let Some(found) = found else {
                return Ok(());
            };
            if self.deliver(found.owner, found.key, found.target) {
                return Ok(());
            }
            number = found.target.posting.map(|posting| posting.number);
        }
    }

    fn post_multi(&self, want: &Want, receive: Receive) -> Result<()> {
        let taken = {
            let mut state = self.store.lock();
            let want = state.current(want);
            let taken = state
                .store
                .post_multi(&want, receive, self.min_multi_recv());
            let taken = taken.map_err(|()| FiErrno::EAGAIN)?.into_iter();
            let owner = |key| state.store.stored(key).map_or(0, |stored| stored.owner);
            let taken = taken.map(|(key, target)| (owner(key), key, target));
            taken.collect::<Vec<_>>()
        };
        for (owner, key, target) in taken {
            if !self.deliver(owner, key, target)
                && let Some(multi) = target.multi
            {
                let release = self.store.lock().store.finished(receive.tagged, multi);
                if release != Release::Held {
                    // no message reports that the buffer is released
                    self.ended(&receive, Flags::MULTI_RECV);
                }
            }
        }
        Ok(())
    }

    /// Follows the end of an endpoint, or of its part in the context.
    pub(super) fn report_ended_with(&self, left: &EndedReceives) {
        for receive in &left.ended {
            self.ended(receive, Flags::empty());
        }
        for receive in &left.released {
            self.ended(receive, Flags::MULTI_RECV);
        }
        self.deliver_pending();
    }

    /// Delivers a stored message to a receive. `false`: its endpoint was closed meanwhile, and the
    /// message with it; or it has panicked, and its messages end when it is closed.
    fn deliver(&self, owner: Owner, key: StoredKey, target: Target) -> bool {
        let delivered = self.at(owner, |state| state.io.deliver_stored(key, target));
        delivered.is_some()
    }

    /// # Safety
    /// As [`Self::recv`].
    unsafe fn search(&self, want: &Want, receive: Receive, flags: Flags) -> Result<()> {
        let search = Search::of(flags, receive.context)?;
        if !search.is_of_claim() {
            self.progress(State::poll_before_search)?;
        }
        loop {
            let found = {
                let mut state = self.store.lock();
                let want = state.current(want);
                // SAFETY: the caller keeps the contract of this function.
                unsafe { state.store.search(search, &want, &receive) }
            };
            let Some(found) = found else {
                let reported =
                    self.at_first(|state| state.conclude_search(search, want, receive, None));
                return reported.unwrap_or(Err(FiErrno::EOPBADSTATE));
            };
            let reported = self.at(found.owner, |state| {
                state.conclude_search(search, want, receive, Some(found))
            });
            if let Some(reported) = reported {
                return reported;
            }
            // no endpoint can report its messages, and the next search would find them again
            self.store.lock().store.drop_of(found.owner);
            if search.is_of_claim() {
                return Err(FiErrno::EINVAL);
            }
        }
    }

    /// `fi_cancel(3)`: the receive with this context completes with `ECANCELED`, if it is posted
    /// and has no message yet. The entry is in the queue of the endpoint that was enabled first, of
    /// those that have a queue of receives; of the next one if there is none. If the message of the
    /// receive is arriving at an endpoint that closes before its end, the receive completes in the
    /// same way.
    ///
    /// # Errors
    /// `ENOENT`: no such receive, or one whose message is arriving.
    pub fn cancel(&self, context: usize) -> Result<()> {
        loop {
            let (cancelled, returns) = {
                let mut state = self.store.lock();
                (state.cancel(context), state.returns())
            };
            match cancelled {
                Some(Cancel::Done(completion)) => {
                    self.report(completion);
                    return Ok(());
                }
                // the messages in a multi-receive buffer, or the endpoint, end before
                Some(Cancel::Later) => return Ok(()),
                Some(Cancel::Matched) => return Err(FiErrno::ENOENT),
                None => {}
            }
            // the close of a member, also of one that has failed, uses the mark
            let arrives = |member: &Arc<Shared>| {
                let mut guard = member.lock_for_rma();
                let state = guard.as_mut();
                state.is_some_and(|state| state.io.rx.cancel_arriving(context))
            };
            let found = self.enabled().iter().any(arrives);
            // a receive that has come back meanwhile was in neither place
            if found || self.store.lock().returns() == returns {
                return Err(FiErrno::ENOENT);
            }
        }
    }

    /// A receive has ended without a message.
    fn ended(&self, receive: &Receive, flags: Flags) {
        let mut completion = completion_of(receive);
        completion.flags |= flags;
        self.report(completion);
    }

    /// Reports the end of a receive with `FI_ECANCELED`.
    fn report(&self, completion: Completion) {
        self.unreported.lock().push(completion);
        self.report_ended();
    }

    /// Passes the unreported entries to the first endpoint that reports receives. A new endpoint is
    /// a member before it calls this, so no entry stays while there is one.
    fn report_ended(&self) {
        self.at_first(|state| {
            for completion in self.unreported.lock().drain(..) {
                let completions = &mut state.io.completions;
                completions.failed(completion, 0, FiErrno::ECANCELED);
            }
        });
    }
}

#[cfg(test)]
mod tests;
