//! Counts of one-sided requests, for tests that must know whether an application's access was
//! executed by the device.

use std::ffi::OsString;
use std::io::Write;
use std::sync::OnceLock;

use rdma_core_sys::*;

use crate::environment;

/// Requests of one send queue that have completed with success. The send queue's lock protects
/// them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    writes: u64,
    reads: u64,
    atomics: u64,
}

impl Counts {
    pub(super) fn add(&mut self, opcode: u32) {
        match opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => self.writes += 1,
            IBV_WR_RDMA_READ => self.reads += 1,
            IBV_WR_ATOMIC_CMP_AND_SWP
            | IBV_WR_ATOMIC_FETCH_AND_ADD
            | IBV_WR_ATOMIC_WRITE
            | SOFTDV_WR_ATOMIC => self.atomics += 1,
            _ => {}
        }
    }

    /// Appends the counts to the file of the environment, if there is one; a queue pair without
    /// such requests has no line. Called outside the fast path.
    pub(super) fn write(self) {
        static FILE: OnceLock<Option<OsString>> = OnceLock::new();
        let Some(file) = FILE.get_or_init(|| environment::COUNTS.value()) else {
            return;
        };
        if self.writes + self.reads + self.atomics == 0 {
            return;
        }
        let line = format!(
            "writes {} reads {} atomics {}\n",
            self.writes, self.reads, self.atomics
        );
        let opened = std::fs::File::options()
            .append(true)
            .create(true)
            .open(file);
        // one call of write(2), so that the lines of several processes do not mix
        if let Err(error) = opened.and_then(|mut file| file.write_all(line.as_bytes())) {
            crate::log::say(&format!("softverbs: counts of requests: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sided_requests_are_counted_by_kind() {
        let mut counts = Counts::default();
        for opcode in [
            IBV_WR_SEND,
            IBV_WR_RDMA_WRITE,
            IBV_WR_RDMA_WRITE_WITH_IMM,
            IBV_WR_RDMA_READ,
            IBV_WR_ATOMIC_CMP_AND_SWP,
            IBV_WR_ATOMIC_FETCH_AND_ADD,
            IBV_WR_ATOMIC_WRITE,
            SOFTDV_WR_ATOMIC,
            IBV_WR_LOCAL_INV,
        ] {
            counts.add(opcode);
        }
        assert_eq!((counts.writes, counts.reads, counts.atomics), (2, 1, 4));
    }
}
