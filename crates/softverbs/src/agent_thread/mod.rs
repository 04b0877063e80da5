//! The agent: a thread that executes for peers the copies and opens that the kernel denies them.
//!
//! The thread sleeps until a peer writes to it. The kernel reports the process at the other end of
//! a line (`SO_PEERCRED`); [`access`] checks the requests, which are not trusted.
//! `docs/softverbs-agent.md` has the protocol, [`crate::agent`] the requesting side.

mod access;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::agent::{
    Due, Kind, Outcome, PLACE, PLACES, REPLY, REQUEST, Reply, Request, Requester, name,
};
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

/// Number of tries to send an answer for which the kernel has no memory, and the time between two:
/// 50 ms in total, in which other peers wait.
const TRIES: u32 = 6;
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// Time between two tries to accept a connection, or the file of a line's first message, while
/// there is no descriptor for it.
const ADMIT_AGAIN: Duration = Duration::from_millis(20);

/// Maximum number of requests that are read from a line that has ended. A socket has room for
/// fewer.
const UNREAD: u32 = 4096;

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
            admits_at: None,
            greets_at: None,
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
    /// When the listener returns to the set, from which it is removed while there is no descriptor
    /// for a connection.
    admits_at: Option<Instant>,
    /// When the lines in [`Client::unheard`] return to the set.
    greets_at: Option<Instant>,
    clients: Vec<Option<Client>>,
}

/// A peer at the other end of a line.
struct Client {
    line: Line,
    credentials: Credentials,
    /// The peer's slot in the registry, once the peer has named it and was verified to be the
    /// process in that slot.
    slot: Option<u32>,
    bounce: Option<BounceFile>,
    /// The line is not in the set, because there is no descriptor for the file of its first
    /// message.
    unheard: bool,
}

