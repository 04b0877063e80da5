//! Endpoints on completion queues that the device cannot resize.

use super::super::enable::ENGINE_REQUESTS;
use super::*;
use crate::verbs::replaced::without_resize;

/// The queue was opened for 16 completions. It has room for many endpoints; when it is full, a
/// further one is refused, and can be enabled when another one is closed. The connections work.
#[test]
fn an_endpoint_without_room_in_the_queue_is_not_enabled() {
    for small in [false, true] {
        let device = devices(&[without_resize(small)], false).remove(0);
        let own = Side::new(&device, config(CLIENT), false);
        let open = || {
            let ep = Endpoint::open(&own.domain, config(CLIENT)).unwrap();
            ep.bind_eq(&own.eq).unwrap();
            ep.bind_cq(&own.cq, BindFlags::TRANSMIT | BindFlags::RECV)
                .unwrap();
            ep
        };
        let room = own.cq.device_cq().unwrap().cqe();
        assert!(room >= if small { 8192 } else { 65_536 }, "{room}");
        let count = room / (64 + 64 + ENGINE_REQUESTS);
        let mut others: Vec<_> = (1..count).map(|_| open()).collect();
        for ep in [&own.ep].into_iter().chain(&others) {
            ep.enable().unwrap();
        }
        let last = open();
        assert_eq!(last.enable(), Err(FiErrno::ENOSPC));
        others.pop();
        assert_eq!(last.enable(), Ok(()));

        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let (_pep, addr) = listener(&device, &eq);
        own.ep.connect(Some(addr), b"hello").unwrap();
        let peer = accept(&device, &own, &eq);
        let connected = next_event(&own.eq);
        assert_eq!(connected, Ok(Told::Connected(CLIENT, b"welcome".to_vec())));
        let buffer = Buffer::all(&own.domain, 64);
        let land = Buffer::all(&peer.domain, 64);
        peer.recv(&land, 64, 1).unwrap();
        own.send(&buffer, 64, 2).unwrap();
        assert_eq!(own.completion().unwrap().context, 2);
        assert!(matches!(
            next_event(&peer.eq),
            Ok(Told::Connected(SERVER, _))
        ));
        assert_eq!(peer.completion().unwrap().context, 1);
    }
}
