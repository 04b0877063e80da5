//! `fid_cq`: completion queues, `fi_cq(3)`.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::queue::{Completion, CompletionQueue, CqConfig, EntryWriter, WaitKind};

use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, assumed, close, header, object, on};
use crate::ffi::param::fault_point;
use crate::ffi::stub;
use crate::poll_members::Memberships;

/// An open completion queue.
pub(crate) struct Cq {
    pub(crate) engine: Arc<CompletionQueue>,
    format: fi_cq_format,
    /// Whether a blocking read's condition is a number of completions.
    threshold: bool,
    api_version: u32,
    /// The device's code of the last error, 0 if it has none: `err_data` points to it if the
    /// application passes no buffer of its own. Valid until the next error is read (fi_cq(3)).
    vendor_err: AtomicU32,
    /// Whether the queue is one of endpoints with many peers, so that no connected endpoint can be
    /// bound to it.
    pub(crate) rdm: bool,
    pub(crate) polls: Memberships,
    _domain: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Cq>),
    control: Some(control),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_cq> = stub::cq::<FI_ENOSYS>(fi_ops_cq {
    size: size_of::<WithMainSlot<fi_ops_cq>>(),
    read: Some(read),
    readfrom: Some(readfrom),
    readerr: Some(readerr),
    sread: Some(sread),
    sreadfrom: Some(sreadfrom),
    signal: Some(signal),
    strerror: Some(strerror),
});

// SAFETY: `fid_cq` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Cq {
    type C = fid_cq;
    const CLASS: usize = FI_CLASS_CQ;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_cq) {
        c.ops = (&raw const stub::closed::CQ.base).cast_mut();
    }
    fn finish(object: &Object<Self>) -> Result<()> {
        object.polls.leave();
        Ok(())
    }
}

/// The wait object of a queue; the engine chooses one for `FI_WAIT_UNSPEC`.
///
/// # Errors
/// `ENOSYS`: an unsupported kind; the man page's deprecated kinds are not supported.
pub(crate) fn wait_kind(wait_obj: fi_wait_obj) -> Result<WaitKind> {
    match wait_obj {
        FI_WAIT_NONE => Ok(WaitKind::None),
        FI_WAIT_UNSPEC => Ok(WaitKind::Unspec),
        FI_WAIT_YIELD => Ok(WaitKind::Yield),
        FI_WAIT_FD => Ok(WaitKind::Fd),
        FI_WAIT_SET | FI_WAIT_MUTEX_COND | FI_WAIT_POLLFD => Err(FiErrno::ENOSYS),
        _ => Err(FiErrno::EINVAL),
    }
}

/// `FI_GETWAIT` and `FI_GETWAITOBJ` of queues.
///
/// # Errors
/// `ENODATA`: the queue has no descriptor. `ENOSYS`: another command.
///
/// # Safety
/// `arg` is NULL or writable as the result type of the command.
pub(crate) unsafe fn wait_control(
    command: c_int,
    arg: *mut c_void,
    fd: Option<c_int>,
    kind: WaitKind,
) -> Result<c_int> {
    let command = command.cast_unsigned();
    if command != FI_GETWAIT && command != FI_GETWAITOBJ {
        return Err(FiErrno::ENOSYS);
    }
    if arg.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: not NULL, and of the type of the command.
    unsafe {
        if command == FI_GETWAIT {
            *arg.cast::<c_int>() = fd.ok_or(FiErrno::ENODATA)?;
        } else {
            *arg.cast::<fi_wait_obj>() = match kind {
                WaitKind::None => FI_WAIT_NONE,
                WaitKind::Unspec => FI_WAIT_UNSPEC,
                WaitKind::Yield => FI_WAIT_YIELD,
                WaitKind::Fd => FI_WAIT_FD,
            };
        }
    }
    Ok(0)
}

