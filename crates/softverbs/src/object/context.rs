//! Contexts: the device as an application has opened it.

use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use rdma_core_sys::*;

use crate::dm::Origin;
use crate::events::AsyncQueue;
use crate::peer::Peer;
use crate::process::Process;
use crate::sync::Arc;
use crate::sys::{Errno, Res, room};

/// An open device. The C context is inside the extended one, which comes first.
#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    pub(crate) process: &'static Process,
    pub(crate) events: AsyncQueue,
    /// Number of objects of the context.
    pub(crate) children: AtomicU32,
    /// The context that the command descriptor names: this context, or the one that it imports.
    pub(crate) origin: Origin,
    /// Owns the descriptor in `cmd_fd`.
    _command: OwnedFd,
}

impl Context {
    /// # Safety
    /// `context` must come from [`Self::make`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: the C context is this field of the first field; the caller promises the rest.
        unsafe {
            &*context
                .byte_sub(offset_of!(verbs_context, context))
                .cast::<Self>()
        }
    }

    /// The process, unless this is a forked child of it.
    pub(crate) fn live(&self) -> Res<&'static Process> {
        self.process.live()
    }

    /// A context with the operations in `verbs`: a separate context, or one that shares the objects
    /// of the context that `origin` names. The context owns the descriptor of `command`, and closes
    /// it.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`: `command` was not called.
    pub(crate) fn make(
        mut verbs: verbs_context,
        device: *mut ibv_device,
        process: &'static Process,
        origin: Origin,
        command: impl FnOnce() -> OwnedFd,
    ) -> Res<*mut ibv_context> {
        let room = room()?;
        let events = AsyncQueue::new(process)?;
        let command = command();
        let context = &mut verbs.context;
        context.device = device;
        context.cmd_fd = command.as_raw_fd();
        context.async_fd = events.epoll.fd();
        context.num_comp_vectors = 1;
        // as `verbs_get_ctx` of verbs.h expects: the context is inside a `verbs_context`
        context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        let this = Box::into_raw(Box::write(
            room,
            Self {
                verbs,
                process,
                events,
                children: AtomicU32::new(0),
                origin,
                _command: command,
            },
        ));
        // SAFETY: just made; the mutex is initialised in place.
        unsafe {
            let context = &raw mut (*this).verbs.context;
            libc::pthread_mutex_init(&raw mut (*context).mutex, std::ptr::null());
            Ok(context)
        }
    }

    /// Frees a context that no object refers to.
    ///
    /// # Safety
    /// `context` must come from [`Self::make`] and be live; it is freed.
    pub(crate) unsafe fn end(context: *mut ibv_context) {
        // SAFETY: the caller promises that; `make` has used `Box::into_raw`.
        unsafe {
            libc::pthread_mutex_destroy(&raw mut (*context).mutex);
            drop(Box::from_raw(
                context
                    .byte_sub(offset_of!(verbs_context, context))
                    .cast::<Self>(),
            ));
        }
    }
}

/// The process of the context that `origin` names.
///
/// # Errors
/// `ESRCH`: the process has ended. Those of mapping its segment.
pub(crate) fn origin_peer(process: &Process, origin: Origin) -> Res<Arc<Peer>> {
    let peer = process.peer(origin.slot)?;
    if peer.identity.cookie == origin.cookie {
        Ok(peer)
    } else {
        Err(Errno(libc::ESRCH))
    }
}
