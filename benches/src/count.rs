//! Runs each call [`CALLS`] times in a function with the name of the call, for callgrind.
//! `bench count` divides the instructions by the calls.
//!
//! Both ends are in one process and one thread, so that every instruction is counted and the result
//! does not depend on the scheduler.

use libfabric_sys::FI_ATOMIC;

use crate::subject::{Device, Fabric, Ring, Side, Subject as _, fabric};

/// Calls of each kind.
const CALLS: u64 = 1000;

/// A function `count_NAME` that callgrind can find by its name.
macro_rules! counted {
    ($name:ident, $subject:ty, $body:expr) => {
        #[inline(never)]
        fn $name(subject: &mut $subject) {
            #[allow(clippy::redundant_closure_call, reason = "names the argument")]
            ($body)(subject);
        }
    };
}

counted!(count_ibv_post_recv, Device, |d: &mut Device| d.post_recv());
counted!(count_ibv_post_send, Device, |d: &mut Device| d.post(
    rdma_core_sys::IBV_WR_SEND,
    8,
    false
));
counted!(count_ibv_poll_cq_hit, Device, |d: &mut Device| assert_eq!(
    d.poll(),
    Some(true)
));
counted!(count_ibv_poll_cq_miss, Device, |d: &mut Device| assert_eq!(
    d.poll(),
    None
));

// These bodies are the same as above; `black_box` prevents the compiler from merging the functions.
counted!(count_ibv_post_srq_recv, Device, |d: &mut Device| {
    std::hint::black_box("xrc");
    d.post_recv();
});
counted!(count_ibv_post_send_xrc, Device, |d: &mut Device| {
    std::hint::black_box("xrc");
    d.post(rdma_core_sys::IBV_WR_SEND, 8, false);
});
counted!(count_ibv_poll_cq_xrc_hit, Device, |d: &mut Device| {
    std::hint::black_box("xrc");
    assert_eq!(d.poll(), Some(true));
});

counted!(count_ring_post, Ring, |r: &mut Ring| r.post(8));
counted!(count_ring_poll_hit, Ring, |r: &mut Ring| assert!(r.poll()));
counted!(count_ring_poll_miss, Ring, |r: &mut Ring| assert!(
    !r.poll()
));

counted!(count_fi_recv, Fabric, |f: &mut Fabric| f.post_recv());
counted!(count_fi_inject, Fabric, |f: &mut Fabric| assert!(
    f.post_inject(8)
));
counted!(count_fi_send, Fabric, |f: &mut Fabric| assert!(
    f.post_send(8)
));
counted!(count_fi_write, Fabric, |f: &mut Fabric| assert!(
    f.post_rma(false, 8)
));
counted!(count_fi_read, Fabric, |f: &mut Fabric| assert!(
    f.post_rma(true, 8)
));
counted!(count_fi_fetch_atomic, Fabric, |f: &mut Fabric| assert!(
    f.post_fetch_add()
));
counted!(count_fi_cq_read_hit, Fabric, |f: &mut Fabric| assert_eq!(
    f.poll(f.rx(), 1),
    1
));
counted!(count_fi_cq_read_tx_hit, Fabric, |f: &mut Fabric| {
    assert_eq!(f.poll(f.tx(), 1), 1);
});
counted!(count_fi_cq_read_miss, Fabric, |f: &mut Fabric| assert_eq!(
    f.poll(f.rx(), 1),
    0
));

counted!(count_fi_trecv, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    f.post_recv();
});
counted!(count_fi_tinject, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert!(f.post_inject(8));
});
counted!(count_fi_tinjectdata, Fabric, |f: &mut Fabric| {
    assert!(f.post_inject_data(8));
});
counted!(count_fi_cq_read_rdm_data_hit, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm data");
    assert_eq!(f.poll(f.rx(), 1), 1);
});
counted!(count_fi_tsend, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert!(f.post_send(8));
});
counted!(count_fi_cq_read_rdm_hit, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert_eq!(f.poll(f.rx(), 1), 1);
});
counted!(count_fi_cq_read_rdm_tx_hit, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert_eq!(f.poll(f.tx(), 1), 1);
});
counted!(count_fi_cq_read_rdm_miss, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert_eq!(f.poll(f.rx(), 1), 0);
});

counted!(count_fi_rdm_write, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert!(f.post_rma(false, 8));
});
counted!(count_fi_rdm_read, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm");
    assert!(f.post_rma(true, 8));
});
counted!(count_fi_cq_read_rdm_rma_hit, Fabric, |f: &mut Fabric| {
    std::hint::black_box("rdm rma");
    assert_eq!(f.poll(f.tx(), 1), 1);
});

