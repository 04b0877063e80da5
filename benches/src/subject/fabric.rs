//! A provider through libfabric, with the same loops for all providers: message endpoints and
//! reliable datagrams.
//!
//! The library is `$WEFT_LIBFABRIC`, by default the system's. Message endpoints have the address
//! `$WEFT_BENCH_ADDRESS`, by default loopback, on which the provider `verbs` has no device. As in
//! fabtests, transmit and receive have one completion queue each, in the CONTEXT format, and the
//! threading model is `FI_THREAD_DOMAIN`.

mod rma;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Instant;

use abi_tests::call;
use abi_tests::fabric::{Infos, getinfo};
use abi_tests::load::Lib;
use abi_tests::objects::{
    bind, control, cq_attr, open_cq, open_domain, open_eq, open_fabric, register,
};
use libfabric_sys::*;

use super::{Patience, Side, Subject, idle};
use crate::memory::Memory;
use crate::op::Op;

const BUFFER: usize = 4 << 20;
/// Number of posted receives.
const RECEIVES: usize = 256;
const WINDOW: u64 = 64;
/// The requested key, if the provider does not choose the keys.
const KEY: u64 = 0x77;

/// The type of endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Message endpoints.
    Msg,
    /// Reliable datagrams, untagged messages and RMA.
    Rdm,
    /// Reliable datagrams, tagged messages alone.
    Tagged,
}

/// The tag of all messages, and the ignored bits of the receives, as MPI posts them.
const TAG: u64 = 0x1234_5678;
const IGNORED: u64 = 0x00ff_0000_0000_0000;

/// One process's end.
pub(crate) struct Fabric {
    side: Side,
    kind: Endpoint,
    info: Infos,
    pep: *mut fid_pep,
    domain: *mut fid_domain,
    ep: *mut fid_ep,
    eq: *mut fid_eq,
    tx: *mut fid_cq,
    rx: *mut fid_cq,
    av: *mut fid_av,
    peer: fi_addr_t,
    outbox: Memory,
    inbox: Memory,
    out_desc: *mut c_void,
    in_mr: *mut fid_mr,
    inject_size: usize,
    remote: (u64, u64),
    /// Contexts of operations, used in turn, for providers that require `FI_CONTEXT` or
    /// `FI_CONTEXT2`.
    contexts: Vec<fi_context2>,
    next: usize,
    /// Number of received messages that the loop has not counted yet.
    arrived: u64,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| {
            let pair = std::str::from_utf8(pair).expect("ASCII");
            u8::from_str_radix(pair, 16).expect("hexadecimal")
        })
        .collect()
}

fn info(lib: &Lib, provider: &str, kind: Endpoint, side: Side, more_caps: u64) -> Infos {
    let hints = abi_tests::fabric::hints(lib);
    // SAFETY: whole hints of this library.
    unsafe {
        let info = hints.first();
        (*info).mode = FI_CONTEXT | FI_CONTEXT2;
        (*info).caps = more_caps
            | match kind {
                Endpoint::Msg | Endpoint::Rdm => FI_MSG | FI_RMA,
                Endpoint::Tagged => FI_TAGGED,
            };
        (*(*info).domain_attr).threading = FI_THREAD_DOMAIN;
        (*(*info).ep_attr).type_ = match kind {
            Endpoint::Msg => FI_EP_MSG,
            Endpoint::Rdm | Endpoint::Tagged => FI_EP_RDM,
        };
        libc::free((*(*info).fabric_attr).prov_name.cast());
        let name = std::ffi::CString::new(provider).expect("no NUL");
        // libfabric frees the string
        (*(*info).fabric_attr).prov_name = libc::strdup(name.as_ptr());
    }
    let version = fi_version(1, 17);
    let host = std::env::var("WEFT_BENCH_ADDRESS").unwrap_or_else(|_| "127.0.0.1".into());
    let (node, service, flags) = match (kind, side) {
        (Endpoint::Msg, Side::First) => (Some(&*host), Some("1"), 0),
        (Endpoint::Msg, Side::Second) => (Some(&*host), Some("0"), FI_SOURCE),
        (Endpoint::Rdm | Endpoint::Tagged, _) => (None, None, 0),
    };
    let info = getinfo(lib, version, node, service, flags, Some(&hints))
        .unwrap_or_else(|error| panic!("fi_getinfo for {provider}: {error}"));
    // SAFETY: a whole fi_info, whose name is a string.
    let name = unsafe { std::ffi::CStr::from_ptr((*(*info.first()).fabric_attr).prov_name) };
    assert_eq!(name.to_bytes(), provider.as_bytes(), "the provider");
    let xrc = std::env::var_os("FI_WEFT_XRC").is_some_and(|value| value == "1");
    // SAFETY: a whole fi_info.
    let protocol = unsafe { (*(*info.first()).ep_attr).protocol };
    assert_eq!(protocol == FI_PROTO_RDMA_CM_IB_XRC, xrc, "the protocol");
    info
}

