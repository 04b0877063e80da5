//! Lines between processes: sequenced-packet sockets with abstract names, and descriptors passed
//! over them.

use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{Errno, Res, check};

/// The process at the other end as the kernel reports it (`SO_PEERCRED`): the process that
/// connected, or the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
}

/// One end of a line. No call waits, and none raises SIGPIPE.
#[derive(Debug)]
pub(crate) struct Line(OwnedFd);

/// A listening socket with a name.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

fn socket() -> Res<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The address of an abstract name, and its length in bytes.
fn address(name: &str) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: all zeros is a value of it.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let room = address.sun_path.len() - 1;
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len().min(room);
    (address, len as libc::socklen_t)
}

impl Listener {
    /// # Errors
    /// `EADDRINUSE`: another socket has the name.
    pub(crate) fn bind(name: &str) -> Res<Self> {
        Self::bind_for(name, libc::SOMAXCONN)
    }

    /// As [`Self::bind`]; more than `waiting` connections that wait to be accepted fail.
    pub(crate) fn bind_for(name: &str, waiting: libc::c_int) -> Res<Self> {
        let fd = socket()?;
        let (address, len) = address(name);
        // SAFETY: an address of that length.
        check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
        // SAFETY: no memory is passed.
        check(unsafe { libc::listen(fd.as_raw_fd(), waiting) })?;
        Ok(Self(fd))
    }

    /// The next connection.
    ///
    /// # Errors
    /// `EAGAIN`: none waits.
    pub(crate) fn accept(&self) -> Res<Line> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let null = std::ptr::null_mut();
        let fd =
            // SAFETY: no address is asked for.
            check(unsafe { libc::accept4(self.0.as_raw_fd(), null, std::ptr::null_mut(), flags) })?;
        // SAFETY: the call has just returned this descriptor; no other owner exists.
        Ok(Line(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsRawFd for Line {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl Line {
    /// # Errors
    /// `ECONNREFUSED`: no socket listens there. `EAGAIN`: the listener's queue is full.
    pub(crate) fn connect(name: &str) -> Res<Self> {
        let fd = socket()?;
        let (address, len) = address(name);
        // SAFETY: an address of that length.
        check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
        Ok(Self(fd))
    }

    /// # Errors
    /// Those of `getsockopt(2)`.
    pub(crate) fn credentials(&self) -> Res<Credentials> {
        // SAFETY: all zeros is a value of it.
        let mut found: libc::ucred = unsafe { zeroed() };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: a writable structure of that length.
        check(unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        })?;
        Ok(Credentials {
            pid: found.pid.cast_unsigned(),
            uid: found.uid,
        })
    }

    /// Sends one message, with a descriptor if `with` has one.
    ///
    /// # Errors
    /// `EAGAIN`: no room. `EPIPE`, `ECONNRESET`: the other end is closed.
    pub(crate) fn send(&self, bytes: &[u8], with: Option<BorrowedFd<'_>>) -> Res<()> {
        let mut iovec = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut control = Control([0; CONTROL]);
        // SAFETY: all zeros is a value of it.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut iovec;
        message.msg_iovlen = 1;
        if let Some(file) = with {
            message.msg_control = (&raw mut control).cast();
            // SAFETY: no memory is passed.
            message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<i32>() as u32) } as _;
            // SAFETY: the control buffer has room for one descriptor, and is aligned for its
            // header.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as _;
                libc::CMSG_DATA(header)
                    .cast::<i32>()
                    .write_unaligned(file.as_raw_fd());
            }
        }
        loop {
            // SAFETY: the message names readable buffers that live as long as the call.
            let n = unsafe {
                libc::sendmsg(self.0.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
            };
            match usize::try_from(n) {
                Ok(n) if n == bytes.len() => return Ok(()),
                Ok(_) => return Err(Errno(libc::EMSGSIZE)),
                Err(_) if Errno::last().0 == libc::EINTR => {}
                Err(_) => return Err(Errno::last()),
            }
        }
    }

    /// Whether messages that the other end has not received fill more than a quarter of the room.
    pub(crate) fn is_crowded(&self) -> bool {
        let (mut unread, mut room): (i32, i32) = (0, 0);
        let mut len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: both calls write one integer.
        let known = unsafe {
            libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) == 0
                && libc::getsockopt(
                    self.0.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_SNDBUF,
                    (&raw mut room).cast(),
                    &raw mut len,
                ) == 0
        };
        known && unread > room / 4
    }

