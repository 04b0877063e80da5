//! Packets: the one decoder of everything that arrives on a link, and its inverse.
//! `docs/protocol-rdm.md`, "Packets".
//!
//! In one file, because encoder and decoder of a kind are read and changed side by side.

use super::hello::{Hello, MAX_HELLO};
use super::terms::{Grant, MAX_DATA, MAX_EAGER};
use super::values::{Credit, GrantNumber, Number, OpId, PeerIndex};
use super::xrc::CircuitNumber;
use super::{Bad, bytes, get16, get32, get64, put, reserved};
use crate::verbs::{QpNumber, RemoteAddr, Rkey};

/// Size of the header in bytes.
pub const HEADER_SIZE: usize = 32;

/// Size in bytes of the longest header with its body, without payload. A decoder that gets so many
/// bytes of a packet needs no others.
pub const MAX_HEAD: usize = HEADER_SIZE + MAX_HELLO;

/// Size of a slot of the shared receive queue in bytes: the longest packet that is not on a ring
/// link.
pub const SLOT_SIZE: usize = MAX_EAGER as usize + 64;

/// Size in bytes of a block of memory for unexpected messages.
pub const BLOCK_SIZE: u32 = 64;

/// Largest number of bytes of the operands of an atomic, and of its results.
pub const MAX_OPERANDS: u32 = 1024;

/// Largest status of an answer: error numbers are smaller.
pub const MAX_STATUS: u64 = 4095;

pub(super) const TAGGED: u8 = 1;
pub(super) const DATA: u8 = 2;
const WIDE: u8 = 4;
const ACK: u8 = 8;
const RECALL: u8 = 32;

/// Size of the upper half of wide remote CQ data.
const WIDE_SIZE: usize = 8;
pub(super) const RTS_SIZE: usize = 24;
const ATOMIC_SIZE: usize = 16;
pub(super) const PUSH_SIZE: usize = 16;

/// The kind of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A message with its payload.
    Eager = 1,
    /// A message whose payload the receiver fetches or asks for.
    Rts = 2,
    /// A part of the payload of an RTS.
    Data = 3,
    /// Remote CQ data of a WRITE.
    Notice = 4,
    /// An atomic that the target's processor executes.
    Atomic = 5,
    /// Answer to an RTS: send the payload.
    Cts = 6,
    /// Last answer to an RTS.
    Fin = 7,
    /// Answer to ATOMIC.
    Result = 8,
    /// Answer to an RTS: write the end of the payload.
    Push = 9,
    /// Answer to PUSH.
    Pushed = 10,
    /// A grant.
    Credit = 64,
    /// Answer to a grant.
    Return = 65,
    /// Eviction of a link.
    Close = 66,
    /// The first packet of the dialler.
    Hello = 67,
    /// The sender continues on its grown ring.
    Switch = 68,
    /// The first packet of an acceptor on XRC.
    Attach = 69,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 16] = [
        Self::Eager,
        Self::Rts,
        Self::Data,
        Self::Notice,
        Self::Atomic,
        Self::Cts,
        Self::Fin,
        Self::Result,
        Self::Push,
        Self::Pushed,
        Self::Credit,
        Self::Return,
        Self::Close,
        Self::Hello,
        Self::Switch,
        Self::Attach,
    ];

    const fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Eager,
            2 => Self::Rts,
            3 => Self::Data,
            4 => Self::Notice,
            5 => Self::Atomic,
            6 => Self::Cts,
            7 => Self::Fin,
            8 => Self::Result,
            9 => Self::Push,
            10 => Self::Pushed,
            64 => Self::Credit,
            65 => Self::Return,
            66 => Self::Close,
            67 => Self::Hello,
            68 => Self::Switch,
            69 => Self::Attach,
            _ => return None,
        })
    }

    /// Whether packets of the kind have a number, and are repeated on the next link.
    #[inline]
    pub const fn is_numbered(self) -> bool {
        (self as u8) < Self::Credit as u8
    }

    /// The flags that packets of the kind may have.
    const fn flags(self) -> u8 {
        match self {
            Self::Eager | Self::Rts => TAGGED | DATA | WIDE | ACK,
            Self::Notice => ACK,
            Self::Credit => RECALL,
            _ => 0,
        }
    }
}

/// The part of the header that all packets have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The packet's number; 0 if its kind has none.
    pub number: Number,
    /// Number of the next packet that the sender expects.
    pub processed: Number,
    /// The newest grant that the sender has received.
    pub seen: GrantNumber,
    /// The sender's peer, as the receiver has named it in its terms.
    pub to: PeerIndex,
}

