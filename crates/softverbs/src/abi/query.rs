//! Queries of the device's and port's attributes.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;

use rdma_core_sys::*;

use crate::cq::{self, MAX_CQE};
use crate::entry::{guard, status};
use crate::gid;
use crate::limits::{MAX_MESSAGE, MAX_RD_ATOMIC, MAX_SGE, MAX_WR};
use crate::object::{Context, MAX_DM};
use crate::region::odp;
use crate::segment::layout::{MAX_CQS, MAX_QPS, MAX_REGIONS, MAX_SRQS};
use crate::srq;
use crate::sys::{self, Errno, Res};

/// Capabilities for which only `device_cap_flags_ex` has enough bits; values of the kernel's
/// `ib_uverbs_device_cap_flags`.
const FLUSH_GLOBAL: u64 = 1 << 38;
const FLUSH_PERSISTENT: u64 = 1 << 39;
const ATOMIC_WRITE: u64 = 1 << 40;

/// The default partition, in network order.
const PKEY: u16 = 0xffff;

fn device_attr(context: &Context) -> ibv_device_attr {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    for (to, from) in attr
        .fw_ver
        .iter_mut()
        .zip(env!("CARGO_PKG_VERSION").as_bytes())
    {
        *to = *from as c_char;
    }
    let guid = u64::from_ne_bytes(gid::guid(context.process.node));
    attr.node_guid = guid;
    attr.sys_image_guid = guid;
    // Locally administered, because no vendor has assigned a number.
    attr.vendor_id = 0x02_7776;
    attr.vendor_part_id = 1;
    attr.hw_ver = 1;
    attr.max_mr_size = u64::MAX;
    attr.page_size_cap = 0xffff_f000;
    attr.max_qp = MAX_QPS as c_int - 2;
    attr.max_qp_wr = MAX_WR.cast_signed();
    attr.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_XRC
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    attr.max_sge = MAX_SGE.cast_signed();
    attr.max_sge_rd = MAX_SGE.cast_signed();
    attr.max_cq = MAX_CQS as c_int;
    attr.max_cqe = MAX_CQE;
    attr.max_mr = MAX_REGIONS as c_int - 1;
    attr.max_mw = attr.max_mr;
    attr.max_pd = c_int::MAX;
    attr.max_ah = c_int::MAX;
    attr.max_qp_rd_atom = MAX_RD_ATOMIC.into();
    attr.max_res_rd_atom = c_int::from(MAX_RD_ATOMIC) * MAX_QPS as c_int;
    attr.max_qp_init_rd_atom = MAX_RD_ATOMIC.into();
    attr.atomic_cap = IBV_ATOMIC_HCA;
    if srq::enabled() {
        attr.max_srq = MAX_SRQS as c_int - 1; // index 0 is not used
        attr.max_srq_wr = MAX_WR.cast_signed();
        attr.max_srq_sge = MAX_SGE.cast_signed();
    } else {
        attr.device_cap_flags &= !IBV_DEVICE_XRC; // its receives are of shared queues
    }
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = 0;
    attr.phys_port_cnt = 1;
    attr
}

pub(super) unsafe extern "C" fn query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let context = unsafe { Context::from_ptr(context) };
        context.live()?;
        // SAFETY: the caller promises a writable structure.
        unsafe { attr.write(device_attr(context)) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let context = unsafe { Context::from_ptr(context) };
        // Constants, which are also valid in a forked child: it can have its own device memory.
        // SAFETY: NULL or readable.
        if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0)
            || size < size_of::<ibv_device_attr>()
        {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: all zeros is a value of it; zero means that no optional feature is supported.
        let mut full: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
        full.orig_attr = device_attr(context);
        full.phys_port_cnt_ex = 1;
        full.odp_caps = odp::caps();
        full.xrc_odp_caps = odp::xrc_caps();
        full.cq_mod_caps.max_cq_count = cq::MAX_MODERATION_COUNT;
        full.cq_mod_caps.max_cq_period = cq::MAX_MODERATION_PERIOD;
        full.max_dm_size = MAX_DM;
        full.device_cap_flags_ex = u64::from(full.orig_attr.device_cap_flags)
            | FLUSH_GLOBAL
            | FLUSH_PERSISTENT
            | ATOMIC_WRITE;
        // Nanoseconds: a clock of 1,000,000 kHz.
        full.completion_timestamp_mask = u64::MAX;
        full.hca_core_clock = 1_000_000;
        let len = size.min(size_of::<ibv_device_attr_ex>());
        // SAFETY: the caller promises that `size` bytes are writable.
        unsafe {
            attr.cast::<u8>().write_bytes(0, size);
            attr.cast::<u8>()
                .copy_from_nonoverlapping((&raw const full).cast(), len);
        }
        Ok(())
    })
}

