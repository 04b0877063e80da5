//! A mutex that is biased towards the thread that usually locks it.
//!
//! The objects of a communication library are shared by one thread of the application, which locks
//! them at every call, and by threads that come once per millisecond or less. A mutex costs the
//! first one two atomic read-modify-write operations per call, which on x86-64 also wait for all
//! earlier stores. A [`RawMutex`] has a *bias*: the thread whose bias it is locks and unlocks with
//! ordinary loads and stores. Any other thread takes the bias away for the time of its visit, with
//! a barrier on every processor that runs this process (membarrier(2)).
//!
//! The bias is given to a thread that has locked the mutex [`BIAS_RUN`] times in a row, and lost
//! when another thread locks it, except for a thread that has said that it is a [`visitor`]. Each
//! loss doubles the number of times that the next bias needs. Threads that use a mutex in turn
//! thereby pay for an ordinary mutex and, in the end, for one barrier in 65,536 calls.
//!
//! The technique is that of biased locks of Java virtual machines (Russell and Detlefs,
//! "Eliminating Synchronization-Related Atomic Operations with Biased Locking and Bulk Rebiasing",
//! 2006), with membarrier(2) in the place of the stop of a thread.
//!
//! # Protocol
//! `bias` is the identifier of the thread that has the bias, or 0. Its owner alone stores to the
//! flag `inside` of its place. It sets the flag, and has the mutex if `bias` still is its own;
//! any other thread first locks the ordinary mutex `others`, sets `bias` to 0, runs the barrier, and
//! waits until the flag is clear. Either the owner's store of the flag precedes the barrier, and
//! the other thread sees the flag, or the owner's load of `bias` follows it, and finds 0.
//!
//! The bias is 0 while a thread has the mutex by `others`. So a thread that has the mutex does not
//! get it again: its trial fails, as that of another thread.
//!
//! A process whose membarrier(2) begins to fail after a thread has got a bias (a seccomp filter
//! that is installed late) is aborted at the next visit of another thread.
//!
//! A thread that was delayed between its two loads of `bias` sets and clears its flag long after it
//! has lost the bias. The flag of another thread must not be cleared by that: a place belongs to
//! one thread for the life of the mutex, or to a later one with the same identifier, which exists
//! when the first has ended. A thread whose place is taken gets no bias.

#[cfg(not(all(test, loom)))]
mod lockable;
#[cfg(all(test, loom))]
mod models;
mod platform;
mod raw;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(all(test, loom)))]
pub use lockable::Held;
pub use platform::visitor;
pub use raw::{BIAS_RUN, RawMutex};

/// A mutex with a bias.
#[cfg(not(all(test, loom)))]
pub type Mutex<T> = parking_lot::lock_api::Mutex<RawMutex, T>;
/// Access to the value of a [`Mutex`].
#[cfg(not(all(test, loom)))]
pub type MutexGuard<'a, T> = parking_lot::lock_api::MutexGuard<'a, RawMutex, T>;
