//! Properties of all formats: a round trip, one encoding of each value, and decoders that refuse or
//! decode to other values whatever was changed.

mod circuits;

use proptest::prelude::*;

use super::packet::{
    HEADER_SIZE, MAX_HEAD, MAX_OPERANDS, MAX_STATUS, Message, Payload, SLOT_SIZE, eager_credit,
};
use super::terms::{MAX_DATA, MAX_EAGER};
use super::values::*;
use super::*;
use crate::verbs::{QpNumber, RemoteAddr, Rkey};

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn credit() -> impl Strategy<Value = Credit> {
    any::<(u32, u32)>().prop_map(|(blocks, slots)| Credit::new(blocks, slots))
}

fn epoch() -> impl Strategy<Value = Epoch> {
    any::<u32>().prop_filter_map("no epoch", Epoch::new)
}

fn secret() -> impl Strategy<Value = Secret> {
    any::<u32>().prop_filter_map("no token", Secret::new)
}

fn id() -> impl Strategy<Value = EndpointId> {
    any::<u64>().prop_filter_map("no id", EndpointId::new)
}

fn listener() -> impl Strategy<Value = Listener> {
    let listener = |(ip, port): ([u8; 16], u16)| Listener::of(ip, port);
    any::<([u8; 16], u16)>().prop_filter_map("no listener", listener)
}

fn terms() -> impl Strategy<Value = Terms> {
    let amount = (0..1_u32 << 31, 0..1_u32 << 31);
    (
        (any::<u32>(), any::<u16>(), any::<u32>(), any::<bool>()),
        (credit(), amount),
        (any::<u32>(), any::<u64>(), 0..=MAX_EAGER, any::<bool>()),
    )
        .prop_map(|(first, (used, (blocks, slots)), last)| Terms {
            expected: Number::new(first.0),
            used,
            grant: Grant {
                number: GrantNumber::new(first.1),
                limit: used.add(Credit::new(blocks, slots)),
            },
            index: PeerIndex::new(first.2),
            application_keys: first.3,
            block_rkey: Rkey::new(last.0),
            block_addr: RemoteAddr::new(last.1 & !7),
            eager: last.2,
            device_atomics: last.3,
        })
}

fn request() -> impl Strategy<Value = Request> {
    let shows = prop::option::of((secret(), any::<bool>()));
    let options = (prop::option::of(epoch()), shows);
    (listener(), id(), any::<u64>(), epoch(), secret(), options).prop_map(
        |(listener, id, auth, epoch, gives, (ended, shows))| Request {
            listener,
            id,
            auth,
            epoch,
            ended,
            gives,
            shows: shows.map(|(token, _)| token),
            fresh: shows.is_some_and(|(_, fresh)| fresh),
        },
    )
}

fn reply() -> impl Strategy<Value = Reply> {
    let ended = prop::option::of(epoch());
    (epoch(), id(), any::<u64>(), secret(), ended, terms()).prop_map(
        |(epoch, id, auth, gives, ended, terms)| Reply {
            epoch,
            id,
            auth,
            gives,
            ended,
            terms,
        },
    )
}

fn rejection() -> impl Strategy<Value = Rejection> {
    let reason = prop::sample::select(vec![
        Reason::Foreign,
        Reason::Version,
        Reason::Auth,
        Reason::Other,
        Reason::Known,
        Reason::Stale,
        Reason::Busy,
    ]);
    let epochs = (prop::option::of(epoch()), prop::option::of(epoch()));
    (any::<u8>(), id(), epochs, reason).prop_map(|(version, id, (epoch, newest), reason)| {
        Rejection {
            version,
            epoch,
            id,
            newest,
            reason,
        }
    })
}

fn message() -> impl Strategy<Value = Message> {
    let data = prop_oneof![any::<u64>(), any::<u32>().prop_map(u64::from)];
    let options = (prop::option::of(any::<u64>()), prop::option::of(data));
    (options, any::<bool>()).prop_map(|((tag, data), ack)| Message { tag, data, ack })
}

fn grant() -> impl Strategy<Value = Grant> {
    (any::<u16>(), credit()).prop_map(|(number, limit)| Grant {
        number: GrantNumber::new(number),
        limit,
    })
}

/// A payload behind a body of `body` bytes.
fn payload(body: usize, len: impl Strategy<Value = u32>) -> impl Strategy<Value = Payload> {
    len.prop_map(move |len| Payload {
        offset: HEADER_SIZE + body,
        len,
    })
}

