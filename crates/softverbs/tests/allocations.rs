//! Refused allocations, for every verb and each of its allocations: the call returns `ENOMEM` and
//! leaves no memory allocated. Calls that end an object allocate nothing.
//!
//! The allocator of this program refuses the allocations that a test selects.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);

struct Refusing;

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Number of allocations in use.
static IN_USE: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    /// Number of the allocation of this thread that is refused; 0: none.
    static REFUSED: Cell<u32> = const { Cell::new(0) };
    /// Number of this thread's allocations since the count was reset.
    static ASKED: Cell<u32> = const { Cell::new(0) };
}

fn refuses() -> bool {
    let asked = ASKED.with(|asked| asked.replace(asked.get() + 1)) + 1;
    REFUSED.with(|refused| refused.get() == asked)
}

// SAFETY: the system's, or NULL, as an allocator may say.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refuses() {
            return null_mut();
        }
        IN_USE.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if refuses() {
            return null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// The result of `call` if its allocation with this number is refused (0: none), and the number of
/// its allocations.
fn refusing<T>(number: u32, call: impl FnOnce() -> T) -> (T, u32) {
    REFUSED.set(number);
    ASKED.set(0);
    let result = call();
    REFUSED.set(0);
    (result, ASKED.get())
}

/// Numbers of allocations, descriptors, and mappings of the device's files.
fn in_use() -> [usize; 3] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let files = maps.lines().filter(|line| line.contains("softverbs"));
    let mapped = files.count();
    drop(maps);
    [IN_USE.load(Ordering::Relaxed).cast_unsigned(), fds, mapped]
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn live<T>(object: *mut T) -> Result<*mut T, i32> {
    if object.is_null() {
        Err(errno())
    } else {
        Ok(object)
    }
}

fn zero(ret: c_int) -> Result<(), i32> {
    match ret {
        0 => Ok(()),
        -1 => Err(errno()),
        code => Err(code),
    }
}

/// Number of objects to make before the memory that remains no longer grows: numbers are reused
/// late.
const SETTLED: u32 = 600;
/// The same for keys.
const SETTLED_KEYS: u32 = 6000;

/// Refuses each allocation of `make`, first in a process that has made no such object, then after
/// `settled` of them. Returns the number of allocations in the second case.
fn each<T>(
    name: &str,
    settled: u32,
    make: impl Fn() -> Result<T, i32>,
    undo: impl Fn(T) -> c_int,
) -> u32 {
    let end = |made: T| {
        let (ret, asked) = refusing(1, || undo(made));
        assert_eq!((ret, asked), (0, 0), "{name}: what ends it takes memory");
    };
    let all = |strict: bool| {
        for number in 1.. {
            let before = in_use();
            let (made, asked) = refusing(number, &make);
            match made {
                Ok(made) => end(made),
                Err(code) => assert_eq!(code, libc::ENOMEM, "{name}, request {number}"),
            }
            if asked < number {
                return asked;
            }
            let after = in_use();
            assert_eq!(before[1..], after[1..], "{name}, request {number}");
            assert!(
                !strict || before == after,
                "{name}, request {number}: {before:?} {after:?}"
            );
        }
        0
    };
    let cold = all(false);
    for _ in 0..settled {
        end(make().unwrap_or_else(|code| panic!("{name}: {code}")));
    }
    let warm = all(true);
    let before = in_use();
    end(make().unwrap());
    assert_eq!(before, in_use(), "{name}");
    eprintln!("{name}: {cold}, later {warm}");
    warm
}

fn main() {
    let cases: &[Case] = &[
        ("opening", |link| link.expect("done"), opening),
        ("objects", |link| link.expect("done"), objects),
        ("memory", |link| link.expect("done"), memory),
        ("xrc", |link| link.expect("done"), xrc),
        ("imports", |link| link.expect("done"), imports),
        ("connecting", connecting, to_connect),
        ("working", |link| link.expect("done"), working),
        ("waiting", |link| link.expect("done"), waiting),
        ("batches", |link| link.expect("done"), batches),
    ];
    run(cases);
}

/// The first call of a process, and later ones.
fn opening(link: &mut Link) {
    let v = verbs();
    // SAFETY: the list is freed after its last use; contexts are closed once.
    unsafe {
        let list = (v.ibv_get_device_list)(null_mut());
        let open = || live((v.ibv_open_device)(*list));
        // the process's own state is allocated completely or not at all
        let (mut kept, mut grown) = (in_use(), 0);
        for number in 1.. {
            let (made, asked) = refusing(number, open);
            match made {
                Ok(context) => assert_eq!((v.ibv_close_device)(context), 0),
                Err(code) => assert_eq!(code, libc::ENOMEM, "request {number}"),
            }
            let now = in_use();
            if now[1..] != kept[1..] {
                grown += 1;
                kept = now;
            }
            if asked < number {
                break;
            }
        }
        assert_eq!(grown, 1);
        each("open_device", SETTLED, open, |context| {
            (v.ibv_close_device)(context)
        });
        (v.ibv_free_device_list)(list);
    }
    link.say("done");
}

fn qp_init(end: &End, kind: u32) -> ibv_qp_init_attr {
    // SAFETY: all zeros is a value of it.
    let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
    init.send_cq = end.cq;
    init.recv_cq = end.cq;
    init.qp_type = kind;
    init.cap.max_send_wr = 4;
    init.cap.max_recv_wr = 4;
    init.cap.max_send_sge = 2;
    init.cap.max_recv_sge = 2;
    init
}

fn objects(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let (context, pd, v) = (end.context, end.pd, verbs());
    // SAFETY: live objects, and valid attributes, of which all zeros is a value; each new object is
    // ended once.
    unsafe {
        let x = verbs_get_ctx(context).unwrap();
        each(
            "alloc_pd",
            SETTLED,
            || live((v.ibv_alloc_pd)(context)),
            |pd| (v.ibv_dealloc_pd)(pd),
        );
        let mut attr: ibv_td_init_attr = std::mem::zeroed();
        let attr = &raw mut attr;
        let dealloc = (*x).dealloc_td.unwrap();
        let td = || live((*x).alloc_td.unwrap()(context, attr));
        each("alloc_td", SETTLED, td, |td| dealloc(td));
        let mut attr: ibv_parent_domain_init_attr = std::mem::zeroed();
        attr.pd = pd;
        let attr = &raw mut attr;
        let parent = || live((*x).alloc_parent_domain.unwrap()(context, attr));
        each("alloc_parent_domain", SETTLED, parent, |pd| {
            (v.ibv_dealloc_pd)(pd)
        });
        let channel = || live((v.ibv_create_comp_channel)(context));
        each("create_comp_channel", SETTLED, channel, |c| {
            (v.ibv_destroy_comp_channel)(c)
        });
        let cq = || live((v.ibv_create_cq)(context, 16, null_mut(), end.channel, 0));
        each("create_cq", SETTLED, cq, |cq| (v.ibv_destroy_cq)(cq));
        let mut attr: ibv_cq_init_attr_ex = std::mem::zeroed();
        attr.cqe = 4;
        let attr = &raw mut attr;
        let cq = || live((*x).create_cq_ex.unwrap()(context, attr));
        each("create_cq_ex", SETTLED, cq, |cq| {
            (v.ibv_destroy_cq)(cq.cast())
        });
        let resize = || zero((v.ibv_resize_cq)(end.cq, 100));
        assert!(each("resize_cq", 1, resize, |()| 0) > 0);
        let mut attr: ibv_srq_init_attr = std::mem::zeroed();
        attr.attr.max_wr = 4;
        attr.attr.max_sge = 2;
        let attr = &raw mut attr;
        let srq = || live((v.ibv_create_srq)(pd, attr));
        assert!(each("create_srq", SETTLED, srq, |srq| (v.ibv_destroy_srq)(srq)) > 3);
        for kind in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
            let mut init = qp_init(&end, kind);
            let init = &raw mut init;
            let qp = || live((v.ibv_create_qp)(pd, init));
            // the memory of waiting sends is allocated when the first one waits (`waiting`)
            assert!(each("create_qp", SETTLED, qp, |qp| (v.ibv_destroy_qp)(qp)) > 1);
        }
        let to = end.address();
        let mut attr: ibv_ah_attr = std::mem::zeroed();
        attr.port_num = 1;
        attr.is_global = 1;
        (&raw mut attr.grh.dgid)
            .cast::<u128>()
            .write_unaligned(to.gid);
        let attr = &raw mut attr;
        each(
            "create_ah",
            SETTLED,
            || live((v.ibv_create_ah)(pd, attr)),
            |ah| (v.ibv_destroy_ah)(ah),
        );
    }
    link.say("done");
}

