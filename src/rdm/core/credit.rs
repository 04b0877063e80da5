//! Credit of one direction: both sides of it, and the pool of an endpoint. `docs/protocol-rdm.md`,
//! "Credit".

use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::{Credit, Grant, GrantNumber};

/// The window that every peer has, outside the pool.
pub const SMALLEST: Credit = Credit::new(4, 2);
/// The window of a new peer while the pool has room.
pub const FIRST: Credit = Credit::new(64, 4);
/// The window of a peer that sends continually: as many short messages as a ring of 128 slots
/// holds, or 63 of 4 KiB. It gets a grant for each half of it.
const BUSY: Credit = Credit::new(4096, 128);

/// Positions are valid up to this distance.
const MAX_WINDOW: u32 = 1 << 30;
/// One window has at most this share of the pool, and at least [`FIRST`]: a peer that is never
/// idle, or that keeps what it is asked for, leaves the rest to the others.
const SHARE: u32 = 4;

/// The credit of all windows together, beyond the smallest ones, and a reserve of blocks for
/// announcements behind messages that hold a whole window.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    size: Credit,
    taken: Credit,
    reserve: u32,
}

impl Pool {
    /// Of this size, with a reserve of half as many blocks.
    pub const fn new(size: Credit) -> Self {
        let (taken, reserve) = (Credit::ZERO, size.blocks / 2);
        Self {
            size,
            taken,
            reserve,
        }
    }

    /// The credit that windows have taken, and the blocks of messages that outlive their sessions.
    pub const fn taken(&self) -> Credit {
        self.taken
    }

    /// Blocks that windows have from the reserve.
    #[cfg(test)]
    pub const fn lent(&self) -> u32 {
        self.size.blocks / 2 - self.reserve
    }

    /// As if others held the reserve.
    #[cfg(test)]
    pub const fn take_reserve(&mut self) {
        self.reserve = 0;
    }

    /// The largest window, without what is from the reserve.
    pub(super) fn largest(&self) -> Credit {
        let share = |size: u32, least: u32| (size / SHARE).clamp(least, MAX_WINDOW);
        Credit::new(
            share(self.size.blocks, FIRST.blocks),
            share(self.size.slots, FIRST.slots),
        )
    }

    /// Whether a window that has these blocks of the reserve may have further ones: as many as are
    /// left to the others.
    const fn lends(&self, extra: u32) -> bool {
        self.reserve >= SMALLEST.blocks && self.reserve > extra
    }

    /// The blocks of a window, without what is from the reserve, become these.
    fn exchange(&mut self, from: u32, to: u32) {
        let taken = self.taken.blocks.wrapping_add(to.wrapping_sub(from));
        self.taken.blocks = taken;
    }

    fn take(&mut self, amount: Credit) -> bool {
        let fits = self.taken.blocks.saturating_add(amount.blocks) <= self.size.blocks
            && self.taken.slots.saturating_add(amount.slots) <= self.size.slots;
        if fits {
            self.taken = self.taken.add(amount);
        }
        fits
    }

    fn give_back(&mut self, amount: Credit) {
        debug_assert!(self.taken.covers(amount));
        self.taken = self.taken.sub(amount);
    }

    /// Half of the blocks.
    pub(super) const fn half(&self) -> u32 {
        self.size.blocks.div_ceil(2)
    }

    /// Whether the blocks of windows may grow.
    const fn has_half_of_blocks(&self) -> bool {
        self.taken.blocks < self.half()
    }

    /// Whether the slots of windows may grow.
    const fn has_half_of_slots(&self) -> bool {
        self.taken.slots < self.size.slots.div_ceil(2)
    }

    /// Whether windows may grow.
    const fn is_half_free(&self) -> bool {
        self.has_half_of_blocks() && self.has_half_of_slots()
    }
}

