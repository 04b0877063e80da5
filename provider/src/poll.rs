//! `fid_poll`: poll sets, `fi_poll(3)`. One call checks several queues and counters, and
//! returns the ready ones.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libfabric_sys::*;
use parking_lot::Mutex;
use weft::errno::{FiErrno, Result};
use weft::queue::{CompletionQueue, Counter, QueueDomain};

use crate::cntr::Cntr;
use crate::cq::Cq;
use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on, probe};
use crate::ffi::stub;

/// An open poll set.
pub(crate) struct Poll {
    domain: Arc<QueueDomain>,
    members: Mutex<Vec<Member>>,
    _user: User,
}

/// A member of a poll set.
struct Member {
    /// The address of its fid.
    handle: usize,
    what: What,
    _user: User,
}

enum What {
    Cq(Arc<CompletionQueue>),
    Cntr(Arc<Counter>),
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Poll>),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: fi_ops_poll = fi_ops_poll {
    size: size_of::<fi_ops_poll>(),
    poll: Some(poll),
    poll_add: Some(add),
    poll_del: Some(del),
};

// The default `Kind::finish` is enough: freeing the set releases its members, which can't be closed
// while the set holds them (fi_poll(3)).
// SAFETY: `fid_poll` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Poll {
    type C = fid_poll;
    const CLASS: usize = FI_CLASS_POLL;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_poll) {
        c.ops = (&raw const stub::closed::POLL).cast_mut();
    }
}

/// `fi_poll_open(3)`. NULL selects the default attributes.
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_poll_attr,
    out: *mut *mut fid_poll,
) -> c_int {
    // SAFETY: a domain by the contract of fi_poll_open(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: NULL, or a structure of the same size in every release.
        if unsafe { attr.as_ref() }.is_some_and(|attr| attr.flags != 0) {
            return Err(FiErrno::EBADFLAGS);
        }
        let user = domain.users.add()?;
        let object = Object::open(
            fid_poll {
                fid: header::<Poll>(std::ptr::null_mut()),
                ops: (&raw const OPS).cast_mut(),
            },
            Poll {
                domain: Arc::clone(domain.engine.queues()),
                members: Mutex::new(Vec::new()),
                _user: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// The member that a handle stands for in a poll set of this domain.
///
/// # Errors
/// `EINVAL`: neither a completion queue nor a counter. `EDOMAIN`: an object of another domain.
///
/// # Safety
/// `handle` is NULL or readable as a fid.
unsafe fn member(domain: &Arc<QueueDomain>, handle: *mut fid) -> Result<Member> {
    // SAFETY: the caller passes NULL or a readable fid.
    let (what, owner, user) = unsafe {
        if let Some(cq) = probe::<Cq>(handle) {
            let owner = Arc::clone(cq.engine.domain());
            (What::Cq(Arc::clone(&cq.engine)), owner, cq.users.add()?)
        } else {
            let cntr = object::<Cntr>(handle)?;
            let owner = Arc::clone(cntr.engine.domain());
            let what = What::Cntr(Arc::clone(&cntr.engine));
            (what, owner, cntr.users.add()?)
        }
    };
    if !Arc::ptr_eq(&owner, domain) {
        return Err(FiErrno::EDOMAIN);
    }
    Ok(Member {
        handle: handle.expose_provenance(),
        what,
        _user: user,
    })
}

unsafe extern "C" fn add(poll: *mut fid_poll, handle: *mut fid, flags: u64) -> c_int {
    // SAFETY: a poll set by the contract of fi_poll_add(3).
    let poll = unsafe { object::<Poll>(poll) };
    on(poll, |poll| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: a fid by the contract of fi_poll_add(3).
        let new = unsafe { member(&poll.domain, handle)? };
        let mut members = poll.members.lock();
        if members.iter().all(|member| member.handle != new.handle) {
            members.push(new);
        }
        Ok(0)
    })
}

unsafe extern "C" fn del(poll: *mut fid_poll, handle: *mut fid, flags: u64) -> c_int {
    // SAFETY: a poll set by the contract of fi_poll_del(3).
    let poll = unsafe { object::<Poll>(poll) };
    on(poll, |poll| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        let mut members = poll.members.lock();
        let index = members
            .iter()
            .position(|member| member.handle == handle.addr());
        members.remove(index.ok_or(FiErrno::EINVAL)?);
        Ok(0)
    })
}

/// `fi_poll`: makes progress on all members, and returns the contexts of the ready ones, at most
/// `count`.
unsafe extern "C" fn poll(poll: *mut fid_poll, contexts: *mut *mut c_void, count: c_int) -> c_int {
    // SAFETY: a poll set by the contract of fi_poll(3).
    let poll = unsafe { object::<Poll>(poll) };
    on(poll, |poll| {
        let room = usize::try_from(count).map_err(|_| FiErrno::EINVAL)?;
        if contexts.is_null() && room != 0 {
            return Err(FiErrno::EINVAL);
        }
        let mut found = 0;
        for member in poll.members.lock().iter() {
            // Counters beyond `count` are not polled: a counter's change is reported only once.
            let ready = match &member.what {
                What::Cq(cq) => cq.poll_ready(),
                What::Cntr(cntr) if found < room => cntr.poll(),
                What::Cntr(_) => false,
            };
            if ready && found < room {
                let handle: *mut fid = std::ptr::with_exposed_provenance_mut(member.handle);
                // SAFETY: the member's fid is open while the set holds it; `contexts` has room for
                // `count` elements by the contract of fi_poll(3). The context is read now, because
                // the application may change it.
                unsafe { contexts.add(found).write((*handle).context) };
                found += 1;
            }
        }
        Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}
