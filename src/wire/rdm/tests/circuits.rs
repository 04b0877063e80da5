//! Properties of the formats of circuits.

use super::*;
use crate::verbs::SrqNumber;
use crate::wire::rdm::xrc::*;

fn qp() -> impl Strategy<Value = QpNumber> {
    any::<u32>().prop_filter_map("24 bits", |number| QpNumber::new(number >> 8))
}

fn circuit() -> impl Strategy<Value = CircuitNumber> {
    any::<u32>().prop_filter_map("no circuit", CircuitNumber::new)
}

fn node() -> impl Strategy<Value = NodeId> {
    any::<u64>().prop_map(NodeId::new)
}

fn inbox() -> impl Strategy<Value = Inbox> {
    let inbox = |(srq, tag): (u32, u32)| {
        Some(Inbox {
            srq: SrqNumber::new(srq >> 8)?,
            tag: LinkTag::new(tag)?,
        })
    };
    any::<(u32, u32)>().prop_filter_map("no inbox", inbox)
}

fn presence() -> impl Strategy<Value = Presence> {
    any::<(u64, u32, bool)>().prop_map(|(addr, rkey, none)| match none || addr < 8 {
        true => Presence::default(),
        false => Presence {
            addr: RemoteAddr::new(addr & !7),
            rkey: Rkey::new(rkey),
        },
    })
}

fn circuit_request() -> impl Strategy<Value = CircuitRequest> {
    let request = |(number, id, auth, node, initiator)| CircuitRequest {
        number,
        id,
        auth,
        node,
        initiator,
    };
    (circuit(), id(), any::<u64>(), node(), qp()).prop_map(request)
}

fn circuit_reply() -> impl Strategy<Value = CircuitReply> {
    let reply = |(number, node, auth, target)| CircuitReply {
        number,
        node,
        auth,
        target,
    };
    (circuit(), node(), any::<u64>(), qp()).prop_map(reply)
}

fn link_request() -> impl Strategy<Value = LinkRequest> {
    let on = (node(), circuit(), qp(), qp());
    let on = on.prop_map(|(node, number, initiator, target)| OnCircuit {
        node,
        number,
        initiator,
        target,
    });
    let circuits = (prop::option::of(circuit()), prop::option::of(circuit()));
    let own = (node(), prop::option::of(on), inbox(), presence());
    (request(), own, circuits).prop_map(
        |(request, (node, circuit, inbox, presence), (ended, failed))| LinkRequest {
            request,
            node,
            circuit,
            ended,
            inbox,
            presence,
            failed,
        },
    )
}

fn link_reply() -> impl Strategy<Value = LinkReply> {
    let ended = prop::option::of(circuit());
    (reply(), presence(), node(), inbox(), ended).prop_map(
        |(reply, presence, node, inbox, ended)| LinkReply {
            reply,
            presence,
            node,
            inbox,
            ended,
        },
    )
}

fn link_rejection() -> impl Strategy<Value = LinkRejection> {
    (rejection(), node(), any::<bool>()).prop_map(|(rejection, node, other)| LinkRejection {
        rejection: Rejection {
            reason: if other {
                Reason::Node
            } else {
                rejection.reason
            },
            ..rejection
        },
        node,
    })
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn circuit_messages_survive_and_changed_ones_do_not(
        request in circuit_request(),
        reply in circuit_reply(),
        bits in 1_u8..,
    ) {
        let bytes = request.encode();
        prop_assert_eq!(CircuitRequest::decode(&bytes), Ok(request));
        changed(&bytes, bits, CircuitRequest::decode)?;
        prop_assert!(Request::decode(&bytes).is_err());
        let bytes = reply.encode();
        prop_assert_eq!(CircuitReply::decode(&bytes), Ok(reply));
        changed(&bytes, bits, CircuitReply::decode)?;
    }

    #[test]
    fn link_messages_survive_and_changed_ones_do_not(
        request in link_request(),
        reply in link_reply(),
        rejection in link_rejection(),
        bits in 1_u8..,
    ) {
        let bytes = request.encode();
        prop_assert_eq!(LinkRequest::decode(&bytes), Ok(request));
        changed(&bytes, bits, LinkRequest::decode)?;
        prop_assert!(Request::decode(&bytes).is_err());
        let bytes = reply.encode();
        prop_assert_eq!(LinkReply::decode(&bytes), Ok(reply));
        changed(&bytes, bits, LinkReply::decode)?;
        let bytes = rejection.encode();
        prop_assert_eq!(LinkRejection::decode(&bytes), Ok(rejection));
        changed(&bytes, bits, LinkRejection::decode)?;
    }
}

/// The rejection of a link of its own queue pair never has NODE.
#[test]
fn node_is_a_reason_of_links_on_circuits_alone() {
    let rejection = Rejection {
        version: 1,
        epoch: None,
        id: EndpointId::new(1).unwrap(),
        newest: None,
        reason: Reason::Node,
    };
    assert_eq!(Rejection::decode(&rejection.encode()), Err(Bad::Value));
    let rejection = Rejection {
        reason: Reason::Transport,
        ..rejection
    };
    assert_eq!(Rejection::decode(&rejection.encode()), Ok(rejection));
}

/// Fields that are void without a circuit are 0 then.
#[test]
fn a_request_without_a_circuit_has_no_queue_pairs() {
    let request = LinkRequest {
        request: Request {
            listener: Listener::of([1; 16], 1).unwrap(),
            id: EndpointId::new(1).unwrap(),
            auth: 0,
            epoch: Epoch::FIRST,
            ended: None,
            gives: Secret::new(1).unwrap(),
            shows: None,
            fresh: false,
        },
        node: NodeId::new(7),
        circuit: None,
        ended: None,
        inbox: Inbox {
            srq: SrqNumber::new(1).unwrap(),
            tag: LinkTag::new(1).unwrap(),
        },
        presence: Presence::default(),
        failed: None,
    };
    let bytes = request.encode();
    assert_eq!(LinkRequest::decode(&bytes), Ok(request));
    for at in [64, 76, 80] {
        let mut bytes = bytes;
        bytes[at] = 1;
        super::super::cm::seal(&mut bytes, 0x84, 1);
        assert_eq!(LinkRequest::decode(&bytes), Err(Bad::Value), "byte {at}");
    }
}
