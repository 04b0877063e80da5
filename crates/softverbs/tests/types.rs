//! Queue pairs of other types than RC, and operations other than plain sends: between two
//! processes, as in `two_processes.rs`.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("datagrams", datagrams_parent, datagrams_child),
        (
            "an_unreliable_connection",
            unreliable_parent,
            unreliable_child,
        ),
        ("lost_writes", lost_writes_parent, lost_writes_child),
        ("atomics", atomics_parent, atomics_child),
        ("an_overrun_queue", overrun_parent, overrun_child),
        ("extended_calls", extended_parent, extended_child),
        ("a_shared_receive_queue", shared_parent, shared_child),
        ("claims_of_the_dead_come_back", claims_parent, claims_child),
    ];
    run(cases);
}

fn bytes_of(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + len) as u8).collect()
}

fn datagrams_parent(link: &mut Link) {
    let mut end = datagram_end();
    let other = end.exchange(link);
    let ah = address_handle(&end, other);
    link.expect("ready");
    for len in [0, 1, 40, 1000, 4096] {
        let buffer = end.buffer(&bytes_of(len.max(1)));
        // dropped without an error: another Q_Key, and a queue pair that does not exist
        send_datagram(&mut end, &buffer, len, (ah, other.qpn, QKEY + 1));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        send_datagram(&mut end, &buffer, len, (ah, other.qpn ^ 0x20, QKEY));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        // with the high bit set, the queue pair's own Q_Key is sent
        let key = if len == 40 { 1 << 31 } else { QKEY };
        send_datagram(&mut end, &buffer, len, (ah, other.qpn, key));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    // the answer goes to the queue pair and address that sent the first message
    let answer = end.buffer(&[0; 48]);
    end.recv(&answer, 3);
    link.say("answer");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id, wc.byte_len), (IBV_WC_SUCCESS, 3, 48));
    assert_eq!(answer.bytes()[40..], bytes_of(8)[..]);
    // too long for the port: this queue pair sends no more until its state is changed
    let long = end.buffer(&bytes_of(5000));
    send_datagram(&mut end, &long, 5000, (ah, other.qpn, QKEY));
    assert_eq!(end.wait(LIMIT).status, IBV_WC_LOC_LEN_ERR);
    assert_eq!(end.state(), IBV_QPS_SQE);
    send_datagram(&mut end, &long, 1, (ah, other.qpn, QKEY));
    assert_eq!(end.wait(LIMIT).status, IBV_WC_WR_FLUSH_ERR);
    // SAFETY: all zeros is a value of it; the handle is live and not used any more.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_RTS;
        end.modify(&mut attr, IBV_QP_STATE);
        send_datagram(&mut end, &long, 1, (ah, other.qpn, QKEY));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        assert_eq!((verbs().ibv_destroy_ah)(ah), 0);
    }
}

fn datagrams_child(link: &mut Link) {
    let mut end = datagram_end();
    let buffers: Vec<_> = (0..5).map(|_| end.buffer(&[0xee; 4136])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        // the header and the start of the payload are in the first sge, or the header is split over
        // both
        let first = if i % 2 == 0 { 50 } else { 30 };
        end.recv_pieces(buffer, &[first, 4136 - first], i as u64);
    }
    let other = end.exchange(link);
    link.say("ready");
    let mut back: *mut ibv_ah = std::ptr::null_mut();
    for (i, len) in [0, 1, 40, 1000, 4096].into_iter().enumerate() {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, i as u64));
        assert_eq!((wc.byte_len as usize, wc.imm), (len + 40, Some(len as u32)));
        let got = buffers[i].bytes();
        assert_eq!(got[40..40 + len], bytes_of(len.max(1))[..len]);
        // SAFETY: plain data; the completion is what `ibv_create_ah_from_wc` reads.
        unsafe {
            let mut grh = got.as_ptr().cast::<ibv_grh>().read_unaligned();
            assert_eq!(u32::from_be(grh.version_tclass_flow), 0x6051_2345);
            let mut from: ibv_wc = std::mem::zeroed();
            from.wc_flags = IBV_WC_GRH;
            if back.is_null() {
                let create = verbs().ibv_create_ah_from_wc.unwrap();
                back = create(end.pd, &raw mut from, &raw mut grh, 1);
                assert!(!back.is_null(), "{}", std::io::Error::last_os_error());
            }
        }
    }
    link.expect("answer");
    let answer = end.buffer(&bytes_of(8));
    send_datagram(&mut end, &answer, 8, (back, other.qpn, QKEY));
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
}

