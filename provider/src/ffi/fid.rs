//! Objects that C code holds as fids: allocation, the check of a handle, the guard of a call, the
//! count of children, and closing.
//!
//! An entry point on an object has two steps: [`object`] checks the handle, which is NULL or
//! readable by the contract of the man page, and [`on`] runs the body, which is safe.
//!
//! An [`Object`] starts with its C structure, so its address is the fid's. A fid is an open object
//! of this provider if it has the expected class and its `ops` is this provider's table for this
//! class; closing replaces the tables with tables of refusals. The memory of a closed object stays
//! allocated until [`QUARANTINE`] later objects are closed, because `fi_close` and similar calls
//! are inline functions of the application that read `fid->ops`: a second close calls a refusal and
//! does not read reused memory.

use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forks::PerProcess;
use libfabric_sys::*;
use parking_lot::Mutex;
use weft::errno::{FiErrno, Result};

use crate::ffi::guard::{self, Poison, Status};
use crate::ffi::log::{self, info, refused};
use crate::ffi::stub::closed;

/// Number of closed objects whose memory stays allocated.
const QUARANTINE: usize = 1024;

/// A Rust type that is the body of a fid.
///
/// # Safety
/// [`object`] and [`assumed`] cast a fid to an [`Object`] because of these promises:
/// - [`Self::C`] has C's layout and begins with its `fid`, or is a `fid`.
/// - [`Self::ops`] returns the same table at every call, and no other kind has this table.
pub(crate) unsafe trait Kind: Sized {
    /// The C structure, whose first field is its `fid`.
    type C;
    /// `FI_CLASS_*`.
    const CLASS: usize;
    /// The provider's table of control operations for this kind; its address identifies the
    /// provider's fids.
    fn ops() -> &'static fi_ops;
    /// Puts the tables of refusals into the other ops pointers.
    fn retire(c: &mut Self::C);
    /// The part of `fi_close` that may fail, before the object is freed; after an error the object
    /// stays open.
    ///
    /// # Errors
    /// Those of `fi_close` for this kind.
    fn finish(_object: &Object<Self>) -> Result<()> {
        Ok(())
    }
}

/// The fid part of a new object.
pub(crate) fn header<K: Kind>(context: *mut c_void) -> fid {
    fid {
        fclass: K::CLASS,
        context,
        ops: std::ptr::from_ref(K::ops()).cast_mut(),
    }
}

/// The object behind a handle: one of this provider, of kind `K`, and open.
///
/// # Errors
/// `EINVAL`: NULL, a handle of another class or provider, or a closed handle.
///
/// # Safety
/// `handle` is NULL or points to readable memory that starts with a `fid`, and the object is not
/// closed while the reference lives.
pub(crate) unsafe fn object<'a, K: Kind>(handle: *const impl Sized) -> Result<&'a Object<K>> {
    // SAFETY: the caller keeps the contract.
    unsafe { probe(handle) }.ok_or_else(|| not_open(K::CLASS, handle.cast()))
}

/// As [`object`], for a call that accepts objects of several kinds: another kind is no refusal yet,
/// and is not logged.
///
/// # Safety
/// As [`object`].
pub(crate) unsafe fn probe<'a, K: Kind>(handle: *const impl Sized) -> Option<&'a Object<K>> {
    let handle = handle.cast::<fid>();
    if handle.is_null() || !handle.is_aligned() {
        return None;
    }
    // SAFETY: readable by the caller's promise; fields are read one by one, without a reference.
    let (class, ops) = unsafe { ((*handle).fclass, (*handle).ops) };
    if class != K::CLASS || !std::ptr::eq(ops, K::ops()) {
        return None;
    }
    // SAFETY: the table is that of `K` alone (`Kind`), and `open_with` accepts a fid with it only
    // at the start of an `Object<K>`.
    Some(unsafe { &*handle.cast::<Object<K>>() })
}

/// The other object of a call that binds two.
pub(crate) struct Other<'a> {
    handle: *const fid,
    class: usize,
    open: PhantomData<&'a fid>,
}

impl<'a> Other<'a> {
    /// # Errors
    /// `EINVAL`: NULL.
    ///
    /// # Safety
    /// As [`object`]: the object is not closed during `'a`.
    pub(crate) unsafe fn new(handle: *const fid) -> Result<Self> {
        if handle.is_null() {
            return Err(FiErrno::EINVAL);
        }
        Ok(Self {
            handle,
            // SAFETY: not NULL, so readable by the caller's promise.
            class: unsafe { (*handle).fclass },
            open: PhantomData,
        })
    }

    /// `FI_CLASS_*`.
    pub(crate) fn class(&self) -> usize {
        self.class
    }

    /// Whether it is an open object of this kind. Objects of several kinds may have one class.
    pub(crate) fn is<K: Kind>(&self) -> bool {
        // SAFETY: the caller of `new` keeps the contract for `'a`.
        unsafe { probe::<K>(self.handle) }.is_some()
    }

