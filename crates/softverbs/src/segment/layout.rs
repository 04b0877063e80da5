//! The layout of a process's segment. Offsets and sizes are in bytes; `docs/softverbs.md` has the
//! same as a table, with the writers of each field.
//!
//! A segment consists of two files that are mapped one behind the other: the first is also written
//! by peers; the second, from [`OWNED`] on, holds the tables, which only their owner can write.
//! Header, senders, completion queues, queue pairs and shared receive queues have one half of each
//! entry in each file, at the same distance. Both files have the size of the whole layout from the
//! start and are sealed at that size; a part gets its pages before its first use is published.

/// Magic: the first word of every process's tables.
pub(crate) const MAGIC: u64 = 0x0004_6265_7674_666f;
/// Magic: the first word of every ring.
pub(crate) const RING_MAGIC: u64 = 0x0001_676e_6972_766f;

/// Limit of processes of one user on one host; also the number of values of the bits of a queue
/// pair number that name its owner.
pub(crate) const MAX_PROCESSES: usize = 1 << PROCESS_BITS;
pub(crate) const PROCESS_BITS: u32 = 10;
/// Limit of processes' slots; queue pair numbers with a higher slot belong to XRC targets.
pub(crate) const MAX_PLACES: usize = 896;
/// Limit of queue pairs of one process, from the other bits of the 24-bit number.
pub(crate) const MAX_QPS: usize = 1 << QP_BITS;
pub(crate) const QP_BITS: u32 = 14;
/// Limit of completion queues of one process.
pub(crate) const MAX_CQS: usize = 1 << 14;
/// Limit of memory regions of one process.
pub(crate) const MAX_REGIONS: usize = 1 << 20;
/// Limit of shared receive queues of one process.
pub(crate) const MAX_SRQS: usize = 1 << 14;

/// Limit of device memory buffers of one process; a power of two.
pub(crate) const MAX_BUFFERS: usize = 1 << 12;
/// Limit of importable protection domains of one process.
pub(crate) const MAX_PDS: usize = 1 << 14;

/// Offset of the owner's tables, and distance between the two halves of an entry.
pub(crate) const OWNED: usize = rings::END.next_multiple_of(1 << 16);

/// Header: one page of either file.
pub(crate) mod header {
    use super::OWNED;
    pub(crate) const MAGIC: usize = OWNED;
    pub(crate) const SIZE: usize = OWNED + 8;
    pub(crate) const COOKIE: usize = OWNED + 16;
    /// u32: the owner runs barriers before it sleeps (`sync::heavy_fence`).
    pub(crate) const BARRIERS: usize = OWNED + 24;
    /// u32: emulated node.
    pub(crate) const NODE: usize = OWNED + 28;
    /// u32, u64: descriptor and inode of the file that peers write.
    pub(crate) const SHARED: usize = OWNED + 32;
    pub(crate) const SHARED_INODE: usize = OWNED + 40;
    /// u32, by peers and the owner: count of calls for attention. After each of them the owner
    /// looks at everything that others change for it without a message: the states of its queue
    /// pairs and of the XRC targets that it holds, the limits of its shared receive queues, the
    /// word `AGENT`, and whether a process was opened for which a queue pair has waited.
    pub(crate) const ATTENTION: usize = 0x100;
    /// u32, by peers: count of rings that peers requested.
    pub(crate) const RING_REQUESTS: usize = 0x140;
    /// u32, by both: the owner may sleep. The peer that changes the word to 0 rings the process's
    /// doorbell.
    pub(crate) const SLEEPS: usize = 0x180;
    /// u32, u64: the doorbell's descriptor and inode.
    pub(crate) const DOORBELL: usize = OWNED + 0x184;
    pub(crate) const DOORBELL_INODE: usize = OWNED + 0x188;
    /// u32, u64: descriptor and inode of a pipe that hangs up when the owner's program ends.
    pub(crate) const LIFE: usize = OWNED + 0x190;
    pub(crate) const LIFE_INODE: usize = OWNED + 0x198;
    /// u32: the kernel allows the owner to copy between processes.
    pub(crate) const MAY_COPY: usize = OWNED + 0x1a0;
    /// u32, by peers: a peer needs the owner's agent. The peer then increments `ATTENTION`.
    pub(crate) const AGENT: usize = 0x144;
    /// u64: address of a copy of the cookie in the owner's memory, which peers read as a test.
    pub(crate) const PROBE: usize = OWNED + 0x1a8;
    /// u32: number of buffer entries that have ever been in use.
    pub(crate) const BUFFERS: usize = OWNED + 0x1c0;
    /// u64 each, by peers: one bit for each process that may have hazards here.
    pub(crate) const VISITORS: usize = 0x200;
    pub(crate) const END: usize = 0x1000;
}

