//! Regions with bindings and `fi_mr_enable`: the answer of `fi_getinfo`, the errnos of each step,
//! and the order of closing (`fi_mr(3)`, `fi_mr_bind`, `fi_mr_enable`).

use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::fabric::{Infos, getinfo, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{
    Setup, bind, close, control, cq_attr, open_cq, open_domain, open_ep, open_eq, open_fabric,
};
use libfabric_sys::layout::mr_attr_size;
use libfabric_sys::*;

const INVALID: i32 = -FI_EINVAL;
const FLAGS: i32 = -FI_EBADFLAGS;
const BUSY: i32 = -FI_EBUSY;
const STATE: i32 = -FI_EOPBADSTATE;
const NONE: i32 = -FI_ENOSYS;
const BASIC: i32 = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
const REMOTE: u64 = FI_REMOTE_READ | FI_REMOTE_WRITE;

/// API versions with different sizes or meanings of `fi_mr_attr`.
const VERSIONS: [u32; 6] = [
    fi_version(1, 9),
    fi_version(1, 17),
    fi_version(1, 19),
    fi_version(1, 20),
    fi_version(2, 0),
    fi_version(2, 5),
];

/// Hints with these mr_mode bits and capabilities.
fn asking(lib: &Lib, mr_mode: i32, caps: u64) -> Infos {
    let hints = hints(lib);
    // SAFETY: hints have all their parts.
    unsafe {
        (*hints.first()).caps = caps;
        (*(*hints.first()).domain_attr).mr_mode = mr_mode;
    }
    hints
}

/// The mr_mode and capabilities of each answer.
fn forms(lib: &Lib, mr_mode: i32, caps: u64) -> Vec<(i32, u64)> {
    let hints = asking(lib, mr_mode, caps);
    let list = getinfo(
        lib,
        lib.version,
        Some("127.0.0.1"),
        None,
        FI_SOURCE,
        Some(&hints),
    );
    let list = list.map(|list| {
        list.all()
            .iter()
            // SAFETY: what libfabric returns is whole.
            .map(|info| (unsafe { (*info.domain_attr).mr_mode }, info.caps))
            .collect()
    });
    list.unwrap_or_default()
}

pub(crate) fn run(lib: &Lib) {
    offered(lib);
    counted(lib);
    counted_at_once(lib);
    disabled(lib);
    owned(lib);
    plain(lib);
    keys(lib);
    persistent(lib);
    crate::auth::run(lib);
    for version in VERSIONS
        .into_iter()
        .filter(|version| *version <= lib.version)
    {
        attributes(lib, version);
    }
    println!("regions are bound and enabled in their order");
}

/// If the bit is offered, the capability implies it; the bit without the capability is not
/// selected.
fn offered(lib: &Lib) {
    let rma = FI_MSG | FI_RMA;
    let without = forms(lib, BASIC, rma | FI_RMA_EVENT);
    let (first, caps) = without[0];
    assert_eq!(first & (FI_MR_VIRT_ADDR | FI_MR_PROV_KEY), 0, "fewest bits");
    assert_eq!(caps & FI_RMA_EVENT, FI_RMA_EVENT);
    let asked = forms(lib, BASIC | FI_MR_RMA_EVENT, rma | FI_RMA_EVENT);
    assert!(!asked.is_empty());
    for (mode, caps) in asked {
        assert_eq!(mode & FI_MR_RMA_EVENT, FI_MR_RMA_EVENT);
        assert_eq!(caps & FI_RMA_EVENT, FI_RMA_EVENT);
    }
    let special = FI_MR_RMA_EVENT | FI_MR_ENDPOINT | FI_MR_RAW;
    let all = forms(lib, BASIC | special, rma);
    assert_eq!(all[0].0, BASIC, "never merely because they were offered");
    let first = all.iter().position(|(mode, _)| mode & special != 0);
    let rest = &all[first.expect("forms with each of them")..];
    assert!(rest.iter().all(|(mode, _)| mode & special != 0), "last");
    for (mode, caps) in &all {
        assert_eq!(mode & FI_MR_RMA_EVENT != 0, caps & FI_RMA_EVENT != 0);
    }
}

unsafe fn counter(setup: &Setup) -> *mut fid_cntr {
    let (domain, mut cntr) = (setup.domain, null_mut());
    // SAFETY: an open domain.
    let ret = unsafe {
        let (attr, out, context) = (null_mut(), &raw mut cntr, null_mut());
        call!((*domain).ops, cntr_open, domain, attr, out, context)
    };
    assert_eq!(ret, 0, "fi_cntr_open");
    cntr
}

unsafe fn reg(setup: &Setup, memory: &mut [u8], flags: u64) -> Result<*mut fid_mr, i32> {
    let (domain, mut mr) = (setup.domain, null_mut());
    // SAFETY: an open domain, and memory that outlives the region.
    let ret = unsafe {
        let (fid, buf) = (&raw mut (*domain).fid, memory.as_mut_ptr().cast());
        let (out, context) = (&raw mut mr, null_mut());
        let reg = (*(*domain).mr).reg.expect("a slot");
        reg(fid, buf, memory.len(), REMOTE, 0, 0, flags, out, context)
    };
    if ret == 0 { Ok(mr) } else { Err(ret) }
}

fn open(lib: &Lib, mr_mode: i32, caps: u64) -> Setup {
    let hints = asking(lib, mr_mode, caps);
    Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints)
}

