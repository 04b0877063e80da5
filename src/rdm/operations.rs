//! Operations of the send side, from the call of the application to the completion, and the
//! packets that the engine sends for them.

use super::core::Origin;
use super::core::link::LinkKey;
use super::core::ops::Form;
use super::core::peer::PeerKey;
use super::iov::Iov;
use super::packet_memory::Slot;
use super::table_keys::{RmaKey, TxKey};
use crate::flags::Flags;
use crate::mr;
use crate::queue::Completion;
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::packet::{Message, Payload};
use crate::wire::rdm::ring::{self, Source};
use crate::wire::rdm::{Body, Header, OpId};

/// Offset of the payload in a slot: the longest header with its body ends there.
pub(super) const PAYLOAD: usize = 64;

/// DATA packets of one message that are under way.
pub(super) const PARTS: u32 = 8;

/// What an operation sends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A message of the application.
    Message,
    /// A part of a message.
    Data {
        /// The message.
        of: TxKey,
        offset: u64,
    },
    /// The request for the parts of a message.
    Cts {
        /// The sender's operation.
        op: OpId,
        /// The arrival at this side.
        receiver: OpId,
    },
    /// The request to write the end of a message.
    Push {
        /// The sender's operation.
        op: OpId,
        offset: u64,
        /// Where its first byte is written.
        to: (RemoteAddr, Rkey),
        /// The arrival at this side.
        receiver: OpId,
    },
    /// The answer to one.
    Pushed {
        /// The arrival at the receiver.
        op: OpId,
        written: u64,
    },
    /// The remote CQ data of a write, behind the write.
    Notice { of: RmaKey, data: u64, len: u32 },
    /// The end of a message that was not sent as EAGER.
    Fin {
        /// The sender's operation.
        op: OpId,
        status: u16,
        /// The packet of the operation, if a part of its credit is held until FIN is complete.
        held: Option<Origin>,
    },
    /// An atomic of the application that the target's processor executes.
    Atomic(Atomic),
    /// The answer to one.
    Result {
        /// The initiator's operation.
        op: OpId,
        status: u16,
        /// The packet of the operation, if its credit is held until the answer is complete.
        held: Option<Origin>,
    },
}

/// The parameters of an atomic, without its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Atomic {
    /// Address and key, as the application has them.
    pub(super) addr: u64,
    pub(super) key: u64,
    /// `enum fi_op` and `enum fi_datatype`.
    pub(super) operator: u8,
    pub(super) datatype: u8,
    /// Number of elements.
    pub(super) count: u16,
    /// Whether the answer has the earlier values.
    pub(super) fetches: bool,
    /// Whether it is one of several ranges of a call, whose key is the operation's context
    /// (`completions/ranges.rs`).
    pub(super) ranged: bool,
    /// Whether it is on the last range of its call: counters of the target's endpoint count the
    /// call there. Counters of regions count each range.
    pub(super) last: bool,
}

/// An operation.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    /// The peer; another address of its endpoint until that is known.
    pub(super) peer: PeerKey,
    /// Place among all operations of the endpoint, in the order of the calls.
    pub(super) order: u64,
    /// A message or an atomic waits until the operations before it are complete (`FI_FENCE`).
    pub(super) fence: bool,
    pub(super) context: usize,
    /// Whether success has an entry for the application.
    pub(super) wanted: bool,
    pub(super) message: Message,
    /// The buffers; empty if the payload was copied to `slot`. Of an atomic, whose operands are
    /// always copied: the buffers for the results.
    pub(super) iov: Iov,
    /// Length of the payload in bytes.
    pub(super) len: usize,
    /// The packet, or the copied payload from [`PAYLOAD`] on.
    pub(super) slot: Option<Slot>,
    /// The payload is in `slot`, or the message was injected and is empty.
    pub(super) copied: bool,
    /// The link on which a packet in `slot` was posted last.
    pub(super) posted_on: Option<LinkKey>,
    /// How the packet was posted last; `posted`: it was.
    pub(super) form: Form,
    pub(super) posted: bool,
    /// The core has the operation: its packet is not complete.
    pub(super) in_core: bool,
    /// The receiver's name of a message that is sent in parts.
    pub(super) receiver: Option<OpId>,
    /// The receiver has asked for the end of the message: it does so once.
    pub(super) pushed: bool,
    /// The registration by which the receiver of a message reads it.
    pub(super) source: Option<mr::Source>,
    /// Offset of the next part.
    pub(super) next: usize,
    /// Number of parts under way.
    pub(super) parts: u32,
    /// The status in FIN or RESULT.
    pub(super) fin: Option<u16>,
}

impl Operation {
    pub(super) fn new(kind: Kind, peer: PeerKey) -> Self {
        Self {
            kind,
            peer,
            order: 0,
            fence: false,
            context: 0,
            wanted: false,
            message: Message::default(),
            iov: Iov::default(),
            len: 0,
            slot: None,
            copied: false,
            posted_on: None,
            form: Form::Whole,
            posted: false,
            in_core: true,
            receiver: None,
            pushed: false,
            source: None,
            next: 0,
            parts: 0,
            fin: None,
        }
    }

