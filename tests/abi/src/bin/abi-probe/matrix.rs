//! All cases of one form of regions: role `matrix`, and `matrix-rdm` for endpoints with many peers,
//! which are not connected when they are used first; `matrix-xrc` and `matrix-rdm-xrc` are the same
//! on XRC; `matrix-both` is `matrix` and then `matrix-rdm` in one process. `FI_WEFT_MR_MODE` forces
//! the form.
//! Prints a line `ok NAME` or `FAILED NAME` for each way to register and each operation, and `mode
//! 0x...` for the `mr_mode` of `fi_getinfo`.
//!
//! For each pair: contents and addressing, the key, access that was not granted, one byte out of
//! bounds, access after the region is closed, another region at its address, memory that is
//! allocated after its registration, counted events, and that an endpoint's region is not
//! accessible through another endpoint.
//!
//! `WEFT_PROBE_NODE` is an address other than 127.0.0.1; `WEFT_PROBE_PINS=1` states that its device
//! pins pages.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, register};
use abi_tests::pair::completion;
use abi_tests::weft::mr_ops;
use libfabric_sys::*;

mod ends;
mod target;

use ends::Ends;
use target::{Target, map, refresh_of, resident, unmap};

/// Bytes of a page, and of the first buffer.
const PAGE: usize = 4096;
/// Lengths of the buffers of a region of several: the second begins on another page, the third is
/// not page-aligned.
const LENS: [usize; 3] = [PAGE, 64, 1000];
/// The application's key.
const KEY: u64 = 0x1234_5678_9abc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Reg,
    Regv,
    Regattr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Write,
    Read,
    Atomic,
    WriteData,
}

impl Op {
    /// The access right that the operation needs at the target, and one that does not permit it.
    fn rights(self) -> (u64, u64) {
        match self {
            Self::Read => (FI_REMOTE_READ, FI_REMOTE_WRITE),
            _ => (FI_REMOTE_WRITE, FI_REMOTE_READ),
        }
    }
}

struct World<'a> {
    lib: &'a Lib,
    setup: Setup,
    mode: i32,
    ends: Option<Ends>,
    /// This side's buffer, and its region if the form requires one.
    local: Box<[u8; 2 * PAGE]>,
    local_mr: *mut fid_mr,
    /// Counters of peers' writes and reads, if events are counted.
    counters: [*mut fid_cntr; 2],
    /// Whether the device pins pages (`WEFT_PROBE_PINS=1`); soft0 does not.
    pins: bool,
}