fn memory(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let (context, pd, v) = (end.context, end.pd, verbs());
    let page = Box::leak(Box::new([0u8; 4096])).as_mut_ptr();
    let write = IBV_ACCESS_LOCAL_WRITE.cast_signed();
    let dereg = |mr| {
        // SAFETY: live, and not used any more.
        unsafe { (v.ibv_dereg_mr)(mr) }
    };
    // SAFETY: live objects, and valid attributes, of which all zeros is a value; each new object is
    // ended once.
    unsafe {
        let x = verbs_get_ctx(context).unwrap();
        let reg = || live((v.ibv_reg_mr)(pd, page.cast(), 4096, write));
        each("reg_mr", SETTLED_KEYS, reg, dereg);
        let mr = reg().unwrap();
        let rereg = || {
            let flags = IBV_REREG_MR_CHANGE_TRANSLATION.cast_signed();
            let ret = v.ibv_rereg_mr.unwrap()(mr, flags, null_mut(), page.cast(), 2048, 0);
            if ret == 0 { Ok(()) } else { Err(errno()) }
        };
        each("rereg_mr", 1, rereg, |()| 0);
        let null = || live((*x).alloc_null_mr.unwrap()(pd));
        each("alloc_null_mr", 1, null, dereg);
        for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
            let mw = || live((*context).ops.alloc_mw.unwrap()(pd, kind));
            each("alloc_mw", 1, mw, |mw| {
                (*context).ops.dealloc_mw.unwrap()(mw)
            });
        }
        let mut attr: ibv_alloc_dm_attr = std::mem::zeroed();
        attr.length = 4096;
        let attr = &raw mut attr;
        let alloc = || live((*x).alloc_dm.unwrap()(context, attr));
        each("alloc_dm", 1, alloc, |dm| (*x).free_dm.unwrap()(dm));
        let dm = alloc().unwrap();
        let zero_based = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE;
        let reg = || live((*x).reg_dm_mr.unwrap()(pd, dm, 0, 64, zero_based));
        each("reg_dm_mr", 1, reg, dereg);
        let alloc = || {
            let mut buf = null_mut();
            let addr = live(v.ibv_alloc_buf.unwrap()(pd, 4096, &raw mut buf))?;
            Ok((addr, buf))
        };
        let free = |buf| {
            v.ibv_free_buf.unwrap()(buf);
            0
        };
        each("alloc_buf", 1, alloc, |(_, buf)| free(buf));
        let (addr, buf) = alloc().unwrap();
        let reg = || live(v.ibv_reg_buf_mr.unwrap()(pd, buf, addr, 64, write));
        each("reg_buf_mr", 1, reg, dereg);
        let on_demand = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND).cast_signed();
        let mr = live((v.ibv_reg_mr)(pd, page.cast(), 4096, on_demand)).unwrap();
        let mut pieces = [ibv_sge {
            addr: page as u64,
            length: 4096,
            lkey: (*mr).lkey,
        }; 2];
        let pieces = pieces.as_mut_ptr();
        let advice = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH;
        let advise = || zero((*x).advise_mr.unwrap()(pd, advice, 0, pieces, 2));
        assert!(each("advise_mr", 1, advise, |()| 0) > 0);
    }
    link.say("done");
}