/// An unreliable connection, in RTS.
fn unreliable_end(link: &mut Link) -> End {
    let mut end = End::of_type(IBV_QPT_UC, 16, 16, 1);
    // SAFETY: all zeros is a value of it; a GID is 16 bytes.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    end.modify(&mut attr, mask);
    let other = end.exchange(link);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = other.qpn;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    // SAFETY: as above.
    unsafe {
        (&raw mut attr.ah_attr.grh.dgid)
            .cast::<u128>()
            .write_unaligned(other.gid);
    }
    let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    end.modify(&mut attr, mask);
    attr.qp_state = IBV_QPS_RTS;
    end.modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    end
}

fn unreliable_parent(link: &mut Link) {
    let mut end = unreliable_end(link);
    let (addr, rkey) = link.numbers();
    for len in [8, 100_000] {
        let mut buffer = end.buffer(&bytes_of(len));
        end.rdma(IBV_WR_RDMA_WRITE, &buffer, len, addr, rkey as u32, None);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        end.send(&mut buffer, len, Some(1), IBV_SEND_SIGNALED, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    // an invalid key or a missing receive drops the request, and the connection stays
    let mut buffer = end.buffer(&bytes_of(8));
    end.rdma(IBV_WR_RDMA_WRITE, &buffer, 8, addr, rkey as u32 ^ 1, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    for id in 0..2 {
        end.send(&mut buffer, 8, Some(2), IBV_SEND_SIGNALED, id);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.say("lost");
    link.expect("again");
    end.send(&mut buffer, 8, Some(3), IBV_SEND_SIGNALED, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("short");
    for len in [9, 100_000, 8] {
        let mut buffer = end.buffer(&bytes_of(len));
        end.send(&mut buffer, len, Some(4), IBV_SEND_SIGNALED, 1);
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("done");
    // the death of the other end is not detected
    link.kill();
    std::thread::sleep(std::time::Duration::from_millis(50));
    end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 4);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert_eq!(end.state(), IBV_QPS_RTS);
}

fn unreliable_child(link: &mut Link) {
    let mut end = unreliable_end(link);
    let target = end.buffer(&vec![0; 100_000]);
    let receive = end.buffer(&vec![0; 100_000]);
    let small = end.buffer(&[0; 8]);
    end.recv(&small, 1);
    end.recv(&receive, 2);
    link.say_numbers(target.addr(), u64::from(target.rkey()));
    for len in [8, 100_000] {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.imm), (IBV_WC_SUCCESS, Some(1)));
        assert_eq!(wc.byte_len as usize, len);
        if len == 100_000 {
            assert!(target.bytes() == bytes_of(len));
            assert!(receive.bytes() == bytes_of(len));
        }
    }
    link.expect("lost");
    assert!(end.poll().is_none());
    end.recv(&receive, 3);
    link.say("again");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.wr_id, wc.imm), (3, Some(3)));
    // a message that is too long is dropped, and the receive stays
    end.recv(&small, 4);
    link.say("short");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 4));
    assert_eq!((wc.byte_len, wc.imm), (8, Some(4)));
    assert_eq!(end.state(), IBV_QPS_RTS);
    link.say("done");
    link.wait_end();
}

/// Longer than what an initiator copies at once, 4 MiB.
const IN_TWO_PARTS: usize = (4 << 20) + 3 * 4096;

/// On an unreliable connection a write with an immediate whose data cannot be written is lost with
/// its immediate.
fn lost_writes_parent(link: &mut Link) {
    let mut end = unreliable_end(link);
    let (target, mute, broken) = (link.numbers(), link.numbers(), link.numbers());
    let long = end.buffer(&bytes_of(IN_TWO_PARTS));
    let mut imm = 0;
    let mut write = |(addr, rkey): (u64, u64), len| {
        let (opcode, rkey) = (IBV_WR_RDMA_WRITE_WITH_IMM, rkey as u32);
        imm += 1;
        end.rdma(opcode, &long, len, addr, rkey, Some(imm));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    };
    write((target.0, target.1 ^ 1), 8);
    write(target, 9);
    write(mute, 8);
    write(broken, IN_TWO_PARTS);
    write(target, 8);
    link.say("written");
    link.expect("done");
}