fn attach() -> impl Strategy<Value = Body> {
    let attach = |(circuit, initiator, target): (u32, u32, u32)| {
        Some(Body::Attach(packet::Attach {
            circuit: xrc::CircuitNumber::new(circuit)?,
            initiator: QpNumber::new(initiator >> 8)?,
            target: QpNumber::new(target >> 8)?,
        }))
    };
    any::<(u32, u32, u32)>().prop_filter_map("no circuit", attach)
}

fn body() -> impl Strategy<Value = Body> {
    let op = || any::<u32>().prop_map(OpId::new);
    let status = || 0..=MAX_STATUS as u16;
    let hello = (epoch(), terms(), prop::collection::vec(listener(), 0..=8));
    prop_oneof![
        (message(), 0..=MAX_EAGER).prop_map(|(message, len)| {
            let wide = message.data.is_some_and(|data| data >> 32 != 0);
            let offset = HEADER_SIZE + if wide { 8 } else { 0 };
            let payload = Payload { offset, len };
            Body::Eager { message, payload }
        }),
        (message(), op(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
            |(message, op, addr, len, rkey)| Body::Rts {
                message,
                op,
                addr: RemoteAddr::new(addr),
                len: len >> 1 & !addr,
                rkey: Rkey::new(if addr == 0 { 0 } else { rkey }),
            }
        ),
        (
            op(),
            0..=u64::MAX - u64::from(MAX_DATA),
            payload(0, 1..=MAX_DATA)
        )
            .prop_map(|(op, offset, payload)| Body::Data {
                op,
                offset,
                payload
            }),
        any::<(u64, u32, bool)>().prop_map(|(data, len, ack)| Body::Notice { data, len, ack }),
        (
            (op(), payload(16, 0..=MAX_OPERANDS)),
            any::<(u64, u64, u8, u8, bool, bool)>(),
            1..=u16::MAX
        )
            .prop_map(
                |((op, operands), (addr, key, operator, datatype, fetches, last), count)| {
                    Body::Atomic {
                        op,
                        addr,
                        key,
                        operator,
                        datatype,
                        count,
                        fetches,
                        last,
                        operands,
                    }
                }
            ),
        (op(), op()).prop_map(|(op, receiver)| Body::Cts { op, receiver }),
        (op(), status()).prop_map(|(op, status)| Body::Fin { op, status }),
        (op(), status(), payload(0, 0..=MAX_OPERANDS))
            .prop_map(|(op, status, values)| { Body::Result { op, status, values } }),
        (op(), any::<u64>(), 1_u64.., any::<u32>(), op()).prop_map(
            |(op, offset, addr, rkey, receiver)| Body::Push {
                op,
                offset: offset & !addr,
                addr: RemoteAddr::new(addr),
                rkey: Rkey::new(rkey),
                receiver,
            }
        ),
        (op(), any::<u64>()).prop_map(|(op, written)| Body::Pushed { op, written }),
        (grant(), any::<bool>()).prop_map(|(grant, recall)| Body::Credit { grant, recall }),
        grant().prop_map(Body::Return),
        prop::sample::select(vec![
            Close::Ask,
            Close::Accept,
            Close::Refuse,
            Close::End,
            Close::Demand
        ])
        .prop_map(Body::Close),
        hello.prop_map(|(epoch, terms, listeners)| Body::Hello(Box::new(Hello::new(
            epoch, terms, listeners
        )))),
        Just(Body::Switch),
        attach(),
    ]
}

fn packet() -> impl Strategy<Value = Packet> {
    (any::<(u32, u32, u16, u32)>(), body()).prop_map(|((number, processed, seen, to), body)| {
        let numbered = body.kind().is_numbered();
        Packet {
            header: Header {
                number: Number::new(if numbered { number } else { 0 }),
                processed: Number::new(processed),
                seen: GrantNumber::new(seen),
                to: PeerIndex::new(to),
            },
            body,
        }
    })
}

/// The head of a packet, and its whole length.
fn encoded(packet: &Packet) -> (Vec<u8>, usize) {
    // what was in the memory before has no effect
    let mut head = [0xee; MAX_HEAD];
    let size = packet.encode(&mut head);
    let payload = match packet.body {
        Body::Eager { payload, .. } | Body::Data { payload, .. } => payload,
        Body::Atomic { operands, .. } => operands,
        Body::Result { values, .. } => values,
        _ => Payload::default(),
    };
    if payload != Payload::default() {
        assert_eq!(payload.offset, size, "the payload follows the body");
    }
    (head[..size].to_vec(), size + payload.len as usize)
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn a_packet_survives(packet in packet()) {
        let (head, total) = encoded(&packet);
        prop_assert_eq!(Packet::decode(&head, total), Ok(packet.clone()));
        // with the begin of the payload, and padded behind the packet
        let mut more = head.clone();
        more.resize(MAX_HEAD.max(total) + 8, 0xee);
        prop_assert_eq!(Packet::decode(&more[..MAX_HEAD], total), Ok(packet.clone()));
        prop_assert_eq!(Packet::decode(&more, total), Ok(packet.clone()));
        prop_assert!(Packet::decode(&head, total + 1).is_err());
        prop_assert!(total == 0 || Packet::decode(&head, total - 1).is_err());
        for size in 0..head.len() {
            prop_assert!(Packet::decode(&head[..size], total).is_err());
        }
    }

    #[test]
    fn a_packet_in_a_ring_is_the_same(packet in packet()) {
        let (bytes, total) = encoded(&packet);
        let mut head = [0xee; MAX_HEAD];
        let size = packet.encode(&mut head);
        let (words, has_prefix) = ring::words(&head);
        let mut payload = Vec::new();
        if has_prefix {
            payload.extend_from_slice(&head[16..16 + ring::PREFIX]);
        }
        payload.extend_from_slice(&head[HEADER_SIZE..size]);
        payload.resize(payload.len() + total - size, 0xdd);
        let copy = |at: usize, to: &mut [u8]| to.copy_from_slice(&payload[at..at + to.len()]);
        let found = ring::head(&words, payload.len(), copy).unwrap();
        prop_assert!(found.bytes().starts_with(&bytes) && found.total == total);
        prop_assert_eq!(Packet::decode(found.bytes(), found.total), Ok(packet.clone()));
        prop_assert_eq!(found.begin + payload.len(), total);
        if has_prefix {
            let short = ring::head(&words, ring::PREFIX - 1, |_, to| to.fill(0));
            prop_assert_eq!(short.map(|_| ()), Err(Bad::Length));
        }
        if let Body::Data { op, offset, payload: place } = packet.body {
            let prefix = payload[..ring::PREFIX].try_into().unwrap();
            let data = ring::data(&packet.header, op, offset, place.len);
            prop_assert_eq!(data, (words, prefix));
        }
        let prefix = || u64::from_le_bytes(payload[..ring::PREFIX].try_into().unwrap());
        let eager = ring::as_eager(&words, payload.len(), prefix);
        match packet.body {
            Body::Eager { message: Message { tag, data, ack: false }, payload: place }
                if data.is_none_or(|data| u32::try_from(data).is_ok()) =>
            {
                let data = data.map(|data| data as u32);
                let header = packet.header;
                prop_assert_eq!(eager, Some(ring::Eager { header, tag, data }));
                let long = MAX_EAGER as usize + 1;
                match data {
                    None => {
                        prop_assert_eq!(ring::eager(&header, tag), words);
                        prop_assert_eq!(place.len as usize, payload.len());
                        prop_assert_eq!(ring::as_eager(&words, long, prefix), None);
                    }
                    Some(data) => {
                        let encoded = ring::eager_with_data(&header, tag, data, place.len);
                        prop_assert_eq!((encoded.0, u64::from_le_bytes(encoded.1)), (words, prefix()));
                        prop_assert_eq!(place.len as usize, payload.len() - ring::PREFIX);
                        for other in [long, payload.len() - 1, payload.len() + 1, 0, 7] {
                            prop_assert_eq!(ring::as_eager(&words, other, prefix), None);
                        }
                        let words = |len: usize| len as u64;
                        let of_long = || words(long);
                        prop_assert_eq!(
                            ring::as_eager(&encoded.0, long + ring::PREFIX, of_long),
                            None
                        );
                    }
                }
            }
            _ => prop_assert_eq!(eager, None),
        }
        let word = |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().unwrap());
        let announced = ring::as_announced(&words, payload.len(), word);
        let expected = match packet.body {
            Body::Rts { message, op, addr, len, rkey } => message.narrow().map(|data| {
                let source = ring::Source { op, addr, len, rkey };
                ring::Announced::Rts(message.tag, data, source)
            }),
            Body::Fin { op, status } => Some(ring::Announced::Fin(op, status)),
            Body::Push { op, offset, addr, rkey, receiver } => {
                Some(ring::Announced::Push(ring::End { op, offset, addr, rkey, receiver }))
            }
            Body::Pushed { op, written } => Some(ring::Announced::Pushed(op, written)),
            _ => None,
        };
        prop_assert_eq!(announced, expected.map(|it| (packet.header, it)));
        match expected {
            Some(ring::Announced::Rts(tag, data, source)) => {
                let again = ring::rts(&packet.header, (tag, data), &source);
                prop_assert_eq!((again.0, &again.1[..]), (words, &payload[..]));
            }
            Some(ring::Announced::Fin(op, status)) => {
                let again = ring::fin(&packet.header, op, status);
                prop_assert_eq!((again.0, &again.1[..]), (words, &payload[..]));
            }
            Some(ring::Announced::Push(end)) => {
                let again = ring::push(&packet.header, &end);
                prop_assert_eq!((again.0, &again.1[..]), (words, &payload[..]));
            }
            Some(ring::Announced::Pushed(op, written)) => {
                let again = ring::pushed(&packet.header, op, written);
                prop_assert_eq!((again.0, &again.1[..]), (words, &payload[..]));
            }
            None => {}
        }
    }

    /// Words that are accepted as a packet of an announced message are those of their encoding, and
    /// the decoder accepts the same ones.
    #[test]
    fn announcements_in_a_ring_have_one_encoding(
        words in any::<[u64; 3]>(),
        kind in prop_oneof![
            Just(Kind::Fin), Just(Kind::Rts), Just(Kind::Push), Just(Kind::Pushed)
        ],
        flags in prop_oneof![Just(0_u64), 0_u64..16],
        last in prop_oneof![Just(0_u64), 0_u64..5000, any::<u64>()],
        (said, a) in (prop_oneof![Just(0_u32), Just(16), Just(24), any::<u32>()], prop_oneof![Just(0), any::<u32>()]),
        addr in prop_oneof![Just(0), any::<u64>()],
        size in prop_oneof![0_u64..1 << 40, any::<u64>()],
        (rkey, op) in (prop_oneof![Just(0), any::<u32>()], any::<u32>()),
        len in prop_oneof![
            Just(ring::PREFIX), Just(ring::RTS), Just(ring::PUSH), 0..ring::RTS + 9
        ],
    ) {
        let words = [words[0], words[1] & !0xffff | kind as u64 | flags << 8, last];
        let rest = u64::from(rkey) | u64::from(op) << 32;
        let third = if kind == Kind::Push { rest } else { size };
        let mut bytes = [u64::from(said) | u64::from(a) << 32, addr, third, rest]
            .map(u64::to_le_bytes)
            .concat();
        bytes.resize(len, 0);
        let copy = |at: usize, to: &mut [u8]| to.copy_from_slice(&bytes[at..at + to.len()]);
        let head = ring::head(&words, len, copy).ok();
        let packet = head.and_then(|head| Packet::decode(head.bytes(), head.total).ok());
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        match ring::as_announced(&words, len, word) {
            Some((header, ring::Announced::Rts(tag, data, source))) => {
                let again = ring::rts(&header, (tag, data), &source);
                prop_assert_eq!((again.0, &again.1[..]), (words, &bytes[..]));
                let packet = packet.unwrap();
                let ring::Source { op, addr, len, rkey } = source;
                let message = Message { tag, data: data.map(u64::from), ack: false };
                prop_assert_eq!(packet.header, header);
                prop_assert_eq!(packet.body, Body::Rts { message, op, addr, len, rkey });
            }
            Some((header, ring::Announced::Fin(op, status))) => {
                let again = ring::fin(&header, op, status);
                prop_assert_eq!((again.0, &again.1[..]), (words, &bytes[..]));
                let packet = packet.unwrap();
                prop_assert_eq!((packet.header, packet.body), (header, Body::Fin { op, status }));
            }
            Some((header, ring::Announced::Push(end))) => {
                let again = ring::push(&header, &end);
                prop_assert_eq!((again.0, &again.1[..]), (words, &bytes[..]));
                let packet = packet.unwrap();
                let ring::End { op, offset, addr, rkey, receiver } = end;
                prop_assert_eq!(packet.header, header);
                prop_assert_eq!(packet.body, Body::Push { op, offset, addr, rkey, receiver });
            }
            Some((header, ring::Announced::Pushed(op, written))) => {
                let again = ring::pushed(&header, op, written);
                prop_assert_eq!((again.0, &again.1[..]), (words, &bytes[..]));
                let packet = packet.unwrap();
                prop_assert_eq!((packet.header, packet.body), (header, Body::Pushed { op, written }));
            }
            None => {
                let announced = matches!(packet.map(|it| it.body), Some(Body::Fin { .. }
                    | Body::Push { .. } | Body::Pushed { .. } | Body::Rts {
                    message: Message { ack: false, data: None | Some(0..=0xffff_ffff), .. }, ..
                }));
                prop_assert!(!announced);
            }
        }
    }

    /// Words that are accepted as EAGER are those of its encoding.
    #[test]
    fn eager_in_a_ring_has_one_encoding(
        words in any::<[u64; 3]>(),
        kind in 0_u64..3,
        flags in 0_u64..16,
        (data, said) in (any::<u32>(), prop_oneof![Just(24_u32), any::<u32>()]),
    ) {
        let words = [words[0], words[1] & !0xffff | kind | flags << 8, words[2]];
        let prefix = u64::from(said) | u64::from(data) << 32;
        for (tag, len) in [(words[2], 32), (0, 32), (words[2], 7)] {
            let words = [words[0], words[1], tag];
            let bytes = [prefix.to_le_bytes(); 4].concat();
            let copy = |at: usize, to: &mut [u8]| to.copy_from_slice(&bytes[at..at + to.len()]);
            let head = ring::head(&words, len, copy);
            let packet = head.map(|head| Packet::decode(head.bytes(), head.total));
            match ring::as_eager(&words, len, || prefix) {
                Some(found) => {
                    match found.data {
                        None => prop_assert_eq!(ring::eager(&found.header, found.tag), words),
                        Some(data) => {
                            let rest = (len - ring::PREFIX) as u32;
                            let again = ring::eager_with_data(&found.header, found.tag, data, rest);
                            prop_assert_eq!(again, (words, prefix.to_le_bytes()));
                        }
                    }
                    let packet = packet.unwrap().unwrap();
                    prop_assert_eq!(packet.header, found.header);
                    let same = matches!(packet.body, Body::Eager { message, .. }
                        if message.tag == found.tag && message.data == found.data.map(u64::from));
                    prop_assert!(same);
                }
                None => {
                    let body = packet.ok().and_then(|packet| Some(packet.ok()?.body));
                    let narrow = |data: Option<u64>| data.is_none_or(|it| u32::try_from(it).is_ok());
                    let eager = matches!(body, Some(Body::Eager { message, .. })
                        if narrow(message.data) && !message.ack);
                    prop_assert!(!eager);
                }
            }
        }
    }

    #[test]
    fn every_changed_byte_of_a_packet_is_seen(packet in packet(), bits in 1_u8..) {
        let (head, total) = encoded(&packet);
        for at in 0..head.len() {
            let mut changed = head.clone();
            changed[at] ^= bits;
            if let Ok(other) = Packet::decode(&changed, total) {
                prop_assert_ne!(&other, &packet, "byte {}", at);
                // a body can become the begin of a payload
                let (other, whole) = encoded(&other);
                prop_assert!(changed.starts_with(&other) && whole == total, "byte {}", at);
            }
        }
    }

    #[test]
    fn a_request_survives_and_a_changed_one_does_not(request in request(), bits in 1_u8..) {
        let bytes = request.encode();
        prop_assert_eq!(Request::decode(&bytes), Ok(request));
        changed(&bytes, bits, Request::decode)?;
        prop_assert!(Reply::decode(&bytes).is_err() && Rejection::decode(&bytes).is_err());
    }

    #[test]
    fn a_reply_survives_and_a_changed_one_does_not(reply in reply(), bits in 1_u8..) {
        let bytes = reply.encode();
        prop_assert_eq!(Reply::decode(&bytes), Ok(reply));
        changed(&bytes, bits, Reply::decode)?;
    }

    #[test]
    fn a_rejection_survives_and_a_changed_one_does_not(rejection in rejection(), bits in 1_u8..) {
        let bytes = rejection.encode();
        prop_assert_eq!(Rejection::decode(&bytes), Ok(rejection));
        changed(&bytes, bits, Rejection::decode)?;
    }
}

