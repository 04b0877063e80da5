//! XRC domains, and the objects in them.

use std::fs::File;
use std::io::Error;
use std::os::fd::AsRawFd;

use rdma_core_sys::*;

use super::{Device, Pair, Queue, Shared, check, last_error, verbs};

/// A handle on a domain.
#[derive(Clone, Copy)]
pub(crate) struct Domain {
    xrcd: *mut ibv_xrcd,
}

fn made<T>(object: *mut T) -> Result<*mut T, Error> {
    if object.is_null() {
        Err(last_error())
    } else {
        Ok(object)
    }
}

impl Device {
    /// `ibv_open_xrcd` of a file, with flags such as `O_CREAT`.
    ///
    /// # Errors
    /// Those of the man page.
    pub(crate) fn domain(&self, path: &str, flags: i32) -> Result<Domain, Error> {
        let file = File::open(path)?;
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: file.as_raw_fd(),
            oflags: flags,
        };
        // SAFETY: live context, valid attributes.
        let xrcd = made(unsafe { ibv_open_xrcd(self.context, &raw mut init) })?;
        Ok(Domain { xrcd })
    }

    /// A shared receive queue of an XRC domain, and its number.
    pub(crate) fn shared_in(&self, domain: Domain, queue: &Queue, receives: u32) -> (Shared, u32) {
        let mut init = ibv_srq_init_attr_ex {
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd,
            xrcd: domain.xrcd,
            cq: queue.cq,
            ..Default::default()
        };
        init.attr.max_wr = receives;
        init.attr.max_sge = 1;
        let mut number = 0;
        // SAFETY: live objects, valid attributes, a writable number.
        let srq = unsafe {
            let srq = made(ibv_create_srq_ex(self.context, &raw mut init)).expect("a shared queue");
            check(ibv_get_srq_num(srq, &raw mut number)).expect("ibv_get_srq_num");
            srq
        };
        (Shared { srq }, number)
    }

    /// A new target.
    pub(crate) fn target(&self, domain: Domain) -> Pair {
        let mut init = ibv_qp_init_attr_ex {
            comp_mask: IBV_QP_INIT_ATTR_XRCD,
            qp_type: IBV_QPT_XRC_RECV,
            xrcd: domain.xrcd,
            ..Default::default()
        };
        // SAFETY: live objects, valid attributes.
        let qp = made(unsafe { ibv_create_qp_ex(self.context, &raw mut init) });
        Pair {
            qp: qp.expect("a target"),
            kind: IBV_QPT_XRC_RECV,
        }
    }

    /// `ibv_open_qp`.
    ///
    /// # Errors
    /// `EINVAL`: no process holds a target with this number.
    pub(crate) fn hold(&self, domain: Domain, qp_num: u32) -> Result<Pair, Error> {
        let mut attr = ibv_qp_open_attr {
            comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
            qp_num,
            xrcd: domain.xrcd,
            qp_type: IBV_QPT_XRC_RECV,
            ..Default::default()
        };
        // SAFETY: live objects, valid attributes.
        let qp = made(unsafe { ibv_open_qp(self.context, &raw mut attr) })?;
        let kind = IBV_QPT_XRC_RECV;
        Ok(Pair { qp, kind })
    }

    /// An XRC initiator queue pair, in INIT.
    pub(crate) fn initiator(&self, queue: &Queue) -> Pair {
        self.pair(IBV_QPT_XRC_SEND, queue, None)
    }

    /// Connects a target to the initiator with this number, starting in RESET.
    pub(crate) fn connect_target(&self, target: &Pair, number: u32) {
        target.enter_init();
        self.connect(
            target,
            number,
            super::Retries {
                timeout: 14,
                count: 7,
            },
        );
    }
}

impl Domain {
    /// `ibv_close_xrcd`.
    ///
    /// # Errors
    /// `EBUSY`: an object of the domain exists.
    pub(crate) fn leave(self) -> Result<(), Error> {
        // SAFETY: live; not used after success.
        check(unsafe { ibv_close_xrcd(self.xrcd) })
    }
}

impl Shared {
    /// `ibv_destroy_srq`.
    ///
    /// # Errors
    /// `EBUSY`: a stopped process is in the middle of a copy.
    pub(crate) fn destroy(self) -> Result<(), Error> {
        // SAFETY: live; not used after success.
        check(unsafe { (verbs().ibv_destroy_srq)(self.srq) })
    }
}
