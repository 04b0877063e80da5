//! The device's objects for these programs. Each is destroyed by an explicit call, not by a drop:
//! most of these processes are killed.

mod ring;
mod xrc;

use std::ffi::c_int;

use rdma_core_sys::*;

pub(crate) use ring::{Received, Ring};
pub(crate) use xrc::Domain;

/// The access rights of regions and queue pairs.
pub(crate) const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_FLUSH_GLOBAL;
/// The rights among them that a queue pair can have.
const QP_ACCESS: u32 = ACCESS & !(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);

/// The Q_Key of all datagram queue pairs here.
pub(crate) const QKEY: u32 = 0x1234_5678;

pub(crate) fn verbs() -> &'static VerbsFns {
    &softverbs::backend().verbs
}

/// The result of a call that returns an errno value.
pub(crate) fn check(ret: c_int) -> Result<(), std::io::Error> {
    if ret == 0 {
        Ok(())
    } else {
        Err(std::io::Error::from_raw_os_error(ret))
    }
}

pub(crate) fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

/// Retries of a queue pair: the exponent of the local acknowledgement timeout, and the retry count.
#[derive(Clone, Copy)]
pub(crate) struct Retries {
    pub(crate) timeout: u8,
    pub(crate) count: u8,
}

/// An open device and its only protection domain.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
}

impl Device {
    pub(crate) fn open() -> Self {
        // SAFETY: the list is freed after its only use; the context stays open.
        unsafe {
            let list = (verbs().ibv_get_device_list)(std::ptr::null_mut());
            let context = (verbs().ibv_open_device)(*list);
            assert!(!context.is_null(), "{}", last_error());
            (verbs().ibv_free_device_list)(list);
            let pd = (verbs().ibv_alloc_pd)(context);
            assert!(!pd.is_null(), "{}", last_error());
            Self { context, pd }
        }
    }

    pub(crate) fn context(&self) -> *mut ibv_context {
        self.context
    }

    pub(crate) fn pd(&self) -> *mut ibv_pd {
        self.pd
    }

    pub(crate) fn channel(&self) -> *mut ibv_comp_channel {
        // SAFETY: live context.
        let channel = unsafe { (verbs().ibv_create_comp_channel)(self.context) };
        assert!(!channel.is_null(), "{}", last_error());
        channel
    }

    /// A completion queue with its own channel, whose descriptor is nonblocking.
    pub(crate) fn queue(&self, entries: c_int) -> Queue {
        let channel = self.channel();
        let none = std::ptr::null_mut();
        // SAFETY: live context and channel.
        let cq = unsafe { (verbs().ibv_create_cq)(self.context, entries, none, channel, 0) };
        assert!(!cq.is_null(), "{}", last_error());
        Queue::of(cq, channel)
    }

    pub(crate) fn shared(&self, receives: u32) -> Shared {
        // SAFETY: all zeros is a value of it; live domain.
        unsafe {
            let mut init: ibv_srq_init_attr = std::mem::zeroed();
            init.attr.max_wr = receives;
            init.attr.max_sge = 1;
            let srq = (verbs().ibv_create_srq)(self.pd, &raw mut init);
            assert!(!srq.is_null(), "{}", last_error());
            Shared { srq }
        }
    }