    /// Closes the line for both ends, even if a forked child has a copy of this end.
    pub(crate) fn hang_up(&self) {
        // SAFETY: no memory is passed. The call fails only if the line has ended already.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Receives one message of exactly the length of `bytes`, and the descriptor in it.
    ///
    /// # Errors
    /// `EAGAIN`: there is no message. `EPIPE`: the other end is closed. `EPROTO`: the message has
    /// another length. `EMFILE`, `ENFILE`, `ENOMEM`: no descriptor is free for the one in the
    /// message, which is lost. `EACCES`: the kernel does not permit this process to have it.
    pub(crate) fn receive(&self, bytes: &mut [u8]) -> Res<Option<OwnedFd>> {
        self.receive_with(bytes, 0)
    }

    /// As [`Self::receive`], but a message for whose descriptor none is free stays: the call can be
    /// repeated.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub(crate) fn receive_whole(&self, bytes: &mut [u8]) -> Res<Option<OwnedFd>> {
        let look = |bytes: &mut [u8]| self.receive_with(bytes, libc::MSG_PEEK);
        let file = match look(bytes) {
            // or another thread has closed a descriptor meanwhile
            Err(Errno(libc::EACCES)) => look(bytes)?,
            done => done?,
        };
        // Without room for a descriptor the kernel drops the one in the message; `file` is another
        // one for the same file.
        // SAFETY: a writable buffer of that length.
        let n = unsafe {
            libc::recv(
                self.0.as_raw_fd(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                0,
            )
        };
        match usize::try_from(n) {
            Ok(n) if n == bytes.len() => Ok(file),
            Ok(_) => Err(Errno(libc::EPROTO)),
            Err(_) => Err(Errno::last()),
        }
    }

    fn receive_with(&self, bytes: &mut [u8], flags: libc::c_int) -> Res<Option<OwnedFd>> {
        let mut iovec = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let mut control = Control([0; CONTROL]);
        // SAFETY: all zeros is a value of it.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut iovec;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        // The kernel passes as many descriptors as fit, and closes further ones. The padding of
        // `CONTROL` would admit a second one, which would never be closed.
        // SAFETY: computes a length.
        message.msg_controllen = unsafe { libc::CMSG_LEN(size_of::<i32>() as u32) } as _;
        let n = loop {
            // SAFETY: the message names writable buffers that live as long as the call.
            let n = unsafe {
                let flags = flags | libc::MSG_CMSG_CLOEXEC;
                libc::recvmsg(self.0.as_raw_fd(), &raw mut message, flags)
            };
            match usize::try_from(n) {
                Ok(n) => break n,
                Err(_) if Errno::last().0 == libc::EINTR => {}
                Err(_) => return Err(Errno::last()),
            }
        };
        // The descriptor in the message belongs to this process now, also if the message is
        // refused.
        let file = taken(&message);
        if n == 0 {
            return Err(Errno(libc::EPIPE));
        }
        if n != bytes.len() || message.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(Errno(libc::EPROTO));
        }
        // of a second descriptor too, which is no lack
        if file.is_none() && message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(self.lack());
        }
        Ok(file)
    }

    /// Why the kernel has given this process no descriptor for the file in a message. The kernel
    /// itself does not tell.
    fn lack(&self) -> Errno {
        // SAFETY: no memory is passed.
        let free = check(unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) });
        match free {
            // SAFETY: the call has just returned this descriptor; no other owner exists.
            Ok(free) => drop(unsafe { OwnedFd::from_raw_fd(free) }),
            Err(error) => return error,
        }
        Errno(libc::EACCES)
    }
}

