//! Decoders of everything that peers send: private data of the connection manager, and packets.

use crate::wire::cm_data::{CmData, MAX_CM_DATA};
use crate::wire::msg_xrc;
use crate::wire::rdm::packet::{HEADER_SIZE, MAX_HEAD, Message};
use crate::wire::rdm::xrc::{CircuitReply, CircuitRequest, LinkRejection, LinkReply, LinkRequest};
use crate::wire::rdm::{Body, Packet, Rejection, Reply, Request, ring};

/// Private data decodes to at most as many bytes as were received, and the data of the sender is
/// equal to that of the receiver, padded or not.
///
/// # Panics
/// If not.
pub fn cm_data(data: &[u8]) {
    let decoded = CmData::decode(data);
    assert!(decoded.data().len() <= data.len().saturating_sub(1).min(MAX_CM_DATA));
    assert!(
        data.get(1..)
            .unwrap_or_default()
            .starts_with(decoded.data())
    );
    match CmData::new(data) {
        Ok(sent) => {
            let mut packet = sent.encoded().to_vec();
            assert_eq!(CmData::decode(&packet).data(), data);
            packet.resize(196, 0xff);
            assert_eq!(CmData::decode(&packet).data(), data);
        }
        Err(_) => assert!(data.len() > MAX_CM_DATA),
    }
    msg_xrc(data);
}

/// Messages of connected endpoints on XRC: what is accepted has one encoding.
fn msg_xrc(data: &[u8]) {
    if let Some(header) = msg_xrc::Header::decode(data) {
        assert!(data.starts_with(&header.encode()));
        let rest = msg_xrc::data_of(data);
        assert_eq!(rest.len(), data.len() - msg_xrc::HEADER_SIZE);
    }
    if let Some(end) = msg_xrc::End::decode(data) {
        assert!(data.starts_with(&end.encode()));
        assert_eq!(msg_xrc::Header::decode(data), None);
    }
    if let Some(mark) = msg_xrc::mark(data) {
        // the mark lies behind the data of the application, as the decoder of that data sees it
        let length = usize::from(data[msg_xrc::HEADER_SIZE]);
        assert!(msg_xrc::data_of(data).len() > length);
        assert_ne!(mark.auth, Some(0));
    }
}

/// Private data and packets of RDM endpoints: what is accepted has one encoding, which is equal to
/// the received bytes, and the payload lies in the packet.
///
/// # Panics
/// If not.
pub fn rdm_wire(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        assert!(data.starts_with(&request.encode()));
    }
    if let Ok(reply) = Reply::decode(data) {
        assert!(data.starts_with(&reply.encode()));
    }
    if let Ok(rejection) = Rejection::decode(data) {
        assert!(data.starts_with(&rejection.encode()));
    }
    rdm_xrc(data);
    rdm_ring(data);
    // the length of the input, and the one that the header states
    rdm_packet(data, data.len());
    if let Some(length) = data.get(16..20).and_then(|bytes| bytes.first_chunk()) {
        let length = u32::from_le_bytes(*length) as usize;
        rdm_packet(data, HEADER_SIZE.saturating_add(length));
    }
}

/// A packet in a ring, three words and a payload: what is accepted in place has one encoding, and
/// is the packet that the decoder finds.
fn rdm_ring(data: &[u8]) {
    let Some((head, payload)) = data.split_first_chunk::<24>() else {
        return;
    };
    let word =
        |bytes: &[u8], at: usize| bytes[at..].first_chunk().map(|it| u64::from_le_bytes(*it));
    let words = [0, 8, 16].map(|at| word(head, at).unwrap_or_default());
    let found = ring::as_announced(&words, payload.len(), |at| {
        word(payload, at).unwrap_or_default()
    });
    let Some((header, announced)) = found else {
        return;
    };
    let copy = |at: usize, to: &mut [u8]| to.copy_from_slice(&payload[at..at + to.len()]);
    let head = ring::head(&words, payload.len(), copy).ok();
    let packet = head.and_then(|head| Packet::decode(head.bytes(), head.total).ok());
    let body = match announced {
        ring::Announced::Rts(tag, data, source) => {
            let again = ring::rts(&header, (tag, data), &source);
            assert_eq!((again.0, &again.1[..]), (words, payload));
            let ring::Source {
                op,
                addr,
                len,
                rkey,
            } = source;
            let message = Message {
                tag,
                data: data.map(u64::from),
                ack: false,
            };
            Body::Rts {
                message,
                op,
                addr,
                len,
                rkey,
            }
        }
        ring::Announced::Fin(op, status) => {
            let again = ring::fin(&header, op, status);
            assert_eq!((again.0, &again.1[..]), (words, payload));
            Body::Fin { op, status }
        }
        ring::Announced::Push(end) => {
            let again = ring::push(&header, &end);
            assert_eq!((again.0, &again.1[..]), (words, payload));
            let ring::End {
                op,
                offset,
                addr,
                rkey,
                receiver,
            } = end;
            Body::Push {
                op,
                offset,
                addr,
                rkey,
                receiver,
            }
        }
        ring::Announced::Pushed(op, written) => {
            let again = ring::pushed(&header, op, written);
            assert_eq!((again.0, &again.1[..]), (words, payload));
            Body::Pushed { op, written }
        }
    };
    assert_eq!(packet, Some(Packet { header, body }));
}

/// Handshakes on XRC.
fn rdm_xrc(data: &[u8]) {
    if let Ok(request) = CircuitRequest::decode(data) {
        assert!(data.starts_with(&request.encode()));
    }
    if let Ok(reply) = CircuitReply::decode(data) {
        assert!(data.starts_with(&reply.encode()));
    }
    if let Ok(request) = LinkRequest::decode(data) {
        assert!(data.starts_with(&request.encode()));
    }
    if let Ok(reply) = LinkReply::decode(data) {
        assert!(data.starts_with(&reply.encode()));
    }
    if let Ok(rejection) = LinkRejection::decode(data) {
        assert!(data.starts_with(&rejection.encode()));
    }
}

fn rdm_packet(data: &[u8], total: usize) {
    let Ok(packet) = Packet::decode(data, total) else {
        return;
    };
    let mut head = [0xee; MAX_HEAD];
    let size = packet.encode(&mut head);
    assert!(data.starts_with(&head[..size]));
    let payload = match packet.body {
        Body::Eager { payload, .. } | Body::Data { payload, .. } => payload,
        Body::Atomic { operands, .. } => operands,
        Body::Result { values, .. } => values,
        _ => return assert_eq!(size, total),
    };
    assert_eq!(
        (payload.offset, payload.offset + payload.len as usize),
        (size, total)
    );
}
