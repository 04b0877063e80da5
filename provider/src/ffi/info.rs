//! `fi_info` in safe Rust: a [`View`] reads an `fi_info` that the application or the host owns, an
//! [`Info`] is an `fi_info` that this provider builds.
//!
//! Structures that grew between releases are read and written only up to the size that they have in
//! every release since 1.17. No reference covers them: they are copied.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::ops::Deref;

use libfabric_sys::layout::domain_attr_size;
use libfabric_sys::*;
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};

use crate::addr::Format;
use crate::ffi::nic::{self, Nic};
use crate::ffi::{alloc, host};

/// A structure of an `fi_info`.
///
/// # Safety
/// Its fields are integers and pointers, so that every content is a value. `OLDEST` is not more
/// than its size in any release.
pub(crate) unsafe trait Part: Copy {
    /// Bytes that every release since 1.17 has.
    const OLDEST: usize = size_of::<Self>();

    /// Gives the pointers the values that they have in `old`.
    fn keep_pointers(&mut self, old: &Self);
}

// SAFETY: integers and pointers; the size is asserted in `libfabric_sys::layout`.
unsafe impl Part for fi_info {
    fn keep_pointers(&mut self, old: &Self) {
        *self = Self {
            caps: self.caps,
            mode: self.mode,
            addr_format: self.addr_format,
            ..*old
        };
    }
}

// SAFETY: integers and pointers; the size is asserted in `libfabric_sys::layout`.
unsafe impl Part for fi_tx_attr {
    fn keep_pointers(&mut self, _: &Self) {} // no pointers
}

// SAFETY: integers and pointers; the size is asserted in `libfabric_sys::layout`.
unsafe impl Part for fi_rx_attr {
    fn keep_pointers(&mut self, _: &Self) {} // no pointers
}

// SAFETY: integers and pointers, asserted in `libfabric_sys::layout`; libfabric's main branch only
// appends fields.
unsafe impl Part for fi_ep_attr {
    fn keep_pointers(&mut self, old: &Self) {
        self.auth_key = old.auth_key;
        self.auth_key_size = old.auth_key_size;
    }
}

// SAFETY: integers and pointers; `OLDEST` is the size in release 1.17.
unsafe impl Part for fi_domain_attr {
    const OLDEST: usize = domain_attr_size(fi_version(1, 17), false);

    fn keep_pointers(&mut self, old: &Self) {
        self.domain = old.domain;
        self.name = old.name;
        self.auth_key = old.auth_key;
        self.auth_key_size = old.auth_key_size;
    }
}

// SAFETY: integers and pointers; the size is asserted in `libfabric_sys::layout`.
unsafe impl Part for fi_fabric_attr {
    fn keep_pointers(&mut self, old: &Self) {
        self.fabric = old.fabric;
        self.name = old.name;
        self.prov_name = old.prov_name;
    }
}

/// A copy of the first `OLDEST` bytes of a structure; the fields beyond them are zeros.
///
/// # Safety
/// `part` is readable in the size that it has in a release since 1.17.
unsafe fn copy<T: Part>(part: *const T) -> T {
    // SAFETY: readable by the caller's promise, as no release has less.
    unsafe { copy_bytes(part, T::OLDEST) }
}

/// A copy of the first `size` bytes of a structure, at most the whole; the fields beyond them are
/// zeros.
///
/// # Safety
/// `part` is readable in that size.
unsafe fn copy_bytes<T: Part>(part: *const T, size: usize) -> T {
    const { assert!(T::OLDEST <= size_of::<T>()) };
    let size = size.min(size_of::<T>());
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: readable by the caller's promise; the copy has at least that size. Zeros and the
    // copied bytes make a value, by the contract of `Part`.
    unsafe {
        std::ptr::copy_nonoverlapping(part.cast::<u8>(), copy.as_mut_ptr().cast(), size);
        copy.assume_init()
    }
}

/// A structure of an `fi_info`, for reading: its integers are fields, and methods read the objects
/// to which its pointers point.
///
/// The caller of [`View::new`] promises that all pointers of the `fi_info` are NULL or valid for
/// `'a`, by the contract of fi_getinfo(3). The views of its parts rely on this promise.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    part: T,
    memory: PhantomData<&'a T>,
}

impl<T> Deref for View<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.part
    }
}

