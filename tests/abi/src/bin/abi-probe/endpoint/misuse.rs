//! Invalid posts on connected endpoints: each returns its errno, and a transfer succeeds
//! afterwards. Full queues, and cancelled operations.

use std::ffi::c_void;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::time::Instant;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, open_ep, register};
use abi_tests::pair::{LIMIT, Pair, completion, is_empty};
use libfabric_sys::*;

use super::setup;

const INVALID: i32 = -FI_EINVAL;
const FLAGS: i32 = -FI_EBADFLAGS;
const LONG: i32 = -FI_EMSGSIZE;
const KEY: i32 = -FI_EKEYREJECTED;
/// A flag that no operation supports.
const NOBODYS: u64 = 1 << 40;
const SIZE: usize = 4096;

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA | FI_ATOMIC);
    // SAFETY: what is wrong with each call is what it checks; everything else is as it must be.
    unsafe {
        let pair = Pair::connect(lib, &setup, setup.info.first(), |ep, _| {
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        });
        let mut memory = vec![0_u8; SIZE];
        let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let mr = register(setup.domain, memory.as_mut_ptr(), SIZE, access);
        let bench = Bench {
            setup: &setup,
            pair,
            memory: memory.as_mut_ptr(),
            desc: (*mr).mem_desc,
            key: (*mr).key,
        };
        bench.transfer("to begin with");
        bench.messages();
        bench.remote();
        bench.cancelled();
        bench.full();
        bench.pair.close();
        assert_eq!(close(mr), 0);
    }
    setup.close();
}

struct Bench<'a> {
    setup: &'a Setup,
    pair: Pair,
    memory: *mut u8,
    desc: *mut c_void,
    key: u64,
}

