//! The calls of the application before a connection: options, addresses, routes, listening.
//!
//! Invariants: an id in a phase past `Idle` has a source; unless it shares the address with others
//! (RDMA_OPTION_ID_REUSEADDR), `names` own it. A call that fails after it has bound the id leaves
//! it bound; else it leaves the phase and the names unchanged.

use std::net::{Ipv6Addr, SocketAddr};
use std::ptr::null_mut;
use std::sync::Arc;

use libc::{c_int, c_void, sockaddr};
use rdma_core_sys::*;

use super::address;
use super::device;
use super::event::Kind;
use super::guard::{lock, pointer, status, void};
use super::id::{Id, Shared};
use super::local;
use super::qp;
use super::sock::Sock;
use super::state::{Phase, State};
use super::synchronous::complete;
use crate::sys::{Errno, Res};
use rdma_core_sys::scalars::__be16;

const INVALID: Errno = Errno(libc::EINVAL);
/// Maximum backlog, used for 0 and less too: the default of `net.rdma_ucm.max_backlog`.
const MAX_BACKLOG: i32 = 1024;

/// Whether one of the sockets has the name.
fn have(names: &[Sock], name: &str) -> bool {
    names.iter().any(|sock| sock.has_name(name))
}

/// Binds the id to `wanted`.
fn bind(state: &mut State, id: &Shared, wanted: &SocketAddr) -> Res<()> {
    local::check_local(wanted)?;
    let options = state.options;
    let (source, names) = if wanted.port() == 0 {
        address::own_any_port(state.space, wanted, options.only_own_family)?
    } else {
        match address::own(state.space, wanted, options.only_own_family) {
            // Another socket owns it; `rdma_listen` decides which one listens.
            Err(Errno(libc::EADDRINUSE))
                if options.reuse_address
                    && address::is_permitted(state.space, wanted, options.only_own_family)? =>
            {
                (*wanted, Vec::new())
            }
            owned => (*wanted, owned?),
        }
    };
    let permissions = state.permissions_of(&source, |name| have(&names, name))?;
    if !address::is_any(&source) {
        state.bind_device(id)?;
    }
    (state.source, state.names, state.phase) = (Some(source), names, Phase::Bound);
    state.named = Some(source);
    state.permissions = permissions;
    state.show_addresses(id);
    Ok(())
}

/// The source address for `destination`, which has the family of the bound address.
fn route(bound: Option<SocketAddr>, destination: &SocketAddr) -> Res<SocketAddr> {
    local::check_local(destination).map_err(local::as_of_destination)?;
    match bound {
        Some(source) if !address::is_any(&source) => Ok(source),
        other => {
            let mut source = local::source_of(destination).map_err(local::as_of_destination)?;
            source.set_port(other.map_or(0, |bound| bound.port()));
            Ok(source)
        }
    }
}

/// Whether an id with this source can have the destination: its source then has a name that the id
/// owns. That of an IPv4-mapped IPv6 address is that of the IPv4 address, which `::` owns too.
fn is_of_family(source: &SocketAddr, to: &SocketAddr, only_own_family: bool) -> bool {
    let is_ipv4 = |address: &SocketAddr| address::canonical(address.ip()).is_ipv4();
    let is_of_both = source.ip() == Ipv6Addr::UNSPECIFIED && !only_own_family;
    source.is_ipv4() == to.is_ipv4() && (is_of_both || is_ipv4(source) == is_ipv4(to))
}