/// What messages of a peer hold that have outlived its sessions, while it has none. The next one
/// begins with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) struct LeftCredit {
    /// As the window without what is from the reserve: at least the smallest one.
    base: u32,
    /// Blocks that are from the reserve.
    extra: u32,
    /// Blocks of the messages.
    held: u32,
}

impl LeftCredit {
    pub(super) const NONE: Self = Self {
        base: SMALLEST.blocks,
        extra: 0,
        held: 0,
    };

    /// Blocks of the messages, without those from the reserve, and these.
    pub(super) const fn held(&self) -> (u32, u32) {
        (self.held - self.extra, self.extra)
    }

    /// A message of a session that has ended is stored, and has so many blocks.
    pub(super) fn charge(&mut self, blocks: u32, pool: &mut Pool) {
        self.held += blocks;
        self.rebase(pool);
    }

    /// Messages do not use these blocks any more. They go to the reserve first.
    pub(super) fn give_back(&mut self, blocks: u32, pool: &mut Pool) {
        debug_assert!(blocks <= self.held);
        let blocks = blocks.min(self.held);
        let back = blocks.min(self.extra);
        pool.reserve += back;
        self.extra -= back;
        self.held -= blocks;
        self.rebase(pool);
    }

    fn rebase(&mut self, pool: &mut Pool) {
        let base = (self.held - self.extra).max(SMALLEST.blocks);
        pool.exchange(self.base, base);
        self.base = base;
    }

    /// What has been taken of the pool, and of the reserve.
    #[cfg(test)]
    pub(super) const fn taken(&self) -> (u32, u32) {
        (self.base - SMALLEST.blocks, self.extra)
    }
}

/// What a new session may take, beside the pool's limits.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Room {
    /// Blocks of the largest window, without what is from the reserve.
    pub(super) most: u32,
    /// Blocks of the reserve that count as those of the window.
    pub(super) lent: u32,
    /// It may have the first window, and the smallest one.
    pub(super) first: bool,
    pub(super) smallest: bool,
}

impl Room {
    /// That of a peer for itself.
    pub(super) fn of_peer(pool: &Pool) -> Self {
        Self {
            most: pool.largest().blocks,
            lent: 0,
            first: true,
            smallest: true,
        }
    }
}

/// The side that receives packets and grants credit.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Inbound {
    /// Position after the packets that have arrived.
    used: Credit,
    /// Position of the credit that was returned: matched messages, reposted slots.
    returned: Credit,
    /// The newest grant.
    grant: Grant,
    /// Credit in circulation.
    window: Credit,
    /// Blocks of the window that are from the reserve.
    extra: u32,
    /// See [`Room`].
    most: u32,
    lent: u32,
    /// Blocks of the window that are kept from the peer, as if messages held them: at most those of
    /// the smallest window.
    withheld: u8,
    /// The window becomes the smallest one as credit returns.
    shrinks: bool,
}

impl Inbound {
    /// A new session of a peer whose messages hold what is left of earlier ones: the first window
    /// beside that, the smallest one if the pool or the peer's room does not permit it, or none. A
    /// window that is full gets blocks of the reserve.
    pub(super) fn new(pool: &mut Pool, left: LeftCredit, room: Room) -> Self {
        let more = FIRST.sub(SMALLEST);
        let fits = left.base.saturating_add(more.blocks) <= room.most;
        let larger = room.first && fits && pool.take(more);
        let more = if larger { more } else { Credit::ZERO };
        let window = Credit::new(left.base + left.extra, SMALLEST.slots).add(more);
        let withheld = match larger || room.smallest {
            true => 0,
            false => (window.blocks - left.held) as u8,
        };
        let held = Credit::new(left.held + u32::from(withheld), 0);
        let mut new = Self {
            used: Credit::ZERO,
            returned: Credit::ZERO.sub(held),
            grant: Grant {
                number: GrantNumber::default(),
                limit: window.sub(held),
            },
            window,
            extra: left.extra,
            most: room.most,
            lent: room.lent,
            withheld,
            shrinks: false,
        };
        if new.is_full() {
            new.add_extra(pool);
            new.grant.limit = new.entitled();
        }
        new
    }

