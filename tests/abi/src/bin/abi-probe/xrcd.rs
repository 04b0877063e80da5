//! XRC domains through `weft_mr_ops`: which processes find a domain, the flags and errors of
//! `ibv_open_xrcd(3)`, and the order of closing.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};

use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close};
use abi_tests::weft::*;
use libc::{O_CREAT, O_EXCL};
use libfabric_sys::*;

const INVALID: i32 = -FI_EINVAL;

struct World {
    setup: Setup,
    ops: &'static weft_mr_ops,
}

impl World {
    fn new(lib: &Lib) -> Self {
        let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints(lib));
        // SAFETY: an open domain.
        let ops = unsafe { mr_ops(setup.domain) };
        Self { setup, ops }
    }

    fn open(&self, path: Option<&CStr>, fd: RawFd, oflags: i32) -> Result<*mut fid, i32> {
        let mut xrcd = null_mut();
        let call = self.ops.xrcd_open.expect("xrcd_open");
        let path = path.map_or(null(), CStr::as_ptr);
        // SAFETY: an open domain, a C string or NULL.
        let ret = unsafe {
            let domain = self.setup.domain;
            call(domain, path, fd, oflags, &raw mut xrcd, null_mut())
        };
        assert_eq!(ret == 0, !xrcd.is_null());
        if ret == 0 { Ok(xrcd) } else { Err(ret) }
    }

    fn end(&self, xrcd: *mut fid) -> i32 {
        let call = self.ops.xrcd_close.expect("xrcd_close");
        // SAFETY: what is no such fid is refused.
        unsafe { call(xrcd) }
    }
}

/// Whether another process finds the domain of a file.
fn found_elsewhere(path: &CStr) -> bool {
    let libfabric = std::env::args().nth(1).expect("the path of a libfabric");
    let mut other = Command::new(std::env::current_exe().expect("this program"));
    other.args([&libfabric, "xrcd-find", path.to_str().expect("text")]);
    let ended = other.stdin(Stdio::null()).output().expect("it starts");
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    String::from_utf8_lossy(&ended.stdout).contains("found")
}

/// Opens the domain of a file without creating it.
pub(crate) fn find(lib: &Lib, path: &str) {
    let world = World::new(lib);
    let path = CString::new(path).expect("a path");
    match world.open(Some(&path), -1, 0) {
        Ok(xrcd) => {
            println!("found");
            assert_eq!(world.end(xrcd), 0);
        }
        Err(error) => assert_eq!(error, -FI_EAGAIN),
    }
    world.setup.close();
}

struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn run(lib: &Lib) {
    let world = World::new(lib);
    let named = Named(std::env::temp_dir().join(format!("weft-xrcd-{}", std::process::id())));
    let path = CString::new(named.0.to_str().expect("text")).expect("a path");
    assert_eq!(world.open(Some(&path), -1, 0), Err(-FI_ENOENT), "no file");
    let first = world
        .open(Some(&path), -1, O_CREAT | O_EXCL)
        .expect("xrcd_open");
    assert!(named.0.exists(), "the file was made");
    assert!(found_elsewhere(&path));
    let file = File::open(&named.0).expect("the file");
    let fd = file.as_raw_fd();
    assert_eq!(
        world.open(None, fd, O_CREAT | O_EXCL),
        Err(INVALID),
        "somebody has it"
    );
    assert_eq!(world.open(Some(&path), -1, O_CREAT | O_EXCL), Err(INVALID));
    let second = world.open(None, fd, 0).expect("the same, by descriptor");
    drop(file);
    let own = world.open(None, -1, O_CREAT).expect("nobody else's");

    assert_eq!(
        world.open(Some(&path), 0, 0),
        Err(INVALID),
        "a path and a descriptor"
    );
    assert_eq!(
        world.open(Some(&path), -1, libc::O_TRUNC),
        Err(INVALID),
        "another flag"
    );
    assert_eq!(world.open(None, 999_999, O_CREAT), Err(-FI_EBADF));
    let call = world.ops.xrcd_open.expect("xrcd_open");
    let mut xrcd = null_mut();
    // SAFETY: what is wrong is what is tried.
    unsafe {
        let (domain, out) = (world.setup.domain, &raw mut xrcd);
        assert_eq!(
            call(null_mut(), null(), -1, O_CREAT, out, null_mut()),
            INVALID
        );
        assert_eq!(
            call(domain, null(), -1, O_CREAT, null_mut(), null_mut()),
            INVALID
        );
        assert_eq!(bind(first, world.setup.eq, 0), -FI_ENOSYS);
        assert_eq!(
            close(world.setup.domain),
            -FI_EBUSY,
            "XRC domains are open in it"
        );
    }
    for wrong in [null_mut(), world.setup.cq.cast::<fid>()] {
        assert_eq!(world.end(wrong), INVALID);
    }
    assert_eq!(world.end(first), 0);
    assert_eq!(world.end(first), INVALID, "closed");
    assert!(found_elsewhere(&path), "the second one keeps it");
    // closed by `fi_close` instead of `xrcd_close`
    // SAFETY: an open domain.
    assert_eq!(unsafe { close(second) }, 0);
    assert!(!found_elsewhere(&path), "nobody has it");
    assert_eq!(world.open(Some(&path), -1, 0), Err(-FI_EAGAIN));
    assert_eq!(world.end(own), 0);
    world.setup.close();
    println!("XRC domains are found by their file while somebody has them");
}
