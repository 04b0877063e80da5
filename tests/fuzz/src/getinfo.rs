//! Hints with arbitrary fields, as applications may set them.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use libfabric_sys::*;

struct Host {
    dupinfo: unsafe extern "C" fn(*const fi_info) -> *mut fi_info,
    freeinfo: unsafe extern "C" fn(*mut fi_info),
    provider: &'static fi_provider,
}

// SAFETY: written once by the provider, then only read.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        // SAFETY: the system's libfabric, and its functions with the signatures of fabric.h.
        unsafe {
            let flags = libc::RTLD_NOW | libc::RTLD_GLOBAL;
            let lib = libc::dlopen(c"libfabric.so.1".as_ptr(), flags);
            assert!(!lib.is_null(), "no libfabric");
            let symbol = |name: &CStr| {
                let address = libc::dlsym(lib, name.as_ptr());
                assert!(!address.is_null());
                address
            };
            let provider = weft_fi::exports::fi_prov_ini();
            Host {
                dupinfo: std::mem::transmute::<*mut c_void, _>(symbol(c"fi_dupinfo")),
                freeinfo: std::mem::transmute::<*mut c_void, _>(symbol(c"fi_freeinfo")),
                provider: provider.as_ref().expect("a provider"),
            }
        }
    })
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        head
    }
    fn u8(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }
    fn u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.bytes(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }
    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::from(self.u8()) % list.len()]
    }
    /// Known bits, and possibly an unknown one.
    fn bits(&mut self, known: &[u64]) -> u64 {
        let mut bits = 0;
        for _ in 0..self.u8() % 5 {
            bits |= self.pick(known);
        }
        if self.u8() > 240 {
            bits ^ 1 << (self.u8() % 64)
        } else {
            bits
        }
    }
    fn size(&mut self) -> usize {
        match self.u8() % 6 {
            0..=2 => 0,
            3 => usize::from(self.u8()),
            4 => 1 << (self.u8() % 64),
            _ => self.u64() as usize,
        }
    }
    /// A C string on the C library's heap, which `fi_freeinfo` frees.
    fn name(&mut self, known: &[&str]) -> *mut c_char {
        let text = match self.u8() % 8 {
            0 => {
                let len = usize::from(self.u8() % 40);
                let bytes = self
                    .bytes(len)
                    .iter()
                    .copied()
                    .filter(|b| *b != 0)
                    .collect::<Vec<_>>();
                CString::new(bytes).unwrap_or_default()
            }
            1..=3 => CString::new(self.pick(known)).unwrap_or_default(),
            _ => return null_mut(),
        };
        // SAFETY: a C string.
        unsafe { libc::strdup(text.as_ptr()) }
    }
    /// Bytes of exactly the length that is passed with them.
    fn address(&mut self) -> (*mut c_void, usize) {
        if self.u8() < 150 {
            return (null_mut(), 0);
        }
        let family = self.pick(&[libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, 0, 77]) as u16;
        let len = usize::from(self.pick(&[0u8, 1, 2, 8, 15, 16, 17, 27, 28, 29, 64]));
        let mut bytes = family.to_ne_bytes().to_vec();
        bytes.extend(self.bytes(62));
        bytes.resize(64, 0);
        if self.u8() < 200 {
            // 127.0.0.1 after the port, as in a sockaddr_in
            bytes[4..8].copy_from_slice(&[127, 0, 0, 1]);
        }
        // without a length, the format or a C string determines it
        let there = if len == 0 { bytes.len() } else { len };
        bytes[63] = 0;
        // SAFETY: that many bytes are written into as many.
        unsafe {
            let to = libc::malloc(there);
            to.cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), there);
            (to, len)
        }
    }
}

const CAPS: [u64; 18] = [
    FI_MSG,
    FI_RMA,
    FI_TAGGED,
    FI_ATOMIC,
    FI_SEND,
    FI_RECV,
    FI_READ,
    FI_WRITE,
    FI_REMOTE_READ,
    FI_REMOTE_WRITE,
    FI_MULTI_RECV,
    FI_LOCAL_COMM,
    FI_REMOTE_COMM,
    FI_RMA_EVENT,
    FI_SOURCE,
    FI_DIRECTED_RECV,
    FI_HMEM,
    FI_FENCE,
];

