//! Binds endpoints and shared receive contexts to a completion queue's device queue, and reserves
//! room for their completions.

use std::num::NonZeroU32;
use std::sync::Arc;

use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::queue::complete::{Attachment, ONLY_SOURCES, Sharer, failure};
use crate::queue::cq::{CompletionQueue, Inner};
use crate::queue::slots::{EndpointSlots, SlotRing};
use crate::queue::source::Entry;
use crate::queue::srx_slots::SharedSlots;
use crate::queue::wr_id::{CqMember, WrId};
use crate::queue::xrc_receives::XrcReceives;
use crate::verbs::Cq;

/// A completion queue that is bound to an endpoint.
#[derive(Clone, Debug)]
pub(crate) struct CqBinding {
    pub(crate) cq: Arc<CompletionQueue>,
    /// Only operations with `FI_COMPLETION` have entries.
    pub(crate) selective: bool,
}

/// The requests of an endpoint: those it sends, or its receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Transmit,
    Receive,
}

impl Direction {
    pub(crate) const BOTH: &[Self] = &[Self::Transmit, Self::Receive];

    fn slots(self, of: &EndpointSlots) -> &SlotRing {
        match self {
            Self::Transmit => &of.tx,
            Self::Receive => &of.rx,
        }
    }
}

impl CompletionQueue {
    /// Adds an endpoint to the table, and reserves room for `completions` more completions.
    ///
    /// # Errors
    /// `ENOSPC`: 65,536 endpoints are bound, or the device's queue has no room.
    pub(crate) fn attach(
        &self,
        slots: &Arc<EndpointSlots>,
        completions: usize,
    ) -> Result<CqMember> {
        let mut inner = self.inner.lock();
        let index = match inner.table.free.last() {
            Some(index) => *index,
            None => u16::try_from(inner.table.endpoints.len()).map_err(|_| FiErrno::ENOSPC)?,
        };
        self.reserve(&mut inner, completions)?;
        inner.table.set_more(ONLY_SOURCES, false);
        if inner.table.free.pop().is_none() {
            inner.table.endpoints.push(Attachment::default());
        }
        let place = &mut inner.table.endpoints[usize::from(index)];
        place.slots = Some(Arc::clone(slots));
        place.selective = false;
        Ok(CqMember::new(index, place.generation))
    }

    /// Reserves room for `completions` more completions: the device's queue never has more than it
    /// has room for (`FI_RM_ENABLED`).
    ///
    /// # Errors
    /// `ENOSPC`: the device's queue has no room. Nothing is reserved.
    fn reserve(&self, inner: &mut Inner, completions: usize) -> Result<()> {
        let wanted = inner.reserved + completions;
        if let Ok(cq) = self.device_cq()
            && wanted > cq.cqe()
        {
            grow(cq, wanted)?;
        }
        inner.reserved = wanted;
        Ok(())
    }

    /// Registers queue pair `number`, of the endpoint `member`, as a consumer of a shared receive
    /// context. The receives that the queue pair consumes complete in this queue.
    ///
    /// # Errors
    /// `ENOSPC`: the device's queue has no room for them.
    pub(crate) fn share(
        &self,
        member: CqMember,
        number: u32,
        slots: &Arc<SharedSlots>,
        selective: bool,
    ) -> Result<()> {
        let mut inner = self.inner.lock();
        let index = usize::from(slots.id().index);
        self.add_sharer(&mut inner, index, slots)?;
        // an endpoint's index has 16 bits
        let place = member.index() as u16;
        match inner
            .table
            .sharing
            .binary_search_by_key(&number, |entry| entry.0)
        {
            Ok(at) => inner.table.sharing[at].1 = place,
            Err(at) => inner.table.sharing.insert(at, (number, place)),
        }
        if let Some(place) = inner.table.endpoints.get_mut(member.index()) {
            place.selective = selective;
            place.sharing = NonZeroU32::new(number);
        }
        Ok(())
    }

    /// Registers a shared receive context of an XRC domain, all of whose receives complete in this
    /// queue. `xrc`: if the device reports the target of a message.
    ///
    /// # Errors
    /// `ENOSPC`: the device's queue has no room for them.
    pub(crate) fn add_context(
        &self,
        slots: &Arc<SharedSlots>,
        xrc: Option<XrcReceives>,
    ) -> Result<()> {
        let mut inner = self.inner.lock();
        let index = usize::from(slots.id().index);
        self.add_sharer(&mut inner, index, slots)?;
        if let Some(Some(sharer)) = inner.table.shared.get_mut(index) {
            sharer.xrc = xrc;
        }
        Ok(())
    }