impl Fabric {
    pub(crate) fn open(provider: &str, kind: Endpoint, side: Side) -> Self {
        Self::with_caps(provider, kind, side, 0)
    }

    /// `more_caps`: capabilities in addition to messages and RMA.
    pub(crate) fn with_caps(provider: &str, kind: Endpoint, side: Side, more_caps: u64) -> Self {
        Self::with_memory(provider, kind, side, more_caps, false)
    }

    /// `allocated`: the peer accesses memory that weft has allocated.
    pub(crate) fn with_memory(
        provider: &str,
        kind: Endpoint,
        side: Side,
        more_caps: u64,
        allocated: bool,
    ) -> Self {
        let path = std::env::var("WEFT_LIBFABRIC").unwrap_or_else(|_| "libfabric.so.1".into());
        let lib = Lib::open(&path);
        let info = info(&lib, provider, kind, side, more_caps);
        // SAFETY: a whole fi_info, and fids as they are opened.
        unsafe {
            let fabric = open_fabric(&lib, info.first());
            let domain = open_domain(fabric, info.first());
            let outbox = Memory::new(BUFFER);
            let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
            let out_mr = register(domain, outbox.at, outbox.len, access);
            let (inbox, in_mr) = if allocated {
                rma::allocate(domain, BUFFER, access, KEY)
            } else {
                let inbox = Memory::new(BUFFER);
                (inbox, register_as(domain, inbox, access, KEY))
            };
            let mut attr = cq_attr(FI_CQ_FORMAT_CONTEXT, FI_WAIT_UNSPEC);
            attr.size = 2 * RECEIVES;
            let open_queue = || {
                // shm has no blocking reads: then the queue has no wait object
                let mut cq = null_mut();
                let mut attr = attr;
                let ret = call!(
                    (*domain).ops,
                    cq_open,
                    domain,
                    &raw mut attr,
                    &raw mut cq,
                    null_mut()
                );
                if ret == 0 {
                    return cq;
                }
                open_cq(
                    domain,
                    fi_cq_attr {
                        wait_obj: FI_WAIT_NONE,
                        ..attr
                    },
                )
            };
            let mut this = Self {
                side,
                kind,
                pep: null_mut(),
                domain,
                ep: null_mut(),
                eq: null_mut(),
                tx: open_queue(),
                rx: open_queue(),
                av: null_mut(),
                peer: 0,
                outbox,
                inbox,
                out_desc: (*out_mr).mem_desc,
                in_mr,
                inject_size: (*(*info.first()).tx_attr).inject_size,
                remote: (0, 0),
                contexts: vec![std::mem::zeroed(); 4 * RECEIVES],
                next: 0,
                arrived: 0,
                info,
            };
            match kind {
                Endpoint::Msg => {
                    this.eq = open_eq(fabric);
                    if side.is_first() {
                        this.ep = this.endpoint(domain, this.info.first());
                    } else {
                        this.listen(fabric);
                    }
                }
                Endpoint::Rdm | Endpoint::Tagged => {
                    let mut attr: fi_av_attr = std::mem::zeroed();
                    attr.type_ = FI_AV_TABLE;
                    let mut av = null_mut();
                    let ret = call!(
                        (*domain).ops,
                        av_open,
                        domain,
                        &raw mut attr,
                        &raw mut av,
                        null_mut()
                    );
                    assert_eq!(ret, 0, "fi_av_open");
                    this.av = av;
                    this.ep = this.endpoint(domain, this.info.first());
                    this.enable();
                }
            }
            this
        }
    }

