//! Event channels of the connection manager, and the objects that receive their events.
//!
//! A dispatcher has one event channel per backend in use. It also wakes the threads that sleep on
//! it for asynchronous events of the devices and for the keepalive of its connections' domains.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rdma_core_sys::Backend;

use super::ConnectRequest;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::queue::WaitSet;
use crate::queue::keepalive::Keepalive;
use crate::verbs::{CmEvent, Device, EventChannel};

/// An object that receives the events of an identifier. Dropping the last reference must acquire no
/// lock.
pub(crate) trait CmTarget: Send + Sync {
    /// Processes an event of its identifier. Called with the dispatcher's lock held.
    fn cm_event(&self, event: CmEvent);
    /// Called before the end of the connection is passed to an application, without a lock: moves
    /// the completions of the endpoint's outstanding requests to the completion queues.
    fn before_shutdown(&self) {}
}

/// Maximum number of events of one channel that one call takes. A peer that dials in a loop does
/// not keep the caller. The channel's descriptor stays readable while it has an event: in librdmacm
/// it is the kernel's (`ucma_poll` of `ucma.c`).
const EVENTS_AT_ONCE: usize = 64;
/// How long the channels are not waited on after an error of the connection manager.
const AGAIN: Duration = Duration::from_millis(20);

/// What [`Dispatcher::progress`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Events, or none.
    Events,
    /// An error of the connection manager, for instance `EMFILE`: the cause of the event stays, and
    /// with it the wait object readable. [`Dispatcher::wait_after`] does not return for it.
    Error,
}

struct Channel {
    events: Arc<EventChannel>,
    /// The error of the last call, which was logged.
    error: Option<FiErrno>,
}

#[derive(Default)]
struct Connections {
    channels: Vec<Channel>,
    devices: Vec<Arc<Device>>,
    keepalives: Vec<Weak<Keepalive>>,
}

/// The targets of the identifiers' events.
type Targets = Mutex<HashMap<usize, Weak<dyn CmTarget>>>;

/// Takes the events of identifiers and passes them to their targets. Thread safe.
pub(crate) struct Dispatcher {
    wait: WaitSet,
    /// Held while events of the connection manager are taken and processed.
    connections: Mutex<Connections>,
    /// A leaf.
    targets: Targets,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").finish_non_exhaustive()
    }
}

/// Access to the identifiers that a dispatcher serves. While a thread holds it, no event of the
/// connection manager is dispatched.
pub(crate) struct Registry<'a> {
    connections: MutexGuard<'a, Connections>,
    targets: &'a Targets,
    wait: &'a WaitSet,
}

impl Registry<'_> {
    /// The channel for identifiers of this device's backend; the dispatcher also takes the
    /// asynchronous events of the device afterwards.
    pub(crate) fn channel(&mut self, device: &Arc<Device>) -> Result<Arc<EventChannel>> {
        if !self
            .connections
            .devices
            .iter()
            .any(|d| Arc::ptr_eq(d, device))
        {
            self.wait.add(device.async_fd())?;
            self.connections.devices.push(Arc::clone(device));
        }
        self.backend_channel(device.backend())
    }

    /// Adds a keepalive, which wakes the threads that sleep on the dispatcher to probe silent
    /// peers.
    pub(crate) fn watch(&mut self, keepalive: &Arc<Keepalive>) -> Result<()> {
        let known = &mut self.connections.keepalives;
        known.retain(|k| k.strong_count() != 0);
        let new = Arc::downgrade(keepalive);
        if !known.iter().any(|k| k.ptr_eq(&new)) {
            self.wait.add(keepalive.fd())?;
            known.push(new);
        }
        Ok(())
    }

    fn backend_channel(&mut self, backend: &'static Backend) -> Result<Arc<EventChannel>> {
        let known = self.connections.channels.iter();
        if let Some(channel) = known
            .into_iter()
            .find(|known| std::ptr::eq(known.events.backend(), backend))
        {
            return Ok(Arc::clone(&channel.events));
        }
        let events = EventChannel::create(backend)?;
        self.wait.add(events.fd())?;
        self.connections.channels.push(Channel {
            events: Arc::clone(&events),
            error: None,
        });
        Ok(events)
    }

    /// Sets the target of the identifier's events.
    pub(crate) fn insert(&mut self, object: usize, target: Weak<dyn CmTarget>) {
        self.targets.lock().insert(object, target);
    }

    /// Number of identifiers with a target.
    #[cfg(test)]
    pub(crate) fn targets(&self) -> usize {
        self.targets.lock().len()
    }

    /// Removes the identifier's target: its later events are discarded.
    pub(crate) fn remove(&mut self, object: usize) {
        self.targets.lock().remove(&object);
    }
}

