//! The table of the device's buffers, whose entries are reused.

use loom::thread;

use super::check;
use crate::dm::{Buffer, Buffers, Shown};
use crate::segment::OwnSegment;
use crate::segment::layout::{buffer, header};
use crate::sync::atomic::Ordering;
use crate::sys::memfd_create;

/// A buffer of `len` bytes, less than two pages, without memory.
fn file(len: usize) -> Buffer {
    let file = memfd_create(c"model", 8192).unwrap();
    // SAFETY: models do not access memory by address.
    unsafe { Buffer::adopt(file, std::ptr::null_mut(), len).unwrap() }
}

/// While a buffer is released and another buffer gets its entry, a reader of the entry finds one of
/// the two buffers, or none.
#[test]
fn an_entry_is_of_one_buffer() {
    check(|| {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let words32 = [buffer::FD, buffer::CONTEXT, buffer::WRITABLE];
        let words64 = [buffer::STAMP, buffer::ADDR, buffer::LEN, buffer::INODE];
        let map = &segment.map;
        map.prepare(
            words32.map(|part| buffer::AT + part),
            words64.map(|part| buffer::AT + part),
        );
        map.u32(header::BUFFERS).store(0, Ordering::Relaxed);
        let buffers = Buffers::default();
        let first = buffers.add(&segment, file(5000), 3).unwrap();
        let theirs = map.again();
        let peer =
            thread::spawn(move || Shown::read(&theirs, 0).map(|shown| (shown.stamp, shown.len)));
        buffers.release(&segment, first.stamp).unwrap();
        let second = buffers.add(&segment, file(7000), 3).unwrap();
        assert_ne!(first.stamp, second.stamp);
        let found = peer.join().unwrap();
        let either = [(first.stamp, 5000), (second.stamp, 7000)];
        assert!(
            found.is_none_or(|shown| either.contains(&shown)),
            "{found:?}"
        );
    });
}