/// Room for one descriptor, with the padding behind it.
const CONTROL: usize = 24;

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// The descriptor in a message.
fn taken(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: the kernel has filled the control buffer up to `msg_controllen`.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        let right = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len as usize >= libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
        if !right {
            return None;
        }
        let fd = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, BorrowedFd};

    #[test]
    fn messages_and_descriptors_arrive_whole() {
        let name = format!("softverbs-test.{}", crate::sys::random());
        assert_eq!(Line::connect(&name).err(), Some(Errno(libc::ECONNREFUSED)));
        let listener = Listener::bind(&name).unwrap();
        assert_eq!(listener.accept().err(), Some(Errno(libc::EAGAIN)));
        assert_eq!(Listener::bind(&name).err(), Some(Errno(libc::EADDRINUSE)));
        let near = Line::connect(&name).unwrap();
        let far = listener.accept().unwrap();
        let me = Credentials {
            pid: std::process::id(),
            uid: crate::sys::effective_uid(),
        };
        assert_eq!((near.credentials(), far.credentials()), (Ok(me), Ok(me)));
        let mut bytes = [0u8; 8];
        assert_eq!(far.receive(&mut bytes).err(), Some(Errno(libc::EAGAIN)));
        let file = crate::sys::memfd_create(c"test", 4096).unwrap();
        near.send(&[7; 8], Some(file.as_fd())).unwrap();
        let passed = far.receive(&mut bytes).unwrap().unwrap();
        assert_eq!(bytes, [7; 8]);
        let inode = crate::sys::inode_of;
        assert_eq!(inode(&passed), inode(&file));
        near.send(&[8; 8], None).unwrap();
        assert!(far.receive(&mut bytes).unwrap().is_none());
        for wrong in [7, 9] {
            near.send(&[9; 9][..wrong], None).unwrap();
            assert_eq!(far.receive(&mut bytes).err(), Some(Errno(libc::EPROTO)));
        }
        drop(near);
        assert_eq!(far.receive(&mut bytes).err(), Some(Errno(libc::EPIPE)));
        assert!(far.send(&[1; 8], None).is_err());
    }

    #[test]
    fn a_descriptor_that_finds_none_free_is_an_error() {
        let name = format!("softverbs-test.{}", crate::sys::random());
        let listener = Listener::bind(&name).unwrap();
        let near = Line::connect(&name).unwrap();
        let far = listener.accept().unwrap();
        let file = crate::sys::memfd_create(c"test", 4096).unwrap();
        let with_none = |receive: &mut dyn FnMut() -> Res<Option<OwnedFd>>| {
            crate::sys::with_descriptors(0, receive).err()
        };
        let mut bytes = [0; 8];
        for byte in 1..4 {
            near.send(&[byte; 8], Some(file.as_fd())).unwrap();
        }
        let lack = Some(Errno(libc::EMFILE));
        assert_eq!(with_none(&mut || far.receive(&mut bytes)), lack);
        for _ in 0..2 {
            assert_eq!(with_none(&mut || far.receive_whole(&mut bytes)), lack);
        }
        for byte in 2..4 {
            let passed = far.receive_whole(&mut bytes).unwrap().unwrap();
            assert_eq!(bytes, [byte; 8]);
            let inode = crate::sys::inode_of;
            assert_eq!(inode(&passed), inode(&file));
        }
        // without a descriptor in the message, none is needed
        near.send(&[4; 8], None).unwrap();
        assert_eq!(with_none(&mut || far.receive_whole(&mut bytes)), None);
        let none = far.receive_whole(&mut bytes);
        assert_eq!(none.err(), Some(Errno(libc::EAGAIN)));
        near.send(&[5; 9], Some(file.as_fd())).unwrap();
        let wrong = far.receive_whole(&mut bytes);
        assert_eq!(wrong.err(), Some(Errno(libc::EPROTO)));
        drop((near, far.receive(&mut bytes)));
        let ended = far.receive_whole(&mut bytes);
        assert_eq!(ended.err(), Some(Errno(libc::EPIPE)));
    }

    /// Sends 8 bytes with two descriptors.
    fn send_two(line: &Line, files: [BorrowedFd<'_>; 2]) {
        let bytes = [3_u8; 8];
        let mut iovec = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut control = Control([0; CONTROL]);
        // SAFETY: all zeros is a value of it; the buffers live through the call, and the header and
        // two descriptors have exactly the length of the control buffer.
        unsafe {
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = &raw mut iovec;
            message.msg_iovlen = 1;
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = CONTROL as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(8) as _;
            let numbers = files.map(|file| file.as_raw_fd());
            libc::CMSG_DATA(header)
                .cast::<[i32; 2]>()
                .write_unaligned(numbers);
            assert_eq!(libc::sendmsg(line.0.as_raw_fd(), &raw const message, 0), 8);
        }
    }

    /// The kernel delivers the message without the descriptor.
    #[test]
    fn a_descriptor_without_a_number_is_an_error() {
        let name = format!("softverbs-test.{}", crate::sys::random());
        let listener = Listener::bind(&name).unwrap();
        let near = Line::connect(&name).unwrap();
        let far = listener.accept().unwrap();
        near.send(&[7; 8], Some(listener.0.as_fd())).unwrap();
        let mut bytes = [0_u8; 8];
        let received = crate::sys::with_descriptors(0, || far.receive(&mut bytes));
        assert_eq!(received.err(), Some(Errno(libc::EMFILE)));
    }

    #[test]
    fn a_second_descriptor_of_a_message_is_closed() {
        let name = format!("softverbs-test.{}", crate::sys::random());
        let listener = Listener::bind(&name).unwrap();
        let near = Line::connect(&name).unwrap();
        let far = listener.accept().unwrap();
        let (mut read, write) = std::io::pipe().unwrap();
        send_two(&near, [write.as_fd(), write.as_fd()]);
        drop(write);
        let mut bytes = [0; 8];
        let file = far.receive(&mut bytes).unwrap();
        assert!(file.is_some());
        drop(file);
        // the end of the pipe, unless a descriptor is still open
        let mut pipe = libc::pollfd {
            fd: read.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one element.
        assert_eq!(unsafe { libc::poll(&raw mut pipe, 1, 0) }, 1);
        assert_eq!(std::io::Read::read(&mut read, &mut bytes).unwrap(), 0);
    }
}