fn counted(lib: &Lib) {
    let caps = FI_MSG | FI_RMA | FI_RMA_EVENT;
    let setup = open(lib, BASIC | FI_MR_RMA_EVENT, caps);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let (writes, reads) = (counter(&setup), counter(&setup));
        let mr = reg(&setup, &mut memory, FI_RMA_EVENT).expect("a region");
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "disabled");
        assert!(!(*mr).mem_desc.is_null(), "the descriptor is there at once");
        for flags in [0, FI_SEND, FI_REMOTE_WRITE | FI_SEND] {
            assert_eq!(bind(mr, writes, flags), FLAGS);
        }
        assert_eq!(bind(mr, null_mut::<fid_cntr>(), FI_REMOTE_WRITE), INVALID);
        assert_eq!(bind(mr, setup.cq, FI_REMOTE_WRITE), INVALID);
        assert_eq!(bind(mr, writes, FI_REMOTE_WRITE), 0);
        assert_eq!(bind(mr, reads, FI_REMOTE_WRITE), INVALID, "it has one");
        assert_eq!(close(reads), 0, "what was not bound is free");
        let reads = counter(&setup);
        assert_eq!(bind(mr, reads, FI_REMOTE_READ), 0);
        let ep = open_ep(&setup, setup.info.first());
        assert_eq!(bind(mr, ep, 0), NONE, "regions are the domain's");
        assert_eq!(close(ep), 0);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), 0);
        assert_ne!((*mr).key, FI_KEY_NOTAVAIL);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE, "twice");
        assert_eq!(bind(mr, reads, FI_REMOTE_READ), STATE, "after enabling");
        for cntr in [writes, reads] {
            assert_eq!(close(cntr), BUSY, "a region is bound to it");
        }
        // registered without FI_RMA_EVENT: enabled at once
        let other = reg(&setup, &mut memory, 0).expect("a region");
        assert_ne!((*other).key, FI_KEY_NOTAVAIL);
        assert_eq!(bind(other, reads, FI_REMOTE_READ), STATE);
        assert_eq!(close(other), 0);
        assert_eq!(close(mr), 0);
        let ep = open_ep(&setup, setup.info.first());
        assert_eq!(bind(ep, writes, FI_REMOTE_WRITE), 0);
        assert_eq!(bind(ep, reads, REMOTE), INVALID, "it has one");
        assert_eq!(bind(ep, reads, FI_REMOTE_READ), 0);
        assert_eq!(close(writes), BUSY, "an endpoint is bound to it");
        assert_eq!(close(ep), 0);
        // never enabled
        let mr = reg(&setup, &mut memory, FI_RMA_EVENT).expect("a region");
        assert_eq!(bind(mr, writes, REMOTE), 0);
        assert_eq!(close(writes), BUSY);
        assert_eq!(close(mr), 0);
        for cntr in [writes, reads] {
            assert_eq!(close(cntr), 0);
        }
    }
    setup.close();
}

