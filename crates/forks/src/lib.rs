//! Recognizes a forked child, whose memory is a copy of that of its parent: it has none of the
//! other threads, and locks that these threads held at the fork are never released in it.
//!
//! Each process has a number in a page that the kernel zeroes in a child (`MADV_WIPEONFORK`, Linux
//! 4.14): in a child of `fork(3)`, of `_Fork(3)`, or of a `clone(2)` that copies the memory, before
//! any code of the child runs. A child that reads 0 takes the next number. If there is no such
//! page, forks by `fork(3)` alone are counted (`pthread_atfork(3)`), and child handlers that were
//! registered before run with the number of the parent. `vfork(2)` and `posix_spawn(3)` need
//! nothing.

#![allow(
    unsafe_code,
    reason = "a page that is wiped in forked children, pthread_atfork, and objects that are shared \
              without a lock"
)]

use std::ffi::{c_int, c_void};
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Without a wiped page: 0 until forks are counted, then 1 and the number of forks since.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The number of the process: in a wiped page, which is never unmapped, or [`FORKS`].
static NUMBER: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const FORKS).cast_mut());

/// The last number of a process with a wiped page, or of one of its ancestors. Not less than the
/// number in the page, at any time: a child takes a number that no process before it has.
static LAST: AtomicU32 = AtomicU32::new(FIRST);

/// The number of the process in which forks are counted first.
const FIRST: u32 = 1;

#[inline(always)]
fn place() -> &'static AtomicU32 {
    // SAFETY: `FORKS`, or an aligned word of a page that is never unmapped (`begin`).
    unsafe { &*NUMBER.load(Ordering::Acquire) }
}

/// The number of the process; 0: forks are not counted yet.
#[inline(always)]
fn number() -> u32 {
    match place().load(Ordering::Relaxed) {
        0 => new_number(),
        number => number,
    }
}

/// As [`number`], in a child that has no number yet, or before forks are counted.
#[cold]
fn new_number() -> u32 {
    let place = place();
    if std::ptr::eq(place, &raw const FORKS) {
        return place.load(Ordering::Relaxed);
    }
    // before the number is in the page, because another thread of the child may fork then
    let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let (set, read) = (Ordering::Release, Ordering::Relaxed);
    match place.compare_exchange(0, new, set, read) {
        Ok(_) => new,
        // another thread of this process was faster
        Err(other) => other,
    }
}

/// A number, not 0, that differs in a process and its forked children, from the first call of
/// [`are_counted`] on, which may follow the first call of this function.
#[inline(always)]
pub fn generation() -> u32 {
    // 0 and 1 are one process: forks are counted from 1 on
    number().max(FIRST)
}

/// The process that has created an object. A forked child, which inherits a copy of the object, is
/// another process.
///
/// If forks cannot be counted for lack of memory, a child is taken for its parent.
#[derive(Clone, Copy, Debug)]
pub struct Owner(NonZeroU32);

impl Owner {
    /// The calling process.
    pub fn this_process() -> Self {
        are_counted();
        Self(NonZeroU32::new(generation()).unwrap_or(NonZeroU32::MIN))
    }

    /// Whether the object is of the calling process, and not inherited. No system call.
    #[inline(always)]
    pub fn is_this_process(self) -> bool {
        self.0.get() == generation()
    }
}

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Makes forks be counted. `false`: no memory for that. Never waits.
pub fn are_counted() -> bool {
    number() != 0 || begin()
}

/// Threads that call it at the same time map more pages, or register more handlers, than one, which
/// does no harm. A lock could be held for ever in a child.
#[cold]
fn begin() -> bool {
    let Some(page) = wiped_page() else {
        return begin_with_handler();
    };
    let page = page.cast::<AtomicU32>().as_ptr();
    // SAFETY: the start of the page is aligned, writable, and known to no other thread.
    unsafe { page.write(AtomicU32::new(FIRST)) };
    let forks = (&raw const FORKS).cast_mut();
    let (set, read) = (Ordering::Release, Ordering::Relaxed);
    // An error is that another thread was faster: then this page, of which no reference exists, is
    // left.
    let _ = NUMBER.compare_exchange(forks, page, set, read);
    true
}

/// A new page of zeros, which the kernel zeroes again in forked children, also in children of
/// these. It belongs to the caller, and stays mapped. `None`: no memory, or a kernel without such
/// pages.
pub fn wiped_page() -> Option<NonNull<c_void>> {
    // SAFETY: `new_page` passes its own mapping, to which nothing refers yet.
    new_page(|page, size, advice| unsafe { libc::madvise(page, size, advice) })
}