fn resolve(id: &Arc<Shared>, from: Option<SocketAddr>, to: &SocketAddr) -> Res<()> {
    let mut state = lock(&id.state);
    // The kernel ignores `from` if the id is bound (`resolve_prepare_src`).
    let source = match state.phase {
        Phase::Idle => from,
        Phase::Bound => state.source,
        _ => return Err(INVALID),
    };
    let only_own_family = state.options.only_own_family;
    if source.is_some_and(|source| !is_of_family(&source, to, only_own_family)) {
        return Err(INVALID);
    }
    if let (Phase::Idle, Some(from)) = (state.phase, from) {
        bind(&mut state, id, &from)?;
    }
    // The unspecified address means this host, as on a real device.
    let destination = if address::is_any(to) {
        address::loopback(to)
    } else {
        *to
    };
    match route(state.source, &destination) {
        Ok(mut source) => {
            if source.port() == 0 {
                let (owned, names) = address::own_any_port(state.space, &source, true)?;
                let owns = |name: &str| have(&names, name);
                state.permissions = state.permissions_of(&owned, owns)?;
                (source, state.names) = (owned, names);
                state.named = Some(owned);
            }
            state.source = Some(source);
            state.destination = Some(destination);
            state.phase = Phase::AddrResolved;
            state.push(id, Kind::AddrResolved);
        }
        Err(errno) => state.push(id, Kind::AddrError(errno)),
    }
    // The id has its destination at once, and its source with the event.
    let handle = id.handle();
    // SAFETY: the handle lives during a call on it; the union has the size of a storage.
    unsafe {
        let to = &raw mut (*handle).c.route.addr.__bindgen_anon_2;
        to.cast::<libc::sockaddr_storage>()
            .write(address::to_c(&destination));
    }
    Ok(())
}

fn listen(id: &Arc<Shared>, backlog: c_int) -> Res<()> {
    let mut state = lock(&id.state);
    let shares = state.phase == Phase::Bound && state.names.is_empty();
    match (state.phase, state.source) {
        (Phase::Idle, _) => {
            let any = SocketAddr::from(([0, 0, 0, 0], 0));
            bind(&mut state, id, &any)?;
        }
        (Phase::Bound, Some(source)) if shares => {
            state.names = address::own(state.space, &source, state.options.only_own_family)?;
        }
        (Phase::Bound, _) => {}
        _ => return Err(INVALID),
    }
    let backlog = if (1..MAX_BACKLOG).contains(&backlog) {
        backlog
    } else {
        MAX_BACKLOG
    };
    let watched = state
        .names
        .iter()
        .try_for_each(|name| state.events.watch(name.fd(), id, false));
    // Listens last: no client is in the queue of a socket that is not watched.
    let listens =
        watched.and_then(|()| state.names.iter().try_for_each(|name| name.listen(backlog)));
    if let Err(errno) = listens {
        for name in &state.names {
            state.events.unwatch(name.fd());
        }
        if shares {
            state.names.clear();
        }
        return Err(errno);
    }
    // As in the kernel, no other id can bind the address of one that listens.
    state.permissions.clear();
    state.qp_type = qp::type_of(id.handle());
    state.backlog = backlog.cast_unsigned() as usize;
    state.listener = Arc::downgrade(id);
    state.phase = Phase::Listening;
    Ok(())
}

pub(super) unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        // SAFETY: the caller promises a valid address.
        let wanted = unsafe { address::from_c(addr)? };
        let mut state = lock(&shared.state);
        if state.phase != Phase::Idle {
            return Err(INVALID);
        }
        bind(&mut state, &shared, &wanted)
    })
}

pub(super) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src_addr: *mut sockaddr,
    dst_addr: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id and valid addresses.
        unsafe {
            let shared = Id::shared_of(id)?;
            let to = address::from_c(dst_addr)?;
            let from = if src_addr.is_null() {
                None
            } else {
                Some(address::from_c(src_addr)?)
            };
            resolve(&shared, from, &to)?;
            complete(id)
        }
    })
}

pub(super) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        {
            let mut state = lock(&shared.state);
            if state.phase != Phase::AddrResolved {
                return Err(INVALID);
            }
            state.phase = Phase::RouteResolved;
            state.push(&shared, Kind::RouteResolved);
        }
        // SAFETY: the caller promises a live id.
        unsafe { complete(id) }
    })
}