/// The key that the application chooses is returned only after the region is enabled:
/// "FI_KEY_NOTAVAIL will be returned if the registration has not completed" (fi_mr(3)).
fn disabled(lib: &Lib) {
    let bits = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_RMA_EVENT;
    let setup = open(lib, bits, FI_MSG | FI_RMA | FI_RMA_EVENT);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let mr = reg(&setup, &mut memory, FI_RMA_EVENT).expect("a region");
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "disabled");
        let taken = reg(&setup, &mut memory, FI_RMA_EVENT).err();
        assert_eq!(taken, Some(-FI_ENOKEY), "taken all the same");
        assert_eq!(control(mr, FI_ENABLE, null_mut()), 0);
        assert_eq!((*mr).key, 0, "what was asked for");
        assert_eq!(close(mr), 0);
    }
    setup.close();
}

/// Without the bit FI_MR_RMA_EVENT, counters can be bound to enabled regions.
fn counted_at_once(lib: &Lib) {
    let setup = open(lib, BASIC, FI_MSG | FI_RMA | FI_RMA_EVENT);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let (writes, reads) = (counter(&setup), counter(&setup));
        for flags in [0, FI_RMA_EVENT] {
            let mr = reg(&setup, &mut memory, flags).expect("a region");
            assert_ne!((*mr).key, FI_KEY_NOTAVAIL, "enabled");
            assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE);
            assert_eq!(bind(mr, writes, FI_REMOTE_WRITE), 0);
            assert_eq!(bind(mr, reads, FI_REMOTE_WRITE), INVALID, "it has one");
            assert_eq!(bind(mr, reads, FI_REMOTE_READ), 0);
            assert_eq!(bind(mr, reads, FI_SEND), FLAGS);
            assert_eq!(close(writes), BUSY);
            assert_eq!(close(mr), 0);
        }
        for cntr in [writes, reads] {
            assert_eq!(close(cntr), 0);
        }
    }
    setup.close();
}

fn owned(lib: &Lib) {
    // forms with FI_MR_ENDPOINT come last
    let hints = asking(lib, BASIC | FI_MR_ENDPOINT, FI_MSG | FI_RMA);
    let (node, flags) = (Some("127.0.0.1"), FI_SOURCE);
    let list = getinfo(lib, lib.version, node, None, flags, Some(&hints)).expect("a list");
    let chosen = list.all().into_iter().find(|info| {
        // SAFETY: what libfabric returns is whole.
        unsafe { (*info.domain_attr).mr_mode & FI_MR_ENDPOINT != 0 }
    });
    let info = std::ptr::from_ref(chosen.expect("a form with endpoints' regions")).cast_mut();
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let fabric = open_fabric(lib, info);
        let domain = open_domain(fabric, info);
        let own = Setup {
            fabric,
            domain,
            eq: open_eq(fabric),
            cq: open_cq(domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_UNSPEC)),
            info: list,
        };
        let (ep, other) = (open_ep(&own, info), open_ep(&own, info));
        let mr = reg(&own, &mut memory, 0).expect("a region");
        assert_eq!((*mr).key, FI_KEY_NOTAVAIL, "disabled");
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE, "no endpoint");
        assert_eq!(bind(mr, ep, 1), FLAGS);
        assert_eq!(bind(mr, ep, 0), 0);
        assert_eq!(bind(mr, other, 0), INVALID, "it has one");
        assert_eq!(close(other), 0);
        assert_eq!(close(ep), BUSY, "a region is bound to it");
        assert_eq!(control(mr, FI_ENABLE, null_mut()), 0);
        assert_ne!((*mr).key, FI_KEY_NOTAVAIL);
        assert_eq!(bind(mr, ep, 0), STATE);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE);
        assert_eq!(close(ep), BUSY);
        assert_eq!(
            control(ep, FI_ENABLE, null_mut()),
            0,
            "a busy one still works"
        );
        let refused = reg(&own, &mut memory, FI_RMA_EVENT);
        assert_eq!(refused.err(), Some(FLAGS), "the form has no events");
        assert_eq!(close(mr), 0);
        assert_eq!(close(ep), 0);
        own.close();
    }
}