fn lost_writes_child(link: &mut Link) {
    let mut end = unreliable_end(link);
    let target = end.buffer(&[0; 8]);
    let mute = end.buffer_with(&[0; 8], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    // the second part ends in a page that cannot be written
    let broken = end.buffer(&vec![0; IN_TWO_PARTS]);
    let page = (broken.addr() as usize + IN_TWO_PARTS).next_multiple_of(4096) - 2 * 4096;
    let page = std::ptr::without_provenance_mut(page);
    // SAFETY: a page inside the buffer.
    assert_eq!(unsafe { libc::mprotect(page, 4096, libc::PROT_READ) }, 0);
    for id in [1, 2] {
        end.recv(&mute, id);
    }
    for buffer in [&target, &mute, &broken] {
        link.say_numbers(buffer.addr(), u64::from(buffer.rkey()));
    }
    link.expect("written");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 1));
    assert_eq!((wc.byte_len, wc.imm), (8, Some(5)));
    assert_eq!(target.bytes(), bytes_of(IN_TWO_PARTS)[..8]);
    assert_eq!(mute.bytes(), [0; 8]);
    assert!(end.poll().is_none());
    link.say("done");
    link.wait_end();
}

fn atomic(end: &mut End, opcode: u32, result: &Buffer, to: (u64, u32), values: (u64, u64)) -> Wc {
    let mut sge = ibv_sge {
        addr: result.addr(),
        length: 8,
        lkey: result.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = to.0;
    wr.wr.atomic.rkey = to.1;
    wr.wr.atomic.compare_add = values.0;
    wr.wr.atomic.swap = values.1;
    end.post(&mut wr);
    end.wait(LIMIT)
}

/// Number of additions of each side in [`atomics_parent`].
const ADDS: u64 = 5000;

fn atomics_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let (addr, rkey) = link.numbers();
    let to = (addr, rkey as u32);
    let result = end.buffer(&[0; 8]);
    let fetched = |result: &Buffer| u64::from_ne_bytes(result.bytes().try_into().unwrap());
    let (add, swap) = (IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP);
    let wc = atomic(&mut end, add, &result, to, (5, 0));
    assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_FETCH_ADD));
    assert_eq!(fetched(&result), 100);
    let wc = atomic(&mut end, swap, &result, to, (7, 8));
    assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_COMP_SWAP));
    assert_eq!(fetched(&result), 105);
    atomic(&mut end, swap, &result, to, (105, 0));
    assert_eq!(fetched(&result), 105);
    // both processes add to one word: no addition is lost, and no value is returned twice
    link.say("go");
    let mut last = None;
    for _ in 0..ADDS {
        let wc = atomic(&mut end, add, &result, to, (1, 0));
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        assert!(last < Some(fetched(&result)));
        last = Some(fetched(&result));
    }
    link.expect("added");
    atomic(&mut end, add, &result, to, (0, 0));
    assert_eq!(fetched(&result), 2 * ADDS);
    let wc = atomic(&mut end, add, &result, (addr + 4, rkey as u32), (1, 0));
    assert_eq!(wc.status, IBV_WC_REM_INV_REQ_ERR);
    assert_eq!(end.state(), IBV_QPS_ERR);
    link.say("over");
}

fn atomics_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    // its own memory, through a connection of the process with itself
    let mut from = End::with(4, 4, 1);
    let mut to = End::with(4, 4, 1);
    from.enter_rtr(to.address());
    to.enter_rtr(from.address());
    from.enter_rts();
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    let mut word = 100u64;
    // SAFETY: live domains; the word outlives both regions.
    let (there, here) = unsafe {
        let at = (&raw mut word).cast();
        let reg = verbs().ibv_reg_mr;
        (
            reg(end.pd, at, 8, access.cast_signed()),
            reg(to.pd, at, 8, access.cast_signed()),
        )
    };
    assert!(!there.is_null() && !here.is_null());
    // SAFETY: live regions.
    let (rkey, own_rkey) = unsafe { ((*there).rkey, (*here).rkey) };
    let addr = &raw mut word as u64;
    link.say_numbers(addr, u64::from(rkey));
    link.expect("go");
    let result = from.buffer(&[0; 8]);
    for _ in 0..ADDS {
        let opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        let wc = atomic(&mut from, opcode, &result, (addr, own_rkey), (1, 0));
        assert_eq!(wc.status, IBV_WC_SUCCESS);
    }
    link.say("added");
    // a misaligned address is an error for both sides
    link.expect("over");
    assert!(end.poll().is_none());
    assert_eq!(end.state(), IBV_QPS_ERR);
    assert_eq!(end.async_event(), IBV_EVENT_QP_REQ_ERR);
}