/// One entry for each sending process: the ring from it, and its hazards on the owner's regions.
pub(crate) mod announce {
    use super::{MAX_PROCESSES, OWNED};
    pub(crate) const AT: usize = super::header::END;
    pub(crate) const STRIDE: usize = 128;
    /// u64, by the sender: its cookie, if it requests a ring.
    pub(crate) const RING_WANTED_BY: usize = 0;
    /// u64: cookie of the sender that the ring in [`super::rings`] is for; stored last.
    pub(crate) const GRANTED: usize = OWNED + 8;
    /// u64, by the sender: its cookie, stored before its first hazard.
    pub(crate) const VISITOR: usize = 16;
    /// u64 each, by the sender: what one of its threads uses, or 0; see [`crate::hazard::Use`].
    pub(crate) const HAZARDS: usize = 64;
    // fewer for models: each word multiplies the number of orders
    pub(crate) const HAZARD_COUNT: usize = if cfg!(all(test, loom)) { 5 } else { 8 };
    pub(crate) const END: usize = AT + STRIDE * MAX_PROCESSES;
}

/// One entry for each completion queue.
pub(crate) mod cq {
    use super::OWNED;
    pub(crate) const AT: usize = super::announce::END;
    pub(crate) const STRIDE: usize = 64;
    /// u32, by both: the messages that the owner waits for. The peer that changes the word to 0
    /// rings the channel's doorbell.
    pub(crate) const ARMED: usize = 0;
    /// u32, u64: the channel's doorbell.
    pub(crate) const DOORBELL: usize = OWNED + 4;
    pub(crate) const DOORBELL_INODE: usize = OWNED + 8;
    /// u64: offset of the arrivals of the receive rings of this queue, 0 if there are none.
    pub(crate) const ARRIVALS_AT: usize = OWNED + 16;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_CQS;
}

/// Values of [`cq::ARMED`].
pub(crate) const ARMED_NOT: u32 = 0;
pub(crate) const ARMED_SOLICITED: u32 = 1;
pub(crate) const ARMED_ANY: u32 = 2;

/// One entry for each queue pair.
pub(crate) mod qp {
    use super::OWNED;
    pub(crate) const AT: usize = super::cq::END;
    pub(crate) const STRIDE: usize = 128;
    /// u64, by the owner: see [`super::StateWord`]; peers may move the state to ERR.
    pub(crate) const STATE: usize = 0;
    /// u32: completion queues.
    pub(crate) const RECV_CQ: usize = OWNED + 8;
    pub(crate) const SEND_CQ: usize = OWNED + 12;
    /// u64, u32, u32: receive descriptors: offset in the segment, count (a power of two), bytes
    /// each.
    pub(crate) const DESC_AT: usize = OWNED + 16;
    pub(crate) const DESC_COUNT: usize = OWNED + 24;
    pub(crate) const DESC_STRIDE: usize = OWNED + 28;
    /// u32: protection domain.
    pub(crate) const PD: usize = OWNED + 32;
    /// u32: `min_rnr_timer`, 0–31.
    pub(crate) const RNR_TIMER: usize = OWNED + 36;
    /// u32, by both: number of the queue pair that waits for a receive or another state, or 0.
    pub(crate) const WAITING: usize = 40;
    /// u32: index of the shared receive queue + 1, or 0.
    pub(crate) const SRQ: usize = OWNED + 44;
    /// u32: `ibv_qp_type`.
    pub(crate) const TYPE: usize = OWNED + 48;
    /// u32, u64: the larger receive ring to which the sender may move: number of slots, and offset
    /// in the segment, stored last; 0 if there is none.
    pub(crate) const LARGER_SLOTS: usize = OWNED + 52;
    pub(crate) const LARGER_AT: usize = OWNED + 56;
    /// u64: see [`super::Credit`].
    pub(crate) const CREDIT: usize = OWNED + 64;
    /// u64, by both: see [`super::PendingWord`].
    pub(crate) const PENDING: usize = 72;
    /// u64, u32, u32: entries of pending messages: offset in the segment, count (a power of two),
    /// bytes each. The offset is 0 until the first message is pending.
    pub(crate) const PENDING_AT: usize = OWNED + 80;
    pub(crate) const PENDING_COUNT: usize = OWNED + 88;
    pub(crate) const PENDING_STRIDE: usize = OWNED + 92;
    /// u64, stored when the queue pair stops accepting messages: number of accepted messages (32
    /// bits), incarnation (24 bits).
    pub(crate) const TAKEN: usize = OWNED + 96;
    /// u64, u32: receive ring: offset in the segment, 0 if there is none; number of slots.
    pub(crate) const RING_AT: usize = OWNED + 104;
    pub(crate) const RING_SLOTS: usize = OWNED + 112;
    /// u64: the queue pair into whose receive ring this one writes at the moment (see
    /// [`crate::receive_ring::UseWord`]), or 0.
    pub(crate) const RING_USE: usize = OWNED + 120;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_QPS;
}

