//! Authorization keys: which endpoints may connect, and which regions a connection reaches.

use super::keys::{TARGET, kind};
use super::*;
use crate::auth::AuthKey;
use crate::wire::cm_data::KEYED_CM_DATA_SIZE;

fn key(bytes: &[u8]) -> Option<AuthKey> {
    Some(AuthKey::new(bytes).unwrap())
}

fn domain(form: Mode, auth: Option<AuthKey>) -> Arc<Domain> {
    let mut config = kind(form);
    config.mr.auth = auth;
    Domain::open(&device(), config).unwrap()
}

fn with_key(token: Token, auth: Option<AuthKey>) -> EndpointConfig {
    EndpointConfig {
        auth,
        ..config(token)
    }
}

/// Connects two endpoints. Returns both, or the errno of `accept` and the errno of the connecting
/// side.
fn meet(
    domains: [&Arc<Domain>; 2],
    keys: [Option<AuthKey>; 2],
) -> std::result::Result<(Side, Side), (FiErrno, FiErrno)> {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let [client_key, server_key] = keys;
    let client = Side::new_in(Arc::clone(domains[0]), with_key(CLIENT, client_key), false);
    client.ep.connect(Some(addr), b"hello").unwrap();
    let (request, _) = pump(&client, || {
        let taken = eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok((request.take(), ())),
            other => panic!("{other:?}"),
        });
        taken.ok()
    });
    let server = with_key(SERVER, server_key);
    let ep = Endpoint::from_request(domains[1], server, request.unwrap());
    let ep = ep.map_err(|(error, _)| error).unwrap();
    let server = Side::bound(Arc::clone(domains[1]), ep, false);
    if let Err(refused) = server.ep.accept(b"welcome") {
        assert_eq!(server.ep.accept(b"again"), Err(FiErrno::EOPBADSTATE));
        return Err((refused, next_error(&client.eq).err));
    }
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    Ok((client, server))
}

const FORM: Mode = Mode::ALLOCATED.union(Mode::LOCAL);

#[test]
fn only_endpoints_with_the_same_key_connect() {
    let form = Mode::NATIVE | Mode::LOCAL;
    let none = domain(form, None);
    let ours = domain(form, key(b"ours"));
    let refused = (FiErrno::EACCES, FiErrno::ECONNREFUSED);
    for (domains, keys, connects) in [
        ([&none, &none], [None, None], true),
        ([&ours, &ours], [None, None], true),
        // an endpoint's key takes precedence over the domain's
        ([&none, &ours], [key(b"ours"), None], true),
        ([&ours, &ours], [key(b"theirs"), key(b"theirs")], true),
        ([&ours, &ours], [None, key(b"theirs")], false),
        ([&none, &ours], [None, None], false),
        ([&ours, &none], [None, None], false),
        ([&none, &none], [key(b"ours"), key(b"ours\0")], false),
    ] {
        let met = meet(domains, keys.clone());
        match met {
            Ok((client, server)) => {
                assert!(connects, "{keys:?}");
                let (sent, received) = (
                    Buffer::all(&client.domain, 100),
                    Buffer::all(&server.domain, 100),
                );
                server.recv(&received, 100, 1).unwrap();
                client.send(&sent, 100, 2).unwrap();
                assert_eq!(server.completion().unwrap().context, 1);
            }
            Err(errors) => {
                assert!(!connects, "{keys:?}");
                assert_eq!(errors, refused, "{keys:?}");
            }
        }
    }
}

/// Registers 64 bytes, for endpoints with an authorization key.
fn register(
    domain: &Arc<Domain>,
    memory: &[u8],
    wanted: u64,
    auth: Option<&AuthKey>,
) -> Arc<Region> {
    let config = RegionConfig {
        buffers: &[crate::mr::Buffer {
            addr: memory.as_ptr().cast(),
            len: memory.len(),
        }],
        access: TARGET,
        requested_key: wanted,
        auth,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(domain.mr(), &config) }.unwrap()
}