/// `fi_cq_open(3)`
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    out: *mut *mut fid_cq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_cq_open(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        fault_point("cq_open");
        if attr.is_null() || out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL; the structure is the same in every release.
        let attr = unsafe { *attr };
        if attr.flags & !FI_AFFINITY != 0 {
            return Err(FiErrno::EBADFLAGS); // FI_PEER: queues are not shared with other providers
        }
        let format = match attr.format {
            FI_CQ_FORMAT_UNSPEC => FI_CQ_FORMAT_CONTEXT,
            format if format <= FI_CQ_FORMAT_TAGGED => format,
            _ => return Err(FiErrno::EINVAL),
        };
        // ignored without a wait object
        if attr.wait_obj != FI_WAIT_NONE && attr.wait_cond > FI_CQ_COND_THRESHOLD {
            return Err(FiErrno::EINVAL);
        }
        let config = CqConfig {
            size: attr.size,
            wait: wait_kind(attr.wait_obj)?,
            signaling_vector: if attr.flags & FI_AFFINITY != 0 {
                c_uint::try_from(attr.signaling_vector).map_err(|_| FiErrno::EINVAL)?
            } else {
                0
            },
            sources_only: domain.rdm,
        };
        let user = domain.users.add()?;
        let engine = CompletionQueue::open(domain.engine.queues(), config)?;
        let object = Object::open(
            fid_cq {
                fid: header::<Cq>(context),
                ops: (&raw const OPS.base).cast_mut(),
            },
            Cq {
                engine,
                format,
                threshold: attr.wait_cond == FI_CQ_COND_THRESHOLD,
                api_version: domain.api_version,
                vendor_err: AtomicU32::new(0),
                rdm: domain.rdm,
                polls: Memberships::default(),
                _domain: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// A format of completion entries (fi_cq(3)).
trait Entry {
    fn of(completion: &Completion) -> Self;
}

fn pointer<T>(address: usize) -> *mut T {
    // The device returns the application's pointer as a number.
    std::ptr::with_exposed_provenance_mut(address)
}

impl Entry for fi_cq_entry {
    #[inline(always)]
    fn of(c: &Completion) -> Self {
        Self {
            op_context: pointer(c.context),
        }
    }
}

impl Entry for fi_cq_msg_entry {
    #[inline(always)]
    fn of(c: &Completion) -> Self {
        Self {
            op_context: pointer(c.context),
            flags: c.flags.bits(),
            len: c.len,
        }
    }
}

impl Entry for fi_cq_data_entry {
    #[inline(always)]
    fn of(c: &Completion) -> Self {
        Self {
            op_context: pointer(c.context),
            flags: c.flags.bits(),
            len: c.len,
            buf: pointer(c.buf),
            data: c.data,
        }
    }
}

impl Entry for fi_cq_tagged_entry {
    #[inline(always)]
    fn of(c: &Completion) -> Self {
        Self {
            op_context: pointer(c.context),
            flags: c.flags.bits(),
            len: c.len,
            buf: pointer(c.buf),
            data: c.data,
            tag: c.tag,
        }
    }
}

/// Writes entries without the addresses of the senders.
struct WithoutSources<F>(F);

impl<F: FnMut(&Completion)> EntryWriter for WithoutSources<F> {
    #[inline]
    fn write(&mut self, completion: &Completion) {
        (self.0)(completion);
    }

    #[inline]
    fn uses_sources(&self) -> bool {
        false
    }
}

/// How a read waits.
#[derive(Clone, Copy)]
enum Wait {
    Not,
    For {
        threshold: usize,
        timeout: Option<Duration>,
    },
}

impl Cq {
    /// Reads up to `count` completions into `buf`.
    ///
    /// # Safety
    /// `buf` has room for `count` entries of the queue's format.
    #[inline(always)]
    unsafe fn read_into(&self, buf: *mut c_void, count: usize, wait: Wait) -> Result<isize> {
        // SAFETY: the caller provides room for `count` entries of the queue's format.
        unsafe { self.read_with(buf, count, wait, None) }
    }

    /// Reads up to `count` completions into `buf`, and their senders' addresses into `src_addr`.
    ///
    /// # Safety
    /// `buf` has room for `count` entries of the queue's format. `src_addr` is NULL or has room for
    /// `count` addresses.
    unsafe fn read_from(
        &self,
        buf: *mut c_void,
        count: usize,
        src_addr: *mut fi_addr_t,
        wait: Wait,
    ) -> Result<isize> {
        // SAFETY: the caller provides room for `count` entries, and for `count` addresses.
        unsafe { self.read_with(buf, count, wait, NonNull::new(src_addr)) }
    }

    /// Reads up to `count` completions into `buf`, and their senders' addresses into `sources`.
    ///
    /// # Safety
    /// `buf` has room for `count` entries of the queue's format, and `sources`, if it is given, for
    /// `count` addresses.
    #[inline(always)]
    unsafe fn read_with(
        &self,
        buf: *mut c_void,
        count: usize,
        wait: Wait,
        sources: Option<NonNull<fi_addr_t>>,
    ) -> Result<isize> {
        if count == 0 {
            return self.read_nothing(wait).map(|()| 0);
        }
        if buf.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: the caller's promise, by format.
        unsafe {
            match self.format {
                FI_CQ_FORMAT_CONTEXT => self.read_as::<fi_cq_entry>(buf, count, wait, sources),
                FI_CQ_FORMAT_MSG => self.read_as::<fi_cq_msg_entry>(buf, count, wait, sources),
                FI_CQ_FORMAT_DATA => self.read_as::<fi_cq_data_entry>(buf, count, wait, sources),
                _ => self.read_as::<fi_cq_tagged_entry>(buf, count, wait, sources),
            }
        }
    }

    /// A read of no entries, which "may be used to drive progress" (fi_cq(3)); one that waits does
    /// so until there is an entry. Success, a count of 0: the queue has a completion. libfabric's
    /// own queues return the same, and its `fi_poll` depends on that.
    ///
    /// # Errors
    /// `EAVAIL`: the next entry is an error. `EAGAIN`: the queue is empty. Others: as
    /// [`CompletionQueue::sread`].
    #[cold]
    #[inline(never)]
    fn read_nothing(&self, wait: Wait) -> Result<()> {
        if let Wait::For { timeout, .. } = wait {
            let read = self.engine.sread(0, 1, timeout, &mut |_: &Completion| {});
            if let Err(error) = read
                && error != FiErrno::EAGAIN
            {
                return Err(error);
            }
        }
        self.engine.next_entry()
    }

    /// As [`Self::read_with`], for entries of this format.
    ///
    /// # Safety
    /// As [`Self::read_with`].
    #[inline(always)]
    unsafe fn read_as<E: Entry>(
        &self,
        buf: *mut c_void,
        count: usize,
        wait: Wait,
        sources: Option<NonNull<fi_addr_t>>,
    ) -> Result<isize> {
        let mut next = buf.cast::<E>();
        let mut write = move |completion: &Completion| {
            // SAFETY: the engine writes at most `count` entries, for which `buf` has room.
            unsafe {
                next.write_unaligned(E::of(completion));
                next = next.add(1);
            }
        };
        let Some(mut source) = sources else {
            return self.read_by(count, wait, &mut WithoutSources(write));
        };
        let mut write = move |completion: &Completion| {
            write(completion);
            // SAFETY: as above, for addresses.
            unsafe {
                source.write(completion.src_addr);
                source = source.add(1);
            }
        };
        self.read_by(count, wait, &mut write)
    }

    #[inline(always)]
    fn read_by(&self, count: usize, wait: Wait, writer: &mut impl EntryWriter) -> Result<isize> {
        let read = match wait {
            Wait::Not => self.engine.read(count, writer)?,
            Wait::For { threshold, timeout } => {
                self.engine.sread(count, threshold, timeout, writer)?
            }
        };
        Ok(read.cast_signed())
    }

    fn waiting(&self, cond: *const c_void, count: usize, timeout: c_int) -> Wait {
        // With FI_CQ_COND_THRESHOLD the argument is a number, not a pointer to a number.
        let threshold = if self.threshold { cond.addr() } else { 1 };
        Wait::For {
            threshold: threshold.clamp(1, count.max(1)),
            timeout: u64::try_from(timeout).ok().map(Duration::from_millis),
        }
    }
}

unsafe extern "C" fn read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: called through the queue's own table.
    let cq = unsafe { assumed::<Cq>(cq) };
    // SAFETY: the contract of fi_cq_read(3).
    on(cq, |cq| unsafe { cq.read_into(buf, count, Wait::Not) })
}

unsafe extern "C" fn readfrom(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    src_addr: *mut fi_addr_t,
) -> isize {
    // SAFETY: called through the queue's own table.
    let cq = unsafe { assumed::<Cq>(cq) };
    // SAFETY: the contract of fi_cq_readfrom(3).
    on(cq, |cq| unsafe {
        cq.read_from(buf, count, src_addr, Wait::Not)
    })
}

unsafe extern "C" fn sread(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: called through the queue's own table.
    let cq = unsafe { assumed::<Cq>(cq) };
    on(cq, |cq| {
        let wait = cq.waiting(cond, count, timeout);
        // SAFETY: the contract of fi_cq_sread(3).
        unsafe { cq.read_into(buf, count, wait) }
    })
}

unsafe extern "C" fn sreadfrom(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    src_addr: *mut fi_addr_t,
    cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: called through the queue's own table.
    let cq = unsafe { assumed::<Cq>(cq) };
    on(cq, |cq| {
        let wait = cq.waiting(cond, count, timeout);
        // SAFETY: the contract of fi_cq_sreadfrom(3).
        unsafe { cq.read_from(buf, count, src_addr, wait) }
    })
}

/// `fi_cq_readerr(3)`. The entry has the size of the application's API version.
unsafe extern "C" fn readerr(cq: *mut fid_cq, buf: *mut fi_cq_err_entry, flags: u64) -> isize {
    // SAFETY: a queue by the contract of fi_cq_readerr(3).
    let cq = unsafe { object::<Cq>(cq) };
    on(cq, |cq| {
        if buf.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let error = match cq.engine.read_error() {
            // this may be the application's only call (endpoints without a device's progress)
            Err(FiErrno::EAGAIN) if cq.rdm && cq.engine.poll_ready() => cq.engine.read_error()?,
            error => error?,
        };
        let done = error.completion;
        let vendor = error.vendor_err.map(u32::to_ne_bytes);
        cq.vendor_err
            .store(error.vendor_err.unwrap_or(0), Ordering::Relaxed);
        // SAFETY: not NULL; each field is written only where the application's version has it, and
        // `err_data` has the application's `err_data_size` bytes (from 1.5 on).
        unsafe {
            (*buf).op_context = pointer(done.context);
            (*buf).flags = done.flags.bits();
            (*buf).len = done.len;
            (*buf).buf = pointer(done.buf);
            (*buf).data = done.data;
            (*buf).tag = done.tag;
            (*buf).olen = error.olen;
            (*buf).err = error.err.code();
            (*buf).prov_errno = error.prov_errno;
            let sized = cq.api_version >= fi_version(1, 5);
            let data = vendor.as_ref().map_or(&[][..], |vendor| &vendor[..]);
            if sized && (*buf).err_data_size != 0 {
                let to = (*buf).err_data.cast();
                (*buf).err_data_size = copy_data(data, to, (*buf).err_data_size);
            } else {
                // fi_cq(3): a buffer of the provider, also if the error has no data
                (*buf).err_data = cq.vendor_err.as_ptr().cast();
                if sized {
                    // its size, as from libfabric's own providers
                    (*buf).err_data_size = data.len();
                }
            }
            if cq.api_version >= fi_version(1, 20) {
                (*buf).src_addr = done.src_addr;
            }
        }
        Ok(1)
    })
}

unsafe extern "C" fn signal(cq: *mut fid_cq) -> c_int {
    // SAFETY: a queue by the contract of fi_cq_signal(3).
    let cq = unsafe { object::<Cq>(cq) };
    on(cq, |cq| cq.engine.signal().map(|()| 0))
}

unsafe extern "C" fn strerror(
    cq: *mut fid_cq,
    prov_errno: c_int,
    _err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: a queue by the contract of fi_cq_strerror(3).
    let Ok(cq) = (unsafe { object::<Cq>(cq) }) else {
        return c"invalid completion queue".as_ptr();
    };
    let text = cq.engine.strerror(prov_errno);
    // SAFETY: `buf` is NULL or has `len` bytes.
    unsafe { copy_text(text, buf, len) };
    text.as_ptr()
}

/// Copies as much of the error data as fits, and returns the number of bytes copied, which is the
/// `err_data_size` of the answer (fi_cq(3), fi_eq(3)).
///
/// # Safety
/// `to` is NULL or has `room` bytes.
pub(crate) unsafe fn copy_data(data: &[u8], to: *mut u8, room: usize) -> usize {
    if to.is_null() {
        return 0;
    }
    let count = data.len().min(room);
    // SAFETY: not NULL; the caller passes `room` bytes, at least `count`.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, count) };
    count
}

/// Copies as much of `text` as fits, with a NUL.
///
/// # Safety
/// `buf` is NULL or has `len` bytes.
pub(crate) unsafe fn copy_text(text: &std::ffi::CStr, buf: *mut c_char, len: usize) {
    if buf.is_null() || len == 0 {
        return;
    }
    let bytes = text.to_bytes();
    let count = bytes.len().min(len - 1);
    // SAFETY: not NULL; the caller provides `len` bytes, more than `count`.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buf, count);
        *buf.add(count) = 0;
    }
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: a fid by the contract of fi_control(3).
    let cq = unsafe { object::<Cq>(handle) };
    on(cq, |cq| {
        // SAFETY: the argument of the command, by the contract of fi_control(3).
        unsafe { wait_control(command, arg, cq.engine.fd(), cq.engine.wait_kind()) }
    })
}