fn plain(lib: &Lib) {
    let setup = open(lib, BASIC, FI_MSG | FI_RMA);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let cntr = counter(&setup);
        let mr = reg(&setup, &mut memory, 0).expect("a region");
        // "-FI_ENOSYS: returned by fi_mr_bind if the provider does not support reporting events
        // based on access to registered memory regions" (fi_mr(3))
        for kinds in [FI_REMOTE_WRITE, FI_REMOTE_READ, REMOTE] {
            assert_eq!(bind(mr, cntr, kinds), NONE, "without FI_RMA_EVENT");
        }
        let ep = open_ep(&setup, setup.info.first());
        assert_eq!(bind(mr, ep, 0), NONE, "regions are the domain's");
        let refused = bind(ep, cntr, FI_REMOTE_WRITE);
        assert_eq!(refused, -FI_EOPNOTSUPP, "nor by the endpoint");
        assert_eq!(close(ep), 0);
        assert_eq!(control(mr, FI_ENABLE, null_mut()), STATE);
        assert_eq!(reg(&setup, &mut memory, FI_RMA_EVENT).err(), Some(FLAGS));
        assert_eq!(close(cntr), 0);
        assert_eq!(close(mr), 0);
    }
    setup.close();
}

/// Attributes in front of an unmapped page: a read beyond their end is a fault.
struct Edge {
    pages: *mut u8,
    attr: *mut fi_mr_attr,
    size: usize,
}

impl Edge {
    const PAGE: usize = 4096;

    fn new(version: u32) -> Self {
        // `iface` and the fields after it were added in 1.10
        let size = if version < fi_version(1, 10) {
            std::mem::offset_of!(fi_mr_attr, iface)
        } else {
            mr_attr_size(version)
        };
        // SAFETY: a new mapping, whose second page is taken away.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let pages = libc::mmap(null_mut(), 2 * Self::PAGE, rights, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let pages = pages.cast::<u8>();
            let second = pages.add(Self::PAGE).cast();
            assert_eq!(libc::mprotect(second, Self::PAGE, libc::PROT_NONE), 0);
            let attr = pages.add(Self::PAGE - size).cast();
            Self { pages, attr, size }
        }
    }

    /// Stores the fields that the version has.
    unsafe fn put(&self, attr: &fi_mr_attr) -> *const fi_mr_attr {
        // SAFETY: so much is there.
        unsafe {
            let from = std::ptr::from_ref(attr).cast::<u8>();
            std::ptr::copy_nonoverlapping(from, self.attr.cast(), self.size);
        }
        self.attr
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // SAFETY: of `new`.
        unsafe { libc::munmap(self.pages.cast(), 2 * Self::PAGE) };
    }
}