/// What a message has besides its payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The tag of a tagged message.
    pub tag: Option<u64>,
    /// Remote CQ data.
    pub data: Option<u64>,
    /// Whether the sender waits until the message is processed.
    pub ack: bool,
}

impl Message {
    /// The CQ data, if it has any. `None`: the message has an ACK, or data of more than 32 bits.
    #[inline(always)]
    pub fn narrow(&self) -> Option<Option<u32>> {
        match self.data {
            _ if self.ack => None,
            None => Some(None),
            Some(data) => Some(Some(u32::try_from(data).ok()?)),
        }
    }

    fn is_wide(self) -> bool {
        self.data.is_some_and(|data| data > u32::MAX.into())
    }
}

/// The place of a payload in its packet: the bytes to the packet's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Offset from the begin of the header, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: u32,
}

/// The steps of an eviction, and the end of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The sender asks whether it may end the link.
    Ask,
    /// The receiver of the question agrees, and posts nothing more.
    Accept,
    /// It does not.
    Refuse,
    /// The endpoint of the sender is being closed, which posts nothing more.
    End,
    /// The sender needs the place of the link, although operations are under way.
    Demand,
}

/// The contents of a packet, by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// See [`Kind::Eager`].
    Eager {
        /// Envelope.
        message: Message,
        /// At most [`MAX_EAGER`] bytes.
        payload: Payload,
    },
    /// See [`Kind::Rts`].
    Rts {
        /// Envelope.
        message: Message,
        /// The sender's operation.
        op: OpId,
        /// Address of the source; NULL: it cannot be read.
        addr: RemoteAddr,
        /// Its length in bytes; address plus length do not overflow.
        len: u64,
        /// Its rkey; 0 with address NULL.
        rkey: Rkey,
    },
    /// See [`Kind::Data`].
    Data {
        /// The receiver's operation.
        op: OpId,
        /// Offset in the message.
        offset: u64,
        /// 1 to [`MAX_DATA`] bytes. The offset plus these does not overflow.
        payload: Payload,
    },
    /// See [`Kind::Notice`].
    Notice {
        /// Remote CQ data.
        data: u64,
        /// Length of the write in bytes, at most 2^32 - 1.
        len: u32,
        /// Whether the sender waits until the packet is processed.
        ack: bool,
    },
    /// See [`Kind::Atomic`].
    Atomic {
        /// The sender's operation.
        op: OpId,
        /// Address, as `fi_atomic(3)` has it.
        addr: u64,
        /// Key.
        key: u64,
        /// `enum fi_op`; not checked.
        operator: u8,
        /// `enum fi_datatype`; not checked.
        datatype: u8,
        /// Number of elements, not 0.
        count: u16,
        /// Whether RESULT has the earlier values of the elements.
        fetches: bool,
        /// Whether it is on the last range of its call.
        last: bool,
        /// At most [`MAX_OPERANDS`] bytes.
        operands: Payload,
    },
    /// See [`Kind::Cts`].
    Cts {
        /// The operation of the RTS.
        op: OpId,
        /// The operation that DATA names.
        receiver: OpId,
    },
    /// See [`Kind::Fin`].
    Fin {
        /// The operation of the RTS.
        op: OpId,
        /// 0, or an error number of `fi_errno(3)`: at most [`MAX_STATUS`].
        status: u16,
    },
    /// See [`Kind::Result`].
    Result {
        /// The operation of the ATOMIC.
        op: OpId,
        /// As in FIN.
        status: u16,
        /// At most [`MAX_OPERANDS`] bytes.
        values: Payload,
    },
    /// See [`Kind::Push`].
    Push {
        /// The operation of the RTS.
        op: OpId,
        /// Offset in the message of the first byte that is asked for.
        offset: u64,
        /// Where it is written, not NULL. Address plus offset do not overflow.
        addr: RemoteAddr,
        /// The rkey of that memory.
        rkey: Rkey,
        /// The operation that PUSHED names.
        receiver: OpId,
    },
    /// See [`Kind::Pushed`].
    Pushed {
        /// The operation in PUSH.
        op: OpId,
        /// Number of bytes that were written, from the offset in PUSH on.
        written: u64,
    },
    /// See [`Kind::Credit`].
    Credit {
        /// Number and positions.
        grant: Grant,
        /// Whether the sender asks for unused credit.
        recall: bool,
    },
    /// See [`Kind::Return`]. The number is that of the newest grant, the positions are those that
    /// the sender keeps.
    Return(Grant),
    /// See [`Kind::Close`].
    Close(Close),
    /// See [`Kind::Hello`]. Boxed: the other packets are copied on the fast path.
    Hello(Box<Hello>),
    /// See [`Kind::Switch`].
    Switch,
    /// See [`Kind::Attach`].
    Attach(Attach),
}

