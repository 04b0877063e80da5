//! Two endpoints of one domain that are connected to each other.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use libfabric_sys::*;

use crate::call;
use crate::load::Lib;
use crate::objects::{Setup, bind, close};

/// Limit of every wait.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A connected pair, and its listener.
pub struct Pair {
    /// The endpoint that connected.
    pub client: *mut fid_ep,
    /// The endpoint that accepted.
    pub server: *mut fid_ep,
}

/// A side of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The connecting side.
    Client,
    /// The accepting side.
    Server,
}

impl Pair {
    /// Connects two endpoints that are opened with `info`. `prepare` binds the queues; the event
    /// queue is already bound.
    ///
    /// # Panics
    /// If a step fails.
    ///
    /// # Safety
    /// `info` is a whole `fi_info` of `lib` for the setup's domain, with a source address.
    pub unsafe fn connect(
        lib: &Lib,
        setup: &Setup,
        info: *mut fi_info,
        mut prepare: impl FnMut(*mut fid_ep, Role),
    ) -> Self {
        // SAFETY: fids as they are opened.
        unsafe {
            let (fabric, domain, eq) = (setup.fabric, setup.domain, setup.eq);
            let mut pep = null_mut();
            let ret = call!(
                (*fabric).ops,
                passive_ep,
                fabric,
                info,
                &raw mut pep,
                null_mut()
            );
            assert_eq!(ret, 0, "fi_passive_ep");
            assert_eq!(bind(pep, eq, 0), 0);
            assert_eq!(call!((*pep).cm, listen, pep), 0, "fi_listen");
            let mut addr = [0_u64; 4];
            let mut len = size_of_val(&addr);
            let to = addr.as_mut_ptr().cast::<c_void>();
            let ret = call!((*pep).cm, getname, &raw mut (*pep).fid, to, &raw mut len);
            assert_eq!(ret, 0, "fi_getname");
            let open = |info, role, prepare: &mut dyn FnMut(*mut fid_ep, Role)| {
                let mut ep = null_mut();
                let ret = call!(
                    (*domain).ops,
                    endpoint,
                    domain,
                    info,
                    &raw mut ep,
                    null_mut()
                );
                assert_eq!(ret, 0, "fi_endpoint of the {role:?}");
                assert_eq!(bind(ep, eq, 0), 0);
                prepare(ep, role);
                ep
            };
            let client = open(info, Role::Client, &mut prepare);
            assert_eq!(
                call!((*client).cm, connect, client, to, null(), 0),
                0,
                "fi_connect"
            );
            let (number, entry) = event(eq);
            assert_eq!(number, FI_CONNREQ);
            let server = open(entry.info, Role::Server, &mut prepare);
            (lib.freeinfo)(entry.info);
            assert_eq!(
                call!((*server).cm, accept, server, null(), 0),
                0,
                "fi_accept"
            );
            let mut left = vec![&raw mut (*client).fid, &raw mut (*server).fid];
            while !left.is_empty() {
                let (number, entry) = event(eq);
                assert_eq!(number, FI_CONNECTED);
                left.retain(|fid| *fid != entry.fid);
            }
            assert_eq!(close(pep), 0);
            Self { client, server }
        }
    }

    /// Closes both.
    ///
    /// # Panics
    /// If one is still in use.
    ///
    /// # Safety
    /// Neither is closed yet.
    pub unsafe fn close(self) {
        // SAFETY: the caller's promise.
        unsafe {
            assert_eq!(close(self.client), 0, "closing the client");
            assert_eq!(close(self.server), 0, "closing the server");
        }
    }
}

/// The next event, which must be a connection event.
///
/// # Panics
/// If the event is an error, or none arrives.
///
/// # Safety
/// An open queue.
pub unsafe fn event(eq: *mut fid_eq) -> (u32, fi_eq_cm_entry) {
    // SAFETY: the caller's promise.
    let (number, entry, _) = unsafe { event_with_data(eq) };
    (number, entry)
}

/// As [`event`], with the private data of the event.
///
/// # Panics
/// As [`event`].
///
/// # Safety
/// An open queue.
pub unsafe fn event_with_data(eq: *mut fid_eq) -> (u32, fi_eq_cm_entry, Vec<u8>) {
    let mut buf = [0_u64; 32];
    let mut number = 0;
    // SAFETY: an open queue and a buffer of that size.
    unsafe {
        let len = call!(
            (*eq).ops,
            sread,
            eq,
            &raw mut number,
            buf.as_mut_ptr().cast(),
            size_of_val(&buf),
            20_000,
            0,
        );
        if len < 0 {
            let mut error = std::mem::zeroed::<fi_eq_err_entry>();
            let ret = call!((*eq).ops, readerr, eq, &raw mut error, 0);
            panic!(
                "waiting for an event: {len}, readerr {ret}, err {}",
                error.err
            );
        }
        assert!(len >= 16, "an event of {len} bytes");
        let entry = buf.as_ptr().cast::<fi_eq_cm_entry>();
        let data = std::slice::from_raw_parts(buf.as_ptr().cast::<u8>().add(16), len as usize - 16);
        (number, entry.read(), data.to_vec())
    }
}

/// The next completion of a queue of the data format, or its error entry.
///
/// # Errors
/// `err` of the error entry, and its context.
///
/// # Panics
/// If no entry arrives.
///
/// # Safety
/// An open queue.
pub unsafe fn completion(
    cq: *mut fid_cq,
) -> std::result::Result<fi_cq_data_entry, (c_int, *mut c_void)> {
    let start = Instant::now();
    // SAFETY: an open queue of the data format.
    unsafe {
        loop {
            let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
            match call!((*cq).ops, read, cq, (&raw mut entry).cast(), 1) {
                1 => return Ok(entry),
                ret if ret == -(FI_EAGAIN as isize) => {
                    assert!(start.elapsed() < LIMIT, "no completion came");
                    std::thread::yield_now();
                }
                ret if ret == -(FI_EAVAIL as isize) => {
                    let mut error = std::mem::zeroed::<fi_cq_err_entry>();
                    assert_eq!(call!((*cq).ops, readerr, cq, &raw mut error, 0), 1);
                    return Err((error.err, error.op_context));
                }
                ret => panic!("fi_cq_read: {ret}"),
            }
        }
    }
}

/// Whether a queue of the data format is empty.
///
/// # Safety
/// An open queue.
pub unsafe fn is_empty(cq: *mut fid_cq) -> bool {
    // SAFETY: an open queue of the data format.
    unsafe {
        let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
        let ret = call!((*cq).ops, read, cq, (&raw mut entry).cast(), 1);
        ret == -(FI_EAGAIN as isize)
    }
}