    /// The end of the session. What its messages hold, which are stored or whose entries were not
    /// taken, stays taken until [`LeftCredit::give_back`]: a peer that ends its session again and
    /// again gets no more than one that does not.
    pub(super) fn end(self, pool: &mut Pool) -> LeftCredit {
        let held = self.used.sub(self.returned).blocks - u32::from(self.withheld);
        let extra = held.min(self.extra);
        let base = (held - extra).max(SMALLEST.blocks);
        pool.exchange(self.base().blocks, base);
        pool.give_back(Credit::new(0, self.window.slots - SMALLEST.slots));
        pool.reserve += self.extra - extra;
        LeftCredit { base, extra, held }
    }

    /// The peer of a session that was limited by others has room of its own.
    pub(super) fn free(&mut self, pool: &Pool) {
        self.limit(Room::of_peer(pool));
        self.admit();
    }

    /// What the window may take beside what it has.
    pub(super) fn limit(&mut self, room: Room) {
        (self.most, self.lent) = (room.most, room.lent);
    }

    /// The peer gets what was kept from it.
    pub(super) fn admit(&mut self) {
        let withheld = std::mem::take(&mut self.withheld);
        self.returned = self.returned.add(Credit::new(withheld.into(), 0));
    }

    /// Whether the smallest window is kept from the peer.
    pub(super) const fn is_withheld(&self) -> bool {
        self.withheld != 0
    }

    /// A message of an earlier session is stored, and has so many blocks.
    pub(super) fn charge(&mut self, blocks: u32, pool: &mut Pool) {
        pool.exchange(0, blocks);
        self.window.blocks += blocks;
        self.returned = self.returned.sub(Credit::new(blocks, 0));
    }

    /// The window without what is from the reserve.
    #[inline]
    const fn base(&self) -> Credit {
        Credit::new(self.window.blocks - self.extra, self.window.slots)
    }

    pub(super) const fn used(&self) -> Credit {
        self.used
    }

    pub(super) const fn grant(&self) -> Grant {
        self.grant
    }

    #[cfg(test)]
    pub(in crate::rdm) const fn window(&self) -> Credit {
        self.window
    }

    /// Blocks of the window that are from the reserve.
    #[cfg(test)]
    pub(super) const fn extra(&self) -> u32 {
        self.extra
    }

    /// Credit that was used and not returned.
    #[cfg(test)]
    pub(super) fn stored(&self) -> Credit {
        let withheld = Credit::new(self.withheld.into(), 0);
        self.used.sub(self.returned).sub(withheld)
    }

    /// A packet has arrived. `false`: it exceeds the grant.
    #[inline]
    #[must_use]
    pub(super) fn arrive(&mut self, uses: Credit) -> bool {
        let granted = self.has(uses);
        if granted {
            self.spend(uses);
        }
        granted
    }

    /// Whether the grant suffices for a packet.
    #[inline(always)]
    pub(in crate::rdm) fn has(&self, uses: Credit) -> bool {
        self.used.add(uses).until(self.grant.limit).is_some()
    }

    /// A packet has arrived for which [`Self::has`] was true.
    #[inline(always)]
    pub(super) fn spend(&mut self, uses: Credit) {
        debug_assert!(self.has(uses));
        self.used = self.used.add(uses);
    }

    /// Blocks were matched, or slots reposted.
    #[inline]
    pub(super) fn give_back(&mut self, amount: Credit, pool: &mut Pool) {
        self.returned = self.returned.add(amount);
        if self.extra != 0 {
            self.give_back_extra(amount.blocks, pool);
        }
        if self.shrinks {
            self.shrink(pool);
        }
    }

    /// Blocks that return go to the reserve first.
    #[cold]
    fn give_back_extra(&mut self, returned: u32, pool: &mut Pool) {
        let back = returned.min(self.extra);
        self.extra -= back;
        self.window.blocks -= back;
        pool.reserve += back;
    }