    /// Messages to an [added context](Self::add_context) may come through this target from now on,
    /// or if `on` is false through one target less. Each call is for one endpoint.
    pub(crate) fn receive_through(&self, slots: &Arc<SharedSlots>, target: u32, on: bool) {
        let mut inner = self.inner.lock();
        if !on {
            // what has arrived is the application's
            let _ = self.drain_all(&mut inner);
        }
        let sharer = inner.table.shared.get_mut(usize::from(slots.id().index));
        let xrc = sharer.and_then(Option::as_mut).and_then(|s| s.xrc.as_mut());
        match (xrc, on) {
            (Some(xrc), true) => xrc.join(target),
            (Some(xrc), false) => xrc.leave(target),
            (None, _) => {}
        }
    }

    /// Reverts [`Self::add_context`]. Polls the completions of the context first.
    pub(crate) fn remove_context(&self, slots: &Arc<SharedSlots>) {
        let mut inner = self.inner.lock();
        let _ = self.drain_all(&mut inner);
        self.remove_sharer(&mut inner, usize::from(slots.id().index), slots);
    }

    /// Registers an endpoint on XRC as a user of an [added context](Self::add_context). The
    /// receives are selected and counted as those of the first user.
    pub(crate) fn share_xrc(&self, member: CqMember, slots: &Arc<SharedSlots>, selective: bool) {
        let mut inner = self.inner.lock();
        let index = usize::from(slots.id().index);
        if let Some(Some(sharer)) = inner.table.shared.get_mut(index) {
            // an endpoint's index has 16 bits
            sharer.on_xrc.push(member.index() as u16);
        }
        if let Some(place) = inner.table.endpoints.get_mut(member.index()) {
            place.selective = selective;
        }
    }

    /// Reverts [`Self::share_xrc`]; no effect without it.
    pub(crate) fn unshare_xrc(&self, member: CqMember, slots: &Arc<SharedSlots>) {
        let mut inner = self.inner.lock();
        let index = usize::from(slots.id().index);
        if let Some(Some(sharer)) = inner.table.shared.get_mut(index) {
            let place = member.index() as u16;
            sharer.on_xrc.retain(|known| *known != place);
        }
    }