    /// The object, and its use by the one that is bound to it.
    ///
    /// # Errors
    /// `EINVAL`: as [`object`], or the object is being closed.
    pub(crate) fn used<K: Kind>(&self) -> Result<(&'a Object<K>, User)> {
        // SAFETY: the caller of `new` keeps the contract for `'a`.
        let object = unsafe { object::<K>(self.handle)? };
        Ok((object, object.users.add()?))
    }
}

/// As [`object`], for the fast path: no check, as in libfabric's own providers.
///
/// # Safety
/// `handle` is an open fid of this kind. For a call through an ops table that only objects of this
/// kind have, the kind is certain.
#[inline(always)]
pub(crate) unsafe fn assumed<'a, K: Kind>(handle: *const impl Sized) -> Result<&'a Object<K>> {
    // SAFETY: the caller passes an open fid of this kind.
    Ok(unsafe { &*handle.cast::<Object<K>>() })
}

/// Runs the body of a call on the object of [`object`], unless that is an error: errors become
/// negative errno, and a panic poisons the object. With [`assumed`] the cost is one load.
#[inline(always)]
pub(crate) fn on<K: Kind, T: Status>(
    object: Result<&Object<K>>,
    body: impl FnOnce(&Object<K>) -> Result<T>,
) -> T {
    match object {
        Ok(object) => guard::on(&object.poison, || body(object)),
        Err(errno) => T::failed(errno.code()),
    }
}

/// `fi_close(3)` of an object of kind `K`: `EBUSY` while the object has users.
pub(crate) unsafe extern "C" fn close<K: Kind>(handle: *mut fid) -> c_int {
    guard::entry(|| {
        // SAFETY: a fid by the contract of fi_close(3), and not used by the application afterwards.
        unsafe { Object::<K>::close(handle)? };
        Ok(0)
    })
}

/// An object of kind `K`. Its address is that of its fid.
#[repr(C)]
pub(crate) struct Object<K: Kind> {
    /// The application reads it and may write `fid.context`.
    c: UnsafeCell<K::C>,
    pub(crate) poison: Poison,
    pub(crate) users: Arc<Users>,
    body: ManuallyDrop<K>,
}

// SAFETY: this module writes `c` before the object is published, in `update`, and after it is
// closed, when the application may no longer use it (fi_close(3)); the body is `Sync` itself.
unsafe impl<K: Kind + Sync + Send> Sync for Object<K> {}

impl<K: Kind> Deref for Object<K> {
    type Target = K;

    #[inline(always)]
    fn deref(&self) -> &K {
        &self.body
    }
}

impl<K: Kind> Object<K> {
    /// Allocates an object. [`Object::close`] frees it.
    pub(crate) fn open(c: K::C, body: K) -> NonNull<Self> {
        match Self::open_with(|_| Ok::<_, std::convert::Infallible>((c, body))) {
            Ok(object) => object,
            Err(never) => match never {},
        }
    }

    /// As [`Object::open`], for a body that needs the fid's address: `make` receives the address,
    /// but must not dereference it.
    ///
    /// # Panics
    /// If the fid of the C structure is not one of [`header`] for this kind.
    ///
    /// # Errors
    /// Those of `make`; the memory is freed.
    pub(crate) fn open_with<E>(
        make: impl FnOnce(*mut fid) -> std::result::Result<(K::C, K), E>,
    ) -> std::result::Result<NonNull<Self>, E> {
        const { assert!(std::mem::offset_of!(Self, c) == 0) };
        let mut memory = Box::<Self>::new_uninit();
        let (c, body) = make(memory.as_mut_ptr().cast())?;
        // SAFETY: the C structure begins with its fid (`Kind`).
        let header = unsafe { &*(&raw const c).cast::<fid>() };
        assert!(header.fclass == K::CLASS && std::ptr::eq(header.ops, K::ops()));
        let object = Box::write(
            memory,
            Self {
                c: UnsafeCell::new(c),
                poison: Poison::new(),
                users: Arc::new(Users::default()),
                body: ManuallyDrop::new(body),
            },
        );
        // SAFETY: a Box is never NULL.
        Ok(unsafe { NonNull::new_unchecked(Box::into_raw(object)) })
    }

    /// Makes another handle of this object, which has just been opened: a panic poisons both.
    pub(crate) fn share_poison(&self, other: &Self) {
        // SAFETY: objects are boxed, and their close calls `leave` before the memory is freed.
        unsafe { self.poison.join(&other.poison) };
    }

    /// The C structure of an open object, whose fields the application may read at any time.
    pub(crate) fn c(&self) -> *mut K::C {
        self.c.get()
    }