/// Writes all of `source` to a region; returns the result of the completion.
fn write(client: &Side, source: &Buffer, at: u64, key: u64) -> std::result::Result<(), FiErrno> {
    let (iov, desc) = source.part(0, source.memory.len());
    // SAFETY: the buffer outlives the operation.
    unsafe { client.ep.write(LocalIov::single(&iov, &desc), at, key, 1) }.unwrap();
    client.completion().map(|_| ()).map_err(|error| error.err)
}

#[test]
fn regions_are_reached_through_endpoints_with_their_key() {
    for form in [FORM, Mode::NATIVE | Mode::LOCAL] {
        let native = form.contains(Mode::PROV_KEY);
        let server_domain = domain(form, key(b"job 1"));
        let memory = [vec![0_u8; 64], vec![0_u8; 64], vec![0_u8; 64]];
        let keys = [None, key(b"job 1"), key(b"job 2")];
        let wanted = memory.iter().zip(keys).zip(1..);
        let regions: Vec<_> = wanted
            .map(|((memory, key), wanted)| register(&server_domain, memory, wanted, key.as_ref()))
            .collect();
        for (job, reached) in [
            (key(b"job 1"), [true, true, false]),
            (key(b"job 2"), [false, false, true]),
        ] {
            for (index, region) in regions.iter().enumerate() {
                let client_domain = domain(form, job.clone());
                let (client, _server) =
                    meet([&client_domain, &server_domain], [None, job.clone()]).unwrap();
                let mut source = Buffer::all(&client_domain, 64);
                source.memory.fill(0x5a);
                let at = if native {
                    memory[index].as_ptr() as u64
                } else {
                    0
                };
                let wrote = write(&client, &source, at, region.key());
                if reached[index] {
                    assert_eq!(wrote, Ok(()), "{form:?} {index} {job:?}");
                } else if native {
                    assert!(wrote.is_err(), "{index} {job:?}");
                } else {
                    assert_eq!(wrote, Err(FiErrno::EKEYREJECTED), "{index} {job:?}");
                }
            }
        }
        drop(regions);
    }
}

#[test]
fn a_region_of_an_endpoint_may_have_the_endpoints_key_only() {
    let domain = domain(FORM | Mode::ENDPOINT, key(b"job 1"));
    let ep = Endpoint::open(&domain, with_key(CLIENT, key(b"job 2"))).unwrap();
    let memory = [vec![0_u8; 64], vec![0_u8; 64], vec![0_u8; 64]];
    for ((memory, auth), bound) in memory
        .iter()
        .zip([None, key(b"job 1"), key(b"job 2")])
        .zip([Ok(()), Err(FiErrno::EINVAL), Ok(())])
    {
        let region = register(&domain, memory, 7, auth.as_ref());
        assert_eq!(region.bind_endpoint(ep.scope()), bound);
    }
}

#[test]
fn a_key_takes_its_room_from_the_application_s_data() {
    for (auth, most) in [(None, CM_DATA_SIZE), (key(b"secret"), KEYED_CM_DATA_SIZE)] {
        let domain = domain(FORM, auth);
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let (_pep, addr) = listener(domain.device(), &eq);
        let client = Side::new_in(domain, config(CLIENT), false);
        assert_eq!(client.ep.cm_data_size(), most);
        let long = vec![7; most + 1];
        assert_eq!(client.ep.connect(Some(addr), &long), Err(FiErrno::EINVAL));
        client.ep.connect(Some(addr), &long[1..]).unwrap();
        let came = pump(&client, || {
            let taken = eq.read(false, |event| match event {
                Event::ConnReq { data, .. } => Ok(data.data().to_vec()),
                other => panic!("{other:?}"),
            });
            taken.ok()
        });
        assert_eq!(came, long[1..]);
    }
}
