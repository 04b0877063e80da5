//! One end of a connection: its creation, its connection, and its errors.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::time::Duration;

use rdma_core_sys::*;

use super::{Link, Wc};

/// Address of a queue pair.
#[derive(Clone, Copy)]
pub struct Address {
    pub qpn: u32,
    pub gid: u128,
}

impl Address {
    /// Parses the line of [`End::say_address`].
    pub fn parse(line: &str) -> Self {
        let (qpn, gid) = line.split_once(' ').unwrap();
        Self {
            qpn: qpn.parse().unwrap(),
            gid: gid.parse().unwrap(),
        }
    }
}

/// One end of a connection with its objects.
pub struct End {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub rnr_retry: u8,
    pub(super) polled: VecDeque<Wc>,
}

pub fn verbs() -> &'static VerbsFns {
    &softverbs::backend().verbs
}

pub fn open() -> *mut ibv_context {
    // SAFETY: the list is freed after its only use.
    unsafe {
        let mut count = 0;
        let list = (verbs().ibv_get_device_list)(&raw mut count);
        assert_eq!(count, 1);
        let context = (verbs().ibv_open_device)(*list);
        assert!(!context.is_null(), "{}", std::io::Error::last_os_error());
        (verbs().ibv_free_device_list)(list);
        context
    }
}

impl End {
    pub fn create(_link: &mut Link, sends: u32, recvs: u32, pieces: u32) -> Self {
        Self::with(sends, recvs, pieces)
    }

    pub fn with(sends: u32, recvs: u32, pieces: u32) -> Self {
        Self::of_type(IBV_QPT_RC, sends, recvs, pieces)
    }

    /// An end of another type, in RESET.
    pub fn of_type(kind: u32, sends: u32, recvs: u32, pieces: u32) -> Self {
        let context = open();
        // SAFETY: all objects are live and of one context.
        unsafe {
            let channel = (verbs().ibv_create_comp_channel)(context);
            let pd = (verbs().ibv_alloc_pd)(context);
            let cqe = (sends + recvs) as c_int;
            let cq = (verbs().ibv_create_cq)(context, cqe, std::ptr::null_mut(), channel, 0);
            assert!(!channel.is_null() && !pd.is_null() && !cq.is_null());
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.qp_type = kind;
            init.cap.max_send_wr = sends;
            init.cap.max_recv_wr = recvs;
            init.cap.max_send_sge = pieces;
            init.cap.max_recv_sge = pieces;
            init.cap.max_inline_data = 64;
            let qp = (verbs().ibv_create_qp)(pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            let mut end = Self {
                context,
                channel,
                pd,
                cq,
                qp,
                rnr_retry: 7,
                polled: VecDeque::new(),
            };
            if kind == IBV_QPT_RC {
                end.enter_init();
            }
            end
        }
    }

    /// An end of any type, in RESET.
    pub fn of_type_in_reset(kind: u32) -> Self {
        let mut end = Self::of_type(kind, 16, 16, 1);
        if kind == IBV_QPT_RC {
            end.reset();
        }
        end
    }

    /// An end with existing objects.
    pub fn of_parts(
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        pd: *mut ibv_pd,
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
    ) -> Self {
        Self {
            context,
            channel,
            pd,
            cq,
            qp,
            rnr_retry: 7,
            polled: VecDeque::new(),
        }
    }

    /// A shared receive queue of `count` receives with one sge.
    pub fn create_srq(&self, count: u32) -> *mut ibv_srq {
        // SAFETY: all zeros is a value of it; the domain is live.
        unsafe {
            let mut init: ibv_srq_init_attr = std::mem::zeroed();
            init.attr.max_wr = count;
            init.attr.max_sge = 1;
            let srq = (verbs().ibv_create_srq)(self.pd, &raw mut init);
            assert!(!srq.is_null(), "{}", std::io::Error::last_os_error());
            srq
        }
    }

    /// Another connection of the same process, which uses the receives of `srq`. Its completions go
    /// to the first end's queue.
    pub fn on_srq(&self, srq: *mut ibv_srq) -> Self {
        // SAFETY: all objects are live and of one context.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = self.cq;
            init.recv_cq = self.cq;
            init.srq = srq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 16;
            init.cap.max_send_sge = 1;
            let qp = (verbs().ibv_create_qp)(self.pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            self.with_qp(qp)
        }
    }

    /// The same with another queue pair, which is moved to INIT.
    pub fn with_qp(&self, qp: *mut ibv_qp) -> Self {
        let mut end = Self {
            qp,
            polled: VecDeque::new(),
            ..*self
        };
        end.enter_init();
        end
    }

    /// Creates an end, connects it, and waits until the peer is connected too.
    pub fn connect(link: &mut Link, sends: u32, recvs: u32, pieces: u32) -> Self {
        let mut end = Self::create(link, sends, recvs, pieces);
        end.join(link);
        end
    }

    pub fn modify(&mut self, attr: &mut ibv_qp_attr, mask: u32) {
        // SAFETY: live queue pair, valid attributes.
        let ret = unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) };
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn reset(&mut self) {
        // SAFETY: all zeros is a value of it, and RESET.
        self.modify(&mut unsafe { std::mem::zeroed() }, IBV_QP_STATE);
    }

