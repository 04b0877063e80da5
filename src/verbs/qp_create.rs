//! Creation of queue pairs of each transport: on an identifier of the connection manager, which
//! then changes their states, and for datagrams without one.

#![allow(unsafe_code, reason = "calls verbs")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::qp::{ExecuteCalls, Objects, Owner};
use super::wr::FlushCalls;
use super::{CmId, Cq, Device, Pd, Qp, QpConfig, QpLimits, Srq, Xrcd};
use crate::errno::{FiErrno, Result};

/// The transport of a connected queue pair, with the objects that this transport uses.
#[derive(Clone, Copy, Debug)]
pub enum Transport<'a> {
    /// Reliable connection.
    Rc {
        /// For completions of sends.
        send_cq: &'a Arc<Cq>,
        /// For completions of receives.
        recv_cq: &'a Arc<Cq>,
        /// The queue pair uses the receives of this queue, and has no receive queue of its own.
        srq: Option<&'a Arc<Srq>>,
    },
    /// The sending side of an extended reliable connection.
    XrcSend {
        /// For completions of sends.
        send_cq: &'a Arc<Cq>,
    },
    /// The receiving side of an extended reliable connection: each request names a shared receive
    /// queue of the domain.
    XrcRecv {
        /// The domain.
        xrcd: &'a Arc<Xrcd>,
    },
}

impl Transport<'_> {
    fn qp_type(self) -> sys::ibv_qp_type {
        match self {
            Self::Rc { .. } => sys::IBV_QPT_RC,
            Self::XrcSend { .. } => sys::IBV_QPT_XRC_SEND,
            Self::XrcRecv { .. } => sys::IBV_QPT_XRC_RECV,
        }
    }

    /// References to the objects, which the queue pair keeps.
    fn objects(self) -> Objects {
        match self {
            Self::Rc {
                send_cq,
                recv_cq,
                srq,
            } => Objects {
                send_cq: Some(Arc::clone(send_cq)),
                recv_cq: Some(Arc::clone(recv_cq)),
                srq: srq.map(Arc::clone),
                _xrcd: None,
            },
            Self::XrcSend { send_cq } => Objects {
                send_cq: Some(Arc::clone(send_cq)),
                ..Objects::default()
            },
            Self::XrcRecv { xrcd } => Objects {
                _xrcd: Some(Arc::clone(xrcd)),
                ..Objects::default()
            },
        }
    }
}

/// The operations of a queue pair that supports flushes.
const FLUSHING_OPERATIONS: u32 = sys::IBV_QP_EX_WITH_SEND
    | sys::IBV_QP_EX_WITH_SEND_WITH_IMM
    | sys::IBV_QP_EX_WITH_RDMA_WRITE
    | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | sys::IBV_QP_EX_WITH_RDMA_READ
    | sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | sys::IBV_QP_EX_WITH_FLUSH;

fn cap(config: &QpConfig) -> sys::ibv_qp_cap {
    sys::ibv_qp_cap {
        // all are clipped to the device's limits, which are of type c_int
        max_send_wr: config.max_send_wr as u32,
        max_recv_wr: config.max_recv_wr as u32,
        max_send_sge: config.max_send_sge as u32,
        max_recv_sge: config.max_recv_sge as u32,
        max_inline_data: config.max_inline as u32,
    }
}

