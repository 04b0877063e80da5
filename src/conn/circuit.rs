//! A circuit of connected endpoints on XRC: an initiator that several endpoints use.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Incoming;
use crate::errno::{FiErrno, Result};
use crate::verbs::{AsyncEvent, AsyncListener, PrivateData, Qp, QpNumber};

/// An endpoint, as its circuit's requests use it. Each call comes from the driver, some with the
/// dispatcher's lock held, but [`Self::circuit_failed`] and [`Self::progress_mark`]: threads that
/// close endpoints of the circuit call them too.
pub(crate) trait CircuitUser: Send + Sync {
    /// The private data of the request on this circuit. `port`: where the domain takes reciprocal
    /// requests. `redirected`: the number by which the peer finds the endpoint that waits for this
    /// request, which repeats an earlier one.
    ///
    /// # Errors
    /// The endpoint is closed, or has no resources: the dial has failed.
    fn request(
        &self,
        circuit: &Arc<Circuit>,
        local: SocketAddr,
        port: u16,
        redirected: Option<u32>,
    ) -> Result<Vec<u8>>;

    /// The peer has accepted. The share is the endpoint's now.
    fn answered(&self, share: Share, answer: &PrivateData);

    /// The peer has accepted, and has ended before this side could confirm the answer. The circuit
    /// is not connected.
    fn answered_and_ended(&self);

    /// The peer has rejected, cannot be reached, or the device has failed.
    fn not_connected(&self, error: FiErrno, status: i32, data: &PrivateData);

    /// The peer connects the other direction.
    fn reciprocal(&self, request: Incoming);

    /// The peer's original request follows with a new circuit, because this process does not have
    /// the target that the first one named.
    fn redirected(&self, request: Incoming);

    /// The peer has not connected the other direction in time.
    fn not_answered(&self);

    /// The peer's answer has arrived, or the peer was redirected, some time ago, and its request is
    /// missing: looks whether its process lives.
    fn probe(&self);

    /// The peer's process has ended, unless the connection is established: it has ended the
    /// exchange that it has answered, or does not listen any more.
    fn process_ended(&self);

    /// The peer has ended the connection. [`Self::send_end_notice`] follows.
    fn peer_ended(&self);

    /// Whether requests of the endpoint are under way, or follow. Acquires no lock.
    fn has_requests(&self) -> bool;

    /// Retires the endpoint's circuit unless other endpoints use it ([`Circuit::retire_if_alone`]).
    /// Returns whether none does, or the circuit has failed. Acquires no lock but leaves.
    fn retire_circuit_if_alone(&self) -> bool;

    /// Whether operations of the endpoint are under way. Acquires no lock.
    fn has_operations(&self) -> bool;

    /// Processes completions of the endpoint's requests: the application may not poll. The caller
    /// holds no lock but that of the driver.
    fn progress_requests(&self);

    /// Changes when a request of the endpoint completes. Acquires no lock.
    fn progress_mark(&self) -> u32;

    /// Notifies the peer that the connection has ended, because the circuit has failed or the peer
    /// has notified this side of its own end. From then on the endpoint posts nothing. The driver;
    /// the caller holds no other lock but the driver's.
    fn send_end_notice(&self);

    /// The circuit on which the endpoint is connected has failed. Called once, with any lock held
    /// that precedes that of a completion queue, or this one.
    fn circuit_failed(&self);
}

/// An initiator, and the target to which it is connected. Thread safe. It ends with its last
/// [`Share`], or when the notice of the end of the last connection is answered.
#[derive(Debug)]
pub(crate) struct Circuit {
    qp: Arc<Qp>,
    /// Requests that its send queue has room for, and how many of them its users have reserved.
    size: usize,
    used: AtomicUsize,
    /// The number of the target; 0 until the circuit is up.
    target: AtomicU32,
    failed: AtomicBool,
    /// It gets no new user. Set and read with `users` locked.
    retired: AtomicBool,
    users: Mutex<Vec<User>>,
}

/// An endpoint that has a share of a circuit.
#[derive(Debug)]
struct User {
    user: Weak<dyn CircuitUser>,
    /// Its peer has answered. An endpoint whose request is under way does not fail with the
    /// circuit: a peer of another process does not have the target, and gets a circuit of its own.
    connected: bool,
}

/// Whether more than one of the users lives.
fn are_several(users: &[User]) -> bool {
    let live = users.iter().filter(|known| known.user.strong_count() != 0);
    live.count() > 1
}

impl Circuit {
    /// `size`: requests that the send queue of `qp` has room for.
    pub(super) fn new(qp: Qp, size: usize) -> Arc<Self> {
        let circuit = Arc::new(Self {
            qp: Arc::new(qp),
            size,
            used: AtomicUsize::new(0),
            target: AtomicU32::new(0),
            failed: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            users: Mutex::default(),
        });
        let listener: Weak<Self> = Arc::downgrade(&circuit);
        circuit
            .qp
            .pd()
            .device()
            .listen(circuit.qp.object(), listener);
        circuit
    }

    /// The initiator.
    pub(crate) fn qp(&self) -> &Arc<Qp> {
        &self.qp
    }

    /// The number of the target; 0 while the circuit is being connected.
    pub(crate) fn target(&self) -> u32 {
        self.target.load(Ordering::Acquire)
    }