    /// Makes the window as small as the grant permits.
    fn shrink(&mut self, pool: &mut Pool) {
        // positions that the peer may use stay in the window, and what is from the reserve
        let bound = self.grant.limit.sub(self.returned);
        let base = self.base();
        let window = Credit::new(
            bound.blocks.clamp(SMALLEST.blocks, base.blocks),
            bound.slots.clamp(SMALLEST.slots, base.slots),
        );
        pool.give_back(base.sub(window));
        self.window = Credit::new(window.blocks + self.extra, window.slots);
        self.shrinks = window != SMALLEST;
    }

    /// What doubles the window, unless it is the largest one then.
    fn growth(&self, pool: &Pool) -> Credit {
        if self.is_withheld() {
            return Credit::ZERO;
        }
        let (base, largest) = (self.base(), pool.largest());
        let more = |base: u32, largest: u32| base.min(largest.saturating_sub(base));
        Credit::new(
            more(base.blocks, self.most),
            more(base.slots, largest.slots),
        )
    }

    /// Doubles the window, up to the largest one, if the pool permits it. `false`: it lacks credit.
    pub(in crate::rdm) fn grow(&mut self, pool: &mut Pool) -> bool {
        let more = self.growth(pool);
        if more == Credit::ZERO {
            return true;
        }
        let grows = pool.is_half_free() && pool.take(more);
        if grows {
            self.window = self.window.add(more);
            self.shrinks = false;
        }
        grows
    }