/// The answer contains nothing that the hints do not request, and the hints are unchanged.
pub fn getinfo(data: &[u8]) {
    let host = host();
    let mut input = Input(data);
    let version = input.pick(&[
        fi_version(1, 0),
        fi_version(1, 4),
        fi_version(1, 5),
        fi_version(1, 8),
        fi_version(1, 17),
    ]);
    // SAFETY: dupinfo of NULL allocates all parts, of this libfabric's sizes.
    let hints = unsafe { (host.dupinfo)(std::ptr::null()) };
    // SAFETY: live, and nobody else's.
    let info = unsafe { &mut *hints };
    fill(&mut input, info);
    if input.u8() > 230 {
        drop_part(&mut input, info);
    }
    let with_hints = input.u8() > 10;
    let offered = info_mr_mode(hints);
    // a direction has a meaning only with a capability that it restricts (fi_getinfo(3))
    let mut caps = info.caps;
    if caps & (FI_MSG | FI_TAGGED) == 0 {
        caps &= !(FI_SEND | FI_RECV);
    }
    if caps & (FI_RMA | FI_ATOMIC) == 0 {
        caps &= !(FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE);
    }
    let node = input.pick(&[
        None,
        Some(c"127.0.0.1"),
        Some(c"::1"),
        Some(c"0.0.0.0"),
        Some(c""),
        Some(c"256.1.1.1"),
        Some(c"10.1.2.3"),
    ]);
    let service = input.pick(&[
        None,
        Some(c"0"),
        Some(c"7471"),
        Some(c"99999"),
        Some(c"-1"),
        Some(c""),
    ]);
    // otherwise names would be resolved over the network
    let flags = input.bits(&[0, FI_SOURCE, FI_PROV_ATTR_ONLY]) | FI_NUMERICHOST;
    let mut found: *mut fi_info = null_mut();
    // SAFETY: all pointers are NULL or live.
    let ret = unsafe {
        host.provider.getinfo.expect("a getinfo")(
            version,
            node.map_or(std::ptr::null(), CStr::as_ptr),
            service.map_or(std::ptr::null(), CStr::as_ptr),
            flags,
            if with_hints { hints } else { std::ptr::null() },
            &raw mut found,
        )
    };
    assert!(ret <= 0, "{ret}");
    assert_eq!(ret == 0, !found.is_null());
    let mut next = found;
    // SAFETY: a list of live entries, each with all of its parts.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: as above.
        let (domain, fabric) = unsafe { (&*entry.domain_attr, &*entry.fabric_attr) };
        // this flag requests only the provider's name
        let whole = flags & FI_PROV_ATTR_ONLY == 0;
        assert!(!whole || !domain.name.is_null() && !fabric.name.is_null());
        if with_hints && whole {
            if let (Some(offered), true) = (offered, version >= fi_version(1, 5)) {
                assert_eq!(
                    domain.mr_mode & !offered,
                    0,
                    "{:#x} of {offered:#x}",
                    domain.mr_mode
                );
            }
            assert_eq!(caps & !entry.caps, 0, "{:#x} of {caps:#x}", entry.caps);
        }
        next = entry.next;
    }
    // SAFETY: both are of this libfabric, and live or NULL.
    unsafe {
        if !found.is_null() {
            (host.freeinfo)(found);
        }
        (host.freeinfo)(hints);
    }
}

fn info_mr_mode(info: *const fi_info) -> Option<i32> {
    // SAFETY: live, its parts live or NULL.
    unsafe { (*info).domain_attr.as_ref() }.map(|domain| domain.mr_mode)
}