    /// Registered memory, all zeros.
    pub(crate) fn region(&self, len: usize) -> Region {
        // SAFETY: a new mapping, which only `Region::release` gives back.
        unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED, "{}", last_error());
            let mr = (verbs().ibv_reg_mr)(self.pd, at, len, ACCESS.cast_signed());
            assert!(!mr.is_null(), "{}", last_error());
            Region {
                mr,
                at: at.cast(),
                len,
            }
        }
    }

    /// Registers a region's memory again.
    pub(crate) fn register_again(&self, region: &mut Region) {
        // SAFETY: live domain and memory.
        let mr = unsafe {
            (verbs().ibv_reg_mr)(self.pd, region.at.cast(), region.len, ACCESS.cast_signed())
        };
        assert!(!mr.is_null(), "{}", last_error());
        region.mr = mr;
    }

    /// A queue pair in INIT; a datagram queue pair is in RTS.
    pub(crate) fn pair(&self, kind: ibv_qp_type, queue: &Queue, shared: Option<&Shared>) -> Pair {
        // SAFETY: all zeros is a value of it; all objects are live and of one context.
        let qp = unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = queue.cq;
            init.recv_cq = queue.cq;
            init.srq = shared.map_or(std::ptr::null_mut(), |shared| shared.srq);
            init.qp_type = kind;
            init.cap.max_send_wr = 64;
            init.cap.max_recv_wr = if shared.is_some() { 0 } else { 64 };
            init.cap.max_send_sge = 1;
            init.cap.max_recv_sge = 1;
            init.cap.max_inline_data = 64;
            (verbs().ibv_create_qp)(self.pd, &raw mut init)
        };
        assert!(!qp.is_null(), "{}", last_error());
        Pair::start(qp, kind)
    }

    fn gid(&self) -> ibv_gid {
        // SAFETY: live context, writable output.
        unsafe {
            let mut gid: ibv_gid = std::mem::zeroed();
            assert_eq!((verbs().ibv_query_gid)(self.context, 1, 0, &raw mut gid), 0);
            gid
        }
    }

    /// An address handle for the processes of this host.
    pub(crate) fn handle(&self) -> Handle {
        // SAFETY: all zeros is a value of it; live domain.
        unsafe {
            let mut attr: ibv_ah_attr = std::mem::zeroed();
            attr.port_num = 1;
            attr.is_global = 1;
            attr.grh.dgid = self.gid();
            let ah = (verbs().ibv_create_ah)(self.pd, &raw mut attr);
            assert!(!ah.is_null(), "{}", last_error());
            Handle { ah }
        }
    }

    /// Connects a queue pair to the queue pair with this number: RTR and RTS.
    pub(crate) fn connect(&self, pair: &Pair, number: u32, retries: Retries) {
        self.enter_rtr(pair, number);
        self.enter_rts(pair, retries);
    }

    pub(crate) fn enter_rtr(&self, pair: &Pair, number: u32) {
        let mut attr = Pair::attributes(IBV_QPS_RTR);
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = number;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = self.gid();
        let mut mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        if pair.kind != IBV_QPT_UC {
            mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        }
        pair.modify(&mut attr, mask);
    }

    pub(crate) fn enter_rts(&self, pair: &Pair, retries: Retries) {
        let mut attr = Pair::attributes(IBV_QPS_RTS);
        attr.timeout = retries.timeout;
        attr.retry_cnt = retries.count;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        let mut mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        if pair.kind != IBV_QPT_UC {
            mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        }
        pair.modify(&mut attr, mask);
    }

    /// Takes and acknowledges the pending asynchronous events.
    pub(crate) fn drain_events(&self) {
        // SAFETY: live context; each event is acknowledged once.
        unsafe {
            let fd = (*self.context).async_fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            let mut event: ibv_async_event = std::mem::zeroed();
            while (verbs().ibv_get_async_event)(self.context, &raw mut event) == 0 {
                (verbs().ibv_ack_async_event)(&raw mut event);
            }
        }
    }
}

/// An address handle.
#[derive(Clone, Copy)]
pub(crate) struct Handle {
    ah: *mut ibv_ah,
}

impl Handle {
    pub(crate) fn ah(self) -> *mut ibv_ah {
        self.ah
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wc {
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) len: usize,
    pub(crate) imm: u32,
    pub(crate) number: u32,
}

/// A completion queue and its channel.
#[derive(Clone, Copy)]
pub(crate) struct Queue {
    cq: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
}

impl Queue {
    pub(crate) fn of(cq: *mut ibv_cq, channel: *mut ibv_comp_channel) -> Self {
        let queue = Self { cq, channel };
        queue.set_blocking(false);
        queue
    }

    pub(crate) fn cq(&self) -> *mut ibv_cq {
        self.cq
    }

    /// Appends the available completions to `to`.
    pub(crate) fn poll(&self, to: &mut Vec<Wc>) {
        // SAFETY: live queue, room for sixteen.
        unsafe {
            let mut wcs: [ibv_wc; 16] = std::mem::zeroed();
            let count = ibv_poll_cq(self.cq, 16, wcs.as_mut_ptr());
            assert!(count >= 0, "polling failed");
            to.extend(wcs[..count as usize].iter().map(|wc| Wc {
                id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                len: wc.byte_len as usize,
                number: wc.qp_num,
                imm: wc.__bindgen_anon_1.bindgen_union_field,
            }));
        }
    }

    /// `ibv_req_notify_cq`.
    pub(crate) fn arm(&self) {
        // SAFETY: live queue.
        assert_eq!(unsafe { ibv_req_notify_cq(self.cq, 0) }, 0);
    }

    /// `ibv_get_cq_event` with acknowledgement; false if a nonblocking descriptor has no event, or
    /// a signal interrupted the call.
    pub(crate) fn event(&self) -> bool {
        // SAFETY: live channel, writable outputs; acknowledged once.
        unsafe {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            if (verbs().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) == 0 {
                assert_eq!(cq, self.cq);
                (verbs().ibv_ack_cq_events)(cq, 1);
                return true;
            }
        }
        let error = last_error().raw_os_error();
        assert!(
            matches!(error, Some(libc::EAGAIN | libc::EINTR)),
            "ibv_get_cq_event: {error:?}"
        );
        false
    }