    pub fn enter_init(&mut self) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        self.modify(
            &mut attr,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        );
    }

    pub fn address(&self) -> Address {
        // SAFETY: live objects; a GID is 16 bytes.
        unsafe {
            let mut gid: ibv_gid = std::mem::zeroed();
            assert_eq!((verbs().ibv_query_gid)(self.context, 1, 0, &raw mut gid), 0);
            Address {
                qpn: (*self.qp).qp_num,
                gid: (&raw const gid).cast::<u128>().read_unaligned(),
            }
        }
    }

    pub fn exchange(&self, link: &mut Link) -> Address {
        self.say_address(link);
        Address::parse(&link.hear())
    }

    pub fn say_address(&self, link: &mut Link) {
        let own = self.address();
        link.say(&format!("{} {}", own.qpn, own.gid));
    }

    pub fn enter_rtr(&mut self, other: Address) {
        let ret = self.try_enter_rtr(other);
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn try_enter_rtr(&mut self, other: Address) -> c_int {
        // SAFETY: all zeros is a value of it; a GID is 16 bytes.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = other.qpn;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        // SAFETY: a GID is 16 bytes, and `attr` is writable.
        unsafe {
            (&raw mut attr.ah_attr.grh.dgid)
                .cast::<u128>()
                .write_unaligned(other.gid);
        }
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        // SAFETY: live queue pair, valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.qp, &raw mut attr, mask.cast_signed()) }
    }

    pub fn enter_rts(&mut self) {
        self.enter_rts_within(14, 7);
    }

    /// With `timeout` and `retry_cnt` of `ibv_modify_qp(3)`.
    pub fn enter_rts_within(&mut self, timeout: u8, retries: u8) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = timeout;
        attr.retry_cnt = retries;
        attr.rnr_retry = self.rnr_retry;
        attr.max_rd_atomic = 1;
        self.modify(
            &mut attr,
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
        );
    }

    /// Moves it from SQD to RTS.
    pub fn enter_rts_again(&mut self) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        self.modify(&mut attr, IBV_QP_STATE);
    }

    pub fn join_early(&mut self, link: &mut Link) {
        let other = self.exchange(link);
        self.enter_rtr(other);
        self.enter_rts();
    }

    pub fn join(&mut self, link: &mut Link) {
        self.join_early(link);
        link.say("ready");
        link.expect("ready");
    }

    pub fn async_event(&mut self) -> u32 {
        let (event, element) = self.any_async_event();
        assert_eq!(element, self.qp as usize);
        event
    }

    /// The next event, and the address of its object.
    pub fn any_async_event(&mut self) -> (u32, usize) {
        // SAFETY: live context; the event is acknowledged once; all members are pointers.
        unsafe {
            let mut event: ibv_async_event = std::mem::zeroed();
            assert_eq!(
                (verbs().ibv_get_async_event)(self.context, &raw mut event),
                0
            );
            let element = event.element.qp as usize;
            (verbs().ibv_ack_async_event)(&raw mut event);
            (event.event_type, element)
        }
    }

    pub fn state(&self) -> u32 {
        // SAFETY: live queue pair, writable outputs.
        unsafe {
            let mut attr: ibv_qp_attr = std::mem::zeroed();
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            let mask = IBV_QP_STATE.cast_signed();
            let ret = (verbs().ibv_query_qp)(self.qp, &raw mut attr, mask, &raw mut init);
            assert_eq!(ret, 0);
            attr.qp_state
        }
    }

    /// In a forked child: whether every call fails without a crash.
    pub fn refuses_everything(&mut self) -> bool {
        // SAFETY: live objects of the parent.
        unsafe {
            let mut wc: ibv_wc = std::mem::zeroed();
            let mut wr: ibv_send_wr = std::mem::zeroed();
            let mut bad = std::ptr::null_mut();
            let mut attr: ibv_device_attr = std::mem::zeroed();
            let memory = [0u8; 8];
            ibv_poll_cq(self.cq, 1, &raw mut wc) < 0
                && ibv_post_send(self.qp, &raw mut wr, &raw mut bad) != 0
                && ibv_req_notify_cq(self.cq, 0) != 0
                && (verbs().ibv_query_device)(self.context, &raw mut attr) != 0
                && (verbs().ibv_reg_mr)(self.pd, memory.as_ptr().cast_mut().cast(), 8, 0).is_null()
                && (verbs().ibv_alloc_pd)(self.context).is_null()
                && self.works_anew()
        }
    }

    /// In a forked child: a new context works.
    fn works_anew(&self) -> bool {
        let mut own = Self::with(4, 4, 1);
        let address = own.address();
        if address.qpn >> 14 == self.address_number() >> 14 {
            return false;
        }
        let receive = own.buffer(&[0; 8]);
        own.recv(&receive, 1);
        own.enter_rtr(address);
        own.enter_rts();
        own.send_unregistered(&mut [3; 8], None, IBV_SEND_INLINE, 2);
        let wc = own.wait(Duration::from_secs(5));
        wc.wr_id == 1 && receive.bytes() == [3; 8]
    }

    fn address_number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }
}