    /// # Safety
    /// A live domain, and a whole `fi_info`.
    unsafe fn endpoint(&self, domain: *mut fid_domain, info: *mut fi_info) -> *mut fid_ep {
        let mut ep = null_mut();
        // SAFETY: the caller's promise; live fids.
        unsafe {
            let ret = call!(
                (*domain).ops,
                endpoint,
                domain,
                info,
                &raw mut ep,
                null_mut()
            );
            assert_eq!(ret, 0, "fi_endpoint");
            if self.kind == Endpoint::Msg {
                assert_eq!(bind(ep, self.eq, 0), 0, "binding the event queue");
            } else {
                assert_eq!(bind(ep, self.av, 0), 0, "binding the address vector");
            }
            assert_eq!(bind(ep, self.tx, FI_TRANSMIT), 0);
            assert_eq!(bind(ep, self.rx, FI_RECV), 0);
        }
        ep
    }

    fn enable(&mut self) {
        // SAFETY: a live endpoint.
        unsafe { assert_eq!(control(self.ep, FI_ENABLE, null_mut()), 0, "fi_enable") };
        for _ in 0..RECEIVES {
            self.post_recv();
        }
    }

    /// # Safety
    /// A live fabric.
    unsafe fn listen(&mut self, fabric: *mut fid_fabric) {
        // SAFETY: live fids.
        unsafe {
            let mut pep = null_mut();
            let info = self.info.first();
            let ret = call!(
                (*fabric).ops,
                passive_ep,
                fabric,
                info,
                &raw mut pep,
                null_mut()
            );
            assert_eq!(ret, 0, "fi_passive_ep");
            assert_eq!(bind(pep, self.eq, 0), 0);
            assert_eq!(call!((*pep).cm, listen, pep), 0, "fi_listen");
            self.pep = pep;
        }
    }

    /// The address of this end; empty for a message endpoint that connects.
    fn name(&self) -> Vec<u8> {
        if self.kind == Endpoint::Msg && self.pep.is_null() {
            return vec![0];
        }
        let mut name = vec![0_u8; 256];
        let mut len = name.len();
        let at = name.as_mut_ptr().cast();
        // SAFETY: a live endpoint or passive endpoint, and a buffer of that length.
        let ret = unsafe {
            if self.pep.is_null() {
                call!(
                    (*self.ep).cm,
                    getname,
                    &raw mut (*self.ep).fid,
                    at,
                    &raw mut len
                )
            } else {
                call!(
                    (*self.pep).cm,
                    getname,
                    &raw mut (*self.pep).fid,
                    at,
                    &raw mut len
                )
            }
        };
        assert_eq!(ret, 0, "fi_getname");
        name.truncate(len);
        name
    }

    /// Waits for this connection event, and returns its `fi_info`.
    fn event(&self, wanted: u32) -> *mut fi_info {
        let mut buf = [0_u64; 16];
        let mut number = 0;
        // SAFETY: a live queue and a buffer of that size.
        unsafe {
            let eq = self.eq;
            let at = buf.as_mut_ptr().cast();
            let len = call!((*eq).ops, sread, eq, &raw mut number, at, 128, 20_000, 0);
            assert!(len > 0 && number == wanted, "event {wanted}: {len}");
            (*buf.as_ptr().cast::<fi_eq_cm_entry>()).info
        }
    }

    fn context(&mut self) -> *mut c_void {
        self.next = (self.next + 1) % self.contexts.len();
        (&raw mut self.contexts[self.next]).cast()
    }

