//! The form that regions of a domain have: libfabric's `mr_mode` bits, and what they ask of descriptors.

use bitflags::bitflags;

bitflags! {
    /// The bits of `domain_attr->mr_mode` (`fi_mr(3)`) that a form of regions uses, with libfabric's
    /// values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Mode: u32 {
        /// `FI_MR_LOCAL`: local buffers are registered by the application.
        const LOCAL = 1 << 2;
        /// `FI_MR_RAW`: peers map raw keys.
        const RAW = 1 << 3;
        /// `FI_MR_VIRT_ADDR`: addresses are virtual ones; else they count from 0.
        const VIRT_ADDR = 1 << 4;
        /// `FI_MR_ALLOCATED`: memory is there when it is registered; else when it is used.
        const ALLOCATED = 1 << 5;
        /// `FI_MR_PROV_KEY`: keys are the provider's; else the application's.
        const PROV_KEY = 1 << 6;
        /// `FI_MR_MMU_NOTIFY`: the application says where pages have changed.
        const MMU_NOTIFY = 1 << 7;
        /// `FI_MR_RMA_EVENT`: regions whose accesses are counted are made disabled.
        const RMA_EVENT = 1 << 8;
        /// `FI_MR_ENDPOINT`: regions belong to endpoints.
        const ENDPOINT = 1 << 9;
    }
}

impl Mode {
    /// What an rkey alone can express.
    pub const NATIVE: Self = Self::VIRT_ADDR.union(Self::ALLOCATED).union(Self::PROV_KEY);
}

/// How regions of a form hold on to their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paging {
    /// Pinned when they are registered.
    Pinned,
    /// By the device, when they are used.
    OnDemand,
    /// Pinned as far as they are there; the application says when that has changed. `whole`: all must be
    /// there at first.
    Refreshed { whole: bool },
}

impl Mode {
    /// On a device that has on-demand paging or not.
    pub(crate) fn paging(self, on_demand: bool) -> Paging {
        match (
            self.contains(Self::ALLOCATED),
            self.contains(Self::MMU_NOTIFY),
        ) {
            (true, false) => Paging::Pinned,
            (true, true) => Paging::Refreshed { whole: true },
            (false, true) if !on_demand => Paging::Refreshed { whole: false },
            // without both the device refuses
            (false, _) => Paging::OnDemand,
        }
    }
}

/// What descriptors of local buffers mean (`fi_mr(3)`, `FI_MR_LOCAL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescRule {
    /// Each buffer that the device reaches has one.
    Required,
    /// NULL, or valid (API 1.22 on).
    Optional,
    /// Anything: not looked at.
    Ignored,
}

/// The form of a domain's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// What the application was asked to do.
    pub mode: Mode,
    /// What its descriptors mean.
    pub desc: DescRule,
}

impl Form {
    /// A form whose descriptors follow from it; `checked` for an application that passes valid ones or
    /// NULL where they are not required (API 1.22 on).
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
    /// The native form, with local registration.
    fn default() -> Self {
        Self::new(Mode::NATIVE | Mode::LOCAL, false)
    }
}
