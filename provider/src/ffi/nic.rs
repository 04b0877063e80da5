//! `fi_info.nic`: the device's own attributes, as a fid with the provider's copy, close and print
//! functions.
//!
//! `fi_dupinfo` copies it through `FI_DUP`, `fi_freeinfo` closes it, `fi_tostr` prints it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};

use crate::ffi::{alloc, guard, stub};

/// The attributes of a nic; absent strings stay NULL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nic {
    pub(crate) name: Option<String>,
    pub(crate) device_id: Option<String>,
    pub(crate) device_version: Option<String>,
    pub(crate) vendor_id: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) firmware: Option<String>,
    /// PCI domain, bus, device, function.
    pub(crate) pci: Option<(u16, u8, u8, u8)>,
    pub(crate) address: Option<String>,
    /// Bytes.
    pub(crate) mtu: usize,
    /// Bits per second.
    pub(crate) speed: usize,
    /// Whether the link is up; `None` if unknown.
    pub(crate) up: Option<bool>,
    pub(crate) network_type: Option<String>,
}

static OPS: fi_ops = fi_ops {
    close: Some(close),
    control: Some(control),
    tostr: Some(tostr),
    ..stub::fid::<FI_ENOSYS>()
};

fn text(value: Option<&String>) -> Result<*mut c_char> {
    value.map_or(Ok(std::ptr::null_mut()), |value| alloc::string(value))
}

/// A nic fid, freed by its own close.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn create(nic: &Nic) -> Result<*mut fid_nic> {
    let owner = Owned(alloc::calloc::<fid_nic>()?);
    // SAFETY: new zeroed memory that `owner` frees on failure; each pointer is stored as soon as it
    // exists, so that nothing leaks in between.
    unsafe {
        let fid_nic = owner.0;
        (*fid_nic).fid.fclass = FI_CLASS_NIC;
        (*fid_nic).fid.ops = (&raw const OPS).cast_mut();
        (*fid_nic).device_attr = alloc::calloc()?;
        (*fid_nic).bus_attr = alloc::calloc()?;
        (*fid_nic).link_attr = alloc::calloc()?;

        let device = (*fid_nic).device_attr;
        (*device).name = text(nic.name.as_ref())?;
        (*device).device_id = text(nic.device_id.as_ref())?;
        (*device).device_version = text(nic.device_version.as_ref())?;
        (*device).vendor_id = text(nic.vendor_id.as_ref())?;
        (*device).driver = text(nic.driver.as_ref())?;
        (*device).firmware = text(nic.firmware.as_ref())?;

        if let Some((domain_id, bus_id, device_id, function_id)) = nic.pci {
            (*(*fid_nic).bus_attr).bus_type = FI_BUS_PCI;
            (*(*fid_nic).bus_attr).attr.pci = fi_pci_attr {
                domain_id,
                bus_id,
                device_id,
                function_id,
            };
        }

        let link = (*fid_nic).link_attr;
        (*link).address = text(nic.address.as_ref())?;
        (*link).mtu = nic.mtu;
        (*link).speed = nic.speed;
        (*link).state = match nic.up {
            Some(true) => FI_LINK_UP,
            Some(false) => FI_LINK_DOWN,
            None => FI_LINK_UNKNOWN,
        };
        (*link).network_type = text(nic.network_type.as_ref())?;
    }
    let nic = owner.0;
    std::mem::forget(owner);
    Ok(nic)
}

/// A nic that `drop` frees.
struct Owned(*mut fid_nic);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: built by `create`; all pointers are NULL or from C's heap, and owned by `self`.
        unsafe { free(self.0) };
    }
}

/// # Safety
/// `nic` was made by [`create`], even in part, and is not used afterwards.
unsafe fn free(nic: *mut fid_nic) {
    // SAFETY: free takes NULL; everything else is C's heap by the caller's promise.
    unsafe {
        let device = (*nic).device_attr;
        if !device.is_null() {
            for text in [
                (*device).name,
                (*device).device_id,
                (*device).device_version,
                (*device).vendor_id,
                (*device).driver,
                (*device).firmware,
            ] {
                libc::free(text.cast());
            }
            libc::free(device.cast());
        }
        libc::free((*nic).bus_attr.cast());
        let link = (*nic).link_attr;
        if !link.is_null() {
            libc::free((*link).address.cast());
            libc::free((*link).network_type.cast());
            libc::free(link.cast());
        }
        libc::free(nic.cast());
    }
}