    /// Posts one more receive.
    #[inline]
    pub(crate) fn post_recv(&mut self) {
        let context = self.context();
        let (ep, from) = (self.ep, FI_ADDR_UNSPEC);
        // SAFETY: a live endpoint, a registered buffer.
        unsafe {
            let desc = (*self.in_mr).mem_desc;
            let at = self.inbox.at.cast();
            loop {
                let ret = if self.kind == Endpoint::Tagged {
                    let (tag, ignored) = (TAG, IGNORED);
                    call!(
                        (*ep).tagged,
                        recv,
                        ep,
                        at,
                        BUFFER,
                        desc,
                        from,
                        tag,
                        ignored,
                        context
                    )
                } else {
                    call!((*ep).msg, recv, ep, at, BUFFER, desc, from, context)
                };
                if ret == 0 {
                    return;
                }
                assert_eq!(ret, -(FI_EAGAIN as isize), "fi_recv");
            }
        }
    }

    /// Posts a send with a completion. False if the queue is full.
    #[inline]
    pub(crate) fn post_send(&mut self, len: usize) -> bool {
        let context = self.context();
        let (ep, at) = (self.ep, self.outbox.at.cast());
        let (desc, to) = (self.out_desc, self.peer);
        // SAFETY: a live endpoint, a registered buffer.
        let ret = unsafe {
            if self.kind == Endpoint::Tagged {
                call!((*ep).tagged, send, ep, at, len, desc, to, TAG, context)
            } else {
                call!((*ep).msg, send, ep, at, len, desc, to, context)
            }
        };
        posted(ret, "fi_send")
    }

    #[inline]
    pub(crate) fn post_inject(&mut self, len: usize) -> bool {
        let (ep, at) = (self.ep, self.outbox.at.cast());
        // SAFETY: a live endpoint, a readable buffer.
        let ret = unsafe {
            if self.kind == Endpoint::Tagged {
                call!((*ep).tagged, inject, ep, at, len, self.peer, TAG)
            } else {
                call!((*ep).msg, inject, ep, at, len, self.peer)
            }
        };
        posted(ret, "fi_inject")
    }

    /// As [`Self::post_inject`], a tagged message with remote CQ data, as an MPI sends it.
    pub(crate) fn post_inject_data(&mut self, len: usize) -> bool {
        let (ep, at) = (self.ep, self.outbox.at.cast());
        // SAFETY: as above.
        let ret = unsafe { call!((*ep).tagged, injectdata, ep, at, len, 7, self.peer, TAG) };
        posted(ret, "fi_tinjectdata")
    }

    /// Sends a message to the peer from a further endpoint. The earlier ones stay open.
    pub(crate) fn send_from_another(&mut self) {
        // SAFETY: a live domain, a whole fi_info, an endpoint with its objects.
        unsafe {
            self.ep = self.endpoint(self.domain, self.info.first());
            assert_eq!(control(self.ep, FI_ENABLE, null_mut()), 0, "fi_enable");
        }
        while !self.post_inject(8) {
            self.poll(self.tx, 1);
        }
    }

    /// Reads up to `most` (at most 16) completions, and returns their number.
    #[inline]
    pub(crate) fn poll(&mut self, cq: *mut fid_cq, most: usize) -> u64 {
        let mut entries = [const { std::mem::MaybeUninit::<fi_cq_entry>::uninit() }; 16];
        // SAFETY: a live queue, room for that many.
        let ret = unsafe {
            let most = most.min(entries.len());
            call!((*cq).ops, read, cq, entries.as_mut_ptr().cast(), most)
        };
        if ret >= 0 {
            return ret.cast_unsigned() as u64;
        }
        assert_eq!(ret, -(FI_EAGAIN as isize), "{}", failure(cq));
        0
    }

    pub(crate) fn tx(&self) -> *mut fid_cq {
        self.tx
    }

    pub(crate) fn rx(&self) -> *mut fid_cq {
        self.rx
    }

    /// Waits for a message. Returns the number of receives that the caller must post for it: 0 if
    /// another wait has read the message and posted a receive.
    #[inline]
    fn arrive(&mut self) -> u64 {
        if self.arrived > 0 {
            self.arrived -= 1;
            return 0;
        }
        let mut patience = Patience::default();
        while self.poll(self.rx, 1) == 0 {
            patience.wait();
        }
        1
    }