    /// Whether stored messages leave no room for an announcement (RTS). Then the peer cannot
    /// announce a further message, for which a receive may be posted.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        let room = self.entitled().blocks.wrapping_sub(self.used.blocks);
        room < RTS_CREDIT.blocks
    }

    /// Adds blocks of the reserve to a window that is full, for two announcements. They go back
    /// when messages are matched. A reserve that is exhausted bounds the messages that are stored.
    /// A window has at most as much of the reserve as is left, half of it if it is the only one.
    pub(super) fn add_extra(&mut self, pool: &mut Pool) {
        if pool.lends(self.extra.saturating_add(self.lent)) {
            pool.reserve -= SMALLEST.blocks;
            self.extra += SMALLEST.blocks;
            self.window.blocks += SMALLEST.blocks;
        }
    }

    /// Whether messages that no receive has matched hold three quarters of the blocks.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        let stored = self.used.sub(self.returned).blocks;
        stored > self.window.blocks - self.window.blocks / 4
    }

    /// Whether [`Core::flush`](super::Core::flush) has something to do: the window may grow,
    /// or a grant is due.
    #[inline]
    pub(super) fn reports(&self) -> bool {
        self.is_short() || self.is_due() || self.is_full()
    }

    /// Doubles the blocks of the window, up to the largest one, if the pool permits it.
    pub(super) fn grow_blocks(&mut self, pool: &mut Pool) {
        let more = Credit::new(self.growth(pool).blocks, 0);
        if more != Credit::ZERO && pool.has_half_of_blocks() && pool.take(more) {
            self.window = self.window.add(more);
            self.shrinks = false;
        }
    }

    /// Before a grant: doubles the slots, or the blocks, of a window of which the peer has used
    /// more than half since the last one, up to [`BUSY`], if the pool permits it. So a peer that
    /// sends many messages gets fewer grants. The blocks of a window that is kept from the peer do
    /// not grow: it has no room for them.
    #[inline]
    pub(super) fn grow_busy(&mut self, pool: &mut Pool) {
        let (window, unused) = (self.base(), self.grant.limit.sub(self.used));
        let slots = window.slots < BUSY.slots && unused.slots < window.slots.div_ceil(2);
        let more = window.blocks.min(self.most.saturating_sub(window.blocks));
        let blocks = window.blocks < BUSY.blocks && unused.blocks < window.blocks.div_ceil(2);
        if slots && pool.has_half_of_slots() && pool.take(Credit::new(0, window.slots)) {
            self.window.slots += window.slots;
            self.shrinks = false;
        }
        let blocks = blocks && more != 0 && !self.is_withheld() && pool.has_half_of_blocks();
        if blocks && pool.take(Credit::new(more, 0)) {
            self.window.blocks += more;
            self.shrinks = false;
        }
    }

    /// The positions that the next grant has.
    fn entitled(&self) -> Credit {
        let limit = self.returned.add(self.window);
        // a grant takes nothing back
        let later = |new: u32, old: u32| {
            if (new.wrapping_sub(old) as i32) > 0 {
                new
            } else {
                old
            }
        };
        Credit::new(
            later(limit.blocks, self.grant.limit.blocks),
            later(limit.slots, self.grant.limit.slots),
        )
    }

    /// Whether less than half of the blocks, and of the slots, of the window is unused.
    #[inline(always)]
    fn halves(&self) -> (bool, bool) {
        let unused = self.grant.limit.sub(self.used);
        // less than half, rounded up; a window has at most 2^30
        let blocks = unused.blocks * 2 < self.window.blocks;
        let slots = unused.slots * 2 < self.window.slots;
        (blocks, slots)
    }

    /// Whether a grant is due as soon as there is more to grant.
    #[inline(always)]
    pub(super) fn is_half_used(&self) -> bool {
        let (blocks, slots) = self.halves();
        blocks | slots
    }

    /// Whether a grant is due: less than half of the window is unused, and there is more to grant.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        let (blocks, slots) = self.halves();
        (blocks | slots) && self.has_more(blocks, slots)
    }

    /// Whether there is more to grant of blocks or slots.
    fn has_more(&self, blocks: bool, slots: bool) -> bool {
        let new = self.entitled().sub(self.grant.limit);
        blocks && new.blocks > 0 || slots && new.slots > 0
    }

    /// Makes the next grant.
    pub(super) fn renew(&mut self) -> Grant {
        self.grant = Grant {
            number: self.grant.number.next(),
            limit: self.entitled(),
        };
        self.grant
    }

    /// Whether the pool had no room when the session began, or the credit was recalled.
    pub(super) fn is_smallest(&self) -> bool {
        self.base() == SMALLEST
    }

    /// Whether a recall could return credit to the pool.
    pub(super) fn is_recallable(&self) -> bool {
        let unused = self.grant.limit.sub(self.used);
        unused.blocks > SMALLEST.blocks || unused.slots > SMALLEST.slots
    }

    /// RETURN has arrived. An outdated one has no effect. `false`: positions that are impossible.
    #[must_use]
    pub(super) fn take_back(&mut self, kept: Grant, pool: &mut Pool) -> bool {
        if kept.number != self.grant.number {
            return true;
        }
        let fits =
            self.used.until(kept.limit).is_some() && kept.limit.until(self.grant.limit).is_some();
        if fits && kept.limit != self.grant.limit {
            self.grant.limit = kept.limit;
            self.shrinks = true;
            self.shrink(pool);
        }
        fits
    }
}

/// The side that sends packets and uses credit.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::rdm) struct Outbound {
    used: Credit,
    grant: Grant,
}

impl Outbound {
    pub(super) const fn grant(&self) -> Grant {
        self.grant
    }

    #[cfg(test)]
    pub(super) const fn used(&self) -> Credit {
        self.used
    }

    /// A grant has arrived. Returns whether it is newer than the present one.
    pub(super) fn receive(&mut self, grant: Grant, first: bool) -> bool {
        let newer = first || self.grant.number.is_before(grant.number);
        if newer {
            self.grant = grant;
        }
        newer
    }

    /// Uses credit. `false`: the grant does not suffice, and nothing was used.
    #[inline]
    #[must_use]
    pub(super) fn spend(&mut self, uses: Credit) -> bool {
        let used = self.used.add(uses);
        let granted = used.until(self.grant.limit).is_some();
        if granted {
            self.used = used;
        }
        granted
    }

