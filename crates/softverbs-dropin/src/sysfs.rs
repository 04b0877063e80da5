//! The two sysfs helpers that libibverbs exports to librdmacm and other old callers.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::set_errno;

/// The directory of sysfs. In rdma-core, `SYSFS_PATH` can change it. sysfs has no files of this
/// device.
#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Reads `dir`/`file` into `buf`, without its final newline and with a NUL.
///
/// Returns the length in bytes, or -1 with errno set. A file without room for the NUL is an error.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller passes C strings.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let path =
        Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
    match read_line(&path, size) {
        Ok(text) => {
            let length = text.len();
            // SAFETY: the caller's buffer has `size` bytes; the text and its NUL fit.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), length);
                *buf.add(length) = 0;
            }
            c_int::try_from(length).unwrap_or(-1)
        }
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

fn read_line(path: &Path, size: usize) -> Result<Vec<u8>, c_int> {
    let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EIO);
    let mut text = Vec::new();
    let file = File::open(path).map_err(errno)?;
    let limit = u64::try_from(size).unwrap_or(u64::MAX);
    file.take(limit).read_to_end(&mut text).map_err(errno)?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    if text.len() >= size {
        return Err(libc::EOVERFLOW);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &CStr, file: &CStr, size: usize) -> (c_int, Vec<u8>) {
        let mut buf = vec![0x55u8; size];
        // SAFETY: C strings, and a buffer of `size` bytes.
        let n = unsafe {
            ibv_read_sysfs_file(dir.as_ptr(), file.as_ptr(), buf.as_mut_ptr().cast(), size)
        };
        (n, buf)
    }

    #[test]
    fn the_newline_goes_and_a_nul_comes() {
        let (n, buf) = read(c"/proc/sys/kernel", c"ostype", 16);
        assert_eq!(n, 5);
        assert_eq!(&buf[..6], b"Linux\0");
    }

    #[test]
    fn a_text_that_does_not_fit_is_an_error() {
        assert_eq!(read(c"/proc/sys/kernel", c"ostype", 4).0, -1);
        assert_eq!(read(c"/proc/sys/kernel", c"ostype", 0).0, -1);
        assert_eq!(read(c"/nowhere", c"nothing", 16).0, -1);
    }
}
