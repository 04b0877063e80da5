//! `fid_ep`: endpoints with many peers (`FI_EP_RDM`), and their operations.

use std::ffi::c_void;
use std::sync::Arc;

use libfabric_sys::{
    FI_MULTI_RECV, fi_addr_t, fi_ops_atomic, fi_ops_msg, fi_ops_rma, fi_ops_tagged,
};
use weft::av::FiAddr;
use weft::errno::Result;
use weft::flags::{self, Direction, Flags};
use weft::rdm::{Endpoint, LocalIov, RemoteIov};

use crate::data::traits::{
    MsgReceive, MsgSend, Remote, Rma, TX_FLAGS, Tag, TaggedReceive, TaggedSend, Transmit,
};
use crate::ep::common::EpCommon;
use crate::ep::op_flags::OpFlags;
use crate::getinfo;

/// The calls of an endpoint that transfer data.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) msg: &'static fi_ops_msg,
    pub(crate) tagged: &'static fi_ops_tagged,
    pub(crate) rma: &'static fi_ops_rma,
    pub(crate) atomic: &'static fi_ops_atomic,
}

/// An open endpoint.
pub(crate) struct RdmEp {
    pub(crate) engine: Arc<Endpoint>,
    /// The API version of the application.
    pub(crate) api_version: u32,
    /// Maximum length of injected data and of a message, in bytes.
    pub(crate) inject_size: usize,
    pub(crate) max_msg_size: usize,
    /// Whether atomics can be initiated.
    pub(crate) atomics: bool,
    /// The calls that the capabilities permit.
    pub(crate) tables: Tables,
    pub(crate) domain: Arc<weft::domain::Domain>,
    pub(crate) common: EpCommon,
}

impl OpFlags for RdmEp {
    fn op_flags(&self) -> &flags::OpFlags {
        self.engine.op_flags()
    }

    fn allowed_op_flags(&self, direction: Direction) -> u64 {
        getinfo::RDM.op_flags(direction, self.engine.is_durable())
    }
}

impl Transmit for RdmEp {
    fn post_delayed(&self) {
        self.engine.post_delayed();
    }
}

impl MsgReceive for RdmEp {
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

/// The remote CQ data that an operation sends.
#[inline(always)]
fn sent_data(data: Option<u64>, flags: Option<Flags>) -> Option<u64> {
    data.filter(|_| flags.is_none_or(|flags| flags.contains(Flags::REMOTE_CQ_DATA)))
}

impl MsgSend for RdmEp {
    const TX_FLAGS: u64 = TX_FLAGS;

    #[inline(always)]
    unsafe fn send(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let (to, data) = (FiAddr(to), sent_data(data, flags));
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.send(to, None, local, data, context, flags) }
    }

    #[inline(always)]
    unsafe fn inject(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.inject(FiAddr(to), None, buf, len, data) }
    }
}

impl TaggedReceive for RdmEp {
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

impl TaggedSend for RdmEp {
    #[inline(always)]
    unsafe fn tsend(
        &self,
        to: fi_addr_t,
        tag: u64,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let (to, tag, data) = (FiAddr(to), Some(tag), sent_data(data, flags));
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.send(to, tag, local, data, context, flags) }
    }

    #[inline(always)]
    unsafe fn tinject(
        &self,
        to: fi_addr_t,
        tag: u64,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.inject(FiAddr(to), Some(tag), buf, len, data) }
    }
}

impl Remote<'_> {
    /// Calls `body` with the ranges of the operation on these local buffers.
    #[inline(always)]
    fn with_ranges<R>(self, local: &LocalIov<'_>, body: impl FnOnce(&[RemoteIov]) -> R) -> R {
        match self {
            Self::One { addr, key } => {
                let len = local.len();
                body(&[RemoteIov { addr, len, key }])
            }
            Self::List(list) => body(list),
        }
    }
}

impl Rma for RdmEp {
    const RMA_IOV_LIMIT: usize = getinfo::RDM.rma_iov_limit;

    fn writes_data(&self) -> bool {
        true
    }

    #[inline(always)]
    unsafe fn read(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let from = FiAddr(from);
        remote.with_ranges(&local, |remote| {
            // SAFETY: the caller keeps the contract of the trait.
            unsafe { self.engine.read(from, local, remote, context, flags) }
        })
    }

    #[inline(always)]
    unsafe fn write(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let (to, data) = (FiAddr(to), sent_data(data, flags));
        remote.with_ranges(&local, |remote| {
            // SAFETY: the caller keeps the contract of the trait.
            unsafe { self.engine.write(to, local, remote, data, context, flags) }
        })
    }

    #[inline(always)]
    unsafe fn inject_write(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        target: (u64, u64),
        data: Option<u64>,
    ) -> Result<()> {
        let (to, from) = (FiAddr(to), (buf, len));
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { self.engine.inject_write(to, from, target, data) }
    }
}