/// One entry for each shared receive queue.
pub(crate) mod srq {
    use super::OWNED;
    pub(crate) const AT: usize = super::qp::END;
    pub(crate) const STRIDE: usize = 256;
    /// u64, u64, u32, u32: offsets of the order of receives and of their descriptors in the
    /// segment, number of words of the order (a power of two), bytes of a descriptor. The first is
    /// 0 if the SRQ is unused.
    pub(crate) const ORDER_AT: usize = OWNED;
    pub(crate) const DESC_AT: usize = OWNED + 8;
    pub(crate) const COUNT: usize = OWNED + 16;
    pub(crate) const DESC_STRIDE: usize = OWNED + 20;
    /// u32, u32, u32, u32, only for an XRC SRQ: a stamp that differs from that of the entry's
    /// previous XRC SRQ, 0 if there is none, stored last and cleared first; number of the XRC
    /// domain; protection domain; index of the completion queue.
    pub(crate) const STAMP: usize = OWNED + 24;
    pub(crate) const XRCD: usize = OWNED + 28;
    pub(crate) const PD: usize = OWNED + 32;
    pub(crate) const CQ: usize = OWNED + 36;
    /// u32: number of descriptors (a power of two).
    pub(crate) const DESC_COUNT: usize = OWNED + 40;
    /// u32, by both: odd while a sender waits for a receive. Not in the hint's cache line, because
    /// the owner reads this word for each receive that it posts.
    pub(crate) const WAITING: usize = 40;
    /// u32, by claimants: position at which the first unclaimed receive may be.
    pub(crate) const HINT: usize = 64;
    /// u32, by both: the limit whose passing the claimant reports to the owner; 0 if there is none,
    /// or a claimant has reported it. In the hint's cache line, which each claimant has anyway.
    pub(crate) const LIMIT: usize = 68;
    /// u64 each, by both: one bit for the slot of each process of which a sender waits for a
    /// receive. The sender sets it before it makes `WAITING` odd; the owner takes all of them when
    /// it has found that word odd.
    pub(crate) const WAITERS: usize = 128;
    #[cfg(not(all(test, loom)))]
    pub(crate) const WAITER_WORDS: usize = super::MAX_PLACES / 64;
    /// A model tries every order of the accesses, so it has one word.
    #[cfg(all(test, loom))]
    pub(crate) const WAITER_WORDS: usize = 1;
    const _: () = assert!(WAITERS + 8 * WAITER_WORDS <= STRIDE);
    pub(crate) const END: usize = AT + STRIDE * super::MAX_SRQS;
}

/// Locks for atomic operations, by address.
pub(crate) mod stripe {
    pub(crate) const AT: usize = super::srq::END;
    pub(crate) const STRIDE: usize = 64;
    pub(crate) const COUNT: usize = 256;
    pub(crate) const END: usize = AT + STRIDE * COUNT;
}