/// Every field of `fi_mr_attr` and every flag, as an application of API `version` passes them.
fn attributes(lib: &Lib, version: u32) {
    let hints = asking(lib, BASIC, FI_MSG | FI_RMA);
    let list = getinfo(
        lib,
        version,
        Some("127.0.0.1"),
        None,
        FI_SOURCE,
        Some(&hints),
    );
    let info = list.expect("a list");
    let edge = Edge::new(version);
    let mut memory = [0_u8; 4096];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let fabric = open_fabric(lib, info.first());
        let domain = open_domain(fabric, info.first());
        let other = open_domain(fabric, info.first());
        let iov = [libc::iovec {
            iov_base: memory.as_mut_ptr().cast(),
            iov_len: memory.len(),
        }];
        let mut plain = std::mem::zeroed::<fi_mr_attr>();
        plain.__bindgen_anon_1.mr_iov = iov.as_ptr();
        plain.iov_count = 1;
        plain.access = REMOTE;
        plain.context = (&raw mut memory).cast();
        let register = |domain: *mut fid_domain, attr: &fi_mr_attr, flags: u64| {
            let mut mr: *mut fid_mr = null_mut();
            let regattr = (*(*domain).mr).regattr.expect("a slot");
            let ret = regattr(&raw mut (*domain).fid, edge.put(attr), flags, &raw mut mr);
            if ret == 0 { Ok(mr) } else { Err(ret) }
        };
        let accepted = |attr: &fi_mr_attr, flags: u64| {
            let mr = register(domain, attr, flags).expect("a region");
            assert_eq!((*mr).fid.context, plain.context);
            assert_eq!(close(mr), 0);
        };
        let refused = |attr: &fi_mr_attr, flags: u64, errno: i32, what: &str| {
            let answer = register(domain, attr, flags).err();
            assert_eq!(answer, Some(errno), "{what}, version {version:#x}");
        };
        accepted(&plain, 0);
        accepted(&plain, FI_MR_SINGLE_USE);
        // "This flag is only usable for domains opened with FI_HMEM capability support" (fi_mr(3))
        for flag in [FI_HMEM_HOST_ALLOC, FI_HMEM_DEVICE_ONLY] {
            refused(&plain, flag, FLAGS, "without FI_HMEM");
        }
        refused(
            &plain,
            FI_RMA_PMEM,
            FLAGS,
            "a capability that was not asked for",
        );
        refused(&plain, 1 << 3, FLAGS, "no flag of registrations");
        let offset = fi_mr_attr { offset: 8, ..plain };
        refused(&offset, 0, INVALID, "an offset");
        for count in [0, 9] {
            let wrong = fi_mr_attr {
                iov_count: count,
                ..plain
            };
            refused(&wrong, 0, INVALID, "a wrong count");
        }
        let mut secret = [7_u8; 65];
        let auth_key = secret.as_mut_ptr();
        let keyed = |auth_key_size: usize| fi_mr_attr {
            auth_key_size,
            auth_key,
            ..plain
        };
        let (one, most, long, all) = (keyed(1), keyed(64), keyed(65), keyed(usize::MAX));
        accepted(&one, 0);
        accepted(&most, 0);
        refused(&long, 0, INVALID, "a long authorization key");
        refused(&all, 0, INVALID, "FI_AV_AUTH_KEY");
        let nowhere = fi_mr_attr {
            auth_key: null_mut(),
            ..one
        };
        refused(&nowhere, 0, INVALID, "an authorization key at NULL");

        // a field that 1.9 does not have
        let device = fi_mr_attr {
            iface: FI_HMEM_CUDA,
            ..plain
        };
        accepted(&device, 0);
        // "This field is ignored unless the application has requested the FI_HMEM capability"
        // (fi_mr(3), iface)
        for iface in [FI_HMEM_CUDA, FI_HMEM_ROCR, FI_HMEM_ZE, FI_HMEM_NEURON, 77] {
            accepted(&fi_mr_attr { iface, ..plain }, 0);
        }
        // since 1.20
        let fd = libc::memfd_create(c"memory".as_ptr(), 0);
        let kernel = fi_mr_dmabuf {
            fd,
            offset: 0,
            len: 4096,
            base_addr: null_mut(),
        };
        let mut dmabuf = plain;
        dmabuf.__bindgen_anon_1.dmabuf = &raw const kernel;
        if version >= fi_version(1, 20) {
            refused(&dmabuf, FI_MR_DMABUF, -FI_ENOSYS, "soft0 has no such call");
            let wrong = fi_mr_dmabuf { fd: -1, ..kernel };
            dmabuf.__bindgen_anon_1.dmabuf = &raw const wrong;
            refused(&dmabuf, FI_MR_DMABUF, -libc::EBADF, "no descriptor");
            let wrong = fi_mr_dmabuf {
                offset: 8,
                base_addr: std::ptr::without_provenance_mut(usize::MAX - 4),
                ..kernel
            };
            dmabuf.__bindgen_anon_1.dmabuf = &raw const wrong;
            refused(&dmabuf, FI_MR_DMABUF, INVALID, "addresses that overflow");
            dmabuf.__bindgen_anon_1.dmabuf = null();
            refused(&dmabuf, FI_MR_DMABUF, INVALID, "NULL");
        } else {
            refused(&dmabuf, FI_MR_DMABUF, FLAGS, "there was no such flag");
        }
        libc::close(fd);
        // since 2.0
        let paged = |page_size: usize| fi_mr_attr { page_size, ..plain };
        accepted(&paged(4096), 0);
        let base = register(domain, &plain, 0).expect("a region");
        let part = |offset: usize, len: usize| libc::iovec {
            iov_base: iov[0].iov_base.byte_add(offset),
            iov_len: len,
        };
        let of = |iov: &libc::iovec, base: *mut fid_mr| {
            let mut attr = plain;
            attr.__bindgen_anon_1.mr_iov = iov;
            attr.base_mr = base;
            attr.sub_mr_cnt = 1;
            attr
        };
        let inside = part(64, 128);
        let sub = register(domain, &of(&inside, base), 0).expect("a part");
        if version >= fi_version(2, 0) {
            refused(&paged(4097), 0, INVALID, "no page has this size");
            assert_eq!(close(base), BUSY, "it has a part");
            // "inherited from the base MR, and as a result, are ignored when creating the sub-MR:
            // iface, device, hmem_data, page_size" (fi_mr(3), base_mr)
            let mut strange = of(&inside, sub);
            strange.iface = 77;
            strange.page_size = 4097;
            strange.hmem_data = (&raw mut memory).cast();
            let below = register(domain, &strange, 0).expect("a part of a part");
            assert_eq!(close(sub), BUSY);
            assert_eq!(close(below), 0);
            refused(&of(&part(0, 64), sub), 0, INVALID, "not inside");
            refused(&of(&part(4000, 97), base), 0, INVALID, "beyond the end");
            refused(&of(&inside, domain.cast()), 0, INVALID, "no region");
            adjacent(domain, &register, &plain);
            let foreign = register(other, &plain, 0).expect("a region");
            refused(&of(&inside, foreign), 0, INVALID, "another domain's");
            assert_eq!(close(foreign), 0);
            let mut both = dmabuf;
            both.__bindgen_anon_1.dmabuf = &raw const kernel;
            both.base_mr = base;
            refused(&both, FI_MR_DMABUF, INVALID, "both at once");
            assert_eq!(close(sub), 0);
            assert_eq!(close(base), 0);
        } else {
            accepted(&paged(4097), 0);
            assert_eq!(close(base), 0, "there were no parts");
            assert_eq!(close(sub), 0);
        }
        for domain in [domain, other] {
            assert_eq!(close(domain), 0);
        }
        assert_eq!(close(fabric), 0);
    }
}

