//! `fid_ep`: shared receive contexts of endpoints with many peers (`fi_srx_context(3)`), and their
//! operations.

use std::sync::Arc;

use libfabric_sys::{FI_MULTI_RECV, fi_addr_t};
use weft::av::FiAddr;
use weft::errno::Result;
use weft::flags::Flags;
use weft::rdm::{LocalIov, SharedRx};

use crate::data::traits::{MsgReceive, Tag, TaggedReceive};
use crate::ffi::fid::User;

/// An open shared receive context.
pub(crate) struct RdmSrx {
    pub(crate) engine: Arc<SharedRx>,
    pub(crate) _domain: User,
}

impl MsgReceive for RdmSrx {
    const RX_FLAGS: u64 = crate::data::traits::RX_FLAGS | FI_MULTI_RECV;

    #[inline(always)]
    unsafe fn recv(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.recv(FiAddr(from), None, local, context, flags) }
    }
}

impl TaggedReceive for RdmSrx {
    #[inline(always)]
    unsafe fn trecv(
        &self,
        from: fi_addr_t,
        tag: Tag,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let tag = Some((tag.tag, tag.ignore));
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.recv(FiAddr(from), tag, local, context, flags) }
    }
}
