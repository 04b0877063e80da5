//! Sends, receives, writes and reads through the provider, and prints the number of allocations and
//! the number of calls of each system call. `fast-path LIBFABRIC [planted]`.
//!
//! This program's `malloc` and related functions replace those of the whole process, including the
//! provider's. A separate thread runs the operations under a filter that traps each system call;
//! the handler counts the call and returns 0.

#![allow(
    unsafe_code,
    reason = "calls a C library as an application does, and is one"
)]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, control, register};
use abi_tests::pair::{Pair, Role};
use libfabric_sys::*;

const SIZE: usize = 1 << 20;
const ROUNDS: usize = 500;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU32 = AtomicU32::new(0);
static CALLS: [AtomicU32; 512] = [const { AtomicU32::new(0) }; 512];

unsafe extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
    fn __libc_free(old: *mut c_void);
}

fn note() {
    if COUNTING.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// The allocation functions of the whole process.
mod interposed {
    use super::*;

    #[unsafe(no_mangle)]
    extern "C" fn malloc(size: usize) -> *mut c_void {
        note();
        // SAFETY: glibc's own.
        unsafe { __libc_malloc(size) }
    }

    #[unsafe(no_mangle)]
    extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
        note();
        // SAFETY: as above.
        unsafe { __libc_calloc(count, size) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn realloc(old: *mut c_void, size: usize) -> *mut c_void {
        note();
        // SAFETY: as above, with the caller's pointer.
        unsafe { __libc_realloc(old, size) }
    }

    #[unsafe(no_mangle)]
    extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
        note();
        // SAFETY: as above.
        unsafe { __libc_memalign(align, size) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
        note();
        // SAFETY: as above; `out` is writable by the contract of posix_memalign(3).
        unsafe { *out = __libc_memalign(align, size) };
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn free(old: *mut c_void) {
        if !old.is_null() {
            note();
        }
        // SAFETY: as above, with the caller's pointer.
        unsafe { __libc_free(old) };
    }
}

/// Offset in bytes of the trapped call's number in a `siginfo_t` (`si_syscall`).
const SYSCALL_AT: usize = 24;

unsafe extern "C" fn trapped(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's own structures.
    unsafe {
        let number = *info.cast::<u8>().add(SYSCALL_AT).cast::<c_int>();
        if let Some(count) = CALLS.get(number.cast_unsigned() as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let context = context.cast::<libc::ucontext_t>();
        (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = 0;
    }
}

/// Traps every system call of this thread, except the copies between processes, the return from a
/// signal handler, and the calls that end a thread or the process.
fn trap() {
    const ALLOWED: [i64; 5] = [
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_rt_sigreturn,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ];
    let op = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let give = |value: u32| op(libc::BPF_RET | libc::BPF_K, 0, 0, value);
    let mut filter = vec![op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for number in ALLOWED {
        filter.push(op(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            number as u32,
        ));
        filter.push(give(libc::SECCOMP_RET_ALLOW));
    }
    filter.push(give(libc::SECCOMP_RET_TRAP));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: structures on the stack; the filter is of this thread alone.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = trapped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(
            libc::sigaction(libc::SIGSYS, &raw const action, null_mut()),
            0
        );
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let ret = libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const program,
        );
        assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
    }
}

/// The objects that the measuring thread uses.
struct Ends {
    pair: Pair,
    cq: *mut fid_cq,
    out: *mut u8,
    out_desc: *mut c_void,
    inbox: *mut u8,
    in_desc: *mut c_void,
    key: u64,
}

// SAFETY: while the measuring thread runs, no other thread uses the objects.
unsafe impl Send for Ends {}

impl Ends {
    /// Waits for `count` completions.
    fn complete(&self, count: usize) {
        let mut done = 0;
        // the limit of rounds turns a hang into a failure
        for _ in 0..10_000_000_u32 {
            if done == count {
                return;
            }
            // SAFETY: an open queue of the data format.
            unsafe {
                let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
                let cq = self.cq;
                match call!((*cq).ops, read, cq, (&raw mut entry).cast(), 1) {
                    1 => done += 1,
                    ret => assert_eq!(ret, -(FI_EAGAIN as isize)),
                }
            }
        }
        panic!("{done} completions of {count}");
    }

    fn recv(&self) {
        let ep = self.pair.server;
        let at = self.inbox.cast::<c_void>();
        // SAFETY: an open endpoint, registered memory.
        let ret = unsafe { call!((*ep).msg, recv, ep, at, SIZE, self.in_desc, 0, null_mut()) };
        assert_eq!(ret, 0, "fi_recv");
    }

    /// Runs each operation once.
    fn round(&self) {
        let ep = self.pair.client;
        let out = self.out.cast::<c_void>();
        let addr = self.inbox.addr() as u64;
        let (desc, key) = (self.out_desc, self.key);
        // SAFETY: an open endpoint, registered memory.
        unsafe {
            self.recv();
            assert_eq!(call!((*ep).msg, inject, ep, out, 8, 0), 0);
            self.complete(1);
            for len in [8, 4096, 100_000] {
                self.recv();
                assert_eq!(call!((*ep).msg, send, ep, out, len, desc, 0, null_mut()), 0);
                self.complete(2);
                let ret = call!(
                    (*ep).rma,
                    write,
                    ep,
                    out,
                    len,
                    desc,
                    0,
                    addr,
                    key,
                    null_mut()
                );
                assert_eq!(ret, 0);
                let ret = call!(
                    (*ep).rma,
                    read,
                    ep,
                    out,
                    len,
                    desc,
                    0,
                    addr,
                    key,
                    null_mut()
                );
                assert_eq!(ret, 0);
                self.complete(2);
            }
            // a read of an empty queue
            let mut entry = std::mem::zeroed::<fi_cq_data_entry>();
            let cq = self.cq;
            let ret = call!((*cq).ops, read, cq, (&raw mut entry).cast(), 1);
            assert_eq!(ret, -(FI_EAGAIN as isize));
        }
    }
}

fn measured(ends: &Ends, planted: bool) {
    for _ in 0..20 {
        ends.round();
    }
    trap();
    COUNTING.store(true, Ordering::SeqCst);
    for _ in 0..ROUNDS {
        ends.round();
        if planted {
            drop(std::hint::black_box(Box::new(7)));
            // SAFETY: no arguments.
            unsafe { libc::getppid() };
        }
    }
    COUNTING.store(false, Ordering::SeqCst);
}

fn main() {
    let mut args = std::env::args().skip(1);
    let lib = Lib::open(&args.next().expect("the path of a libfabric"));
    let planted = args.next().as_deref() == Some("planted");
    let hints = hints(&lib);
    let setup = Setup::new(&lib, Some("127.0.0.1"), Some("0"), FI_SOURCE, &hints);
    let (out, inbox) = (vec![1_u8; SIZE].leak(), vec![0_u8; SIZE].leak());
    let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    // SAFETY: fids as they are opened; the memory is never freed.
    let ends = unsafe {
        let pair = Pair::connect(&lib, &setup, setup.info.first(), |ep, _: Role| {
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
            assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        });
        let out_mr = register(setup.domain, out.as_mut_ptr(), SIZE, access);
        let in_mr = register(setup.domain, inbox.as_mut_ptr(), SIZE, access);
        Ends {
            pair,
            cq: setup.cq,
            out: out.as_mut_ptr(),
            out_desc: (*out_mr).mem_desc,
            inbox: inbox.as_mut_ptr(),
            in_desc: (*in_mr).mem_desc,
            key: (*in_mr).key,
        }
    };
    let begin = Instant::now();
    let thread = std::thread::spawn(move || {
        measured(&ends, planted);
        // The thread does not return: its end unmaps the stack by system calls.
        DONE.store(true, Ordering::SeqCst);
        loop {
            std::hint::spin_loop();
        }
    });
    while !DONE.load(Ordering::SeqCst) {
        assert!(!thread.is_finished(), "the thread failed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    println!("milliseconds {}", begin.elapsed().as_millis());
    println!("allocations {}", ALLOCATIONS.load(Ordering::SeqCst));
    for (number, count) in CALLS.iter().enumerate() {
        let count = count.load(Ordering::SeqCst);
        if count > 0 {
            println!("call {number} {count}");
        }
    }
    std::process::exit(0);
}

static DONE: AtomicBool = AtomicBool::new(false);
