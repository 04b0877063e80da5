//! Every method to change another process's tables is refused. A method that is harmless alone is
//! permitted on the shared file.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::ptr::null_mut;

use super::common::*;

/// A page of the file after those that the device uses first.
const PAGE: usize = 4096;

pub(crate) fn owner(link: &mut Link) {
    let context = open();
    link.say("open");
    link.expect("close");
    // SAFETY: live, and nothing of it is in use.
    assert_eq!(unsafe { (verbs().ibv_close_device)(context) }, 0);
}

/// The file of this name that the process has open.
fn file_of(pid: i32, name: &str) -> PathBuf {
    let list = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let named = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with(name))
    };
    list.flatten()
        .map(|entry| entry.path())
        .find(named)
        .expect("the device's file")
}

fn done(ret: libc::c_int) -> Result<()> {
    if ret < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Maps the file's last page and has `change` do something with it.
fn mapped(
    file: &File,
    protection: libc::c_int,
    change: impl FnOnce(*mut libc::c_void) -> Result<()>,
) -> Result<()> {
    let at = file.metadata()?.len() as usize - PAGE;
    let (shared, fd) = (libc::MAP_SHARED, file.as_raw_fd());
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { libc::mmap(null_mut(), PAGE, protection, shared, fd, at as libc::off_t) };
    if page == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    let changed = change(page);
    // SAFETY: the mapping made above.
    unsafe { libc::munmap(page, PAGE) };
    changed
}

/// A method to change the bytes, the length or the seals of a file that is open for writing.
type Way = (&'static str, fn(&File) -> Result<()>);

/// Changes of the contents, which are permitted on the shared file.
const CHANGES: [Way; 4] = [
    ("write", |file| {
        let at = file.metadata()?.len() - 8;
        file.write_all_at(&[0; 8], at)
    }),
    ("map for writing", |file| {
        mapped(file, libc::PROT_READ | libc::PROT_WRITE, |_| Ok(()))
    }),
    ("map, then protect for writing", |file| {
        mapped(file, libc::PROT_READ, |page| {
            // SAFETY: the page that was mapped.
            done(unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) })
        })
    }),
    ("punch a hole", |file| {
        let at = file.metadata()?.len() as libc::off_t - PAGE as libc::off_t;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no memory is passed.
        done(unsafe { libc::fallocate(file.as_raw_fd(), mode, at, PAGE as libc::off_t) })
    }),
];

/// Changes that are refused for both files.
const LENGTHS: [Way; 4] = [
    ("shorten", |file| file.set_len(0)),
    ("lengthen", |file| file.set_len(file.metadata()?.len() + 1)),
    ("allocate behind the end", |file| {
        let end = file.metadata()?.len() as libc::off_t;
        // SAFETY: no memory is passed.
        done(unsafe { libc::fallocate(file.as_raw_fd(), 0, end, PAGE as libc::off_t) })
    }),
    ("seal", |file| {
        // SAFETY: no memory is passed.
        done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) })
    }),
];

pub(crate) fn attacker(link: &mut Link) {
    link.expect("open");
    let pid = link.pid();
    for (name, guarded) in [
        ("/memfd:softverbs-tables ", true),
        ("/memfd:softverbs ", false),
    ] {
        let path = file_of(pid, name);
        // opening is permitted, and has no effect
        let file = File::options().read(true).write(true).open(&path).unwrap();
        for (way, change) in CHANGES {
            let got = change(&file);
            match got {
                Ok(()) => assert!(!guarded, "{name}: {way}"),
                Err(error) => {
                    let refused = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
                    assert!(guarded && refused, "{name}: {way}: {error}");
                }
            }
        }
        for (way, change) in LENGTHS {
            let error = change(&file).expect_err(way);
            assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{name}: {way}");
        }
        let emptied = File::options()
            .write(true)
            .custom_flags(libc::O_TRUNC)
            .open(&path);
        assert_eq!(emptied.unwrap_err().raw_os_error(), Some(libc::EPERM));
        // the tables can be read
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0).unwrap();
        assert_eq!(magic != [0; 8], guarded, "{name}");
    }
    link.say("close");
}
