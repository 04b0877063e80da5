//! A whole ops table of refusals for each kind: for unsupported calls of a fid (`FI_ENOSYS`), for
//! calls whose capability an endpoint was opened without (`FI_EOPNOTSUPP`), and for all calls of a
//! closed fid (`FI_EINVAL`). Real tables are built on these, so that no slot is ever NULL.

use std::ffi::{c_char, c_int};

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;

use crate::ffi::log::refused;

/// A function pointer type that has a refusal with errno `E`.
pub(crate) trait Refusal<const E: i32> {
    const REFUSE: Self;
}

/// The return value of a refusal.
pub(crate) trait Answer {
    fn refused(errno: i32) -> Self;
}

impl Answer for c_int {
    fn refused(errno: i32) -> Self {
        -errno
    }
}

/// The value of a counter; the calls that read it return no error, so a refusal is 0.
impl Answer for u64 {
    fn refused(_: i32) -> Self {
        0
    }
}

impl Answer for isize {
    fn refused(errno: i32) -> Self {
        -(errno as isize)
    }
}

impl Answer for *const c_char {
    fn refused(_: i32) -> Self {
        c"not supported".as_ptr()
    }
}

macro_rules! refusal {
    ($name:ident: $($arg:ident)*) => {
        unsafe extern "C" fn $name<const E: i32, R: Answer, $($arg),*>($(_: $arg),*) -> R {
            if E == FI_EINVAL {
                refused!(FI_LOG_CORE, EINVAL, "the object is closed");
            }
            if E == FI_EOPNOTSUPP {
                let reason = "the endpoint was opened without the capability of this call";
                refused!(FI_LOG_EP_DATA, EOPNOTSUPP, "{reason}");
            }
            R::refused(E)
        }
        impl<const E: i32, R: Answer, $($arg),*> Refusal<E> for unsafe extern "C" fn($($arg),*) -> R {
            const REFUSE: Self = $name::<E, R, $($arg),*>;
        }
    };
}

refusal!(refuse1: A);
refusal!(refuse2: A B);
refusal!(refuse3: A B C);
refusal!(refuse4: A B C D);
refusal!(refuse5: A B C D F);
refusal!(refuse6: A B C D F G);
refusal!(refuse7: A B C D F G H);
refusal!(refuse8: A B C D F G H I);
refusal!(refuse9: A B C D F G H I J);
refusal!(refuse10: A B C D F G H I J K);
refusal!(refuse11: A B C D F G H I J K L);
refusal!(refuse12: A B C D F G H I J K L M);
refusal!(refuse13: A B C D F G H I J K L M N);
refusal!(refuse14: A B C D F G H I J K L M N O);
refusal!(refuse15: A B C D F G H I J K L M N O P);
refusal!(refuse16: A B C D F G H I J K L M N O P Q);

/// The refusal for a slot of type `T`.
const fn no<const E: i32, T: Refusal<E>>() -> Option<T> {
    Some(T::REFUSE)
}

macro_rules! tables {
    ($($table:ident: $type:ident { $($slot:ident)* })*) => { $(
        pub(crate) const fn $table<const E: i32>() -> $type {
            $type { size: size_of::<$type>(), $($slot: no::<E, _>()),* }
        }
    )* };
}

