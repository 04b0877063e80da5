//! The connection parameters of a domain are those of its queue pairs.

use super::*;
use crate::conn::Tuning;
use crate::verbs::QpState;

fn state(side: &Side) -> QpState {
    let control = side.ep.shared.control.lock();
    control.qp.as_ref().unwrap().query().unwrap()
}

#[test]
fn timers_and_retries_are_those_asked_for() {
    let tuning = Tuning {
        min_rnr_timer: 20,
        rnr_retry_count: 5,
        ack_timeout: 14,
        retry_count: 3,
        traffic_class: Some(0x68),
    };
    let kind = DomainConfig {
        tuning,
        ..DomainConfig::default()
    };
    let (client, server) = connected_in(kind, false, |_| {});
    let tuned = state(&client);
    assert_eq!((tuned.min_rnr_timer, tuned.timeout), (20, 14));
    assert_eq!(tuned.retry_cnt, 3);
    assert_eq!(tuned.traffic_class, 0x68);
    let own = state(&server);
    assert_eq!((own.min_rnr_timer, own.timeout), (12, 16));
    // the rnr_retry of a queue pair is the value that its peer requests
    assert_eq!((tuned.rnr_retry, own.rnr_retry), (7, 5));
}

#[test]
fn an_endpoint_s_traffic_class_is_that_of_its_packets() {
    let kind = DomainConfig {
        tuning: Tuning {
            traffic_class: Some(0x68),
            ..Tuning::default()
        },
        ..DomainConfig::default()
    };
    let (client, _server) = connected_in(kind.clone(), false, |_| {});
    assert_eq!(state(&client).traffic_class, 0x68, "the domain's");
    let own = EndpointConfig {
        traffic_class: Some(0xb8),
        ..config(CLIENT)
    };
    let enable = |client: &Side| client.ep.enable().unwrap();
    let (client, _server) = connected_as(kind, own, false, enable);
    assert_eq!(state(&client).traffic_class, 0xb8);
}

#[test]
fn depths_are_the_endpoint_s_with_room_for_the_engine_s_own() {
    let (client, _server) = connected(false, |_| {});
    let state = state(&client);
    assert!(state.max_send_wr >= 64 + 2, "{state:?}");
    assert!(state.max_recv_wr >= 64, "{state:?}");
    assert!(state.max_inline_data >= 64, "{state:?}");
}

#[test]
fn what_verbs_has_not_is_refused() {
    for change in [
        |t: &mut Tuning| t.min_rnr_timer = 32,
        |t: &mut Tuning| t.rnr_retry_count = 8,
        |t: &mut Tuning| t.ack_timeout = 32,
        |t: &mut Tuning| t.retry_count = 8,
    ] {
        let mut kind = DomainConfig::default();
        change(&mut kind.tuning);
        let opened = Domain::open(&device(), kind);
        assert_eq!(opened.err(), Some(FiErrno::EINVAL));
    }
}