/// Padding has no effect, and a message that is cut off or has one changed byte is refused. (A
/// check of 16 bits misses one change in 65,536; so a change of two bytes is not tried.)
fn changed<T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    bits: u8,
    decode: fn(&[u8]) -> Result<T, Bad>,
) -> Result<(), TestCaseError> {
    let value = decode(bytes);
    let mut padded = bytes.to_vec();
    padded.resize(200, 0xee);
    prop_assert_eq!(&decode(&padded), &value);
    for at in 0..bytes.len() {
        let mut changed = bytes.to_vec();
        changed[at] ^= bits;
        let other = decode(&changed);
        prop_assert!(other != value, "byte {}", at);
        prop_assert_eq!(decode(&bytes[..at]).err(), Some(Bad::Length));
    }
    Ok(())
}

#[test]
fn the_bytes_are_those_of_the_page() {
    let packet = Packet {
        header: Header {
            number: Number::new(0x0403_0201),
            processed: Number::new(0x0807_0605),
            seen: GrantNumber::new(0x0a09),
            to: PeerIndex::new(0x0e0d_0c0b),
        },
        body: Body::Eager {
            message: Message {
                tag: Some(0x2827_2625_2423_2221),
                data: Some(0x1817_1615_1413_1211),
                ack: true,
            },
            payload: Payload {
                offset: 40,
                len: 0x102,
            },
        },
    };
    let (head, total) = encoded(&packet);
    assert_eq!(total, 40 + 0x102);
    assert_eq!(
        head,
        [
            1, 2, 3, 4, 5, 6, 7, 8, 1, 15, 9, 10, 11, 12, 13, 14, 10, 1, 0, 0, 0x11, 0x12, 0x13,
            0x14, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x15, 0x16, 0x17, 0x18, 0, 0, 0,
            0
        ]
    );
    assert_eq!(packet.body.uses(), Credit::new(6, 1));
    assert_eq!(eager_credit(0), Credit::new(1, 1));
    assert_eq!(eager_credit(MAX_EAGER), Credit::new(129, 1));
    // the longest packets that need no ring
    assert!(HEADER_SIZE + 8 + MAX_EAGER as usize <= SLOT_SIZE && MAX_HEAD <= SLOT_SIZE);
    assert!(HEADER_SIZE + MAX_DATA as usize <= SLOT_SIZE);
}