/// The clock of completion timestamps.
pub(super) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context and valid values.
        let values = unsafe {
            Context::from_ptr(context).live()?;
            &mut *values
        };
        if values.comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if values.comp_mask != 0 {
            let now = sys::now_ns();
            values.raw_clock.tv_sec = (now / 1_000_000_000).cast_signed();
            values.raw_clock.tv_nsec = (now % 1_000_000_000).cast_signed();
        }
        Ok(())
    })
}

fn port_attr(context: &Context, port: u8) -> Res<ibv_port_attr> {
    let process = context.live()?;
    if port != 1 {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    attr.state = IBV_PORT_ACTIVE;
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = IBV_MTU_4096;
    attr.gid_tbl_len = gid::TABLE_LEN as c_int;
    attr.port_cap_flags = IBV_PORT_CM_SUP;
    attr.max_msg_sz = MAX_MESSAGE as u32;
    attr.pkey_tbl_len = 1;
    attr.lid = process.node as u16 + 1;
    attr.max_vl_num = 1;
    attr.active_width = 2;
    attr.active_speed = 32;
    attr.phys_state = 5;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    Ok(attr)
}

pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let full = port_attr(unsafe { Context::from_ptr(context) }, port)?;
        let len = size.min(size_of::<ibv_port_attr>());
        // SAFETY: the caller promises that `size` bytes are writable.
        unsafe {
            attr.cast::<u8>().write_bytes(0, size);
            attr.cast::<u8>()
                .copy_from_nonoverlapping((&raw const full).cast(), len);
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn query_port_compat(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // Older versions of the structure end where `port_cap_flags2` begins.
    const OLD: usize = offset_of!(ibv_port_attr, port_cap_flags2);
    // SAFETY: as the caller promises for the old structure.
    unsafe { query_port(context, port, attr.cast(), OLD) }
}

pub(super) unsafe extern "C" fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let result = guard(|| {
        // SAFETY: the caller promises a live context.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        if port != 1 || !(0..gid::TABLE_LEN as c_int).contains(&index) {
            return Err(Errno(libc::EINVAL));
        }
        let found = if index == 0 {
            gid::of_node(process.node)
        } else {
            [0; 16]
        };
        // SAFETY: the caller promises a writable GID, which is 16 bytes.
        unsafe { gid.cast::<[u8; 16]>().write(found) };
        Ok(())
    });
    minus_one(result)
}

pub(super) unsafe extern "C" fn query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    let result = guard(|| {
        // SAFETY: the caller promises a live context.
        unsafe { Context::from_ptr(context) }.live()?;
        if port != 1 || index != 0 {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises a writable key.
        unsafe { pkey.write(PKEY) };
        Ok(())
    });
    minus_one(result)
}

pub(super) unsafe extern "C" fn get_pkey_index(
    _context: *mut ibv_context,
    port: u8,
    pkey: u16,
) -> c_int {
    if port == 1 && pkey == PKEY {
        0
    } else {
        minus_one(Err(Errno(libc::EINVAL)))
    }
}

pub(super) unsafe extern "C" fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live context.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        if flags != 0 || size < size_of::<ibv_gid_entry>() || port != 1 {
            return Err(Errno(libc::EINVAL));
        }
        if index as usize >= gid::TABLE_LEN {
            return Err(Errno(libc::EINVAL));
        }
        if index as usize >= gid::TABLE {
            return Err(Errno(libc::ENODATA));
        }
        // SAFETY: the caller promises a writable entry of `size` bytes.
        unsafe { write_entry(entry, process.node) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    most: usize,
    flags: u32,
    size: usize,
) -> isize {
    let result = guard(|| {
        // SAFETY: the caller promises a live context.
        let process = unsafe { Context::from_ptr(context) }.live()?;
        if flags != 0 || size < size_of::<ibv_gid_entry>() || most < gid::TABLE {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises room for `most` entries of `size` bytes.
        unsafe { write_entry(entries, process.node) };
        Ok(())
    });
    match result {
        Ok(()) => gid::TABLE.cast_signed(),
        Err(error) => -(error.0 as isize),
    }
}

/// # Safety
/// `entry` must be writable.
unsafe fn write_entry(entry: *mut ibv_gid_entry, node: u32) {
    // SAFETY: the caller promises that; a GID is 16 bytes.
    unsafe {
        (&raw mut (*entry).gid)
            .cast::<[u8; 16]>()
            .write(gid::of_node(node));
        (&raw mut (*entry).gid_index).write(0);
        (&raw mut (*entry).port_num).write(1);
        (&raw mut (*entry).gid_type).write(IBV_GID_TYPE_ROCE_V2);
        (&raw mut (*entry).ndev_ifindex).write(0);
    }
}

fn minus_one(result: Res<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            -1
        }
    }
}