    /// Counts a user of a context; reserves room for its receives with the first one.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    fn add_sharer(&self, inner: &mut Inner, index: usize, slots: &Arc<SharedSlots>) -> Result<()> {
        if let Some(Some(sharer)) = inner.table.shared.get_mut(index)
            && Arc::ptr_eq(&sharer.slots, slots)
        {
            sharer.users += 1;
            return Ok(());
        }
        self.reserve(inner, slots.depth())?;
        if inner.table.shared.len() <= index {
            inner.table.shared.resize_with(index + 1, || None);
        }
        inner.table.shared[index] = Some(Sharer {
            slots: Arc::clone(slots),
            users: 1,
            on_xrc: Vec::new(),
            xrc: None,
        });
        Ok(())
    }

    /// Reverts [`Self::add_sharer`].
    fn remove_sharer(&self, inner: &mut Inner, index: usize, slots: &Arc<SharedSlots>) {
        if let Some(Some(sharer)) = inner.table.shared.get_mut(index)
            && Arc::ptr_eq(&sharer.slots, slots)
        {
            sharer.users -= 1;
            if sharer.users == 0 {
                inner.table.shared[index] = None;
                inner.reserved -= slots.depth();
            }
        }
    }

    /// Reverts [`Self::share`]; no effect without it. The queue pair must be in its error state.
    /// Polls the queue pair's completions first: when it is destroyed, the device discards its
    /// completions together with the receives that they belong to.
    pub(crate) fn unshare(&self, member: CqMember, slots: &Arc<SharedSlots>) {
        let mut inner = self.inner.lock();
        let place = inner.table.endpoints.get_mut(member.index());
        let Some(number) = place.and_then(|place| place.sharing.take()) else {
            return;
        };
        let _ = self.drain_all(&mut inner);
        let entry = (number.get(), member.index() as u16);
        if let Ok(at) = inner.table.sharing.binary_search(&entry) {
            inner.table.sharing.remove(at);
        }
        self.remove_sharer(&mut inner, usize::from(slots.id().index), slots);
    }

    /// Completes, as cancelled, a receive that was never posted to a device.
    pub(crate) fn cancel(&self, member: CqMember, number: u32) {
        let mut inner = self.inner.lock();
        let place = inner.table.endpoints.get(member.index());
        let Some(slots) = place.and_then(|place| place.slots.as_ref()) else {
            return;
        };
        let Some(slot) = slots.rx.complete(number) else {
            return;
        };
        if let Some(counters) = slots.counters() {
            counters.count(slot.flags, false);
        }
        let error = failure(&slot, sys::IBV_WC_WR_FLUSH_ERR, 0);
        inner.backlog.push_back(Entry::Failed(error));
        if let Some(wait) = &self.wait {
            wait.wake();
        }
    }

    /// Removes an endpoint whose queue pair is destroyed: its outstanding requests complete as
    /// flushed.
    pub(crate) fn detach(&self, member: CqMember, completions: usize, directions: &[Direction]) {
        let mut inner = self.inner.lock();
        // polls all of the device's completions first, which precede the flushed ones
        let _ = self.drain_all(&mut inner);
        let Some(place) = inner.table.endpoints.get_mut(member.index()) else {
            return;
        };
        if place.generation != member.generation() {
            return;
        }
        let Some(slots) = place.slots.take() else {
            return;
        };
        place.generation = place.generation.wrapping_add(1) & WrId::GENERATIONS;
        // `attach` has assigned the index from 16 bits
        inner.table.free.push(member.index() as u16);
        inner.reserved -= completions;
        self.abandon_in(&mut inner, &slots, directions);
    }

    /// Reports the outstanding requests of an endpoint as flushed. The device completes none of
    /// them any more: it was removed.
    pub(crate) fn abandon(&self, member: CqMember, direction: Direction) {
        let mut inner = self.inner.lock();
        let _ = self.drain_all(&mut inner);
        let place = inner.table.endpoints.get(member.index());
        let place = place.filter(|place| place.generation == member.generation());
        if let Some(slots) = place.and_then(|place| place.slots.clone()) {
            self.abandon_in(&mut inner, &slots, &[direction]);
        }
    }

    fn abandon_in(&self, inner: &mut Inner, slots: &EndpointSlots, directions: &[Direction]) {
        for direction in directions {
            while let Some(slot) = direction.slots(slots).abandon() {
                if let Some(counters) = slots.counters()
                    && !slot.more
                {
                    counters.count(slot.flags, false);
                }
                let error = failure(&slot, sys::IBV_WC_WR_FLUSH_ERR, 0);
                let reported = match direction {
                    Direction::Transmit => slots.reports_failure(&slot, error.err),
                    Direction::Receive => slot.failures.include(error.err),
                };
                if reported {
                    inner.backlog.push_back(Entry::Failed(error));
                }
            }
        }
        if let Some(wait) = &self.wait
            && !inner.backlog.is_empty()
        {
            wait.wake();
        }
    }
}