/// Words of shared receive queues' orders, which claimants change; see [`crate::srq`].
pub(crate) mod order {
    pub(crate) const AT: usize = super::stripe::END.next_multiple_of(4096);
    pub(crate) const LEN: usize = 64 << 20;
    pub(crate) const END: usize = AT + LEN;
}

/// Receive rings of queue pairs, and the arrivals of completion queues; see
/// [`crate::receive_ring`].
pub(crate) mod receive_rings {
    pub(crate) const AT: usize = super::order::END.next_multiple_of(4096);
    pub(crate) const LEN: usize = 64 << 20;
    pub(crate) const END: usize = AT + LEN;
}

/// One ring for each sending process, at its slot; see [`crate::ring`].
pub(crate) mod rings {
    pub(crate) const AT: usize = super::receive_rings::END.next_multiple_of(4096);
    /// A multiple of a page, so that each ring gets and loses its pages alone.
    pub(crate) const STRIDE: usize = 33 << 12;
    /// Offset of the first slot in a ring, behind a page with the positions.
    pub(crate) const SLOTS_AT: usize = 1 << 12;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_PROCESSES;

    /// Offset of the ring from the process in `slot`.
    pub(crate) fn ring_at(slot: u32) -> usize {
        AT + STRIDE * (slot as usize % super::MAX_PROCESSES)
    }
}

/// One entry for each memory region or window.
pub(crate) mod region {
    pub(crate) const AT: usize = super::OWNED + super::srq::END;
    pub(crate) const STRIDE: usize = 64;
    /// u32: the key that is valid now, or 0; stored last, cleared first.
    pub(crate) const KEY: usize = 0;
    /// u32: access flags.
    pub(crate) const ACCESS: usize = 4;
    /// u32: protection domain.
    pub(crate) const PD: usize = 8;
    /// u32: number of the only queue pair that may use the key, or 0.
    pub(crate) const QP: usize = 12;
    /// u64 each: first address in requests (iova), length, and the owner's address of the first
    /// byte.
    pub(crate) const IOVA: usize = 16;
    pub(crate) const LEN: usize = 24;
    pub(crate) const ADDR: usize = 32;
    /// u64, u64: stamp of the device buffer that contains the region, or 0, and the offset in that
    /// buffer.
    pub(crate) const BUFFER: usize = 40;
    pub(crate) const OFFSET: usize = 48;
    /// u32: descriptor + 1 of the file to which a persistent flush writes back the memory, or 0.
    pub(crate) const FILE: usize = 56;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_REGIONS;
}

/// One entry for each device memory buffer.
pub(crate) mod buffer {
    pub(crate) const AT: usize = super::region::END;
    pub(crate) const STRIDE: usize = 64;
    /// u64: a stamp that is unique in this process, with the entry's index in its lowest bits; 0 if
    /// unused; stored last.
    pub(crate) const STAMP: usize = 0;
    /// u64, u64: address of the buffer in the owner's memory, and its length.
    pub(crate) const ADDR: usize = 8;
    pub(crate) const LEN: usize = 16;
    /// u64, u32: inode and descriptor of the buffer's file.
    pub(crate) const INODE: usize = 24;
    pub(crate) const FD: usize = 32;
    /// u32: the context by which the buffer can be imported.
    pub(crate) const CONTEXT: usize = 36;
    /// u32: not 0 if the owner may write the buffer. Otherwise accesses that write, and imports,
    /// do not use it.
    pub(crate) const WRITABLE: usize = 40;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_BUFFERS;
}

/// One word for each protection domain, at its number modulo the count of words: u32 number, u32
/// context.
pub(crate) mod domain {
    pub(crate) const AT: usize = super::buffer::END;
    pub(crate) const STRIDE: usize = 8;
    pub(crate) const END: usize = AT + STRIDE * super::MAX_PDS;
}

/// One entry for each XRC domain, at its number: while this process is a member of the domain,
/// other processes open the domain's file by it.
pub(crate) mod member {
    pub(crate) const AT: usize = super::domain::END;
    pub(crate) const STRIDE: usize = 32;
    /// u64, u64, u32: the domain's cookie, 0 for none, stored last; its file's inode and
    /// descriptor.
    pub(crate) const COOKIE: usize = 0;
    pub(crate) const INODE: usize = 8;
    pub(crate) const FD: usize = 16;
    pub(crate) const END: usize = AT + STRIDE * super::xrc::MAX_DOMAINS;
}

