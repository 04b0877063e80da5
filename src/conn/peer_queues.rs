//! The receive queues of peers to which the connected endpoints of a domain on XRC are connected.
//! `docs/protocol-xrc.md`, "Stale SRQ numbers".

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Weak;

use super::circuit::CircuitUser;
use crate::verbs::SrqNumber;

/// The endpoints that are connected to one receive queue of one process.
#[derive(Debug)]
struct PeerQueue {
    /// Where the process takes notices.
    process: SocketAddr,
    users: Vec<Weak<dyn CircuitUser>>,
}

/// The receive queues to which a domain's endpoints are connected, by IP address and number.
#[derive(Debug, Default)]
pub(super) struct PeerQueues {
    queues: HashMap<(IpAddr, SrqNumber), PeerQueue>,
    /// The number of queues at which those without users are removed.
    prune_at: usize,
}

impl PeerQueues {
    /// Adds a user of a queue. Returns the users of an ended queue that had this number: two queues
    /// of one device that live have different ones.
    pub(super) fn add(
        &mut self,
        srq: SrqNumber,
        process: SocketAddr,
        user: Weak<dyn CircuitUser>,
    ) -> Vec<Weak<dyn CircuitUser>> {
        let lives = |user: &Weak<dyn CircuitUser>| user.strong_count() != 0;
        if self.queues.len() >= self.prune_at {
            self.queues.retain(|_, queue| queue.users.iter().any(lives));
            self.prune_at = (2 * self.queues.len()).max(64);
        }
        let queue = self.queues.entry((process.ip(), srq));
        let queue = queue.or_insert_with(|| PeerQueue {
            process,
            users: Vec::new(),
        });
        let mut ended = Vec::new();
        if queue.process != process {
            queue.process = process;
            ended = std::mem::take(&mut queue.users);
        }
        queue.users.retain(lives);
        queue.users.push(user);
        ended
    }

    /// Where the process of a queue takes notices, if a user is connected to it. The number of a
    /// queue whose users have ended can be that of another process by now.
    pub(super) fn process(&self, ip: IpAddr, srq: SrqNumber) -> Option<SocketAddr> {
        let queue = self.queues.get(&(ip, srq))?;
        let is_used = queue.users.iter().any(|user| user.strong_count() != 0);
        is_used.then_some(queue.process)
    }
}