    pub(crate) fn fd(&self) -> c_int {
        // SAFETY: live channel.
        unsafe { (*self.channel).fd }
    }

    /// Sets whether `ibv_get_cq_event` blocks.
    pub(crate) fn set_blocking(&self, blocking: bool) {
        // SAFETY: the channel's descriptor.
        unsafe {
            let flags = libc::fcntl(self.fd(), libc::F_GETFL);
            let flags = if blocking {
                flags & !libc::O_NONBLOCK
            } else {
                flags | libc::O_NONBLOCK
            };
            libc::fcntl(self.fd(), libc::F_SETFL, flags);
        }
    }
}

/// A shared receive queue.
#[derive(Clone, Copy)]
pub(crate) struct Shared {
    srq: *mut ibv_srq,
}

impl Shared {
    pub(crate) fn srq(&self) -> *mut ibv_srq {
        self.srq
    }

    pub(crate) fn receive(&self, id: u64, region: &Region, offset: usize, len: usize) {
        let mut sge = region.piece(offset, len);
        let mut wr = receive_of(id, &mut sge);
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue, a chain of one.
        let ret = unsafe { ibv_post_srq_recv(self.srq, &raw mut wr, &raw mut bad) };
        check(ret).expect("ibv_post_srq_recv");
    }
}

fn receive_of(id: u64, sge: &mut ibv_sge) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: id,
        next: std::ptr::null_mut(),
        sg_list: sge,
        num_sge: 1,
    }
}

/// The operation of a request.
#[derive(Clone, Copy)]
pub(crate) enum Op {
    Send,
    SendImm(u32),
    /// With the key of a window of the peer.
    SendInvalidate(u32),
    Inline,
    Write(u64, u32),
    WriteImm(u64, u32, u32),
    Read(u64, u32),
    Add(u64, u32, u64),
    Swap(u64, u32, u64, u64),
    Datagram(Handle, u32),
}

/// A queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    qp: *mut ibv_qp,
    kind: ibv_qp_type,
}

impl Pair {
    /// Moves a new queue pair to INIT; a datagram queue pair to RTS.
    pub(crate) fn start(qp: *mut ibv_qp, kind: ibv_qp_type) -> Self {
        let pair = Self { qp, kind };
        pair.enter_init();
        if kind == IBV_QPT_UD {
            let mut attr = Self::attributes(IBV_QPS_RTR);
            pair.modify(&mut attr, IBV_QP_STATE);
            attr.qp_state = IBV_QPS_RTS;
            pair.modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
        }
        pair
    }

