//! Creating, changing and destroying shared receive queues.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdma_core_sys::{
    IBV_SRQ_LIMIT, IBV_SRQ_MAX_WR, ibv_pd, ibv_sge, ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};

use super::words::{Form, Kept};
use super::{Posted, Queue, Srq, XrcInit};
use crate::environment;
use crate::events::Element;
use crate::limits::{MAX_SGE, MAX_WR};
use crate::object::{Context, Pd};
use crate::process::Process;
use crate::region::LastRegion;
use crate::segment::layout::{desc, srq as layout};
use crate::segment::{Mapping, OwnSegment};
use crate::signal;
use crate::sync::Lock;
use crate::sys::{Errno, Res, with_room, zeroed};

/// Words of the order in one cache line. The order has at least this many words more than receives.
/// Otherwise the owner posts into the cache line in which senders claim, and the line moves between
/// processors with each message.
const LINE: u32 = 8;

/// A queue that is not in use. Messages and requests of other processes may name it from now on,
/// also if its creation fails.
fn blank(index: u32, process: &'static Process) -> Srq {
    Srq {
        // SAFETY: all zeros is a valid `ibv_srq`.
        object: UnsafeCell::new(unsafe { std::mem::zeroed() }),
        index,
        process,
        users: AtomicU32::new(0),
        events: AtomicU32::new(0),
        pulls: AtomicBool::new(false),
        unrung: super::unrung::Unrung::default(),
        any_unrung: AtomicBool::new(false),
        queue: Lock::new(Queue::default()),
        kept: Lock::new(Kept::default()),
        xrc: Lock::new(super::xrc::Part::default()),
    }
}

/// Whether the device has shared receive queues in this process.
pub(crate) fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(|| environment::SRQ.value().is_none_or(|value| value != "0"))
}

/// Attributes of a new queue.
pub(crate) struct SrqInit {
    pub(crate) pd: *mut ibv_pd,
    pub(crate) basic: ibv_srq_init_attr,
    /// Only for an XRC SRQ.
    pub(crate) xrc: Option<XrcInit>,
}