    /// Closes an object. After an error it is still open; [`Kind::finish`] may have changed it.
    ///
    /// # Errors
    /// `EBUSY`: the object has users. Those of [`Kind::finish`].
    ///
    /// # Safety
    /// As [`object`]; no other call on the object runs or follows.
    pub(crate) unsafe fn close(handle: *mut fid) -> Result<()> {
        // SAFETY: the caller passes NULL or a readable fid, and makes no other call on the object.
        let object = unsafe { object::<K>(handle)? };
        object
            .users
            .close()
            .inspect_err(|_| in_use(K::CLASS, object.users.count()))?;
        // also after a panic, so that a later close can succeed
        let reopened = Reopened(&object.users);
        log::explained("fi_close", || K::finish(object))?;
        std::mem::forget(reopened);
        let object = handle.cast::<Self>();
        // SAFETY: from here on this function is the only user of the fid: `Kind::finish` has
        // removed it from the poll sets. The tables are replaced first, so that the handle is
        // refused even if dropping the body panics.
        unsafe {
            let header = handle;
            (*header).fclass = FI_CLASS_UNSPEC;
            (*header).ops = (&raw const closed::FID).cast_mut();
            K::retire(&mut *(*object).c.get());
            ManuallyDrop::drop(&mut (*object).body);
            std::ptr::drop_in_place(&raw mut (*object).users);
            (*object).poison.leave();
            std::ptr::drop_in_place(&raw mut (*object).poison);
        }
        quarantine(object.cast(), Layout::new::<Self>());
        Ok(())
    }
}

/// The name of a class of fids.
fn class_name(class: usize) -> &'static str {
    match class {
        FI_CLASS_FABRIC => "FI_CLASS_FABRIC",
        FI_CLASS_DOMAIN => "FI_CLASS_DOMAIN",
        FI_CLASS_EP => "FI_CLASS_EP",
        FI_CLASS_PEP => "FI_CLASS_PEP",
        FI_CLASS_SRX_CTX => "FI_CLASS_SRX_CTX",
        FI_CLASS_EQ => "FI_CLASS_EQ",
        FI_CLASS_CQ => "FI_CLASS_CQ",
        FI_CLASS_CNTR => "FI_CLASS_CNTR",
        FI_CLASS_MR => "FI_CLASS_MR",
        FI_CLASS_AV => "FI_CLASS_AV",
        FI_CLASS_POLL => "FI_CLASS_POLL",
        FI_CLASS_CONNREQ => "FI_CLASS_CONNREQ",
        _ => "an internal class",
    }
}

/// Logs the reason of a refusal at `info`.
#[cold]
fn not_open(class: usize, handle: *const fid) -> FiErrno {
    let class = class_name(class);
    refused!(
        FI_LOG_CORE,
        EINVAL,
        "{handle:?} is not an open object of class {class}"
    )
}

/// Logs the reason of a refused close at `info`.
#[cold]
fn in_use(class: usize, users: usize) {
    let class = class_name(class);
    if users != CLOSED_MARK {
        info!(
            FI_LOG_CORE,
            "fi_close of {class}: -FI_EBUSY: {users} open objects use it"
        );
    }
}

/// Memory of closed objects, oldest first.
static CLOSED: PerProcess<Mutex<VecDeque<(usize, Layout)>>> =
    PerProcess::new(Mutex::new(VecDeque::new()));

fn quarantine(memory: *mut u8, layout: Layout) {
    let mut list = CLOSED.get().lock();
    list.push_back((memory.expose_provenance(), layout));
    if list.len() > QUARANTINE
        && let Some((oldest, layout)) = list.pop_front()
    {
        // SAFETY: `memory` came from a Box of that layout, its contents are dropped already, and
        // this is the only place that frees it.
        unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(oldest), layout) };
    }
}

/// The number of objects that use this one. A closed object cannot get new users.
#[derive(Default)]
pub(crate) struct Users(AtomicUsize);

const CLOSED_MARK: usize = usize::MAX;

impl Users {
    /// Counts a user until the guard is dropped.
    ///
    /// # Errors
    /// `EINVAL`: the object is being closed.
    pub(crate) fn add(self: &Arc<Self>) -> Result<User> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
                (n != CLOSED_MARK).then_some(n + 1)
            })
            .map(|_| User(Arc::clone(self)))
            .map_err(|_| FiErrno::EINVAL)
    }

    fn close(&self) -> Result<()> {
        self.0
            .compare_exchange(0, CLOSED_MARK, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(|n| {
                if n == CLOSED_MARK {
                    FiErrno::EINVAL
                } else {
                    FiErrno::EBUSY
                }
            })
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Reopens an object whose close has not succeeded, when it is dropped.
struct Reopened<'a>(&'a Users);

impl Drop for Reopened<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

/// One use of another object, held by the user.
pub(crate) struct User(Arc<Users>);

impl Drop for User {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}