impl Bench<'_> {
    fn buf(&self) -> *mut c_void {
        self.memory.cast()
    }

    unsafe fn receive(&self, context: usize) -> isize {
        let context = without_provenance_mut(context);
        // SAFETY: a connected pair.
        unsafe {
            let ep = self.pair.server;
            let at = self.memory.add(SIZE / 2).cast();
            call!((*ep).msg, recv, ep, at, 64, self.desc, 0, context)
        }
    }

    /// A message, a write and a read, each checked for its contents.
    unsafe fn transfer(&self, after: &str) {
        // SAFETY: a connected pair and registered memory.
        unsafe {
            let cq = self.setup.cq;
            assert!(is_empty(cq), "{after}: something completed");
            let (ep, there) = (self.pair.client, self.memory.add(SIZE / 2));
            self.memory.write_bytes(0x5a, 32);
            there.write_bytes(0, 64);
            assert_eq!(self.receive(1), 0, "{after}");
            let context = without_provenance_mut(2);
            let ret = call!((*ep).msg, send, ep, self.buf(), 32, self.desc, 0, context);
            assert_eq!(ret, 0, "{after}");
            let mut contexts = [0, 1].map(|_| completion(cq).expect(after).op_context.addr());
            contexts.sort_unstable();
            assert_eq!(contexts, [1, 2], "{after}");
            assert_eq!(there.add(31).read_volatile(), 0x5a, "{after}");
            self.memory.write_bytes(0xa5, 32);
            let addr = there.addr() as u64;
            let (buf, desc, key) = (self.buf(), self.desc, self.key);
            let ret = call!((*ep).rma, write, ep, buf, 32, desc, 0, addr, key, context);
            assert_eq!(ret, 0, "{after}");
            completion(cq).expect(after);
            assert_eq!(there.add(31).read_volatile(), 0xa5, "{after}");
            assert!(is_empty(cq), "{after}: more completed");
        }
    }

    unsafe fn refused(&self, what: &str, expected: i32, ret: isize) {
        assert_eq!(ret, expected as isize, "{what}");
        // SAFETY: as for `transfer`.
        unsafe { self.transfer(what) };
    }

    unsafe fn messages(&self) {
        // SAFETY: see `run`.
        unsafe {
            let ep = self.pair.client;
            let (info, desc) = (self.setup.info.first(), self.desc);
            let max = (*(*info).ep_attr).max_msg_size;
            let inject = (*(*info).tx_attr).inject_size;
            let ops = (*ep).msg;
            let none = null_mut::<c_void>();
            let buf = self.buf();
            for len in [max + 1, usize::MAX] {
                let ret = call!(ops, send, ep, buf, len, desc, 0, none);
                self.refused("a long send", LONG, ret);
                let ret = call!(ops, senddata, ep, buf, len, desc, 0, 0, none);
                self.refused("a long send with data", LONG, ret);
                let ret = call!(ops, recv, ep, buf, len, desc, 0, none);
                self.refused("a long receive", LONG, ret);
            }
            for len in [inject + 1, usize::MAX] {
                let ret = call!(ops, inject, ep, buf, len, 0);
                self.refused("a long inject", LONG, ret);
                let ret = call!(ops, injectdata, ep, buf, len, 0, 0);
                self.refused("a long inject with data", LONG, ret);
                let ret = call!((*ep).rma, inject, ep, buf, len, 0, 0, self.key);
                self.refused("a long remote inject", LONG, ret);
            }
            let halves = [libc::iovec {
                iov_base: buf,
                iov_len: usize::MAX / 2 + 1,
            }; 2];
            let mut descs = [desc; 2];
            let ret = call!(
                ops,
                sendv,
                ep,
                halves.as_ptr(),
                descs.as_mut_ptr(),
                2,
                0,
                none
            );
            self.refused("lengths whose sum wraps", LONG, ret);

            let limits = [(*(*info).tx_attr).iov_limit, (*(*info).rx_attr).iov_limit];
            let iov = [libc::iovec {
                iov_base: buf,
                iov_len: 1,
            }; 64];
            let mut descs = [desc; 64];
            let (at, descs) = (iov.as_ptr(), descs.as_mut_ptr());
            for (list, name) in [(at, "too many buffers"), (null(), "no list")] {
                for (tx, rx) in [(limits[0] + 1, limits[1] + 1), (usize::MAX, usize::MAX)] {
                    let ret = call!(ops, sendv, ep, list, descs, tx, 0, none);
                    self.refused(name, INVALID, ret);
                    let ret = call!(ops, recvv, ep, list, descs, rx, 0, none);
                    self.refused(name, INVALID, ret);
                }
            }
            let mut msg = fi_msg {
                msg_iov: at,
                desc: descs,
                iov_count: 1,
                addr: 0,
                context: none,
                data: 0,
            };
            for flags in [NOBODYS, FI_MULTI_RECV, FI_READ, FI_CLAIM, u64::MAX] {
                let ret = call!(ops, sendmsg, ep, &raw const msg, flags);
                self.refused("a send's flags", FLAGS, ret);
                let ret = call!(ops, recvmsg, ep, &raw const msg, flags);
                self.refused("a receive's flags", FLAGS, ret);
            }
            for flags in [FI_INJECT, FI_FENCE, FI_REMOTE_CQ_DATA, FI_DELIVERY_COMPLETE] {
                let ret = call!(ops, recvmsg, ep, &raw const msg, flags);
                self.refused("a send's flags on a receive", FLAGS, ret);
            }
            for count in [limits[0].max(limits[1]) + 1, usize::MAX] {
                msg.iov_count = count;
                let ret = call!(ops, sendmsg, ep, &raw const msg, 0);
                self.refused("a count", INVALID, ret);
                let ret = call!(ops, recvmsg, ep, &raw const msg, 0);
                self.refused("a count", INVALID, ret);
            }
            self.refused("no message", INVALID, call!(ops, sendmsg, ep, null(), 0));
            self.refused("no message", INVALID, call!(ops, recvmsg, ep, null(), 0));
            let ret = call!(ops, send, ep, buf, 512, none, 0, none);
            self.refused("no descriptor", INVALID, ret);
        }
    }

    unsafe fn remote(&self) {
        // SAFETY: see `run`.
        unsafe {
            let ep = self.pair.client;
            let ops = (*ep).rma;
            let none = null_mut::<c_void>();
            let (buf, desc, key) = (self.buf(), self.desc, self.key);
            let addr = self.memory.addr() as u64;
            let max = (*(*self.setup.info.first()).ep_attr).max_msg_size;
            for len in [max + 1, usize::MAX] {
                let ret = call!(ops, write, ep, buf, len, desc, 0, addr, key, none);
                self.refused("a long write", LONG, ret);
                let ret = call!(ops, read, ep, buf, len, desc, 0, addr, key, none);
                self.refused("a long read", LONG, ret);
                let ret = call!(ops, writedata, ep, buf, len, desc, 0, 0, addr, key, none);
                self.refused("a long write with data", LONG, ret);
            }
            let ret = call!(ops, write, ep, buf, 8, desc, 0, addr, 1 << 32, none);
            self.refused("a key that is none", KEY, ret);
            let ret = call!(ops, read, ep, buf, 8, desc, 0, addr, u64::MAX, none);
            self.refused("a key that is none", KEY, ret);
            let iov = [libc::iovec {
                iov_base: buf,
                iov_len: 8,
            }; 64];
            let mut descs = [desc; 64];
            let remote = [fi_rma_iov { addr, len: 8, key }; 2];
            let good = fi_msg_rma {
                msg_iov: iov.as_ptr(),
                desc: descs.as_mut_ptr(),
                iov_count: 1,
                addr: 0,
                rma_iov: remote.as_ptr(),
                rma_iov_count: 1,
                context: none,
                data: 0,
            };
            let both = |what: &str, expected, change: &dyn Fn(&mut fi_msg_rma), flags| {
                let mut msg = good;
                change(&mut msg);
                let ret = call!(ops, writemsg, ep, &raw const msg, flags);
                self.refused(what, expected, ret);
                let ret = call!(ops, readmsg, ep, &raw const msg, flags);
                self.refused(what, expected, ret);
            };
            both("a flag", FLAGS, &|_| {}, NOBODYS);
            both("a receive's flag", FLAGS, &|_| {}, FI_MULTI_RECV);
            both("no target", INVALID, &|msg| msg.rma_iov_count = 0, 0);
            both("no targets", INVALID, &|msg| msg.rma_iov = null(), 0);
            both("two targets", INVALID, &|msg| msg.rma_iov_count = 2, 0);
            both(
                "all targets",
                INVALID,
                &|msg| msg.rma_iov_count = usize::MAX,
                0,
            );
            both("no buffers", INVALID, &|msg| msg.msg_iov = null(), 0);
            both("all buffers", INVALID, &|msg| msg.iov_count = usize::MAX, 0);
            both("other lengths", INVALID, &|msg| msg.iov_count = 2, 0);
            for flags in [FI_INJECT, FI_REMOTE_CQ_DATA] {
                let ret = call!(ops, readmsg, ep, &raw const good, flags);
                self.refused("a write's flag on a read", FLAGS, ret);
            }
            self.refused("no message", INVALID, call!(ops, writemsg, ep, null(), 0));
            self.refused("no message", INVALID, call!(ops, readmsg, ep, null(), 0));

            let operand = [fi_ioc {
                addr: buf,
                count: 1,
            }; 1];
            let target = [fi_rma_ioc {
                addr,
                count: 1,
                key,
            }; 1];
            let mut msg = fi_msg_atomic {
                msg_iov: operand.as_ptr(),
                desc: null_mut(),
                iov_count: 1,
                addr: 0,
                rma_iov: target.as_ptr(),
                rma_iov_count: 1,
                datatype: FI_UINT64,
                op: FI_SUM,
                context: none,
                data: 0,
            };
            let ops = (*ep).atomic;
            for flags in [NOBODYS, FI_REMOTE_CQ_DATA] {
                let ret = call!(ops, writemsg, ep, &raw const msg, flags);
                self.refused("an atomic's flags", FLAGS, ret);
            }
            msg.iov_count = usize::MAX;
            let ret = call!(ops, writemsg, ep, &raw const msg, 0);
            self.refused("an atomic's operands", INVALID, ret);
            (msg.iov_count, msg.rma_iov_count) = (1, usize::MAX);
            let ret = call!(ops, writemsg, ep, &raw const msg, 0);
            self.refused("an atomic's targets", INVALID, ret);
            (msg.rma_iov_count, msg.rma_iov) = (1, null());
            let ret = call!(ops, writemsg, ep, &raw const msg, 0);
            self.refused("no target", INVALID, ret);
        }
    }

    /// Receives of a connected endpoint are with the device, and cannot be cancelled.
    unsafe fn cancelled(&self) {
        // SAFETY: see `run`.
        unsafe {
            let ep = self.pair.server;
            assert_eq!(self.receive(77), 0);
            for context in [77, 78, 0] {
                let context = without_provenance_mut(context);
                let ret = call!((*ep).ops, cancel, &raw mut (*ep).fid, context);
                assert_eq!(ret, -(libc::ENOENT as isize));
            }
            let from = self.pair.client;
            assert_eq!(call!((*from).msg, inject, from, null(), 0, 0), 0);
            let got = completion(self.setup.cq).expect("it was not touched");
            assert_eq!(got.op_context.addr(), 77);
            self.transfer("cancelling in vain");

            // without a source address the endpoint has no device yet, and the engine holds the
            // receives
            let info = self.setup.info.first();
            let (src, len) = ((*info).src_addr, (*info).src_addrlen);
            ((*info).src_addr, (*info).src_addrlen) = (null_mut(), 0);
            let ep = open_ep(self.setup, info);
            ((*info).src_addr, (*info).src_addrlen) = (src, len);
            assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
            let (none, context) = (null_mut::<c_void>(), without_provenance_mut(5));
            assert_eq!(call!((*ep).msg, recv, ep, none, 0, none, 0, context), 0);
            let fid = &raw mut (*ep).fid;
            assert_eq!(call!((*ep).ops, cancel, fid, context), 0);
            let (err, which) = completion(self.setup.cq).err().expect("cancelled");
            assert_eq!((err, which), (FI_ECANCELED, context));
            let ret = call!((*ep).ops, cancel, fid, context);
            assert_eq!(ret, -(libc::ENOENT as isize), "twice");
            assert_eq!(close(ep), 0);
            assert_eq!(call!((*ep).ops, cancel, fid, context), INVALID as isize);
            self.transfer("a closed endpoint");
        }
    }

    /// Posts until the queues are full: each accepted operation completes once.
    unsafe fn full(&self) {
        // SAFETY: see `run`.
        unsafe {
            let again = -(FI_EAGAIN as isize);
            let (ep, cq) = (self.pair.client, self.setup.cq);
            let size = (*(*self.setup.info.first()).tx_attr).size;
            let post = |context: usize| {
                let context = without_provenance_mut(context);
                call!((*ep).msg, send, ep, self.buf(), 512, self.desc, 0, context)
            };
            let mut sends = 0;
            while post(sends) == 0 {
                sends += 1;
                assert!(sends <= size, "more than the queue has");
            }
            assert_eq!(sends, size);
            let (buf, desc, key) = (self.buf(), self.desc, self.key);
            let addr = self.memory.addr() as u64;
            let none = null_mut();
            for _ in 0..3 {
                assert_eq!(post(0), again);
                assert_eq!(call!((*ep).msg, inject, ep, buf, 8, 0), again);
                let ret = call!((*ep).rma, write, ep, buf, 8, desc, 0, addr, key, none);
                assert_eq!(ret, again);
                let ret = call!((*ep).rma, read, ep, buf, 8, desc, 0, addr, key, none);
                assert_eq!(ret, again);
            }
            const RECEIVES: usize = 1 << 20;
            let (mut posted, mut done, mut received) = (0, 0, 0);
            let start = Instant::now();
            while done < sends || received < sends {
                while posted < sends {
                    // longer than the message; the buffer is free from SIZE / 2 on
                    let at = self.memory.add(SIZE / 2).cast();
                    let context = without_provenance_mut(RECEIVES + posted);
                    let to = self.pair.server;
                    let ret = call!((*to).msg, recv, to, at, 1024, desc, 0, context);
                    if ret == again {
                        break;
                    }
                    assert_eq!(ret, 0);
                    posted += 1;
                }
                assert!(start.elapsed() < LIMIT);
                let entry = completion(cq).expect("no failure");
                let context = entry.op_context.addr();
                if context >= RECEIVES {
                    assert_eq!(context - RECEIVES, received, "in order");
                    received += 1;
                } else {
                    assert_eq!(context, done, "in order");
                    done += 1;
                }
            }
            self.transfer("a full queue");
            let mut count = 0;
            while self.receive(count) == 0 {
                count += 1;
            }
            assert_eq!(count, (*(*self.setup.info.first()).rx_attr).size);
            assert_eq!(self.receive(0), again);
            for context in 0..count {
                assert_eq!(call!((*ep).msg, inject, ep, null(), 0, 0), 0);
                let got = completion(cq).expect("a receive");
                assert_eq!(got.op_context.addr(), context);
            }
            self.transfer("a full receive queue");
        }
    }
}