fn xrc(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let v = verbs();
    // SAFETY: live objects, and valid attributes, of which all zeros is a value; each new object is
    // ended once.
    unsafe {
        let x = verbs_get_ctx(end.context).unwrap();
        let mut init: ibv_xrcd_init_attr = std::mem::zeroed();
        init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        init.fd = -1;
        init.oflags = libc::O_CREAT;
        let init = &raw mut init;
        let open = || live((*x).open_xrcd.unwrap()(end.context, init));
        each("open_xrcd", SETTLED, open, |xrcd| {
            (*x).close_xrcd.unwrap()(xrcd)
        });
        let xrcd = open().unwrap();
        let mut init: ibv_srq_init_attr_ex = std::mem::zeroed();
        init.attr.max_wr = 4;
        init.attr.max_sge = 1;
        init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE
            | IBV_SRQ_INIT_ATTR_PD
            | IBV_SRQ_INIT_ATTR_XRCD
            | IBV_SRQ_INIT_ATTR_CQ;
        init.srq_type = IBV_SRQT_XRC;
        init.pd = end.pd;
        init.xrcd = xrcd;
        init.cq = end.cq;
        let init = &raw mut init;
        let srq = || live((*x).create_srq_ex.unwrap()(end.context, init));
        each("create_srq_ex", SETTLED, srq, |srq| {
            (v.ibv_destroy_srq)(srq)
        });
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        init.qp_type = IBV_QPT_XRC_RECV;
        init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
        init.xrcd = xrcd;
        let init = &raw mut init;
        let target = || live((*x).create_qp_ex.unwrap()(end.context, init));
        each("create_qp_ex of a target", SETTLED, target, |qp| {
            (v.ibv_destroy_qp)(qp)
        });
        let kept = target().unwrap();
        let mut attr: ibv_qp_open_attr = std::mem::zeroed();
        attr.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
        attr.qp_num = (*kept).qp_num;
        attr.xrcd = xrcd;
        attr.qp_type = IBV_QPT_XRC_RECV;
        let attr = &raw mut attr;
        let open = || live((*x).open_qp.unwrap()(end.context, attr));
        each("open_qp", SETTLED, open, |qp| (v.ibv_destroy_qp)(qp));
        let mut init = qp_init(&end, IBV_QPT_XRC_SEND);
        let init = &raw mut init;
        let qp = || live((v.ibv_create_qp)(end.pd, init));
        each("create_qp of an initiator", SETTLED, qp, |qp| {
            (v.ibv_destroy_qp)(qp)
        });
    }
    link.say("done");
}

