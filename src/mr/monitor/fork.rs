//! Effect of a fork on cached registrations: the parent invalidates all; the child's gate stays
//! closed.

#![allow(unsafe_code, reason = "pthread_atfork")]

use std::sync::Once;

use super::{Gate, list};
use crate::log::warn_log;

/// Installs the fork handlers, once for the process.
pub(crate) fn notice() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: functions of this library; the C library removes them when the library is
        // unloaded.
        let ret = unsafe { libc::pthread_atfork(Some(before), Some(parent), None) };
        if ret != 0 {
            warn_log!(
                Mr,
                "pthread_atfork: error {ret}: a fork does not invalidate cached registrations"
            );
        }
    });
}

/// The gate, unless this process is a forked child that forks again: its gate is closed, and other
/// threads of the parent may have held the locks at the fork.
fn own_gate() -> Option<Gate> {
    Gate::get().filter(|gate| !gate.is_forked())
}

unsafe extern "C" fn before() {
    if let Some(gate) = own_gate() {
        gate.close();
    }
}

/// Invalidates all registrations: a kernel before 5.12 gives the parent new pages at its next
/// write, and the device has the old ones.
unsafe extern "C" fn parent() {
    if let Some(gate) = own_gate() {
        list::kill(0, u64::MAX);
        gate.open();
    }
}