/// The circuit of the sender of ATTACH (`docs/protocol-xrc.md`, "Acceptance").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach {
    /// Its number.
    pub circuit: CircuitNumber,
    /// Its initiator.
    pub initiator: QpNumber,
    /// Its target.
    pub target: QpNumber,
}

impl Body {
    /// The kind.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Eager { .. } => Kind::Eager,
            Self::Rts { .. } => Kind::Rts,
            Self::Data { .. } => Kind::Data,
            Self::Notice { .. } => Kind::Notice,
            Self::Atomic { .. } => Kind::Atomic,
            Self::Cts { .. } => Kind::Cts,
            Self::Fin { .. } => Kind::Fin,
            Self::Result { .. } => Kind::Result,
            Self::Push { .. } => Kind::Push,
            Self::Pushed { .. } => Kind::Pushed,
            Self::Credit { .. } => Kind::Credit,
            Self::Return(_) => Kind::Return,
            Self::Close(_) => Kind::Close,
            Self::Hello(_) => Kind::Hello,
            Self::Switch => Kind::Switch,
            Self::Attach(_) => Kind::Attach,
        }
    }

    /// Whether the sender waits until the packet is processed.
    #[inline]
    pub const fn wants_ack(&self) -> bool {
        match self {
            Self::Eager { message, .. } | Self::Rts { message, .. } => message.ack,
            Self::Notice { ack, .. } => *ack,
            _ => false,
        }
    }

    /// The credit that the packet uses.
    #[inline]
    pub const fn uses(&self) -> Credit {
        match self {
            Self::Eager { payload, .. } => eager_credit(payload.len),
            Self::Rts { .. } => RTS_CREDIT,
            Self::Notice { .. } => Credit::new(1, 1),
            Self::Data { .. } | Self::Atomic { .. } | Self::Pushed { .. } => Credit::new(0, 1),
            _ => Credit::ZERO,
        }
    }
}

/// The credit that an RTS uses.
pub const RTS_CREDIT: Credit = Credit::new(2, 1);

/// The credit that EAGER with a payload of `len` bytes uses.
#[inline]
pub const fn eager_credit(len: u32) -> Credit {
    Credit::new(1 + len.div_ceil(BLOCK_SIZE), 1)
}

/// A packet without the bytes of its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Common part.
    pub header: Header,
    /// Part by kind.
    pub body: Body,
}

/// The fields of a header that depend on the kind, and the body.
struct Fields {
    flags: u8,
    a: u32,
    b: u64,
    /// Size of the body in bytes.
    body: usize,
    /// Size of the payload in bytes.
    payload: u32,
}

impl Fields {
    const fn plain(a: u32, b: u64) -> Self {
        Self {
            flags: 0,
            a,
            b,
            body: 0,
            payload: 0,
        }
    }

    /// The fields of a message, whose body begins with wide data.
    fn message(message: &Message, body: usize, payload: u32) -> Self {
        let mut flags = 0;
        flags |= if message.tag.is_some() { TAGGED } else { 0 };
        flags |= if message.data.is_some() { DATA } else { 0 };
        flags |= if message.ack { ACK } else { 0 };
        let wide = message.is_wide();
        flags |= if wide { WIDE } else { 0 };
        Self {
            flags,
            // the low half
            a: message.data.unwrap_or_default() as u32,
            b: message.tag.unwrap_or_default(),
            body: body + if wide { WIDE_SIZE } else { 0 },
            payload,
        }
    }
}

impl Packet {
    /// Writes header and body to the begin of `to`, which the payload has to follow. Returns their
    /// size in bytes. The number of a kind that has none is not written.
    #[inline]
    pub fn encode(&self, to: &mut [u8; MAX_HEAD]) -> usize {
        let fields = self.fields();
        let end = HEADER_SIZE + fields.body;
        let kind = self.body.kind();
        let number = if kind.is_numbered() {
            self.header.number.get()
        } else {
            0
        };
        // at most MAX_HEAD
        let length = fields.body as u32 + fields.payload;
        put(to, 0, number.to_le_bytes());
        put(to, 4, self.header.processed.get().to_le_bytes());
        put(to, 8, [kind as u8, fields.flags]);
        put(to, 10, self.header.seen.get().to_le_bytes());
        put(to, 12, self.header.to.get().to_le_bytes());
        put(to, 16, length.to_le_bytes());
        put(to, 20, fields.a.to_le_bytes());
        put(to, 24, fields.b.to_le_bytes());
        if fields.body > 0 {
            let body = &mut to[HEADER_SIZE..end];
            body.fill(0);
            self.encode_body(body);
        }
        end
    }

