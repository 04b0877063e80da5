//! Short texts without an allocation.

use std::ffi::{CStr, OsStr};
use std::fmt::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Errno, Res};

/// A path of less than `N` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShortPath<const N: usize> {
    /// The path and a terminating 0.
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> ShortPath<N> {
    /// # Errors
    /// `ENAMETOOLONG`.
    pub(crate) fn new(text: fmt::Arguments<'_>) -> Res<Self> {
        Self::below(Path::new(""), text)
    }

    /// A path followed by `text`, without a separator.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn below(path: &Path, text: fmt::Arguments<'_>) -> Res<Self> {
        let mut this = Self {
            bytes: [0; N],
            len: 0,
        };
        this.push(path.as_os_str().as_bytes())
            .and_then(|()| this.write_fmt(text))
            .map_err(|fmt::Error| Errno(libc::ENAMETOOLONG))?;
        Ok(this)
    }

    fn push(&mut self, more: &[u8]) -> fmt::Result {
        let end = self.len + more.len();
        // the last byte stays 0
        let room = self.bytes[..N - 1].get_mut(self.len..end);
        room.ok_or(fmt::Error)?.copy_from_slice(more);
        self.len = end;
        Ok(())
    }

    pub(crate) fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.bytes[..self.len]))
    }

    /// The bytes up to the first 0.
    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

impl<const N: usize> Write for ShortPath<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_whole_or_none() {
        let path = ShortPath::<48>::new(format_args!("/proc/{}/fd/{}", u32::MAX, i32::MIN));
        let path = path.unwrap();
        let text = "/proc/4294967295/fd/-2147483648";
        assert_eq!(path.as_path(), Path::new(text));
        assert_eq!(path.as_c_str().to_str(), Ok(text));
        let long = "x".repeat(47);
        let path = ShortPath::<48>::new(format_args!("{long}")).unwrap();
        assert_eq!(path.as_path(), Path::new(&long));
        assert_eq!(path.as_c_str().to_str(), Ok(long.as_str()));
        let behind = ShortPath::<48>::below(Path::new("a"), format_args!("{long}"));
        assert_eq!(behind.err(), Some(Errno(libc::ENAMETOOLONG)));
    }
}
