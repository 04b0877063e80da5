//! The device completion queue of an endpoint, and how many links have room in it.

use std::sync::Arc;

use super::Endpoint;
use crate::errno::Result;
use crate::rdm::limits::max_descriptors;
use crate::verbs::{CompChannel, Cq, Device};

/// Creates a queue with room for so many receives and the first links, which is resized for further
/// ones; or a larger one, if the device cannot resize queues: with 65,536 entries, for 960 links
/// without RMA or 391 with it. Returns it, and the maximum number of its entries, which is at least
/// `receives`. Without memory for the larger one, links are evicted earlier.
///
/// # Errors
/// `ENOMEM`, `EMFILE`.
pub(super) fn create(
    device: &Arc<Device>,
    receives: usize,
    channel: &Arc<CompChannel>,
) -> Result<(Arc<Cq>, usize)> {
    let most = device.attr().max_cqe;
    let first = (receives * 2).min(most);
    let (cq, resizable) = Cq::create_growing(device, first, Some(channel), 0)?;
    let entries = if resizable { most } else { cq.cqe() };
    Ok((Arc::new(cq), entries.max(receives)))
}

impl Endpoint {
    /// Maximum number of links of an endpoint: 3/4 of what the device and the process have, because
    /// others need some too, and as many as the completion queue has room for, that is `entries`
    /// beside those of receives. On XRC circuits and held targets are counted, and no descriptors.
    pub(super) fn max_links(&self, entries: usize) -> usize {
        let shared = self.shared();
        let attr = shared.domain.device().attr();
        // the queue pair of a further link may be created before that of a removed one is destroyed
        let entries = (entries / shared.depth()).saturating_sub(1);
        let descriptors = match shared.config.xrc {
            true => usize::MAX,
            false => max_descriptors(),
        };
        let default = attr.max_qp.min(descriptors) / 4 * 3;
        let wanted = shared.config.max_links.unwrap_or(default);
        // on XRC a link needs a circuit and a target
        let least = if shared.config.xrc { 2 } else { 1 };
        wanted.min(attr.max_qp).min(entries).max(least)
    }
}
