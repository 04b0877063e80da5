//! fi_control, fi_getopt and fi_setopt, fi_endpoint(3).

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, cq_attr, open_cq, open_ep, open_eq};
use abi_tests::pair::{Pair, Role, completion, is_empty};
use libfabric_sys::*;

use super::setup;

const INVALID: i32 = -FI_EINVAL;
const STATE: i32 = -FI_EOPBADSTATE;

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA | FI_ATOMIC);
    // SAFETY: fids as they are opened.
    unsafe {
        backlog(&setup);
        lengths(lib, &setup);
        aliases(lib, &setup);
    }
    setup.close();
}

unsafe fn backlog(setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let fabric = setup.fabric;
        let mut pep = null_mut();
        let info = setup.info.first();
        let open = (*(*fabric).ops).passive_ep.expect("a slot");
        assert_eq!(open(fabric, info, &raw mut pep, null_mut()), 0);
        let mut backlog: c_int = 3;
        let arg = (&raw mut backlog).cast();
        assert_eq!(control(pep, FI_BACKLOG, null_mut()), INVALID);
        assert_eq!(control(pep, FI_BACKLOG, arg), 0);
        for wrong in [0, -1] {
            *arg.cast::<c_int>() = wrong;
            assert_eq!(control(pep, FI_BACKLOG, arg), INVALID, "{wrong}");
        }
        assert_eq!(control(pep, FI_ENABLE, null_mut()), -FI_ENOSYS);
        assert_eq!(bind(pep, setup.eq, 0), 0);
        assert_eq!(call!((*pep).cm, listen, pep), 0);
        *arg.cast::<c_int>() = 5;
        assert_eq!(control(pep, FI_BACKLOG, arg), STATE, "too late");
        assert_eq!(close(pep), 0);
    }
}

unsafe fn get(ep: *mut fid_ep, name: u32) -> (i32, usize) {
    let (mut value, mut len) = (0_usize, size_of::<usize>());
    let (to, name) = ((&raw mut value).cast(), name.cast_signed());
    // SAFETY: an open endpoint.
    let ret = unsafe { call!((*ep).ops, getopt, ep.cast(), 0, name, to, &raw mut len) };
    (ret, value)
}

unsafe fn set(ep: *mut fid_ep, name: u32, value: usize) -> i32 {
    let from = (&raw const value).cast();
    // SAFETY: an open endpoint.
    unsafe { call!((*ep).ops, setopt, ep.cast(), 0, name.cast_signed(), from, 8) }
}

unsafe fn lengths(lib: &Lib, setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let info = setup.info.first();
        let max = (*(*info).ep_attr).max_msg_size;
        let inject = (*(*info).tx_attr).inject_size;
        let pair = Pair::connect(lib, setup, info, |ep, role| {
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
            if role == Role::Server {
                return;
            }
            for (name, value) in [
                (FI_OPT_MAX_MSG_SIZE, max),
                (FI_OPT_MAX_RMA_SIZE, max),
                (FI_OPT_INJECT_MSG_SIZE, inject),
                (FI_OPT_INJECT_RMA_SIZE, inject),
            ] {
                assert_eq!(get(ep, name), (0, value));
                assert_eq!(set(ep, name, value + 1), INVALID, "more than there is");
                assert_eq!(get(ep, name), (0, value), "nothing changed");
            }
            assert_eq!(get(ep, FI_OPT_MAX_ATOMIC_SIZE), (0, 8));
            assert_eq!(get(ep, FI_OPT_CM_DATA_SIZE), (0, 35));
            assert_eq!(set(ep, FI_OPT_CM_DATA_SIZE, 10), -FI_ENOPROTOOPT);
            for name in [
                FI_OPT_MIN_MULTI_RECV, // a verbs receive takes one message
                FI_OPT_BUFFERED_MIN,
                FI_OPT_BUFFERED_LIMIT,
                FI_OPT_SEND_BUF_SIZE,
                FI_OPT_RECV_BUF_SIZE,
                FI_OPT_TX_SIZE,
                FI_OPT_RX_SIZE,
                FI_OPT_XPU_TRIGGER,
                FI_OPT_MAX_TAGGED_SIZE,
                FI_OPT_INJECT_TAGGED_SIZE,
                FI_OPT_INJECT_ATOMIC_SIZE + 1,
                9999,
                u32::MAX,
            ] {
                let unknown = match name {
                    FI_OPT_XPU_TRIGGER => -FI_EOPNOTSUPP, // no triggered operations
                    _ => -FI_ENOPROTOOPT,
                };
                assert_eq!(get(ep, name).0, unknown);
                assert_eq!(set(ep, name, 1), -FI_ENOPROTOOPT);
            }
            assert_eq!(get(ep, FI_OPT_INJECT_ATOMIC_SIZE), (0, 8));
            for name in [FI_OPT_MAX_ATOMIC_SIZE, FI_OPT_INJECT_ATOMIC_SIZE] {
                assert_eq!(set(ep, name, 4), -FI_ENOPROTOOPT, "verbs has one size");
            }
            choices(ep);
            let one = 1_usize;
            let short = call!(
                (*ep).ops,
                setopt,
                ep.cast(),
                0,
                FI_OPT_MAX_MSG_SIZE.cast_signed(),
                (&raw const one).cast(),
                4
            );
            assert_eq!(short, INVALID, "half a size");
            assert_eq!(set(ep, FI_OPT_MAX_MSG_SIZE, 20), 0);
            assert_eq!(set(ep, FI_OPT_INJECT_RMA_SIZE, 10), 0);
        });
        let client = pair.client;
        assert_eq!(set(client, FI_OPT_MAX_MSG_SIZE, 10), STATE, "too late");
        assert_eq!(get(client, FI_OPT_MAX_MSG_SIZE), (0, 20));
        let bytes = [0_u8; 64];
        let buf = bytes.as_ptr().cast::<c_void>();
        let long = -(FI_EMSGSIZE as isize);
        assert_eq!(call!((*client).msg, inject, client, buf, 21, 0), long);
        let ret = call!((*client).rma, inject, client, buf, 11, 0, 0, 0);
        assert_eq!(ret, long, "only messages were given the other limit");
        pair.close();
    }
}