impl<'a, T: Part> View<'a, T> {
    /// `None` for NULL.
    ///
    /// # Safety
    /// `part` is NULL or a valid structure of the host's release, as are its pointers, for `'a`.
    pub(crate) unsafe fn new(part: *const T) -> Option<Self> {
        if part.is_null() {
            return None;
        }
        Some(Self {
            // SAFETY: the caller passes NULL or a valid part of the host's release.
            part: unsafe { copy(part) },
            memory: PhantomData,
        })
    }

    /// A structure to which this structure points.
    fn part<P: Part>(&self, part: *const P) -> Option<View<'a, P>> {
        // SAFETY: a pointer of this structure, by the promise of `new`.
        unsafe { View::new(part) }
    }

    /// A string that this part points to.
    fn text(&self, text: *const c_char) -> Option<&'a CStr> {
        if text.is_null() {
            return None;
        }
        // SAFETY: not NULL, and a C string by the promise of `new`.
        Some(unsafe { CStr::from_ptr(text) })
    }

    /// An address that this part points to.
    fn address(
        &self,
        format: Format,
        addr: *const c_void,
        len: usize,
    ) -> Result<Option<SocketAddr>> {
        if addr.is_null() {
            return Ok(None);
        }
        // SAFETY: an address of `len` bytes by the promise of `new`; if `len` is 0, of the length
        // of its format.
        unsafe { format.read(addr, (len != 0).then_some(len)) }.map(Some)
    }

    /// An authorization key that this part points to.
    fn key(&self, key: *const u8, size: usize) -> Result<Option<AuthKey>> {
        // SAFETY: `size` bytes by the promise of `new`.
        unsafe { alloc::auth_key(key, size) }
    }
}

impl<'a> View<'a, fi_info> {
    /// `src_addr`, which has this format.
    ///
    /// # Errors
    /// `EINVAL`: not an address of the format.
    pub(crate) fn src(&self, format: Format) -> Result<Option<SocketAddr>> {
        self.address(format, self.src_addr, self.src_addrlen)
    }

    /// `dest_addr`, which has this format.
    ///
    /// # Errors
    /// `EINVAL`: not an address of the format.
    pub(crate) fn dst(&self, format: Format) -> Result<Option<SocketAddr>> {
        self.address(format, self.dest_addr, self.dest_addrlen)
    }

    pub(crate) fn tx(&self) -> Option<View<'a, fi_tx_attr>> {
        self.part(self.tx_attr)
    }

    pub(crate) fn rx(&self) -> Option<View<'a, fi_rx_attr>> {
        self.part(self.rx_attr)
    }

    pub(crate) fn ep(&self) -> Option<View<'a, fi_ep_attr>> {
        self.part(self.ep_attr)
    }

    pub(crate) fn domain(&self) -> Option<View<'a, fi_domain_attr>> {
        self.part(self.domain_attr)
    }

    /// As [`Self::domain`], with the fields that the host's release has beyond those of 1.17.
    ///
    /// # Safety
    /// These are the hints of a call that the host has passed to `getinfo`: it converts those of
    /// programs that were built with an earlier release (`abi_1_0.c`), unlike the `fi_info` of
    /// other calls.
    pub(crate) unsafe fn whole_domain(&self) -> Option<View<'a, fi_domain_attr>> {
        let version = host::get().map_or(fi_version(1, 17), |host| host.version);
        (!self.domain_attr.is_null()).then(|| View {
            // SAFETY: not NULL, valid by the promise of `new`, and of the size of the host's
            // release by the caller's promise.
            part: unsafe { copy_bytes(self.domain_attr, domain_attr_size(version, false)) },
            memory: PhantomData,
        })
    }

    pub(crate) fn fabric(&self) -> Option<View<'a, fi_fabric_attr>> {
        self.part(self.fabric_attr)
    }

    /// `nic->device_attr->name`
    pub(crate) fn nic_name(&self) -> Option<&'a CStr> {
        if self.nic.is_null() {
            return None;
        }
        // SAFETY: not NULL, and a nic by the promise of `new`, whose attributes are NULL or valid.
        let device = unsafe { (*self.nic).device_attr };
        if device.is_null() {
            return None;
        }
        // SAFETY: not NULL, and valid by the promise of `new`.
        self.text(unsafe { (*device).name })
    }
}

impl<'a> View<'a, fi_ep_attr> {
    /// # Errors
    /// `EINVAL`: NULL with a size, or too long.
    pub(crate) fn auth_key(&self) -> Result<Option<AuthKey>> {
        self.key(self.part.auth_key, self.auth_key_size)
    }
}