    /// The initiator is connected to this target.
    pub(crate) fn set_target(&self, target: QpNumber) {
        self.target.store(target.get(), Ordering::Release);
    }

    /// Whether an endpoint has a share of it. Without one, it lives until the notice of the end of
    /// its last connection is answered, and gets no new user.
    pub(super) fn is_used(&self) -> bool {
        self.used.load(Ordering::Acquire) != 0
    }

    /// Reserves room for the requests of one more user; `None`: there is no room, or the circuit
    /// has failed or is retired.
    pub(super) fn share(
        self: &Arc<Self>,
        room: usize,
        user: &Weak<dyn CircuitUser>,
    ) -> Option<Share> {
        let free = |used: usize| (used + room <= self.size).then_some(used + room);
        if self.has_failed() {
            return None;
        }
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, free)
            .ok()?;
        // dropped, it gives the room back
        let share = Share {
            circuit: Arc::clone(self),
            room,
            user: Weak::clone(user),
        };
        let mut users = self.users.lock();
        let retired = self.retired.load(Ordering::Relaxed);
        if !retired {
            users.retain(|known| known.user.strong_count() != 0);
            users.push(User {
                user: Weak::clone(user),
                connected: false,
            });
        }
        drop(users);
        (!retired && !self.has_failed()).then_some(share)
    }

    /// Whether more than one endpoint uses it.
    pub(crate) fn is_shared(&self) -> bool {
        are_several(&self.users.lock())
    }

    /// Retires the circuit unless more than one endpoint uses it: it gets no new user, whose
    /// requests would follow those that are under way. Returns whether at most one uses it.
    pub(crate) fn retire_if_alone(&self) -> bool {
        let users = self.users.lock();
        let alone = !are_several(&users);
        if alone {
            self.retired.store(true, Ordering::Relaxed);
        }
        alone
    }

    /// The users that live. Their drop acquires the lock of the list, which is not held here.
    fn live_users(&self) -> Vec<Arc<dyn CircuitUser>> {
        let users = self.users.lock();
        let users = users.iter().map(|known| &known.user);
        users.filter_map(Weak::upgrade).collect()
    }

    /// Changes when a request of one of its users completes.
    pub(crate) fn progress_mark(&self) -> u32 {
        let users = self.live_users();
        let marks = users.iter().map(|user| user.progress_mark());
        marks.fold(0, u32::wrapping_add)
    }

    /// Whether operations of other users are under way: they may wait for receives of the peer, and
    /// what is posted to the circuit waits behind them. Processes their completions first. The
    /// caller holds no lock.
    pub(crate) fn others_have_operations(&self, user: &Weak<dyn CircuitUser>) -> bool {
        let is_other =
            |other: &&Arc<dyn CircuitUser>| !std::ptr::addr_eq(Arc::as_ptr(other), user.as_ptr());
        let users = self.live_users();
        users.iter().filter(is_other).any(|other| {
            if other.has_operations() {
                other.progress_requests();
            }
            other.has_operations()
        })
    }

    /// Whether the initiator is in its error state.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Notes that a request has failed, or the device has reported the failure: all connected users
    /// fail. Acquires no lock that precedes that of a completion queue.
    pub(crate) fn note_failure(&self) {
        if self.failed.swap(true, Ordering::AcqRel) {
            return;
        }
        let users = std::mem::take(&mut *self.users.lock());
        let connected = users.iter().filter(|known| known.connected);
        for user in connected.filter_map(|known| known.user.upgrade()) {
            user.circuit_failed();
        }
    }

    /// Ends the circuit: all its requests are flushed.
    pub(crate) fn fail(&self) {
        // an error is that of a queue pair that is in this state already
        let _ = self.qp.set_error();
        self.note_failure();
    }
}

impl AsyncListener for Circuit {
    fn async_event(&self, event: AsyncEvent) {
        if matches!(event, AsyncEvent::QpError | AsyncEvent::DeviceFatal) {
            self.note_failure();
        }
    }
}

impl Drop for Circuit {
    fn drop(&mut self) {
        self.qp.pd().device().unlisten(self.qp.object());
    }
}

/// An endpoint's part of a circuit. Dropped, it gives its room back, and the endpoint does not fail
/// with the circuit.
#[derive(Debug)]
pub(crate) struct Share {
    circuit: Arc<Circuit>,
    room: usize,
    user: Weak<dyn CircuitUser>,
}

impl Share {
    pub(crate) fn circuit(&self) -> &Arc<Circuit> {
        &self.circuit
    }

    fn is_of(&self, known: &User) -> bool {
        std::ptr::addr_eq(known.user.as_ptr(), self.user.as_ptr())
    }

    /// The peer has answered: from now on the endpoint fails with the circuit. False: the circuit
    /// has failed already, of which the endpoint is not notified.
    pub(super) fn connect(&self) -> bool {
        let mut users = self.circuit.users.lock();
        let known = users.iter_mut().find(|known| self.is_of(known));
        known.map(|known| known.connected = true).is_some()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut users = self.circuit.users.lock();
        users.retain(|known| !self.is_of(known));
        drop(users);
        self.circuit.used.fetch_sub(self.room, Ordering::AcqRel);
    }
}
