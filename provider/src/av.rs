//! `fid_av`: address vectors, `fi_av(3)`. `docs/addresses.md` has the results of insertions.
//!
//! Addresses have the format of the info that the domain was opened with. Insertions end before the
//! call returns; with `FI_EVENT` the events are in the queue then.

use std::ffi::{c_char, c_int, c_void};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use libfabric_sys::*;
use weft::Token;
use weft::av::FiAddr;
use weft::av::symmetric::{Symmetric, Target};
use weft::av::text::{answer_bytes, answer_text};
use weft::eq::EventQueue;
use weft::errno::{FiErrno, Result};
use weft::rdm::AddressVector;

use crate::addr::{Format, to_string};
use crate::domain::Domain;
use crate::eq::{self, Eq};
use crate::ffi::alloc::str_of;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on};
use crate::ffi::log::refused;
use crate::ffi::stub;
use crate::getinfo;

/// An open address vector.
pub(crate) struct Av {
    pub(crate) engine: Arc<AddressVector>,
    pub(crate) domain: Arc<weft::domain::Domain>,
    format: Format,
    /// Whether insertions report to an event queue (`FI_EVENT`).
    events: bool,
    bound: OnceLock<Bound>,
    _domain: User,
}

/// The event queue of an address vector.
struct Bound {
    eq: Arc<EventQueue>,
    _user: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Av>),
    bind: Some(bind),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: fi_ops_av = fi_ops_av {
    insert: Some(insert),
    insertsvc: Some(insertsvc),
    insertsym: Some(insertsym),
    remove: Some(remove),
    lookup: Some(lookup),
    straddr: Some(straddr),
    // sets: FI_COLLECTIVE is not offered; authorization keys belong to endpoints
    ..stub::av::<FI_ENOSYS>()
};

// SAFETY: `fid_av` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Av {
    type C = fid_av;
    const CLASS: usize = FI_CLASS_AV;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_av) {
        c.ops = (&raw const stub::closed::AV).cast_mut();
    }
}

/// `fi_av_open(3)`. `FI_AV_UNSPEC` becomes `FI_AV_TABLE`: a `fi_addr_t` is an index in both types.
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_av_open(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if !domain.rdm {
            return Err(FiErrno::ENOSYS); // connected endpoints use no address vector
        }
        if attr.is_null() || out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: not NULL; the structure is the same in every release.
        let wish = unsafe { *attr };
        check(&wish)?;
        let user = domain.users.add()?;
        let av = Av {
            engine: AddressVector::open(wish.count)?,
            domain: Arc::clone(&domain.engine),
            format: domain.format,
            events: wish.flags & FI_EVENT != 0,
            bound: OnceLock::new(),
            _domain: user,
        };
        let c = fid_av {
            fid: header::<Av>(context),
            ops: (&raw const OPS).cast_mut(),
        };
        let object = Object::open(c, av);
        // SAFETY: neither is NULL; the object starts with its fid.
        unsafe {
            if wish.type_ == FI_AV_UNSPEC {
                (*attr).type_ = FI_AV_TABLE;
            }
            *out = object.as_ptr().cast();
        }
        Ok(0)
    })
}

/// Checks the attributes of a new address vector.
///
/// # Errors
/// `EINVAL`: no type of address vectors, or `FI_READ` without a name. `ENOSYS`: a name, receive
/// context bits, or user identifiers. `EBADFLAGS`: another flag.
fn check(attr: &fi_av_attr) -> Result<()> {
    const FLAGS: u64 = FI_EVENT | FI_READ | FI_SYMMETRIC | FI_AV_USER_ID;
    if attr.type_ > FI_AV_TABLE || (attr.flags & FI_READ != 0 && attr.name.is_null()) {
        return Err(FiErrno::EINVAL);
    }
    if attr.flags & !FLAGS != 0 {
        return Err(FiErrno::EBADFLAGS);
    }
    let reason = if !attr.name.is_null() {
        "an address vector with a name"
    } else if attr.rx_ctx_bits != 0 {
        "rx_ctx_bits, which are for scalable endpoints"
    } else if attr.flags & FI_AV_USER_ID != 0 {
        "FI_AV_USER_ID"
    } else {
        return Ok(()); // FI_SYMMETRIC: compact storage, which is an optimization
    };
    Err(refused!(FI_LOG_AV, ENOSYS, "not supported: {reason}"))
}

