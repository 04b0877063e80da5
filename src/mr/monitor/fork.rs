//! What a fork does to what was kept: in the parent it is killed, in the child the gate is closed.

#![allow(unsafe_code, reason = "pthread_atfork")]

use std::sync::Once;

use super::{Gate, list};
use crate::log::warn_log;

/// From now on the process's forks are noticed.
pub(crate) fn notice() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: functions of this library, which the C library forgets when it is unloaded.
        let ret = unsafe { libc::pthread_atfork(Some(before), Some(parent), None) };
        if ret != 0 {
            warn_log!(Mr, "pthread_atfork: error {ret}: forks are not noticed");
        }
    });
}

/// The gate, but in a child that forks in its turn: there it is closed, and locks may be ones that nobody opens.
fn own_gate() -> Option<Gate> {
    Gate::get().filter(|gate| !gate.is_forked())
}

unsafe extern "C" fn before() {
    if let Some(gate) = own_gate() {
        gate.close();
    }
}

/// Kernels before 5.12 give the parent other pages when it writes next; kills all that refers to the old ones.
unsafe extern "C" fn parent() {
    if let Some(gate) = own_gate() {
        list::kill(0, u64::MAX);
        gate.open();
    }
}
