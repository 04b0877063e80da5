//! Registering memory, fi_mr(3).

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use abi_tests::objects::{Setup, bind, close, control, open_domain};
use libfabric_sys::*;

use super::{ACCESS, FLAGS, INVALID};

pub(super) unsafe fn run(setup: &Setup) {
    let mut memory = [0_u8; 256];
    // SAFETY: see `super::run`.
    unsafe {
        let domain = setup.domain;
        let reg = (*(*domain).mr).reg.expect("a slot");
        let regv = (*(*domain).mr).regv.expect("a slot");
        let regattr = (*(*domain).mr).regattr.expect("a slot");
        let mut mr: *mut fid_mr = null_mut();
        let out = &raw mut mr;
        let fid = &raw mut (*domain).fid;
        let buf = memory.as_mut_ptr().cast::<c_void>();
        assert_eq!(
            reg(null_mut(), buf, 256, ACCESS, 0, 0, 0, out, null_mut()),
            INVALID
        );
        assert_eq!(
            reg(
                setup.fabric.cast(),
                buf,
                256,
                ACCESS,
                0,
                0,
                0,
                out,
                null_mut()
            ),
            INVALID
        );
        assert_eq!(
            reg(fid, buf, 256, 1 << 50, 0, 0, 0, out, null_mut()),
            INVALID
        );
        assert_eq!(
            reg(fid, buf, 256, ACCESS, 4, 0, 0, out, null_mut()),
            INVALID
        );
        assert_eq!(
            reg(fid, buf, 256, ACCESS, 0, 0, 1 << 3, out, null_mut()),
            FLAGS
        );
        assert_eq!(
            reg(fid, buf, 256, ACCESS, 0, 0, 0, null_mut(), null_mut()),
            INVALID
        );
        let unmapped = std::ptr::without_provenance::<c_void>(4096);
        let ret = reg(fid, unmapped, 4096, FI_RECV, 0, 0, 0, out, null_mut());
        assert!(ret < 0, "memory that is not there was registered");
        let iov = [libc::iovec {
            iov_base: buf,
            iov_len: 64,
        }; 2];
        for count in [0, 9, usize::MAX] {
            assert_eq!(
                regv(fid, iov.as_ptr(), count, ACCESS, 0, 0, 0, out, null_mut()),
                INVALID
            );
        }
        let mut empty = iov;
        empty[1].iov_len = 0;
        assert_eq!(
            regv(fid, empty.as_ptr(), 2, ACCESS, 0, 0, 0, out, null_mut()),
            INVALID
        );
        assert_eq!(
            reg(fid, buf, 0, ACCESS, 0, 0, 0, out, null_mut()),
            INVALID,
            "no bytes"
        );
        assert_eq!(
            reg(fid, buf, usize::MAX, ACCESS, 0, 0, 0, out, null_mut()),
            INVALID,
            "the addresses overflow"
        );
        assert_eq!(
            regv(fid, null(), 1, ACCESS, 0, 0, 0, out, null_mut()),
            INVALID
        );
        assert_eq!(regattr(fid, null(), 0, out), INVALID);
        let mut attr = std::mem::zeroed::<fi_mr_attr>();
        attr.__bindgen_anon_1.mr_iov = iov.as_ptr();
        attr.iov_count = 1;
        attr.access = ACCESS;
        // "ignored unless the application has requested the FI_HMEM capability" (fi_mr(3))
        attr.iface = FI_HMEM_CUDA;
        assert_eq!(regattr(fid, &raw const attr, 0, out), 0);
        assert_eq!(
            bind(mr, setup.eq, 0),
            INVALID,
            "neither counter nor endpoint"
        );
        assert_eq!(control(mr, FI_ENABLE, null_mut()), -FI_EOPBADSTATE, "it is");
        assert_eq!(control(mr, 9999, null_mut()), -FI_ENOSYS);
        raw_keys(setup, mr, false);
        assert_eq!(close(mr), 0);
        records(setup, &mut memory);
    }
}

