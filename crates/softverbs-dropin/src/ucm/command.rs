//! The commands of librdmacm.
//!
//! Invariants: a command that fails has created nothing and has written no answer. The exception is
//! `EFAULT`, if the pointer to the room for the answer is NULL, which librdmacm never passes.
//! Answers are written after the command was executed.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use libc::{sockaddr, sockaddr_in6};
use rdma_core_sys::bindings::*;

use super::abi::*;
use super::convert;
use super::event;
use super::file::{Channel, Errno, Id, Res, Table, cm, done};

const INVALID: Errno = Errno(libc::EINVAL);

/// A command as it was written: bytes, and the room for the answer.
struct Command<'a> {
    body: &'a [u8],
    room: usize,
}

impl Command<'_> {
    /// The structure of the command. Bytes that a shorter one does not have are zero.
    fn body<T: Plain>(&self) -> T {
        let mut value = T::zero();
        let count = self.body.len().min(size_of::<T>());
        // SAFETY: both have `count` bytes, and every pattern of bits is a value of the type.
        unsafe {
            std::ptr::copy_nonoverlapping(self.body.as_ptr(), (&raw mut value).cast(), count)
        };
        value
    }

    /// Checks that the caller has room for an answer of `least` bytes.
    fn needs(&self, least: usize) -> Res<()> {
        if self.room < least {
            Err(Errno(libc::ENOSPC))
        } else {
            Ok(())
        }
    }

    /// Writes an answer, as much of it as the caller has room for.
    ///
    /// # Safety
    /// `to` must be NULL or have the room of this command.
    unsafe fn answer(&self, to: u64, answer: &[u8]) -> Res<()> {
        let to = to as usize as *mut u8;
        if to.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let count = answer.len().min(self.room);
        // SAFETY: the caller promises the room.
        unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), to, count) };
        Ok(())
    }
}

/// Executes a command.
///
/// # Safety
/// The pointers in the command must be valid, and no other thread may destroy its id.
pub(super) unsafe fn execute(fd: c_int, channel: Channel, bytes: &[u8]) -> Res<()> {
    let (head, body) = bytes.split_at_checked(8).ok_or(INVALID)?;
    let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
    let number = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
    let body = body.get(..usize::from(half(4))).ok_or(INVALID)?;
    let command = Command {
        body,
        room: half(6).into(),
    };
    // SAFETY: the caller's promises are those of each of these functions.
    unsafe {
        match number {
            number::CREATE_ID => create_id(fd, channel, &command),
            number::DESTROY_ID => destroy_id(fd, &command),
            number::BIND_IP => bind_ip(fd, &command),
            number::RESOLVE_IP => resolve_ip(fd, &command),
            number::RESOLVE_ROUTE => resolve_route(fd, &command),
            number::QUERY_ROUTE => query_route(fd, &command),
            number::CONNECT => connect(fd, &command),
            number::LISTEN => listen(fd, &command),
            number::ACCEPT => accept(fd, &command),
            number::REJECT => reject(fd, &command),
            number::DISCONNECT => disconnect(fd, &command),
            number::INIT_QP_ATTR => init_qp_attr(fd, &command),
            number::GET_EVENT => get_event(channel, &command),
            number::SET_OPTION => set_option(fd, &command),
            number::NOTIFY => notify(fd, &command),
            number::MIGRATE_ID => migrate_id(fd, channel, &command),
            // Addresses of the native family (AF_IB) are not supported. librdmacm then uses the
            // commands for IP addresses only.
            number::BIND => Err(Errno(libc::EAFNOSUPPORT)),
            // Multicast, and what later kernels have.
            _ => Err(Errno(libc::ENOSYS)),
        }
    }
}

/// The id of a number.
fn find(fd: c_int, number: u32) -> Res<*mut rdma_cm_id> {
    Ok(Table::lock().id(fd, number)?.0)
}

unsafe fn create_id(fd: c_int, channel: Channel, command: &Command<'_>) -> Res<()> {
    let body: CreateId = command.body();
    command.needs(size_of::<One>())?;
    let ps = u32::from(body.ps);
    let qp_type = match ps {
        RDMA_PS_TCP => IBV_QPT_RC,
        RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
        RDMA_PS_IB => u32::from(body.qp_type),
        _ => return Err(INVALID),
    };
    let mut id = null_mut();
    // SAFETY: a live channel, and room for a pointer.
    done(unsafe { (cm().rdma_create_id)(channel.0, &raw mut id, null_mut(), ps) })?;
    // SAFETY: made above, and not yet used by another thread.
    unsafe { (*id).qp_type = qp_type };
    let number = Table::lock().add(Id(id), fd, body.uid);
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, bytes(&One { id: number })) }
}

