//! When peers can't reach a process's memory and files, and the log line about it.

use std::sync::Once;

use crate::{environment, sys};

/// Whether the agent must run from the start: peers can't open this process's files, so they can't
/// request the agent either; or the environment requests it.
pub(crate) fn needed_from_start() -> bool {
    !sys::dumpable() || environment::AGENT.is_on()
}

/// Whether a peer may need an agent of this process. `may_copy` is the peer's own report whether
/// the kernel permits it to copy between processes.
pub(crate) fn needed_for(may_copy: bool) -> bool {
    !may_copy || !sys::dumpable() || sys::yama_restricts() && !environment::PTRACER.is_on()
}

/// Sets `PR_SET_PTRACER` for all processes of the user, if the environment requests it.
pub(crate) fn allow_tracers() {
    if environment::PTRACER.is_on() {
        sys::allow_tracers();
    }
}

/// Logs once per process, including its forked children, that copies use agents. `why` is the end
/// of the line.
pub(crate) fn log_once(why: &str) {
    static REPORTED: Once = Once::new();
    REPORTED.call_once(|| {
        crate::log::say(&format!(
            "softverbs: slower copies between processes, through a thread of the memory's owner: {why}"
        ));
    });
}