tables! {
    fid: fi_ops { close bind control ops_open tostr ops_set }
    fabric: fi_ops_fabric { domain passive_ep eq_open wait_open trywait domain2 }
    eq: fi_ops_eq { read readerr write sread strerror }
    mr: fi_ops_mr { reg regv regattr }
    av: fi_ops_av {
        insert insertsvc insertsym remove lookup straddr av_set insert_auth_key lookup_auth_key
        set_user_id
    }
    poll: fi_ops_poll { poll poll_add poll_del }
    msg: fi_ops_msg { recv recvv recvmsg send sendv sendmsg inject senddata injectdata }
    cm: fi_ops_cm { setname getname getpeer connect listen accept reject shutdown join }
    rma: fi_ops_rma { read readv readmsg write writev writemsg inject writedata injectdata }
    tagged: fi_ops_tagged { recv recvv recvmsg send sendv sendmsg inject senddata injectdata }
    atomic: fi_ops_atomic {
        write writev writemsg inject readwrite readwritev readwritemsg compwrite compwritev
        compwritemsg writevalid readwritevalid compwritevalid
    }
    collective: fi_ops_collective {
        barrier broadcast alltoall allreduce allgather reduce_scatter reduce scatter gather msg barrier2
    }
    cq_base: fi_ops_cq { read readfrom readerr sread sreadfrom signal strerror }
    cntr_base: fi_ops_cntr { read readerr add set wait adderr seterr }
    ep_base: fi_ops_ep { cancel getopt setopt tx_ctx rx_ctx rx_size_left tx_size_left }
    domain_base: fi_ops_domain {
        av_open cq_open endpoint scalable_ep cntr_open poll_open stx_ctx srx_ctx query_atomic
        query_collective endpoint2
    }
}

/// The refusal for the slot that libfabric's main branch appends. The functions for this slot take
/// only scalars and pointers and return an int, so in every C calling convention that libfabric
/// supports a function without parameters can be called in their place.
unsafe extern "C" fn appended<const E: i32>() -> c_int {
    -E
}

macro_rules! with_main_slot {
    ($($table:ident: $base:ident $type:ident;)*) => { $(
        /// The table with a refusal in the slot that the main branch appends.
        pub(crate) const fn $table<const E: i32>(base: $type) -> WithMainSlot<$type> {
            let mut table = WithMainSlot { base, appended: appended::<E> };
            table.base.size = size_of::<WithMainSlot<$type>>();
            table
        }
    )* };
}

with_main_slot! {
    cq: cq_base fi_ops_cq;
    cntr: cntr_base fi_ops_cntr;
    ep: ep_base fi_ops_ep;
    domain: domain_base fi_ops_domain;
}

/// The tables of a closed fid: every call returns `-FI_EINVAL`.
pub(crate) mod closed {
    use super::*;

    const E: i32 = FI_EINVAL;

    pub(crate) static FID: fi_ops = super::fid::<E>();
    pub(crate) static FABRIC: fi_ops_fabric = super::fabric::<E>();
    pub(crate) static DOMAIN: WithMainSlot<fi_ops_domain> = super::domain::<E>(domain_base::<E>());
    pub(crate) static MR: fi_ops_mr = super::mr::<E>();
    pub(crate) static AV: fi_ops_av = super::av::<E>();
    pub(crate) static POLL: fi_ops_poll = super::poll::<E>();
    pub(crate) static EQ: fi_ops_eq = super::eq::<E>();
    pub(crate) static CQ: WithMainSlot<fi_ops_cq> = super::cq::<E>(cq_base::<E>());
    pub(crate) static CNTR: WithMainSlot<fi_ops_cntr> = super::cntr::<E>(cntr_base::<E>());
    pub(crate) static EP: WithMainSlot<fi_ops_ep> = super::ep::<E>(ep_base::<E>());
    pub(crate) static CM: fi_ops_cm = super::cm::<E>();
    pub(crate) static MSG: fi_ops_msg = super::msg::<E>();
    pub(crate) static RMA: fi_ops_rma = super::rma::<E>();
    pub(crate) static TAGGED: fi_ops_tagged = super::tagged::<E>();
    pub(crate) static ATOMIC: fi_ops_atomic = super::atomic::<E>();

    /// Puts the refusals into an endpoint of any class.
    pub(crate) fn retire_ep(c: &mut fid_ep) {
        c.ops = (&raw const EP.base).cast_mut();
        c.cm = (&raw const CM).cast_mut();
        c.msg = (&raw const MSG).cast_mut();
        c.rma = (&raw const RMA).cast_mut();
        c.tagged = (&raw const TAGGED).cast_mut();
        c.atomic = (&raw const ATOMIC).cast_mut();
    }
}