/// As [`wiped_page`], with this `madvise(2)`.
fn new_page(madvise: impl Fn(*mut c_void, usize, c_int) -> c_int) -> Option<NonNull<c_void>> {
    // SAFETY: asks for a number.
    let size = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // An emulation of Linux can accept each advice and follow none. An advice that does not exist
    // changes nothing.
    let ignored = madvise(page, size, -1) == 0;
    if ignored || madvise(page, size, libc::MADV_WIPEONFORK) != 0 {
        // SAFETY: the mapping made above; nothing refers to it.
        unsafe { libc::munmap(page, size) };
        return None;
    }
    NonNull::new(page)
}

/// [`begin`] without a wiped page.
fn begin_with_handler() -> bool {
    // SAFETY: the handler only changes an atomic. The C library removes it if this library is
    // unloaded.
    let counted = unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 };
    if counted {
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = FORKS.compare_exchange(0, FIRST, set, read);
    }
    counted
}

/// A static object of which a forked child has its own, made by `Default` at its first use there.
/// The child's copy of the object of its parent is neither used nor dropped. So the child waits for
/// no lock in it, and destroys nothing of the parent.
///
/// If forks cannot be counted for lack of memory, a child uses the copy.
#[derive(Debug)]
pub struct PerProcess<T: Send + Sync + 'static> {
    /// Of the process in which forks were counted first.
    first: T,
    /// Of the forked child that has used the static last; NULL: none has.
    last: AtomicPtr<Owned<T>>,
}

/// The object of a forked child. Never freed: children of the child may refer to it.
#[derive(Debug)]
struct Owned<T> {
    /// The number of its process.
    number: u32,
    object: T,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// `first`: the object of a process that is no forked child, equal to the default.
    pub const fn new(first: T) -> Self {
        Self {
            first,
            last: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// The object of this process. The first call in a forked child allocates. Never waits.
    #[inline]
    pub fn get(&'static self) -> &'static T {
        self.try_get().unwrap_or_else(|| no_memory::<T>())
    }

    /// As [`Self::get`]. `None`: no memory for the object of a forked child.
    #[inline]
    pub fn try_get(&'static self) -> Option<&'static T> {
        match number() {
            0 => {
                are_counted();
                Some(&self.first)
            }
            FIRST => Some(&self.first),
            number => self.of_child(number),
        }
    }

    #[cold]
    fn of_child(&self, number: u32) -> Option<&T> {
        let last = self.last.load(Ordering::Acquire);
        // SAFETY: NULL, or an object that is never freed.
        if let Some(last) = unsafe { last.as_ref() }
            && last.number == number
        {
            return Some(&last.object);
        }
        let new = allocate(Owned {
            number,
            object: T::default(),
        })?;
        let (set, read) = (Ordering::AcqRel, Ordering::Acquire);
        let used = match self.last.compare_exchange(last, new, set, read) {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: allocated above as a `Box` is, and no other thread has it.
                drop(unsafe { Box::from_raw(new) });
                // another thread of this process was faster
                other
            }
        };
        // SAFETY: an object that is never freed.
        unsafe { used.as_ref() }.map(|used| &used.object)
    }
}

/// A [`Box`] as a pointer. `None`: no memory.
fn allocate<T>(object: Owned<T>) -> Option<*mut Owned<T>> {
    let layout = std::alloc::Layout::new::<Owned<T>>();
    // SAFETY: the size is not 0, as the structure has a number.
    let place = unsafe { std::alloc::alloc(layout) }.cast::<Owned<T>>();
    if place.is_null() {
        return None;
    }
    // SAFETY: memory of this layout, which holds nothing yet.
    unsafe { place.write(object) };
    Some(place)
}

#[cold]
fn no_memory<T>() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<Owned<T>>())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

    use super::*;

    static NUMBERS: PerProcess<Mutex<Vec<u32>>> = PerProcess::new(Mutex::new(Vec::new()));

    fn numbers() -> MutexGuard<'static, Vec<u32>> {
        NUMBERS.get().try_lock().unwrap()
    }

    /// Runs in a forked child, which must return true.
    fn in_child(run: impl FnOnce() -> bool) {
        // SAFETY: the child runs the closure, and ends with `_exit`.
        in_child_of(|| unsafe { libc::fork() }, run);
    }

    fn in_child_of(fork: impl FnOnce() -> libc::pid_t, run: impl FnOnce() -> bool) {
        let pid = fork();
        if pid == 0 {
            let run = std::panic::AssertUnwindSafe(run);
            let good = std::panic::catch_unwind(run).unwrap_or(false);
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = -1;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0);
    }

    /// As a kernel without such pages, and as an emulation of Linux that follows no advice.
    #[test]
    fn a_page_that_is_not_wiped_is_refused() {
        assert!(wiped_page().is_some());
        assert_eq!(new_page(|_, _, _| -1), None);
        assert_eq!(new_page(|_, _, _| 0), None);
    }

