//! `fid_ep`: endpoints with many peers (`FI_EP_RDM`), and their operations.

use std::ffi::c_void;
use std::sync::Arc;

use libfabric_sys::{
    FI_COMMIT_COMPLETE, FI_MULTI_RECV, FI_REMOTE_CQ_DATA, fi_addr_t, fi_ops_atomic, fi_ops_msg,
    fi_ops_rma, fi_ops_tagged,
};
use weft::av::FiAddr;
use weft::errno::Result;
use weft::flags::Flags;
use weft::rdm::{Endpoint, LocalIov, RemoteIov};

use crate::ep_common::EpCommon;
use crate::ep_traits::{Posts, Receives, Rma, Sends, TX_FLAGS, Tag, Tagged, TaggedReceives};
use crate::getinfo;
use crate::op_flags::{Direction, OpFlags};

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
    fn op_flags(&self, direction: Direction) -> Flags {
        match direction {
            Direction::Transmit => self.engine.tx_op_flags(),
            Direction::Receive => self.engine.rx_op_flags(),
        }
    }

    fn set_op_flags(&self, direction: Direction, flags: Flags) {
        match direction {
            Direction::Transmit => self.engine.set_tx_op_flags(flags),
            Direction::Receive => self.engine.set_rx_op_flags(flags),
        }
    }

    fn allowed_op_flags(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Transmit if self.engine.is_durable() => {
                getinfo::RDM.tx_op_flags | FI_COMMIT_COMPLETE
            }
            Direction::Transmit => getinfo::RDM.tx_op_flags,
            Direction::Receive => getinfo::RDM.rx_op_flags,
        }
    }
}

impl Posts for RdmEp {
    fn post_delayed(&self) {
        self.engine.post_delayed();
    }
}

impl Receives for RdmEp {
    const RX_FLAGS: u64 = crate::ep_traits::RX_FLAGS | FI_MULTI_RECV;

    #[inline(always)]
    unsafe fn recv(&self, from: fi_addr_t, local: LocalIov<'_>, context: usize) -> Result<()> {
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.recv(FiAddr(from), None, local, context, None) }
    }

    #[inline(always)]
    unsafe fn recv_msg(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let from = FiAddr(from);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.recv(from, None, local, context, Some(flags)) }
    }
}

impl Sends for RdmEp {
    const TX_FLAGS: u64 = TX_FLAGS;

    #[inline(always)]
    unsafe fn send(&self, to: fi_addr_t, local: LocalIov<'_>, context: usize) -> Result<()> {
        let to = FiAddr(to);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.send(to, None, local, None, context, None) }
    }

    #[inline(always)]
    unsafe fn send_data(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        data: u64,
        context: usize,
    ) -> Result<()> {
        let (to, data) = (FiAddr(to), Some(data));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.send(to, None, local, data, context, None) }
    }

    #[inline(always)]
    unsafe fn send_msg(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let to = FiAddr(to);
        let data = (flags.bits() & FI_REMOTE_CQ_DATA != 0).then_some(data);
        let flags = Some(flags);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.send(to, None, local, data, context, flags) }
    }

    #[inline(always)]
    unsafe fn inject(&self, to: fi_addr_t, buf: *const c_void, len: usize) -> Result<()> {
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.inject(FiAddr(to), None, buf, len, None) }
    }

    #[inline(always)]
    unsafe fn inject_data(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        data: u64,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.inject(FiAddr(to), None, buf, len, Some(data)) }
    }
}

impl TaggedReceives for RdmEp {
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
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors;
        // and that of `Tagged::trecv`.
        unsafe { self.engine.recv(FiAddr(from), tag, local, context, flags) }
    }
}

impl Tagged for RdmEp {
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
        let (to, tag) = (FiAddr(to), Some(tag));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
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
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.inject(FiAddr(to), Some(tag), buf, len, data) }
    }
}

/// One range of the peer's memory.
#[inline(always)]
fn range(addr: u64, len: usize, key: u64) -> [RemoteIov; 1] {
    [RemoteIov { addr, len, key }]
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
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let remote = range(addr, local.len(), key);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe {
            self.engine
                .read(FiAddr(from), local, &remote, context, None)
        }
    }

    #[inline(always)]
    unsafe fn read_msg(
        &self,
        from: fi_addr_t,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let from = FiAddr(from);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.read(from, local, remote, context, Some(flags)) }
    }

    #[inline(always)]
    unsafe fn write(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let remote = range(addr, local.len(), key);
        let to = FiAddr(to);
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.write(to, local, &remote, None, context, None) }
    }

    #[inline(always)]
    unsafe fn write_data(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        data: u64,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let remote = range(addr, local.len(), key);
        let (to, data) = (FiAddr(to), Some(data));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.write(to, local, &remote, data, context, None) }
    }

    #[inline(always)]
    unsafe fn write_msg(
        &self,
        to: fi_addr_t,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let data = (flags.bits() & FI_REMOTE_CQ_DATA != 0).then_some(data);
        let (to, flags) = (FiAddr(to), Some(flags));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.write(to, local, remote, data, context, flags) }
    }

    #[inline(always)]
    unsafe fn inject_write(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let (to, from) = (FiAddr(to), (buf, len));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.inject_write(to, from, (addr, key), None) }
    }

    #[inline(always)]
    unsafe fn inject_write_data(
        &self,
        to: fi_addr_t,
        buf: *const c_void,
        len: usize,
        data: u64,
        addr: u64,
        key: u64,
    ) -> Result<()> {
        let (to, from) = (FiAddr(to), (buf, len));
        // SAFETY: the caller keeps the contract of `Receives::recv`: valid buffers and descriptors.
        unsafe { self.engine.inject_write(to, from, (addr, key), Some(data)) }
    }
}