impl World<'_> {
    fn has(&self, bit: i32) -> bool {
        self.mode & bit != 0
    }

    /// The device's count of a region's pages that advice made present.
    fn prefetched(&self, mr: *mut fid_mr) -> u64 {
        let mut pages = u64::MAX;
        // SAFETY: an open domain and region, room for the number.
        unsafe {
            let count = mr_ops(self.setup.domain).mr_prefetched;
            assert_eq!(count.expect("mr_prefetched")(mr, &raw mut pages), 0);
        }
        pages
    }

    /// Whether the device alone checks the key: a refused access then ends the connection.
    fn is_native(&self, target: &Target) -> bool {
        self.has(FI_MR_PROV_KEY) && !target.mapped && target.key >> 32 == 0
    }

    fn connect(&mut self) {
        // SAFETY: fids as they are opened.
        unsafe {
            if let Some(ends) = self.ends.take() {
                ends.close();
            }
            self.drain();
            self.ends = Some(Ends::open(self.lib, &self.setup));
        }
    }

    /// Reads the flushed completions and the shutdown events of a closed pair.
    fn drain(&mut self) {
        // SAFETY: open queues.
        unsafe {
            {
                let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
                loop {
                    let ret = call!(
                        (*self.setup.cq).ops,
                        read,
                        self.setup.cq,
                        (&raw mut entry).cast(),
                        1
                    );
                    if ret == -(FI_EAGAIN as isize) {
                        break;
                    }
                    let mut error = std::mem::zeroed::<fi_cq_err_entry>();
                    if ret < 0 {
                        call!(
                            (*self.setup.cq).ops,
                            readerr,
                            self.setup.cq,
                            &raw mut error,
                            0
                        );
                    }
                }
                let mut buf = [0_u64; 16];
                let mut number = 0;
                let eq = self.setup.eq;
                while call!(
                    (*eq).ops,
                    read,
                    eq,
                    &raw mut number,
                    buf.as_mut_ptr().cast(),
                    128,
                    0
                ) > 0
                {}
            }
        }
    }

    fn ends(&self) -> &Ends {
        self.ends.as_ref().expect("open endpoints")
    }

    /// Registers 3 of the 4 pages at `memory`, or one buffer of them.
    unsafe fn expose(&mut self, how: How, access: u64, memory: *mut u8) -> Target {
        // SAFETY: the caller's promise.
        let target = unsafe { self.made(how, access, memory) };
        // another region may have had the key
        // SAFETY: the caller promises open fids.
        unsafe { self.told() };
        target
    }

    unsafe fn made(&self, how: How, access: u64, memory: *mut u8) -> Target {
        let domain = self.setup.domain;
        let mut mr = null_mut();
        // SAFETY: the caller keeps the memory; pieces lie inside it.
        unsafe {
            let places = [memory, memory.add(PAGE), memory.add(2 * PAGE + 8)];
            let pieces: Vec<_> = match how {
                How::Reg => vec![(memory, 2 * PAGE)],
                How::Regv | How::Regattr => places.into_iter().zip(LENS).collect(),
            };
            let iov: Vec<_> = pieces
                .iter()
                .map(|(start, len)| libc::iovec {
                    iov_base: start.cast::<c_void>(),
                    iov_len: *len,
                })
                .collect();
            let fid = &raw mut (*domain).fid;
            let ops = (*domain).mr;
            let flags = if self.has(FI_MR_RMA_EVENT) {
                FI_RMA_EVENT
            } else {
                0
            };
            let ret = match how {
                How::Reg => call!(
                    ops,
                    reg,
                    fid,
                    memory.cast(),
                    2 * PAGE,
                    access,
                    0,
                    KEY,
                    flags,
                    &raw mut mr,
                    null_mut()
                ),
                How::Regv => call!(
                    ops,
                    regv,
                    fid,
                    iov.as_ptr(),
                    iov.len(),
                    access,
                    0,
                    KEY,
                    flags,
                    &raw mut mr,
                    null_mut()
                ),
                How::Regattr => {
                    let mut attr = std::mem::zeroed::<fi_mr_attr>();
                    attr.__bindgen_anon_1.mr_iov = iov.as_ptr();
                    attr.iov_count = iov.len();
                    attr.access = access;
                    attr.requested_key = KEY;
                    call!(ops, regattr, fid, &raw const attr, flags, &raw mut mr)
                }
            };
            assert_eq!(ret, 0, "registering by {how:?}");
            self.enable(mr);
            let mut base = if self.has(FI_MR_VIRT_ADDR) {
                memory as u64
            } else {
                0
            };
            let mut key = (*mr).key;
            if self.has(FI_MR_RAW) {
                assert_eq!(key, FI_KEY_NOTAVAIL);
                (base, key) = self.mapped(mr, base);
            } else if !self.has(FI_MR_PROV_KEY) {
                assert_eq!(key, KEY, "the application's key");
                let twice = call!(
                    ops,
                    reg,
                    fid,
                    memory.cast(),
                    8,
                    access,
                    0,
                    KEY,
                    0,
                    &raw mut mr,
                    null_mut()
                );
                assert_eq!(twice, -FI_ENOKEY, "the key is in use");
            }
            Target {
                mr,
                pieces,
                base,
                key,
                mapped: self.has(FI_MR_RAW),
                from: (how, access, memory),
            }
        }
    }

    /// Binds the counter or endpoint that the form requires, and enables the region.
    unsafe fn enable(&self, mr: *mut fid_mr) {
        // SAFETY: open fids.
        unsafe {
            let early = !self.has(FI_MR_RMA_EVENT | FI_MR_ENDPOINT);
            if self.has(FI_MR_RMA_EVENT) {
                for (counter, kind) in self.counters.iter().zip([FI_REMOTE_WRITE, FI_REMOTE_READ]) {
                    assert_eq!(bind(mr, *counter, kind), 0, "binding a counter");
                }
            }
            if self.has(FI_MR_ENDPOINT) {
                assert_eq!(bind(mr, self.ends().server, 0), 0, "binding the endpoint");
            }
            if !early {
                if self.has(FI_MR_PROV_KEY) {
                    assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "a disabled region has no key");
                }
                assert_eq!(control(mr, FI_ENABLE, null_mut()), 0, "enabling");
            }
        }
    }

    /// Reports that the pages of the region were replaced.
    unsafe fn refresh(&self, target: &Target) {
        let pieces = target.pieces.iter();
        let mut iov: Vec<_> = pieces
            .map(|(start, len)| libc::iovec {
                iov_base: start.cast::<c_void>(),
                iov_len: *len,
            })
            .collect();
        // SAFETY: an open region, and a list of that length.
        unsafe {
            let mut modify = std::mem::zeroed::<fi_mr_modify>();
            modify.attr.__bindgen_anon_1.mr_iov = iov.as_ptr();
            modify.attr.iov_count = iov.len();
            let modify = &raw mut modify;
            assert_eq!(control(target.mr, FI_REFRESH, modify.cast()), 0, "refresh");
            iov[0].iov_len += PAGE;
            assert_eq!(
                control(target.mr, FI_REFRESH, modify.cast()),
                -FI_EINVAL,
                "more than the region"
            );
        }
    }

    /// The values of the counters.
    unsafe fn counts(&self) -> [u64; 2] {
        self.counters.map(|counter| {
            if counter.is_null() {
                return 0;
            }
            // SAFETY: an open counter.
            unsafe { call!((*counter).ops, read, counter) }
        })
    }

    unsafe fn mapped(&self, mr: *mut fid_mr, expected: u64) -> (u64, u64) {
        // SAFETY: open fids.
        unsafe {
            let limit = (*(*self.setup.info.first()).domain_attr).mr_key_size;
            let (mut base, mut size, mut key) = (0_u64, limit, 0_u64);
            let mut bytes = vec![0_u8; limit];
            let mut attr = fi_mr_raw_attr {
                flags: 0,
                base_addr: &raw mut base,
                raw_key: bytes.as_mut_ptr(),
                key_size: &raw mut size,
            };
            assert_eq!(control(mr, FI_GET_RAW_MR, (&raw mut attr).cast()), 0);
            assert_eq!(base, expected);
            let mut map = fi_mr_map_raw {
                flags: 0,
                base_addr: base,
                raw_key: bytes.as_mut_ptr(),
                key_size: size,
                key: &raw mut key,
            };
            let ret = control(self.setup.domain, FI_MAP_RAW_MR, (&raw mut map).cast());
            assert_eq!(ret, 0, "fi_mr_map_raw");
            (base, key)
        }
    }

    unsafe fn hide(&self, target: &mut Target) {
        // SAFETY: open fids.
        unsafe {
            if self.has(FI_MR_ENDPOINT) {
                let server = self.ends().server;
                assert_eq!(close(server), -FI_EBUSY, "its region is bound to it");
            }
            if self.has(FI_MR_RMA_EVENT) {
                assert_eq!(close(self.counters[0]), -FI_EBUSY, "it counts");
            }
            assert_eq!(close(target.mr), 0, "closing the region");
            target.mr = null_mut();
            if target.mapped {
                let mut key = target.key;
                assert_eq!(
                    control(self.setup.domain, FI_UNMAP_KEY, (&raw mut key).cast()),
                    0
                );
            }
        }
    }

    /// Posts a receive at the server, for remote CQ data.
    unsafe fn post_receive(&self) {
        // SAFETY: an open endpoint.
        unsafe {
            let rx = self.ends().server_rx;
            let none = null_mut();
            let posted = call!((*rx).msg, recv, rx, none, 0, none, 0, none);
            assert_eq!(posted, 0, "fi_recv");
        }
    }

    /// One operation of `len` bytes at an offset; `Err`: the errno of its completion.
    unsafe fn run(&mut self, op: Op, target: &Target, at: u64, len: usize) -> Result<(), c_int> {
        // SAFETY: connected endpoints, and a buffer that outlives the operation.
        unsafe {
            let (ep, to) = (self.ends().client, self.ends().to_server);
            let buf = self.local.as_mut_ptr().cast::<c_void>();
            let desc = if self.local_mr.is_null() {
                null_mut()
            } else {
                (*self.local_mr).mem_desc
            };
            let (addr, key) = (target.base + at, target.key);
            let ret = match op {
                Op::Write => call!((*ep).rma, write, ep, buf, len, desc, to, addr, key, buf),
                Op::Read => call!((*ep).rma, read, ep, buf, len, desc, to, addr, key, buf),
                Op::WriteData => {
                    if self.ends().are_connected() {
                        self.post_receive();
                    }
                    call!(
                        (*ep).rma,
                        writedata,
                        ep,
                        buf,
                        len,
                        desc,
                        0xda7a,
                        to,
                        addr,
                        key,
                        buf
                    )
                }
                Op::Atomic => call!(
                    (*ep).atomic,
                    write,
                    ep,
                    buf,
                    len / 8,
                    desc,
                    to,
                    addr,
                    key,
                    FI_UINT64,
                    FI_SUM,
                    buf
                ),
            };
            if ret != 0 {
                return Err((-ret) as c_int);
            }
            let mut left = if op == Op::WriteData { 2 } else { 1 };
            while left > 0 {
                match completion(self.setup.cq) {
                    Ok(entry) if entry.op_context == buf => left -= 1,
                    Ok(entry) => {
                        assert_eq!(entry.flags & FI_REMOTE_CQ_DATA, FI_REMOTE_CQ_DATA);
                        assert_eq!(entry.data, 0xda7a);
                        left -= 1;
                    }
                    Err((error, context)) if context == buf => return Err(error),
                    // a flushed receive, if the connection is broken
                    Err(_) => {}
                }
            }
            Ok(())
        }
    }

    /// The operation transfers the expected bytes.
    unsafe fn moves(&mut self, op: Op, target: &Target, at: usize, len: usize, seed: u8) {
        let pattern: Vec<u8> = (0..len)
            .map(|i| (i as u8).wrapping_mul(37) ^ seed)
            .collect();
        // SAFETY: mapped memory; the caller's promise else.
        unsafe {
            let before = self.counts();
            match op {
                Op::Write | Op::WriteData => {
                    self.local[..len].copy_from_slice(&pattern);
                    assert_eq!(self.run(op, target, at as u64, len), Ok(()));
                    assert!(target.bytes(at, len) == pattern, "{op:?} at {at}");
                }
                Op::Read => {
                    for (i, byte) in pattern.iter().enumerate() {
                        target.byte(at + i).write_volatile(*byte);
                    }
                    self.local.fill(0);
                    assert_eq!(self.run(op, target, at as u64, len), Ok(()));
                    assert!(self.local[..len] == pattern, "{op:?} at {at}");
                }
                Op::Atomic => {
                    let cell = target.byte(at).cast::<u64>();
                    cell.write_volatile(1000);
                    self.local[..8].copy_from_slice(&u64::from(seed).to_ne_bytes());
                    assert_eq!(self.run(op, target, at as u64, 8), Ok(()));
                    assert_eq!(cell.read_volatile(), 1000 + u64::from(seed));
                }
            }
            if self.has(FI_MR_RMA_EVENT) {
                let read = u64::from(op == Op::Read);
                let [writes, reads] = self.counts();
                assert_eq!(
                    (writes, reads),
                    (before[0] + 1 - read, before[1] + read),
                    "events of {op:?} at {at}"
                );
            }
        }
    }

    /// Afterwards the client has processed the revocations of the server's regions. On a device
    /// that pins, operations with a reused key reach the former memory until then.
    unsafe fn told(&mut self) {
        if !self.pins {
            return;
        }
        // SAFETY: connected endpoints, and a buffer that outlives the receive.
        unsafe {
            let &Ends {
                client_rx: rx,
                server,
                to_client,
                ..
            } = self.ends();
            let buf = self.local.as_mut_ptr().cast::<c_void>();
            let desc = if self.local_mr.is_null() {
                null_mut()
            } else {
                (*self.local_mr).mem_desc
            };
            let ret = call!((*rx).msg, recv, rx, buf, 8, desc, 0, buf);
            assert_eq!(ret, 0, "fi_recv");
            let ret = call!((*server).msg, inject, server, buf, 8, to_client);
            assert_eq!(ret, 0, "fi_inject");
            let entry = completion(self.setup.cq).expect("a message");
            assert_eq!(entry.op_context, buf);
        }
    }

    /// The operation accesses the region's former pages, and not those that are mapped at its
    /// addresses now.
    unsafe fn stays_outside(&mut self, op: Op, target: &Target, len: usize) {
        let now = target.bytes(0, target.len());
        // SAFETY: the caller's promise.
        unsafe {
            self.local.fill(0x11);
            assert_eq!(self.run(op, target, 0, len), Ok(()), "the old pages");
        }
        if op == Op::Read {
            assert!(self.local[..len] != now[..len], "the old pages were read");
        }
        assert!(target.bytes(0, now.len()) == now, "the new pages are new");
    }

    /// The operation is refused, and not counted. If only the device can refuse it, the connection
    /// ends. Connected endpoints are then opened again; a region of an endpoint ends with its
    /// endpoint, and is registered again.
    unsafe fn refused(&mut self, op: Op, target: &mut Target, at: u64, len: usize, what: &str) {
        // SAFETY: the caller's promise.
        unsafe {
            let before = self.counts();
            let result = self.run(op, target, at, len);
            assert!(result.is_err(), "{what} was not refused");
            assert_eq!(self.counts(), before, "{what} was counted");
            let (how, access, memory) = target.from;
            if self.ends().are_connected() && (self.is_native(target) || op == Op::WriteData) {
                // (with data, the receive that waits for it still does)
                let again = self.has(FI_MR_ENDPOINT) && !target.mr.is_null();
                if again {
                    self.hide(target);
                }
                self.connect();
                if again {
                    *target = self.expose(how, access, memory);
                }
            } else {
                let known = [FI_EACCES, FI_EKEYREJECTED, FI_EINVAL];
                assert!(known.contains(&result.unwrap_err()), "{what}: {result:?}");
            }
        }
    }

    /// Another endpoint of the same domain does not give access to the region.
    unsafe fn refused_elsewhere(&mut self, op: Op, target: &mut Target, len: usize) {
        // SAFETY: fids as they are opened.
        unsafe {
            let own = self.ends.take();
            self.connect();
            let result = self.run(op, target, 0, len);
            assert!(result.is_err(), "another endpoint gave access");
            let other = std::mem::replace(&mut self.ends, own);
            other.expect("connected").close();
            self.drain();
        }
    }

    unsafe fn case(&mut self, how: How, op: Op) {
        let all = FI_REMOTE_READ | FI_REMOTE_WRITE;
        let memory = map(null_mut());
        self.connect();
        // SAFETY: the memory is there while it is used; fids as they are opened.
        unsafe {
            let mut target = self.expose(how, all, memory);
            let len = target.len();
            let size = if op == Op::Atomic { 8 } else { 64 };
            self.moves(op, &target, 0, size, 1);
            self.moves(op, &target, len - 1000, size, 2);
            if op != Op::Atomic {
                self.moves(op, &target, 0, len, 3);
                self.moves(op, &target, PAGE - 3, 7, 4);
                self.moves(op, &target, len - 1, 1, 5);
            }
            self.refused(
                op,
                &mut target,
                (len - size + 8) as u64,
                size,
                "beyond the end",
            );
            if op != Op::Atomic {
                self.refused(
                    op,
                    &mut target,
                    (len - size + 1) as u64,
                    size,
                    "one byte too many",
                );
            }
            self.moves(op, &target, 8, size, 6);
            if self.has(FI_MR_ENDPOINT) {
                self.refused_elsewhere(op, &mut target, size);
                self.moves(op, &target, 16, size, 6);
            }
            self.hide(&mut target);
            self.told();
            self.refused(op, &mut target, 0, size, "a closed region");
            let (right, wrong) = op.rights();
            let mut limited = self.expose(how, wrong, memory);
            self.refused(op, &mut limited, 0, size, "what was not granted");
            self.hide(&mut limited);
            // with the same key, if the application chooses keys
            let mut again = self.expose(how, right, memory);
            self.moves(op, &again, 16, size, 7);
            self.hide(&mut again);
            if !self.has(FI_MR_ALLOCATED) {
                unmap(memory);
                let mut early = self.expose(how, all, memory);
                map(memory);
                if self.has(FI_MR_MMU_NOTIFY) {
                    self.refresh(&early);
                    self.told();
                }
                self.moves(op, &early, 24, size, 8);
                self.hide(&mut early);
            }
        }
        unmap(memory);
        // SAFETY: fids as they are opened.
        unsafe { self.refreshing(how, op) };
    }

    /// The effect of `fi_mr_refresh`. On demand: the named pages become present, and no others.
    /// Pinned by parts: operations access the new pages, also those of a peer that has cached the
    /// region's record. Pinned until closed: the call is refused.
    unsafe fn refreshing(&mut self, how: How, op: Op) {
        let size = if op == Op::Atomic { 8 } else { 64 };
        let memory = map(null_mut());
        // SAFETY: the memory is there while it is used; fids as they are opened.
        unsafe {
            // without huge pages, so that pages are counted singly
            libc::madvise(memory.cast(), 4 * PAGE, libc::MADV_NOHUGEPAGE);
            let mut target = self.expose(how, FI_REMOTE_READ | FI_REMOTE_WRITE, memory);
            if self.has(FI_MR_MMU_NOTIFY) {
                self.moves(op, &target, 0, size, 9);
                // new pages at the same addresses, with other contents
                map(memory);
                (0..4 * PAGE).for_each(|at| memory.add(at).write_volatile(0xee));
                // atomics of endpoints with many peers may be executed by the target's processor,
                // which accesses the pages that are mapped
                if self.pins && (self.ends().are_connected() || op != Op::Atomic) {
                    self.stays_outside(op, &target, size);
                }
                self.refresh(&target);
                self.told();
                self.moves(op, &target, 0, size, 10);
                self.moves(op, &target, PAGE, size, 11);
                let rest = target.bytes(PAGE / 2, 64);
                assert!(rest.iter().all(|byte| *byte == 0xee), "the new pages");
            } else if self.has(FI_MR_ALLOCATED) {
                let (start, len) = target.pieces[0];
                let ret = refresh_of(target.mr, start, len);
                assert_eq!(ret, -FI_EOPNOTSUPP, "pinned for good");
            } else {
                assert_eq!(resident(memory), [false; 4], "nobody has used it");
                assert_eq!(self.prefetched(target.mr), 0, "nobody has asked for it");
                // the second page of the first buffer, if it has one
                let (start, len) = target.pieces[0];
                let last = len / PAGE - 1;
                assert_eq!(refresh_of(target.mr, start.add(last * PAGE), 8), 0);
                let mut wanted = [false; 4];
                wanted[last] = true;
                assert_eq!(resident(memory), wanted, "what was named, and nothing else");
                assert_eq!(self.prefetched(target.mr), 1, "by the device's count");
                self.moves(op, &target, 0, size, 12);
                assert_eq!(self.prefetched(target.mr), 1, "transfers are not counted");
            }
            self.hide(&mut target);
        }
        unmap(memory);
    }
}