const SHARED: usize = 300;

fn length(i: usize) -> usize {
    [8, 100, 9000, 40, 0][i % 5]
}

fn shared_parent(link: &mut Link) {
    let mut ends = [End::connect(link, 16, 16, 1), End::connect(link, 16, 16, 1)];
    let mut buffers = [
        ends[0].buffer(&vec![0; 10_000]),
        ends[1].buffer(&vec![0; 10_000]),
    ];
    for i in 0..SHARED {
        // sometimes more messages than receives: then one waits
        let buffer = &mut buffers[i % 2];
        ends[i % 2].send(buffer, length(i), Some(i as u32), IBV_SEND_SIGNALED, 0);
        if i % 8 == 7 {
            for _ in 0..4 {
                assert_eq!(ends[0].wait(LIMIT).status, IBV_WC_SUCCESS);
                assert_eq!(ends[1].wait(LIMIT).status, IBV_WC_SUCCESS);
            }
        }
    }
    for _ in 0..SHARED % 8 / 2 {
        assert_eq!(ends[0].wait(LIMIT).status, IBV_WC_SUCCESS);
        assert_eq!(ends[1].wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("long");
    ends[1].send(&mut buffers[1], 10_000, None, IBV_SEND_SIGNALED, 0);
    assert_eq!(ends[1].wait(LIMIT).status, IBV_WC_REM_INV_REQ_ERR);
    ends[0].send(&mut buffers[0], 8, None, IBV_SEND_SIGNALED, 0);
    assert_eq!(ends[0].wait(LIMIT).status, IBV_WC_SUCCESS);
    link.say("sent");
    link.expect("done");
}

fn shared_child(link: &mut Link) {
    let mut first = End::with(16, 16, 1);
    let srq = first.create_srq(6);
    let mut ends = [first.on_srq(srq), first.on_srq(srq)];
    let buffers: Vec<_> = (0..6).map(|_| first.buffer(&vec![0; 9000])).collect();
    for (i, buffer) in buffers.iter().enumerate() {
        assert_eq!(post_srq(srq, buffer, i as u64), 0);
    }
    assert_eq!(post_srq(srq, &buffers[0], 9), libc::ENOMEM);
    for end in &mut ends {
        end.join(link);
    }
    let mut next = [0usize, 1];
    for _ in 0..SHARED {
        let wc = first.wait(LIMIT);
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        // in order on each connection
        let i = wc.imm.unwrap() as usize;
        assert_eq!(i, next[i % 2]);
        assert_eq!(wc.byte_len as usize, length(i));
        next[i % 2] += 2;
        assert_eq!(post_srq(srq, &buffers[wc.wr_id as usize], wc.wr_id), 0);
    }
    // SAFETY: all zeros is a value of it; live objects.
    unsafe {
        assert_eq!((verbs().ibv_destroy_srq)(srq), libc::EBUSY);
        let mut attr: ibv_srq_attr = std::mem::zeroed();
        attr.srq_limit = 5;
        let limit = IBV_SRQ_LIMIT.cast_signed();
        assert_eq!((verbs().ibv_modify_srq)(srq, &raw mut attr, limit), 0);
    }
    link.say("long");
    let statuses = [first.wait(LIMIT).status, first.wait(LIMIT).status];
    assert_eq!(statuses, [IBV_WC_LOC_LEN_ERR, IBV_WC_SUCCESS]);
    link.expect("sent");
    let events = [ends[1].any_async_event(), ends[1].any_async_event()];
    let limit = (IBV_EVENT_SRQ_LIMIT_REACHED, srq as usize);
    assert!(events.contains(&limit), "{events:?}");
    let last = (IBV_EVENT_QP_LAST_WQE_REACHED, ends[1].qp as usize);
    assert!(events.contains(&last), "{events:?}");
    assert_eq!(
        (ends[1].state(), ends[0].state()),
        (IBV_QPS_ERR, IBV_QPS_RTS)
    );
    // SAFETY: live objects, not used any more.
    unsafe {
        assert_eq!((verbs().ibv_destroy_qp)(ends[0].qp), 0);
        assert_eq!((verbs().ibv_destroy_qp)(ends[1].qp), 0);
        assert_eq!((verbs().ibv_destroy_srq)(srq), 0);
    }
    link.say("done");
}

fn claims_parent(link: &mut Link) {
    const COUNT: u64 = 64;
    let mut first = End::with(128, 128, 1);
    let srq = first.create_srq(COUNT as u32);
    let mut end = first.on_srq(srq);
    let buffer = first.buffer(&vec![0; 20_000]);
    for i in 0..COUNT {
        assert_eq!(post_srq(srq, &buffer, i), 0);
    }
    end.join(link);
    let begin = std::time::Instant::now();
    let mut killed = false;
    loop {
        if !killed && begin.elapsed() > std::time::Duration::from_millis(60) {
            link.kill();
            killed = true;
        }
        if let Some(wc) = first.poll() {
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            assert_eq!(post_srq(srq, &buffer, wc.wr_id), 0);
        } else if killed && end.state() == IBV_QPS_ERR {
            break;
        }
    }
    // all of them have arrived, each once
    let mut from = first.on_srq(srq);
    let mut to = first.on_srq(srq);
    from.enter_rtr(to.address());
    to.enter_rtr(from.address());
    from.enter_rts();
    to.enter_rts();
    let mut message = first.buffer(&[7; 8]);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..COUNT {
        from.send(&mut message, 8, None, 0, 0);
        let wc = first.wait(LIMIT);
        assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_RECV));
        assert!(seen.insert(wc.wr_id));
    }
    from.send(&mut message, 8, None, 0, 0);
    assert!(first.poll().is_none());
}