    #[test]
    fn each_process_has_its_own_object_and_none_waits() {
        numbers().push(1);
        let held = numbers();
        in_child(|| {
            // the child has a copy of the locked mutex
            let empty = numbers().is_empty();
            numbers().push(2);
            let held = numbers();
            in_child(|| numbers().is_empty());
            drop(held);
            in_child(|| numbers().is_empty());
            empty && *numbers() == [2]
        });
        drop(held);
        assert_eq!(*numbers(), [1]);
    }

    #[test]
    fn an_object_is_of_the_process_that_has_created_it_alone() {
        let own = Owner::this_process();
        assert!(own.is_this_process());
        in_child(|| {
            let of_child = Owner::this_process();
            in_child(|| !of_child.is_this_process() && !own.is_this_process());
            of_child.is_this_process() && !own.is_this_process()
        });
        assert!(own.is_this_process());
    }

    /// The owner that [`earlier`] must find to be another process.
    static EARLIER: std::sync::OnceLock<Owner> = std::sync::OnceLock::new();

    extern "C" fn earlier() {
        if let Some(owner) = EARLIER.get() {
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(owner.is_this_process())) };
        }
    }

    /// Whether this is a process in which forks are not counted yet, as the named test needs it.
    /// Otherwise it runs the test in such a process.
    fn is_alone(name: &str) -> bool {
        const ALONE: &str = "WEFT_FORKS_TEST_ALONE";
        let is_alone = std::env::var_os(ALONE).is_some();
        if is_alone {
            assert_eq!(number(), 0);
        } else {
            let name = format!("tests::{name}");
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            test.args(["--exact", &name, "--nocapture"]).env(ALONE, "1");
            let out = test.output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains(" 1 passed"), "{text}");
            if let Some(at) = text.find("skipped: ") {
                println!("{}", text[at..].lines().next().unwrap());
            }
        }
        is_alone
    }

    /// Whether the kernel clears pages in children. Otherwise the handler's limits apply.
    fn has_wiped_pages() -> bool {
        assert!(are_counted());
        let has_pages = !std::ptr::eq(place(), &raw const FORKS);
        if !has_pages {
            println!("skipped: the kernel clears no pages in children");
        }
        has_pages
    }

    #[test]
    fn a_child_is_recognized_before_any_handler_runs() {
        if !is_alone("a_child_is_recognized_before_any_handler_runs") {
            return;
        }
        // SAFETY: the handler reads a static, and may end the child.
        let registered = unsafe { libc::pthread_atfork(None, None, Some(earlier)) };
        assert_eq!(registered, 0);
        if !has_wiped_pages() {
            return;
        }
        EARLIER.set(Owner::this_process()).unwrap();
        in_child(|| false);
    }

    #[test]
    fn forks_are_counted_without_a_wiped_page() {
        if !is_alone("forks_are_counted_without_a_wiped_page") {
            return;
        }
        assert!(begin_with_handler());
        let own = Owner::this_process();
        assert!(std::ptr::eq(place(), &raw const FORKS));
        numbers().push(1);
        in_child(|| {
            let of_child = Owner::this_process();
            let empty = numbers().is_empty();
            numbers().push(2);
            in_child(|| {
                let is_new = !of_child.is_this_process() && !own.is_this_process();
                is_new && numbers().is_empty()
            });
            let is_own = of_child.is_this_process() && !own.is_this_process();
            is_own && empty && *numbers() == [2]
        });
        assert!(own.is_this_process());
        assert_eq!(*numbers(), [1]);
    }

    /// As of `_Fork(3)`: no handler runs.
    #[test]
    fn a_child_of_clone_is_recognized() {
        if !has_wiped_pages() {
            return;
        }
        let own = Owner::this_process();
        let clone = || {
            let none: libc::c_ulong = 0;
            // SAFETY: a child with a copy of the memory, and no stack of its own, as of fork(2).
            let pid = unsafe {
                let flags = libc::c_long::from(libc::SIGCHLD);
                libc::syscall(libc::SYS_clone, flags, none, none, none, none)
            };
            libc::pid_t::try_from(pid).unwrap()
        };
        in_child_of(clone, || !own.is_this_process());
        assert!(own.is_this_process());
    }

    #[test]
    fn threads_of_a_child_have_one_object() {
        assert!(are_counted());
        in_child(|| {
            let address = || std::ptr::from_ref(NUMBERS.get()).addr();
            let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(address)).collect();
            let own = address();
            let all = threads.into_iter().map(|thread| thread.join().unwrap());
            own != std::ptr::from_ref(&NUMBERS.first).addr() && all.into_iter().all(|at| at == own)
        });
    }
}