pub(super) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        listen(&unsafe { Id::shared_of(id)? }, backlog)
    })
}

pub(super) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16 {
    if id.is_null() {
        return 0;
    }
    // SAFETY: the caller promises a live id; the union has the size of a storage.
    unsafe { address::port_of((&raw const (*id).route.addr.__bindgen_anon_1).cast()) }
}

pub(super) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> __be16 {
    if id.is_null() {
        return 0;
    }
    // SAFETY: the caller promises a live id; the union has the size of a storage.
    unsafe { address::port_of((&raw const (*id).route.addr.__bindgen_anon_2).cast()) }
}

pub(super) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: usize,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        if level.cast_unsigned() != RDMA_OPTION_ID {
            // RDMA_OPTION_IB_PATH: the device has one path, which cannot be replaced.
            return Err(Errno(libc::ENOSYS));
        }
        let byte = || match optlen {
            // SAFETY: the caller promises `optlen` bytes.
            1 if !optval.is_null() => Ok(unsafe { optval.cast::<u8>().read() }),
            _ => Err(INVALID),
        };
        let flag = || match optlen {
            // SAFETY: the caller promises `optlen` bytes.
            4 if !optval.is_null() => Ok(unsafe { optval.cast::<c_int>().read_unaligned() } != 0),
            _ => Err(INVALID),
        };
        let mut state = lock(&shared.state);
        match optname.cast_unsigned() {
            RDMA_OPTION_ID_TOS => state.options.type_of_service = byte()?,
            RDMA_OPTION_ID_REUSEADDR => match (flag()?, state.phase) {
                (true, Phase::Listening) => return Err(INVALID),
                (true, _) | (false, Phase::Idle) => {
                    let former = std::mem::replace(&mut state.options.reuse_address, flag()?);
                    if !former && let Err(errno) = state.renew_permissions() {
                        state.options.reuse_address = former;
                        return Err(errno);
                    }
                }
                (false, _) => return Err(INVALID),
            },
            RDMA_OPTION_ID_AFONLY => match (flag()?, state.phase) {
                (only, Phase::Idle) => state.options.only_own_family = only,
                (true, Phase::Bound) => {
                    state.options.only_own_family = true;
                    // The first name is that of the address itself.
                    let first = state.names.len().min(1);
                    let rest = state.names.split_off(first);
                    state.end_permissions();
                    drop(rest);
                }
                (false, Phase::Bound) => {
                    // An id that shares the address owns no name until it listens.
                    if let ([_], Some(source)) = (&state.names[..], state.source) {
                        let rest = address::own_other_family(state.space, &source)?;
                        state.names.extend(rest);
                    }
                    state.options.only_own_family = false;
                    // without descriptors for it, the address is not shared
                    let _ = state.renew_permissions();
                }
                _ => return Err(INVALID),
            },
            RDMA_OPTION_ID_ACK_TIMEOUT => match byte()? {
                // As the kernel's `rdma_set_ack_timeout`: no datagram is acknowledged.
                _ if qp::type_of(shared.handle()) == IBV_QPT_UD => return Err(INVALID),
                timeout @ 0..=31 => state.options.ack_timeout = Some(timeout),
                _ => return Err(INVALID),
            },
            _ => return Err(Errno(libc::ENOSYS)),
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    pointer(|| {
        // As librdmacm: a call that fails sets 0.
        if !num_devices.is_null() {
            // SAFETY: the caller promises that it is writable.
            unsafe { *num_devices = 0 };
        }
        let context = device::context()?;
        let list = Box::into_raw(Box::new([context, null_mut()]));
        if !num_devices.is_null() {
            // SAFETY: the caller promises that it is writable.
            unsafe { *num_devices = 1 };
        }
        Ok(list.cast())
    })
}

pub(super) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    void(|| {
        if !list.is_null() {
            // SAFETY: from `rdma_get_devices`; the caller does not use it again.
            drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_context; 2]>()) });
        }
    });
}
