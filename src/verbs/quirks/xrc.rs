//! Trials of extended reliable connections (XRC): an initiator and a target of one device, and two
//! shared receive queues in two protection domains.

use std::sync::Arc;

use rdma_core_sys as sys;

use super::loopback::{self, Outcome, Pages, Path, RawQp};
use super::{MARK, PAGE, PINNED, RawMr, Seen, register, sge};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{Cq, Device, Pd, RecvRequest, Sge, Srq, Target, Xrcd};

/// The immediate data of the trial's messages.
const TAG: u32 = 0x5eed_0f7e;

/// The observed behaviour of a device's XRC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XrcBehaviour {
    /// Messages with immediate data arrive at the queue that each names.
    pub messages: Seen,
    /// The completion of a receive has the number of the target (`ibv_poll_cq(3)` does not define
    /// it).
    pub target_number: Seen,
    /// A request that names a queue is refused with a key of another protection domain than the
    /// queue's.
    pub domain_checked: Seen,
    /// RDMA FLUSH to global visibility.
    pub flush: Seen,
}

impl XrcBehaviour {
    /// All trials have the same result.
    fn all(seen: Seen) -> Self {
        Self {
            messages: seen,
            target_number: seen,
            domain_checked: seen,
            flush: seen,
        }
    }

    /// Whether endpoints can use the device's XRC.
    pub fn is_usable(&self) -> bool {
        self.messages.works() && self.domain_checked.works()
    }
}

impl Device {
    /// The behaviour of this device's XRC. The first call runs the trials, as
    /// [`Device::behaviour`]; they are not run on a device that reports no XRC.
    pub fn xrc_behaviour(self: &Arc<Self>) -> &XrcBehaviour {
        self.observed_xrc().get_or_init(|| {
            let seen = if self.attr().xrc {
                observe(self)
            } else {
                Err(FiErrno::EOPNOTSUPP)
            };
            let seen = seen.unwrap_or_else(|error| XrcBehaviour::all(Seen::Refused(error)));
            info_log!(
                Domain,
                "{}: XRC: messages: {}; number of the target in completions: {}; protection \
                 domains checked: {}; flush: {}",
                self.name(),
                seen.messages,
                seen.target_number,
                seen.domain_checked,
                seen.flush
            );
            seen
        })
    }
}

/// Runs the trials.
///
/// # Errors
/// The device's: objects of XRC cannot be created.
fn observe(device: &Arc<Device>) -> Result<XrcBehaviour> {
    let bench = Bench::new(device)?;
    let (messages, target_number) = bench.messages()?;
    if !messages.works() {
        return Ok(XrcBehaviour::all(messages));
    }
    Ok(XrcBehaviour {
        messages,
        target_number,
        domain_checked: Seen::settle(bench.domain_checked()),
        flush: Seen::settle(bench.flush()),
    })
}

/// A receive queue, its protection domain and memory in it.
struct Place {
    srq: Srq,
    pd: Arc<Pd>,
    pages: Pages,
}

/// The objects that all trials use.
struct Bench<'a> {
    device: &'a Arc<Device>,
    xrcd: Arc<Xrcd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    places: [Place; 2],
}

/// An initiator and its target. After a failed operation neither can be used.
struct Circuit {
    initiator: RawQp,
    target: Target,
}

impl<'a> Bench<'a> {
    fn new(device: &'a Arc<Device>) -> Result<Self> {
        let xrcd = Arc::new(Xrcd::open(device, None, libc::O_CREAT)?);
        let cq = || Cq::create(device, 16, None, 0).map(Arc::new);
        let (send_cq, recv_cq) = (cq()?, cq()?);
        let place = || -> Result<Place> {
            let pd = Pd::alloc(device)?;
            Ok(Place {
                srq: Srq::create_xrc(&pd, &xrcd, &recv_cq, 4, 1)?,
                pd,
                pages: Pages::map(PAGE)?,
            })
        };
        let places = [place()?, place()?];
        Ok(Self {
            device,
            xrcd,
            send_cq,
            recv_cq,
            places,
        })
    }

    fn circuit(&self, flush: bool) -> Result<Circuit> {
        let [place, _] = &self.places;
        let qp_type = sys::IBV_QPT_XRC_SEND;
        let initiator = loopback::create(self.device, &place.pd, &self.send_cq, qp_type, flush)?;
        let target = Target::create(&self.xrcd)?;
        let path = Path::of(self.device)?;
        let number = target.number().get();
        // SAFETY: both are live and of this device.
        unsafe {
            path.bring_up(target.raw(), initiator.number(), flush)?;
            path.bring_up(initiator.raw, number, flush)?;
        }
        Ok(Circuit { initiator, target })
    }

