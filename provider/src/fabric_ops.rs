//! The calls of `fid_fabric`, `fi_fabric(3)`.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};

use crate::cntr::Cntr;
use crate::cq::Cq;
use crate::domain_ops;
use crate::eq::{self, Eq};
use crate::fabric::Fabric;
use crate::ffi::alloc::str_of;
use crate::ffi::fid::{Kind, Object, close, header, object, on, probe};
use crate::ffi::{guard, stub};
use crate::{opened, pep_ops};

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Fabric>),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: fi_ops_fabric = fi_ops_fabric {
    domain: Some(domain_ops::open),
    passive_ep: Some(pep_ops::open),
    eq_open: Some(eq::open),
    trywait: Some(trywait),
    domain2: Some(domain_ops::open2),
    ..stub::fabric::<FI_ENOSYS>() // wait sets are deprecated and not offered
};

// SAFETY: `fid_fabric` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Fabric {
    type C = fid_fabric;
    const CLASS: usize = FI_CLASS_FABRIC;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_fabric) {
        c.ops = (&raw const stub::closed::FABRIC).cast_mut();
    }
    fn finish(fabric: &Object<Self>) -> Result<()> {
        opened::FABRICS.remove(fabric.c().expose_provenance());
        Ok(())
    }
}

/// The provider's `fabric`: `fi_fabric(3)`.
pub(crate) unsafe extern "C" fn fabric(
    attr: *mut fi_fabric_attr,
    out: *mut *mut fid_fabric,
    context: *mut c_void,
) -> c_int {
    guard::entry(|| {
        if attr.is_null() || out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL, valid by the contract of fi_fabric(3); its size never changed.
        let (name, api_version) = unsafe { (str_of((*attr).name), (*attr).api_version) };
        let name = name.ok_or(FiErrno::EINVAL)?;
        let devices = crate::getinfo::devices_of_fabric(name)?;
        let opened = opened::Fabric {
            name: name.to_owned(),
            version: api_version,
            devices,
        };
        let object = Object::open(
            fid_fabric {
                fid: header::<Fabric>(context),
                ops: (&raw const OPS).cast_mut(),
                api_version,
            },
            Fabric {
                api_version,
                opened: opened.clone(),
            },
        );
        opened::FABRICS.add(object.as_ptr().expose_provenance(), opened);
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// `fi_trywait(3)`: whether a thread may go to sleep on the descriptors of these objects.
unsafe extern "C" fn trywait(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int {
    // SAFETY: a fabric by the contract of fi_trywait(3).
    let fabric = unsafe { object::<Fabric>(fabric) };
    on(fabric, |_| {
        let count = usize::try_from(count).map_err(|_| FiErrno::EINVAL)?;
        if count != 0 && fids.is_null() {
            return Err(FiErrno::EINVAL);
        }
        for index in 0..count {
            // SAFETY: `fids` has `count` elements, each NULL or a fid.
            let asked = unsafe { trywait_one(*fids.add(index)) };
            if asked.is_err() {
                // the thread does not wait, so no change of the earlier counters has to wake it
                for earlier in 0..index {
                    // SAFETY: as above.
                    if let Some(cntr) = unsafe { probe::<Cntr>(*fids.add(earlier)) } {
                        cntr.engine.come_back();
                    }
                }
                asked?;
            }
        }
        Ok(0)
    })
}

/// [`trywait`] for one object.
///
/// # Safety
/// `handle` is NULL or a fid.
unsafe fn trywait_one(handle: *mut fid) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(cq) = probe::<Cq>(handle) {
            cq.engine.trywait()
        } else if let Some(cntr) = probe::<Cntr>(handle) {
            cntr.engine.trywait()
        } else {
            object::<Eq>(handle)?.engine.trywait()
        }
    }
}
