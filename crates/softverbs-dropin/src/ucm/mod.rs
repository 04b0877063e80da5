//! The kernel's file `rdma_cm`, as librdmacm uses it, over softverbs' connection manager.
//!
//! librdmacm creates ids and connections by writing commands to `/dev/infiniband/rdma_cm`, a file
//! of the kernel's connection manager. `build-rdmacm` links Debian's librdmacm so that it opens,
//! writes and closes that file by the three functions of this module, which execute the commands by
//! softverbs' connection manager. librdmacm itself is unchanged: it makes the queue pairs and moves
//! them with the attributes that it asks for (INIT_QP_ATTR). So the ids here have no queue pair.
//!
//! Invariants: a command is checked as the kernel does it (length, number, id of this descriptor).
//! The pointers in it are those of librdmacm, in this process.

mod abi;
mod command;
mod convert;
mod event;
mod file;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use file::{Channel, Errno, Res, Table, cm, last};

use crate::set_errno;

/// The process that has opened the file; 0 before. A forked child of it has copies of the
/// descriptors: they are descriptors as any other there. If the child opens the file itself, it has
/// a table of its own.
static OPENER: AtomicU32 = AtomicU32::new(0);

fn is_opener() -> bool {
    OPENER.load(Ordering::Relaxed) == std::process::id()
}

/// A descriptor that stands for the file.
#[unsafe(no_mangle)]
extern "C" fn softverbs_ucm_open() -> c_int {
    softverbs::hide_ends_of_requests();
    // SAFETY: no requirement.
    let channel = unsafe { (cm().rdma_create_event_channel)() };
    if channel.is_null() {
        return -1;
    }
    OPENER.store(std::process::id(), Ordering::Relaxed);
    // SAFETY: made above.
    let fd = unsafe { (*channel).fd };
    Table::lock().add_channel(fd, Channel(channel));
    fd
}

/// As write(2): executes a command if the descriptor stands for the file, else writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn softverbs_ucm_write(fd: c_int, buf: *const c_void, count: usize) -> isize {
    let Some(channel) = is_opener().then(|| Table::lock().channel(fd)).flatten() else {
        // SAFETY: the caller fulfils the requirements of write(2).
        return unsafe { libc::write(fd, buf, count) };
    };
    // SAFETY: the caller passes `count` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), count) };
    let execute = || {
        // SAFETY: the pointers in the command are those of librdmacm, which waits for the answer.
        unsafe { command::execute(fd, channel, bytes) }
    };
    let result: Res<()> = catch_unwind(AssertUnwindSafe(execute)).unwrap_or(Err(Errno(libc::EIO)));
    match result {
        Ok(()) => count.cast_signed(),
        Err(Errno(errno)) => {
            set_errno(errno);
            -1
        }
    }
}

/// As close(2): ends the ids of the descriptor if it stands for the file, and closes it.
#[unsafe(no_mangle)]
extern "C" fn softverbs_ucm_close(fd: c_int) -> c_int {
    let known = is_opener().then(|| Table::lock().remove_channel(fd));
    let Some((channel, ids)) = known.flatten() else {
        // SAFETY: no requirement.
        return unsafe { libc::close(fd) };
    };
    for id in ids {
        // SAFETY: taken from the table, so destroyed once.
        if unsafe { (cm().rdma_destroy_id)(id.0) } != 0 {
            let _ = last();
        }
    }
    // SAFETY: taken from the table; rdma_destroy_event_channel(3): the caller closes it last.
    unsafe { (cm().rdma_destroy_event_channel)(channel.0) };
    0
}
