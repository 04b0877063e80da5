//! Macros of the headers that the generator can't evaluate (casts, pragmas, functions), values that
//! later releases removed but applications still pass, and values newer than the bound headers.

/// `FI_VERSION(major, minor)`.
#[must_use]
pub const fn fi_version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

/// `FI_MAJOR(version)`.
#[must_use]
pub const fn fi_major(version: u32) -> u32 {
    version >> 16
}

/// `FI_MINOR(version)`.
#[must_use]
pub const fn fi_minor(version: u32) -> u32 {
    version & 0xffff
}

/// No address given.
pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
/// The source of a message is not known.
pub const FI_ADDR_NOTAVAIL: u64 = u64::MAX;
/// A memory region has no key (yet), or none that fits 64 bits.
pub const FI_KEY_NOTAVAIL: u64 = u64::MAX;
/// `tx_ctx_cnt`, `rx_ctx_cnt`: a shared context.
pub const FI_SHARED_CONTEXT: usize = usize::MAX;
/// `max_ep_auth_key`: one key for each address vector entry.
pub const FI_AV_AUTH_KEY: usize = usize::MAX;

/// The registration mode of an application that specifies none (before API 1.5).
pub const FI_MR_UNSPEC: i32 = 0;
/// The pre-1.5 mode whose keys and addresses are the provider's.
pub const FI_MR_BASIC: i32 = 1;
/// The pre-1.5 mode whose keys and addresses are the application's.
pub const FI_MR_SCALABLE: i32 = 2;
/// The pre-1.5 mode bit of `fi_info.mode` for local registration.
pub const FI_LOCAL_MR: u64 = 1 << 55;
/// Flag of an event queue binding to a domain: registration completes through the queue.
pub const FI_REG_MR: u64 = 1 << 59;

/// `mem_tag_format`: any mask (fi_endpoint(3)).
pub const FI_TAG_GENERIC: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// `FI_ORDER_NONE`.
pub const FI_ORDER_NONE: u64 = 0;
/// Every order between messages, RMA and atomics.
pub const FI_ORDER_STRICT: u64 = 0x1ff;
/// `comp_order`: data is placed in order.
pub const FI_ORDER_DATA: u64 = 1 << 16;

/// A `getinfo` flag of releases after 2.1: look for devices again.
pub const FI_RESCAN: u64 = 1 << 35;
/// An address format of releases after 2.1: IPv4 or IPv6.
pub const FI_SOCKADDR_IP: u32 = 17;

/// Bit of `fid_nic`'s and `fi_control`'s names that are specific to a provider.
pub const FI_PROV_SPECIFIC: u32 = 1 << 31;