impl Dispatcher {
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            wait: WaitSet::new()?,
            connections: Mutex::default(),
            targets: Targets::default(),
        })
    }

    /// The wait object: readable when an event can be taken, and when the dispatcher's owner wakes
    /// the sleeping threads.
    pub(crate) fn wait(&self) -> &WaitSet {
        &self.wait
    }

    pub(crate) fn registry(&self) -> Registry<'_> {
        Registry {
            connections: self.connections.lock(),
            targets: &self.targets,
            wait: &self.wait,
        }
    }

    /// As [`Registry::insert`], inside an event: for the identifier of a request that is being
    /// processed, of which no later event is dispatched meanwhile.
    pub(super) fn insert(&self, object: usize, target: Weak<dyn CmTarget>) {
        self.targets.lock().insert(object, target);
    }

    /// Takes events and passes each to its target, until `enough` returns true after an event, or
    /// each channel is empty or has had 64 events. Does not block itself; a target's step may.
    pub(crate) fn progress(&self, enough: impl Fn() -> bool) -> Found {
        if !self.wait.is_ready() {
            return Found::Events;
        }
        let (devices, keepalives) = {
            let connections = self.connections.lock();
            (connections.devices.clone(), connections.keepalives.clone())
        };
        for device in devices {
            device.dispatch_async();
        }
        for keepalive in keepalives.iter().filter_map(Weak::upgrade) {
            keepalive.woken();
        }
        let mut connections = self.connections.lock();
        let mut found = Found::Events;
        for channel in &mut connections.channels {
            for _ in 0..EVENTS_AT_ONCE {
                match channel.events.next_event() {
                    Ok(event) => self.dispatch(event),
                    Err(error) => {
                        if channel.has_failed(error) {
                            found = Found::Error;
                        }
                        break;
                    }
                }
                if enough() {
                    return found;
                }
            }
        }
        found
    }

    /// Waits until the wait object is readable, at most until the deadline; `None`: no limit.
    /// `found`: what the last [`Self::progress`] has found. After an error it waits at most 20 ms,
    /// and meanwhile for other events than those of the connection manager. Returns false if the
    /// deadline has passed.
    ///
    /// # Errors
    /// `EINTR`: a signal handler ran.
    pub(crate) fn wait_after(&self, found: Found, deadline: Option<Instant>) -> Result<bool> {
        if found == Found::Events {
            return self.wait.wait(deadline);
        }
        let again = Instant::now() + AGAIN;
        let (until, last) = match deadline {
            Some(deadline) if deadline <= again => (deadline, true),
            _ => (again, false),
        };
        let channels: Vec<_> = {
            let connections = self.connections.lock();
            let failed = connections.channels.iter();
            let failed = failed.filter(|channel| channel.error.is_some());
            failed.map(|channel| Arc::clone(&channel.events)).collect()
        };
        let watch = |yes| {
            for channel in &channels {
                self.wait.watch(channel.fd(), yes);
            }
        };
        watch(false);
        let ready = self.wait.wait(Some(until));
        watch(true);
        Ok(ready? || !last)
    }

    /// The caller holds the lock of the connections.
    fn dispatch(&self, mut event: CmEvent) {
        let target = self.targets.lock().get(&event.object).cloned();
        if let Some(target) = target.as_ref().and_then(Weak::upgrade) {
            target.cm_event(event);
        } else if let Some(id) = event.new_id.take() {
            // the listener was closed: dropping the request rejects it
            drop(ConnectRequest::new(id, event.private_data, &[]));
        }
        // otherwise the event is of the identifier of an unanswered request, which has no endpoint
    }
}