/// The attributes of a queue pair without those of an XRC domain. [`Objects`] outlive their use.
fn init_attr(
    qp_type: sys::ibv_qp_type,
    objects: &Objects,
    config: &QpConfig,
) -> sys::ibv_qp_init_attr {
    let raw = |cq: &Option<Arc<Cq>>| cq.as_ref().map_or(std::ptr::null_mut(), |cq| cq.raw());
    let srq = objects.srq.as_ref();
    let mut cap = cap(config);
    if objects.recv_cq.is_none() {
        // the connection manager creates a queue for receives whose queue is missing
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    sys::ibv_qp_init_attr {
        send_cq: raw(&objects.send_cq),
        recv_cq: raw(&objects.recv_cq),
        srq: srq.map_or(std::ptr::null_mut(), |srq| srq.raw()),
        cap,
        qp_type,
        ..Default::default()
    }
}

impl Qp {
    /// `rdma_create_qp(3)`: creates a queue pair on an identifier that is bound to the device of
    /// `pd`. Of `config`, each transport uses the sizes of the queues that it has; only a reliable
    /// connection supports flushes.
    ///
    /// # Errors
    /// `EINVAL`: the identifier has no device, another device, or a queue pair; or the device
    /// refuses the size. `ENOMEM`. `EOPNOTSUPP`: the device does not have the transport, or flush
    /// is requested and the device has none.
    pub fn create(
        id: &Arc<CmId>,
        pd: &Arc<Pd>,
        transport: Transport<'_>,
        config: &QpConfig,
    ) -> Result<Self> {
        if !id.is_on(pd.device()) {
            return Err(FiErrno::EINVAL);
        }
        let objects = transport.objects();
        let mut attr = init_attr(transport.qp_type(), &objects, config);
        let mut flush = None;
        let raw = match transport {
            Transport::Rc { .. } if !config.flush => id.create_qp(pd, &mut attr)?,
            Transport::XrcSend { .. } => id.create_qp(pd, &mut attr)?,
            Transport::Rc { .. } => {
                let raw = create_flushing(id, pd, &mut attr)?;
                // SAFETY: `raw` is the queue pair that was created above.
                flush = unsafe { FlushCalls::of(id.backend(), raw) };
                if flush.is_none() {
                    id.destroy_qp();
                    return Err(FiErrno::EOPNOTSUPP);
                }
                raw
            }
            Transport::XrcRecv { xrcd } => create_xrc_recv(id, pd, xrcd)?,
        };
        Ok(Self::new(
            raw,
            Owner::Id(Arc::clone(id)),
            pd,
            objects,
            attr.cap,
            flush,
        ))
    }

    /// Creates the sending side of an extended reliable connection (`ibv_create_qp(3)`), in the
    /// state RESET and without an identifier of the connection manager. Of `config`, the sizes of
    /// the send queue are used.
    ///
    /// # Errors
    /// `EINVAL`: the device refuses the size. `ENOMEM`. `EOPNOTSUPP`: the device has no XRC, or
    /// flush is requested and its initiators have none.
    pub fn create_initiator(pd: &Arc<Pd>, send_cq: &Arc<Cq>, config: &QpConfig) -> Result<Self> {
        let objects = Transport::XrcSend { send_cq }.objects();
        let mut attr = init_attr(sys::IBV_QPT_XRC_SEND, &objects, config);
        let backend = pd.device().backend();
        let raw = if config.flush {
            let mut extended = flushing(&attr, pd);
            // SAFETY: context, protection domain and queue are live and of this backend.
            let raw = unsafe { sys::ibv_create_qp_ex(pd.device().context(), &raw mut extended) };
            attr.cap = extended.cap;
            raw
        } else {
            let create = backend.verbs.ibv_create_qp;
            // SAFETY: protection domain and queue are live and of this backend.
            unsafe { create(pd.raw(), &raw mut attr) }
        };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        let mut this = Self::new(raw, Owner::Verbs, pd, objects, attr.cap, None);
        if config.flush {
            // SAFETY: `raw` is the queue pair that was created above.
            this.flush = unsafe { FlushCalls::of(backend, raw) };
            if this.flush.is_none() {
                return Err(FiErrno::EOPNOTSUPP);
            }
        }
        Ok(this)
    }

    /// Creates a queue pair for unreliable datagrams (`ibv_create_qp(3)`) on a port of the device
    /// and moves it to the state in which it sends and receives (`IBV_QPS_RTS`). It receives
    /// datagrams that carry `qkey`. With `srq` it has no receive queue of its own.
    ///
    /// # Errors
    /// `EINVAL`: the device refuses the size, or has no such port. `ENOMEM`. `EOPNOTSUPP`: the
    /// device has no datagrams, or flush is requested.
    pub fn create_datagram(
        pd: &Arc<Pd>,
        (send_cq, recv_cq): (&Arc<Cq>, &Arc<Cq>),
        srq: Option<&Arc<Srq>>,
        (port, qkey): (u8, u32),
        config: &QpConfig,
    ) -> Result<Self> {
        if config.flush {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let objects = Objects {
            send_cq: Some(Arc::clone(send_cq)),
            recv_cq: Some(Arc::clone(recv_cq)),
            srq: srq.map(Arc::clone),
            _xrcd: None,
        };
        let mut attr = init_attr(sys::IBV_QPT_UD, &objects, config);
        let create = pd.device().backend().verbs.ibv_create_qp;
        // SAFETY: protection domain and queues are live and of this backend.
        let raw = unsafe { create(pd.raw(), &raw mut attr) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        let this = Self::new(raw, Owner::Verbs, pd, objects, attr.cap, None);
        this.modify(
            &mut sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_INIT,
                pkey_index: 0,
                port_num: port,
                qkey,
                ..Default::default()
            },
            sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_QKEY,
        )?;
        this.modify(
            &mut sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_RTR,
                ..Default::default()
            },
            sys::IBV_QP_STATE,
        )?;
        this.modify(
            &mut sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_RTS,
                sq_psn: 0,
                ..Default::default()
            },
            sys::IBV_QP_STATE | sys::IBV_QP_SQ_PSN,
        )?;
        Ok(this)
    }

    fn new(
        raw: *mut sys::ibv_qp,
        owner: Owner,
        pd: &Arc<Pd>,
        objects: Objects,
        actual: sys::ibv_qp_cap,
        flush: Option<FlushCalls>,
    ) -> Self {
        // SAFETY: `raw` is a new queue pair of this backend.
        unsafe { never_wait(pd.device(), raw) };
        Self {
            raw,
            flush,
            executes: ExecuteCalls::of(&pd.device().backend().verbs),
            limits: QpLimits {
                max_inline: actual.max_inline_data as usize,
            },
            owner,
            pd: Arc::clone(pd),
            _objects: objects,
            #[cfg(test)]
            posted_fences: Default::default(),
            #[cfg(test)]
            flushes: Default::default(),
        }
    }
}

