//! `fid_poll`: poll sets, `fi_poll(3)`. One call checks several queues and counters, and
//! returns the ready ones.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::queue::QueueDomain;

use crate::cntr::Cntr;
use crate::cq::Cq;
use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on, probe};
use crate::ffi::stub;
use crate::poll_members::{Member, Members, What};

/// An open poll set.
pub(crate) struct Poll {
    domain: Arc<QueueDomain>,
    members: Arc<Members>,
    _user: User,
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

// The default `Kind::finish` is enough: freeing the set releases its members.
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
                members: Arc::default(),
                _user: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// Adds the queue or counter with this handle to a set.
///
/// # Errors
/// `EINVAL`: neither a completion queue nor a counter, or it is being closed. `EDOMAIN`: an object
/// of another domain.
///
/// # Safety
/// `handle` is NULL or readable as a fid.
unsafe fn add_member(poll: &Poll, handle: *mut fid) -> Result<()> {
    // SAFETY: the caller passes NULL or a readable fid.
    let (what, owner, memberships, _open) = unsafe {
        if let Some(cq) = probe::<Cq>(handle) {
            let what = What::Cq(Arc::clone(&cq.engine));
            (what, cq.engine.domain(), &cq.polls, cq.users.add()?)
        } else {
            let cntr = object::<Cntr>(handle)?;
            let what = What::Cntr(Arc::clone(&cntr.engine));
            (what, cntr.engine.domain(), &cntr.polls, cntr.users.add()?)
        }
    };
    if !Arc::ptr_eq(owner, &poll.domain) {
        return Err(FiErrno::EDOMAIN);
    }
    let handle = handle.expose_provenance();
    memberships.add(&poll.members, handle);
    let mut members = poll.members.lock();
    if members.iter().all(|member| member.handle != handle) {
        members.push(Member { handle, what });
    }
    Ok(())
}

unsafe extern "C" fn add(poll: *mut fid_poll, handle: *mut fid, flags: u64) -> c_int {
    // SAFETY: a poll set by the contract of fi_poll_add(3).
    let poll = unsafe { object::<Poll>(poll) };
    on(poll, |poll| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: a fid by the contract of fi_poll_add(3).
        unsafe { add_member(poll, handle)? };
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
        let member = members.remove(index.ok_or(FiErrno::EINVAL)?);
        drop((members, member));
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
        // A member that another thread removes meanwhile may hide the next one from this call.
        for at in 0.. {
            // progress is made without the lock, for which a close of a member waits
            let Some(member) = poll.members.lock().get(at).cloned() else {
                break;
            };
            let ready = match &member.what {
                What::Cq(cq) => cq.poll_ready(),
                What::Cntr(cntr) if found < room => cntr.poll(),
                // its change is reported only once: by a call that has room
                What::Cntr(cntr) => {
                    let _ = cntr.progress(); // a wait or a read reports its failure
                    false
                }
            };
            if !ready || found >= room {
                continue;
            }
            let members = poll.members.lock();
            if members.iter().any(|still| still.what == member.what) {
                let handle: *mut fid = std::ptr::with_exposed_provenance_mut(member.handle);
                // SAFETY: the member's fid is open while the set has the member, which leaves under
                // this lock before a close changes the fid; `contexts` has room for `count`
                // elements by the contract of fi_poll(3). The context is read now, because the
                // application may change it.
                unsafe { contexts.add(found).write((*handle).context) };
                found += 1;
            }
        }
        Ok(c_int::try_from(found).unwrap_or(c_int::MAX))
    })
}