/// The layout of an XRC domain's file (`docs/softverbs-xrc.md`). Every member can write all of it.
pub(crate) mod xrc {
    /// Magic: the first word of the file, stored last.
    pub(crate) const MAGIC: u64 = 0x0001_6372_7874_666f;
    pub(crate) const MAX_DOMAINS: usize = 1 << 9;
    pub(crate) const TARGET_BITS: u32 = 12;
    /// Limit of targets of one domain: one less than `TARGET_BITS` allow, because the highest queue
    /// pair number, 0xffffff, is that of multicast.
    pub(crate) const MAX_TARGETS: usize = (1 << TARGET_BITS) - 1;

    /// Header: one page. After the magic u64 size, u64 cookie, u32 number, u32 node.
    pub(crate) const SIZE_AT: usize = 8;
    pub(crate) const COOKIE: usize = 16;
    pub(crate) const NUMBER: usize = 24;
    pub(crate) const NODE: usize = 28;
    /// u32: number of entries that have pages. Grows only, under the domain's lock.
    pub(crate) const COUNT: usize = 64;

    /// One entry for each target, with the fields `STATE` and `WAITING` of [`super::qp`].
    pub(crate) const AT: usize = 4096;
    pub(crate) const STRIDE: usize = 512;
    /// u32: `min_rnr_timer`, 0–31.
    pub(crate) const RNR_TIMER: usize = 36;
    /// u32: `ibv_qp_type`.
    pub(crate) const TYPE: usize = 48;
    /// u32: slot of the process that connects the target; u64: cookie of that process. Stored
    /// before the connection is made.
    pub(crate) const CONNECTOR_SLOT: usize = 52;
    pub(crate) const CONNECTOR: usize = 64;
    /// u64: cookie of the initiator's process, stored with the two above; 0 if its slot had no live
    /// process; [`FORGOTTEN`] if that process has ended behind the initiator.
    pub(crate) const INITIATOR: usize = 56;
    /// No cookie of a process: those are odd.
    pub(crate) const FORGOTTEN: u64 = 2;
    /// u64: the last state word in ERR, of a fault, that a holder has reset.
    pub(crate) const FAILED: usize = 72;
    /// u64 each: one bit for the slot of each process that holds the target. The bit of an ended
    /// process may stay set.
    pub(crate) const HOLDERS: usize = 128;
    pub(crate) const HOLDER_WORDS: usize = super::MAX_PROCESSES / 64;
    /// u32 each: `struct ibv_qp_attr` with the attributes that holders have set.
    pub(crate) const ATTR: usize = 256;
    pub(crate) const ATTR_WORDS: usize = size_of::<rdma_core_sys::ibv_qp_attr>() / 4;
    const _: () = assert!(ATTR + 4 * ATTR_WORDS <= USED);
    /// u64 each, by initiators and by agents of the owners of shared receive queues: accesses to
    /// memory through the target (see [`crate::hazard::Accessor`]), or 0.
    pub(crate) const USED: usize = 448;
    pub(crate) const USED_WORDS: usize = 8;
    const _: () = assert!(USED + 8 * USED_WORDS <= STRIDE);
    pub(crate) const SIZE: usize = AT + STRIDE * (MAX_TARGETS + 1);

    /// Offset of a target's entry.
    pub(crate) fn entry_at(index: u32) -> usize {
        AT + STRIDE * (index as usize % (MAX_TARGETS + 1))
    }

    /// The number of a target.
    pub(crate) fn target_num(domain: u32, index: u32) -> u32 {
        ((super::MAX_PLACES as u32) << super::QP_BITS) + (domain << TARGET_BITS) + index
    }

    /// Domain and index of a target's number; `None` for a queue pair of a process.
    #[inline]
    pub(crate) fn split_target(num: u32) -> Option<(u32, u32)> {
        let rest = (num & 0xff_ffff).checked_sub((super::MAX_PLACES as u32) << super::QP_BITS)?;
        Some((rest >> TARGET_BITS, rest & MAX_TARGETS as u32))
    }
}

/// Receive descriptors and entries of pending messages.
pub(crate) mod arena {
    pub(crate) const AT: usize = super::member::END.next_multiple_of(4096);
    pub(crate) const LEN: usize = 256 << 20;
}