    #[inline]
    fn fields(&self) -> Fields {
        match &self.body {
            Body::Eager { message, payload } => Fields::message(message, 0, payload.len),
            Body::Rts { message, .. } => Fields::message(message, RTS_SIZE, 0),
            Body::Data {
                op,
                offset,
                payload,
            } => Fields {
                payload: payload.len,
                ..Fields::plain(op.get(), *offset)
            },
            Body::Notice { data, len, ack } => Fields {
                flags: if *ack { ACK } else { 0 },
                ..Fields::plain(*len, *data)
            },
            Body::Atomic {
                op, addr, operands, ..
            } => Fields {
                body: ATOMIC_SIZE,
                payload: operands.len,
                ..Fields::plain(op.get(), *addr)
            },
            Body::Cts { op, receiver } => Fields::plain(op.get(), receiver.get().into()),
            Body::Fin { op, status } => Fields::plain(op.get(), (*status).into()),
            Body::Result { op, status, values } => Fields {
                payload: values.len,
                ..Fields::plain(op.get(), (*status).into())
            },
            Body::Push { op, offset, .. } => Fields {
                body: PUSH_SIZE,
                ..Fields::plain(op.get(), *offset)
            },
            Body::Pushed { op, written } => Fields::plain(op.get(), *written),
            Body::Credit { grant, recall } => Fields {
                flags: if *recall { RECALL } else { 0 },
                ..Packet::grant(grant)
            },
            Body::Return(grant) => Self::grant(grant),
            Body::Close(close) => Fields::plain(*close as u32, 0),
            Body::Hello(hello) => Fields {
                body: hello.size(),
                ..Fields::plain(hello.epoch.get(), 0)
            },
            Body::Switch => Fields::plain(0, 0),
            Body::Attach(attach) => {
                let initiator = u64::from(attach.initiator.get());
                let target = u64::from(attach.target.get());
                Fields::plain(attach.circuit.get(), initiator | target << 32)
            }
        }
    }

    const fn grant(grant: &Grant) -> Fields {
        let limit = grant.limit.blocks as u64 | (grant.limit.slots as u64) << 32;
        Fields::plain(grant.number.get() as u32, limit)
    }

    fn encode_body(&self, body: &mut [u8]) {
        match &self.body {
            Body::Eager { message, .. } => put_wide(message, body),
            Body::Rts {
                message,
                op,
                addr,
                len,
                rkey,
            } => {
                let at = if message.is_wide() { WIDE_SIZE } else { 0 };
                if at > 0 {
                    put_wide(message, body);
                }
                put(body, at, addr.get().to_le_bytes());
                put(body, at + 8, len.to_le_bytes());
                put(body, at + 16, rkey.get().to_le_bytes());
                put(body, at + 20, op.get().to_le_bytes());
            }
            Body::Push {
                addr,
                rkey,
                receiver,
                ..
            } => {
                put(body, 0, addr.get().to_le_bytes());
                put(body, 8, rkey.get().to_le_bytes());
                put(body, 12, receiver.get().to_le_bytes());
            }
            Body::Atomic {
                key,
                operator,
                datatype,
                count,
                fetches,
                last,
                ..
            } => {
                put(body, 0, key.to_le_bytes());
                put(body, 8, [*operator, *datatype]);
                put(body, 10, count.to_le_bytes());
                let flags = u32::from(*fetches) | u32::from(!last) << 1;
                put(body, 12, flags.to_le_bytes());
            }
            Body::Hello(hello) => hello.encode(body),
            _ => {}
        }
    }

