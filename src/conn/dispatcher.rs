//! Event channels of the connection manager, and the objects that receive their events.
//!
//! A dispatcher has one event channel per backend in use. It also wakes the threads that sleep on
//! it for asynchronous events of the devices and for the keepalive of its connections' domains.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

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

#[derive(Default)]
struct Connections {
    channels: Vec<Arc<EventChannel>>,
    devices: Vec<Arc<Device>>,
    keepalives: Vec<Weak<Keepalive>>,
    targets: HashMap<usize, Weak<dyn CmTarget>>,
}

/// Takes the events of identifiers and passes them to their targets. Thread safe.
pub(crate) struct Dispatcher {
    wait: WaitSet,
    /// Held while events of the connection manager are taken and processed.
    connections: Mutex<Connections>,
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
            .find(|c| std::ptr::eq(c.backend(), backend))
        {
            return Ok(Arc::clone(channel));
        }
        let channel = EventChannel::create(backend)?;
        self.wait.add(channel.fd())?;
        self.connections.channels.push(Arc::clone(&channel));
        Ok(channel)
    }

    /// Sets the target of the identifier's events.
    pub(crate) fn insert(&mut self, object: usize, target: Weak<dyn CmTarget>) {
        self.connections.targets.insert(object, target);
    }

    /// Removes the identifier's target: its later events are discarded.
    pub(crate) fn remove(&mut self, object: usize) {
        self.connections.targets.remove(&object);
    }
}

impl Dispatcher {
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            wait: WaitSet::new()?,
            connections: Mutex::default(),
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
            wait: &self.wait,
        }
    }

    /// Takes events and passes each to its target, until none is left or `enough` returns true
    /// after an event. Does not block itself; a target's step may.
    pub(crate) fn progress(&self, enough: impl Fn() -> bool) {
        if !self.wait.is_ready() {
            return;
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
        let connections = self.connections.lock();
        for channel in &connections.channels {
            loop {
                match channel.next_event() {
                    Ok(event) => connections.dispatch(event),
                    Err(FiErrno::EAGAIN) => break,
                    Err(error) => {
                        warn_log!(Eq, "rdma_get_cm_event: {error}");
                        break;
                    }
                }
                if enough() {
                    return;
                }
            }
        }
    }
}

impl Connections {
    fn dispatch(&self, mut event: CmEvent) {
        let target = self.targets.get(&event.object);
        if let Some(target) = target.and_then(Weak::upgrade) {
            target.cm_event(event);
        } else if let Some(id) = event.new_id.take() {
            // the listener was closed: dropping the request rejects it
            drop(ConnectRequest::new(id, event.private_data, &[]));
        }
        // otherwise the event is of the identifier of an unanswered request, which has no endpoint
    }
}