fn imports(link: &mut Link) {
    let end = End::with(4, 4, 1);
    let v = verbs();
    // SAFETY: live objects, and valid attributes, of which all zeros is a value; each new object is
    // ended once. A descriptor is closed with the context that is made from it, or after a failure.
    unsafe {
        let import = || {
            let fd = libc::dup((*end.context).cmd_fd);
            live(v.ibv_import_device.unwrap()(fd)).inspect_err(|_| {
                libc::close(fd);
            })
        };
        each("import_device", SETTLED, import, |context| {
            (v.ibv_close_device)(context)
        });
        let context = import().unwrap();
        let import = || live(v.ibv_import_pd.unwrap()(context, (*end.pd).handle));
        each("import_pd", SETTLED, import, |pd| {
            v.ibv_unimport_pd.unwrap()(pd);
            0
        });
        let pd = import().unwrap();
        let buffer = end.buffer(&[0; 64]);
        let import = || live(v.ibv_import_mr.unwrap()(pd, buffer.lkey()));
        each("import_mr", SETTLED, import, |mr| {
            v.ibv_unimport_mr.unwrap()(mr);
            0
        });
        let x = verbs_get_ctx(end.context).unwrap();
        let mut attr: ibv_alloc_dm_attr = std::mem::zeroed();
        attr.length = 4096;
        let dm = live((*x).alloc_dm.unwrap()(end.context, &raw mut attr)).unwrap();
        let import = || live(v.ibv_import_dm.unwrap()(context, (*dm).handle));
        each("import_dm", SETTLED, import, |dm| {
            v.ibv_unimport_dm.unwrap()(dm);
            0
        });
    }
    link.say("done");
}

/// Opens the process of the other end, and makes a ring for it.
fn connecting(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let other = end.exchange(link);
    let mut refused = 0;
    for number in 1.. {
        let before = in_use();
        let (ret, asked) = refusing(number, || end.try_enter_rtr(other));
        if ret == 0 {
            if asked >= number {
                // a ring that was not made now is made when the sender requests it
                end.reset();
                end.enter_init();
                continue;
            }
            break;
        }
        assert_eq!(ret, libc::ENOMEM, "request {number}");
        assert_eq!(before[1..], in_use()[1..], "request {number}");
        refused += 1;
    }
    assert!(refused > 0, "another process is opened without memory");
    end.enter_rts();
    end.recv(&end.buffer(&[0; 8]), 1);
    link.say("ready");
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
}

fn to_connect(link: &mut Link) {
    let mut end = End::create(link, 8, 8, 1);
    let other = end.exchange(link);
    link.expect("ready");
    end.enter_rtr(other);
    end.enter_rts();
    end.send_unregistered(&mut [1; 8], None, IBV_SEND_INLINE | IBV_SEND_SIGNALED, 1);
    assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
}

