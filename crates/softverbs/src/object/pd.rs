//! Protection domains.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::{ibv_context, ibv_pd, ibv_td};

use super::Context;

/// A protection domain. The C object comes first.
#[repr(C)]
pub(crate) struct Pd {
    object: ibv_pd,
    /// Unique in this process.
    pub(crate) number: u32,
    /// Number of objects of the domain.
    pub(crate) children: AtomicU32,
    /// The protection and thread domain of a parent domain; NULL for others.
    pub(crate) made_of: (*mut ibv_pd, *mut ibv_td),
    pub(crate) import: Option<Import>,
}

/// The exporting domain of an imported domain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Import {
    /// Its number in the exporting process.
    pub(crate) handle: u32,
    /// Whether the exporting process is another one.
    pub(crate) foreign: bool,
}

impl Pd {
    /// # Safety
    /// `pd` must come from [`Self::make`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*pd.cast::<Self>() }
    }

    /// A new domain as a C object, in its [`crate::sys::room`].
    pub(crate) fn make(
        room: Box<MaybeUninit<Self>>,
        context: *mut ibv_context,
        number: u32,
        made_of: (*mut ibv_pd, *mut ibv_td),
    ) -> *mut ibv_pd {
        let this = Self {
            object: ibv_pd {
                context,
                handle: number,
            },
            number,
            children: AtomicU32::new(0),
            made_of,
            import: None,
        };
        Box::into_raw(Box::write(room, this)).cast()
    }

    /// # Safety
    /// `pd` must be live and imported; it is freed.
    pub(crate) unsafe fn end_imported(pd: *mut ibv_pd) {
        // SAFETY: the caller promises that; a context outlives its domains.
        let (this, context) = unsafe { (Self::from_ptr(pd), Context::from_ptr((*pd).context)) };
        if let Some(import) = this.import.filter(|import| import.foreign) {
            let imports = &context.process.imports;
            imports.give(context.origin.cookie, import.handle);
        }
        context.children.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by `Box::into_raw` in `Pd::make`.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
    }
}