/// `ibv_create_srq`, `ibv_create_srq_ex`.
///
/// # Errors
/// `EINVAL`: a size is 0 or above the device's limit. `ENOMEM`: no memory, index or room in the
/// segment. `EOPNOTSUPP`: the device has no shared receive queues.
///
/// # Safety
/// The protection domain, the XRC domain and the completion queue must be live.
pub(crate) unsafe fn create(all: &SrqInit) -> Res<&'static Srq> {
    if !enabled() {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let (pd, init) = (all.pd, &all.basic);
    let attr = &init.attr;
    if attr.max_wr == 0 || attr.max_wr > MAX_WR || attr.max_sge > MAX_SGE {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: the caller promises a live domain, whose context is live.
    let (domain, context) = unsafe { (Pd::from_ptr(pd), Context::from_ptr((*pd).context)) };
    let process = context.process;
    let segment = &process.segment;
    let count = attr.max_wr.next_power_of_two() as usize;
    let words = (attr.max_wr + LINE).next_power_of_two() as usize;
    let max_sge = attr.max_sge.max(1) as usize;
    let desc_stride = desc::stride(max_sge);
    let mut free = with_room(count)?;
    free.extend((0..attr.max_wr).rev());
    let posted = zeroed::<Posted>(count)?;
    let sges = zeroed::<ibv_sge>(count * max_sge)?;
    let order = zeroed::<u32>(words)?;
    let srq = process.srqs.take(|index| blank(index, process))?;
    let form = Form {
        words,
        descs: count,
        xrc: all.xrc.is_some(),
    };
    let places = srq.take_places(segment, form, desc_stride);
    let places = places.inspect_err(|_| process.srqs.give(srq.index))?;
    let map = &segment.map;
    srq.users.store(0, Ordering::Relaxed);
    srq.events.store(0, Ordering::Relaxed);
    // SAFETY: no other thread has the object yet; the caller promises a live domain.
    unsafe { srq.fill_object(pd, init.srq_context) };
    let mut queue = srq.queue.lock();
    *queue = Queue {
        max_wr: attr.max_wr,
        max_sge: max_sge as u32,
        // Only `ibv_modify_srq` sets a limit.
        limit: 0,
        pd: domain.number,
        free,
        order: super::Order::starting(map, places.order_at, order, places.position),
        posted,
        sges,
        desc_at: places.desc_at,
        desc_stride,
        last_region: LastRegion::default(),
    };
    drop(queue);
    srq.publish_places(map, &places, words, count, desc_stride);
    domain.children.fetch_add(1, Ordering::Relaxed);
    context.children.fetch_add(1, Ordering::Relaxed);
    if let Some(xrc) = &all.xrc {
        // SAFETY: the caller promises live objects.
        unsafe { srq.begin_xrc(xrc, domain.number) };
    }
    Ok(srq)
}

/// Location of a queue in the segment.
struct Places {
    /// Offset of the words of the order, and the position with which the order begins.
    order_at: usize,
    position: u32,
    /// Offset of the descriptors.
    desc_at: usize,
}

impl Srq {
    /// Takes room from the segment for an order, and for its descriptors of `desc_stride` bytes.
    ///
    /// # Errors
    /// `ENOMEM`; nothing is taken.
    fn take_places(&self, segment: &OwnSegment, form: Form, desc_stride: usize) -> Res<Places> {
        segment.back_halves(self.at(), layout::STRIDE)?;
        let (order_at, position) = self.take_order(segment, form)?;
        let desc_at = segment
            .take(desc_stride * form.descs)
            .inspect_err(|_| self.give_order(form, order_at, position))?;
        Ok(Places {
            order_at,
            position,
            desc_at,
        })
    }

    /// Fills the C object.
    ///
    /// # Safety
    /// No other thread may have the object yet; the domain must be live.
    unsafe fn fill_object(&self, pd: *mut ibv_pd, srq_context: *mut c_void) {
        let object = self.as_ptr();
        // SAFETY: the caller's promise; mutex and condition are initialised in place.
        unsafe {
            (*object).context = (*pd).context;
            (*object).srq_context = srq_context;
            (*object).pd = pd;
            (*object).handle = self.index;
            (*object).events_completed = 0;
            libc::pthread_mutex_init(&raw mut (*object).mutex, std::ptr::null());
            libc::pthread_cond_init(&raw mut (*object).cond, std::ptr::null());
        }
    }

    /// Writes the location of the queue to its entry in the segment.
    fn publish_places(
        &self,
        map: &Mapping,
        places: &Places,
        words: usize,
        count: usize,
        desc_stride: usize,
    ) {
        let at = self.at();
        map.u32(at + layout::HINT)
            .store(places.position, Ordering::Relaxed);
        map.u32(at + layout::LIMIT).store(0, Ordering::Relaxed);
        // The turn number continues from the earlier life of this index.
        signal::asked_in_turn(map, at + layout::WAITING);
        map.u32(at + layout::COUNT)
            .store(words as u32, Ordering::Relaxed);
        map.u32(at + layout::DESC_COUNT)
            .store(count as u32, Ordering::Relaxed);
        map.u32(at + layout::DESC_STRIDE)
            .store(desc_stride as u32, Ordering::Relaxed);
        map.u64(at + layout::DESC_AT)
            .store(places.desc_at as u64, Ordering::Relaxed);
        map.u64(at + layout::ORDER_AT)
            .store(places.order_at as u64, Ordering::Release);
    }
}

/// `ibv_modify_srq`.
///
/// # Errors
/// `EOPNOTSUPP`: resizing. `EINVAL`: a limit above the size.
pub(crate) fn modify(srq: &Srq, attr: &ibv_srq_attr, mask: u32) -> Res<()> {
    if mask & IBV_SRQ_MAX_WR != 0 {
        // Senders have copied the location of the queue; the device reports that an SRQ cannot be
        // resized.
        return Err(Errno(libc::EOPNOTSUPP));
    }
    if mask & IBV_SRQ_LIMIT != 0 {
        let mut queue = srq.queue.lock();
        if attr.srq_limit > queue.max_wr {
            return Err(Errno(libc::EINVAL));
        }
        srq.arm_limit(&mut queue, attr.srq_limit);
    }
    Ok(())
}

/// `ibv_query_srq`.
pub(crate) fn query(srq: &Srq) -> ibv_srq_attr {
    let queue = srq.queue.lock();
    ibv_srq_attr {
        max_wr: queue.max_wr,
        max_sge: queue.max_sge,
        srq_limit: queue.limit,
    }
}

/// `ibv_destroy_srq`: blocks until the application has acknowledged every event that it has
/// received for this SRQ.
///
/// # Errors
/// `EBUSY`: queue pairs use the SRQ; or, for an XRC SRQ, a process that is stopped may still write
/// into its receives. In the second case no further message takes a receive, and the caller can
/// repeat the call.
///
/// # Safety
/// `srq` must be live, and must not be used after success.
pub(crate) unsafe fn destroy(srq: *mut ibv_srq) -> Res<()> {
    // SAFETY: the caller promises a live queue.
    let this = unsafe { Srq::from_ptr(srq) };
    if this.users.load(Ordering::Relaxed) > 0 {
        return Err(Errno(libc::EBUSY));
    }
    let context = this.context();
    let segment = &this.process().segment;
    let xrc = this.is_xrc();
    this.end_xrc()?;
    // From here on, senders find no queue at this index.
    let map = &segment.map;
    map.u64(this.at() + layout::ORDER_AT)
        .store(0, Ordering::Release);
    let old = std::mem::take(&mut *this.queue.lock());
    old.order.clear(map);
    this.end_rings();
    let form = Form {
        words: old.order.len(),
        descs: old.posted.len(),
        xrc,
    };
    this.give_order(form, old.order.at(), old.order.position());
    segment.give(old.desc_at, old.desc_stride * form.descs);
    let unread = context.events.forget(Element::Srq(srq));
    let raised = this.events.load(Ordering::Relaxed);
    // SAFETY: the object is live until its index is given back below.
    let pd = unsafe {
        libc::pthread_mutex_lock(&raw mut (*srq).mutex);
        while (*srq).events_completed.wrapping_add(unread) != raised {
            libc::pthread_cond_wait(&raw mut (*srq).cond, &raw mut (*srq).mutex);
        }
        libc::pthread_mutex_unlock(&raw mut (*srq).mutex);
        libc::pthread_mutex_destroy(&raw mut (*srq).mutex);
        libc::pthread_cond_destroy(&raw mut (*srq).cond);
        Pd::from_ptr((*srq).pd)
    };
    pd.children.fetch_sub(1, Ordering::Relaxed);
    context.children.fetch_sub(1, Ordering::Relaxed);
    this.leave_xrc();
    this.process().srqs.give(this.index);
    Ok(())
}