/// Options that enable a feature: an unused feature can be disabled.
unsafe fn choices(ep: *mut fid_ep) {
    // SAFETY: an open endpoint, and values of the sizes that are passed.
    unsafe {
        let call = (*(*ep).ops).setopt.expect("a slot");
        let set = |name: u32, value: *const c_void, len| {
            call(ep.cast(), 0, name.cast_signed(), value, len)
        };
        let p2p = |value: u32| set(FI_OPT_FI_HMEM_P2P, (&raw const value).cast(), 4);
        for value in [
            FI_HMEM_P2P_ENABLED,
            FI_HMEM_P2P_PREFERRED,
            FI_HMEM_P2P_DISABLED,
        ] {
            assert_eq!(p2p(value), 0);
            let (mut set, mut len) = (99_u32, 4);
            let getopt = (*(*ep).ops).getopt.expect("a slot");
            let name = FI_OPT_FI_HMEM_P2P.cast_signed();
            assert_eq!(
                getopt(ep.cast(), 0, name, (&raw mut set).cast(), &mut len),
                0
            );
            assert_eq!((set, len), (value, 4));
        }
        assert_eq!(p2p(FI_HMEM_P2P_REQUIRED), -FI_EOPNOTSUPP);
        for value in [4, 5, 128, u32::MAX] {
            assert_eq!(p2p(value), INVALID);
        }
        assert_eq!(set(FI_OPT_FI_HMEM_P2P, null(), 4), INVALID);
        for name in [FI_OPT_CUDA_API_PERMITTED, FI_OPT_SHARED_MEMORY_PERMITTED] {
            for permitted in [false, true] {
                let value = (&raw const permitted).cast();
                let ret = match (name, permitted) {
                    (FI_OPT_CUDA_API_PERMITTED, _) => INVALID, // there is no CUDA
                    // soft0 reaches its peers by shared memory alone
                    (_, false) => -FI_EOPNOTSUPP,
                    (_, true) => 0,
                };
                assert_eq!(set(name, value, 1), ret);
                assert_eq!(set(name, value, 8), INVALID, "a bool has one byte");
            }
            assert_eq!(set(name, null(), 1), INVALID);
        }
        let value = 1_usize;
        let (value, name) = ((&raw const value).cast(), FI_OPT_MAX_MSG_SIZE.cast_signed());
        assert_eq!(call(ep.cast(), 1, name, value, 8), -FI_ENOPROTOOPT, "level");
        // commands of other fids, and unknown commands
        for command in [
            FI_BACKLOG,
            FI_GETWAIT,
            FI_GETFIDFLAG,
            FI_QUEUE_WORK,
            FI_REFRESH,
            9999,
        ] {
            assert_eq!(control(ep, command, null_mut()), -FI_ENOSYS, "{command}");
        }
    }
}