fn fill(input: &mut Input<'_>, info: &mut fi_info) {
    info.caps = input.bits(&CAPS);
    info.mode = if input.u8() < 100 {
        !0
    } else {
        input.bits(&[FI_CONTEXT, FI_LOCAL_MR, FI_RX_CQ_DATA, FI_MSG_PREFIX])
    };
    info.addr_format = input.pick(&[
        FI_FORMAT_UNSPEC,
        FI_SOCKADDR,
        FI_SOCKADDR_IN,
        FI_SOCKADDR_IN6,
        FI_ADDR_STR,
        FI_SOCKADDR_IB,
        77,
    ]);
    (info.src_addr, info.src_addrlen) = input.address();
    (info.dest_addr, info.dest_addrlen) = input.address();
    // SAFETY: dupinfo made all parts.
    let (tx, rx, ep, domain, fabric) = unsafe {
        (
            &mut *info.tx_attr,
            &mut *info.rx_attr,
            &mut *info.ep_attr,
            &mut *info.domain_attr,
            &mut *info.fabric_attr,
        )
    };
    if input.u8() > 60 {
        ep.type_ = input.pick(&[FI_EP_UNSPEC, FI_EP_MSG, FI_EP_RDM, FI_EP_DGRAM, 99]);
        ep.protocol = input.pick(&[0, 1, 2, 3, 77]);
        ep.max_msg_size = input.size();
        ep.msg_prefix_size = input.size();
        ep.tx_ctx_cnt = input.size();
        ep.rx_ctx_cnt = input.size();
        ep.auth_key_size = 0;
    } else {
        ep.type_ = FI_EP_MSG;
    }
    if input.u8() > 100 {
        tx.caps = input.bits(&CAPS);
        tx.op_flags = input.bits(&[
            FI_COMPLETION,
            FI_INJECT,
            FI_INJECT_COMPLETE,
            FI_TRANSMIT_COMPLETE,
            FI_DELIVERY_COMPLETE,
        ]);
        tx.msg_order = input.u64() & input.u64();
        tx.inject_size = input.size();
        tx.size = input.size();
        tx.iov_limit = input.size();
        tx.rma_iov_limit = input.size();
        rx.caps = input.bits(&CAPS);
        rx.op_flags = input.bits(&[FI_COMPLETION, FI_MULTI_RECV]);
        rx.size = input.size();
        rx.iov_limit = input.size();
    }
    domain.mr_mode = match input.u8() % 4 {
        0 => FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL,
        1 => !0 & !(FI_MR_BASIC | FI_MR_SCALABLE),
        _ => (input.u64() & 0xfff) as i32,
    };
    if input.u8() > 128 {
        domain.threading = (input.u8() % 9).into();
        domain.control_progress = (input.u8() % 5).into();
        domain.__bindgen_anon_1.data_progress = (input.u8() % 5).into();
        domain.resource_mgmt = (input.u8() % 5).into();
        domain.av_type = (input.u8() % 5).into();
        domain.mr_key_size = input.size();
        domain.cq_data_size = input.size();
        domain.cq_cnt = input.size();
        domain.ep_cnt = input.size();
        domain.mr_cnt = input.size();
        domain.caps = input.bits(&CAPS);
        domain.mode = input.bits(&[FI_CONTEXT, FI_LOCAL_MR]);
    }
    domain.name = input.name(&["soft0", "soft", "rxe0"]);
    fabric.name = input.name(&["softverbs", "verbs"]);
    fabric.prov_name = input.name(&["weft", "tcp", "weft;ofi_rxm"]);
}

/// An application may omit whole parts.
fn drop_part(input: &mut Input<'_>, info: &mut fi_info) {
    // SAFETY: each is NULL or of the C library's heap, and so is the name in it.
    unsafe {
        match input.u8() % 5 {
            0 => {
                libc::free(info.tx_attr.cast());
                info.tx_attr = null_mut();
            }
            1 => {
                libc::free(info.rx_attr.cast());
                info.rx_attr = null_mut();
            }
            2 => {
                libc::free(info.ep_attr.cast());
                info.ep_attr = null_mut();
            }
            3 => {
                libc::free((*info.domain_attr).name.cast());
                libc::free(info.domain_attr.cast());
                info.domain_attr = null_mut();
            }
            _ => {
                libc::free((*info.fabric_attr).name.cast());
                libc::free((*info.fabric_attr).prov_name.cast());
                libc::free(info.fabric_attr.cast());
                info.fabric_attr = null_mut();
            }
        }
    }
}