/// `xrc`: endpoints on XRC, connected ones with a shared receive context.
pub(crate) fn run(lib: &Lib, kind: fi_ep_type, xrc: bool) {
    let hints = hints(lib);
    // SAFETY: hints have all their parts.
    let setup = unsafe {
        let info = hints.first();
        (*info).caps = FI_MSG | FI_RMA | FI_ATOMIC;
        (*(*info).ep_attr).type_ = kind;
        if xrc {
            (*(*info).ep_attr).protocol = FI_PROTO_RDMA_CM_IB_XRC;
            (*(*info).ep_attr).rx_ctx_cnt = match kind {
                FI_EP_MSG => FI_SHARED_CONTEXT,
                _ => 1,
            };
        }
        (*(*info).domain_attr).mr_mode = 0xffc; // every bit that is not one of the two old names
        let node = std::env::var("WEFT_PROBE_NODE").unwrap_or_else(|_| String::from("127.0.0.1"));
        Setup::new(lib, Some(&node), None, FI_SOURCE, &hints)
    };
    // SAFETY: a whole info; fids as they are opened.
    unsafe {
        let mode = (*(*setup.info.first()).domain_attr).mr_mode;
        println!("mode {mode:#x}");
        let mut world = World {
            lib,
            setup,
            mode,
            ends: None,
            local: Box::new([0; 2 * PAGE]),
            local_mr: null_mut(),
            counters: [null_mut(); 2],
            pins: std::env::var_os("WEFT_PROBE_PINS").is_some_and(|value| value == "1"),
        };
        if world.has(FI_MR_RMA_EVENT) {
            let caps = (*world.setup.info.first()).caps;
            assert_eq!(caps & FI_RMA_EVENT, FI_RMA_EVENT);
            for counter in &mut world.counters {
                let domain = world.setup.domain;
                let (attr, context) = (null_mut(), null_mut());
                let ret = call!((*domain).ops, cntr_open, domain, attr, counter, context);
                assert_eq!(ret, 0, "fi_cntr_open");
            }
        }
        if world.has(FI_MR_LOCAL) {
            let access = FI_READ | FI_WRITE | FI_SEND | FI_RECV;
            let (buf, len) = (world.local.as_mut_ptr(), world.local.len());
            world.local_mr = register(world.setup.domain, buf, len, access);
        }
        for how in [How::Reg, How::Regv, How::Regattr] {
            for op in [Op::Write, Op::Read, Op::Atomic, Op::WriteData] {
                let name = format!("{how:?} {op:?}");
                let ended = catch_unwind(AssertUnwindSafe(|| world.case(how, op)));
                println!("{} {name}", if ended.is_ok() { "ok" } else { "FAILED" });
            }
        }
        if let Some(ends) = world.ends.take() {
            ends.close();
        }
        if !world.local_mr.is_null() {
            assert_eq!(close(world.local_mr), 0);
        }
        for counter in world.counters {
            if !counter.is_null() {
                assert_eq!(close(counter), 0);
            }
        }
        world.setup.close();
    }
}