impl Channel {
    /// Whether the result of a call is an error other than that the channel is empty. It is logged,
    /// unless it was that of the previous call too.
    fn has_failed(&mut self, error: FiErrno) -> bool {
        let error = (error != FiErrno::EAGAIN).then_some(error);
        let last = std::mem::replace(&mut self.error, error);
        if let Some(error) = error.filter(|error| last != Some(*error)) {
            warn_log!(Eq, "rdma_get_cm_event: {error}");
        }
        error.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::conn::Driver;
    use crate::verbs::{CmId, devices, replaced};

    /// An identifier with an event on a channel.
    fn with_event(channel: &Arc<EventChannel>) -> CmId {
        let id = channel.create_id().unwrap();
        id.resolve_addr(None, (Ipv4Addr::LOCALHOST, 9).into())
            .unwrap();
        id
    }

    /// A peer that dials without end does not keep the driver: what is left makes the descriptor
    /// readable.
    #[test]
    fn one_call_takes_a_limited_number_of_events() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let dispatcher = Dispatcher::new().unwrap();
        let channel = dispatcher.registry().channel(&device).unwrap();
        let ids: Vec<_> = (0..EVENTS_AT_ONCE + 9)
            .map(|_| with_event(&channel))
            .collect();
        assert_eq!(dispatcher.progress(|| false), Found::Events);
        assert!(dispatcher.wait().is_ready());
        for _ in 0..9 {
            channel.next_event().unwrap();
        }
        assert_eq!(channel.next_event().unwrap_err(), FiErrno::EAGAIN);
        assert!(!dispatcher.wait().is_ready());
        drop(ids);
    }

    /// The driver does not spin on a channel whose events cannot be taken, and takes them when they
    /// can be.
    #[test]
    fn a_driver_pauses_after_an_error() {
        let (backend, events) = replaced::with_failing_events();
        let device = devices(&[backend], false).remove(0);
        let driver = Driver::start().unwrap();
        let channel = driver.dispatcher().registry().channel(&device).unwrap();
        let start = Instant::now();
        let limit = start + Duration::from_secs(20);
        let id = with_event(&channel);
        while events.calls.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < limit, "no call");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(AGAIN * 10);
        let calls = events.calls.load(Ordering::Relaxed);
        // on a busy host the sleep takes longer
        let most = start.elapsed().as_millis() / AGAIN.as_millis() + 2;
        assert!(u128::from(calls) <= most, "{calls} calls, at most {most}");
        events.fail.store(false, Ordering::Relaxed);
        while driver.dispatcher().wait().is_ready() || events.taken.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(id);
    }

    /// Meanwhile other events end the wait.
    #[test]
    fn a_wait_after_an_error_ends_by_other_events() {
        let (backend, _) = replaced::with_failing_events();
        let device = devices(&[backend], false).remove(0);
        let dispatcher = Dispatcher::new().unwrap();
        let channel = dispatcher.registry().channel(&device).unwrap();
        let id = with_event(&channel);
        assert_eq!(dispatcher.progress(|| false), Found::Error);
        let begin = Instant::now();
        let deadline = begin + AGAIN / 4;
        assert_eq!(
            dispatcher.wait_after(Found::Error, Some(deadline)),
            Ok(false)
        );
        assert!(begin.elapsed() >= AGAIN / 4);
        assert_eq!(dispatcher.wait_after(Found::Error, None), Ok(true));
        assert!(begin.elapsed() >= AGAIN, "it has waited");
        assert!(dispatcher.wait().is_ready(), "the channel counts again");
        dispatcher.wait().wake();
        let passed = Some(Instant::now());
        assert_eq!(dispatcher.wait_after(Found::Error, passed), Ok(true));
        drop(id);
    }
}