/// Size of a segment, and of its two files.
pub(crate) const SEGMENT_SIZE: usize = arena::AT + arena::LEN;
pub(crate) const SHARED_SIZE: usize = OWNED;
pub(crate) const TABLES_SIZE: usize = SEGMENT_SIZE - OWNED;

/// Whether `count` entries of `stride` bytes, starting at `at`, lie in `part` of the segment.
pub(crate) fn fits(part: std::ops::Range<usize>, at: usize, count: u32, stride: usize) -> bool {
    part.contains(&at) && count as usize <= (part.end - at) / stride
}

/// A receive descriptor: u32 total length, u32 number of sges, u64 unused, then for each sge: u64
/// address, u32 length, u32 the lkey that it was posted with.
pub(crate) mod desc {
    pub(crate) const TOTAL: usize = 0;
    pub(crate) const NUM_SGE: usize = 4;
    pub(crate) const FIRST: usize = 16;
    pub(crate) const SGE_STRIDE: usize = 16;
    /// Offset in a sge.
    pub(crate) const LKEY: usize = 12;
    /// Stored instead of the number of sges: the owner may not write the memory of at least one
    /// sge.
    pub(crate) const POISONED: u32 = u32::MAX;

    pub(crate) fn stride(num_sge: usize) -> usize {
        (FIRST + num_sge * SGE_STRIDE).next_multiple_of(32)
    }
}

/// A pending message, which waits for a receive: u32 length, number of sges, immediate, flags,
/// message number, receiver's incarnation, then the sges as in [`desc`].
pub(crate) mod pending {
    pub(crate) const LEN: usize = 0;
    pub(crate) const NUM_SGE: usize = 4;
    pub(crate) const IMM: usize = 8;
    pub(crate) const FLAGS: usize = 12;
    pub(crate) const NUMBER: usize = 16;
    pub(crate) const INCARNATION: usize = 20;
    pub(crate) const FIRST: usize = 32;
    pub(crate) const SGE_STRIDE: usize = 16;

    pub(crate) const WITH_IMM: u32 = 1;
    pub(crate) const SOLICITED: u32 = 2;

    pub(crate) fn stride(num_sge: usize) -> usize {
        (FIRST + num_sge * SGE_STRIDE).next_multiple_of(32)
    }
}

/// The pending messages of a sender that the receiver can take: whether the receiver is copying the
/// first one (1 bit), generation (31), count (16), position of the first one in the send queue
/// (16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingWord(pub(crate) u64);

impl PendingWord {
    const HELD: u64 = 1 << 63;

    pub(crate) fn new(generation: u32, count: u32, first: u32) -> Self {
        Self(
            u64::from(generation & 0x7fff_ffff) << 32
                | u64::from(count & 0xffff) << 16
                | u64::from(first & 0xffff),
        )
    }

    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32 & 0x7fff_ffff
    }

    /// Whether the receiver is copying the first message, into the receive that the sender would
    /// also write to.
    pub(crate) fn is_held(self) -> bool {
        self.0 & Self::HELD != 0
    }

    #[must_use]
    pub(crate) fn held(self) -> Self {
        Self(self.0 | Self::HELD)
    }

    #[must_use]
    pub(crate) fn released(self) -> Self {
        Self(self.0 & !Self::HELD)
    }

    pub(crate) fn count(self) -> u32 {
        (self.0 >> 16) as u32 & 0xffff
    }

    pub(crate) fn first(self) -> u32 {
        self.0 as u32 & 0xffff
    }

    #[must_use]
    pub(crate) fn with_one_more(self) -> Self {
        Self(self.0 & Self::HELD | Self::new(self.generation(), self.count() + 1, self.first()).0)
    }

    /// The word after the first message was taken; the receiver is not copying.
    #[must_use]
    pub(crate) fn without_first(self) -> Self {
        Self::new(
            self.generation(),
            self.count().wrapping_sub(1),
            self.first().wrapping_add(1),
        )
    }

    /// Whether this word is `old` with messages added and none taken.
    pub(crate) fn has_grown_from(self, old: Self) -> bool {
        self.generation() == old.generation()
            && self.is_held() == old.is_held()
            && self.first() == old.first()
            && self.count() > old.count()
    }

    /// Number of messages that a receiver took between this word and the word `now`; 0 if `now` is
    /// inconsistent.
    pub(crate) fn taken(self, now: Self) -> u32 {
        let taken = now.first().wrapping_sub(self.first()) & 0xffff;
        let consistent = now.generation() == self.generation()
            && taken <= self.count()
            && now.count() == self.count() - taken;
        if consistent { taken } else { 0 }
    }
}

