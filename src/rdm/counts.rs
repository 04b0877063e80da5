//! What an endpoint has counted: a line of the log, and of a file for tests (`FI_WEFT_COUNTS`),
//! when it is closed. None of it is counted on the fast path.

use std::collections::HashSet;

use crate::verbs::QpNumber;

/// Most numbers of targets that are recorded: an endpoint can have peers that come and end for a
/// year. Tests have fewer.
const TARGETS: usize = 1024;

/// The counters of an endpoint on XRC, for the whole time of the endpoint.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Requests for circuits that were sent; those of them that were sent because an earlier one
    /// had no answer.
    pub(super) circuit_requests: u64,
    pub(super) second_requests: u64,
    /// Circuits that were connected and used, and most of them at a time.
    pub(super) circuits: u64,
    pub(super) circuits_most: usize,
    /// Requests for links that were sent, replies and rejections NODE to them, and those without
    /// any answer.
    pub(super) link_requests: u64,
    pub(super) link_replies: u64,
    pub(super) nodes: u64,
    pub(super) link_failures: u64,
    /// Requests of peers that were accepted.
    pub(super) circuits_accepted: u64,
    pub(super) links_accepted: u64,
    /// Most targets that were held at a time, and the numbers of the first [`TARGETS`] of those
    /// that links have used.
    pub(super) targets_most: usize,
    pub(super) targets: HashSet<QpNumber>,
    /// When the endpoint was closed: circuits with links, and the numbers of targets with links.
    pub(super) circuits_at_end: usize,
    pub(super) targets_at_end: Vec<QpNumber>,
    /// Circuits that have failed with links, targets that were moved to their error state, and
    /// packets with unknown tags.
    pub(super) circuits_failed: u64,
    pub(super) targets_failed: u64,
    pub(super) unknown_tags: u64,
    /// Circuits that were ended because no request completed, and events of the receive queue.
    pub(super) stalls: u64,
    pub(super) receives_low: u64,
}

impl Counts {
    /// A link has used a target.
    pub(super) fn count_target(&mut self, number: QpNumber) {
        if self.targets.len() < TARGETS {
            self.targets.insert(number);
        }
    }

    /// The members of a line.
    pub(super) fn members(&self) -> Vec<(&'static str, String)> {
        let sorted = |numbers: &mut dyn Iterator<Item = &QpNumber>| {
            let mut numbers: Vec<_> = numbers.map(|number| number.get()).collect();
            numbers.sort_unstable();
            format!("{numbers:?}")
        };
        vec![
            ("circuit_requests", self.circuit_requests.to_string()),
            ("second_requests", self.second_requests.to_string()),
            ("circuits", self.circuits.to_string()),
            ("circuits_most", self.circuits_most.to_string()),
            ("link_requests", self.link_requests.to_string()),
            ("link_replies", self.link_replies.to_string()),
            ("nodes", self.nodes.to_string()),
            ("link_failures", self.link_failures.to_string()),
            ("circuits_accepted", self.circuits_accepted.to_string()),
            ("links_accepted", self.links_accepted.to_string()),
            ("targets_most", self.targets_most.to_string()),
            ("targets", sorted(&mut self.targets.iter())),
            ("circuits_at_end", self.circuits_at_end.to_string()),
            ("targets_at_end", sorted(&mut self.targets_at_end.iter())),
            ("circuits_failed", self.circuits_failed.to_string()),
            ("targets_failed", self.targets_failed.to_string()),
            ("unknown_tags", self.unknown_tags.to_string()),
            ("stalls", self.stalls.to_string()),
            ("receives_low", self.receives_low.to_string()),
        ]
    }
}

/// An object of JSON with these members, whose values are JSON.
pub(super) fn object(members: &[(&'static str, String)]) -> String {
    let members: Vec<_> = members
        .iter()
        .map(|(name, value)| format!("\"{name}\": {value}"))
        .collect();
    format!("{{{}}}", members.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_targets_is_bounded() {
        let mut counts = Counts::default();
        (1..5000).for_each(|number| counts.count_target(QpNumber::new(number).unwrap()));
        assert_eq!(counts.targets.len(), TARGETS);
    }

    #[test]
    fn counts_are_an_object() {
        let mut counts = Counts {
            links_accepted: 3,
            ..Counts::default()
        };
        counts.targets.extend(QpNumber::new(9));
        counts.targets.extend(QpNumber::new(4));
        let line = object(&counts.members());
        assert!(line.starts_with("{\"circuit_requests\": 0, "), "{line}");
        assert!(line.contains("\"links_accepted\": 3, "), "{line}");
        assert!(line.contains("\"targets\": [4, 9], "), "{line}");
        assert!(line.ends_with("\"receives_low\": 0}"), "{line}");
    }
}