    pub(crate) fn qp(&self) -> *mut ibv_qp {
        self.qp
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    fn attributes(state: u32) -> ibv_qp_attr {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = state;
        attr
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) {
        // SAFETY: live queue pair, valid attributes.
        let ret = unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) };
        check(ret).expect("ibv_modify_qp");
    }

    fn enter_init(&self) {
        let mut attr = Self::attributes(IBV_QPS_INIT);
        attr.port_num = 1;
        let mut mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        if self.kind == IBV_QPT_UD {
            attr.qkey = QKEY;
            mask |= IBV_QP_QKEY;
        } else {
            attr.qp_access_flags = QP_ACCESS;
            mask |= IBV_QP_ACCESS_FLAGS;
        }
        self.modify(&mut attr, mask);
    }

    /// The state, from `ibv_query_qp`.
    pub(crate) fn state(&self) -> u32 {
        // SAFETY: all zeros is a value of both; live queue pair, writable outputs.
        unsafe {
            let mut attr: ibv_qp_attr = std::mem::zeroed();
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            let mask = IBV_QP_STATE.cast_signed();
            let ret = (verbs().ibv_query_qp)(self.qp, &raw mut attr, mask, &raw mut init);
            check(ret).expect("ibv_query_qp");
            attr.qp_state
        }
    }

    /// Moves the queue pair to ERR.
    pub(crate) fn fail(&self) {
        self.modify(&mut Self::attributes(IBV_QPS_ERR), IBV_QP_STATE);
    }

    pub(crate) fn receive(&self, id: u64, region: &Region, offset: usize, len: usize) {
        let mut sge = region.piece(offset, len);
        let mut wr = receive_of(id, &mut sge);
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue pair, a chain of one.
        let ret = unsafe { ibv_post_recv(self.qp, &raw mut wr, &raw mut bad) };
        check(ret).expect("ibv_post_recv");
    }

    /// Posts a signaled request with one sge.
    pub(crate) fn post(&self, id: u64, op: Op, region: &Region, offset: usize, len: usize) {
        self.post_to(id, op, 0, region, offset, len);
    }

    /// As [`Self::post`], to the peer's shared receive queue with this number.
    pub(crate) fn post_to(
        &self,
        id: u64,
        op: Op,
        srq: u32,
        region: &Region,
        offset: usize,
        len: usize,
    ) {
        let mut sge = region.piece(offset, len);
        // SAFETY: all zeros is a value of it.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = id;
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.qp_type.xrc.remote_srqn = srq;
        wr.opcode = match op {
            Op::Send | Op::Inline | Op::Datagram(..) => IBV_WR_SEND,
            Op::SendImm(_) => IBV_WR_SEND_WITH_IMM,
            Op::SendInvalidate(_) => IBV_WR_SEND_WITH_INV,
            Op::Write(..) => IBV_WR_RDMA_WRITE,
            Op::WriteImm(..) => IBV_WR_RDMA_WRITE_WITH_IMM,
            Op::Read(..) => IBV_WR_RDMA_READ,
            Op::Add(..) => IBV_WR_ATOMIC_FETCH_AND_ADD,
            Op::Swap(..) => IBV_WR_ATOMIC_CMP_AND_SWP,
        };
        match op {
            Op::Send => {}
            Op::Inline => wr.send_flags |= IBV_SEND_INLINE,
            Op::SendImm(word) | Op::SendInvalidate(word) => {
                wr.__bindgen_anon_1.bindgen_union_field = word;
            }
            Op::Write(addr, rkey) | Op::Read(addr, rkey) => {
                wr.wr.rdma.remote_addr = addr;
                wr.wr.rdma.rkey = rkey;
            }
            Op::WriteImm(addr, rkey, imm) => {
                wr.wr.rdma.remote_addr = addr;
                wr.wr.rdma.rkey = rkey;
                wr.__bindgen_anon_1.bindgen_union_field = imm;
            }
            Op::Add(addr, rkey, add) => {
                wr.wr.atomic.remote_addr = addr;
                wr.wr.atomic.rkey = rkey;
                wr.wr.atomic.compare_add = add;
            }
            Op::Swap(addr, rkey, compare, swap) => {
                wr.wr.atomic.remote_addr = addr;
                wr.wr.atomic.rkey = rkey;
                wr.wr.atomic.compare_add = compare;
                wr.wr.atomic.swap = swap;
            }
            Op::Datagram(handle, number) => {
                wr.wr.ud.ah = handle.ah;
                wr.wr.ud.remote_qpn = number;
                wr.wr.ud.remote_qkey = QKEY;
            }
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue pair, a chain of one.
        let ret = unsafe { ibv_post_send(self.qp, &raw mut wr, &raw mut bad) };
        check(ret).expect("ibv_post_send");
    }

    /// `ibv_destroy_qp`; the caller has acknowledged the queue pair's asynchronous events.
    pub(crate) fn destroy(self) {
        // SAFETY: live, and not used after this.
        check(unsafe { (verbs().ibv_destroy_qp)(self.qp) }).expect("ibv_destroy_qp");
    }
}

/// Registered memory.
pub(crate) struct Region {
    mr: *mut ibv_mr,
    at: *mut u8,
    len: usize,
}

impl Region {
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }

    pub(crate) fn addr(&self, offset: usize) -> u64 {
        self.at as u64 + offset as u64
    }

    pub(crate) fn mr(&self) -> *mut ibv_mr {
        self.mr
    }

    pub(crate) fn piece(&self, offset: usize, len: usize) -> ibv_sge {
        assert!(offset + len <= self.len);
        ibv_sge {
            addr: self.addr(offset),
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// A copy of the current bytes.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping; the kernel may write it for a peer at the same time, which at
        // worst changes the copied bytes.
        unsafe { bytes.as_mut_ptr().copy_from(self.at.add(offset), len) };
        bytes
    }

    pub(crate) fn read_word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().expect("eight bytes"))
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: inside the mapping; `bytes` is a slice of that length.
        unsafe { self.at.add(offset).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn fill(&self, byte: u8) {
        // SAFETY: the whole mapping, which is writable.
        unsafe { self.at.write_bytes(byte, self.len) };
    }

    /// `ibv_dereg_mr`; the memory stays mapped.
    ///
    /// # Errors
    /// `EBUSY`: a process still accesses the region.
    pub(crate) fn deregister(&self) -> Result<(), std::io::Error> {
        // SAFETY: live; the caller registers the memory again before the next use.
        check(unsafe { (verbs().ibv_dereg_mr)(self.mr) })
    }

    /// Deregisters and unmaps the memory.
    pub(crate) fn release(self) {
        self.deregister().expect("ibv_dereg_mr");
        // SAFETY: the mapping of `Device::region`; no reference to it remains.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}
