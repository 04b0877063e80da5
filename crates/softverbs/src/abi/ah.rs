//! Address handles: the destinations of datagrams.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::entry::{non_null, pointer, status};
use crate::gid;
use crate::object::{Ah, Context, Pd};
use crate::qp::address_good;
use crate::sys::{Errno, Res, try_box};

/// # Errors
/// `EINVAL`: an address without a global route, which an Ethernet port needs, or whose node is not
/// of this host.
pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pointer(|| {
        non_null(pd)?;
        non_null(attr)?;
        // SAFETY: the caller promises a live domain, whose context is live, and valid attributes.
        let (domain, context, attr) = unsafe { (Pd::from_ptr(pd), (*pd).context, &*attr) };
        // SAFETY: the caller promises a live domain, whose context is live, and valid attributes.
        unsafe { Context::from_ptr(context) }.live()?;
        if attr.is_global == 0 || !address_good(attr) {
            return Err(Errno(libc::EINVAL));
        }
        let node = gid::node_of(&attr.grh.dgid).ok_or(Errno(libc::EINVAL))?;
        let ah = try_box(Ah {
            object: ibv_ah {
                context,
                pd,
                handle: node,
            },
            node,
            flow: u32::from(attr.grh.traffic_class) << 20 | attr.grh.flow_label & 0xf_ffff,
        })?;
        domain.children.fetch_add(1, Ordering::Relaxed);
        Ok(Box::into_raw(ah).cast())
    })
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live handle, whose domain is live.
        unsafe {
            Context::from_ptr((*ah).context).live()?;
            Pd::from_ptr((*ah).pd)
                .children
                .fetch_sub(1, Ordering::Relaxed);
            // Made by `Box::into_raw` in `create_ah`.
            drop(Box::from_raw(ah.cast::<Ah>()));
        }
        Ok(())
    })
}

/// The address of the sender of a received datagram.
fn address_of_sender(
    context: &Context,
    port: u8,
    wc: &ibv_wc,
    grh: *const ibv_grh,
) -> Res<ibv_ah_attr> {
    let process = context.live()?;
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    attr.port_num = port;
    if wc.wc_flags & IBV_WC_GRH != 0 {
        non_null(grh)?;
        // SAFETY: the caller of the entry promises the first 40 bytes of the receive.
        let grh = unsafe { grh.read_unaligned() };
        // The only address that this port has.
        if gid::node_of(&grh.dgid) != Some(process.node) {
            return Err(Errno(libc::EINVAL));
        }
        let flow = u32::from_be(grh.version_tclass_flow);
        attr.is_global = 1;
        attr.grh.dgid = grh.sgid;
        attr.grh.sgid_index = 0;
        attr.grh.hop_limit = 0xff;
        attr.grh.flow_label = flow & 0xf_ffff;
        attr.grh.traffic_class = (flow >> 20) as u8;
    }
    Ok(attr)
}

pub(super) unsafe extern "C" fn init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    let code = status(|| {
        non_null(wc)?;
        non_null(attr)?;
        // SAFETY: the caller promises a live context, a completion, and room for the attributes.
        unsafe {
            attr.write(address_of_sender(
                Context::from_ptr(context),
                port,
                &*wc,
                grh,
            )?)
        };
        Ok(())
    });
    if code == 0 { 0 } else { -1 }
}

pub(super) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    pointer(|| {
        non_null(pd)?;
        non_null(wc)?;
        // SAFETY: the caller promises live objects and a completion.
        unsafe {
            let mut attr = address_of_sender(Context::from_ptr((*pd).context), port, &*wc, grh)?;
            let ah = create_ah(pd, &raw mut attr);
            if ah.is_null() {
                return Err(Errno::last());
            }
            Ok(ah)
        }
    })
}