/// Raw keys of a form with `FI_MR_RAW`.
unsafe fn records(setup: &Setup, memory: &mut [u8]) {
    // SAFETY: see `super::run`.
    unsafe {
        let info = setup.info.first();
        let attr = &raw mut (*(*info).domain_attr).mr_mode;
        let before = attr.replace(*attr | FI_MR_RAW);
        let domain = open_domain(setup.fabric, info);
        *attr = before;
        let reg = (*(*domain).mr).reg.expect("a slot");
        let mut mr: *mut fid_mr = null_mut();
        let (fid, buf) = (&raw mut (*domain).fid, memory.as_mut_ptr().cast());
        let (len, out) = (memory.len(), &raw mut mr);
        assert_eq!(reg(fid, buf, len, ACCESS, 0, 0, 0, out, null_mut()), 0);
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "fi_mr_raw_attr has it");
        raw_keys(setup, mr, true);
        assert_eq!(close(mr), 0);
        assert_eq!(close(domain), 0);
    }
}

/// Raw keys: `key_size` is returned, an invalid raw key is refused, and mapped keys keep the domain
/// open. `record`: raw keys contain more than the key.
unsafe fn raw_keys(setup: &Setup, mr: *mut fid_mr, record: bool) {
    let (mut base, mut size, mut bytes) = (0_u64, 0_usize, [0_u8; 512]);
    let (size, bytes) = (&raw mut size, bytes.as_mut_ptr());
    let mut attr = fi_mr_raw_attr {
        flags: 0,
        base_addr: &raw mut base,
        raw_key: bytes,
        key_size: size,
    };
    let attr = &raw mut attr;
    // SAFETY: see `super::run`.
    unsafe {
        assert_eq!(control(mr, FI_GET_RAW_MR, null_mut()), INVALID);
        assert_eq!(control(mr, FI_GET_RAW_MR, attr.cast()), -FI_ETOOSMALL);
        let needed = *size;
        assert!(if record { needed > 8 } else { needed == 8 });
        *size = needed - 1;
        assert_eq!(control(mr, FI_GET_RAW_MR, attr.cast()), -FI_ETOOSMALL);
        assert_eq!((*size, *bytes), (needed, 0), "nothing is written");
        assert_eq!(control(mr, FI_GET_RAW_MR, attr.cast()), 0);
        if !record {
            assert_eq!(bytes.cast::<u64>().read_unaligned(), (*mr).key);
        }

        // a separate domain, which only the mapped keys keep open
        let domain = open_domain(setup.fabric, setup.info.first());
        let mut mapped = 0_u64;
        let key = &raw mut mapped;
        let map = |length: usize, flags: u64| {
            let mut map = fi_mr_map_raw {
                flags,
                base_addr: 0,
                raw_key: bytes,
                key_size: length,
                key,
            };
            control(domain, FI_MAP_RAW_MR, (&raw mut map).cast())
        };
        assert_eq!(control(domain, FI_MAP_RAW_MR, null_mut()), INVALID);
        for length in [0, 7, needed - 1] {
            assert_eq!(map(length, 0), INVALID, "truncated");
        }
        if record {
            for (at, what) in [(6, "another version"), (30, "forged")] {
                *bytes.add(at) ^= 1;
                assert_eq!(map(needed, 0), INVALID, "{what}");
                *bytes.add(at) ^= 1;
            }
            assert_eq!(map(8, 0), INVALID, "truncated");
        }
        assert_eq!(map(needed, 1), FLAGS);
        assert_eq!(
            control(domain, FI_UNMAP_KEY, key.cast()),
            INVALID,
            "unknown"
        );
        assert_eq!(map(needed, 0), 0);
        assert_eq!(close(domain), -FI_EBUSY, "a key is mapped");
        assert_eq!(control(domain, FI_UNMAP_KEY, key.cast()), 0);
        assert_eq!(control(domain, FI_UNMAP_KEY, key.cast()), INVALID, "twice");
        assert_eq!(close(domain), 0);
    }
}
