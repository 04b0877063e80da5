//! Sequenced-packet sockets of the local host (`AF_UNIX`), and the descriptors that a channel waits
//! for.
//!
//! Invariants: every descriptor is close-on-exec and non-blocking. A socket's name is in the
//! abstract namespace: it belongs to the network namespace, and ends with the last descriptor.
//! Ancillary data is never received, so a peer cannot pass descriptors to this process.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use forks::Owner;

use crate::process::Process;
use crate::sys::{self, Errno, Res, check};

/// A socket; shut down when its process drops it, so that a forked child with a copy does not keep
/// the conversation open. A child that drops its copy closes only that.
#[derive(Debug)]
pub(super) struct Sock {
    fd: OwnedFd,
    owner: Owner,
}

/// Result of `recv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// No packet yet.
    Nothing,
    /// A packet of this many bytes, which may be more than the buffer holds.
    Packet(usize),
    /// The peer has closed, or its process has ended.
    End,
}

fn abstract_name(name: &str) -> Res<(libc::sockaddr_un, libc::socklen_t)> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    // The first byte stays zero, which makes the name abstract.
    let room = address
        .sun_path
        .get_mut(1..=name.len())
        .ok_or(Errno(libc::ENAMETOOLONG))?;
    for (to, from) in room.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

fn owned(fd: libc::c_int) -> Res<OwnedFd> {
    let fd = check(fd)?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Sock {
    fn of(fd: OwnedFd) -> Self {
        Self {
            fd,
            owner: Owner::this_process(),
        }
    }

    pub(super) fn new() -> Res<Self> {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory is passed.
        owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }).map(Self::of)
    }

    /// Binds a name. `EADDRINUSE`: another socket of the namespace has it.
    pub(super) fn bind(&self, name: &str) -> Res<()> {
        self.bind_address(&abstract_name(name)?)
    }

    fn bind_address(&self, (address, len): &(libc::sockaddr_un, libc::socklen_t)) -> Res<()> {
        // SAFETY: `len` bytes of the structure are set.
        check(unsafe { libc::bind(self.fd(), (&raw const *address).cast(), *len) })?;
        Ok(())
    }

    /// The address that the socket is bound to; `None` if it has no name.
    fn address(&self) -> Option<(libc::sockaddr_un, libc::socklen_t)> {
        // SAFETY: all zeros is a valid value.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        // SAFETY: `address` has room for `len` bytes.
        let got = unsafe { libc::getsockname(self.fd(), (&raw mut address).cast(), &raw mut len) };
        let named = got == 0 && len as usize > size_of::<libc::sa_family_t>();
        named.then_some((address, len))
    }

    /// Whether the socket shows this name: it owns the name, or a listener with this name has
    /// accepted it.
    pub(super) fn has_name(&self, name: &str) -> bool {
        let (Some((own, own_len)), Ok((other, len))) = (self.address(), abstract_name(name)) else {
            return false;
        };
        own_len == len && own.sun_path == other.sun_path
    }

    /// A socket that is not connected, in place of this one, with its name. It has no name if
    /// another socket takes the name in the meantime, or if a forked child has a copy of this one.
    pub(super) fn renewed(self) -> Res<Self> {
        let address = self.address();
        drop(self);
        let sock = Self::new()?;
        if let Some(address) = address {
            let _ = sock.bind_address(&address);
        }
        Ok(sock)
    }

    /// Limits the number of connections in the queue to `pending`.
    pub(super) fn listen(&self, pending: i32) -> Res<()> {
        // the kernel permits one more than its argument
        // SAFETY: no memory is passed.
        check(unsafe { libc::listen(self.fd(), (pending - 1).max(0)) })?;
        Ok(())
    }

    /// Connects without blocking. `ECONNREFUSED`: no socket listens. `EAGAIN`: the listener's queue
    /// is full.
    pub(super) fn connect(&self, name: &str) -> Res<()> {
        let (address, len) = abstract_name(name)?;
        // SAFETY: `len` bytes of the structure are set.
        check(unsafe { libc::connect(self.fd(), (&raw const address).cast(), len) })?;
        Ok(())
    }

    /// Whether a connection is in the queue. Also while signal handlers are called: poll(2) returns
    /// `EINTR` for a pending signal also if it does not wait.
    pub(super) fn has_connection(&self) -> Res<bool> {
        loop {
            match sys::epoll_readable(self.fd(), 0) {
                Err(Errno(libc::EINTR)) => {}
                result => return result,
            }
        }
    }

    /// The next connection of the queue.
    pub(super) fn accept(&self) -> Res<Option<Self>> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd =
            // SAFETY: NULL means that the address is not returned.
            unsafe { libc::accept4(self.fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        match owned(fd) {
            Ok(fd) => Ok(Some(Self::of(fd))),
            Err(Errno(libc::EAGAIN | libc::EINTR | libc::ECONNABORTED)) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Ends a listening socket and the connections in its queue. Closing the socket ends them only
    /// with the last copy, which a forked child may have. Each connection takes a free descriptor
    /// for a moment; without one the rest stays in the queue.
    pub(super) fn end_queue(&self) {
        // No connection can be added to the queue then.
        self.shut_down();
        if self.owner.is_this_process() {
            while let Ok(Some(_)) = self.accept() {}
        }
    }

    fn shut_down(&self) {
        if !self.owner.is_this_process() {
            return;
        }
        // SAFETY: no memory is passed. An unconnected socket returns ENOTCONN, which is no error
        // here.
        unsafe { libc::shutdown(self.fd(), libc::SHUT_RDWR) };
    }

    /// Whether the other end had this process's effective user when it connected or began to
    /// listen.
    pub(super) fn is_of_own_user(&self) -> Res<bool> {
        let peer = self.peer()?;
        Ok(sys::is_own_user(peer.uid, peer.pid.cast_unsigned()))
    }

    /// The process that connected or began to listen; 0 if it is in another pid namespace.
    pub(super) fn peer_pid(&self) -> Res<u32> {
        Ok(self.peer()?.pid.cast_unsigned())
    }

    /// The kernel's record of the other end (`SO_PEERCRED`).
    fn peer(&self) -> Res<libc::ucred> {
        let mut peer = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `peer` has room for `len` bytes.
        check(unsafe {
            libc::getsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut len,
            )
        })?;
        Ok(peer)
    }

    /// Sends one packet. False: no room.
    pub(super) fn send(&self, packet: &[u8]) -> Res<bool> {
        loop {
            // SAFETY: the buffer has the length given.
            let sent = unsafe {
                libc::send(
                    self.fd(),
                    packet.as_ptr().cast(),
                    packet.len(),
                    libc::MSG_NOSIGNAL,
                )
            };
            if sent >= 0 {
                return Ok(true);
            }
            match Errno::last() {
                Errno(libc::EAGAIN | libc::ENOBUFS) => return Ok(false),
                Errno(libc::EINTR) => {}
                // ECONNRESET once if the peer closed with packets unread; EPIPE after that.
                errno => return Err(errno),
            }
        }
    }

    /// Receives one packet.
    pub(super) fn recv(&self, buffer: &mut [u8]) -> Received {
        loop {
            // SAFETY: the buffer has the length given.
            let got = unsafe {
                libc::recv(
                    self.fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_TRUNC,
                )
            };
            if got > 0 {
                return Received::Packet(got.cast_unsigned());
            }
            if got == 0 {
                return Received::End;
            }
            match Errno::last() {
                Errno(libc::EAGAIN) => return Received::Nothing,
                // The peer closed with packets unread. This is reported once; the packets that the
                // peer had sent before can still be received.
                Errno(libc::EINTR | libc::ECONNRESET) => {}
                _ => return Received::End,
            }
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Sock {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// The descriptor that the application waits on.
#[derive(Debug)]
pub(super) struct Poll {
    fd: OwnedFd,
    owner: Owner,
}

impl Poll {
    pub(super) fn new() -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        let owner = Owner::this_process();
        Ok(Self { fd, owner })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, token: u64, writable: bool) -> Res<()> {
        let wanted = if writable {
            libc::EPOLLIN | libc::EPOLLOUT
        } else {
            libc::EPOLLIN
        };
        let mut event = libc::epoll_event {
            events: wanted.cast_unsigned(),
            u64: token,
        };
        // SAFETY: a readable structure.
        check(unsafe { libc::epoll_ctl(self.fd(), operation, fd, &raw mut event) })?;
        Ok(())
    }

    /// Adds `fd`; [`Self::ready`] reports it with `token`.
    pub(super) fn add(&self, fd: RawFd, token: u64, writable: bool) -> Res<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, writable)
    }

    /// Changes whether writability is reported too.
    pub(super) fn change(&self, fd: RawFd, token: u64, writable: bool) -> Res<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, writable)
    }

    /// Removes `fd`. Closing it is not enough: a forked child may hold a copy. In such a child this
    /// call has no effect: the set is that of the parent.
    pub(super) fn remove(&self, fd: RawFd) {
        if !self.owner.is_this_process() {
            return;
        }
        // A descriptor that is not in the set needs no removal.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, false);
    }

    /// The tokens of the ready descriptors, at most 32.
    pub(super) fn ready(&self) -> Res<impl Iterator<Item = u64>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
        // SAFETY: the array has 32 elements.
        let count = check(unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), 32, 0) })?;
        Ok(events
            .into_iter()
            .take(count.cast_unsigned() as usize)
            .map(|event| event.u64))
    }

    /// Blocks until a descriptor is ready. Requests of this process that wait for their receivers
    /// continue meanwhile, and the call may return earlier for them.
    pub(super) fn sleep(&self) -> Res<()> {
        let Some(process) = Process::current() else {
            crate::sys::epoll_readable(self.fd(), -1)?;
            return Ok(());
        };
        process.prepare_sleep();
        crate::sys::one_readable([self.fd(), process.wake.fd()])
    }

    /// Whether the application has made the descriptor non-blocking.
    pub(super) fn nonblocking(&self) -> bool {
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(self.fd(), libc::F_GETFL) };
        flags >= 0 && flags & libc::O_NONBLOCK != 0
    }
}