/// `fi_av_bind(3)`: one event queue, if the address vector was opened with `FI_EVENT`.
unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: fids by the contract of fi_av_bind(3).
    let av = unsafe { object::<Av>(handle) };
    on(av, |av| {
        // SAFETY: a fid by the contract of fi_av_bind(3); `object` refuses NULL.
        let eq = unsafe { object::<Eq>(other)? };
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        if !av.events {
            let reason = "the address vector was opened without FI_EVENT";
            return Err(refused!(FI_LOG_AV, EINVAL, "{reason}"));
        }
        let bound = Bound {
            eq: Arc::clone(&eq.engine),
            _user: eq.users.add()?,
        };
        av.bound.set(bound).map_err(|_| FiErrno::EINVAL)?;
        Ok(0)
    })
}

/// Where the results of one insertion go.
struct Results<'a> {
    /// One `fi_addr_t` for each address, unless it is NULL.
    addrs: *mut fi_addr_t,
    errors: Errors<'a>,
}

/// Where the errors of one insertion go.
enum Errors<'a> {
    /// The caller finds them by `fi_av_lookup`, or by `FI_ADDR_NOTAVAIL`.
    Not,
    /// To this array, one for each address (`FI_SYNC_ERR`).
    Array(*mut c_int),
    /// To the event queue, with this context.
    Queue(&'a EventQueue, usize),
}

impl Object<Av> {
    /// Checks the arguments that all insertions of `count` addresses have.
    ///
    /// # Errors
    /// `EBADFLAGS`: an unsupported flag, or `FI_SYNC_ERR` with `FI_EVENT`. `ENOSYS`:
    /// `FI_AV_USER_ID`. `EINVAL`: `FI_SYNC_ERR` without an array; more addresses than the result
    /// can express. `ENOEQ`: no event queue is bound.
    fn results(
        &self,
        count: usize,
        addrs: *mut fi_addr_t,
        flags: u64,
        context: *mut c_void,
    ) -> Result<Results<'_>> {
        if flags & FI_AV_USER_ID != 0 {
            return Err(refused!(FI_LOG_AV, ENOSYS, "not supported: FI_AV_USER_ID"));
        }
        // FI_MORE is a hint
        if flags & !(FI_MORE | FI_SYNC_ERR) != 0 || (self.events && flags & FI_SYNC_ERR != 0) {
            return Err(FiErrno::EBADFLAGS);
        }
        if c_int::try_from(count).is_err() {
            return Err(FiErrno::EINVAL);
        }
        let errors = if self.events {
            let bound = self.bound.get().ok_or(FiErrno::ENOEQ)?;
            Errors::Queue(&bound.eq, context.expose_provenance())
        } else if flags & FI_SYNC_ERR == 0 {
            Errors::Not
        } else if context.is_null() && count != 0 {
            return Err(FiErrno::EINVAL);
        } else {
            Errors::Array(context.cast())
        };
        Ok(Results { addrs, errors })
    }

    /// Inserts addresses and reports the results. Returns the number that were inserted; with
    /// `FI_EVENT`, 0.
    ///
    /// # Errors
    /// `ENOMEM`
    ///
    /// # Safety
    /// The arrays of `results` have an element for each of `addrs`.
    unsafe fn insert_all(
        &self,
        addrs: Vec<Result<SocketAddr>>,
        results: &Results<'_>,
    ) -> Result<c_int> {
        let mut inserted = room(addrs.len())?;
        let fits = |addr: SocketAddr| {
            let fits = self.format.fits(&addr);
            fits.then_some(addr).ok_or(FiErrno::EINVAL)
        };
        let addrs = addrs.into_iter().map(|addr| addr.and_then(fits));
        let count = self
            .engine
            .insert_all(addrs, |_, result| inserted.push(result));
        let owner = Token(std::ptr::from_ref(self).expose_provenance());
        for (at, result) in inserted.into_iter().enumerate() {
            if !results.addrs.is_null() {
                let addr = result.map_or(FI_ADDR_NOTAVAIL, |addr| addr.0);
                // SAFETY: not NULL; the caller passes an array with such an element.
                unsafe { results.addrs.add(at).write(addr) };
            }
            match (&results.errors, result) {
                (Errors::Array(errors), _) => {
                    let error = result.err().map_or(0, FiErrno::code);
                    // SAFETY: the caller passes an array with such an element.
                    unsafe { errors.add(at).write(error) };
                }
                (Errors::Queue(eq, context), Err(error)) => {
                    eq.write_operation_error(owner, error, *context, at);
                }
                _ => {}
            }
        }
        Ok(match &results.errors {
            Errors::Queue(queue, context) => {
                let event = eq::entry(owner, *context, count as u64);
                // stays when the vector is closed (fi_av(3)), whose address a later object may have
                queue.write(FI_AV_COMPLETE, &event, None);
                0
            }
            _ => c_int::try_from(count).unwrap_or(c_int::MAX),
        })
    }
}