/// Access flags of a queue pair in the form of its state word: the flags for flush are moved to
/// lower bits.
pub(crate) fn qp_access(flags: u32) -> u32 {
    use rdma_core_sys::{
        IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT, IBV_ACCESS_REMOTE_ATOMIC,
        IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    };
    let remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    let flush = IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT;
    flags & remote | (flags & flush) >> 2
}

/// Reason for which a queue pair was moved to ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An access without the right.
    Access = 0,
    /// An invalid request.
    Request = 1,
    /// The connected process has ended.
    Fatal = 2,
    /// XRC target: a holder moved it to ERR by `ibv_modify_qp(3)`.
    Asked = 3,
}

/// A bit of the access rights in a state word that is no right of [`qp_access`].
const ENDED_KEYS: u64 = 1;

/// A queue pair's state word, as seen by peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateWord(pub(crate) u64);

/// Whether a queue pair in this state takes messages.
#[inline]
pub(crate) fn receives(state: u32) -> bool {
    use rdma_core_sys::{IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE};
    matches!(state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE)
}

impl StateWord {
    /// `dest` is the number of the connected queue pair, `access` the access rights of that queue
    /// pair here; `incarnation` differs between two lives of the same number.
    pub(crate) fn new(state: u32, dest: u32, access: u32, incarnation: u32) -> Self {
        Self(
            u64::from(dest & 0xff_ffff)
                | u64::from(state & 0xff) << 24
                | u64::from(access & 0xff) << 32
                | u64::from(incarnation & 0xff_ffff) << 40,
        )
    }

    #[inline]
    pub(crate) fn dest(self) -> u32 {
        self.0 as u32 & 0xff_ffff
    }

    #[inline]
    pub(crate) fn state(self) -> u32 {
        (self.0 >> 24) as u32 & 0xff
    }

    #[inline]
    pub(crate) fn access(self) -> u32 {
        (self.0 >> 32) as u32 & 0xff
    }

    #[inline]
    pub(crate) fn incarnation(self) -> u32 {
        (self.0 >> 40) as u32
    }

    /// The word after a peer has moved the queue pair to ERR: the reason replaces the access
    /// rights.
    #[must_use]
    pub(crate) fn failed(self, fault: Fault) -> Self {
        let reason = (fault as u64) << 32;
        Self(self.with_state(rdma_core_sys::IBV_QPS_ERR).0 & !(0xff << 32) | reason)
    }

    /// The reason given by the peer that moved the queue pair to ERR.
    pub(crate) fn fault(self) -> Fault {
        match self.access() {
            1 => Fault::Request,
            2 => Fault::Fatal,
            3 => Fault::Asked,
            _ => Fault::Access,
        }
    }

    #[must_use]
    pub(crate) fn with_state(self, state: u32) -> Self {
        Self(self.0 & !(0xff << 24) | u64::from(state & 0xff) << 24)
    }

    /// The word of a queue pair of which a posted receive names a key that has ended or changed:
    /// [`Credit::least`] became 0 after senders may have read it. It stays so until RESET.
    #[must_use]
    pub(crate) fn with_ended_keys(self) -> Self {
        Self(self.0 | ENDED_KEYS << 32)
    }

    #[inline]
    pub(crate) fn has_ended_keys(self) -> bool {
        self.0 >> 32 & ENDED_KEYS != 0
    }

    /// This word, in place of `old` in the same incarnation.
    #[must_use]
    pub(crate) fn behind(self, old: Self) -> Self {
        Self(self.0 | old.0 & ENDED_KEYS << 32)
    }
}

/// Count of receives posted since RESET (wrapping), and the smallest length of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credit {
    pub(crate) posted: u32,
    pub(crate) least: u32,
}

