//! Connection management calls of endpoints and passive endpoints, `fi_cm(3)`.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::msg::PassiveEndpoint;
use weft::wire::cm_data::MAX_CM_DATA;

use crate::addr::Format;
use crate::connreq;
use crate::ep::msg_ep::Ep;
use crate::ep::rdm_ep::RdmEp;
use crate::ffi::fid::{Kind, object, on};
use crate::ffi::stub;
use crate::pep::Pep;

/// The calls of active endpoints.
pub(crate) static EP_OPS: fi_ops_cm = fi_ops_cm {
    setname: Some(setname::<Ep>),
    getname: Some(getname::<Ep>),
    getpeer: Some(getpeer),
    connect: Some(connect),
    accept: Some(accept),
    shutdown: Some(shutdown),
    ..stub::cm::<FI_ENOSYS>() // listen, reject: passive endpoints only; join: multicast only
};

/// The calls of passive endpoints.
pub(crate) static PEP_OPS: fi_ops_cm = fi_ops_cm {
    setname: Some(setname::<Pep>),
    getname: Some(getname::<Pep>),
    listen: Some(listen),
    reject: Some(reject),
    ..stub::cm::<FI_ENOSYS>()
};

/// The calls of endpoints with many peers.
pub(crate) static RDM_OPS: fi_ops_cm = fi_ops_cm {
    setname: Some(setname::<RdmEp>),
    getname: Some(getname::<RdmEp>),
    ..stub::cm::<FI_ENOSYS>() // there are no connections that the application sees
};

/// An endpoint kind with a local address.
trait Local: Kind {
    fn format(&self) -> Format;
    fn set_addr(&self, addr: SocketAddr) -> Result<()>;
    fn addr(&self) -> Result<SocketAddr>;
}

impl Local for Ep {
    fn format(&self) -> Format {
        self.common.format
    }

    fn set_addr(&self, addr: SocketAddr) -> Result<()> {
        self.engine.set_name(addr)
    }

    fn addr(&self) -> Result<SocketAddr> {
        self.engine.local_addr()
    }
}

impl Local for Pep {
    fn format(&self) -> Format {
        self.format
    }

    fn set_addr(&self, addr: SocketAddr) -> Result<()> {
        self.engine.set_name(addr)
    }

    fn addr(&self) -> Result<SocketAddr> {
        self.engine.local_addr()
    }
}

impl Local for RdmEp {
    fn format(&self) -> Format {
        self.common.format
    }

    fn set_addr(&self, addr: SocketAddr) -> Result<()> {
        self.engine.set_name(addr)
    }

    fn addr(&self) -> Result<SocketAddr> {
        self.engine.name()
    }
}

/// The application's data in a connection message.
///
/// # Safety
/// `param` is NULL or has `len` bytes.
unsafe fn data_of<'a>(param: *const c_void, len: usize) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if param.is_null() || len > MAX_CM_DATA {
        return Err(FiErrno::EINVAL); // endpoints check their own FI_OPT_CM_DATA_SIZE, which is less
    }
    // SAFETY: not NULL; the caller passes `len` bytes.
    Ok(unsafe { std::slice::from_raw_parts(param.cast::<u8>(), len) })
}

unsafe extern "C" fn setname<E: Local>(handle: *mut fid, addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: an endpoint by the contract of fi_setname(3).
    let ep = unsafe { object::<E>(handle) };
    on(ep, |ep| {
        // SAFETY: an address of `len` bytes by the contract of fi_setname(3).
        let addr = unsafe { ep.format().read(addr, Some(len))? };
        ep.set_addr(addr)?;
        Ok(0)
    })
}

unsafe extern "C" fn getname<E: Local>(
    handle: *mut fid,
    addr: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_getname(3).
    let ep = unsafe { object::<E>(handle) };
    on(ep, |ep| {
        let local = ep.addr()?;
        // SAFETY: a buffer and its length by the contract of fi_getname(3).
        unsafe { ep.format().answer(&local, addr, len)? };
        Ok(0)
    })
}

unsafe extern "C" fn getpeer(ep: *mut fid_ep, addr: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: an endpoint by the contract of fi_getpeer(3).
    let ep = unsafe { object::<Ep>(ep) };
    on(ep, |ep| {
        let peer = ep.engine.peer_addr()?;
        // SAFETY: a buffer and its length by the contract of fi_getpeer(3).
        unsafe { ep.common.format.answer(&peer, addr, len)? };
        Ok(0)
    })
}

unsafe extern "C" fn connect(
    ep: *mut fid_ep,
    addr: *const c_void,
    param: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_connect(3).
    let ep = unsafe { object::<Ep>(ep) };
    on(ep, |ep| {
        // SAFETY: `param` has `len` bytes by the contract of fi_connect(3).
        let data = unsafe { data_of(param, len)? };
        let peer = if addr.is_null() {
            None // the endpoint's `dest_addr`
        } else {
            // SAFETY: an address of the endpoint's format by the contract of fi_connect(3).
            Some(unsafe { ep.common.format.read(addr, None)? })
        };
        ep.engine.connect(peer, data)?;
        Ok(0)
    })
}

unsafe extern "C" fn accept(ep: *mut fid_ep, param: *const c_void, len: usize) -> c_int {
    // SAFETY: an endpoint by the contract of fi_accept(3).
    let ep = unsafe { object::<Ep>(ep) };
    on(ep, |ep| {
        // SAFETY: `param` has `len` bytes by the contract of fi_accept(3).
        ep.engine.accept(unsafe { data_of(param, len)? })?;
        Ok(0)
    })
}

unsafe extern "C" fn shutdown(ep: *mut fid_ep, flags: u64) -> c_int {
    // SAFETY: an endpoint by the contract of fi_shutdown(3).
    let ep = unsafe { object::<Ep>(ep) };
    on(ep, |ep| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS); // none are defined
        }
        ep.engine.shutdown()?;
        Ok(0)
    })
}

unsafe extern "C" fn listen(pep: *mut fid_pep) -> c_int {
    // SAFETY: a passive endpoint by the contract of fi_listen(3).
    let pep = unsafe { object::<Pep>(pep) };
    on(pep, |pep| pep.engine.listen().map(|()| 0))
}

unsafe extern "C" fn reject(
    pep: *mut fid_pep,
    handle: fid_t,
    param: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: a passive endpoint by the contract of fi_reject(3).
    let pep = unsafe { object::<Pep>(pep) };
    on(pep, |_| {
        // SAFETY: data of `len` bytes and the handle of a request, by the contract of fi_reject(3).
        // Both are checked before the request is taken.
        unsafe {
            let data = data_of(param, len)?;
            let request = connreq::take(handle)?;
            let done = PassiveEndpoint::reject(request, data);
            let _ = connreq::finish(handle);
            done?;
        }
        Ok(0)
    })
}
