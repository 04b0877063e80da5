//! When a process is out of others' reach, and what is said about it.

use std::sync::Once;

use crate::{environment, sys};

/// Whether peers can't open this process's files, so that they can't ask for an agent either; or it is asked for.
pub(crate) fn needed_from_start() -> bool {
    !sys::dumpable() || environment::AGENT.is_on()
}

/// Whether a peer may need an agent of this process. `copies` is what the peer says of itself: that the kernel lets
/// it copy between processes.
pub(crate) fn needed_for(copies: bool) -> bool {
    !copies || !sys::dumpable() || sys::yama_restricts() && !environment::PTRACER.is_on()
}

/// Has Yama let every process of the user read this one's memory, where whoever started it asks for that.
pub(crate) fn allow_tracers() {
    if environment::PTRACER.is_on() {
        sys::allow_tracers();
    }
}

/// Says once in the life of the process, and of its children, that copies go by agents. `why` ends the line.
pub(crate) fn tell(why: &str) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        crate::log::say(&format!(
            "softverbs: slower copies, by a thread of the memory's owner: {why}"
        ));
    });
}
