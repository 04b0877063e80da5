//! libfabric's error numbers, positive. The provider negates them at the C boundary.

use std::fmt;
use std::io;
use std::num::NonZeroI32;

/// An error number of `fi_errno(3)`: a value of the C library's `errno`, or one of libfabric's
/// own, which begin at 256. Positive; the C interfaces return it negated.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct FiErrno(NonZeroI32);

/// The result of every operation of the engine that can fail.
pub type Result<T> = std::result::Result<T, FiErrno>;

macro_rules! errnos {
    ($($(#[$meta:meta])* $name:ident = $value:expr;)*) => {
        #[allow(missing_docs, reason = "named and described in fi_errno(3)")]
        impl FiErrno {
            $($(#[$meta])* pub const $name: Self = Self::new($value);)*
        }

        /// The name of an error number without its `FI_` prefix; `None` if the list does not have
        /// it.
        fn name(errno: FiErrno) -> Option<&'static str> {
            match errno {
                $(FiErrno::$name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

errnos! {
    EPERM = libc::EPERM;
    ENOENT = libc::ENOENT;
    ENOTTY = libc::ENOTTY;
    EINTR = libc::EINTR;
    EIO = libc::EIO;
    E2BIG = libc::E2BIG;
    EBADF = libc::EBADF;
    EAGAIN = libc::EAGAIN;
    ENOMEM = libc::ENOMEM;
    EACCES = libc::EACCES;
    EFAULT = libc::EFAULT;
    EBUSY = libc::EBUSY;
    EEXIST = libc::EEXIST;
    ENODEV = libc::ENODEV;
    EINVAL = libc::EINVAL;
    ENFILE = libc::ENFILE;
    EMFILE = libc::EMFILE;
    ENOSPC = libc::ENOSPC;
    ENOSYS = libc::ENOSYS;
    ENOMSG = libc::ENOMSG;
    ENODATA = libc::ENODATA;
    EOVERFLOW = libc::EOVERFLOW;
    EMSGSIZE = libc::EMSGSIZE;
    ENOPROTOOPT = libc::ENOPROTOOPT;
    EOPNOTSUPP = libc::EOPNOTSUPP;
    EADDRINUSE = libc::EADDRINUSE;
    EADDRNOTAVAIL = libc::EADDRNOTAVAIL;
    ENETDOWN = libc::ENETDOWN;
    ENETUNREACH = libc::ENETUNREACH;
    ECONNABORTED = libc::ECONNABORTED;
    ECONNRESET = libc::ECONNRESET;
    ENOBUFS = libc::ENOBUFS;
    EISCONN = libc::EISCONN;
    ENOTCONN = libc::ENOTCONN;
    ESHUTDOWN = libc::ESHUTDOWN;
    ETIMEDOUT = libc::ETIMEDOUT;
    ECONNREFUSED = libc::ECONNREFUSED;
    EHOSTUNREACH = libc::EHOSTUNREACH;
    EALREADY = libc::EALREADY;
    EINPROGRESS = libc::EINPROGRESS;
    EREMOTEIO = libc::EREMOTEIO;
    ECANCELED = libc::ECANCELED;
    EKEYREJECTED = libc::EKEYREJECTED;
    EOTHER = 256;
    ETOOSMALL = 257;
    EOPBADSTATE = 258;
    EAVAIL = 259;
    EBADFLAGS = 260;
    ENOEQ = 261;
    EDOMAIN = 262;
    ENOCQ = 263;
    ECRC = 264;
    ETRUNC = 265;
    ENOKEY = 266;
    ENOAV = 267;
    EOVERRUN = 268;
    ENORX = 269;
    ENOMR = 270;
}

impl FiErrno {
    /// An error number from its positive value; any other value becomes `EOTHER`.
    pub const fn new(value: i32) -> Self {
        match NonZeroI32::new(value) {
            Some(value) if value.get() > 0 => Self(value),
            _ => Self(NonZeroI32::new(256).unwrap()),
        }
    }

    /// The positive value.
    pub const fn code(self) -> i32 {
        self.0.get()
    }

    /// Whether the same call may succeed later: for lack of memory, descriptors or time. Such an
    /// error shows nothing about a device.
    pub(crate) const fn may_pass(self) -> bool {
        matches!(
            self,
            Self::ENOMEM
                | Self::EMFILE
                | Self::ENFILE
                | Self::ENOBUFS
                | Self::EAGAIN
                | Self::EBUSY
                | Self::EINTR
                | Self::ETIMEDOUT
        )
    }

    /// The C library's `errno` of this thread.
    pub(crate) fn last() -> Self {
        io::Error::last_os_error().into()
    }

    /// The result of a verb that returns 0 or an errno. Drivers that return -1 and set `errno`, or
    /// return a negated errno, are handled too.
    #[inline]
    pub(crate) fn from_verb(ret: i32) -> Result<()> {
        if ret == 0 {
            return Ok(());
        }
        Self::refused(ret)
    }

    /// As [`Self::from_verb`], of a verb that posts a request: `EAGAIN` if the queue is full, for
    /// which verbs returns `ENOMEM`.
    #[inline]
    pub(crate) fn from_post(ret: i32) -> Result<()> {
        if ret == 0 {
            return Ok(());
        }
        Self::not_posted(ret)
    }

    #[cold]
    fn not_posted(ret: i32) -> Result<()> {
        match Self::refused(ret) {
            Err(Self::ENOMEM) => Err(Self::EAGAIN),
            other => other,
        }
    }

    #[cold]
    fn refused(ret: i32) -> Result<()> {
        match ret {
            -1 => Err(Self::last()),
            ret => Err(Self::new(ret.saturating_abs())),
        }
    }

    /// The result of a call that returns 0, or a negative value and sets `errno`.
    pub(crate) fn from_call(ret: i32) -> Result<()> {
        if ret < 0 { Err(Self::last()) } else { Ok(()) }
    }
}

impl From<io::Error> for FiErrno {
    fn from(error: io::Error) -> Self {
        Self::new(error.raw_os_error().unwrap_or(Self::EOTHER.code()))
    }
}

impl fmt::Debug for FiErrno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match name(*self) {
            Some(name) => write!(f, "FI_{name}"),
            None => write!(f, "FiErrno({})", self.0),
        }
    }
}

impl fmt::Display for FiErrno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.code() < 256 {
            let text = io::Error::from_raw_os_error(self.code()).to_string();
            let text = text.split(" (os error").next().unwrap_or_default();
            write!(f, "{self:?} ({text})")
        } else {
            fmt::Debug::fmt(self, f)
        }
    }
}

impl std::error::Error for FiErrno {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_libfabric() {
        assert_eq!(FiErrno::EAGAIN.code(), 11);
        assert_eq!(FiErrno::EAVAIL.code(), 259);
        assert_eq!(FiErrno::ENOMR.code(), 270);
        assert_eq!(size_of::<Result<()>>(), 4);
    }

    #[test]
    fn what_is_no_errno_becomes_other() {
        assert_eq!(FiErrno::new(0), FiErrno::EOTHER);
        assert_eq!(FiErrno::new(-5), FiErrno::EOTHER);
        assert_eq!(FiErrno::from(io::Error::other("x")), FiErrno::EOTHER);
    }

    #[test]
    fn verbs_that_negate_are_understood() {
        assert_eq!(FiErrno::from_verb(0), Ok(()));
        assert_eq!(FiErrno::from_verb(libc::ENOMEM), Err(FiErrno::ENOMEM));
        assert_eq!(FiErrno::from_verb(-libc::ENOMEM), Err(FiErrno::ENOMEM));
        assert_eq!(FiErrno::from_post(0), Ok(()));
        assert_eq!(FiErrno::from_post(-libc::ENOMEM), Err(FiErrno::EAGAIN));
        assert_eq!(FiErrno::from_post(libc::EINVAL), Err(FiErrno::EINVAL));
    }

    #[test]
    fn names_are_printed() {
        assert_eq!(format!("{:?}", FiErrno::ETRUNC), "FI_ETRUNC");
        assert_eq!(format!("{:?}", FiErrno::new(255)), "FiErrno(255)");
        assert_eq!(FiErrno::ETRUNC.to_string(), "FI_ETRUNC");
        assert_eq!(
            FiErrno::ENOMEM.to_string(),
            "FI_ENOMEM (Cannot allocate memory)"
        );
    }
}
