//! Progress for operations that wait although nobody calls the library: a thread of the domain that runs
//! only while there are any.
//!
//! Operations wait while their keys are looked up (`msg/remote.rs`), which takes a round trip; whoever posts
//! or reads goes on with them. The thread is for applications that do neither (`FI_PROGRESS_AUTO`).

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::log::warn_log;
use crate::queue::CompletionQueue;
use crate::queue::slots::Rings;

/// How long it sleeps at first, and at most.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(2);

/// See the module. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Helper {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<(Weak<Rings>, Weak<CompletionQueue>)>,
    running: bool,
    stopped: bool,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// Goes on with what waits at an endpoint, until nothing does. A leaf: may be called with any lock held.
    pub(crate) fn add(&self, rings: Weak<Rings>, cq: &Arc<CompletionQueue>) {
        let mut state = self.shared.state.lock();
        if state.stopped || state.waiting.iter().any(|(known, _)| known.ptr_eq(&rings)) {
            return;
        }
        state.waiting.push((rings, Arc::downgrade(cq)));
        if state.running {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name("weft-helper".to_owned())
            .spawn(move || shared.run());
        match thread {
            Ok(thread) => {
                state.running = true;
                // the one before has left its loop
                state.thread = Some(thread);
            }
            Err(error) => {
                state.waiting.pop();
                warn_log!(EpData, "no thread for operations that wait: {error}");
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut pause = SHORTEST;
        loop {
            let waiting = {
                let mut state = self.state.lock();
                state
                    .waiting
                    .retain(|(rings, _)| rings.upgrade().is_some_and(|rings| rings.is_waiting()));
                if state.waiting.is_empty() || state.stopped {
                    state.running = false;
                    return;
                }
                state.waiting.clone()
            };
            for (rings, cq) in waiting {
                if let Some(cq) = cq.upgrade() {
                    // a queue that has failed tells who reads it
                    let _ = cq.progress();
                }
                if let Some(rings) = rings.upgrade()
                    && let Some(owner) = rings.owner.get().and_then(Weak::upgrade)
                {
                    owner.resume();
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST);
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let thread = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            state.thread.take()
        };
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
