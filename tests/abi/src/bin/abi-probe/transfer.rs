//! Two processes: the target listens and exposes its memory; the initiator connects, writes to the
//! memory and reads it back. Both exchange lines with the test on standard input and output.

use std::ffi::c_void;
use std::io::{BufRead, Write as _};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use abi_tests::call;
use abi_tests::fabric::{Infos, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, open_ep, register};
use abi_tests::pair;
use libfabric_sys::*;

/// Bytes of the exposed memory.
const SIZE: usize = 1 << 20;
/// Lengths of operations: inline, within one slot of a ring, within a page, and large.
const LENGTHS: [usize; 6] = [1, 8, 200, 4096, 100_000, SIZE];
const LIMIT: Duration = Duration::from_secs(20);

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("standard output");
}

fn hear() -> String {
    let mut line = String::new();
    let read = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .expect("standard input");
    assert!(read > 0, "the test has gone");
    line.trim().to_owned()
}

fn pattern(length: usize) -> impl Iterator<Item = u8> {
    (0..length).map(move |i| (i.wrapping_mul(31) ^ length) as u8)
}

/// Waits for an event, which must be `wanted`; returns its info and data.
unsafe fn event(eq: *mut fid_eq, wanted: u32) -> (*mut fi_info, Vec<u8>) {
    // SAFETY: an open queue.
    let (number, entry, data) = unsafe { pair::event_with_data(eq) };
    assert_eq!(number, wanted);
    (entry.info, data)
}

/// Waits for one completion, which must have the flags.
unsafe fn completion(cq: *mut fid_cq, flags: u64, context: *mut c_void) {
    // SAFETY: an open queue of the data format.
    let entry = unsafe { pair::completion(cq) }.expect("a completion");
    assert_eq!(entry.flags & flags, flags, "flags {:#x}", entry.flags);
    assert_eq!(entry.op_context, context);
}

pub(crate) fn serve(lib: &Lib) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), Some("0"), FI_SOURCE, &hints);
    let mut memory = vec![0_u8; SIZE];
    // SAFETY: fids as they are opened; `memory` outlives its region.
    unsafe {
        let fabric = setup.fabric;
        let mut pep = null_mut();
        let info = setup.info.first();
        assert_eq!(
            call!(
                (*fabric).ops,
                passive_ep,
                fabric,
                info,
                &raw mut pep,
                null_mut()
            ),
            0
        );
        assert_eq!(bind(pep, setup.eq, 0), 0);
        let cm = (*pep).cm;
        assert_eq!(call!(cm, listen, pep), 0);
        let mut addr = std::mem::zeroed::<libc::sockaddr_in>();
        let mut len = size_of_val(&addr);
        let buf = (&raw mut addr).cast::<c_void>();
        assert_eq!(
            call!(cm, getname, &raw mut (*pep).fid, buf, &raw mut len),
            0
        );
        say(&format!("port {}", u16::from_be(addr.sin_port)));

        // the first request is rejected with data, the second is accepted
        let (request, data) = event(setup.eq, FI_CONNREQ);
        assert_eq!(&data[..5], b"first");
        let handle = (*request).handle;
        assert_eq!(
            call!(cm, reject, pep, handle, c"not you".as_ptr().cast(), 7),
            0
        );
        let again = call!(cm, reject, pep, handle, null(), 0);
        assert_eq!(again, -FI_EINVAL, "a request can be answered once");
        (lib.freeinfo)(request);

        let (request, data) = event(setup.eq, FI_CONNREQ);
        assert_eq!(&data[..6], b"second");
        assert!(!(*request).dest_addr.is_null() && !(*request).src_addr.is_null());
        let ep = open_ep(&setup, request);
        (lib.freeinfo)(request);
        let access = FI_REMOTE_READ | FI_REMOTE_WRITE | FI_RECV | FI_SEND;
        let mr = register(setup.domain, memory.as_mut_ptr(), SIZE, access);
        let desc = (*mr).mem_desc;
        let context = memory.as_mut_ptr().cast::<c_void>();
        assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        assert_eq!(call!((*ep).msg, recv, ep, context, 64, desc, 0, context), 0);
        assert_eq!(
            call!((*ep).cm, accept, ep, c"welcome".as_ptr().cast(), 7),
            0
        );
        event(setup.eq, FI_CONNECTED);
        completion(setup.cq, FI_RECV | FI_MSG, context);
        assert_eq!(&memory[..5], b"hello");
        say(&format!("memory {} {}", memory.as_ptr().addr(), (*mr).key));

        let lent = Lent {
            memory: memory.as_mut_ptr(),
            mr,
        };
        let closed = obey(&lent);
        event(setup.eq, FI_SHUTDOWN);
        assert_eq!(close(ep), 0);
        if !closed {
            assert_eq!(close(mr), 0);
        }
        assert_eq!(close(pep), 0);
    }
    setup.close();
    say("closed");
}

/// The memory that a target exposes.
struct Lent {
    memory: *mut u8,
    mr: *mut fid_mr,
}

