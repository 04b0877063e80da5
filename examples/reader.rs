//! Memory that one process fills and another reads, in Rust, through `libfabric-sys` and the
//! declarations of `weft.h`.
//!
//! `reader [NODE]` allocates and fills memory, exports it for reading, and starts itself again with
//! the handle: `reader NODE HANDLE` imports the memory, computes its sum, and is refused when it
//! requests more access.

#![allow(unsafe_code, reason = "a C interface")]

// libfabric by dlopen, fi_getinfo with hints, and the declarations of weft.h
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::Setup;
use abi_tests::weft::{WEFT_MR_HANDLE_SIZE, mr_ops, weft_mr_attr, weft_mr_ops};
use libfabric_sys::*;

use std::process::Command;
use std::ptr::null_mut;

/// Length of the memory in words.
const COUNT: usize = 100_000;
/// The reader's access: sends from the memory, and RMA reads of peers.
const READING: u64 = FI_SEND | FI_REMOTE_READ;

fn attributes(access: u64) -> weft_mr_attr {
    weft_mr_attr {
        size: size_of::<weft_mr_attr>(),
        access,
        requested_key: 1,
        flags: 0,
        addr: null_mut(), // any address
        map_flags: 0,
        context: null_mut(),
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let node = args.next().unwrap_or_else(|| "127.0.0.1".to_owned());
    let lib = Lib::open("libfabric.so.1");
    let setup = Setup::new(&lib, Some(&node), None, FI_SOURCE, &hints(&lib));
    // SAFETY: the domain stays open until the end.
    let ops = unsafe { mr_ops(setup.domain) };
    match args.next() {
        None => write(&setup, ops, &node),
        Some(handle) => read(&setup, ops, &handle),
    }
    setup.close();
    lib.close();
}

fn write(setup: &Setup, ops: &weft_mr_ops, node: &str) {
    let (mut addr, mut mr) = (null_mut(), null_mut());
    let mut handle = [0_u8; WEFT_MR_HANDLE_SIZE];
    let mut size = handle.len();
    let attr = attributes(READING | FI_RECV);
    let (alloc, export) = (
        ops.mr_alloc.expect("mr_alloc"),
        ops.mr_export.expect("mr_export"),
    );
    // SAFETY: the domain is open; the memory has the requested length.
    let words = unsafe {
        let len = COUNT * size_of::<u64>();
        let ret = alloc(
            setup.domain,
            len,
            &raw const attr,
            &raw mut addr,
            &raw mut mr,
        );
        assert_eq!(ret, 0, "mr_alloc");
        let ret = export(mr, READING, handle.as_mut_ptr().cast(), &raw mut size);
        assert_eq!(ret, 0, "mr_export");
        std::slice::from_raw_parts_mut(addr.cast::<u64>(), COUNT)
    };
    for (i, word) in words.iter_mut().enumerate() {
        *word = i as u64;
    }
    let text: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    let program = std::env::current_exe().expect("this program");
    let reader = Command::new(program).args([node, &text]).status();
    assert!(reader.expect("it starts").success());
    let free = ops.mr_free.expect("mr_free");
    // SAFETY: the region is open, and this process no longer uses its memory.
    assert_eq!(unsafe { free(mr) }, 0);
}

fn read(setup: &Setup, ops: &weft_mr_ops, handle: &str) {
    let byte = |at: usize| u8::from_str_radix(&handle[at..at + 2], 16).expect("two digits");
    let handle: Vec<u8> = (0..handle.len()).step_by(2).map(byte).collect();
    let import = |access| {
        let attr = attributes(access);
        let (mut addr, mut len, mut mr) = (null_mut(), 0, null_mut());
        let (bytes, size) = (handle.as_ptr().cast(), handle.len());
        let call = ops.mr_import.expect("mr_import");
        let (to, len_to, mr_to) = (&raw mut addr, &raw mut len, &raw mut mr);
        // SAFETY: the domain is open, and the handle has that size.
        let ret = unsafe {
            call(
                setup.domain,
                bytes,
                size,
                &raw const attr,
                to,
                len_to,
                mr_to,
            )
        };
        if ret == 0 {
            Ok((addr, len, mr))
        } else {
            Err(ret)
        }
    };
    let (addr, len, mr) = import(READING).expect("mr_import");
    let words = addr.cast::<u64>();
    let sum: u64 = (0..len / 8)
        // SAFETY: the memory is mapped and has this length; other processes may write to it at any
        // time, so no reference covers it.
        .map(|i| unsafe { words.add(i).read_volatile() })
        .sum();
    assert_eq!(sum, (0..COUNT as u64).sum());
    let more = import(READING | FI_RECV);
    assert_eq!(more.err(), Some(-FI_EACCES), "writing was not granted");
    println!("{COUNT} words, whose sum is {sum}, and not a right more");
    let free = ops.mr_free.expect("mr_free");
    // SAFETY: the region is open, and this process no longer uses its memory.
    assert_eq!(unsafe { free(mr) }, 0);
}