impl Credit {
    #[inline]
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.posted) | u64::from(self.least) << 32
    }

    #[inline]
    pub(crate) fn from_word(word: u64) -> Self {
        Self {
            posted: word as u32,
            least: (word >> 32) as u32,
        }
    }
}

/// The number of the queue pair with this index in the process of this slot. Index 0 and 1 of slot
/// 0 are the special numbers of the specification, so no process uses them.
pub(crate) fn qp_num(slot: u32, index: u32) -> u32 {
    slot << QP_BITS | index
}

/// Slot and index of a queue pair number.
#[inline]
pub(crate) fn split_qp_num(num: u32) -> (u32, u32) {
    (
        num >> QP_BITS & (MAX_PROCESSES as u32 - 1),
        num & (MAX_QPS as u32 - 1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_words_keep_their_parts() {
        let word = StateWord::new(3, 0xab_cdef, 0x0e, 0x12_3456);
        assert_eq!(word.state(), 3);
        assert_eq!(word.dest(), 0xab_cdef);
        assert_eq!(word.access(), 0x0e);
        assert_eq!(word.incarnation(), 0x12_3456);
        let error = word.with_state(6);
        assert_eq!((error.state(), error.dest()), (6, 0xab_cdef));
        assert_eq!(error.incarnation(), 0x12_3456);
        for fault in [Fault::Access, Fault::Request, Fault::Fatal, Fault::Asked] {
            let failed = word.failed(fault);
            assert_eq!((failed.state(), failed.fault()), (6, fault));
            assert_eq!(failed.dest(), 0xab_cdef);
            assert_eq!(failed.incarnation(), 0x12_3456);
        }
    }

    #[test]
    fn pending_words_count_what_was_taken() {
        let most = u32::MAX >> 1;
        let word = PendingWord::new(u32::MAX, 3, 0x1_fffe);
        assert_eq!(
            (word.generation(), word.count(), word.first()),
            (most, 3, 0xfffe)
        );
        assert!(word.held().is_held() && !word.is_held());
        assert_eq!(word.held().released(), word);
        assert_eq!(word.held().without_first(), word.without_first());
        assert_eq!(word.held().with_one_more(), word.with_one_more().held());
        assert!(!word.held().with_one_more().has_grown_from(word));
        let mut now = word;
        for taken in 0..=3 {
            assert_eq!(word.taken(now), taken);
            now = now.without_first();
        }
        // More messages than there were, another generation, another count.
        assert_eq!(word.taken(now), 0);
        assert_eq!(word.taken(PendingWord::new(0, 2, 0xffff)), 0);
        assert_eq!(word.taken(PendingWord::new(u32::MAX, 3, 0xffff)), 0);
        assert!(word.with_one_more().has_grown_from(word));
        assert!(!word.has_grown_from(word));
        assert!(!word.without_first().has_grown_from(word));
        assert_eq!(word.with_one_more().count(), 4);
    }

    #[test]
    fn numbers_name_their_owner() {
        for (slot, index) in [(0, 2), (1023, 16383), (5, 77)] {
            let num = qp_num(slot, index);
            assert!(num < 1 << 24);
            assert_eq!(split_qp_num(num), (slot, index));
        }
    }

    #[test]
    fn numbers_of_targets_name_their_domain() {
        for (domain, index) in [(0, 0), (1, 4094), (511, 7), (511, 4094)] {
            let num = xrc::target_num(domain, index);
            assert!(num < 0xff_ffff);
            assert_eq!(xrc::split_target(num), Some((domain, index)));
        }
        let last = qp_num(MAX_PLACES as u32 - 1, MAX_QPS as u32 - 1);
        assert_eq!(xrc::split_target(last), None);
        assert_eq!(xrc::target_num(0, 0), last + 1);
    }

    #[test]
    fn parts_do_not_share_cache_lines() {
        for at in [
            announce::AT,
            cq::AT,
            qp::AT,
            region::AT,
            srq::AT,
            stripe::AT,
            order::AT,
            receive_rings::AT,
            OWNED,
            buffer::AT,
            domain::AT,
            member::AT,
            arena::AT,
        ] {
            assert_eq!(at % 64, 0);
        }
        assert_eq!(desc::stride(1), 32);
        assert_eq!(desc::stride(3), 64);
    }
}