    /// Waits for `count` messages, and posts a receive for each.
    #[inline]
    fn receive(&mut self, count: u64, batch: usize) {
        let mut patience = Patience::default();
        while self.arrived < count {
            let got = self.poll(self.rx, batch);
            for _ in 0..got {
                self.post_recv();
            }
            self.arrived += got;
            patience.wait();
        }
        self.arrived -= count;
    }

    /// Waits for completions of the transmit side.
    #[inline]
    fn complete(&mut self, mut count: u64) {
        while count > 0 {
            count -= self.poll(self.tx, 16.min(count as usize));
        }
    }

    /// Reads received messages and posts receives, while the send queue is full.
    #[cold]
    fn progress(&mut self) {
        let got = self.poll(self.rx, 16);
        for _ in 0..got {
            self.post_recv();
        }
        self.arrived += got;
    }

    /// Sends. Returns the number of completions to wait for: 0 for inject, else 1.
    #[inline]
    fn send(&mut self, len: usize, inject: bool) -> u64 {
        if inject && len <= self.inject_size {
            while !self.post_inject(len) {
                self.poll(self.tx, 1);
                self.progress();
            }
            return 0;
        }
        while !self.post_send(len) {
            self.progress();
        }
        1
    }

    fn pingpong(&mut self, len: usize, count: u64, inject: bool) -> f64 {
        let warm = unmeasured(count);
        let mut begin = Instant::now();
        let first = self.side.is_first();
        let mut owed = 0;
        for i in 0..count {
            if i == warm {
                begin = Instant::now();
            }
            if !first {
                owed = self.arrive();
            }
            let open = self.send(len, inject);
            // posted while the message is in flight
            if owed > 0 {
                self.post_recv();
            }
            self.complete(open);
            if first {
                owed = self.arrive();
            }
        }
        let nanos = begin.elapsed().as_nanos() as f64;
        if first && owed > 0 {
            self.post_recv();
        }
        nanos / (count - warm) as f64 / 2.0
    }

    fn stream(&mut self, len: usize, count: u64) -> f64 {
        let windows = count.div_ceil(WINDOW);
        let warm = unmeasured(windows);
        let mut begin = Instant::now();
        if !self.side.is_first() {
            for _ in 0..windows {
                self.receive(WINDOW, 16);
                let open = self.send(8, true);
                self.complete(open);
            }
            return 0.0;
        }
        let mut answers = 0;
        for window in 0..windows {
            if window == warm {
                self.receive(warm - answers, 16);
                answers = warm;
                begin = Instant::now();
            }
            let mut open = 0;
            for _ in 0..WINDOW {
                open += self.send(len, true);
            }
            self.complete(open);
            while answers + 1 < window {
                self.receive(1, 1);
                answers += 1;
            }
        }
        self.receive(windows - answers, 16);
        begin.elapsed().as_nanos() as f64 / ((windows - warm) * WINDOW) as f64
    }

    /// Processor time per second while a thread waits in `fi_cq_sread`.
    fn idle(&mut self, seconds: u64) -> f64 {
        struct Waiter(*mut fid_cq);
        // SAFETY: this thread alone uses the queue meanwhile.
        unsafe impl Send for Waiter {}
        impl Waiter {
            fn wait(&self) {
                // SAFETY: a live queue, room for one.
                unsafe {
                    let mut entry: fi_cq_entry = std::mem::zeroed();
                    let at = (&raw mut entry).cast();
                    let cq = self.0;
                    let ret = call!((*cq).ops, sread, cq, at, 1, std::ptr::null(), 60_000);
                    assert_eq!(ret, 1, "fi_cq_sread");
                }
            }
        }
        let waiter = Waiter(self.rx);
        let thread = std::thread::spawn(move || waiter.wait());
        let used = idle(seconds);
        // each side wakes the peer's waiting thread
        let open = self.send(8, true);
        self.complete(open);
        thread.join().expect("the waiter");
        self.post_recv();
        used
    }
}

/// How many of these repetitions, a tenth, come first and are not measured: peers connect
/// meanwhile. `ucx_perftest` runs as many.
fn unmeasured(count: u64) -> u64 {
    count.div_ceil(10)
}