unsafe fn aliases(lib: &Lib, setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let selective = FI_TRANSMIT | FI_SELECTIVE_COMPLETION;
        let pair = Pair::connect(lib, setup, setup.info.first(), |ep, role| {
            let flags = match role {
                Role::Client => selective,
                Role::Server => selective | FI_RECV,
            };
            assert_eq!(bind(ep, setup.cq, flags), 0);
            if role == Role::Client {
                assert_eq!(bind(ep, setup.cq, FI_RECV), 0);
            }
        });
        let client = pair.client;
        let alias = |flags: u64, out: *mut *mut fid_ep| {
            let mut arg = fi_alias {
                fid: out.cast(),
                flags,
            };
            control(client, FI_ALIAS, (&raw mut arg).cast())
        };
        let mut loud = null_mut::<fid_ep>();
        assert_eq!(alias(0, &raw mut loud), INVALID, "which direction?");
        assert_eq!(alias(FI_TRANSMIT | FI_RECV, &raw mut loud), INVALID);
        assert_eq!(alias(FI_TRANSMIT | FI_MORE, &raw mut loud), -FI_EBADFLAGS);
        assert_eq!(alias(FI_TRANSMIT, null_mut()), INVALID);
        assert_eq!(control(client, FI_ALIAS, null_mut()), INVALID);
        assert!(loud.is_null());
        assert_eq!(alias(FI_TRANSMIT | FI_COMPLETION, &raw mut loud), 0);
        assert_eq!((*loud).fid.fclass, FI_CLASS_EP);
        assert_eq!(close(client), -FI_EBUSY, "its alias is open");
        let mut flags = FI_TRANSMIT;
        let arg = (&raw mut flags).cast();
        assert_eq!(control(loud, FI_GETOPSFLAG, arg), 0);
        assert_eq!(flags, FI_COMPLETION);
        *arg.cast::<u64>() = FI_TRANSMIT;
        assert_eq!(control(client, FI_GETOPSFLAG, arg), 0);
        assert_eq!(flags, 0, "the endpoint keeps its own");

        let server = pair.server;
        for context in 0..2_usize {
            let none = null_mut();
            let ret = call!((*server).msg, recv, server, none, 0, none, 0, none);
            assert_eq!(ret, 0, "receive {context}");
        }
        let context = (&raw mut loud).cast::<c_void>();
        let quiet = call!(
            (*client).msg,
            send,
            client,
            null(),
            0,
            null_mut(),
            0,
            null_mut()
        );
        assert_eq!(quiet, 0);
        let ret = call!((*loud).msg, send, loud, null(), 0, null_mut(), 0, context);
        assert_eq!(ret, 0);
        let done = completion(setup.cq).expect("a send");
        assert_eq!((done.op_context, done.flags), (context, FI_SEND | FI_MSG));
        assert!(is_empty(setup.cq), "the endpoint itself is selective");
        assert_eq!(close(loud), 0);
        assert_eq!(close(loud), INVALID, "twice");
        let ret = call!(
            (*client).msg,
            send,
            client,
            null(),
            0,
            null_mut(),
            0,
            null_mut()
        );
        assert_eq!(ret, 0, "the endpoint is still connected");
        pair.close();
        let mut entry = std::mem::zeroed::<fi_cq_err_entry>();
        while call!((*setup.cq).ops, readerr, setup.cq, &raw mut entry, 0) == 1 {}

        // a disabled endpoint can have aliases too
        let ep = open_ep(setup, setup.info.first());
        let mut arg = fi_alias {
            fid: (&raw mut loud).cast(),
            flags: FI_RECV | FI_COMPLETION,
        };
        assert_eq!(control(ep, FI_ALIAS, (&raw mut arg).cast()), 0);
        assert_eq!(close(loud), 0);
        assert_eq!(close(ep), 0);
        alias_binds(setup);
    }
}

/// Binding by an alias is binding of the endpoint: the queues stay in use after the alias is
/// closed, until the endpoint is (fi_cq(3), fi_eq(3)).
unsafe fn alias_binds(setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let (mut ep, mut alias) = (null_mut::<fid_ep>(), null_mut::<fid_ep>());
        let (domain, info) = (setup.domain, setup.info.first());
        let ops = (*domain).ops;
        let ret = call!(ops, endpoint, domain, info, &raw mut ep, null_mut());
        assert_eq!(ret, 0);
        let cq = open_cq(domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_NONE));
        let eq = open_eq(setup.fabric);
        let mut arg = fi_alias {
            fid: (&raw mut alias).cast(),
            flags: FI_TRANSMIT,
        };
        assert_eq!(control(ep, FI_ALIAS, (&raw mut arg).cast()), 0);
        let both = FI_TRANSMIT | FI_RECV;
        assert_eq!(bind(alias, cq, both), 0);
        assert_eq!(bind(ep, cq, both), INVALID, "the alias has bound it");
        assert_eq!(bind(alias, eq, 0), 0);
        assert_eq!(close(cq), -FI_EBUSY);
        assert_eq!(close(alias), 0);
        assert_eq!(close(cq), -FI_EBUSY, "the endpoint is still bound");
        assert_eq!(close(eq), -FI_EBUSY, "the endpoint is still bound");
        assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        assert_eq!(close(ep), 0);
        assert_eq!(close(cq), 0);
        assert_eq!(close(eq), 0);
    }
}
