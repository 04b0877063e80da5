//! The part of a domain that completion queues and counters use.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::helper::Helper;
use super::keepalive::{Keepalive, PERIOD};
use crate::errno::Result;
use crate::verbs::{Device, Pd};

/// A thread of the domain whose work a thread that polls can do. On a machine with more running
/// threads than processors, a thread that polls can keep it from the processor, and from the locks
/// that both need.
pub(crate) trait Assisted: Send + Sync {
    /// Does what the thread has to do now, unless another caller has looked a moment ago. The
    /// caller holds no lock.
    fn assist(&self);
}

/// The device of a domain's queues, and the timers that their readers drive. Thread safe.
#[derive(Debug)]
pub struct QueueDomain {
    /// The domain's own protection domain, which identifies the domain.
    pd: Arc<Pd>,
    keepalive: Option<Arc<Keepalive>>,
    helper: Helper,
    /// The thread that polling threads assist, once it was started.
    assisted: OnceLock<Weak<dyn Assisted>>,
}

impl QueueDomain {
    /// `period` after which a connected endpoint probes a silent peer: `None` for the engine's
    /// choice, zero for never.
    ///
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn new(pd: Arc<Pd>, period: Option<Duration>) -> Result<Arc<Self>> {
        let period = match period {
            Some(period) => period,
            None if pd.device().needs_keepalive() => PERIOD,
            None => Duration::ZERO,
        };
        let keepalive = if period.is_zero() {
            None
        } else {
            Some(Arc::new(Keepalive::new(period)?))
        };
        Ok(Arc::new(Self {
            pd,
            keepalive,
            helper: Helper::default(),
            assisted: OnceLock::new(),
        }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    /// The domain's own protection domain: no other domain has it.
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The helper thread: retries deferred operations when no other thread does.
    pub(crate) fn helper(&self) -> &Helper {
        &self.helper
    }

    /// The keepalive of the domain's connections, on devices that do not detect dead peers.
    pub(crate) fn keepalive(&self) -> Option<&Arc<Keepalive>> {
        self.keepalive.as_ref()
    }

    /// Sets the thread that polling threads assist. Only the first call has an effect.
    pub(crate) fn set_assisted(&self, thread: Weak<dyn Assisted>) {
        let _ = self.assisted.set(thread);
    }

    /// Called now and then by a thread that polls and holds no lock: assists the domain's thread,
    /// and probes silent peers if the keepalive period has passed.
    pub(crate) fn help_from_poll(&self) {
        if let Some(thread) = self.assisted.get().and_then(Weak::upgrade) {
            thread.assist();
        }
        if let Some(keepalive) = &self.keepalive {
            keepalive.poll();
        }
    }
}
