//! Writes that complete when their data is persistent (`FI_RMA_PMEM`, `FI_COMMIT_COMPLETE`).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use super::events::counter;
use super::keys::{TARGET, kind};
use super::*;
use crate::flags::Direction;

const LEN: usize = 8192;

/// A shared mapping of a file next to this program.
struct Mapped {
    path: PathBuf,
    addr: *mut u8,
}

impl Mapped {
    fn new(name: &str) -> Self {
        let name = format!("{name}-{}", std::process::id());
        let path = std::env::current_exe().unwrap().with_extension(name);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true);
        let file = file.open(&path).unwrap();
        file.set_len(LEN as u64).unwrap();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        let addr =
            // SAFETY: a new mapping.
            unsafe { libc::mmap(std::ptr::null_mut(), LEN, rights, libc::MAP_SHARED, fd, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        Self {
            path,
            addr: addr.cast(),
        }
    }

    fn part(&self, start: usize, len: usize) -> crate::mr::Buffer {
        crate::mr::Buffer {
            addr: self.addr.wrapping_add(start).cast(),
            len,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; tests have closed its regions.
        unsafe { libc::munmap(self.addr.cast(), LEN) };
        let _ = std::fs::remove_file(&self.path);
    }
}

fn register(
    domain: &Arc<Domain>,
    buffers: &[crate::mr::Buffer],
    persistent: bool,
    key: u64,
) -> Result<Arc<Region>> {
    let config = RegionConfig {
        buffers,
        access: TARGET,
        requested_key: key,
        persistent,
        counted: domain.mr().config().form.mode.contains(Mode::RMA_EVENT),
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(domain.mr(), &config) }
}

fn open(form: Mode, durable: bool) -> Arc<Domain> {
    let config = DomainConfig {
        mr: MrConfig {
            durable,
            ..kind(form).mr
        },
        ..DomainConfig::default()
    };
    Domain::open(&device(), config).unwrap()
}

/// Two connected ends whose writes can be made durable.
fn pair(form: Mode) -> (Side, Side) {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let config = |token| EndpointConfig {
        durable: true,
        ..config(token)
    };
    let client = Side::new_in(open(form, true), config(CLIENT), false);
    client.ep.connect(Some(addr), b"hello").unwrap();
    let (request, _) = pump(&client, || {
        let taken = eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok((request.take(), ())),
            other => panic!("{other:?}"),
        });
        taken.ok()
    });
    let domain = open(form, true);
    let ep = Endpoint::from_request(&domain, config(SERVER), request.unwrap());
    let server = Side::bound(domain, ep.map_err(|(error, _)| error).unwrap(), false);
    server.ep.accept(b"welcome").unwrap();
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    (client, server)
}

/// A write with flags; returns the result of the completion.
fn write(
    client: &Side,
    source: &Buffer,
    len: usize,
    to: (u64, u64),
    flags: Flags,
) -> std::result::Result<(), FiErrno> {
    let (iov, desc) = source.part(0, len);
    let target = RemoteIov {
        addr: to.0,
        len,
        key: to.1,
    };
    // SAFETY: the buffer outlives the operation.
    unsafe {
        let local = LocalIov::single(&iov, &desc);
        client.ep.write_msg(local, &[target], 0xda7a, 1, flags)?;
    }
    client.completion().map(|_| ()).map_err(|error| error.err)
}

const COMMIT: Flags = Flags::COMMIT_COMPLETE;

/// Flushes that the client has posted.
fn flushes(side: &Side) -> usize {
    let control = side.ep.shared.control.lock();
    let qp = control.qp.as_ref().unwrap();
    qp.flushes.load(std::sync::atomic::Ordering::Relaxed)
}

fn forms() -> [Mode; 3] {
    let all = Mode::LOCAL | Mode::ALLOCATED;
    [
        all | Mode::NATIVE,
        all | Mode::PROV_KEY,
        all | Mode::RMA_EVENT,
    ]
}