/// The addresses of an array in a format. In formats with addresses of several families each
/// address has the length of its family, and one of an unknown family that of its predecessor.
///
/// # Errors
/// `ENOMEM`
///
/// # Safety
/// `addrs` has `count` addresses of the format, each as long as its family; for [`Format::Str`]
/// pointers to C strings.
unsafe fn read_all(
    format: Format,
    addrs: *const c_void,
    count: usize,
) -> Result<Vec<Result<SocketAddr>>> {
    let mut all = room(count)?;
    if format == Format::Str {
        let texts = addrs.cast::<*const c_void>();
        // SAFETY: the caller passes `count` pointers to C strings.
        let read = |at| unsafe { format.read(texts.add(at).read_unaligned(), None) };
        all.extend((0..count).map(read));
        return Ok(all);
    }
    let mut next = addrs.cast::<u8>();
    let mut len = match format {
        Format::In6 => size_of::<libc::sockaddr_in6>(),
        _ => size_of::<libc::sockaddr_in>(),
    };
    let fixed = (format == Format::In || format == Format::In6).then_some(len);
    let one = |_| {
        // SAFETY: the caller passes an array that has one more address, of this length, or of that
        // of its family.
        let addr = unsafe { format.read(next.cast(), fixed) };
        if fixed.is_none() {
            len = match addr {
                Ok(SocketAddr::V4(_)) => size_of::<libc::sockaddr_in>(),
                Ok(SocketAddr::V6(_)) => size_of::<libc::sockaddr_in6>(),
                Err(_) => len,
            };
        }
        next = next.wrapping_add(len);
        addr
    };
    all.extend((0..count).map(one));
    Ok(all)
}

/// `fi_av_insert(3)`
unsafe extern "C" fn insert(
    av: *mut fid_av,
    addrs: *const c_void,
    count: usize,
    results: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: an address vector by the contract of fi_av_insert(3).
    let av = unsafe { object::<Av>(av) };
    on(av, |av| {
        if addrs.is_null() && count != 0 {
            return Err(FiErrno::EINVAL);
        }
        let results = av.results(count, results, flags, context)?;
        // SAFETY: arrays of `count` elements by the contract of fi_av_insert(3).
        unsafe {
            let addrs = read_all(av.format, addrs, count)?;
            av.insert_all(addrs, &results)
        }
    })
}

/// `fi_av_insertsvc(3)`
unsafe extern "C" fn insertsvc(
    av: *mut fid_av,
    node: *const c_char,
    service: *const c_char,
    results: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of fi_av_insertsvc(3), which is that of one node and one service.
    unsafe { insertsym(av, node, 1, service, 1, results, flags, context) }
}

/// `fi_av_insertsym(3)`
unsafe extern "C" fn insertsym(
    av: *mut fid_av,
    node: *const c_char,
    nodes: usize,
    service: *const c_char,
    services: usize,
    results: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: an address vector by the contract of fi_av_insertsym(3).
    let av = unsafe { object::<Av>(av) };
    on(av, |av| {
        // SAFETY: NULL or C strings by the contract of fi_av_insertsym(3).
        let (node, service) = unsafe { (name(node)?, name(service)?) };
        let node = node.ok_or(FiErrno::EINVAL)?;
        let targets = Symmetric::new(node, nodes, service, services)?;
        let results = av.results(targets.count(), results, flags, context)?;
        let resolve = |target| match target? {
            Target::Addr(addr) => Ok(addr),
            Target::Name { node, service } => getinfo::resolve_name(&node, &service, av.format),
        };
        let mut addrs = room(targets.count())?;
        addrs.extend(targets.targets().map(resolve));
        // SAFETY: arrays of that many elements by the contract of fi_av_insertsym(3).
        unsafe { av.insert_all(addrs, &results) }
    })
}