impl<'a> View<'a, fi_domain_attr> {
    pub(crate) fn name(&self) -> Option<&'a CStr> {
        self.text(self.part.name)
    }

    /// # Errors
    /// `EINVAL`: NULL with a size, or too long.
    pub(crate) fn auth_key(&self) -> Result<Option<AuthKey>> {
        self.key(self.part.auth_key, self.auth_key_size)
    }

    pub(crate) fn data_progress(&self) -> fi_progress {
        // SAFETY: both names of this field, from before 2.0 and since, are an `fi_progress`.
        unsafe { self.__bindgen_anon_1.data_progress }
    }
}

impl<'a> View<'a, fi_fabric_attr> {
    pub(crate) fn name(&self) -> Option<&'a CStr> {
        self.text(self.part.name)
    }

    /// `prov_name`
    pub(crate) fn provider(&self) -> Option<&'a CStr> {
        self.text(self.prov_name)
    }
}

/// An `fi_info` that this provider owns. The host allocates it with all its parts, and frees it
/// when it is dropped. Its pointers are NULL or in C's heap.
pub(crate) struct Info(*mut fi_info);

// SAFETY: an fi_info is plain memory, and every change of it takes `&mut`.
unsafe impl Send for Info {}
// SAFETY: shared references only read the plain memory; every change takes `&mut`.
unsafe impl Sync for Info {}

impl Info {
    /// An empty `fi_info`, with all attribute structures in the sizes of the host's release.
    ///
    /// # Errors
    /// `ENOMEM`: no memory. `ENOSYS`: there is no host.
    pub(crate) fn new() -> Result<Self> {
        let host = host::get().ok_or(FiErrno::ENOSYS)?;
        // SAFETY: NULL requests an empty structure.
        let new = unsafe { (host.dupinfo)(std::ptr::null()) };
        if new.is_null() {
            return Err(FiErrno::ENOMEM);
        }
        Ok(Self(new))
    }

    fn head(&self) -> fi_info {
        // SAFETY: made by the host and owned by `self`.
        unsafe { copy(self.0) }
    }

    /// Passes the ownership to the caller.
    pub(crate) fn into_raw(self) -> *mut fi_info {
        let info = self.0;
        std::mem::forget(self);
        info
    }

    /// Links the infos to a list and passes the ownership to the caller. Returns the first one, or
    /// NULL for an empty list.
    pub(crate) fn into_list(list: Vec<Self>) -> *mut fi_info {
        let mut first: *mut fi_info = std::ptr::null_mut();
        for info in list.into_iter().rev() {
            let info = info.into_raw();
            // SAFETY: made by the host, and owned by this function until it returns.
            unsafe { (*info).next = first };
            first = info;
        }
        first
    }