/// Grows a device's queue to at least `wanted` entries; if possible to a power of two, because the
/// device copies all entries each time.
///
/// # Errors
/// `ENOSPC`: the device has no queues of this size, cannot resize them, or has no memory.
fn grow(cq: &Cq, wanted: usize) -> Result<()> {
    let most = cq.device().attr().max_cqe;
    let resized = match wanted <= most {
        true => cq
            .resize(wanted.next_power_of_two().min(most))
            .or_else(|_| cq.resize(wanted)),
        false => Err(FiErrno::ENOSPC),
    };
    match resized {
        Ok(()) if wanted <= cq.cqe() => Ok(()),
        result => {
            let error = result.err().unwrap_or(FiErrno::ENOSPC);
            warn_log!(
                Cq,
                "{}: a completion queue of {} entries cannot grow to {wanted}, which the next \
                 endpoint needs: {error}",
                cq.device().name(),
                cq.cqe()
            );
            Err(FiErrno::ENOSPC)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::queue::CqConfig;
    use crate::queue::srx_slots::SharedId;
    use crate::verbs::Device;
    use crate::verbs::replaced::without_resize;

    fn queue(device: &Arc<Device>, size: usize) -> Arc<CompletionQueue> {
        let domain = Domain::open(device, DomainConfig::default()).unwrap();
        let config = CqConfig {
            size,
            ..CqConfig::default()
        };
        CompletionQueue::open(domain.queues(), config).unwrap()
    }

    /// A device that cannot resize queues makes larger ones. Without room for the completions of an
    /// endpoint or a shared context, nothing changes.
    #[test]
    fn a_queue_without_room_refuses() {
        for (small, size, least) in [
            (false, 16, 1 << 16),
            (false, 100_000, 100_000),
            (true, 16, 8192),
        ] {
            let device = crate::verbs::devices(&[without_resize(small)], false).remove(0);
            let cq = queue(&device, size);
            let room = cq.device_cq().unwrap().cqe();
            assert!(room >= least, "{room}");
            let slots = Arc::new(EndpointSlots::new(1, 1));
            let id = cq.attach(&slots, room).unwrap();
            let shared = SharedId {
                index: 0,
                generation: 0,
            };
            let shared = Arc::new(SharedSlots::new(shared, 1));
            assert_eq!(cq.attach(&slots, 1).err(), Some(FiErrno::ENOSPC));
            assert_eq!(cq.share(id, 7, &shared, false), Err(FiErrno::ENOSPC));
            assert_eq!(cq.add_context(&shared, None), Err(FiErrno::ENOSPC));
            {
                let inner = cq.inner.lock();
                let table = &inner.table;
                assert_eq!((inner.reserved, table.endpoints.len()), (room, 1));
                assert!(table.shared.is_empty() && table.sharing.is_empty());
            }
            cq.detach(id, room, Direction::BOTH);
            assert!(cq.attach(&slots, 1).is_ok());
        }
    }

    /// More than a queue of the device can have is not cut down to that.
    #[test]
    fn the_limit_of_the_device_is_a_refusal() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let cq = queue(&device, 16);
        let slots = Arc::new(EndpointSlots::new(1, 1));
        let most = device.attr().max_cqe;
        assert_eq!(cq.attach(&slots, most + 1).err(), Some(FiErrno::ENOSPC));
        assert!(cq.attach(&slots, 100).is_ok());
        assert_eq!(cq.inner.lock().reserved, 100);
        assert!(cq.device_cq().unwrap().cqe() < most);
    }

    /// With 10,000 endpoints: free indices are reused with another generation, and the device's
    /// queue is resized a few times, not once per endpoint.
    #[test]
    fn a_free_place_is_found_without_a_search() {
        const ENDPOINTS: usize = 10_000;
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let cq = queue(&device, 0);
        let slots = Arc::new(EndpointSlots::new(1, 1));
        let mut sizes = vec![cq.device_cq().unwrap().cqe()];
        let mut ids: Vec<_> = (0..ENDPOINTS)
            .map(|_| {
                let id = cq.attach(&slots, 4).unwrap();
                sizes.push(cq.device_cq().unwrap().cqe());
                id
            })
            .collect();
        sizes.dedup();
        assert!(*sizes.last().unwrap() >= 4 * ENDPOINTS);
        assert!(sizes.len() <= 8, "{sizes:?}");
        let mut gone: Vec<_> = ids.drain(4_000..7_000).collect();
        for id in &gone {
            cq.detach(*id, 4, Direction::BOTH);
            // a second call has no effect
            cq.detach(*id, 4, Direction::BOTH);
        }
        assert_eq!(cq.inner.lock().table.free.len(), gone.len());
        let mut again: Vec<_> = gone.iter().map(|_| cq.attach(&slots, 4).unwrap()).collect();
        let inner = cq.inner.lock();
        assert_eq!(
            (inner.table.endpoints.len(), inner.table.free.len()),
            (ENDPOINTS, 0)
        );
        assert_eq!(inner.reserved, 4 * ENDPOINTS);
        gone.sort_unstable_by_key(|id| id.index());
        again.sort_unstable_by_key(|id| id.index());
        for (old, new) in gone.iter().zip(&again) {
            assert_eq!(old.index(), new.index());
            assert_ne!(old.generation(), new.generation());
        }
    }
}