/// Length of a message that the receiver reads from the sender's memory.
const LONG: usize = 16384;

counted!(count_fi_long_tsend, Fabric, |f: &mut Fabric| {
    assert!(f.post_send(LONG));
});
/// A read of the receiver. Returns the number of messages.
#[inline(never)]
fn count_fi_long_cq_read(subject: &mut Fabric) -> u64 {
    std::hint::black_box("receiver");
    subject.poll(subject.rx(), 1)
}

/// A read of the sender. Returns the number of messages.
#[inline(never)]
fn count_fi_long_cq_read_tx(subject: &mut Fabric) -> u64 {
    std::hint::black_box("sender");
    subject.poll(subject.tx(), 1)
}

/// Messages of a window of the stream. One thread runs both ends, so a window is sent as a whole
/// before the receiver reads.
const STREAM: u64 = 50;

// Divided by the messages, not by the calls of these functions.
counted!(count_fi_stream_tinject, Fabric, |f: &mut Fabric| {
    for _ in 0..STREAM {
        assert!(f.post_inject(8));
    }
});
counted!(count_fi_stream_credit, Fabric, |f: &mut Fabric| {
    std::hint::black_box("sender");
    assert_eq!(f.poll(f.tx(), 16), 0);
});

/// Reads what has arrived. Returns the number of messages.
#[inline(never)]
fn count_fi_stream_cq_read_trecv(subject: &mut Fabric) -> u64 {
    let mut read = 0;
    loop {
        let more = subject.poll(subject.rx(), 16);
        for _ in 0..more {
            subject.post_recv();
        }
        read += more;
        if more < 16 {
            return read;
        }
    }
}

fn connected(open: fn(Side) -> Device) -> (Device, Device) {
    let (mut first, mut second) = (open(Side::First), open(Side::Second));
    let (a, b) = (first.address(), second.address());
    first.connect(&b);
    second.connect(&a);
    (first, second)
}

/// Posts one signaled send, whose completion frees the slots of the unsignaled sends before it.
fn reclaim(first: &mut Device, second: &mut Device) {
    first.post(rdma_core_sys::IBV_WR_SEND, 8, true);
    assert_eq!(second.poll(), Some(true));
    assert_eq!(first.poll(), Some(false));
    second.post_recv();
}

fn device() {
    let (mut first, mut second) = connected(Device::open);
    for i in 0..CALLS {
        if i % 64 == 63 {
            reclaim(&mut first, &mut second);
        }
        count_ibv_poll_cq_miss(&mut second);
        count_ibv_post_send(&mut first);
        count_ibv_poll_cq_hit(&mut second);
        count_ibv_post_recv(&mut second);
    }
}

fn xrc() {
    let (mut first, mut second) = connected(Device::open_xrc);
    // the first send initializes the path
    reclaim(&mut first, &mut second);
    for i in 0..CALLS {
        if i % 64 == 63 {
            reclaim(&mut first, &mut second);
        }
        count_ibv_post_send_xrc(&mut first);
        count_ibv_poll_cq_xrc_hit(&mut second);
        count_ibv_post_srq_recv(&mut second);
    }
}

fn ring() {
    let (mut first, mut second) = (Ring::open(Side::First), Ring::open(Side::Second));
    let (a, b) = (first.address(), second.address());
    first.enter_rts(&b);
    second.enter_rts(&a);
    first.attach();
    second.attach();
    for _ in 0..CALLS {
        count_ring_poll_miss(&mut second);
        count_ring_post(&mut first);
        count_ring_poll_hit(&mut second);
    }
}

/// Functions for each length: a whole message, and a write and a read with its entry.
macro_rules! counted_sizes {
    ($($len:literal: $message:ident, $write:ident, $read:ident;)*) => {
        $(
            counted!($message, [Fabric; 2], |ends: &mut [Fabric; 2]| message(ends, $len));
            counted!($write, [Fabric; 2], |ends: &mut [Fabric; 2]| access(ends, false, $len));
            counted!($read, [Fabric; 2], |ends: &mut [Fabric; 2]| access(ends, true, $len));
        )*
        const MESSAGES: &[fn(&mut [Fabric; 2])] = &[$($message),*];
        const ACCESSES: &[fn(&mut [Fabric; 2])] = &[$($write, $read),*];
    };
}

counted!(count_fi_inject_8, [Fabric; 2], |ends: &mut [Fabric; 2]| {
    let [first, second] = ends;
    assert!(first.post_inject(8));
    while second.poll(second.rx(), 1) == 0 {}
    second.post_recv();
});
counted!(
    count_fi_fetch_add_8,
    [Fabric; 2],
    |ends: &mut [Fabric; 2]| {
        let [first, second] = ends;
        assert!(first.post_fetch_add());
        while first.poll(first.tx(), 1) == 0 {
            second.poll(second.rx(), 1);
        }
    }
);

