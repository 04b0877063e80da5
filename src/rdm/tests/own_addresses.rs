//! Endpoints that send to their own addresses.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use super::endpoints::{End, config, domain, wait_for};
use crate::mr::Desc;
use crate::rdm::{EndpointConfig, LocalIov};

/// An endpoint listens at several addresses. A receive from one of them matches messages to
/// another one, whichever address was used first.
#[test]
fn a_message_to_itself_by_another_address() {
    let domain = domain();
    let anywhere = || EndpointConfig {
        src: None,
        ..config()
    };
    let name = End::with(&domain, anywhere(), 0);
    let count = name.ep.shared().listening.get().unwrap();
    if count.addresses().count() < 2 {
        eprintln!("skipped: the device has one address");
        return;
    }
    for early in [true, false] {
        for swapped in [true, false] {
            let a = End::with(&domain, anywhere(), 0);
            let listening = a.ep.shared().listening.get().unwrap();
            let mut addresses = listening.addresses();
            let mut addrs = [addresses.next().unwrap(), addresses.next().unwrap()];
            if swapped {
                addrs.swap(0, 1);
            }
            let [to, from] = addrs.map(|addr| a.knows_at(addr));
            let mut bytes = [0_u8; 8];
            let iov = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            let post = || {
                let local = LocalIov::single(&iov, &Desc::NULL);
                // SAFETY: the buffer lives until the completion.
                unsafe { a.ep.recv(from, Some((1, 0)), local, 2, None) }.unwrap();
            };
            if early {
                post();
            }
            a.send(to, Some(1), &[7; 8], 1);
            if !early {
                post();
            }
            let mut contexts: Vec<_> = wait_for(&a, 2).iter().map(|it| it.context).collect();
            contexts.sort_unstable();
            assert_eq!((&contexts[..], bytes), (&[1, 2][..], [7; 8]));
            assert_eq!(a.state(|state| state.core.peer_keys().count()), 1);
        }
    }
}
