//! Connected endpoints, in one process and in two.
//!
//! The tests use softverbs by default; with `WEFT_TEST_BACKEND=rdma-core` they use the system's
//! first device.

#![allow(unsafe_code, reason = "posts buffers")]

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Token;
use crate::conn::ConnectRequest;
use crate::domain::{Domain, DomainConfig};
use crate::eq::{EqConfig, EqError, Event, EventQueue};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::{Access, Desc, Form, LocalMemory, Mode, MrConfig, Region, RegionConfig};
use crate::msg::{
    AtomicKind, AtomicOp, BindFlags, Endpoint, EndpointConfig, LocalIov, PassiveEndpoint,
    PepConfig, RemoteIov, SharedRx, SharedRxConfig,
};
use crate::queue::{Completion, CompletionError, CompletionQueue, CqConfig, WaitKind};
use crate::verbs::{Device, devices};
use crate::wire::cm_data::CM_DATA_SIZE;

mod atomic;
mod auth;
mod blocks;
mod closed_regions;
mod closing;
mod connect;
mod counters;
mod durable;
mod events;
mod inject;
mod keepalive;
mod keys;
mod lease;
mod local;
mod more;
mod own_regions;
mod parts;
mod processes;
mod queue_room;
mod refresh;
mod shared;
mod single;
mod sources;
mod stale;
mod transfer;
mod tuning;
mod xrc;

const LIMIT: Duration = Duration::from_secs(20);
const CLIENT: Token = Token(0xc);
const SERVER: Token = Token(0x5);
/// The context of each endpoint.
const ENDPOINT: usize = 0xe9;
const PEP: Token = Token(0x9);

fn device() -> Arc<Device> {
    let backend = match std::env::var("WEFT_TEST_BACKEND").as_deref() {
        Ok("rdma-core") => rdma_core_sys::system::backend().expect("rdma-core"),
        _ => softverbs::backend(),
    };
    let device = devices(&[backend], false).into_iter().next();
    device.expect("a device")
}

fn address(device: &Arc<Device>) -> SocketAddr {
    let first = device.addresses().into_iter().next();
    first.expect("an address").addr
}

/// A buffer and its region.
struct Buffer {
    region: Arc<Region>,
    // dropped after the region
    memory: Vec<u8>,
}

impl Buffer {
    fn new(domain: &Arc<Domain>, len: usize, access: Access) -> Self {
        Self::with_key(domain, len, access, 0)
    }

    fn with_key(domain: &Arc<Domain>, len: usize, access: Access, requested_key: u64) -> Self {
        let memory = vec![0; len];
        let config = RegionConfig {
            buffers: &[crate::mr::Buffer {
                addr: memory.as_ptr().cast(),
                len,
            }],
            access,
            requested_key,
            ..RegionConfig::default()
        };
        // SAFETY: the region is dropped before the memory, which never moves.
        let region = unsafe { Region::register(domain.mr(), &config) }.expect("a region");
        Self { region, memory }
    }

    fn all(domain: &Arc<Domain>, len: usize) -> Self {
        Self::new(domain, len, Access::all())
    }

    fn fill(&mut self, seed: u8) {
        for (i, byte) in self.memory.iter_mut().enumerate() {
            *byte = (i as u8).wrapping_mul(31).wrapping_add(seed);
        }
    }

    fn part(&self, start: usize, len: usize) -> (libc::iovec, Desc) {
        let iov = libc::iovec {
            iov_base: self.memory[start..start + len]
                .as_ptr()
                .cast_mut()
                .cast::<c_void>(),
            iov_len: len,
        };
        (iov, Desc(self.region.desc()))
    }

    fn addr(&self) -> u64 {
        self.memory.as_ptr() as u64
    }
}