/// An empty list with room for so many elements. A call has up to 2^31 addresses.
///
/// # Errors
/// `ENOMEM`
fn room<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| FiErrno::ENOMEM)?;
    Ok(list)
}

/// A C string argument that may be NULL.
///
/// # Errors
/// `EINVAL`: not UTF-8.
///
/// # Safety
/// `text` is NULL or a C string that outlives the result.
unsafe fn name<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL; the caller passes a C string that outlives the result.
    unsafe { str_of(text) }.map(Some).ok_or(FiErrno::EINVAL)
}

/// `fi_av_remove(3)`. An address that is not in the vector does not keep the others there; the
/// result is then `-FI_EINVAL`.
unsafe extern "C" fn remove(
    av: *mut fid_av,
    addrs: *mut fi_addr_t,
    count: usize,
    flags: u64,
) -> c_int {
    // SAFETY: an address vector by the contract of fi_av_remove(3).
    let av = unsafe { object::<Av>(av) };
    on(av, |av| {
        if flags != 0 {
            return Err(FiErrno::EBADFLAGS);
        }
        if addrs.is_null() && count != 0 {
            return Err(FiErrno::EINVAL);
        }
        let mut result = Ok(0);
        for at in 0..count {
            // SAFETY: `count` elements by the contract of fi_av_remove(3).
            let addr = FiAddr(unsafe { addrs.add(at).read() });
            let removed = av.engine.remove(addr);
            result = result.and_then(|_| removed.map(|()| 0));
        }
        result
    })
}

/// `fi_av_lookup(3)`
unsafe extern "C" fn lookup(
    av: *mut fid_av,
    addr: fi_addr_t,
    buf: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: an address vector by the contract of fi_av_lookup(3).
    let av = unsafe { object::<Av>(av) };
    on(av, |av| {
        if len.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let addr = av.engine.lookup(FiAddr(addr))?;
        // SAFETY: not NULL; `buf` is NULL or has `*len` bytes, by the contract of fi_av_lookup(3).
        unsafe {
            *len = match av.format {
                Format::Str => {
                    let text = to_string(&addr);
                    reply(|part| answer_text(&text, part), buf, *len)
                }
                format => {
                    let bytes = format.bytes(&addr);
                    reply(|part| answer_bytes(&bytes, part), buf, *len)
                }
            };
        }
        Ok(0)
    })
}

/// `fi_av_straddr(3)`: returns `buf`, or NULL if `addr` is not an address of the vector's format.
unsafe extern "C" fn straddr(
    av: *mut fid_av,
    addr: *const c_void,
    buf: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    // SAFETY: an address vector by the contract of fi_av_straddr(3).
    let av = unsafe { object::<Av>(av) };
    let written = on(av, |av| {
        if len.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: `len` is not NULL; the address has the vector's format, and `buf` is NULL or has
        // `*len` bytes, by the contract of fi_av_straddr(3).
        unsafe {
            let text = to_string(&av.format.read(addr, None)?);
            *len = reply(|part| answer_text(&text, part), buf.cast(), *len);
        }
        Ok(0)
    });
    if written == 0 { buf } else { std::ptr::null() }
}

/// Writes as much of an answer as fits, and returns the length of the whole answer; NULL has no
/// room. `answer` writes to the slice as much as fits there, and returns the whole length.
///
/// The application's memory may be uninitialised and its length wrong, so no reference covers it:
/// only the bytes of the answer are copied.
///
/// # Safety
/// `buf` is NULL, or `len` bytes can be written there.
unsafe fn reply(answer: impl Fn(&mut [u8]) -> usize, buf: *mut c_void, len: usize) -> usize {
    let whole = answer(&mut []);
    if !buf.is_null() {
        let mut part = vec![0; whole.min(len)];
        answer(&mut part);
        // SAFETY: not NULL; the caller passes `len` bytes, and the part has no more.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), buf.cast(), part.len()) };
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No address is read before there is memory for all.
    #[test]
    fn more_addresses_than_memory_are_refused() {
        for format in [Format::In, Format::Sockaddr, Format::Str] {
            // SAFETY: a list of that length does not fit in the address space, so nothing is read.
            let read = unsafe { read_all(format, std::ptr::dangling(), usize::MAX) };
            assert_eq!(read.err(), Some(FiErrno::ENOMEM));
        }
    }
}