unsafe fn destroy_id(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: DestroyId = command.body();
    command.needs(size_of::<One>())?;
    let id = {
        let mut table = Table::lock();
        let id = table.id(fd, body.id)?;
        table.retire(body.id);
        id
    };
    // Waits until no thread has an event of the id between its arrival and its count.
    // SAFETY: the caller destroys an id once.
    let destroyed = done(unsafe { (cm().rdma_destroy_id)(id.0) });
    let reported = Table::lock().forget(body.id);
    destroyed?;
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, bytes(&One { id: reported })) }
}

unsafe fn bind_ip(fd: c_int, command: &Command<'_>) -> Res<()> {
    let mut body: BindIp = command.body();
    let id = find(fd, body.id)?;
    // SAFETY: a live id and an address.
    match done(unsafe { (cm().rdma_bind_addr)(id, (&raw mut body.addr).cast()) }) {
        // The kernel looks for the device of the address, and finds none.
        Err(Errno(libc::EADDRNOTAVAIL)) => Err(Errno(libc::ENODEV)),
        other => other,
    }
}

unsafe fn resolve_ip(fd: c_int, command: &Command<'_>) -> Res<()> {
    let mut body: ResolveIp = command.body();
    let id = find(fd, body.id)?;
    let from: *mut sockaddr = if body.src_addr.0.sin6_family == 0 {
        null_mut()
    } else {
        (&raw mut body.src_addr).cast()
    };
    let to = (&raw mut body.dst_addr).cast();
    let timeout = body.timeout_ms.cast_signed();
    // SAFETY: a live id and addresses.
    done(unsafe { (cm().rdma_resolve_addr)(id, from, to, timeout) })
}

unsafe fn resolve_route(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: ResolveRoute = command.body();
    let id = find(fd, body.id)?;
    // SAFETY: a live id.
    done(unsafe { (cm().rdma_resolve_route)(id, body.timeout_ms.cast_signed()) })
}

unsafe fn query_route(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Query = command.body();
    // Older callers have no room for the index of the device.
    command.needs(size_of::<Route>() - 8)?;
    let id = find(fd, body.id)?;
    // SAFETY: a live id, which the caller does not use in another call.
    let route = unsafe { route(&*id) };
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, bytes(&route)) }
}

/// The addresses, the device and the path of an id.
///
/// # Safety
/// `id` must be an id of the connection manager.
unsafe fn route(id: &rdma_cm_id) -> Route {
    let addr = &id.route.addr;
    let ip = |storage: *const c_void| {
        // SAFETY: a union of addresses, of which the largest is a storage.
        unsafe { Address(storage.cast::<sockaddr_in6>().read_unaligned()) }
    };
    // SAFETY: a union with one member.
    let ib = unsafe { addr.addr.ibaddr.as_ref() };
    let mut route = Route {
        src_addr: ip((&raw const addr.__bindgen_anon_1).cast()),
        dst_addr: ip((&raw const addr.__bindgen_anon_2).cast()),
        port_num: id.port_num,
        // The device has no index, because it is not one of the kernel.
        ibdev_index: u32::MAX,
        ..Route::zero()
    };
    if !id.verbs.is_null() {
        let guid = softverbs::backend().verbs.ibv_get_device_guid;
        // SAFETY: the id's device, which the connection manager keeps open while the id lives.
        route.node_guid = unsafe { guid((*id.verbs).device) };
        route.ib_route[0] = convert::addresses_to_kernel(ib);
    }
    if id.route.num_paths > 0 {
        route.num_paths = 1;
        // SAFETY: the id has a path.
        route.ib_route[0] = convert::path_to_kernel(unsafe { &*id.route.path_rec });
    }
    route
}

/// The parameters of a connection. Their private data is in `from`.
fn conn_param(from: &ConnParam) -> rdma_conn_param {
    rdma_conn_param {
        private_data: from.private_data.as_ptr().cast(),
        private_data_len: from.private_data_len,
        responder_resources: from.responder_resources,
        initiator_depth: from.initiator_depth,
        flow_control: from.flow_control,
        retry_count: from.retry_count,
        rnr_retry_count: from.rnr_retry_count,
        srq: from.srq,
        qp_num: from.qp_num,
    }
}