fn config(token: Token) -> EndpointConfig {
    EndpointConfig {
        token,
        context: ENDPOINT,
        tx_size: 64,
        rx_size: 64,
        tx_iov_limit: 4,
        rx_iov_limit: 4,
        shared_rx: false,
        xrc: false,
        atomics: true,
        durable: false,
        inject_size: 64,
        tx_op_flags: Flags::empty(),
        rx_op_flags: Flags::empty(),
        needs_tx: true,
        needs_rx: true,
        auth: None,
        traffic_class: None,
        src: None,
        dst: None,
    }
}

/// One end of a connection.
struct Side {
    domain: Arc<Domain>,
    eq: Arc<EventQueue>,
    cq: Arc<CompletionQueue>,
    ep: Arc<Endpoint>,
}

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Connected(Token, Vec<u8>),
    Shutdown(Token),
}

/// Waits for the next event, which must not be an error.
fn next_event(eq: &EventQueue) -> Result<Told> {
    eq.sread(false, Some(LIMIT), |event| match event {
        Event::Connected { ep, data } => Ok(Told::Connected(*ep, data.data().to_vec())),
        Event::Shutdown { ep } => Ok(Told::Shutdown(*ep)),
        other => panic!("{other:?}"),
    })
}

/// Waits for the next event, which must be an error.
fn next_error(eq: &EventQueue) -> EqError {
    match next_event(eq) {
        Err(FiErrno::EAVAIL) => eq.read_error().unwrap(),
        other => panic!("{other:?}"),
    }
}

fn next_request(eq: &EventQueue) -> (ConnectRequest, Vec<u8>) {
    let taken = eq.sread(false, Some(LIMIT), |event| match event {
        Event::ConnReq {
            pep, request, data, ..
        } => {
            assert_eq!(*pep, PEP);
            Ok((request.take(), data.data().to_vec()))
        }
        other => panic!("{other:?}"),
    });
    let (request, data) = taken.expect("a request");
    (request.unwrap(), data)
}

fn open_cq(domain: &Arc<Domain>) -> Arc<CompletionQueue> {
    let config = CqConfig {
        size: 16,
        wait: WaitKind::Fd,
        ..CqConfig::default()
    };
    CompletionQueue::open(domain.queues(), config).expect("a completion queue")
}

impl Side {
    fn new(device: &Arc<Device>, config: EndpointConfig, selective: bool) -> Self {
        let domain = Domain::open(device, DomainConfig::default()).unwrap();
        Self::new_in(domain, config, selective)
    }

    fn new_in(domain: Arc<Domain>, config: EndpointConfig, selective: bool) -> Self {
        let ep = Endpoint::open(&domain, config).unwrap();
        Self::bound(domain, ep, selective)
    }

    fn accepting(device: &Arc<Device>, request: ConnectRequest, config: EndpointConfig) -> Self {
        let domain = Domain::open(device, DomainConfig::default()).unwrap();
        let ep = Endpoint::from_request(&domain, config, request).map_err(|(error, _)| error);
        Self::bound(domain, ep.unwrap(), false)
    }

    fn bound(domain: Arc<Domain>, ep: Arc<Endpoint>, selective: bool) -> Self {
        Self::bound_as(domain, ep, selective, false)
    }

    fn bound_as(domain: Arc<Domain>, ep: Arc<Endpoint>, tx: bool, rx: bool) -> Self {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let cq = open_cq(&domain);
        ep.bind_eq(&eq).unwrap();
        let mut flags = BindFlags::TRANSMIT;
        flags.set(BindFlags::SELECTIVE_COMPLETION, tx);
        ep.bind_cq(&cq, flags).unwrap();
        let mut flags = BindFlags::RECV;
        flags.set(BindFlags::SELECTIVE_COMPLETION, rx);
        ep.bind_cq(&cq, flags).unwrap();
        Self { domain, eq, cq, ep }
    }