/// Asks the device not to wait, in calls that end the queue pair or the target, for a request of
/// its peer that is being executed (`softdv_set_access_wait`): the thread that makes these calls
/// serves all peers, and one that is stopped would delay the others. The registrations that the
/// peer uses are deregistered before their memory is released, and that waits.
///
/// # Safety
/// `raw` is live and of the device's backend.
pub(super) unsafe fn never_wait(device: &Device, raw: *mut sys::ibv_qp) {
    if let Some(set_access_wait) = device.backend().verbs.softdv_set_access_wait {
        // SAFETY: the caller's promise.
        unsafe { set_access_wait(raw, 0) };
    }
}

/// The attributes of a queue pair that supports flushes.
fn flushing(attr: &sys::ibv_qp_init_attr, pd: &Pd) -> sys::ibv_qp_init_attr_ex {
    sys::ibv_qp_init_attr_ex {
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        pd: pd.raw(),
        send_ops_flags: FLUSHING_OPERATIONS.into(),
        ..Default::default()
    }
}

/// Creates a queue pair that supports flushes, of the size in `attr`, which receives the actual
/// size.
fn create_flushing(
    id: &CmId,
    pd: &Pd,
    attr: &mut sys::ibv_qp_init_attr,
) -> Result<*mut sys::ibv_qp> {
    let mut extended = flushing(attr, pd);
    let raw = id.create_qp_ex(&mut extended)?;
    attr.cap = extended.cap;
    Ok(raw)
}

/// Creates the receiving side of an extended reliable connection. It has no queues.
fn create_xrc_recv(id: &CmId, pd: &Pd, xrcd: &Xrcd) -> Result<*mut sys::ibv_qp> {
    xrcd.with_raw(|xrcd| {
        id.create_qp_ex(&mut sys::ibv_qp_init_attr_ex {
            qp_type: sys::IBV_QPT_XRC_RECV,
            // librdmacm takes the protection domain of the identifier from here
            comp_mask: sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_XRCD,
            pd: pd.raw(),
            xrcd,
            ..Default::default()
        })
    })
}

/// Determines the maximum length of inline data, by creating queue pairs with decreasing lengths
/// from 512 bytes; 0 if the device refuses all of them.
///
/// # Errors
/// That of a queue pair, if it may pass and none can be created. Those of creating the other
/// objects.
pub(super) fn probe_max_inline(device: &Arc<Device>) -> Result<usize> {
    let (found, failure) = try_inline(device)?;
    match failure {
        None => Ok(found),
        // drivers refuse a length in this way too: what happens again is their answer
        Some(error) => match try_inline(device)? {
            (0, Some(_)) => Err(error),
            (found, _) => Ok(found),
        },
    }
}