    /// Whether the grant suffices.
    #[inline]
    pub(in crate::rdm) fn has(&self, uses: Credit) -> bool {
        self.used.add(uses).until(self.grant.limit).is_some()
    }

    /// Uses credit of which [`Self::has`] has just found enough.
    #[inline]
    pub(super) fn spend_granted(&mut self, uses: Credit) {
        debug_assert!(self.has(uses));
        self.used = self.used.add(uses);
    }

    /// A packet was not posted after all.
    #[inline]
    pub(super) fn unspend(&mut self, uses: Credit) {
        self.used = self.used.sub(uses);
    }

    /// The position of the terms on which a link resumes.
    pub(super) fn resume(&mut self, used: Credit) {
        self.used = used;
    }

    /// Answers the newest grant; with `recall`, keeps the smallest window of unused credit.
    pub(super) fn keep(&mut self, recall: bool) -> Grant {
        if recall {
            let least = self.used.add(SMALLEST);
            let earlier = |a: u32, b: u32| if (b.wrapping_sub(a) as i32) > 0 { a } else { b };
            let limit = self.grant.limit;
            self.grant.limit = Credit::new(
                earlier(least.blocks, limit.blocks),
                earlier(least.slots, limit.slots),
            );
        }
        self.grant
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first session of a peer.
    fn begin(pool: &mut Pool) -> Inbound {
        let room = Room::of_peer(pool);
        Inbound::new(pool, LeftCredit::NONE, room)
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// A sender and a receiver without a link between them: no packet exceeds the grant, the
        /// pool balances, and an idle receiver always leaves the sender room for an RTS.
        #[test]
        fn both_sides_agree(steps in prop::collection::vec(any::<(u8, u8)>(), 0..400), start: u32) {
            let mut pool = Pool::new(Credit::new(600, 50));
            let mut inbound = begin(&mut pool);
            let mut outbound = Outbound::default();
            // near the wrap, in some cases
            let start = Credit::new(start | 0xffff_ff00, start | 0xffff_ffe0);
            inbound.used = start;
            inbound.returned = start;
            inbound.grant.limit = start.add(inbound.window);
            outbound.used = start;
            outbound.receive(inbound.grant, true);
            let (mut blocks, mut slots) = (0, 0);
            for (step, amount) in steps {
                match step % 6 {
                    0 | 1 => {
                        let uses = Credit::new(u32::from(amount % 40) + 1, 1);
                        if outbound.spend(uses) {
                            prop_assert!(inbound.arrive(uses));
                            (blocks, slots) = (blocks + uses.blocks, slots + 1);
                        }
                    }
                    2 => {
                        let back = Credit::new(blocks.min(amount.into()), slots);
                        inbound.give_back(back, &mut pool);
                        (blocks, slots) = (blocks - back.blocks, 0);
                    }
                    3 if amount % 2 == 0 => inbound.grow_busy(&mut pool),
                    3 => { inbound.grow(&mut pool); }
                    4 if inbound.is_recallable() => {
                        let grant = inbound.renew();
                        prop_assert!(outbound.receive(grant, false));
                        let kept = outbound.keep(true);
                        prop_assert!(inbound.take_back(kept, &mut pool));
                        let outdated = Grant { number: GrantNumber::new(77), ..kept };
                        prop_assert!(inbound.take_back(outdated, &mut pool));
                    }
                    _ => {}
                }
                if inbound.is_full() {
                    inbound.add_extra(&mut pool);
                }
                if inbound.is_due() {
                    prop_assert!(outbound.receive(inbound.renew(), false));
                }
                let announces = outbound.has(Credit::new(RTS_CREDIT.blocks, 0));
                prop_assert!(announces || !pool.lends(inbound.extra));
                prop_assert_eq!(inbound.used, outbound.used);
                prop_assert_eq!(inbound.grant, outbound.grant);
                prop_assert_eq!(pool.taken, inbound.base().sub(SMALLEST));
                prop_assert_eq!(pool.reserve + inbound.extra, 300);
                prop_assert_eq!(inbound.stored(), Credit::new(blocks, slots));
                let promised = inbound.grant.limit.sub(inbound.returned);
                prop_assert!(inbound.window.covers(promised) || inbound.shrinks);
            }
            inbound.give_back(Credit::new(blocks, slots), &mut pool);
            if inbound.is_due() {
                outbound.receive(inbound.renew(), false);
            }
            prop_assert!(outbound.spend(Credit::new(2, 1)));
            // what a window that was not quite full has besides
            prop_assert!(inbound.extra < SMALLEST.blocks, "{}", inbound.extra);
            prop_assert_eq!(inbound.end(&mut pool), LeftCredit::NONE);
            prop_assert_eq!((pool.taken, pool.reserve), (Credit::ZERO, 300));
        }
    }

    /// A session beyond the share of its host gets slots, for RMA and atomics, but no blocks.
    #[test]
    fn a_window_that_is_withheld_gets_no_blocks() {
        let mut pool = Pool::new(Credit::new(1 << 18, 8192));
        pool.take_reserve();
        let room = Room {
            first: false,
            smallest: false,
            ..Room::of_peer(&pool)
        };
        let mut inbound = Inbound::new(&mut pool, LeftCredit::NONE, room);
        assert!(inbound.is_withheld());
        for _ in 0..4 {
            let slots = inbound.grant.limit.sub(inbound.used).slots;
            assert!(inbound.arrive(Credit::new(0, slots)));
            inbound.give_back(Credit::new(0, slots), &mut pool);
            inbound.grow_busy(&mut pool);
            inbound.renew();
        }
        assert!(inbound.window.slots > SMALLEST.slots);
        assert_eq!(inbound.window.blocks, SMALLEST.blocks);
        assert_eq!(pool.taken.blocks, 0);
        // the peer gets what was kept from it, and then more
        inbound.admit();
        inbound.renew();
        assert!(inbound.arrive(Credit::new(SMALLEST.blocks, 0)));
        inbound.grow_busy(&mut pool);
        assert_eq!(inbound.window.blocks, 2 * SMALLEST.blocks);
    }

    /// Fills a window with messages that are not matched, all its slots and blocks.
    fn fill(inbound: &mut Inbound, pool: &mut Pool) {
        for _ in 0..1 << 17 {
            inbound.grow(pool);
            inbound.grow_blocks(pool);
            inbound.grow_busy(pool);
            if inbound.is_full() {
                inbound.add_extra(pool);
            }
            inbound.renew();
            if !inbound.arrive(Credit::new(RTS_CREDIT.blocks, 1)) {
                break;
            }
            inbound.give_back(Credit::new(0, 1), pool);
        }
    }

    /// A peer that takes what it can leaves three quarters of the pool, and half of the reserve.
    #[test]
    fn one_peer_does_not_take_the_pool() {
        let size = Credit::new(1 << 18, 8192);
        let mut pool = Pool::new(size);
        let mut first = begin(&mut pool);
        fill(&mut first, &mut pool);
        let most = Credit::new(size.blocks / SHARE, size.slots / SHARE);
        assert_eq!(first.base().blocks, most.blocks);
        assert!(most.covers(first.base()), "{first:?}");
        let reserve = size.blocks / 2;
        assert!(pool.reserve.abs_diff(reserve / 2) <= SMALLEST.blocks);
        // the next one gets as much of the pool
        let mut second = begin(&mut pool);
        assert_eq!(second.window, FIRST);
        fill(&mut second, &mut pool);
        assert_eq!(second.base().blocks, most.blocks);
        // and each further one can announce messages
        let mut third = begin(&mut pool);
        fill(&mut third, &mut pool);
        assert!(third.extra > reserve / 16);
        // one that returns no credit keeps no other one from the first window
        assert!((0..100).all(|_| begin(&mut pool).window == FIRST));
    }
}
