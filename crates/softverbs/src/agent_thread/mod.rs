//! The agent: a thread that executes for peers the copies and opens that the kernel denies them.
//!
//! The thread sleeps until a peer writes to it. The kernel reports the process at the other end of
//! a line (`SO_PEERCRED`); [`access`] checks the requests, which are not trusted.
//! `docs/softverbs-agent.md` has the protocol, [`crate::agent`] the requesting side.

mod access;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::agent::{Due, Kind, Outcome, PLACE, PLACES, REPLY, REQUEST, Reply, Request, name};
use crate::process::Process;
use crate::segment::layout::MAX_PROCESSES;
use crate::sys::{self, BounceFile, Credentials, Epoll, Errno, Line, Listener, Res};

/// Maximum number of lines: one for each possible process, and 64 for files.
const LINES: usize = MAX_PROCESSES + 64;

/// The epoll token of the listener; the token of a line is its index.
const NAME: u64 = u64::MAX;
/// Tokens of this process's own links to agents of peers; the lower 32 bits are the peer's slot.
const OWN: u64 = 1 << 32;

/// Maximum rounds of progress for answers that have arrived; another thread may be about to take
/// them.
const ROUNDS: u32 = 64;

/// Whether this process's agent runs.
#[derive(Debug, Default)]
pub(crate) struct Agent(Mutex<bool>);

impl Agent {
    /// Starts the agent, which runs until the process ends. Returns false if it already runs.
    ///
    /// # Errors
    /// Those of creating a socket or thread; the call can be repeated.
    pub(crate) fn start(&self, process: &'static Process) -> Res<bool> {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *runs {
            return Ok(false);
        }
        let listener = Listener::bind(&name(process.slot, &process.identity))?;
        let set = Epoll::new()?;
        set.add(listener.as_raw_fd(), NAME)?;
        let server = Server {
            process,
            listener,
            set,
            clients: Vec::new(),
        };
        let all = sys::block_signals();
        let spawned = std::thread::Builder::new()
            .name("softverbs-agent".into())
            .stack_size(256 << 10)
            .spawn(move || server.run());
        sys::restore_signals(&all);
        spawned?;
        *runs = true;
        Ok(true)
    }
}

/// The state of the agent thread; no other thread uses it.
struct Server {
    process: &'static Process,
    listener: Listener,
    set: Epoll,
    clients: Vec<Option<Client>>,
}

/// A peer at the other end of a line.
struct Client {
    line: Line,
    who: Credentials,
    /// The peer's slot in the registry, once the peer has named it and was verified to be the
    /// process in that slot.
    slot: Option<u32>,
    bounce: Option<BounceFile>,
}

impl Server {
    fn run(mut self) {
        loop {
            match self.set.wait(-1) {
                Ok((tokens, n)) => {
                    for &token in &tokens[..n] {
                        if token == NAME {
                            self.admit();
                        } else if token & OWN != 0 {
                            self.make_progress(token as u32);
                        } else {
                            self.serve_line(token as usize);
                        }
                    }
                }
                Err(Errno(libc::EINTR)) => {}
                Err(_) => return,
            }
        }
    }

    /// Accepts a connection, if it is of the same user.
    fn admit(&mut self) {
        let line = match self.listener.accept() {
            Ok(line) => line,
            Err(Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                // The listener stays readable, so the thread waits 20 ms before the next try.
                std::thread::sleep(Duration::from_millis(20));
                return;
            }
            Err(_) => return,
        };
        let Ok(who) = line.credentials() else { return };
        if !sys::is_own_user(who.uid, who.pid) {
            return;
        }
        let index = match self.clients.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.clients.len() < LINES => {
                self.clients.push(None);
                self.clients.len() - 1
            }
            None => return,
        };
        if self.set.add(line.as_raw_fd(), index as u64).is_ok() {
            self.clients[index] = Some(Client {
                line,
                who,
                slot: None,
                bounce: None,
            });
        }
    }

    /// Executes one request of a line, or closes the line on an error.
    fn serve_line(&mut self, index: usize) {
        let Some(client) = self.clients.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        let process = self.process;
        // A panic fails only this request's line.
        let done = catch_unwind(AssertUnwindSafe(|| client.serve(process)));
        match done {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(slot))) => self.make_progress(slot),
            _ => self.close_line(index),
        }
    }

    /// Ends a line explicitly. Closing alone would have no effect while a forked child has a copy
    /// of its descriptor.
    fn close_line(&mut self, index: usize) {
        if let Some(client) = self.clients[index].take() {
            self.set.remove(client.line.as_raw_fd());
            client.line.hang_up();
        }
    }

    /// Makes progress for the process, whose other threads may sleep, and again when the agent of
    /// the process in `slot` has answered.
    fn make_progress(&mut self, slot: u32) {
        let process = self.process;
        for _ in 0..ROUNDS {
            let link = catch_unwind(AssertUnwindSafe(|| {
                process.progress();
                process.link_of(slot)
            }));
            let Ok(Some(link)) = link else { return };
            match link.due() {
                Due::Nothing => return,
                Due::Answer => {}
                Due::Later => {
                    // The descriptor is added one-shot, so closing it meanwhile is harmless.
                    let _ = self.set.add_once(link.fd(), OWN | u64::from(slot));
                    return;
                }
            }
        }
    }
}

