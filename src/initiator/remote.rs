//! The remote memory of an operation, as C passes it.

/// A range of the peer's memory (`struct fi_rma_iov`, same layout).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RemoteIov {
    /// Address in the addressing mode of the region: virtual, or an offset.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// The region's key.
    pub key: u64,
}