/// "The sub-MR must be fully contained within the base MR" (fi_mr(3), base_mr): a part may span
/// consecutive buffers of its base whose addresses are adjacent.
unsafe fn adjacent(
    domain: *mut fid_domain,
    register: &impl Fn(*mut fid_domain, &fi_mr_attr, u64) -> Result<*mut fid_mr, i32>,
    plain: &fi_mr_attr,
) {
    let mut memory = vec![0_u8; 4096];
    let at = memory.as_mut_ptr();
    let of = |base: *mut fid_mr, buffers: &[(usize, usize)]| {
        let list: Vec<_> = buffers
            .iter()
            .map(|(offset, len)| libc::iovec {
                iov_base: at.wrapping_add(*offset).cast(),
                iov_len: *len,
            })
            .collect();
        let mut attr = *plain;
        attr.__bindgen_anon_1.mr_iov = list.as_ptr();
        attr.iov_count = list.len();
        attr.base_mr = base;
        register(domain, &attr, 0)
    };
    // three adjacent buffers in another order, and one apart
    let buffers = [(1000, 500), (0, 1000), (1500, 500), (3000, 100)];
    let base = of(null_mut(), &buffers).expect("a base");
    for inside in [(0, 2000), (999, 2), (500, 1100), (1499, 501), (3000, 100)] {
        let part = of(base, &[inside]).unwrap_or_else(|errno| panic!("{inside:?}: {errno}"));
        // SAFETY: registered above.
        assert_eq!(unsafe { close(part) }, 0);
    }
    let part = of(base, &[(900, 200), (1400, 200)]).expect("two buffers");
    // SAFETY: as above.
    assert_eq!(unsafe { close(part) }, 0);
    for outside in [(0, 2001), (1999, 2), (1500, 1600), (2999, 2), (3050, 51)] {
        assert_eq!(of(base, &[outside]).err(), Some(INVALID), "{outside:?}");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { close(base) }, 0);
}

