//! The mutex with threads of the system.

#![allow(unsafe_code, reason = "a mutex without its guard, and a forked child")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{BIAS_RUN, Mutex, platform, visitor};

/// Whether the calling thread has the bias.
fn has_bias<T>(mutex: &Mutex<T>) -> bool {
    // SAFETY: the guard state is passed on once.
    unsafe {
        let raw = mutex.raw();
        raw.enter(platform::thread())
            .inspect(|place| raw.leave(*place))
            .is_some()
    }
}

#[test]
fn a_thread_that_is_alone_gets_the_bias() {
    let mutex = Mutex::new(0);
    for _ in 0..BIAS_RUN {
        assert!(!has_bias(&mutex));
        *mutex.lock() += 1;
    }
    assert!(has_bias(&mutex));
    *mutex.lock() += 1;
    assert!(mutex.try_lock().is_some());
    assert_eq!(*mutex.lock(), BIAS_RUN + 1);
}

#[test]
fn it_is_locked_while_the_owner_of_the_bias_is_inside() {
    let mutex = Mutex::new(());
    for _ in 0..BIAS_RUN {
        drop(mutex.lock());
    }
    assert!(has_bias(&mutex) && !mutex.is_locked());
    let guard = mutex.lock();
    assert!(mutex.is_locked());
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(mutex.try_lock().is_none()));
    });
    drop(guard);
    assert!(!mutex.is_locked());
    // the trial of the other thread has not taken the bias
    assert!(has_bias(&mutex));
}

/// As with other mutexes, whether the thread has it by its bias or not.
#[test]
fn a_trial_of_the_thread_that_has_it_fails() {
    let mutex = Mutex::new(());
    for round in 0..2 * BIAS_RUN {
        let guard = if round % 2 == 0 {
            mutex.lock()
        } else {
            mutex.try_lock().unwrap()
        };
        assert!(mutex.try_lock().is_none(), "round {round}");
        drop(guard);
    }
    assert!(has_bias(&mutex));
}

#[test]
fn another_thread_takes_the_bias_and_a_visitor_returns_it() {
    let mutex = Mutex::new(0);
    let run = |count| {
        for _ in 0..count {
            *mutex.lock() += 1;
        }
    };
    run(BIAS_RUN);
    let other = |visits: bool| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if visits {
                    visitor();
                }
                run(10 * BIAS_RUN);
                assert!(!visits || !has_bias(&mutex), "a visitor has no bias");
            });
        });
    };
    other(true);
    assert!(has_bias(&mutex));
    other(false);
    assert!(!has_bias(&mutex));
    // the bias needs twice the run after each loss
    run(BIAS_RUN);
    assert!(!has_bias(&mutex));
    run(10 * BIAS_RUN);
    assert!(has_bias(&mutex));
    assert_eq!(*mutex.lock(), 32 * BIAS_RUN);
}

#[test]
fn threads_of_all_kinds_exclude_each_other() {
    const ROUNDS: usize = 20_000;
    let mutex = Arc::new(Mutex::new([0_usize; 2]));
    let stop = Arc::new(AtomicBool::new(false));
    // each thread sees both numbers equal, and leaves them equal
    let step = |mutex: &Mutex<[usize; 2]>| {
        let mut both = mutex.lock();
        assert_eq!(both[0], both[1]);
        both[0] += 1;
        std::hint::black_box(&mut *both);
        both[1] += 1;
    };
    let visits = {
        let (mutex, stop) = (Arc::clone(&mutex), Arc::clone(&stop));
        std::thread::spawn(move || {
            visitor();
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                step(&mutex);
                count += 1;
                std::thread::yield_now();
                if let Some(both) = mutex.try_lock() {
                    assert_eq!(both[0], both[1]);
                }
            }
            count
        })
    };
    let others: Vec<_> = (0..3)
        .map(|at| {
            let mutex = Arc::clone(&mutex);
            std::thread::spawn(move || {
                for round in 0..ROUNDS {
                    step(&mutex);
                    // long runs of one thread, so that the bias moves
                    if round % (500 << at) == 0 {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                }
            })
        })
        .collect();
    for other in others {
        other.join().unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let count = visits.join().unwrap();
    assert_eq!(*mutex.lock(), [3 * ROUNDS + count; 2]);
}

/// A forked child has one thread, and no registration for barriers of its own.
#[test]
fn a_forked_child_locks_it() {
    let mutex = Arc::new(Mutex::new(0));
    for _ in 0..BIAS_RUN {
        *mutex.lock() += 1;
    }
    assert!(has_bias(&mutex));
    // SAFETY: the child only locks the mutex, starts a thread and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        *mutex.lock() += 1;
        let theirs = Arc::clone(&mutex);
        let other = std::thread::spawn(move || *theirs.lock() += 1);
        let ended = other.join().is_ok() && *mutex.lock() == BIAS_RUN + 2;
        // SAFETY: the process ends at once.
        unsafe { libc::_exit(i32::from(!ended)) }
    }
    let mut status = 0;
    // SAFETY: a child of this process, and a writable place.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    assert_eq!(*mutex.lock(), BIAS_RUN);
}