    /// Decodes a packet of `total` bytes. `head` is its begin: all of it, or at least [`MAX_HEAD`]
    /// bytes. The peer may not be able to change `head` any more.
    ///
    /// # Errors
    /// See [`Bad`]. The link has to be ended.
    #[inline]
    pub fn decode(head: &[u8], total: usize) -> Result<Self, Bad> {
        // an array: its constant offsets need no checks
        let fixed: &[u8; HEADER_SIZE] = head.first_chunk().ok_or(Bad::Length)?;
        let kind = Kind::of(fixed[8]).ok_or(Bad::Value)?;
        let flags = fixed[9];
        reserved(flags & !kind.flags())?;
        let length = get32(fixed, 16)?;
        if total.checked_sub(HEADER_SIZE) != usize::try_from(length).ok() {
            return Err(Bad::Length);
        }
        let number = get32(fixed, 0)?;
        if !kind.is_numbered() {
            reserved(number)?;
        }
        let header = Header {
            number: Number::new(number),
            processed: Number::new(get32(fixed, 4)?),
            seen: GrantNumber::new(get16(fixed, 10)?),
            to: PeerIndex::new(get32(fixed, 12)?),
        };
        let from = Source {
            head: head.get(..total).unwrap_or(head),
            flags,
            length,
            a: get32(fixed, 20)?,
            b: get64(fixed, 24)?,
        };
        let body = from.body(kind)?;
        Ok(Self { header, body })
    }
}

/// Whether RTS may have such a source.
#[inline]
pub(super) fn is_source(addr: RemoteAddr, len: u64, rkey: Rkey) -> bool {
    let named = addr != RemoteAddr::NULL || rkey.get() == 0;
    addr.checked_add(len).is_some() && i64::try_from(len).is_ok() && named
}

/// Whether PUSH may have such an address and offset.
#[inline]
pub(super) fn is_sink(addr: RemoteAddr, offset: u64) -> bool {
    addr != RemoteAddr::NULL && addr.checked_add(offset).is_some()
}

fn put_wide(message: &Message, body: &mut [u8]) {
    // the high half
    let high = (message.data.unwrap_or_default() >> 32) as u32;
    put(body, 0, high.to_le_bytes());
}

/// A received packet whose common fields are checked.
struct Source<'a> {
    /// The packet from its header on, perhaps without the last bytes of the payload.
    head: &'a [u8],
    flags: u8,
    /// Size of body and payload.
    length: u32,
    a: u32,
    b: u64,
}