/// Terms state the largest payload of DATA, and DATA has no longer one.
#[test]
fn the_largest_payload_of_data_is_one_number() {
    let data = |len: usize| {
        let body = Body::Data {
            op: OpId::new(1),
            offset: 0,
            payload: Payload {
                offset: HEADER_SIZE,
                len: len as u32,
            },
        };
        let header = Header::default();
        let (head, _) = encoded(&Packet { header, body });
        Packet::decode(&head, HEADER_SIZE + len)
    };
    let terms = Terms::default().encode();
    let stated = u32::from_le_bytes(terms[44..48].try_into().unwrap());
    assert!(data(stated as usize).is_ok() && data(stated as usize + 1).is_err());
    assert!(HEADER_SIZE + stated as usize <= SLOT_SIZE);
    for other in [0, 1, stated - 1, stated + 1, 2 * stated] {
        let mut terms = terms;
        terms[44..48].copy_from_slice(&other.to_le_bytes());
        assert_eq!(Terms::decode(&terms), Err(Bad::Value), "{other}");
    }
}

#[test]
fn foreign_requests_are_refused() {
    let mut private_data = [0; 56];
    for first in 0..=255 {
        private_data[0] = first;
        assert!(Request::decode(&private_data).is_err());
    }
    assert_eq!(Request::decode(&[]), Err(Bad::Length));
    let mut bytes = Request {
        listener: Listener::of([1; 16], 1).unwrap(),
        id: EndpointId::new(1).unwrap(),
        auth: 0,
        epoch: Epoch::FIRST,
        ended: None,
        gives: Secret::new(1).unwrap(),
        shows: None,
        fresh: false,
    }
    .encode();
    super::cm::seal(&mut bytes, 0x81, 2);
    assert_eq!(Request::decode(&bytes), Err(Bad::Version(2)));
}

/// Every kind has one byte.
#[test]
fn kinds_are_distinct() {
    let known = (0..=255_u8).filter(|byte| {
        let mut head = [0; HEADER_SIZE];
        head[8] = *byte;
        // the length is checked after the kind
        Packet::decode(&head, 0) == Err(Bad::Length)
    });
    let kinds = Kind::ALL.map(|kind| kind as u8);
    assert_eq!(known.collect::<Vec<_>>(), kinds);
}