    /// The contents of the packet. `key`: the operation's own.
    pub(super) fn body(&self, key: TxKey, form: Form) -> Body {
        match self.kind {
            Kind::Message if form == Form::Whole => Body::Eager {
                message: self.message,
                payload: payload(self.len),
            },
            Kind::Message => {
                let Source {
                    op,
                    addr,
                    len,
                    rkey,
                } = self.read_from(key);
                Body::Rts {
                    message: self.message,
                    op,
                    addr,
                    len,
                    rkey,
                }
            }
            Kind::Data { offset, .. } => Body::Data {
                op: self.receiver.unwrap_or_default(),
                offset,
                payload: payload(self.len),
            },
            Kind::Cts { op, receiver } => Body::Cts { op, receiver },
            Kind::Push {
                op,
                offset,
                to: (addr, rkey),
                receiver,
            } => Body::Push {
                op,
                offset,
                addr,
                rkey,
                receiver,
            },
            Kind::Pushed { op, written } => Body::Pushed { op, written },
            Kind::Notice { data, len, .. } => Body::Notice {
                data,
                len,
                ack: false,
            },
            Kind::Fin { op, status, .. } => Body::Fin { op, status },
            Kind::Atomic(atomic) => Body::Atomic {
                op: OpId::new(key.number()),
                addr: atomic.addr,
                key: atomic.key,
                operator: atomic.operator,
                datatype: atomic.datatype,
                count: atomic.count,
                fetches: atomic.fetches,
                last: atomic.last,
                operands: payload(self.len),
            },
            Kind::Result { op, status, .. } => Body::Result {
                op,
                status,
                values: payload(self.len),
            },
        }
    }

    /// The source of a message.
    fn read_from(&self, key: TxKey) -> Source {
        let source = self.source.as_ref().zip(self.iov.single());
        let (addr, rkey) = source
            .map_or((RemoteAddr::NULL, Rkey::default()), |(source, buffer)| {
                (buffer.remote_addr(), source.rkey())
            });
        Source {
            op: OpId::new(key.number()),
            addr,
            len: self.len as u64,
            rkey,
        }
    }

    /// The announcement of a message, in the form of a ring. `None`: it is another packet, or an
    /// announcement with ACK or wide data.
    #[inline]
    pub(super) fn announcement(
        &self,
        key: TxKey,
        form: Form,
        header: &Header,
    ) -> Option<(ring::Words, [u8; ring::RTS])> {
        if form != Form::Rts || !matches!(self.kind, Kind::Message) {
            return None;
        }
        let data = self.message.narrow()?;
        let envelope = (self.message.tag, data);
        Some(ring::rts(header, envelope, &self.read_from(key)))
    }

    /// Whether the packet has a payload.
    pub(super) fn has_payload(&self, form: Form) -> bool {
        match self.kind {
            Kind::Message => form == Form::Whole && self.len != 0,
            Kind::Data { .. } => true,
            Kind::Atomic(_) | Kind::Result { .. } => self.len != 0,
            Kind::Cts { .. }
            | Kind::Push { .. }
            | Kind::Pushed { .. }
            | Kind::Notice { .. }
            | Kind::Fin { .. } => false,
        }
    }

    /// Whether it is a message that was announced to the receiver, which reads it or asks for it.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        matches!(self.kind, Kind::Message) && self.form == Form::Rts
    }

    /// Whether it is an operation of the application, which has an entry.
    pub(super) const fn is_of_application(&self) -> bool {
        matches!(self.kind, Kind::Message | Kind::Atomic(_))
    }

    /// Whether it is an operation of the application that waits for the earlier ones to the peer,
    /// and for which later ones wait (`fi_endpoint(3)`, `FI_FENCE`).
    pub(super) const fn is_fenced(&self) -> bool {
        self.fence && self.is_of_application()
    }

    /// The context of its call, if the operation is one of several ranges.
    pub(super) fn call(&self) -> Option<usize> {
        let ranged = matches!(self.kind, Kind::Atomic(Atomic { ranged: true, .. }));
        ranged.then_some(self.context)
    }

    /// Whether the packet wakes the target's driver: its processor has to execute it.
    pub(super) const fn is_solicited(&self) -> bool {
        matches!(self.kind, Kind::Atomic(_))
    }

    /// The counter that counts the operation.
    pub(super) const fn counted_as(&self) -> Flags {
        match self.kind {
            Kind::Atomic(Atomic { fetches: true, .. }) => Flags::READ,
            Kind::Atomic(_) => Flags::WRITE,
            _ => Flags::SEND,
        }
    }

    /// The entry of an operation of the application.
    pub(super) fn completion(&self) -> Completion {
        if let Kind::Atomic(_) = self.kind {
            return Completion::new(self.context, Flags::ATOMIC | self.counted_as());
        }
        completion(&self.message, self.context)
    }

    /// Whether the result of an operation is known: FIN of a message that was announced by RTS, the
    /// completion of EAGER, RESULT of an atomic.
    pub(super) fn is_over(&self) -> bool {
        let asks = self.form == Form::Rts || matches!(self.kind, Kind::Atomic(_));
        let answered = !asks || self.fin.is_some();
        !self.in_core && self.parts == 0 && answered
    }
}

/// The entry of a message.
#[inline]
pub(super) fn completion(message: &Message, context: usize) -> Completion {
    let kind = match message.tag {
        Some(_) => Flags::TAGGED,
        None => Flags::MSG,
    };
    Completion::new(context, Flags::SEND | kind)
}

/// The offset is not sent: the payload follows the body.
fn payload(len: usize) -> Payload {
    Payload {
        offset: 0,
        // a payload has at most 16 KiB
        len: len as u32,
    }
}