/// Persistent memory, and the flag of durable writes.
fn persistent(lib: &Lib) {
    assert_eq!(forms(lib, BASIC, FI_MSG | FI_RMA_PMEM), [], "only with RMA");
    let caps = FI_MSG | FI_RMA | FI_RMA_PMEM;
    for (_, caps) in forms(lib, BASIC, caps) {
        assert_ne!(caps & FI_RMA_PMEM, 0);
    }
    for (_, caps) in forms(lib, BASIC, FI_MSG | FI_RMA) {
        assert_eq!(caps & FI_RMA_PMEM, 0, "only where it was asked for");
    }
    for (caps, answer) in [(caps, 0), (FI_MSG | FI_RMA, -FI_ENODATA)] {
        let hints = asking(lib, BASIC, caps);
        // SAFETY: hints have all their parts.
        unsafe { (*(*hints.first()).tx_attr).op_flags = FI_COMMIT_COMPLETE };
        let node = Some("127.0.0.1");
        let list = getinfo(lib, lib.version, node, None, FI_SOURCE, Some(&hints));
        assert_eq!(list.map_or_else(|errno| errno, |_| 0), answer);
    }
    let mut memory = [0_u8; 64];
    for (caps, registered, set) in [
        (caps, INVALID, 0), // there is no disk behind it
        (FI_MSG | FI_RMA, FLAGS, FLAGS),
    ] {
        let setup = open(lib, BASIC, caps);
        // SAFETY: fids as they are opened; nothing is registered.
        unsafe {
            let refused = reg(&setup, &mut memory, FI_RMA_PMEM).err();
            assert_eq!(refused, Some(registered));
            let ep = open_ep(&setup, setup.info.first());
            let mut flags = FI_TRANSMIT | FI_COMMIT_COMPLETE;
            assert_eq!(control(ep, FI_SETOPSFLAG, (&raw mut flags).cast()), set);
            assert_eq!(close(ep), 0);
        }
        setup.close();
    }
}

/// Keys that the application chooses.
fn keys(lib: &Lib) {
    let setup = open(lib, FI_MR_LOCAL | FI_MR_ALLOCATED, FI_MSG | FI_RMA);
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its regions.
    unsafe {
        let domain = setup.domain;
        let buf = memory.as_mut_ptr().cast();
        let with = |key: u64, access: u64| {
            let mut mr: *mut fid_mr = null_mut();
            let (fid, out) = (&raw mut (*domain).fid, &raw mut mr);
            let reg = (*(*domain).mr).reg.expect("a slot");
            let ret = reg(fid, buf, 64, access, 0, key, 0, out, null_mut());
            if ret == 0 { Ok(mr) } else { Err(ret) }
        };
        for key in [0, 1, u64::from(u32::MAX) + 1, 0xfffc << 48 | 7] {
            let mr = with(key, REMOTE).expect("a region");
            assert_eq!((*mr).key, key);
            assert_eq!(with(key, FI_REMOTE_READ).err(), Some(-FI_ENOKEY), "in use");
            // a region without remote access needs no key
            let local = with(key, FI_SEND | FI_RECV).expect("a region");
            assert_eq!((*local).key, key);
            assert_eq!(close(local), 0);
            assert_eq!(close(mr), 0);
            let again = with(key, REMOTE).expect("free again");
            assert_eq!(close(again), 0);
        }
        for key in [0xfffd << 48, 0xfffe << 48 | 1, FI_KEY_NOTAVAIL] {
            let refused = with(key, REMOTE).err();
            assert_eq!(refused, Some(-FI_EKEYREJECTED), "{key:#x}");
            let local = with(key, FI_SEND).expect("its key is not looked at");
            assert_eq!(close(local), 0);
        }
    }
    setup.close();
}
