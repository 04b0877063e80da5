//! The end of a connection and of an endpoint, and the events that report it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forks::PerProcess;
use parking_lot::Mutex;

use super::pep::no_data;
use super::shared::{Control, Shared};
use crate::conn::{REFUSAL_WAIT, State};
use crate::errno::Result;
use crate::log::info_log;
use crate::mr::Mode;
use crate::queue::Direction;
use crate::queue::slots::{FailureListener, Lease};
use crate::verbs::{AsyncEvent, AsyncListener};

/// Time limit for the device to flush the posted requests at the end of a connection.
const FLUSH_WAIT: Duration = Duration::from_millis(200);
/// Time limit for the requests of a closed endpoint on a circuit that others use too (XRC), while
/// no request of the circuit completes: then they are flushed, with those of all its users.
const SHARED_FLUSH_WAIT: Duration = Duration::from_secs(1);
/// As [`SHARED_FLUSH_WAIT`], while requests of the circuit complete.
const SHARED_FLUSH_LIMIT: Duration = Duration::from_secs(10);

/// The time at which a wait for results ([`Shared::await_answers`]) of this process last reached
/// its limit; `None`: none has.
static LAST_TIMEOUT: PerProcess<Mutex<Option<Instant>>> = PerProcess::new(Mutex::new(None));

/// Time after [`LAST_TIMEOUT`] in which no wait for results begins. The reader of an event queue
/// waits for one connection after the other: if many peers end at once, and acknowledge nothing,
/// the waits do not add up.
const TIMEOUT_PAUSE: Duration = Duration::from_secs(1);

impl Shared {
    /// Ends the connection. Returns when the device has flushed the posted requests, or after
    /// [`FLUSH_WAIT`] (on XRC twice, and at once if others use the circuit): the entries of
    /// cancelled operations are in the completion queues then.
    pub(crate) fn shutdown(&self) -> Result<()> {
        self.await_device();
        {
            let mut control = self.control.lock();
            self.conn.begin_shutdown()?;
            if self.config.xrc {
                self.leave_peer(&mut control, true);
            } else {
                self.give_keys_back();
            }
            Self::take_in(&control);
            self.conn.disconnect(&control.side);
        }
        self.await_flush();
        self.conn.report_end();
        Ok(())
    }

    /// Processes arrived completions before the queue pair is moved to its error state: the peer
    /// has acknowledgements for these messages, and a device may complete them only in a poll.
    pub(super) fn take_in(control: &Control) {
        for binding in [&control.tx, &control.rx].into_iter().flatten() {
            let _ = binding.cq.drain_device_queue();
        }
    }

    /// Returns the keys to the peer. When the peer closes regions afterwards, it does not wait for
    /// an acknowledgement of this endpoint.
    fn give_keys_back(&self) {
        if self.slots.holds_keys()
            && let Some(side) = self.tx.lock().as_mut()
        {
            side.return_keys_and_wait();
        }
    }

    /// If the device has refused a request of the peer, waits until it has answered it
    /// ([`DeviceError`](crate::conn::DeviceError)).
    pub(super) fn await_device(&self) {
        let qp = self.control.lock().qp.clone();
        if let Some(qp) = qp {
            self.device_error.await_answer(&qp);
        }
    }

    /// If the peer has disconnected: waits for the results of requests under way, at most
    /// [`REFUSAL_WAIT`] from then on. One of them may be a refusal, which the peer has disconnected
    /// for. Does not wait within [`TIMEOUT_PAUSE`] after a wait of the process that has reached its
    /// limit.
    pub(super) fn await_answers(&self) {
        let Some(disconnected) = self.conn.disconnected() else {
            return;
        };
        if LAST_TIMEOUT
            .get()
            .lock()
            .is_some_and(|end| end.elapsed() < TIMEOUT_PAUSE)
        {
            return;
        }
        let limit = disconnected + self.answer_limit();
        let queue = self.control.lock().tx.clone();
        let mut waited = false;
        while self.slots.tx.outstanding() != 0 && Instant::now() < limit {
            waited = true;
            std::thread::sleep(Duration::from_micros(100));
            if let Some(binding) = &queue {
                let _ = binding.cq.drain_device_queue();
            }
        }
        if waited && self.slots.tx.outstanding() != 0 {
            *LAST_TIMEOUT.get().lock() = Some(Instant::now());
        }
    }

    /// Zero if the device reports whether a flushed request was executed: such a device reports a
    /// refusal in ERR too. An endpoint on XRC has no queue pair that the peer disconnects.
    fn answer_limit(&self) -> Duration {
        #[cfg(test)]
        if let Some(limit) = self.answer.get() {
            return *limit;
        }
        match self.domain.device().backend().not_executed {
            None if !self.config.xrc => REFUSAL_WAIT,
            _ => Duration::ZERO,
        }
    }

