//! Trials of extended reliable connections (XRC): an initiator and a target of one device, and two
//! shared receive queues in two protection domains.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use super::loopback::{self, Outcome, Pages, Path, RawQp};
use super::{MARK, PAGE, PINNED, RawMr, Seen, register, sge};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{Cq, Device, Pd, RecvRequest, Sge, Srq, Target, Xrcd};

/// The immediate data of the trial's messages.
const TAG: u32 = 0x5eed_0f7e;
/// How often one call runs the trials, while errors that may pass stop them.
const ATTEMPTS: u32 = 4;
/// The time after which a call begins no further attempt.
const PERSISTENCE: Duration = Duration::from_secs(5);
/// The time between two attempts, and the longest wait that it grows to.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));

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
    /// [`Device::behaviour`]; they are not run on a device that reports no XRC. Thread safe.
    ///
    /// # Errors
    /// An error that may pass (memory, descriptors, a port that is down, a host that is too busy
    /// for the time limit): nothing is stored, and the next call runs the trials again. After a
    /// time limit, or if other processes held a lock, the trials were repeated: at most 4 times,
    /// and not after 5 s. Each such error is logged as a warning.
    pub fn xrc_behaviour(self: &Arc<Self>) -> Result<&XrcBehaviour> {
        stored(self.observed_xrc(), || {
            let seen = if self.attr().xrc {
                repeated(self.name(), PAUSES, || observe(self))
            } else {
                Err(FiErrno::EOPNOTSUPP)
            };
            match &seen {
                Ok(seen) => info_log!(
                    Domain,
                    "{}: XRC: messages: {}; number of the target in completions: {}; protection \
                     domains checked: {}; flush: {}",
                    self.name(),
                    seen.messages,
                    seen.target_number,
                    seen.domain_checked,
                    seen.flush
                ),
                Err(error) => info_log!(Domain, "{}: XRC: {error}", self.name()),
            }
            seen
        })
    }
}

/// Runs trials again while an error of a busy host stops them.
fn repeated<T>(
    device: &str,
    (mut pause, longest): (Duration, Duration),
    mut observe: impl FnMut() -> Result<T>,
) -> Result<T> {
    let start = Instant::now();
    let mut attempts = 1;
    loop {
        let error = match observe() {
            Err(error @ (FiErrno::ETIMEDOUT | FiErrno::EBUSY | FiErrno::EAGAIN)) => error,
            result => return result,
        };
        let again = attempts < ATTEMPTS && start.elapsed() < PERSISTENCE;
        warn_log!(
            Domain,
            "{device}: the trial of its XRC has failed {attempts} times: {error}{}",
            if again { ", it is repeated" } else { "" }
        );
        if !again {
            return Err(error);
        }
        std::thread::sleep(pause);
        pause = (pause * 4).min(longest);
        attempts += 1;
    }
}

/// The stored behaviour; if there is none, that which `observe` returns, and which is stored. Of
/// the errors `EOPNOTSUPP` alone is a behaviour.
fn stored(
    storage: &OnceLock<XrcBehaviour>,
    observe: impl FnOnce() -> Result<XrcBehaviour>,
) -> Result<&XrcBehaviour> {
    if let Some(seen) = storage.get() {
        return Ok(seen);
    }
    let seen = match observe() {
        Err(error @ FiErrno::EOPNOTSUPP) => XrcBehaviour::all(Seen::Refused(error)),
        other => other?,
    };
    Ok(storage.get_or_init(|| seen))
}

/// Returns the result of an operation unless it may be another one next time.
///
/// # Errors
/// `ETIMEDOUT`: there was no answer. Others: the device has not taken the request.
fn lasting(outcome: Outcome) -> Result<Outcome> {
    match outcome {
        Outcome::Failed(None | Some(sys::IBV_WC_RETRY_EXC_ERR)) => Err(FiErrno::ETIMEDOUT),
        Outcome::NotPosted(error) if error != FiErrno::EOPNOTSUPP => Err(error),
        other => Ok(other),
    }
}

/// The result of a trial that the device may refuse in one of the ways of verbs that do not exist.
fn refusable(result: Result<Seen>) -> Result<Seen> {
    match result {
        Err(error @ (FiErrno::EOPNOTSUPP | FiErrno::ENOSYS | FiErrno::EINVAL)) => {
            Ok(Seen::Refused(error))
        }
        other => other,
    }
}