impl Client {
    /// Executes one request. Returns the slot of the peer if the request asks this process to make
    /// progress.
    ///
    /// # Errors
    /// The line must be closed.
    fn serve(&mut self, process: &Process) -> Res<Option<u32>> {
        let mut bytes = [0; REQUEST];
        let file = match self.line.receive(&mut bytes) {
            Err(Errno(libc::EAGAIN)) => return Ok(None),
            done => done?,
        };
        let request = Request::of_bytes(&bytes).ok_or(Errno(libc::EPROTO))?;
        let Some(slot) = self.slot else {
            return self.greet(process, &request, file).map(|()| None);
        };
        match request.kind {
            Kind::Hello => return Err(Errno(libc::EPROTO)),
            Kind::GoOn => return Ok(Some(slot)),
            Kind::Return => {
                access::give_back(process, slot, &request);
                return Ok(None);
            }
            Kind::File => {
                let file = process.shown_file(request.a as i32);
                self.answer(&request, Outcome::Done(0), file.as_ref())?;
                return Ok(None);
            }
            _ => {}
        }
        let inside = (request.place as usize) < PLACES && request.len <= PLACE as u64;
        let bounce = self.bounce.as_ref().filter(|_| inside);
        let bounce = bounce.ok_or(Errno(libc::EPROTO))?;
        let outcome = access::execute(process, slot, bounce, &request);
        self.answer(&request, outcome, None).map(|()| None)
    }

    fn greet(&mut self, process: &Process, request: &Request, file: Option<OwnedFd>) -> Res<()> {
        let slot = u32::try_from(request.a).map_err(|_| Errno(libc::EPROTO))?;
        let known = (slot as usize) < MAX_PROCESSES && process.pid_of(slot) == Some(self.who.pid);
        if request.kind != Kind::Hello || !known {
            return Err(Errno(libc::EPROTO));
        }
        self.bounce = match file {
            Some(file) => Some(BounceFile::of_file(file, PLACES * PLACE)?),
            None => None,
        };
        self.slot = Some(slot);
        Ok(())
    }

    fn answer(&self, request: &Request, outcome: Outcome, file: Option<&OwnedFd>) -> Res<()> {
        let reply = Reply {
            outcome,
            place: request.place,
            id: request.id,
        };
        let bytes: [u8; REPLY] = reply.to_bytes();
        // The line of a peer that does not read its answers is closed.
        self.line.send(&bytes, file.map(AsFd::as_fd))
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "forks, and kills the child")]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_a_forked_child_has_is_cut() {
        let process = Process::open().unwrap();
        process.start_agent();
        let line = Line::connect(&name(process.slot, &process.identity)).unwrap();
        let mut hello = Request::new(Kind::Hello);
        hello.a = process.slot.into();
        line.send(&hello.to_bytes(), None).unwrap();
        let mut file = Request::new(Kind::File);
        file.a = u64::MAX;
        line.send(&file.to_bytes(), None).unwrap();
        let came = || sys::epoll_readable(line.as_raw_fd(), 20_000).unwrap();
        assert!(came(), "no answer");
        line.receive(&mut [0; REPLY]).unwrap();
        // SAFETY: the child only waits to be killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no memory is passed.
                unsafe { libc::pause() };
            }
        }
        line.send(b"nothing", None).unwrap();
        let cut = came() && line.receive(&mut [0; REPLY]).is_err();
        // SAFETY: this test's own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert!(cut, "the child keeps it open");
    }
}
