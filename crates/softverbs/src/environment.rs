//! The environment variables of the device. Nothing else in this crate reads the environment, and
//! fi_weft(7) has this list.

use std::ffi::OsString;

/// A variable of the environment.
#[derive(Debug)]
pub(crate) struct Variable {
    name: &'static str,
    /// As the manual page has it.
    #[cfg_attr(not(test), allow(dead_code, reason = "compared with the manual page"))]
    help: &'static str,
}

impl Variable {
    const fn new(name: &'static str, help: &'static str) -> Self {
        Self { name, help }
    }

    /// Its value, `None` if it is not set.
    pub(crate) fn value(&self) -> Option<OsString> {
        std::env::var_os(self.name)
    }

    /// The variable's value as a number; `None`: not set, or not a number.
    pub(crate) fn number<T: std::str::FromStr>(&self) -> Option<T> {
        self.value()?.to_str()?.parse().ok()
    }

    /// Whether the variable has the value 1.
    pub(crate) fn is_on(&self) -> bool {
        self.value().is_some_and(|value| value == "1")
    }
}

/// On-demand paging: [`crate::region`].
pub(crate) static ODP: Variable = Variable::new(
    "SOFTVERBS_ODP",
    "0: a device without on-demand paging, which pins memory as most devices do (default: 1)",
);
/// The thread that copies for peers: [`crate::agent`].
pub(crate) static AGENT: Variable = Variable::new(
    "SOFTVERBS_AGENT",
    "1: start the thread that copies on behalf of peers with the device, not when a peer needs it (default: 0)",
);
/// Yama: [`crate::agent`].
pub(crate) static PTRACER: Variable = Variable::new(
    "SOFTVERBS_PTRACER",
    "1: if Yama restricts ptrace(2), permit every process of the user to read, write and trace this one (default: 0)",
);
/// Deadline of a connection request: [`crate::cm`].
pub(crate) static CM_TIMEOUT_MS: Variable = Variable::new(
    "SOFTVERBS_CM_TIMEOUT_MS",
    "Milliseconds until a connection request without an answer fails (default: 68719)",
);
/// Emulated node of this process.
pub(crate) static NODE: Variable = Variable::new(
    "SOFTVERBS_NODE",
    "For tests: number of the emulated node of this process, 0 to 4095 (default: 0)",
);
/// Shared receive queues: [`crate::srq`].
pub(crate) static SRQ: Variable = Variable::new(
    "SOFTVERBS_SRQ",
    "For tests: 0 is a device without shared receive queues, as some are (default: 1)",
);
/// Receive rings: [`crate::receive_ring`].
pub(crate) static RING: Variable = Variable::new(
    "SOFTVERBS_RING",
    "For tests: 0 is a device without receive rings, as all others are (default: 1)",
);
/// Atomics of all datatypes: [`crate::region`].
pub(crate) static ATOMICS: Variable = Variable::new(
    "SOFTVERBS_ATOMICS",
    "For tests: 0 is a device with the atomics of verbs alone, as all others are (default: 1)",
);
/// Key reuse: [`crate::region`].
pub(crate) static REUSE_KEYS: Variable = Variable::new(
    "SOFTVERBS_REUSE_KEYS",
    "For tests: 1 reuses the key of a deregistered region at once (default: 0)",
);
/// Reuse of the numbers of shared receive queues: [`crate::process`], [`crate::registry`].
pub(crate) static REUSE_SRQ: Variable = Variable::new(
    "SOFTVERBS_REUSE_SRQ",
    "For tests: 1 gives the number of a shared receive queue to the next one at once, also to that of the next process when its owner has ended (default: 0)",
);
/// Limit of locked memory: [`crate::region`].
pub(crate) static MEMLOCK: Variable = Variable::new(
    "SOFTVERBS_MEMLOCK",
    "For tests: 1 counts registered memory as locked, and limits it to RLIMIT_MEMLOCK as the kernel does (default: 0)",
);
/// Fences in the place of membarrier(2): [`crate::sync`].
pub(crate) static NO_MEMBARRIER: Variable = Variable::new(
    "SOFTVERBS_NO_MEMBARRIER",
    "For tests: set to any value, replaces membarrier(2) by fences on the fast path (default: not set)",
);
/// Counts of requests: [`crate::qp`].
pub(crate) static COUNTS: Variable = Variable::new(
    "SOFTVERBS_COUNTS",
    "For tests: file to which each queue pair appends a line with the number of its RDMA writes, RDMA reads and atomics when it is destroyed (default: none)",
);
/// A directory for the registry: [`crate::registry`].
pub(crate) static RUNTIME_DIR: Variable = Variable::new(
    "XDG_RUNTIME_DIR",
    "Directory tried for the registry of soft0's processes after /dev/shm and before /tmp (default: none)",
);

#[cfg(test)]
mod tests {
    use super::*;

    static ALL: [&Variable; 14] = [
        &ODP,
        &AGENT,
        &PTRACER,
        &CM_TIMEOUT_MS,
        &NODE,
        &SRQ,
        &RING,
        &ATOMICS,
        &REUSE_KEYS,
        &REUSE_SRQ,
        &MEMLOCK,
        &NO_MEMBARRIER,
        &COUNTS,
        &RUNTIME_DIR,
    ];

    /// The page's list, as `(name, help)`; its lines are broken.
    fn documented(page: &str) -> Vec<(&str, String)> {
        let (_, section) = page
            .split_once("\n# ENVIRONMENT OF SOFT0\n")
            .expect("the section of the variables");
        let (section, _) = section.split_once("\n# ").unwrap_or((section, ""));
        let pairs = section.split("\n*").skip(1);
        pairs
            .map(|pair| pair.split_once("*\n: ").expect("a name and its text"))
            .map(|(name, help)| (name, help.split_whitespace().collect::<Vec<_>>().join(" ")))
            .collect()
    }

    #[test]
    fn the_manual_page_has_each_variable_with_its_text() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/man/fi_weft.7.md");
        let page = std::fs::read_to_string(page).unwrap();
        let list = ALL.map(|variable| (variable.name, variable.help.to_owned()));
        assert_eq!(documented(&page), list);
    }

    #[test]
    fn the_list_has_every_variable_of_this_file() {
        let declared = include_str!("environment.rs")
            .matches("\npub(crate) static ")
            .count();
        assert_eq!(declared, ALL.len());
    }
}
