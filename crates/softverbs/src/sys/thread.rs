//! Threads of the device.

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Errno, Res, block_signals, restore_signals};

/// The stack of a thread, in bytes.
const STACK: usize = 256 << 10;

/// An object with a thread of its own.
pub(crate) trait Thread: Sync + 'static {
    /// The thread's name in `/proc`, at most 15 bytes.
    const NAME: &CStr;

    /// The thread ends when this returns or panics.
    fn run(&'static self);

    /// The thread has panicked and ends. The message of the panic is printed.
    fn has_panicked(&'static self);
}

/// Starts the object's thread, which is never joined. It blocks all signals but those of faults:
/// the application may have handlers for accesses to its buffers. Allocates no memory by Rust's
/// allocator, whose failure would end the process: a post can start the thread.
///
/// # Errors
/// `EAGAIN`: the kernel refuses another thread, or has no memory. `EPERM`: a filter refuses it.
/// `EINVAL`: the program's thread-local variables leave no room in the stack, or the system's
/// minimum is more than [`STACK`].
pub(crate) fn start_thread<T: Thread>(object: &'static T) -> Res<()> {
    start_with_stack(object, STACK)
}

/// As [`start_thread`], with a stack of so many bytes.
fn start_with_stack<T: Thread>(object: &'static T, stack: usize) -> Res<()> {
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: memory for attributes, which are destroyed once, below.
    let ret = unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) };
    if ret != 0 {
        return Err(Errno(ret));
    }
    let attributes = attributes.as_mut_ptr();
    let mut thread = std::mem::MaybeUninit::<libc::pthread_t>::uninit();
    let all = block_signals();
    // SAFETY: initialised attributes; `object` lives for ever and may be shared with other threads,
    // and `main` gets it with its type.
    let ret = unsafe {
        let mut ret = libc::pthread_attr_setstacksize(attributes, stack);
        if ret == 0 {
            ret = libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED);
        }
        if ret == 0 {
            let of = std::ptr::from_ref(object).cast_mut().cast();
            ret = libc::pthread_create(thread.as_mut_ptr(), attributes, main::<T>, of);
        }
        libc::pthread_attr_destroy(attributes);
        ret
    };
    restore_signals(&all);
    if ret == 0 { Ok(()) } else { Err(Errno(ret)) }
}

extern "C" fn main<T: Thread>(of: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `start_thread` passes a `&'static T`.
    let object: &'static T = unsafe { &*of.cast::<T>() };
    // SAFETY: the calling thread, and a string that ends with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, T::NAME.as_ptr()) };
    unblock_faults();
    // A panic ends the thread, and not the application.
    if catch_unwind(AssertUnwindSafe(|| object.run())).is_err() {
        // it writes to the log, which may be a function of the application
        let _ = catch_unwind(AssertUnwindSafe(|| object.has_panicked()));
    }
    std::ptr::null_mut()
}

/// The signals of faults of this thread are delivered to it.
fn unblock_faults() {
    let faults = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
    ];
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialised by the first call.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for fault in faults {
            libc::sigaddset(set.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::sync::{Mutex, PoisonError};
    use std::time::Duration;

    struct Reports(Mutex<Sender<String>>);

    impl Thread for Reports {
        const NAME: &CStr = c"softverbs-test";

        fn run(&'static self) {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            sender.send(status).unwrap();
            panic!("ends this thread alone");
        }

        fn has_panicked(&'static self) {
            let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            sender.send("has panicked".into()).unwrap();
        }
    }

    #[test]
    fn a_thread_has_a_name_and_blocks_signals_and_tells_of_a_panic() {
        let (to, from) = channel();
        start_thread(Box::leak(Box::new(Reports(Mutex::new(to))))).unwrap();
        let status = from.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(status.contains("softverbs-test"));
        let blocked = status
            .lines()
            .find_map(|line| line.strip_prefix("SigBlk:"))
            .map(|mask| u64::from_str_radix(mask.trim(), 16).unwrap());
        // SIGINT, SIGTERM, SIGALRM
        let wanted = [2, 15, 14].map(|signal| 1 << (signal - 1));
        assert!(wanted.iter().all(|bit| blocked.unwrap() & bit != 0));
        // SIGSEGV, SIGBUS
        let faults = [11, 7].map(|signal| 1 << (signal - 1));
        assert!(faults.iter().all(|bit| blocked.unwrap() & bit == 0));
        let last = from.recv_timeout(Duration::from_secs(20));
        assert_eq!(last.unwrap(), "has panicked");
    }

    /// The thread does not get a stack of another size instead.
    #[test]
    fn a_stack_that_the_system_refuses_is_an_error() {
        let (to, from) = channel();
        let object = Box::leak(Box::new(Reports(Mutex::new(to))));
        assert_eq!(start_with_stack(object, 1), Err(Errno(libc::EINVAL)));
        assert!(from.recv_timeout(Duration::from_millis(100)).is_err());
    }
}