/// After their first use, posting, polling, arming and waiting allocate nothing, so refused
/// allocations have no effect. A batch returns the error.
fn working(link: &mut Link) {
    let mut end = End::with(4, 4, 1);
    end.enter_rtr(end.address());
    end.enter_rts();
    let buffer = end.buffer(&[3; 64]);
    let mut sge = ibv_sge {
        addr: buffer.addr(),
        length: 64,
        lkey: buffer.lkey(),
    };
    // SAFETY: live objects, chains of one; all zeros is a request and a completion.
    unsafe {
        let round = |sge: &mut ibv_sge, first_sends: bool| {
            let mut send: ibv_send_wr = std::mem::zeroed();
            send.sg_list = sge;
            send.num_sge = 1;
            send.opcode = IBV_WR_SEND;
            send.send_flags = IBV_SEND_SIGNALED;
            let mut recv: ibv_recv_wr = std::mem::zeroed();
            recv.sg_list = sge;
            recv.num_sge = 1;
            let (mut bad, mut bad_recv) = (null_mut(), null_mut());
            if !first_sends {
                assert_eq!(ibv_post_recv(end.qp, &raw mut recv, &raw mut bad_recv), 0);
            }
            assert_eq!(ibv_post_send(end.qp, &raw mut send, &raw mut bad), 0);
            assert_eq!(ibv_req_notify_cq(end.cq, 0), 0);
            if first_sends {
                assert_eq!(ibv_post_recv(end.qp, &raw mut recv, &raw mut bad_recv), 0);
            }
            let (mut cq, mut context) = (null_mut(), null_mut());
            let got = (verbs().ibv_get_cq_event)(end.channel, &raw mut cq, &raw mut context);
            assert_eq!(got, 0);
            (verbs().ibv_ack_cq_events)(cq, 1);
            let mut count = 0;
            while count < 2 {
                let mut wc: ibv_wc = std::mem::zeroed();
                let polled = ibv_poll_cq(end.cq, 1, &raw mut wc);
                assert!(polled == 0 || wc.status == IBV_WC_SUCCESS, "{}", wc.status);
                count += polled;
            }
        };
        for first_sends in [false, true] {
            round(&mut sge, first_sends);
            let ((), asked) = refusing(1, || round(&mut sge, first_sends));
            assert_eq!(asked, 0);
        }
        let x = verbs_get_ctx(end.context).unwrap();
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.pd = end.pd;
        init.cap.max_send_wr = 4;
        init.cap.max_send_sge = 2;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = IBV_QP_EX_WITH_SEND.into();
        let init = &raw mut init;
        let batch = |inline: bool| {
            let qp = live((*x).create_qp_ex.unwrap()(end.context, init))?;
            let ex = qp.cast::<ibv_qp_ex>();
            let from = end.with_qp(qp);
            let done = ready(from).and_then(|()| {
                (*ex).wr_start.unwrap()(ex);
                for _ in 0..2 {
                    (*ex).wr_send.unwrap()(ex);
                    if inline {
                        (*ex).wr_set_inline_data.unwrap()(ex, buffer.addr() as *mut _, 8);
                    } else {
                        (*ex).wr_set_sge.unwrap()(ex, buffer.lkey(), buffer.addr(), 8);
                    }
                }
                zero((*ex).wr_complete.unwrap()(ex))
            });
            assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
            done
        };
        for inline in [false, true] {
            let mut number = 1;
            loop {
                let (done, asked) = refusing(number, || batch(inline));
                if asked < number {
                    assert_eq!(done, Ok(()));
                    break;
                }
                assert!(
                    matches!(done, Ok(()) | Err(libc::ENOMEM)),
                    "{number}: {done:?}"
                );
                number += 1;
            }
            assert!(number > 4, "{number}");
        }
    }
    link.say("done");
}

