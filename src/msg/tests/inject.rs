//! Injected operations that fail: an entry with the endpoint's context, if the operation was
//! refused.

use super::keys::{TARGET, in_form};
use super::transfer::no_completion;
use super::*;
use crate::msg::AtomicOp;

/// The next error entry, which must be that of an injected operation.
fn error(side: &Side) -> (Flags, FiErrno) {
    let error = side.completion().unwrap_err();
    assert_eq!(error.completion.context, ENDPOINT);
    (error.completion.flags, error.err)
}

/// A wrong key is an rkey of the device, or is looked up in the peer's directory.
#[test]
fn a_refused_operation_has_an_entry() {
    let rma = Flags::RMA | Flags::WRITE;
    for mode in [Mode::VIRT_ADDR | Mode::PROV_KEY, Mode::empty()] {
        for data in [None, Some(3)] {
            let (client, server) = in_form(mode);
            let target = Buffer::new(&server.domain, 64, TARGET);
            let room = Buffer::with_key(&server.domain, 8, Access::all(), 1);
            // for the remote CQ data
            server.recv(&room, 8, 1).unwrap();
            let (from, key) = ([7_u8; 8], target.region.key() ^ 0x55);
            let from = from.as_ptr().cast();
            // SAFETY: inject has copied the data when it returns.
            unsafe {
                match data {
                    None => client.ep.inject_write(from, 8, target.addr(), key),
                    Some(data) => {
                        let to = target.addr();
                        client.ep.inject_write_data(from, 8, data, to, key)
                    }
                }
            }
            .unwrap();
            assert_eq!(error(&client), (rma, FiErrno::EKEYREJECTED), "{mode:?}");
        }
    }
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64);
    let to = (target.addr(), target.region.key() ^ 0x55);
    client.ep.inject_atomic(AtomicOp::Add(1), to).unwrap();
    let atomic = Flags::ATOMIC | Flags::WRITE;
    assert_eq!(error(&client), (atomic, FiErrno::EKEYREJECTED));
}

#[test]
fn a_message_that_is_too_long_has_an_entry() {
    let (client, server) = connected(false, |_| {});
    let room = Buffer::all(&server.domain, 8);
    server.recv(&room, 4, 1).unwrap();
    let from = [7_u8; 8];
    // SAFETY: inject has copied the data when it returns.
    unsafe { client.ep.inject(from.as_ptr().cast(), 8) }.unwrap();
    let send = Flags::SEND | Flags::MSG;
    assert_eq!(error(&client), (send, FiErrno::EREMOTEIO));
    let error = server.completion().unwrap_err();
    assert_eq!((error.completion.context, error.err), (1, FiErrno::ETRUNC));
}

/// The event queue reports the end. `ofi_rxm` takes the context of any entry for one of its own
/// operations.
#[test]
fn the_end_of_the_connection_has_no_entries() {
    let (client, server) = connected(false, |_| {});
    let buffer = Buffer::all(&client.domain, 8);
    let from = [7_u8; 8];
    for _ in 0..3 {
        // the peer has posted no receive
        // SAFETY: inject has copied the data when it returns.
        unsafe { client.ep.inject(from.as_ptr().cast(), 8) }.unwrap();
    }
    client.send(&buffer, 8, 9).unwrap();
    server.ep.shutdown().unwrap();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(client.completion().unwrap_err().completion.context, 9);
    no_completion(&client);
}