counted_sizes! {
    8: count_fi_message_8, count_fi_write_8, count_fi_read_8;
    64: count_fi_message_64, count_fi_write_64, count_fi_read_64;
    512: count_fi_message_512, count_fi_write_512, count_fi_read_512;
    4096: count_fi_message_4096, count_fi_write_4096, count_fi_read_4096;
    16_384: count_fi_message_16384, count_fi_write_16384, count_fi_read_16384;
    65_536: count_fi_message_65536, count_fi_write_65536, count_fi_read_65536;
    1_048_576: count_fi_message_1048576, count_fi_write_1048576, count_fi_read_1048576;
    4_194_304: count_fi_message_4194304, count_fi_write_4194304, count_fi_read_4194304;
}

/// Sends a message with an entry, reads both entries, and posts the next receive.
#[inline(always)]
fn message([first, second]: &mut [Fabric; 2], len: usize) {
    assert!(first.post_send(len));
    let (mut received, mut sent, mut reads) = (0, 0, 0);
    while received == 0 || sent == 0 {
        if received == 0 {
            received = second.poll(second.rx(), 1);
        }
        if sent == 0 {
            sent = first.poll(first.tx(), 1);
        }
        reads += 1;
        assert!(reads < 10_000, "no message");
    }
    second.post_recv();
}

/// Writes or reads, and reads the entry.
#[inline(always)]
fn access([first, second]: &mut [Fabric; 2], read: bool, len: usize) {
    assert!(first.post_rma(read, len));
    while first.poll(first.tx(), 1) == 0 {
        second.poll(second.rx(), 1);
    }
}

/// Reads what the provider does without entries: credit, and sends of its own.
fn settle(ends: &mut [Fabric; 2]) {
    for _ in 0..4 {
        for end in &mut *ends {
            assert_eq!(end.poll(end.tx(), 1) + end.poll(end.rx(), 1), 0);
        }
    }
}

/// Runs the functions of all lengths. Messages are a ping-pong.
fn sizes(ends: &mut [Fabric; 2], calls: &[fn(&mut [Fabric; 2])]) {
    // the first message of a layer over a connection waits for that connection
    for _ in 0..200 {
        let [first, second] = &mut *ends;
        while !first.post_send(8) {
            assert_eq!(first.poll(first.tx(), 1) + second.poll(second.tx(), 1), 0);
        }
        let (mut received, mut sent) = (0, 0);
        while received == 0 || sent == 0 {
            received += second.poll(second.rx(), 1);
            sent += first.poll(first.tx(), 1);
        }
        second.post_recv();
        ends.swap(0, 1);
    }
    for call in calls {
        for _ in 0..CALLS {
            settle(ends);
            call(ends);
            ends.swap(0, 1);
        }
    }
}

fn pair(provider: &str, kind: fabric::Endpoint, caps: u64) -> [Fabric; 2] {
    let open = |side| Fabric::with_caps(provider, kind, side, caps);
    let (mut second, mut first) = (open(Side::Second), open(Side::First));
    connect(&mut first, &mut second);
    [first, second]
}

/// Connects two ends, each of which waits for the other one: in two threads.
fn connect(first: &mut Fabric, second: &mut Fabric) {
    let (a, b) = (first.address(), second.address());
    std::thread::scope(|scope| {
        let second = fabric::Sendable(second);
        scope.spawn(move || {
            let second = second;
            second.0.connect(&a);
        });
        first.connect(&b);
    });
}

/// The calls of message endpoints.
fn msg(provider: &str) {
    let [mut first, mut second] = pair(provider, fabric::Endpoint::Msg, FI_ATOMIC);
    for _ in 0..CALLS {
        count_fi_cq_read_miss(&mut second);
        count_fi_inject(&mut first);
        count_fi_cq_read_hit(&mut second);
        count_fi_recv(&mut second);
        count_fi_send(&mut first);
        count_fi_cq_read_tx_hit(&mut first);
        assert_eq!(second.poll(second.rx(), 1), 1);
        second.post_recv();
        for post in [count_fi_write, count_fi_read, count_fi_fetch_atomic] {
            post(&mut first);
            assert_eq!(first.poll(first.tx(), 1), 1);
        }
    }
}