/// True if the operation was posted, false for `EAGAIN`. Panics for any other error.
#[inline]
fn posted(ret: isize, name: &str) -> bool {
    assert!(ret == 0 || ret == -(FI_EAGAIN as isize), "{name}: {ret}");
    ret == 0
}

#[cold]
fn failure(cq: *mut fid_cq) -> String {
    // SAFETY: a live queue.
    unsafe {
        let mut error = std::mem::zeroed::<fi_cq_err_entry>();
        call!((*cq).ops, readerr, cq, &raw mut error, 0);
        format!("completion: err {} prov {}", error.err, error.prov_errno)
    }
}

/// # Safety
/// A live domain.
unsafe fn register_as(
    domain: *mut fid_domain,
    memory: Memory,
    access: u64,
    key: u64,
) -> *mut fid_mr {
    let mut mr = null_mut();
    // SAFETY: the caller's promise; the memory is never freed.
    let ret = unsafe {
        call!(
            (*domain).mr,
            reg,
            &raw mut (*domain).fid,
            memory.at.cast(),
            memory.len,
            access,
            0,
            key,
            0,
            &raw mut mr,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_mr_reg");
    mr
}

impl Subject for Fabric {
    fn address(&mut self) -> String {
        // SAFETY: whole attributes, a live region.
        let (virt, key) = unsafe {
            let mode = (*(*self.info.first()).domain_attr).mr_mode.cast_unsigned();
            (mode & FI_MR_VIRT_ADDR.cast_unsigned(), (*self.in_mr).key)
        };
        let addr = if virt != 0 { self.inbox.addr() } else { 0 };
        format!("{} {addr} {key}", hex(&self.name()))
    }

    fn connect(&mut self, other: &str) {
        let words: Vec<&str> = other.split(' ').collect();
        let [name, addr, key] = words[..] else {
            panic!("{other}: not an end's address")
        };
        let name = unhex(name);
        self.remote = (
            addr.parse().expect("an address"),
            key.parse().expect("a key"),
        );
        // SAFETY: live fids, a name of the provider's own format.
        unsafe {
            let name = name.as_ptr().cast();
            match (self.kind, self.side) {
                (Endpoint::Rdm | Endpoint::Tagged, _) => {
                    let (av, peer) = (self.av, &raw mut self.peer);
                    let ret = call!((*av).ops, insert, av, name, 1, peer, 0, null_mut());
                    assert_eq!(ret, 1, "fi_av_insert");
                }
                (Endpoint::Msg, Side::First) => {
                    self.enable();
                    let ep = self.ep;
                    let ret = call!((*ep).cm, connect, ep, name, std::ptr::null(), 0);
                    assert_eq!(ret, 0, "fi_connect");
                    self.event(FI_CONNECTED);
                }
                (Endpoint::Msg, Side::Second) => {
                    let info = self.event(FI_CONNREQ);
                    self.ep = self.endpoint(self.domain, info);
                    self.enable();
                    let ep = self.ep;
                    assert_eq!(
                        call!((*ep).cm, accept, ep, std::ptr::null(), 0),
                        0,
                        "fi_accept"
                    );
                    self.event(FI_CONNECTED);
                }
            }
        }
    }

    fn run(&mut self, op: Op, len: usize, count: u64) -> f64 {
        match op {
            Op::Pingpong => self.pingpong(len, count, true),
            Op::PingpongSend => self.pingpong(len, count, false),
            Op::Stream => self.stream(len, count),
            Op::WritePingpong => self.write_pingpong(len, count),
            Op::Write
            | Op::Read
            | Op::WriteStream
            | Op::ReadStream
            | Op::WriteStreamMore
            | Op::WriteStreamNext
            | Op::FetchAdd => self.access(op, len, count),
            Op::Idle => self.idle(count),
            other => panic!("libfabric has no {other}"),
        }
    }
}

/// An end that another thread may use while no other thread uses the objects of its domain.
pub(crate) struct Sendable<'a>(pub(crate) &'a mut Fabric);

// SAFETY: `FI_THREAD_DOMAIN`: a domain's objects may be used by any thread, one at a time.
unsafe impl Send for Sendable<'_> {}