unsafe fn connect(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Connect = command.body();
    if body.conn_param.valid == 0 {
        return Err(INVALID);
    }
    let id = find(fd, body.id)?;
    let mut param = conn_param(&body.conn_param);
    // SAFETY: a live id, and parameters whose data lives during the call.
    done(unsafe { (cm().rdma_connect)(id, &raw mut param) })
}

unsafe fn listen(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Listen = command.body();
    let id = find(fd, body.id)?;
    // SAFETY: a live id.
    done(unsafe { (cm().rdma_listen)(id, body.backlog.cast_signed()) })
}

/// Without parameters: the active side, whose queue pair is ready.
unsafe fn accept(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Accept = command.body();
    let id = find(fd, body.id)?;
    if body.conn_param.valid == 0 {
        let establish = cm().rdma_establish.ok_or(Errno(libc::ENOSYS))?;
        // SAFETY: a live id.
        return done(unsafe { establish(id) });
    }
    let mut param = conn_param(&body.conn_param);
    // An event may follow at once, in another thread.
    let former = Table::lock().set_uid(body.id, body.uid);
    // SAFETY: a live id, and parameters whose data lives during the call.
    let accepted = done(unsafe { (cm().rdma_accept)(id, &raw mut param) });
    if accepted.is_err() {
        Table::lock().set_uid(body.id, former);
    }
    accepted
}

unsafe fn reject(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Reject = command.body();
    let id = find(fd, body.id)?;
    let data = body.private_data.as_ptr().cast();
    // softverbs has no `rdma_reject_ece`: the reason of `rdma_reject` is sent instead SAFETY: a
    // live id, and the structure has as many bytes as the length can name.
    done(unsafe { (cm().rdma_reject)(id, data, body.private_data_len) })
}

unsafe fn disconnect(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Disconnect = command.body();
    let id = find(fd, body.id)?;
    // SAFETY: a live id.
    done(unsafe { (cm().rdma_disconnect)(id) })
}

unsafe fn init_qp_attr(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: InitQpAttr = command.body();
    command.needs(size_of::<QpAttr>())?;
    let id = find(fd, body.id)?;
    let init = cm().rdma_init_qp_attr.ok_or(Errno(libc::ENOSYS))?;
    let mut attr = ibv_qp_attr {
        qp_state: body.qp_state,
        ..ibv_qp_attr::default()
    };
    let mut mask = 0;
    // SAFETY: a live id, and room for attributes and their mask.
    done(unsafe { init(id, &raw mut attr, &raw mut mask) })?;
    let attr = convert::qp_to_kernel(&attr, mask.cast_unsigned());
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, bytes(&attr)) }
}

unsafe fn get_event(channel: Channel, command: &Command<'_>) -> Res<()> {
    let body: GetEvent = command.body();
    command.needs(EVENT_LEAST)?;
    let event = event::next(channel)?;
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, &event) }
}

unsafe fn set_option(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: SetOption = command.body();
    let id = find(fd, body.id)?;
    let (level, name) = (body.level.cast_signed(), body.optname.cast_signed());
    let value = body.optval as usize as *mut c_void;
    // SAFETY: a live id, and a value of this length.
    done(unsafe { (cm().rdma_set_option)(id, level, name, value, body.optlen as usize) })
}

unsafe fn notify(fd: c_int, command: &Command<'_>) -> Res<()> {
    let body: Notify = command.body();
    let id = find(fd, body.id)?;
    // SAFETY: a live id.
    done(unsafe { (cm().rdma_notify)(id, body.event) })
}

/// Moves an id from another descriptor to this one.
unsafe fn migrate_id(fd: c_int, channel: Channel, command: &Command<'_>) -> Res<()> {
    let body: MigrateId = command.body();
    command.needs(size_of::<One>())?;
    let from = body.fd.cast_signed();
    let id = find(from, body.id)?;
    Table::lock().begin_move(body.id, fd, channel);
    // SAFETY: a live id and a live channel.
    let moved = done(unsafe { (cm().rdma_migrate_id)(id, channel.0) });
    // rdma_migrate_id(3) waits for the events of the former channel alone: another thread may
    // already hold one of the new channel.
    let reported = Table::lock().end_move(body.id, moved.is_ok());
    moved?;
    // SAFETY: the caller passes the room.
    unsafe { command.answer(body.response, bytes(&One { id: reported })) }
}
