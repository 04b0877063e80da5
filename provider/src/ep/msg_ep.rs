//! `fid_ep`: connected endpoints, and their operations. The endpoint has one peer, so operations
//! ignore the address argument.

use std::ffi::c_void;
use std::sync::Arc;

use libfabric_sys::{FI_MATCH_COMPLETE, fi_addr_t, fi_ops_atomic, fi_ops_rma};
use weft::errno::Result;
use weft::flags::{self, Direction, Flags};
use weft::msg::{Endpoint, LocalIov};

use crate::data::traits::{MsgReceive, MsgSend, Remote, Rma, TX_FLAGS, Transmit};
use crate::ep::common::EpCommon;
use crate::ep::op_flags::OpFlags;
use crate::getinfo;

/// The calls of an endpoint that depend on its capabilities.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) rma: &'static fi_ops_rma,
    pub(crate) atomic: &'static fi_ops_atomic,
}

/// An open endpoint.
pub(crate) struct Ep {
    pub(crate) engine: Arc<Endpoint>,
    /// Whether RMA writes may carry remote CQ data (`FI_RX_CQ_DATA` was negotiated).
    pub(crate) rma_data: bool,
    /// The calls that its capabilities permit.
    pub(crate) tables: Tables,
    pub(crate) common: EpCommon,
}

impl OpFlags for Ep {
    fn op_flags(&self) -> &flags::OpFlags {
        self.engine.op_flags()
    }

    fn allowed_op_flags(&self, direction: Direction) -> u64 {
        getinfo::MSG.op_flags(direction, self.engine.is_durable())
    }
}

impl Transmit for Ep {
    fn post_delayed(&self) {
        self.engine.post_delayed();
    }
}

impl MsgReceive for Ep {
    #[inline(always)]
    unsafe fn recv(
        &self,
        _: fi_addr_t,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match flags {
                None => self.engine.recv(local, context),
                Some(flags) => self.engine.recv_msg(local, context, flags),
            }
        }
    }
}

impl MsgSend for Ep {
    // A reliable send is acknowledged when it has consumed a receive, so it has been matched with a
    // buffer of the application then.
    const TX_FLAGS: u64 = TX_FLAGS | FI_MATCH_COMPLETE;

    #[inline(always)]
    unsafe fn send(
        &self,
        _: fi_addr_t,
        local: LocalIov<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let engine = &self.engine;
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match (data, flags) {
                (None, None) => engine.send(local, context),
                (Some(data), None) => engine.send_data(local, data, context),
                (data, Some(flags)) => {
                    engine.send_msg(local, data.unwrap_or_default(), context, flags)
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn inject(
        &self,
        _: fi_addr_t,
        buf: *const c_void,
        len: usize,
        data: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match data {
                None => self.engine.inject(buf, len),
                Some(data) => self.engine.inject_data(buf, len, data),
            }
        }
    }
}

impl Rma for Ep {
    const RMA_IOV_LIMIT: usize = getinfo::MSG.rma_iov_limit;

    fn writes_data(&self) -> bool {
        self.rma_data
    }

    #[inline(always)]
    unsafe fn read(
        &self,
        _: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match remote {
                Remote::One { addr, key } => self.engine.read(local, addr, key, context),
                Remote::List(list) => {
                    let flags = flags.unwrap_or_default();
                    self.engine.read_msg(local, list, context, flags)
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn write(
        &self,
        _: fi_addr_t,
        local: LocalIov<'_>,
        remote: Remote<'_>,
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let engine = &self.engine;
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match (remote, data) {
                (Remote::One { addr, key }, None) => engine.write(local, addr, key, context),
                (Remote::One { addr, key }, Some(data)) => {
                    engine.write_data(local, data, addr, key, context)
                }
                (Remote::List(list), data) => {
                    let (data, flags) = (data.unwrap_or_default(), flags.unwrap_or_default());
                    engine.write_msg(local, list, data, context, flags)
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn inject_write(
        &self,
        _: fi_addr_t,
        buf: *const c_void,
        len: usize,
        (addr, key): (u64, u64),
        data: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match data {
                None => self.engine.inject_write(buf, len, addr, key),
                Some(data) => self.engine.inject_write_data(buf, len, data, addr, key),
            }
        }
    }
}
