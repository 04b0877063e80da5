//! The memory registration mode of a domain: libfabric's `mr_mode` bits, and the rule for
//! descriptors.

use bitflags::bitflags;

bitflags! {
    /// The bits of `domain_attr->mr_mode` (`fi_mr(3)`) that weft supports, with libfabric's values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Mode: u32 {
        /// `FI_MR_LOCAL`: the application registers local buffers.
        const LOCAL = 1 << 2;
        /// `FI_MR_RAW`: peers map raw keys with `fi_mr_map_raw(3)`.
        const RAW = 1 << 3;
        /// `FI_MR_VIRT_ADDR`: peers use virtual addresses; without it, offsets in the region.
        const VIRT_ADDR = 1 << 4;
        /// `FI_MR_ALLOCATED`: memory has its pages when it is registered; without it, when it is
        /// accessed.
        const ALLOCATED = 1 << 5;
        /// `FI_MR_PROV_KEY`: the provider chooses keys; without it, the application.
        const PROV_KEY = 1 << 6;
        /// `FI_MR_MMU_NOTIFY`: the application reports changes of pages with `fi_mr_refresh(3)`.
        const MMU_NOTIFY = 1 << 7;
        /// `FI_MR_RMA_EVENT`: regions with counted accesses are created disabled.
        const RMA_EVENT = 1 << 8;
        /// `FI_MR_ENDPOINT`: regions are bound to endpoints.
        const ENDPOINT = 1 << 9;
    }
}

impl Mode {
    /// The mode that an rkey implements without a key directory.
    pub const NATIVE: Self = Self::VIRT_ADDR.union(Self::ALLOCATED).union(Self::PROV_KEY);
}

/// How the pages of a mode's regions are kept present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paging {
    /// Pinned at registration.
    Pinned,
    /// The device faults pages in on access.
    OnDemand,
    /// Regions have no registration. For a mode that needs on-demand paging, on a device without
    /// it: local buffers are used as if they had no descriptor, and peers access no region.
    Unregistered,
    /// Pinned where present; the application reports changes. `whole`: all pages must be present at
    /// registration.
    Refreshed { whole: bool },
}

impl Mode {
    /// The paging of this mode. `on_demand`: whether the device has on-demand paging that works.
    pub(crate) fn paging(self, on_demand: bool) -> Paging {
        match (
            self.contains(Self::ALLOCATED),
            self.contains(Self::MMU_NOTIFY),
        ) {
            (true, false) => Paging::Pinned,
            (true, true) => Paging::Refreshed { whole: true },
            (false, _) if on_demand => Paging::OnDemand,
            (false, true) => Paging::Refreshed { whole: false },
            // The application may exchange the pages without a report, so they cannot be pinned.
            (false, false) => Paging::Unregistered,
        }
    }
}

/// The rule for descriptors of local buffers (`fi_mr(3)`, `FI_MR_LOCAL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescRule {
    /// Every buffer that the device accesses needs a valid descriptor.
    Required,
    /// NULL or valid (API 1.22 and later).
    Optional,
    /// Not read; any value is allowed.
    Ignored,
}

/// The registration mode and descriptor rule of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// The `mr_mode` bits that the application must follow.
    pub mode: Mode,
    /// The rule for its descriptors.
    pub desc: DescRule,
}

impl Form {
    /// The form of a mode. `checked`: where descriptors are not required, the application passes
    /// valid ones or NULL (API 1.22 and later).
    pub fn new(mode: Mode, checked: bool) -> Self {
        let desc = if mode.contains(Mode::LOCAL) {
            DescRule::Required
        } else if checked {
            DescRule::Optional
        } else {
            DescRule::Ignored
        };
        Self { mode, desc }
    }
}

impl Default for Form {
    /// The native mode, with local registration.
    fn default() -> Self {
        Self::new(Mode::NATIVE | Mode::LOCAL, false)
    }
}