/// The length of the first queue pair that can be created, or 0; and the error that may pass of an
/// earlier one.
fn try_inline(device: &Arc<Device>) -> Result<(usize, Option<FiErrno>)> {
    let verbs = &device.backend().verbs;
    let pd = Pd::alloc(device)?;
    let cq = Arc::new(Cq::create(device, 1, None, 0)?);
    let objects = Objects {
        send_cq: Some(Arc::clone(&cq)),
        recv_cq: Some(cq),
        ..Objects::default()
    };
    let mut failure = None;
    for max_inline in [512, 384, 256, 128, 64, 32] {
        let config = QpConfig {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline,
            flush: false,
        };
        let mut attr = init_attr(sys::IBV_QPT_RC, &objects, &config);
        // SAFETY: protection domain and queue are live and of this backend.
        let qp = unsafe { (verbs.ibv_create_qp)(pd.raw(), &raw mut attr) };
        if !qp.is_null() {
            // SAFETY: created above, destroyed once.
            unsafe { (verbs.ibv_destroy_qp)(qp) };
            return Ok(((attr.cap.max_inline_data as usize).min(512), failure));
        }
        failure = Some(FiErrno::last())
            .filter(|error| error.may_pass())
            .or(failure);
    }
    Ok((0, failure))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{EventChannel, devices};

    const CONFIG: QpConfig = QpConfig::SMALL;

    fn device() -> Arc<Device> {
        devices(&[softverbs::backend()], false).remove(0)
    }

    /// An identifier that is bound to the device.
    fn id(device: &Device) -> Arc<CmId> {
        let channel = EventChannel::create(device.backend()).unwrap();
        let id = channel.create_id().unwrap();
        id.bind_addr("127.0.0.1:0".parse().unwrap()).unwrap();
        Arc::new(id)
    }

    fn cq(device: &Arc<Device>) -> Arc<Cq> {
        Arc::new(Cq::create(device, 16, None, 0).unwrap())
    }

    /// `qp_type` and `qp_state`, as the device reports them.
    fn type_and_state(qp: &Qp) -> (sys::ibv_qp_type, sys::ibv_qp_state) {
        let mut attr = sys::ibv_qp_attr::default();
        let mut init = sys::ibv_qp_init_attr::default();
        let query = qp.pd().device().backend().verbs.ibv_query_qp;
        // SAFETY: live and of this backend; both structures are writable.
        let ret = unsafe {
            query(
                qp.raw,
                &raw mut attr,
                sys::IBV_QP_STATE as i32,
                &raw mut init,
            )
        };
        assert_eq!(ret, 0);
        (init.qp_type, attr.qp_state)
    }

    #[test]
    fn each_connected_transport_is_created_on_an_identifier() {
        let device = device();
        let pd = Pd::alloc(&device).unwrap();
        let cq = cq(&device);
        let srq = Arc::new(Srq::create(&pd, 4, 1).unwrap());
        let xrcd = Arc::new(Xrcd::open(&device, None, libc::O_CREAT).unwrap());
        let (send_cq, recv_cq) = (&cq, &cq);
        for (transport, qp_type) in [
            (
                Transport::Rc {
                    send_cq,
                    recv_cq,
                    srq: None,
                },
                sys::IBV_QPT_RC,
            ),
            (
                Transport::Rc {
                    send_cq,
                    recv_cq,
                    srq: Some(&srq),
                },
                sys::IBV_QPT_RC,
            ),
            (Transport::XrcSend { send_cq }, sys::IBV_QPT_XRC_SEND),
            (Transport::XrcRecv { xrcd: &xrcd }, sys::IBV_QPT_XRC_RECV),
        ] {
            let id = id(&device);
            let qp = Qp::create(&id, &pd, transport, &CONFIG).unwrap();
            // the connection manager has begun with its states
            assert_eq!(type_and_state(&qp), (qp_type, sys::IBV_QPS_INIT));
            let second = Qp::create(&id, &pd, transport, &CONFIG);
            assert_eq!(second.err(), Some(FiErrno::EINVAL), "one per identifier");
        }
    }

    #[test]
    fn an_xrc_domain_stays_open_while_it_has_a_queue_pair() {
        let device = device();
        let pd = Pd::alloc(&device).unwrap();
        let xrcd = Arc::new(Xrcd::open(&device, None, libc::O_CREAT).unwrap());
        let transport = Transport::XrcRecv { xrcd: &xrcd };
        let qp = Qp::create(&id(&device), &pd, transport, &CONFIG).unwrap();
        assert_eq!(xrcd.close(), Err(FiErrno::EBUSY));
        drop(qp);
        xrcd.close().unwrap();
        let late = Qp::create(
            &id(&device),
            &pd,
            Transport::XrcRecv { xrcd: &xrcd },
            &CONFIG,
        );
        assert_eq!(late.err(), Some(FiErrno::EINVAL), "the domain is closed");
    }

    #[test]
    fn a_datagram_queue_pair_can_send_at_once() {
        let device = device();
        let pd = Pd::alloc(&device).unwrap();
        let cq = cq(&device);
        let srq = Arc::new(Srq::create(&pd, 4, 1).unwrap());
        for srq in [None, Some(&srq)] {
            let qp = Qp::create_datagram(&pd, (&cq, &cq), srq, (1, 7), &CONFIG).unwrap();
            assert_eq!(type_and_state(&qp), (sys::IBV_QPT_UD, sys::IBV_QPS_RTS));
        }
        let other_port = Qp::create_datagram(&pd, (&cq, &cq), None, (200, 7), &CONFIG);
        assert_eq!(other_port.err(), Some(FiErrno::EINVAL));
    }
}