    /// Waits until the device has flushed the posted requests, and moves their completions to the
    /// completion queues' backlogs. Waits at most [`FLUSH_WAIT`]. The requests of a circuit are
    /// flushed by its end alone, whichever thread ends it: at once if it has no other user and the
    /// endpoint is closed, after this time if it is not. If it has other users, they stay posted
    /// and complete later, when the peer has receives for them; the circuit is ended after
    /// [`SHARED_FLUSH_WAIT`] without a completion, or [`SHARED_FLUSH_LIMIT`], if the endpoint is
    /// closed, because the buffers are the application's. On XRC the same holds for the engine's
    /// own requests: the peer keeps what they access while this endpoint answers for them, and they
    /// would break the circuit later. If the device was removed, nothing waits for the flush of a
    /// circuit: each close would wait for the whole time.
    ///
    /// Before the queue pair of a closed endpoint on a shared receive context is destroyed, the
    /// device must have reported the last receive (InfiniBand specification, volume 1, 10.3.1): one
    /// that a message had taken, which is not complete, would be lost with it.
    pub(super) fn await_flush(&self) {
        let (tx, rx, shares) = {
            let control = self.control.lock();
            let Some(qp) = &control.qp else {
                return;
            };
            // an initiator of XRC may have other users
            if !self.config.xrc {
                let _ = qp.set_error();
            }
            let shares = control.srx.is_some() && !self.config.xrc;
            (control.tx.clone(), control.rx.clone(), shares)
        };
        let deferred = self.tx.lock().as_mut().is_some_and(|side| {
            side.cancel_deferred();
            side.sq.post_marker();
            side.has_deferred()
        });
        let requests = deferred || self.slots.has_requests();
        let closed = self.conn.state.is(State::Closed);
        let shared = self
            .own_circuit()
            .is_some_and(|circuit| match closed && requests {
                // alone on it, the close ends it: no endpoint joins it before
                true => !circuit.retire_if_alone(),
                false => circuit.is_shared(),
            });
        let takes = shares && closed && self.received.load(Ordering::Relaxed);
        let begin = Instant::now();
        let mut mark = None;
        let mut flushes = false;
        let mut deadline = begin
            + match (shared, closed) {
                // flushed at once, as on RC, if the circuit has no other user
                (false, true) if self.config.xrc => Duration::ZERO,
                (false, _) => FLUSH_WAIT,
                (true, true) => SHARED_FLUSH_WAIT,
                (true, false) => Duration::ZERO,
            };
        loop {
            // the completions are processed behind the event
            let ended = !takes || self.took_last_receive();
            for binding in [&tx, &rx].into_iter().flatten() {
                let _ = binding.cq.drain_device_queue();
            }
            let idle = self.slots.tx.outstanding() + self.slots.rx.outstanding() == 0;
            let engine = self.config.xrc && self.slots.has_engine_requests();
            if ended && idle && !engine {
                let mut tx = self.tx.lock();
                let Some(side) = tx.as_mut().filter(|side| side.has_deferred()) else {
                    return;
                };
                side.cancel_deferred();
                side.sq.post_marker();
            }
            if shared
                && closed
                && begin.elapsed() < SHARED_FLUSH_LIMIT
                && let Some(circuit) = self.own_circuit()
                && !circuit.has_failed()
                && let now = Some(circuit.progress_mark())
                && now != mark
            {
                mark = now;
                // requests of others precede those of this endpoint
                deadline = Instant::now() + SHARED_FLUSH_WAIT;
            }
            if !flushes && let Some(circuit) = self.own_circuit() {
                if Instant::now() >= deadline
                    && !circuit.has_failed()
                    && (closed && (!idle || self.slots.has_key_requests())
                        || circuit.retire_if_alone())
                {
                    // The peer has no receives, or does not answer. Requests of the engine alone
                    // would break the circuit later, when the peer has released what they access. A
                    // probe accesses a receive queue alone, and follows operations of others only
                    // if they were posted at the same moment: it does not end their connections.
                    circuit.fail();
                }
                // also by another thread, before the device has flushed all requests
                if circuit.has_failed() {
                    flushes = true;
                    deadline = Instant::now() + FLUSH_WAIT;
                    continue;
                }
            }
            // a device that was removed flushes nothing on a circuit
            let gone = flushes && self.removed.load(Ordering::Relaxed);
            if gone || Instant::now() >= deadline {
                info_log!(
                    EpCtrl,
                    "requests not flushed within {:?}: last receive {ended}, {:?}",
                    begin.elapsed(),
                    self.slots
                );
                if self.removed.load(Ordering::Relaxed) && !self.config.xrc {
                    self.abandon();
                }
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Whether the device has reported the last receive of the queue pair, or is removed.
    fn took_last_receive(&self) -> bool {
        self.domain.device().dispatch_async();
        self.last_receive.load(Ordering::Acquire) || self.removed.load(Ordering::Relaxed)
    }

    /// Reports requests that the device has not flushed, because it was removed: the kernel may
    /// have destroyed the queue pair, and then nothing completes any more (Linux 7.3.4 with rxe).
    fn abandon(&self) {
        let control = self.control.lock();
        if let Some((binding, member)) = control.tx.as_ref().zip(control.tx_member) {
            binding.cq.abandon(member, Direction::Transmit);
        }
        if let Some((binding, member)) = control.rx.as_ref().zip(control.rx_member) {
            binding.cq.abandon(member, Direction::Receive);
        }
    }

    /// Disconnects and releases all resources. Idempotent.
    pub(crate) fn close(&self) {
        self.await_device();
        let connected = {
            let sink = self.conn.sink();
            let mut registry = sink.map(|sink| sink.dispatcher().registry());
            let mut control = self.control.lock();
            let closed = self
                .conn
                .begin_close(&control.side, registry.as_mut(), no_data());
            let Some(old) = closed else {
                return;
            };
            let connected = !matches!(old, State::Idle | State::Enabled);
            if self.config.xrc {
                // A peer that this side has answered may wait for the reciprocal request. If the
                // connection has ended, the driver may not have sent the notice yet.
                let never = [
                    State::Idle,
                    State::Enabled,
                    State::Connecting,
                    State::Accepting,
                ];
                self.leave_peer(&mut control, !never.contains(&old));
            }
            if connected {
                if old != State::Disconnected && !self.config.xrc {
                    self.give_keys_back();
                }
                Self::take_in(&control);
                self.conn.disconnect(&control.side);
            }
            connected
        };
        if connected {
            self.await_flush();
            self.release_unflushed();
        }
        let mut control = self.control.lock();
        self.drop_qp(&mut control);
        self.detach(&mut control);
        control.side.id = None;
        control.side.reserved = None;
        control.tx = None;
        control.rx = None;
        control.srx = None;
        let counters = std::mem::take(&mut control.remote_counters);
        let cell = control.cell.take();
        drop(control);
        if let Some(cell) = cell {
            for (_, counter) in counters {
                counter.leave(&cell);
            }
        }
        // Releases the endpoint's own protection domain. The protection domain of an authorization
        // key stays.
        if self.domain.mr().config().form.mode.contains(Mode::ENDPOINT) {
            self.domain.mr().forget(&self.pd);
        }
    }
}

impl FailureListener for Shared {
    fn operation_failed(&self) {
        if self.config.xrc {
            self.fail_xrc();
        } else {
            self.conn.note_failure();
        }
    }

    fn sever(&self) {
        self.sever_xrc();
    }

    fn resume(&self) {
        let connected = self.conn.state.can_post();
        if !connected && !matches!(self.conn.state.get(), State::Disconnected | State::Broken) {
            return;
        }
        if !connected {
            // no revocation can be sent any more
            self.slots.engine_requests.want(false);
        }
        // If another thread holds the lock, that thread retries the deferred operations, or this
        // function is called again.
        if let Some(mut tx) = self.tx.try_lock() {
            match tx.as_mut() {
                // under the lock, as in `transmit_here`
                Some(side) if self.conn.state.can_post() => side.resume(),
                // the application may wait for its operations' errors before it reads the event
                // queue
                Some(side) => side.cancel_deferred(),
                None if connected => {}
                None => {
                    self.slots.clear_needs_progress();
                }
            }
        }
        if !connected {
            return;
        }
        if let Some(control) = self.control.try_lock()
            && let Some(notifier) = &control.notifier
        {
            if control.tx.is_none() {
                // no operation is deferred; the notifier repeats its request if necessary
                self.slots.clear_needs_progress();
            }
            notifier.notify_again();
        }
    }

    fn tend_keys(&self) -> Lease {
        let Some(mut tx) = self.tx.try_lock() else {
            return Lease::Busy;
        };
        // under the lock, as in `transmit_here`
        match tx.as_mut() {
            Some(side) if self.is_up() => side.lease_expired(),
            _ => {
                self.slots.set_holds_keys(false);
                Lease::Over
            }
        }
    }

    fn acknowledge(&self) {
        if let Some(mut tx) = self.tx.try_lock()
            && self.is_up()
            && let Some(side) = tx.as_mut()
        {
            side.acknowledge();
        }
    }

    fn is_up(&self) -> bool {
        !matches!(self.conn.state.get(), State::Disconnected | State::Closed)
    }

    /// On XRC the requests arrive through a target that other endpoints may hold: until the notice
    /// of the end is sent, this function is asked, and then [`Kept`](super::leaving::Kept).
    fn peer_has_access(&self) -> bool {
        let arrives = || self.config.xrc && !self.target_failed.load(Ordering::Acquire);
        self.is_up() || arrives()
    }
}

impl AsyncListener for Shared {
    fn async_event(&self, event: AsyncEvent) {
        if event == AsyncEvent::DeviceFatal {
            self.removed.store(true, Ordering::Relaxed);
        }
        match event {
            AsyncEvent::QpError | AsyncEvent::DeviceFatal if self.config.xrc => {
                self.note_target_failure();
            }
            AsyncEvent::QpError | AsyncEvent::DeviceFatal => {
                if event == AsyncEvent::QpError {
                    self.device_error.note();
                }
                self.operation_failed();
            }
            AsyncEvent::QpEstablished => {
                if let Some(id) = &self.control.lock().side.id {
                    let _ = id.notify_established();
                }
            }
            AsyncEvent::QpLastReceive => self.last_receive.store(true, Ordering::Release),
            AsyncEvent::CqError | AsyncEvent::SrqLimit | AsyncEvent::Other(_) => {}
        }
    }
}