/// Tagged messages between two reliable datagram endpoints.
fn rdm() {
    let open = |side| Fabric::open("weft", fabric::Endpoint::Tagged, side);
    let (mut second, mut first) = (open(Side::Second), open(Side::First));
    let (a, b) = (first.address(), second.address());
    first.connect(&b);
    second.connect(&a);
    // the first message connects, and the windows of both directions grow
    for _ in 0..100 {
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = [&mut first, &mut second];
            assert!(ends[from].post_inject(8));
            while ends[to].poll(ends[to].rx(), 1) == 0 {
                ends[from].poll(ends[from].tx(), 1);
            }
            ends[to].post_recv();
        }
    }
    // The completions of sends without entries, and the messages of credit, are read outside the
    // counted calls.
    let settle = |first: &mut Fabric, second: &mut Fabric| {
        for _ in 0..4 {
            assert_eq!(first.poll(first.tx(), 1) + second.poll(second.tx(), 1), 0);
        }
    };
    for _ in 0..CALLS {
        settle(&mut first, &mut second);
        count_fi_cq_read_rdm_miss(&mut second);
        count_fi_tinject(&mut first);
        count_fi_cq_read_rdm_hit(&mut second);
        count_fi_trecv(&mut second);
        settle(&mut first, &mut second);
        count_fi_tinjectdata(&mut first);
        count_fi_cq_read_rdm_data_hit(&mut second);
        second.post_recv();
        // the answer of a ping-pong
        assert!(second.post_inject(8));
        assert_eq!(first.poll(first.rx(), 1), 1);
        first.post_recv();
        settle(&mut first, &mut second);
        count_fi_tsend(&mut first);
        count_fi_cq_read_rdm_tx_hit(&mut first);
        assert_eq!(second.poll(second.rx(), 1), 1);
        second.post_recv();
        // the answer of a ping-pong
        settle(&mut first, &mut second);
        assert!(second.post_inject(8));
        assert_eq!(first.poll(first.rx(), 1), 1);
        first.post_recv();
    }
    for _ in 0..CALLS {
        settle(&mut first, &mut second);
        count_fi_long_tsend(&mut first);
        // both ends take part in a stream
        let (mut received, mut sent, mut reads) = (0, 0, 0);
        while received == 0 || sent == 0 {
            received += count_fi_long_cq_read(&mut second);
            sent += count_fi_long_cq_read_tx(&mut first);
            reads += 1;
            assert!(reads < 1000);
        }
        second.post_recv();
    }
    for _ in 0..CALLS / STREAM {
        settle(&mut first, &mut second);
        count_fi_stream_tinject(&mut first);
        let mut left = STREAM;
        while left > 0 {
            left -= count_fi_stream_cq_read_trecv(&mut second);
            count_fi_stream_credit(&mut first);
        }
    }
}

/// RMA between two reliable datagram endpoints.
fn rdm_rma() {
    let open = |side| Fabric::open("weft", fabric::Endpoint::Rdm, side);
    let (mut second, mut first) = (open(Side::Second), open(Side::First));
    connect(&mut first, &mut second);
    let wait = |first: &mut Fabric, second: &mut Fabric| {
        while first.poll(first.tx(), 1) == 0 {
            second.poll(second.rx(), 1);
        }
    };
    for _ in 0..100 {
        assert!(first.post_rma(false, 8));
        wait(&mut first, &mut second);
    }
    for _ in 0..CALLS {
        count_fi_rdm_write(&mut first);
        count_fi_cq_read_rdm_rma_hit(&mut first);
        count_fi_rdm_read(&mut first);
        wait(&mut first, &mut second);
    }
}

/// `weft-bench count [calls|msg|rma|tagged|rdm PROVIDER]`: the program that `bench count` runs under
/// callgrind. Without arguments all calls of weft and of the device; else one part with a provider.
pub(crate) fn main(arguments: &[String]) {
    use fabric::Endpoint::{Msg, Rdm, Tagged};
    let (mut messages, mut accesses) = (MESSAGES.to_vec(), ACCESSES.to_vec());
    messages.push(count_fi_inject_8);
    accesses.push(count_fi_fetch_add_8);
    match arguments {
        [] => {
            device();
            xrc();
            ring();
            msg("weft");
            rdm();
            rdm_rma();
        }
        [part, provider] => match part.as_str() {
            "calls" => msg(provider),
            "msg" => sizes(&mut pair(provider, Msg, FI_ATOMIC), &messages),
            "rma" => sizes(&mut pair(provider, Msg, FI_ATOMIC), &accesses),
            "tagged" => sizes(&mut pair(provider, Tagged, 0), &messages),
            "rdm" => sizes(&mut pair(provider, Rdm, FI_ATOMIC), &accesses),
            _ => panic!("no part {part}"),
        },
        _ => panic!("count [PART PROVIDER]"),
    }
    println!("calls {CALLS}");
}