/// A descriptor that is readable while it is set. A forked child does not change it.
#[derive(Debug)]
pub(super) struct Flag {
    fd: OwnedFd,
    owner: Owner,
}

impl Flag {
    pub(super) fn new() -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        let owner = Owner::this_process();
        Ok(Self { fd, owner })
    }

    pub(super) fn set(&self) {
        if !self.owner.is_this_process() {
            return;
        }
        // SAFETY: 8 readable bytes. Fails only if the flag is set already.
        unsafe { libc::write(self.fd(), 1u64.to_ne_bytes().as_ptr().cast(), 8) };
    }

    pub(super) fn clear(&self) {
        if !self.owner.is_this_process() {
            return;
        }
        let mut value = [0u8; 8];
        // SAFETY: 8 writable bytes. Fails only if the flag is clear already.
        unsafe { libc::read(self.fd(), value.as_mut_ptr().cast(), 8) };
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(name: &str) -> (Sock, Sock) {
        let listener = Sock::new().unwrap();
        listener.bind(name).unwrap();
        listener.listen(1).unwrap();
        let client = Sock::new().unwrap();
        client.connect(name).unwrap();
        let server = listener.accept().unwrap().unwrap();
        (client, server)
    }

    #[test]
    fn packets_sent_before_a_close_arrive() {
        let (client, server) = pair("softverbs-test/sock-1");
        assert!(client.is_of_own_user().unwrap());
        assert_eq!(server.peer_pid().unwrap(), std::process::id());
        let mut buffer = [0; 16];
        assert_eq!(server.recv(&mut buffer), Received::Nothing);
        assert!(client.send(b"unread").unwrap());
        assert!(server.send(b"last words").unwrap());
        drop(server);
        assert_eq!(client.recv(&mut buffer), Received::Packet(10));
        assert_eq!(client.recv(&mut buffer), Received::End);
        assert!(client.send(b"x").is_err());
    }

    #[test]
    fn a_forked_child_drops_its_copies_without_an_effect() {
        let (client, server) = pair("softverbs-test/sock-fork");
        let (poll, flag) = (Poll::new().unwrap(), Flag::new().unwrap());
        poll.add(flag.fd(), 7, false).unwrap();
        flag.set();
        // SAFETY: the child makes system calls, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            poll.remove(flag.fd());
            flag.clear();
            drop((client, server, poll, flag));
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        let mut status = 1;
        // SAFETY: a writable integer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(poll.ready().unwrap().collect::<Vec<_>>(), [7]);
        assert!(client.send(b"still").unwrap());
        assert_eq!(server.recv(&mut [0; 16]), Received::Packet(5));
        poll.remove(flag.fd());
        assert_eq!(poll.ready().unwrap().count(), 0);
    }

    /// The copy is that of a forked child.
    #[test]
    fn a_queue_ends_although_another_process_has_a_copy_of_its_socket() {
        let listener = Sock::new().unwrap();
        listener.bind("softverbs-test/sock-8").unwrap();
        listener.listen(2).unwrap();
        let _copy = listener.fd.try_clone().unwrap();
        let clients = [(); 2].map(|()| Sock::new().unwrap());
        for client in &clients {
            client.connect("softverbs-test/sock-8").unwrap();
        }
        listener.end_queue();
        for client in &clients {
            assert_eq!(client.recv(&mut [0; 16]), Received::End);
        }
        assert_eq!(
            Sock::new().unwrap().connect("softverbs-test/sock-8"),
            Err(Errno(libc::ECONNREFUSED))
        );
        // a socket that does not listen has no queue
        Sock::new().unwrap().end_queue();
    }

    #[test]
    fn a_packet_that_is_too_long_shows_its_length() {
        let (client, server) = pair("softverbs-test/sock-2");
        assert!(client.send(&[7; 300]).unwrap());
        let mut buffer = [0; 16];
        assert_eq!(server.recv(&mut buffer), Received::Packet(300));
        assert_eq!(server.recv(&mut buffer), Received::Nothing);
    }

    #[test]
    fn names_are_exclusive_and_end_with_the_socket() {
        let first = Sock::new().unwrap();
        first.bind("softverbs-test/sock-3").unwrap();
        let second = Sock::new().unwrap();
        assert_eq!(
            second.bind("softverbs-test/sock-3"),
            Err(Errno(libc::EADDRINUSE))
        );
        assert_eq!(
            Sock::new().unwrap().connect("softverbs-test/sock-3"),
            Err(Errno(libc::ECONNREFUSED))
        );
        drop(first);
        second.bind("softverbs-test/sock-3").unwrap();
    }

    extern "C" fn ignore(_: libc::c_int) {}

    /// A signal that arrives between the begin of a poll(2) and its look for signals is rare: one
    /// of many is enough.
    #[test]
    fn signals_do_not_end_a_look_at_the_queue() {
        let listener = Sock::new().unwrap();
        listener.bind("softverbs-test/sock-7").unwrap();
        listener.listen(1).unwrap();
        // SAFETY: a handler that does nothing, and all zeros is a valid value.
        let this = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
            assert_eq!(
                libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()),
                0
            );
            libc::pthread_self()
        };
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    // SAFETY: the thread lives until this one is joined.
                    unsafe { libc::pthread_kill(this, libc::SIGURG) };
                }
            });
            let looks = (0..200_000).map(|_| listener.has_connection());
            let ended = looks.filter(|look| *look != Ok(false)).count();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(ended, 0);
        });
    }

    #[test]
    fn a_renewed_socket_has_the_name_and_can_be_connected_again() {
        let listener = Sock::new().unwrap();
        listener.bind("softverbs-test/sock-5").unwrap();
        listener.listen(2).unwrap();
        let client = Sock::new().unwrap();
        client.bind("softverbs-test/sock-6").unwrap();
        client.connect("softverbs-test/sock-5").unwrap();
        let again = client.connect("softverbs-test/sock-5");
        assert_eq!(again, Err(Errno(libc::EISCONN)));
        let client = client.renewed().unwrap();
        assert!(client.has_name("softverbs-test/sock-6"));
        assert!(!client.has_name("softverbs-test/sock-5"));
        client.connect("softverbs-test/sock-5").unwrap();
        assert_eq!(
            Sock::new().unwrap().bind("softverbs-test/sock-6"),
            Err(Errno(libc::EADDRINUSE))
        );
        let unnamed = Sock::new().unwrap().renewed().unwrap();
        assert!(unnamed.address().is_none() && !unnamed.has_name(""));
    }

    #[test]
    fn the_backlog_is_what_was_asked_for() {
        let listener = Sock::new().unwrap();
        listener.bind("softverbs-test/sock-4").unwrap();
        listener.listen(2).unwrap();
        let clients: Vec<_> = (0..3).map(|_| Sock::new().unwrap()).collect();
        let results: Vec<_> = clients
            .iter()
            .map(|c| c.connect("softverbs-test/sock-4"))
            .collect();
        assert_eq!(results, [Ok(()), Ok(()), Err(Errno(libc::EAGAIN))]);
    }

    #[test]
    fn a_flag_is_readable_while_set() {
        let (poll, flag) = (Poll::new().unwrap(), Flag::new().unwrap());
        poll.add(flag.fd(), 5, false).unwrap();
        assert_eq!(poll.ready().unwrap().count(), 0);
        flag.set();
        flag.set();
        assert_eq!(poll.ready().unwrap().collect::<Vec<_>>(), [5]);
        flag.clear();
        assert_eq!(poll.ready().unwrap().count(), 0);
    }
}