impl Server {
    fn run(mut self) {
        loop {
            let pauses = [self.admit_again(), self.greet_again()];
            let pause = pauses
                .into_iter()
                .filter(|&pause| pause >= 0)
                .min()
                .unwrap_or(-1);
            match self.set.wait(pause) {
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

    /// Returns the listener to the set when its pause is over. The result is the rest of the pause
    /// in milliseconds, −1 without one.
    fn admit_again(&mut self) -> i32 {
        let Some(at) = self.admits_at else { return -1 };
        let left = at.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return left.as_millis() as i32 + 1;
        }
        self.admits_at = None;
        if self.set.add(self.listener.as_raw_fd(), NAME).is_err() {
            return self.pause_admission();
        }
        -1
    }

    /// Removes the listener from the set for [`ADMIT_AGAIN`]. The result is that time in
    /// milliseconds.
    fn pause_admission(&mut self) -> i32 {
        self.set.remove(self.listener.as_raw_fd());
        self.admits_at = Some(Instant::now() + ADMIT_AGAIN);
        ADMIT_AGAIN.as_millis() as i32
    }

    /// Returns the lines whose first message was not received to the set when their pause is over.
    /// The result is as that of [`Self::admit_again`].
    fn greet_again(&mut self) -> i32 {
        let Some(at) = self.greets_at else { return -1 };
        let left = at.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return left.as_millis() as i32 + 1;
        }
        self.greets_at = None;
        for (index, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client.as_mut().filter(|client| client.unheard) {
                let added = self.set.add(client.line.as_raw_fd(), index as u64);
                client.unheard = added.is_err();
                if client.unheard {
                    self.greets_at = Some(Instant::now() + ADMIT_AGAIN);
                }
            }
        }
        self.greets_at
            .map_or(-1, |_| ADMIT_AGAIN.as_millis() as i32)
    }

    /// Removes a line from the set for at most [`ADMIT_AGAIN`]: its first message stays in its
    /// socket, and other lines are served meanwhile.
    fn pause_greeting(&mut self, index: usize) {
        let Some(client) = self.clients[index].as_mut() else {
            return;
        };
        self.set.remove(client.line.as_raw_fd());
        client.unheard = true;
        self.greets_at.get_or_insert(Instant::now() + ADMIT_AGAIN);
    }

    /// Accepts a connection, if it is of the same user.
    fn admit(&mut self) {
        let line = match self.listener.accept() {
            Ok(line) => line,
            Err(Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                // The listener stays readable. Requests of the lines need no descriptor, and are
                // served meanwhile.
                self.pause_admission();
                return;
            }
            Err(_) => return,
        };
        let Ok(credentials) = line.credentials() else {
            return;
        };
        if !sys::is_own_user(credentials.uid, credentials.pid) {
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
                credentials,
                slot: None,
                bounce: None,
                unheard: false,
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
            Ok(Err(error)) if client.slot.is_none() && sys::is_shortage(error) => {
                self.pause_greeting(index);
            }
            _ => self.close_line(index),
        }
    }

    /// Ends a line explicitly. Closing alone would have no effect while a forked child has a copy
    /// of its descriptor.
    ///
    /// The peer counts a receive that it has given back over the line as returned. So the requests
    /// of this kind that are left in the socket are executed: the peer can send none any more.
    fn close_line(&mut self, index: usize) {
        if let Some(client) = self.clients[index].take() {
            self.set.remove(client.line.as_raw_fd());
            client.line.hang_up();
            let process = self.process;
            let _ = catch_unwind(AssertUnwindSafe(|| client.take_returns(process)));
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
    /// The line must be closed. But before its first message, an error of a shortage has no effect:
    /// the call can be repeated.
    fn serve(&mut self, process: &Process) -> Res<Option<u32>> {
        let mut bytes = [0; REQUEST];
        let received = match self.slot {
            // the first message has a file, which is not sent again
            None => self.line.receive_whole(&mut bytes),
            Some(_) => self.line.receive(&mut bytes),
        };
        let file = match received {
            Err(Errno(libc::EAGAIN)) => return Ok(None),
            done => done?,
        };
        let request = Request::of_bytes(&bytes).ok_or(Errno(libc::EPROTO))?;
        let Some(requester) = self.requester() else {
            return self.greet(process, &request, file).map(|()| None);
        };
        match request.kind {
            Kind::Hello => return Err(Errno(libc::EPROTO)),
            Kind::GoOn => return Ok(Some(requester.slot)),
            Kind::Return => {
                access::give_back(process, requester, &request);
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
        let outcome = access::execute(process, requester, bounce, &request);
        let outcome = outcome.ok_or(Errno(libc::EIO))?;
        self.answer(&request, outcome, None).map(|()| None)
    }

    fn requester(&self) -> Option<Requester> {
        let pid = self.credentials.pid;
        self.slot.map(|slot| Requester { slot, pid })
    }

    fn greet(&mut self, process: &Process, request: &Request, file: Option<OwnedFd>) -> Res<()> {
        let slot = u32::try_from(request.a).map_err(|_| Errno(libc::EPROTO))?;
        let known =
            (slot as usize) < MAX_PROCESSES && process.pid_of(slot) == Some(self.credentials.pid);
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

    /// Executes the requests to give receives back that are left on a line that has ended. Other
    /// requests get no answer, and are not executed.
    fn take_returns(&self, process: &Process) {
        let Some(requester) = self.requester() else {
            return;
        };
        let mut bytes = [0; REQUEST];
        for _ in 0..UNREAD {
            match self.line.receive(&mut bytes) {
                Ok(_) => {}
                // a message of another length
                Err(Errno(libc::EPROTO)) => continue,
                Err(_) => return,
            }
            if let Some(request) = Request::of_bytes(&bytes)
                && request.kind == Kind::Return
            {
                access::give_back(process, requester, &request);
            }
        }
    }

    fn answer(&self, request: &Request, outcome: Outcome, file: Option<&OwnedFd>) -> Res<()> {
        let reply = Reply {
            outcome,
            place: request.place,
            id: request.id,
        };
        let bytes: [u8; REPLY] = reply.to_bytes();
        let mut left = TRIES;
        loop {
            left -= 1;
            match self.line.send(&bytes, file.map(AsFd::as_fd)) {
                Err(Errno(libc::ENOBUFS | libc::ENOMEM)) if left > 0 => {
                    std::thread::sleep(TRY_AGAIN);
                }
                // The line of a peer that does not read its answers is closed.
                done => return done,
            }
        }
    }
}

/// Serves a line that has all these requests in its socket, until the line is closed.
#[cfg(test)]
pub(crate) fn serve(process: &'static Process, requests: &[Request]) {
    let name = format!("softverbs-test.{}", sys::random());
    let mut server = Server {
        process,
        listener: Listener::bind(&name).unwrap(),
        set: Epoll::new().unwrap(),
        admits_at: None,
        greets_at: None,
        clients: Vec::new(),
    };
    let line = Line::connect(&name).unwrap();
    server.admit();
    for request in requests {
        line.send(&request.to_bytes(), None).unwrap();
    }
    while server.clients[0].is_some() {
        server.serve_line(0);
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "forks, and kills the child")]
mod tests {
    use super::*;

    /// A line of this process to its own agent.
    fn connect(process: &Process) -> Line {
        let line = Line::connect(&name(process.slot, &process.identity)).unwrap();
        let mut hello = Request::new(Kind::Hello);
        hello.a = process.slot.into();
        line.send(&hello.to_bytes(), None).unwrap();
        line
    }

    /// Requests a file that does not exist. Returns whether an answer comes.
    fn is_answered(line: &Line) -> bool {
        let mut file = Request::new(Kind::File);
        file.a = u64::MAX;
        line.send(&file.to_bytes(), None).unwrap();
        sys::epoll_readable(line.as_raw_fd(), 20_000).unwrap()
            && line.receive(&mut [0; REPLY]).is_ok()
    }

    /// Requests of lines that exist need no descriptor.
    #[test]
    fn a_connection_that_cannot_be_accepted_delays_no_line() {
        let process = Process::open().unwrap();
        process.start_agent();
        let line = connect(process);
        assert!(is_answered(&line));
        // SAFETY: all zeros is a value of it.
        let mut before: libc::rlimit = unsafe { std::mem::zeroed() };
        let set = |limit: &libc::rlimit| {
            // SAFETY: a readable structure.
            sys::check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }).unwrap();
        };
        // SAFETY: a writable structure.
        sys::check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }).unwrap();
        let lowest_free = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
        set(&libc::rlimit {
            rlim_cur: lowest_free as u64 + 1,
            ..before
        });
        // it takes the last descriptor, so the agent cannot accept it
        let next = connect(process);
        assert_eq!(next.as_raw_fd(), lowest_free);
        let begin = Instant::now();
        let answered = (0..100).all(|_| is_answered(&line));
        let took = begin.elapsed();
        set(&before);
        assert!(answered && took < Duration::from_secs(1), "{took:?}");
        assert!(is_answered(&next));
    }

    /// The connection has the last descriptor, so there is none for the file of the first message.
    #[test]
    fn a_line_whose_file_finds_no_descriptor_is_served_later() {
        let process = Process::open().unwrap();
        process.start_agent();
        let line = connect(process);
        assert!(is_answered(&line));
        let bounce = BounceFile::create(PLACES * PLACE).unwrap();
        let count = || sys::count_entries("/proc/self/fd");
        let before = count();
        let next = Line::connect(&name(process.slot, &process.identity)).unwrap();
        // both ends are in this process
        while count() < before + 2 {
            std::thread::yield_now();
        }
        let hello = Request {
            a: process.slot.into(),
            ..Request::new(Kind::Hello)
        };
        sys::with_descriptors(0, || {
            next.send(&hello.to_bytes(), Some(bounce.as_fd())).unwrap();
            // it refuses this one, but has the file
            next.send(&Request::new(Kind::Write).to_bytes(), None)
                .unwrap();
            assert!((0..100).all(|_| is_answered(&line)));
            // no answer, and no end
            assert!(!sys::epoll_readable(next.as_raw_fd(), 3 * 20).unwrap());
        });
        assert!(sys::epoll_readable(next.as_raw_fd(), 20_000).unwrap());
        let mut bytes = [0; REPLY];
        next.receive(&mut bytes).expect("the line is closed");
        assert_eq!(Reply::of_bytes(&bytes).outcome, Outcome::Refused);
    }

    #[test]
    fn a_line_that_a_forked_child_has_is_cut() {
        let process = Process::open().unwrap();
        process.start_agent();
        let line = connect(process);
        assert!(is_answered(&line), "no answer");
        // SAFETY: the child only waits to be killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no memory is passed.
                unsafe { libc::pause() };
            }
        }
        line.send(b"nothing", None).unwrap();
        let came = sys::epoll_readable(line.as_raw_fd(), 20_000).unwrap();
        let cut = came && line.receive(&mut [0; REPLY]).is_err();
        // SAFETY: this test's own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert!(cut, "the child keeps it open");
    }
}
