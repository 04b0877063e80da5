//! Address handles.

use rdma_core_sys::ibv_ah;

/// An address handle. The C object comes first.
#[repr(C)]
pub(crate) struct Ah {
    pub(crate) object: ibv_ah,
    /// The emulated node.
    pub(crate) node: u32,
    /// Traffic class and flow label, as a global route header has them.
    pub(crate) flow: u32,
}

impl Ah {
    /// # Safety
    /// `ah` must come from `ibv_create_ah` and be live.
    pub(crate) unsafe fn from_ptr<'a>(ah: *mut ibv_ah) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*ah.cast::<Self>() }
    }
}