fn claims_child(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut buffer = end.buffer(&vec![0; 20_000]);
    loop {
        for len in [8, 20_000] {
            end.send(&mut buffer, len, None, IBV_SEND_SIGNALED, 0);
        }
        end.wait(LIMIT);
        end.wait(LIMIT);
    }
}

fn extended_parent(link: &mut Link) {
    let end = End::with(16, 16, 1);
    // SAFETY: all zeros is a value of each structure; live objects; calls as verbs.h has them.
    unsafe {
        let offset = std::mem::offset_of!(verbs_context, context);
        let ops = end.context.byte_sub(offset).cast::<verbs_context>();
        let mut init: ibv_cq_init_attr_ex = std::mem::zeroed();
        init.cqe = 16;
        init.wc_flags = u64::from(IBV_WC_EX_WITH_FLOW_TAG);
        let create = (*ops).create_cq_ex.unwrap();
        assert!(create(end.context, &raw mut init).is_null());
        let error = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(error, Some(libc::EOPNOTSUPP));
        let stamp = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
        init.wc_flags = u64::from(IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM | stamp);
        let cq = create(end.context, &raw mut init);
        assert!(!cq.is_null());
        assert!((*cq).read_src_qp.is_none());
        let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
        init.send_cq = cq.cast();
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 3;
        init.cap.max_recv_wr = 1;
        init.cap.max_send_sge = 2;
        init.cap.max_inline_data = 32;
        init.pd = end.pd;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = u64::from(IBV_QP_EX_WITH_TSO);
        assert!(ibv_create_qp_ex(end.context, &raw mut init).is_null());
        let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
        init.send_ops_flags = u64::from(sends | IBV_QP_EX_WITH_RDMA_WRITE);
        let qp = ibv_create_qp_ex(end.context, &raw mut init);
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        let to_ex = verbs().ibv_qp_to_qp_ex.unwrap();
        assert!(to_ex(end.qp).is_null());
        let ex = to_ex(qp);
        assert!((*ex).wr_rdma_read.is_none());
        let mut extended = end.with_qp(qp);
        extended.join(link);
        let buffer = end.buffer(&bytes_of(100));
        let start = (*ex).wr_start.unwrap();
        let complete = (*ex).wr_complete.unwrap();
        // an aborted batch has no effect, and a batch that does not fit is refused as a whole
        start(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_abort.unwrap()(ex);
        start(ex);
        for _ in 0..4 {
            (*ex).wr_send.unwrap()(ex);
            (*ex).wr_set_sge.unwrap()(ex, buffer.lkey(), buffer.addr(), 1);
        }
        assert_eq!(complete(ex), libc::ENOMEM);
        start(ex);
        (*ex).wr_id = 1;
        (*ex).wr_flags = IBV_SEND_SIGNALED;
        (*ex).wr_send_imm.unwrap()(ex, 7);
        (*ex).wr_set_sge.unwrap()(ex, buffer.lkey(), buffer.addr(), 100);
        (*ex).wr_id = 2;
        (*ex).wr_send.unwrap()(ex);
        let mut bytes = bytes_of(9);
        (*ex).wr_set_inline_data.unwrap()(ex, bytes.as_mut_ptr().cast(), 9);
        assert_eq!(complete(ex), 0);
        bytes.fill(0);
        let mut none: ibv_poll_cq_attr = std::mem::zeroed();
        let poll = (*cq).start_poll.unwrap();
        let begin = std::time::Instant::now();
        let mut last = 0;
        for id in [1, 2] {
            while poll(cq, &raw mut none) == libc::ENOENT {
                assert!(begin.elapsed() < LIMIT);
            }
            assert_eq!(((*cq).wr_id, (*cq).status), (id, IBV_WC_SUCCESS));
            assert_eq!((*cq).read_opcode.unwrap()(cq), IBV_WC_SEND);
            assert_eq!((*cq).read_qp_num.unwrap()(cq), (*qp).qp_num);
            let time = (*cq).read_completion_ts.unwrap()(cq);
            assert!(time >= last && time > 0);
            last = time;
            if id == 2 {
                assert_eq!((*cq).next_poll.unwrap()(cq), libc::ENOENT);
            }
            (*cq).end_poll.unwrap()(cq);
        }
        link.expect("done");
        assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
        assert_eq!((verbs().ibv_destroy_cq)(cq.cast()), 0);
    }
}

fn extended_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let buffer = end.buffer(&[0; 100]);
    end.recv(&buffer, 1);
    let second = end.buffer(&[0; 100]);
    end.recv(&second, 2);
    end.join(link);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.wr_id, wc.imm, wc.byte_len), (1, Some(7), 100));
    assert_eq!(buffer.bytes(), bytes_of(100));
    let wc = end.wait(LIMIT);
    assert_eq!((wc.wr_id, wc.imm, wc.byte_len), (2, None, 9));
    assert_eq!(second.bytes()[..9], bytes_of(9)[..]);
    link.say("done");
}