/// A send that waits without memory fails; one that is posted behind a waiting one is refused, and
/// can be posted again.
fn waiting(link: &mut Link) {
    let mut end = End::with(4, 4, 1);
    let buffer = end.buffer(&[3; 64]);
    let to = end.address();
    let post = |end: &End, flags: u32| {
        let mut sge = ibv_sge {
            addr: buffer.addr(),
            length: 8,
            lkey: buffer.lkey(),
        };
        // SAFETY: all zeros is a request.
        let mut send: ibv_send_wr = unsafe { std::mem::zeroed() };
        send.sg_list = &raw mut sge;
        send.num_sge = 1;
        send.opcode = IBV_WR_SEND;
        send.send_flags = IBV_SEND_SIGNALED | flags;
        let mut bad = null_mut();
        // SAFETY: a live queue pair, and a chain of one.
        zero(unsafe { ibv_post_send(end.qp, &raw mut send, &raw mut bad) })
    };
    let mut failed = 0;
    for number in 1.. {
        end.enter_rtr(to);
        end.enter_rts();
        let (posted, asked) = refusing(number, || post(&end, 0));
        assert_eq!(posted, Ok(()), "request {number}");
        if end.state() == IBV_QPS_ERR {
            assert_eq!(end.sleep(LIMIT).status, IBV_WC_LOC_QP_OP_ERR);
            failed += 1;
        }
        end.reset();
        end.enter_init();
        if asked < number {
            break;
        }
    }
    assert_eq!(failed, 2, "the memory of requests, and of their sges");
    end.enter_rtr(to);
    end.enter_rts();
    assert_eq!(post(&end, 0), Ok(()));
    let (posted, asked) = refusing(1, || post(&end, IBV_SEND_INLINE));
    assert_eq!((posted, asked), (Err(libc::ENOMEM), 1));
    assert_eq!(post(&end, IBV_SEND_INLINE), Ok(()));
    let (posted, asked) = refusing(1, || post(&end, IBV_SEND_INLINE));
    assert_eq!((posted, asked), (Ok(()), 0));
    for _ in 0..3 {
        end.recv(&buffer, 1);
    }
    for _ in 0..6 {
        assert_eq!(end.sleep(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.say("done");
}

/// A batch whose requests wait is posted whole or not at all, also if the last one alone has inline
/// data, for which memory is allocated when the first such request waits.
fn batches(link: &mut Link) {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Before {
        Nothing,
        WaitingSend,
        Sqd,
    }
    let end = End::with(4, 4, 1);
    let buffer = end.buffer(&[3; 64]);
    let send = |qp: *mut ibv_qp, inline: &[bool]| {
        let ex = qp.cast::<ibv_qp_ex>();
        // SAFETY: a live queue pair with extended calls, and a live buffer.
        unsafe {
            (*ex).wr_start.unwrap()(ex);
            for inline in inline {
                (*ex).wr_send.unwrap()(ex);
                if *inline {
                    (*ex).wr_set_inline_data.unwrap()(ex, buffer.addr() as *mut _, 8);
                } else {
                    (*ex).wr_set_sge.unwrap()(ex, buffer.lkey(), buffer.addr(), 8);
                }
            }
            zero((*ex).wr_complete.unwrap()(ex))
        }
    };
    // a queue pair that is connected to itself, without a receive
    let batch = |before: Before, number: u32| {
        // SAFETY: all zeros is a value of it; live objects of one context.
        let qp = unsafe {
            let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
            init.send_cq = end.cq;
            init.recv_cq = end.cq;
            init.qp_type = IBV_QPT_RC;
            init.pd = end.pd;
            init.cap.max_send_wr = 4;
            init.cap.max_send_sge = 1;
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.send_ops_flags = IBV_QP_EX_WITH_SEND.into();
            let x = verbs_get_ctx(end.context).unwrap();
            live((*x).create_qp_ex.unwrap()(end.context, &raw mut init)).unwrap()
        };
        let mut from = end.with_qp(qp);
        from.enter_rtr(from.address());
        from.enter_rts();
        let modify = |from: &mut End, state: u32| {
            // SAFETY: all zeros is a value of it.
            let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
            attr.qp_state = state;
            from.modify(&mut attr, IBV_QP_STATE);
        };
        match before {
            Before::Nothing => {}
            Before::WaitingSend => assert_eq!(send(qp, &[false]), Ok(())),
            Before::Sqd => modify(&mut from, IBV_QPS_SQD),
        }
        let (posted, asked) = refusing(number, || send(qp, &[false, true]));
        modify(&mut from, IBV_QPS_ERR);
        let completions = std::iter::from_fn(|| from.poll()).count();
        let of_batch = completions - usize::from(before == Before::WaitingSend);
        match posted {
            Ok(()) => assert_eq!(of_batch, 2, "{before:?}, request {number}"),
            Err(code) => assert_eq!(
                (code, of_batch),
                (libc::ENOMEM, 0),
                "{before:?}, request {number}"
            ),
        }
        // SAFETY: live; its completions were polled.
        assert_eq!(unsafe { (verbs().ibv_destroy_qp)(qp) }, 0);
        asked
    };
    for before in [Before::Nothing, Before::WaitingSend, Before::Sqd] {
        let refusals = (1..).take_while(|number| batch(before, *number) >= *number);
        assert!(refusals.count() > 0, "{before:?}");
    }
    link.say("done");
}

/// Connects an end to a queue pair number that does not exist.
fn ready(mut end: End) -> Result<(), i32> {
    let mut to = end.address();
    to.qpn ^= 1 << 23;
    zero(end.try_enter_rtr(to))?;
    end.enter_rts();
    Ok(())
}
