//! Both ends of a connection, each with its own memory, for tests of transferred data.

use std::ffi::c_void;
use std::ptr::without_provenance_mut;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, cq_attr, open_cq, register};
use abi_tests::pair::{Pair, Role};
use libfabric_sys::*;

/// Bytes of each side.
pub(super) const SIZE: usize = 1 << 17;

/// Both ends of a connection, each with its own memory and completion queue.
pub(super) struct Ends {
    pub(super) pair: Pair,
    /// The server's queue; the client uses the setup's.
    pub(super) theirs: *mut fid_cq,
    pub(super) ours: *mut fid_cq,
    memory: [Box<[u8]>; 2],
    pub(super) mr: [*mut fid_mr; 2],
}

/// The owner of the memory.
pub(super) const OURS: usize = 0;
pub(super) const THEIRS: usize = 1;

impl Ends {
    pub(super) unsafe fn new(lib: &Lib, setup: &Setup, bindings: &[u64]) -> Self {
        // SAFETY: fids as they are opened; the memory is dropped after its regions.
        unsafe {
            let theirs = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_NONE));
            let pair = Pair::connect(lib, setup, setup.info.first(), |ep, role| {
                let cq = if role == Role::Client {
                    setup.cq
                } else {
                    theirs
                };
                for &flags in bindings {
                    assert_eq!(bind(ep, cq, flags), 0);
                }
            });
            let mut memory = [0, 1].map(|_| vec![0_u8; SIZE].into_boxed_slice());
            let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
            let mr = [OURS, THEIRS]
                .map(|i| register(setup.domain, memory[i].as_mut_ptr(), SIZE, access));
            Self {
                pair,
                theirs,
                ours: setup.cq,
                memory,
                mr,
            }
        }
    }

    pub(super) fn at(&mut self, whose: usize, offset: usize) -> *mut c_void {
        self.memory[whose][offset..].as_mut_ptr().cast()
    }

    pub(super) fn fill(&mut self, whose: usize, offset: usize, len: usize, seed: u8) {
        for (i, byte) in self.memory[whose][offset..offset + len]
            .iter_mut()
            .enumerate()
        {
            *byte = (i as u8).wrapping_mul(29) ^ seed;
        }
    }

    pub(super) fn holds(&self, whose: usize, offset: usize, len: usize, seed: u8) -> bool {
        let bytes = &self.memory[whose][offset..offset + len];
        let mut numbered = bytes.iter().enumerate();
        numbered.all(|(i, byte)| *byte == (i as u8).wrapping_mul(29) ^ seed)
    }

    /// Posts a receive of the server at offset 0.
    pub(super) unsafe fn receive(&mut self, len: usize, context: usize, flags: u64) {
        // SAFETY: as below.
        unsafe { self.receive_at(0, len, context, flags) };
    }

    pub(super) unsafe fn receive_at(
        &mut self,
        offset: usize,
        len: usize,
        context: usize,
        flags: u64,
    ) {
        let iov = libc::iovec {
            iov_base: self.at(THEIRS, offset),
            iov_len: len,
        };
        // SAFETY: an open endpoint, and memory that stays.
        unsafe {
            let mut desc = [(*self.mr[THEIRS]).mem_desc];
            let msg = message(&iov, &mut desc, context, 0);
            let ep = self.pair.server;
            let ret = call!((*ep).msg, recvmsg, ep, &raw const msg, flags);
            assert_eq!(ret, 0, "fi_recvmsg");
        }
    }

    pub(super) unsafe fn send(&mut self, len: usize, context: usize, flags: u64) -> isize {
        let iov = libc::iovec {
            iov_base: self.at(OURS, 0),
            iov_len: len,
        };
        // SAFETY: as above.
        unsafe {
            let mut desc = [(*self.mr[OURS]).mem_desc];
            let msg = message(&iov, &mut desc, context, 0xfeed_0000_0007);
            let ep = self.pair.client;
            call!((*ep).msg, sendmsg, ep, &raw const msg, flags)
        }
    }

    /// An RMA operation between offsets `ours` and `theirs` in the memory of the two sides.
    pub(super) unsafe fn rma(
        &mut self,
        write: bool,
        (ours, theirs, len): (usize, usize, usize),
        context: usize,
        flags: u64,
    ) -> isize {
        let iov = libc::iovec {
            iov_base: self.at(OURS, ours),
            iov_len: len,
        };
        let addr = self.at(THEIRS, theirs).expose_provenance() as u64;
        // SAFETY: as above.
        unsafe {
            let mut desc = [(*self.mr[OURS]).mem_desc];
            let remote = fi_rma_iov {
                addr,
                len,
                key: (*self.mr[THEIRS]).key,
            };
            let msg = fi_msg_rma {
                msg_iov: &raw const iov,
                desc: desc.as_mut_ptr(),
                iov_count: 1,
                addr: 0,
                rma_iov: &raw const remote,
                rma_iov_count: 1,
                context: without_provenance_mut(context),
                data: 0xfeed_0000_0009,
            };
            let ep = self.pair.client;
            if write {
                call!((*ep).rma, writemsg, ep, &raw const msg, flags)
            } else {
                call!((*ep).rma, readmsg, ep, &raw const msg, flags)
            }
        }
    }

    pub(super) unsafe fn close(self) {
        // SAFETY: opened by `new`.
        unsafe {
            self.pair.close();
            for mr in self.mr {
                assert_eq!(close(mr), 0);
            }
            let mut entry = std::mem::zeroed::<fi_cq_err_entry>();
            while call!((*self.ours).ops, readerr, self.ours, &raw mut entry, 0) == 1 {}
            assert_eq!(close(self.theirs), 0);
        }
    }
}

fn message(iov: &libc::iovec, desc: &mut [*mut c_void; 1], context: usize, data: u64) -> fi_msg {
    fi_msg {
        msg_iov: std::ptr::from_ref(iov),
        desc: desc.as_mut_ptr(),
        iov_count: 1,
        addr: 0,
        context: without_provenance_mut(context),
        data,
    }
}