/// # Safety
/// `handle` is NULL or readable as a fid.
unsafe fn checked(handle: *const fid) -> Result<*mut fid_nic> {
    if handle.is_null() {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: readable by the caller's promise.
    let (class, ops) = unsafe { ((*handle).fclass, (*handle).ops) };
    if class == FI_CLASS_NIC && std::ptr::eq(ops, &OPS) {
        Ok(handle.cast::<fid_nic>().cast_mut())
    } else {
        Err(FiErrno::EINVAL)
    }
}

/// # Safety
/// `nic` was made by [`create`], which has returned it.
unsafe fn read(nic: *const fid_nic) -> Nic {
    // SAFETY: strings are C strings or NULL.
    let text = |value: *mut c_char| {
        (!value.is_null()).then(|| {
            // SAFETY: not NULL: `create` stored a C string here.
            unsafe { CStr::from_ptr(value) }
                .to_string_lossy()
                .into_owned()
        })
    };
    // SAFETY: the caller's promise; the union is PCI if the type is PCI.
    unsafe {
        let (device, bus, link) = ((*nic).device_attr, (*nic).bus_attr, (*nic).link_attr);
        Nic {
            name: text((*device).name),
            device_id: text((*device).device_id),
            device_version: text((*device).device_version),
            vendor_id: text((*device).vendor_id),
            driver: text((*device).driver),
            firmware: text((*device).firmware),
            pci: ((*bus).bus_type == FI_BUS_PCI).then(|| {
                let pci = (*bus).attr.pci;
                (pci.domain_id, pci.bus_id, pci.device_id, pci.function_id)
            }),
            address: text((*link).address),
            mtu: (*link).mtu,
            speed: (*link).speed,
            up: match (*link).state {
                FI_LINK_UP => Some(true),
                FI_LINK_DOWN => Some(false),
                _ => None,
            },
            network_type: text((*link).network_type),
        }
    }
}

unsafe extern "C" fn close(handle: *mut fid) -> c_int {
    guard::entry(|| {
        // SAFETY: the application passes a fid, by the contract of fi_close.
        unsafe { free(checked(handle)?) };
        Ok(0)
    })
}

unsafe extern "C" fn control(handle: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    guard::entry(|| {
        // SAFETY: the application passes a fid, by the contract of fi_control(3).
        let nic = unsafe { checked(handle)? };
        if command.cast_unsigned() != FI_DUP {
            return Err(FiErrno::ENOSYS); // a nic can only be copied
        }
        if arg.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: `create` made `nic` with all its parts; FI_DUP's argument points to the variable
        // that receives the copy's address.
        unsafe {
            let copy = create(&read(nic))?;
            *arg.cast::<*mut fid_nic>() = copy;
        }
        Ok(0)
    })
}

/// Appends to the text in `buf`, as `fi_tostr`'s own printers do. `len` is the length that the
/// caller has computed for the rest of the buffer. Like those printers, this one leaves one more
/// byte unused.
unsafe extern "C" fn tostr(handle: *const fid, buf: *mut c_char, len: usize) -> c_int {
    guard::entry(|| {
        if buf.is_null() || len == 0 {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: the host passes the fid of a nic, by the contract of fi_ops.tostr.
        let text = format(&unsafe { read(checked(handle)?) });
        // SAFETY: `buf` holds `len` bytes, a C string among them.
        unsafe {
            let used = libc::strnlen(buf, len);
            let room = len.saturating_sub(used + 1);
            let count = text.len().min(room.saturating_sub(1));
            if room > 0 {
                std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf.add(used), count);
                *buf.add(used + count) = 0;
            }
        }
        Ok(0)
    })
}

fn format(nic: &Nic) -> String {
    let or_null = |text: &Option<String>| text.clone().unwrap_or_else(|| "(null)".to_owned());
    let mut out = String::from("    nic:\n        fi_device_attr:\n");
    for (label, value) in [
        ("name", &nic.name),
        ("device_id", &nic.device_id),
        ("device_version", &nic.device_version),
        ("vendor_id", &nic.vendor_id),
        ("driver", &nic.driver),
        ("firmware", &nic.firmware),
    ] {
        let _ = writeln!(out, "            {label}: {}", or_null(value));
    }
    out.push_str("        fi_bus_attr:\n");
    match nic.pci {
        Some((domain, bus, device, function)) => {
            let _ = write!(
                out,
                "            bus_type: FI_BUS_PCI\n            fi_pci_attr:\n                domain_id: {domain}\n                \
                 bus_id: {bus}\n                device_id: {device}\n                function_id: {function}\n"
            );
        }
        None => out.push_str("            bus_type: FI_BUS_UNKNOWN\n"),
    }
    let state = match nic.up {
        Some(true) => "FI_LINK_UP",
        Some(false) => "FI_LINK_DOWN",
        None => "FI_LINK_UNKNOWN",
    };
    let _ = write!(
        out,
        "        fi_link_attr:\n            address: {}\n            mtu: {}\n            speed: {}\n            \
         state: {state}\n            network_type: {}\n",
        or_null(&nic.address),
        nic.mtu,
        nic.speed,
        or_null(&nic.network_type)
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Nic {
        Nic {
            name: Some("soft0".into()),
            pci: Some((0, 3, 2, 1)),
            mtu: 4096,
            up: Some(true),
            network_type: Some("Ethernet".into()),
            ..Nic::default()
        }
    }

    #[test]
    fn a_copy_says_the_same_and_both_close() {
        let nic = create(&sample()).unwrap();
        let mut copy: *mut fid_nic = std::ptr::null_mut();
        // SAFETY: `nic` was just made.
        unsafe {
            assert_eq!(
                control(
                    &raw mut (*nic).fid,
                    FI_DUP.cast_signed(),
                    (&raw mut copy).cast()
                ),
                0
            );
            assert_eq!(read(copy), sample());
            assert_eq!(
                control(&raw mut (*nic).fid, 12345, (&raw mut copy).cast()),
                -FI_ENOSYS
            );
            assert_eq!(close(&raw mut (*nic).fid), 0);
            assert_eq!(close(&raw mut (*copy).fid), 0);
            assert_eq!(close(std::ptr::null_mut()), -FI_EINVAL);
        }
    }

    #[test]
    fn text_is_appended_and_cut_to_the_buffer() {
        let nic = create(&sample()).unwrap();
        let mut buf = [0x7f_u8; 64];
        buf[..3].copy_from_slice(b"ab\0");
        // SAFETY: `buf` is a C string with room for 60 bytes.
        unsafe {
            assert_eq!(tostr(&raw const (*nic).fid, buf.as_mut_ptr().cast(), 60), 0);
            close(&raw mut (*nic).fid);
        }
        let text = CStr::from_bytes_until_nul(&buf).unwrap().to_str().unwrap();
        assert!(text.starts_with("ab    nic:\n"), "{text}");
        assert!(text.len() < 60);
        assert_eq!(buf[60], 0x7f);
    }
}