/// Runs the trials.
///
/// # Errors
/// The device's: objects of XRC cannot be created, or a trial has no lasting result.
fn observe(device: &Arc<Device>) -> Result<XrcBehaviour> {
    let bench = Bench::new(device)?;
    let (messages, target_number) = bench.messages()?;
    if !messages.works() {
        return Ok(XrcBehaviour::all(messages));
    }
    Ok(XrcBehaviour {
        messages,
        target_number,
        domain_checked: bench.domain_checked()?,
        flush: refusable(bench.flush())?,
    })
}

/// A receive queue, its protection domain and memory in it.
struct Receiver {
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
    receivers: [Receiver; 2],
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
        let receiver = || -> Result<Receiver> {
            let pd = Pd::alloc(device)?;
            Ok(Receiver {
                srq: Srq::create_xrc(&pd, &xrcd, &recv_cq, 4, 1)?,
                pd,
                pages: Pages::map(PAGE)?,
            })
        };
        let receivers = [receiver()?, receiver()?];
        Ok(Self {
            device,
            xrcd,
            send_cq,
            recv_cq,
            receivers,
        })
    }

    fn circuit(&self, flush: bool) -> Result<Circuit> {
        let [place, _] = &self.receivers;
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

    fn register(&self, place: &Receiver, access: u32) -> Result<RawMr<'_>> {
        let iova = place.pages.addr() as u64;
        register(self.device, &place.pd, &place.pages, iova, access)
    }

    /// A send or write of the first 8 bytes of `region` that names the queue of `to`.
    fn request(
        &self,
        circuit: &Circuit,
        to: &Receiver,
        region: &RawMr<'_>,
        fill: impl FnOnce(&mut sys::ibv_send_wr),
    ) -> Result<Outcome> {
        let mut list = sge(&self.receivers[0].pages, region);
        let mut wr = sys::ibv_send_wr {
            sg_list: &raw mut list,
            num_sge: 1,
            ..Default::default()
        };
        wr.qp_type.xrc.remote_srqn = to.srq.number().map_or(0, |number| number.get());
        fill(&mut wr);
        // SAFETY: the pages outlive the completion, for which the next line waits.
        let posted = unsafe { loopback::post(&circuit.initiator, &mut wr) };
        lasting(loopback::await_completion(&self.send_cq, posted))
    }

    /// Sends 8 bytes with immediate data to each queue. The second result is that of the target's
    /// number.
    fn messages(&self) -> Result<(Seen, Seen)> {
        let circuit = self.circuit(false)?;
        let source = self.register(&self.receivers[0], PINNED)?;
        let mut number = Seen::Works;
        for (round, place) in (1..).zip(&self.receivers) {
            self.receivers[0].pages.set_word(0, MARK + round);
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
            })?;
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
        let [first, second] = &self.receivers;
        let circuit = self.circuit(false)?;
        let source = self.register(first, PINNED)?;
        let region = self.register(second, PINNED)?;
        let write = |through: &Receiver, value: u64| {
            first.pages.set_word(0, value);
            self.request(&circuit, through, &source, |wr| {
                wr.opcode = sys::IBV_WR_RDMA_WRITE;
                wr.wr.rdma.remote_addr = second.pages.addr() as u64;
                wr.wr.rdma.rkey = region.rkey();
            })
        };
        let right = write(second, MARK)?;
        if right != Outcome::Done {
            return Ok(Seen::of(right));
        }
        let wrong = write(first, !MARK)?;
        let refused = matches!(wrong, Outcome::Failed(Some(_)));
        Ok(if refused && second.pages.word(0) == MARK {
            Seen::Works
        } else {
            Seen::Broken
        })
    }

    /// As the trial of [`Behaviour::flush_global`](super::Behaviour); the flush to persistence
    /// needs persistent memory.
    fn flush(&self) -> Result<Seen> {
        let [place, _] = &self.receivers;
        let circuit = self.circuit(true)?;
        let region = self.register(place, PINNED | sys::IBV_ACCESS_FLUSH_GLOBAL)?;
        let remote = (place.pages.addr() as u64, region.rkey());
        let srq = place.srq.number().map(|number| number.get());
        let placement = sys::IBV_FLUSH_GLOBAL;
        let posted = loopback::post_flush(&circuit.initiator, remote, placement, srq);
        let outcome = lasting(loopback::await_completion(&self.send_cq, posted))?;
        Ok(Seen::of(outcome))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::devices;

    #[test]
    fn the_embedded_device_has_xrc() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let seen = device.xrc_behaviour().unwrap();
        assert_eq!(*seen, XrcBehaviour::all(Seen::Works));
        assert!(seen.is_usable());
        // the result is stored: no second trial
        assert!(std::ptr::eq(seen, device.xrc_behaviour().unwrap()));
    }

    #[test]
    fn an_error_that_may_pass_is_not_stored() {
        let works = XrcBehaviour::all(Seen::Works);
        for error in [
            FiErrno::EMFILE,
            FiErrno::ENOMEM,
            FiErrno::EBUSY,
            FiErrno::ETIMEDOUT,
        ] {
            let storage = OnceLock::new();
            assert_eq!(stored(&storage, || Err(error)), Err(error));
            assert_eq!(stored(&storage, || Ok(works.clone())), Ok(&works));
            assert_eq!(stored(&storage, || panic!("a second trial")), Ok(&works));
        }
        let missing = FiErrno::EOPNOTSUPP;
        let storage = OnceLock::new();
        let refused = XrcBehaviour::all(Seen::Refused(missing));
        assert_eq!(stored(&storage, || Err(missing)), Ok(&refused));
        assert_eq!(stored(&storage, || panic!("a second trial")), Ok(&refused));
    }

    /// A process that does not run for longer than a time limit of the trials has XRC all the same.
    #[test]
    fn an_error_of_a_busy_host_is_tried_again() {
        let none = (Duration::ZERO, Duration::ZERO);
        let run = |errors: &[FiErrno]| {
            let mut attempts = 0;
            let result = repeated("test0", none, || {
                attempts += 1;
                errors.get(attempts - 1).map_or(Ok(()), |error| Err(*error))
            });
            (result, attempts)
        };
        let (late, busy) = (FiErrno::ETIMEDOUT, FiErrno::EBUSY);
        assert_eq!(run(&[]), (Ok(()), 1));
        assert_eq!(run(&[late, busy]), (Ok(()), 3));
        assert_eq!(run(&[late; 9]), (Err(late), ATTEMPTS as usize));
        for lasting in [FiErrno::EOPNOTSUPP, FiErrno::EMFILE, FiErrno::EINVAL] {
            assert_eq!(run(&[lasting]), (Err(lasting), 1));
        }
    }

    #[test]
    fn a_lost_request_is_no_result() {
        let denied = Outcome::Failed(Some(sys::IBV_WC_REM_ACCESS_ERR));
        let missing = Outcome::NotPosted(FiErrno::EOPNOTSUPP);
        for outcome in [Outcome::Done, denied, missing] {
            assert_eq!(lasting(outcome), Ok(outcome));
        }
        for lost in [None, Some(sys::IBV_WC_RETRY_EXC_ERR)] {
            assert_eq!(lasting(Outcome::Failed(lost)), Err(FiErrno::ETIMEDOUT));
        }
        let full = FiErrno::ENOMEM;
        assert_eq!(lasting(Outcome::NotPosted(full)), Err(full));
        // an error of a trial that runs behind others
        assert_eq!(refusable(Err(full)), Err(full));
        let unknown = FiErrno::EINVAL;
        assert_eq!(refusable(Err(unknown)), Ok(Seen::Refused(unknown)));
    }

    #[test]
    fn a_flush_without_the_name_of_a_queue_is_not_posted() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let bench = Bench::new(&device).unwrap();
        let circuit = bench.circuit(true).unwrap();
        let region = bench.register(&bench.receivers[0], PINNED | sys::IBV_ACCESS_FLUSH_GLOBAL);
        let remote = (
            bench.receivers[0].pages.addr() as u64,
            region.unwrap().rkey(),
        );
        let convert = device.backend().verbs.ibv_qp_to_qp_ex.unwrap();
        // SAFETY: the queue pair is live, and no other thread uses it.
        unsafe { (*convert(circuit.initiator.raw)).wr_set_xrc_srqn = None };
        let placement = sys::IBV_FLUSH_GLOBAL;
        let posted = loopback::post_flush(&circuit.initiator, remote, placement, Some(1));
        assert_eq!(posted, Err(FiErrno::EOPNOTSUPP));
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