impl Source<'_> {
    #[inline]
    fn body(&self, kind: Kind) -> Result<Body, Bad> {
        let op = OpId::new(self.a);
        Ok(match kind {
            Kind::Eager => {
                let (message, size) = self.message()?;
                let payload = self.payload(size, 0, MAX_EAGER)?;
                Body::Eager { message, payload }
            }
            Kind::Rts => self.rts()?,
            Kind::Data => {
                let payload = self.payload(0, 1, MAX_DATA)?;
                let end = self.b.checked_add(payload.len.into());
                end.ok_or(Bad::Value)?;
                Body::Data {
                    op,
                    offset: self.b,
                    payload,
                }
            }
            Kind::Notice => {
                self.bare()?;
                Body::Notice {
                    data: self.b,
                    len: self.a,
                    ack: self.flags & ACK != 0,
                }
            }
            Kind::Atomic => self.atomic(op)?,
            Kind::Cts => {
                self.bare()?;
                let receiver = u32::try_from(self.b).map_err(|_| Bad::Value)?;
                Body::Cts {
                    op,
                    receiver: OpId::new(receiver),
                }
            }
            Kind::Fin => {
                self.bare()?;
                let status = self.status()?;
                Body::Fin { op, status }
            }
            Kind::Push => self.push(op)?,
            Kind::Pushed => {
                self.bare()?;
                Body::Pushed {
                    op,
                    written: self.b,
                }
            }
            Kind::Result => Body::Result {
                op,
                status: self.status()?,
                values: self.payload(0, 0, MAX_OPERANDS)?,
            },
            Kind::Credit => Body::Credit {
                grant: self.grant()?,
                recall: self.flags & RECALL != 0,
            },
            Kind::Return => Body::Return(self.grant()?),
            Kind::Close => {
                self.bare()?;
                reserved(self.b)?;
                Body::Close(match self.a {
                    0 => Close::Ask,
                    1 => Close::Accept,
                    2 => Close::Refuse,
                    3 => Close::End,
                    4 => Close::Demand,
                    _ => return Err(Bad::Value),
                })
            }
            Kind::Hello => {
                reserved(self.b)?;
                let body = self.head.get(HEADER_SIZE..).ok_or(Bad::Length)?;
                if body.len() != self.length as usize {
                    return Err(Bad::Length);
                }
                Body::Hello(Box::new(Hello::decode(self.a, body)?))
            }
            Kind::Switch => {
                self.bare()?;
                reserved(self.a)?;
                reserved(self.b)?;
                Body::Switch
            }
            Kind::Attach => {
                self.bare()?;
                let number = |half: u64| QpNumber::new(half as u32).ok_or(Bad::Value);
                Body::Attach(Attach {
                    circuit: CircuitNumber::new(self.a).ok_or(Bad::Value)?,
                    initiator: number(self.b)?,
                    target: number(self.b >> 32)?,
                })
            }
        })
    }

    /// Refuses body and payload.
    fn bare(&self) -> Result<(), Bad> {
        if self.length == 0 {
            Ok(())
        } else {
            Err(Bad::Length)
        }
    }

    fn status(&self) -> Result<u16, Bad> {
        if self.b > MAX_STATUS {
            return Err(Bad::Value);
        }
        Ok(self.b as u16)
    }

    /// The payload behind a body of `body` bytes, `least` to `most` bytes.
    #[inline]
    fn payload(&self, body: usize, least: u32, most: u32) -> Result<Payload, Bad> {
        let len = self.length.checked_sub(body as u32).ok_or(Bad::Length)?;
        if !(least..=most).contains(&len) {
            return Err(Bad::Length);
        }
        Ok(Payload {
            offset: HEADER_SIZE + body,
            len,
        })
    }

    /// The envelope, and the size of its part of the body.
    #[inline]
    fn message(&self) -> Result<(Message, usize), Bad> {
        let has = |flag| self.flags & flag != 0;
        if !has(TAGGED) {
            reserved(self.b)?;
        }
        if !has(DATA) {
            reserved(self.a)?;
            reserved(self.flags & WIDE)?;
        }
        let mut data = u64::from(self.a);
        let mut size = 0;
        if has(WIDE) {
            let high = get32(self.head, HEADER_SIZE)?;
            reserved(get32(self.head, HEADER_SIZE + 4)?)?;
            if high == 0 {
                return Err(Bad::Value);
            }
            data |= u64::from(high) << 32;
            size = WIDE_SIZE;
        }
        let message = Message {
            tag: has(TAGGED).then_some(self.b),
            data: has(DATA).then_some(data),
            ack: has(ACK),
        };
        Ok((message, size))
    }

    fn rts(&self) -> Result<Body, Bad> {
        let (message, size) = self.message()?;
        self.payload(size + RTS_SIZE, 0, 0)?;
        let at = HEADER_SIZE + size;
        let addr = RemoteAddr::new(get64(self.head, at)?);
        let len = get64(self.head, at + 8)?;
        let rkey = get32(self.head, at + 16)?;
        if !is_source(addr, len, Rkey::new(rkey)) {
            return Err(Bad::Value);
        }
        Ok(Body::Rts {
            message,
            op: OpId::new(get32(self.head, at + 20)?),
            addr,
            len,
            rkey: Rkey::new(rkey),
        })
    }

    fn push(&self, op: OpId) -> Result<Body, Bad> {
        self.payload(PUSH_SIZE, 0, 0)?;
        let addr = RemoteAddr::new(get64(self.head, HEADER_SIZE)?);
        if !is_sink(addr, self.b) {
            return Err(Bad::Value);
        }
        Ok(Body::Push {
            op,
            offset: self.b,
            addr,
            rkey: Rkey::new(get32(self.head, HEADER_SIZE + 8)?),
            receiver: OpId::new(get32(self.head, HEADER_SIZE + 12)?),
        })
    }

    fn atomic(&self, op: OpId) -> Result<Body, Bad> {
        let operands = self.payload(ATOMIC_SIZE, 0, MAX_OPERANDS)?;
        let [operator, datatype] = bytes(self.head, HEADER_SIZE + 8)?;
        let count = u16::from_le_bytes(bytes(self.head, HEADER_SIZE + 10)?);
        let flags = get32(self.head, HEADER_SIZE + 12)?;
        if count == 0 || flags > 3 {
            return Err(Bad::Value);
        }
        Ok(Body::Atomic {
            op,
            addr: self.b,
            key: get64(self.head, HEADER_SIZE)?,
            operator,
            datatype,
            count,
            fetches: flags & 1 != 0,
            last: flags & 2 == 0,
            operands,
        })
    }

    fn grant(&self) -> Result<Grant, Bad> {
        self.bare()?;
        let number = u16::try_from(self.a).map_err(|_| Bad::Value)?;
        // the two halves
        let limit = Credit::new(self.b as u32, (self.b >> 32) as u32);
        Ok(Grant {
            number: GrantNumber::new(number),
            limit,
        })
    }
}