/// Executes the test's commands until the initiator is to disconnect; returns whether the region
/// was closed.
unsafe fn obey(lent: &Lent) -> bool {
    let mut closed = false;
    // SAFETY: the memory is the target's, the initiator may write it concurrently, and its region
    // is open until it is closed here.
    let byte = |i: usize| unsafe { lent.memory.add(i).read_volatile() };
    loop {
        match hear().as_str() {
            "check" => {
                let bytes = (0..SIZE).map(byte);
                assert!(bytes.eq(pattern(SIZE)), "what was written is not there");
                say("ok");
                return closed;
            }
            "wait" => {
                let start = Instant::now();
                while byte(0) == 0 {
                    assert!(start.elapsed() < LIMIT, "nothing is written");
                }
                say("written");
            }
            "revoke" => {
                // SAFETY: as above.
                let ret = unsafe { close(lent.mr) };
                assert!(ret == 0 || ret == -FI_EBUSY, "fi_close: {ret}");
                closed = ret == 0;
                say(if closed { "revoked" } else { "busy" });
            }
            "clear" => {
                // SAFETY: as above.
                (0..SIZE).for_each(|i| unsafe { lent.memory.add(i).write_volatile(0) });
                say("cleared");
            }
            "clean" => {
                assert!(
                    (0..SIZE).all(|i| byte(i) == 0),
                    "written after it was closed"
                );
                say("clean");
                return closed;
            }
            other => panic!("what is {other}?"),
        }
    }
}

/// Writes to the whole exposed memory until a write is refused.
unsafe fn flood(setup: &Setup, ep: *mut fid_ep, from: (*mut u8, *mut c_void), addr: u64, key: u64) {
    let (from, desc) = from;
    // SAFETY: an open endpoint, and memory that was registered.
    unsafe {
        from.write_bytes(0x5a, SIZE);
        let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
        loop {
            let ours = from.cast::<c_void>();
            if call!((*ep).rma, write, ep, ours, SIZE, desc, 0, addr, key, ours) != 0 {
                return;
            }
            loop {
                match call!((*setup.cq).ops, read, setup.cq, (&raw mut entry).cast(), 1) {
                    1 => break,
                    ret if ret == -(FI_EAGAIN as isize) => std::thread::yield_now(),
                    _ => return,
                }
            }
        }
    }
}

unsafe fn rejected(setup: &Setup, info: &Infos) {
    // SAFETY: fids as they are opened.
    unsafe {
        let ep = open_ep(setup, info.first());
        let to = (*info.first()).dest_addr;
        assert_eq!(
            call!((*ep).cm, connect, ep, to, c"first".as_ptr().cast(), 5),
            0
        );
        let mut buf = [0_u64; 16];
        let mut number = 0;
        let eq = setup.eq;
        let len = call!(
            (*eq).ops,
            sread,
            eq,
            &raw mut number,
            buf.as_mut_ptr().cast(),
            128,
            20_000,
            0
        );
        assert_eq!(len, -(FI_EAVAIL as isize), "a rejection is an error event");
        let mut data = [0_u8; 64];
        let mut error = std::mem::zeroed::<fi_eq_err_entry>();
        error.err_data = data.as_mut_ptr().cast();
        error.err_data_size = data.len();
        assert!(call!((*eq).ops, readerr, eq, &raw mut error, 0) > 0);
        assert_eq!(error.err, FI_ECONNREFUSED);
        assert_eq!(error.fid, &raw mut (*ep).fid);
        assert_eq!(&data[..7], b"not you");
        assert_eq!(close(ep), 0);
    }
}

pub(crate) fn access(lib: &Lib, port: &str) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), Some(port), 0, &hints);
    let mut memory = vec![0_u8; 2 * SIZE];
    // SAFETY: fids as they are opened; `memory` outlives its region.
    unsafe {
        rejected(&setup, &setup.info);
        let ep = open_ep(&setup, setup.info.first());
        let to = (*setup.info.first()).dest_addr;
        assert_eq!(
            call!((*ep).cm, connect, ep, to, c"second".as_ptr().cast(), 6),
            0
        );
        let (_, data) = event(setup.eq, FI_CONNECTED);
        assert_eq!(&data[..7], b"welcome");
        assert_eq!(
            call!((*ep).msg, inject, ep, c"hello".as_ptr().cast(), 5, 0),
            0
        );

        let words = hear();
        let (floods, words) = match words.strip_prefix("flood ") {
            Some(words) => (true, words),
            None => (false, words.as_str()),
        };
        let mut words = words
            .split(' ')
            .map(|word| word.parse::<u64>().expect("a number"));
        let (addr, key) = (
            words.next().expect("an address"),
            words.next().expect("a key"),
        );
        let access = FI_READ | FI_WRITE | FI_SEND | FI_RECV;
        let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), access);
        let desc = (*mr).mem_desc;
        let (from, into) = memory.split_at_mut(SIZE);
        let (from, into) = (from.as_mut_ptr(), into.as_mut_ptr());
        if floods {
            flood(&setup, ep, (from, desc), addr, key);
        }
        for length in LENGTHS.into_iter().filter(|_| !floods) {
            for (i, byte) in pattern(length).enumerate() {
                from.add(i).write(byte);
                into.add(i).write(!byte);
            }
            let ours = from.cast::<c_void>();
            let ret = call!((*ep).rma, write, ep, ours, length, desc, 0, addr, key, ours);
            assert_eq!(ret, 0, "fi_write of {length}");
            completion(setup.cq, FI_WRITE | FI_RMA, ours);
            let back = into.cast::<c_void>();
            let ret = call!((*ep).rma, read, ep, back, length, desc, 0, addr, key, back);
            assert_eq!(ret, 0, "fi_read of {length}");
            completion(setup.cq, FI_READ | FI_RMA, back);
            let read = std::slice::from_raw_parts(into, length);
            assert!(
                read.iter().copied().eq(pattern(length)),
                "{length} bytes came back wrong"
            );
        }
        say("done");
        assert_eq!(hear(), "close");
        let ended = call!((*ep).cm, shutdown, ep, 0);
        assert!(ended == 0 || floods, "fi_shutdown: {ended}");
        assert_eq!(close(ep), 0);
        assert_eq!(close(mr), 0);
    }
    setup.close();
    say("closed");
}