    /// Changes a part; does nothing if the part is NULL.
    fn write<T: Part>(&mut self, part: *mut T, change: impl FnOnce(&mut T)) {
        if part.is_null() {
            return;
        }
        // SAFETY: all callers pass this info or a part of it.
        let mut new = unsafe { copy(part) };
        change(&mut new);
        // SAFETY: all callers pass this info or a part of it, which has at least its oldest size.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const new).cast::<u8>(), part.cast(), T::OLDEST);
        }
    }

    /// Changes the integers of a part; pointers keep their values.
    fn change<T: Part>(&mut self, part: *mut T, change: impl FnOnce(&mut T)) {
        self.write(part, |part| {
            let old = *part;
            change(part);
            part.keep_pointers(&old);
        });
    }

    pub(crate) fn set(&mut self, change: impl FnOnce(&mut fi_info)) {
        self.change(self.0, change);
    }

    pub(crate) fn set_tx(&mut self, change: impl FnOnce(&mut fi_tx_attr)) {
        self.change(self.head().tx_attr, change);
    }

    pub(crate) fn set_rx(&mut self, change: impl FnOnce(&mut fi_rx_attr)) {
        self.change(self.head().rx_attr, change);
    }

    pub(crate) fn set_ep(&mut self, change: impl FnOnce(&mut fi_ep_attr)) {
        self.change(self.head().ep_attr, change);
    }

    pub(crate) fn set_domain(&mut self, change: impl FnOnce(&mut fi_domain_attr)) {
        self.change(self.head().domain_attr, change);
    }

    pub(crate) fn set_fabric(&mut self, change: impl FnOnce(&mut fi_fabric_attr)) {
        self.change(self.head().fabric_attr, change);
    }

    /// Sets `handle` to a fid, by its address; 0 is NULL. The host does not use it.
    pub(crate) fn set_handle(&mut self, handle: usize) {
        self.write(self.0, |info| {
            info.handle = std::ptr::with_exposed_provenance_mut(handle);
        });
    }

    /// Sets `fabric_attr->fabric`, as [`Self::set_handle`].
    pub(crate) fn set_fabric_handle(&mut self, handle: usize) {
        self.write(self.head().fabric_attr, |fabric| {
            fabric.fabric = std::ptr::with_exposed_provenance_mut(handle);
        });
    }

    /// Sets `domain_attr->domain`, as [`Self::set_handle`].
    pub(crate) fn set_domain_handle(&mut self, handle: usize) {
        self.write(self.head().domain_attr, |domain| {
            domain.domain = std::ptr::with_exposed_provenance_mut(handle);
        });
    }

    /// Sets `src_addr`; `None` removes it.
    ///
    /// # Errors
    /// `ENOMEM`: no memory, as for the setters below.
    pub(crate) fn set_src(&mut self, addr: Option<&[u8]>) -> Result<()> {
        let new = addr.map_or(Ok(std::ptr::null_mut()), alloc::bytes)?;
        self.write(self.0, |info| {
            replace(&mut info.src_addr, new);
            info.src_addrlen = addr.map_or(0, <[u8]>::len);
        });
        Ok(())
    }

    /// Sets `dest_addr`; `None` removes it.
    pub(crate) fn set_dst(&mut self, addr: Option<&[u8]>) -> Result<()> {
        let new = addr.map_or(Ok(std::ptr::null_mut()), alloc::bytes)?;
        self.write(self.0, |info| {
            replace(&mut info.dest_addr, new);
            info.dest_addrlen = addr.map_or(0, <[u8]>::len);
        });
        Ok(())
    }

    /// Sets `nic` of an info that has none. The host closes it with the info.
    pub(crate) fn set_nic(&mut self, nic: &Nic) -> Result<()> {
        let new = nic::create(nic)?;
        self.write(self.0, |info| info.nic = new);
        Ok(())
    }

    /// Sets `ep_attr->auth_key`.
    pub(crate) fn set_ep_key(&mut self, key: &AuthKey) -> Result<()> {
        let new = alloc::bytes(key.bytes())?.cast();
        self.write(self.head().ep_attr, |ep| {
            replace(&mut ep.auth_key, new);
            ep.auth_key_size = key.bytes().len();
        });
        Ok(())
    }

    /// Sets `domain_attr->auth_key`.
    pub(crate) fn set_domain_key(&mut self, key: &AuthKey) -> Result<()> {
        let new = alloc::bytes(key.bytes())?.cast();
        self.write(self.head().domain_attr, |domain| {
            replace(&mut domain.auth_key, new);
            domain.auth_key_size = key.bytes().len();
        });
        Ok(())
    }

    /// Sets `domain_attr->name`.
    pub(crate) fn set_domain_name(&mut self, name: &str) -> Result<()> {
        let new = alloc::string(name)?;
        self.write(self.head().domain_attr, |domain| {
            replace(&mut domain.name, new)
        });
        Ok(())
    }

    /// Sets `fabric_attr->name`.
    pub(crate) fn set_fabric_name(&mut self, name: &str) -> Result<()> {
        let new = alloc::string(name)?;
        self.write(self.head().fabric_attr, |fabric| {
            replace(&mut fabric.name, new)
        });
        Ok(())
    }

    /// Sets `fabric_attr->prov_name`.
    pub(crate) fn set_provider(&mut self, name: &str) -> Result<()> {
        let new = alloc::string(name)?;
        self.write(self.head().fabric_attr, |fabric| {
            replace(&mut fabric.prov_name, new)
        });
        Ok(())
    }
}

/// Frees the memory that a pointer of an [`Info`] points to, and stores another pointer.
fn replace<T>(pointer: &mut *mut T, new: *mut T) {
    // SAFETY: pointers of an `Info` are NULL or in C's heap, and have one owner.
    unsafe { libc::free(std::mem::replace(pointer, new).cast()) };
}

impl Drop for Info {
    fn drop(&mut self) {
        if let Some(host) = host::get() {
            // SAFETY: made by this host's fi_dupinfo and owned by `self`.
            unsafe { (host.freeinfo)(self.0) };
        }
    }
}