    fn completion(&self) -> std::result::Result<Completion, CompletionError> {
        let mut result = None;
        let mut writer = |completion: &Completion| result = Some(*completion);
        match self.cq.sread(1, 1, Some(LIMIT), &mut writer) {
            Ok(1) => Ok(result.unwrap()),
            Err(FiErrno::EAVAIL) => Err(self.cq.read_error().unwrap()),
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, buffer: &Buffer, len: usize, context: usize) -> Result<()> {
        let (iov, desc) = buffer.part(0, len);
        // SAFETY: tests keep their buffers until completion.
        unsafe { self.ep.send(LocalIov::single(&iov, &desc), context) }
    }

    fn recv(&self, buffer: &Buffer, len: usize, context: usize) -> Result<()> {
        let (iov, desc) = buffer.part(0, len);
        // SAFETY: tests keep their buffers until completion.
        unsafe { self.ep.recv(LocalIov::single(&iov, &desc), context) }
    }
}

fn listener(device: &Arc<Device>, eq: &Arc<EventQueue>) -> (Arc<PassiveEndpoint>, SocketAddr) {
    let pep = PassiveEndpoint::open(
        device,
        PepConfig {
            addr: Some(address(device)),
            backlog: 0,
            token: PEP,
            ..PepConfig::default()
        },
    )
    .unwrap();
    pep.bind_eq(eq).unwrap();
    pep.listen().unwrap();
    let addr = pep.local_addr().unwrap();
    assert_ne!(addr.port(), 0);
    (pep, addr)
}

/// Two connected ends; `early` is called with the connecting end before it connects.
fn connected(selective: bool, early: impl FnOnce(&Side)) -> (Side, Side) {
    connected_in(DomainConfig::default(), selective, early)
}

/// As [`connected`]; the connecting end is in a domain with this configuration.
fn connected_in(kind: DomainConfig, selective: bool, early: impl FnOnce(&Side)) -> (Side, Side) {
    connected_before(kind, selective, |client| {
        client.ep.enable().unwrap();
        early(client);
    })
}

/// As [`connected_in`], but the endpoint is not enabled when `early` is called.
fn connected_before(
    kind: DomainConfig,
    selective: bool,
    early: impl FnOnce(&Side),
) -> (Side, Side) {
    connected_as(kind, config(CLIENT), selective, early)
}

/// As [`connected_before`]; the caller makes the endpoint.
fn connected_as(
    kind: DomainConfig,
    mut client_config: EndpointConfig,
    selective: bool,
    early: impl FnOnce(&Side),
) -> (Side, Side) {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    client_config.src = Some(address(&device));
    let domain = Domain::open(&device, kind).unwrap();
    let client = Side::new_in(domain, client_config, selective);
    early(&client);
    client.ep.connect(Some(addr), b"hello").unwrap();
    let server = accept(&device, &client, &eq);
    assert_eq!(
        next_event(&client.eq),
        Ok(Told::Connected(CLIENT, b"welcome".to_vec()))
    );
    assert!(matches!(
        next_event(&server.eq),
        Ok(Told::Connected(SERVER, _))
    ));
    (client, server)
}

/// Accepts the connection request of `client`, whose event queue must be read meanwhile.
fn accept(device: &Arc<Device>, client: &Side, eq: &Arc<EventQueue>) -> Side {
    let (request, data) = pump(client, || {
        let taken = eq.read(false, |event| match event {
            Event::ConnReq { request, data, .. } => Ok((request.take(), data.data().to_vec())),
            other => panic!("{other:?}"),
        });
        taken.ok()
    });
    assert_eq!(data, b"hello");
    let server = Side::accepting(device, request.unwrap(), config(SERVER));
    server.ep.accept(b"welcome").unwrap();
    server
}

/// Reads the event queue of `client`, which must have no event, until `done` returns a value.
fn pump<R>(client: &Side, mut done: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        let nothing = client.eq.read(true, |event| Ok(format!("{event:?}")));
        assert_eq!(
            nothing.err(),
            Some(FiErrno::EAGAIN),
            "{:?}",
            client.eq.read_error()
        );
        if let Some(result) = done() {
            return result;
        }
        assert!(start.elapsed() < LIMIT, "nothing happened");
        std::thread::yield_now();
    }
}