    fn register(&self, place: &Place, access: u32) -> Result<RawMr<'_>> {
        let iova = place.pages.addr() as u64;
        register(self.device, &place.pd, &place.pages, iova, access)
    }

    /// A send or write of the first 8 bytes of `region` that names the queue of `to`.
    fn request(
        &self,
        circuit: &Circuit,
        to: &Place,
        region: &RawMr<'_>,
        fill: impl FnOnce(&mut sys::ibv_send_wr),
    ) -> Outcome {
        let mut list = sge(&self.places[0].pages, region);
        let mut wr = sys::ibv_send_wr {
            sg_list: &raw mut list,
            num_sge: 1,
            ..Default::default()
        };
        wr.qp_type.xrc.remote_srqn = to.srq.number().map_or(0, |number| number.get());
        fill(&mut wr);
        // SAFETY: the pages outlive the completion, for which the next line waits.
        let posted = unsafe { loopback::post(&circuit.initiator, &mut wr) };
        loopback::await_completion(&self.send_cq, posted)
    }

    /// Sends 8 bytes with immediate data to each queue. The second result is that of the target's
    /// number.
    fn messages(&self) -> Result<(Seen, Seen)> {
        let circuit = self.circuit(false)?;
        let source = self.register(&self.places[0], PINNED)?;
        let mut number = Seen::Works;
        for (round, place) in (1..).zip(&self.places) {
            self.places[0].pages.set_word(0, MARK + round);
            let region = self.register(place, PINNED)?;
            let into = Sge {
                addr: place.pages.addr() as u64 + 64,
                length: 8,
                lkey: crate::verbs::Lkey::new(region.lkey()),
            };
            let receive = RecvRequest {
                wr_id: round,
                sges: &[into],
            };
            // SAFETY: the pages live as long as the queue.
            unsafe { place.srq.post_recv(&receive) }?;
            let sent = self.request(&circuit, place, &source, |wr| {
                wr.opcode = sys::IBV_WR_SEND_WITH_IMM;
                wr.__bindgen_anon_1.bindgen_union_field = TAG.to_be();
            });
            if sent != Outcome::Done {
                return Ok((Seen::of(sent), Seen::of(sent)));
            }
            let Some(wc) = loopback::next_completion(&self.recv_cq) else {
                return Ok((Seen::Broken, Seen::Broken));
            };
            let tag = u32::from_be(wc.__bindgen_anon_1.bindgen_union_field);
            let arrived = wc.status == sys::IBV_WC_SUCCESS
                && wc.wr_id == round
                && wc.wc_flags & sys::IBV_WC_WITH_IMM != 0
                && tag == TAG
                && place.pages.word(64) == MARK + round;
            if !arrived {
                return Ok((Seen::Broken, Seen::Broken));
            }
            if wc.qp_num != circuit.target.number().get() {
                number = Seen::Broken;
            }
        }
        Ok((Seen::Works, number))
    }

    /// Writes through each queue with a key of the second one's protection domain: the one through
    /// the second queue must succeed, the other one fail.
    fn domain_checked(&self) -> Result<Seen> {
        let [first, second] = &self.places;
        let circuit = self.circuit(false)?;
        let source = self.register(first, PINNED)?;
        let region = self.register(second, PINNED)?;
        let write = |through: &Place, value: u64| {
            first.pages.set_word(0, value);
            self.request(&circuit, through, &source, |wr| {
                wr.opcode = sys::IBV_WR_RDMA_WRITE;
                wr.wr.rdma.remote_addr = second.pages.addr() as u64;
                wr.wr.rdma.rkey = region.rkey();
            })
        };
        let right = write(second, MARK);
        if right != Outcome::Done {
            return Ok(Seen::of(right));
        }
        let wrong = write(first, !MARK);
        let refused = matches!(wrong, Outcome::Failed(Some(_)));
        Ok(if refused && second.pages.word(0) == MARK {
            Seen::Works
        } else {
            Seen::Broken
        })
    }

    /// As the trial of [`Behaviour::flush_global`](super::Behaviour); the flush to persistence needs
    /// persistent memory.
    fn flush(&self) -> Result<Seen> {
        let [place, _] = &self.places;
        let circuit = self.circuit(true)?;
        let region = self.register(place, PINNED | sys::IBV_ACCESS_FLUSH_GLOBAL)?;
        let remote = (place.pages.addr() as u64, region.rkey());
        let srq = place.srq.number().map(|number| number.get());
        let placement = sys::IBV_FLUSH_GLOBAL;
        let posted = loopback::post_flush(&circuit.initiator, remote, placement, srq);
        Ok(Seen::of(loopback::await_completion(&self.send_cq, posted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::devices;

    #[test]
    fn the_embedded_device_has_xrc() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let seen = device.xrc_behaviour();
        assert_eq!(*seen, XrcBehaviour::all(Seen::Works));
        assert!(seen.is_usable());
        // the result is stored: no second trial
        assert!(std::ptr::eq(seen, device.xrc_behaviour()));
    }

    #[test]
    fn a_device_that_mixes_protection_domains_is_not_usable() {
        let works = XrcBehaviour::all(Seen::Works);
        let mixes = XrcBehaviour {
            domain_checked: Seen::Broken,
            ..works.clone()
        };
        let silent = XrcBehaviour::all(Seen::Refused(FiErrno::EOPNOTSUPP));
        assert!(!mixes.is_usable() && !silent.is_usable());
        let plain = XrcBehaviour {
            target_number: Seen::Broken,
            flush: Seen::Broken,
            ..works
        };
        assert!(plain.is_usable());
    }
}