/// Completions that no thread polls.
fn overrun_parent(link: &mut Link) {
    let mut end = End::connect(link, 4, 4, 1);
    let mut buffer = end.buffer(&[1; 8]);
    let receives: Vec<_> = (0..4).map(|_| end.buffer(&[0; 8])).collect();
    // SAFETY: live objects.
    unsafe {
        assert_eq!((verbs().ibv_resize_cq)(end.cq, 2), 0);
    }
    for (i, receive) in receives.iter().enumerate() {
        end.recv(receive, i as u64);
    }
    for id in 0..3 {
        end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, id);
    }
    let (event, element) = end.any_async_event();
    assert_eq!((event, element), (IBV_EVENT_CQ_ERR, end.cq as usize));
    assert_eq!(end.async_event(), IBV_EVENT_QP_FATAL);
    assert_eq!(end.state(), IBV_QPS_ERR);
    // SAFETY: a live queue, room for four; all zeros is a value of it.
    unsafe {
        let mut wcs: [ibv_wc; 4] = std::mem::zeroed();
        assert_eq!(ibv_poll_cq(end.cq, 4, wcs.as_mut_ptr()), 2);
        assert_eq!(ibv_poll_cq(end.cq, 4, wcs.as_mut_ptr()), -1);
    }
    link.say("done");
}

fn overrun_child(link: &mut Link) {
    let mut end = End::create(link, 4, 4, 1);
    let buffer = end.buffer(&[0; 8]);
    for id in 0..3 {
        end.recv(&buffer, id);
    }
    end.join(link);
    for id in 0..3 {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, id));
    }
    link.expect("done");
}