#[test]
fn a_durable_write_is_flushed_behind_each_of_its_parts() {
    for form in forms() {
        let (client, server) = pair(form);
        let mapped = Mapped::new(&format!("durable-{}", form.bits()));
        let mut source = Buffer::all(&client.domain, LEN);
        // offset and length; neighbours in memory that follow each other would be one part
        let three = vec![(1000, 4096), (0, 1000), (5096, LEN - 5096)];
        for (round, parts) in [vec![(0, LEN)], three].into_iter().enumerate() {
            let buffers = parts.iter().map(|(start, len)| mapped.part(*start, *len));
            let buffers: Vec<_> = buffers.collect();
            let written = || {
                let bytes = mapped.bytes();
                let of = |(start, len): &(usize, usize)| bytes[*start..start + len].to_vec();
                parts.iter().flat_map(of).collect::<Vec<u8>>()
            };
            let region = match register(&server.domain, &buffers, true, 7) {
                Ok(region) => region,
                Err(error) => {
                    assert_eq!(error, FiErrno::EINVAL);
                    println!("no file system on a disk here: durable writes are not tried");
                    return;
                }
            };
            let writes = form.contains(Mode::RMA_EVENT).then(|| {
                let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
                region.enable().unwrap();
                writes
            });
            let base = if form.contains(Mode::VIRT_ADDR) {
                buffers[0].addr as u64
            } else {
                0
            };
            let to = (base, region.key());
            source.fill(round as u8 + 1);
            let before = flushes(&client);
            assert_eq!(write(&client, &source, LEN, to, Flags::empty()), Ok(()));
            assert_eq!(flushes(&client), before, "not asked for");
            source.fill(round as u8 + 7);
            assert_eq!(write(&client, &source, LEN, to, COMMIT), Ok(()), "{form:?}");
            assert_eq!(flushes(&client), before + parts.len());
            assert!(written() == source.memory, "{form:?} {parts:?}");
            // one flush for a write in the first part, no flush for 0 bytes, and inject
            assert_eq!(
                write(&client, &source, 64, to, COMMIT | Flags::INJECT),
                Ok(())
            );
            assert_eq!(flushes(&client), before + parts.len() + 1);
            assert_eq!(write(&client, &source, 0, to, COMMIT), Ok(()));
            assert_eq!(flushes(&client), before + parts.len() + 1);
            source.fill(round as u8 + 9);
            // remote CQ data arrives when the whole write is durable
            let land = Buffer::all(&server.domain, 8);
            server.recv(&land, 8, 5).unwrap();
            let with_data = COMMIT | Flags::REMOTE_CQ_DATA;
            assert_eq!(write(&client, &source, LEN, to, with_data), Ok(()));
            assert_eq!(flushes(&client), before + 2 * parts.len() + 1);
            assert_eq!(server.completion().unwrap().data, 0xda7a);
            assert!(written() == source.memory, "{form:?} {parts:?}");
            if let Some(writes) = writes {
                assert_eq!(writes.read(), 5);
            }
            // as a default flag of the endpoint
            client.ep.op_flags().set(Direction::Transmit, COMMIT);
            client.write(&source, 8, to.0, to.1, 2).unwrap();
            client.completion().unwrap();
            client
                .ep
                .op_flags()
                .set(Direction::Transmit, Flags::empty());
            assert_eq!(flushes(&client), before + 2 * parts.len() + 2);
            region.close().unwrap();
        }
    }
}

#[test]
fn what_can_not_be_made_durable_is_refused() {
    for form in forms() {
        let (client, server) = pair(form);
        let source = Buffer::all(&client.domain, 64);
        let memory = [0_u8; 64];
        let plain = [crate::mr::Buffer {
            addr: memory.as_ptr().cast(),
            len: 64,
        }];
        // ordinary memory cannot be persistent
        let refused = register(&server.domain, &plain, true, 7).and_then(|region| region.enable());
        assert_eq!(refused, Err(FiErrno::EINVAL), "{form:?}");
        let region = register(&server.domain, &plain, false, 7).unwrap();
        if form.contains(Mode::RMA_EVENT) {
            region.enable().unwrap();
        }
        let base = if form.contains(Mode::VIRT_ADDR) {
            memory.as_ptr() as u64
        } else {
            0
        };
        let to = (base, region.key());
        let reads = Flags::COMMIT_COMPLETE;
        let (iov, desc) = source.part(0, 8);
        let target = RemoteIov {
            addr: to.0,
            len: 8,
            key: to.1,
        };
        // SAFETY: nothing is posted.
        let read = unsafe {
            client
                .ep
                .read_msg(LocalIov::single(&iov, &desc), &[target], 1, reads)
        };
        assert_eq!(read, Err(FiErrno::EBADFLAGS));
        // SAFETY: as above.
        let sent = unsafe {
            client
                .ep
                .send_msg(LocalIov::single(&iov, &desc), 0, 1, reads)
        };
        assert_eq!(sent, Err(FiErrno::EBADFLAGS));
        let wrote = write(&client, &source, 8, to, COMMIT);
        if form.contains(Mode::VIRT_ADDR) {
            // the device refuses the write, which ends the connection
            assert!(wrote.is_err());
        } else {
            assert_eq!(wrote, Err(FiErrno::EACCES), "{form:?}");
            assert_eq!(write(&client, &source, 8, to, Flags::empty()), Ok(()));
        }
    }
    // without the capability
    let (client, server) = super::keys::in_form(forms()[0]);
    let source = Buffer::all(&client.domain, 64);
    let wrote = write(&client, &source, 8, (0, 1), COMMIT);
    assert_eq!(wrote, Err(FiErrno::EBADFLAGS));
    let whole = [crate::mr::Buffer {
        addr: source.memory.as_ptr().cast(),
        len: 64,
    }];
    let refused = register(&server.domain, &whole, true, 7);
    assert_eq!(refused.err(), Some(FiErrno::EBADFLAGS));
}

/// Durable writes of the longest form, more than the queue has room for.
#[test]
fn the_queue_has_room_for_every_part() {
    let form = forms()[2];
    let (client, server) = pair(form);
    let mapped = Mapped::new("durable-many");
    let parts: Vec<_> = (0..8).map(|i| mapped.part(i * 8, 8)).collect();
    let region = match register(&server.domain, &parts, true, 7) {
        Ok(region) => region,
        Err(error) => panic!("{error}"),
    };
    let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
    if region.enable() == Err(FiErrno::EINVAL) {
        println!("no file system on a disk here: durable writes are not tried");
        return;
    }
    let source = Buffer::all(&client.domain, 64);
    client.ep.op_flags().set(Direction::Transmit, COMMIT);
    const COUNT: u64 = 100;
    let (mut posted, mut done) = (0, 0);
    while done < COUNT {
        let result = match posted {
            COUNT => Err(FiErrno::EAGAIN),
            _ => client.write(&source, 64, 0, 7, 1),
        };
        match result {
            Ok(()) => posted += 1,
            Err(error) => {
                assert_eq!(error, FiErrno::EAGAIN);
                client.completion().unwrap();
                done += 1;
            }
        }
    }
    assert_eq!(writes.read(), COUNT);
    region.close().unwrap();
}
