//! Which `mr_mode` comes back: never a bit that was not offered, and only those that are used.

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};

use super::hints::Hints;

/// What an endpoint's registrations need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MrMode {
    /// `domain_attr->mr_mode`
    pub(crate) bits: i32,
    /// `FI_LOCAL_MR` of `fi_info.mode`, the form of `FI_MR_LOCAL` before API 1.5.
    pub(crate) legacy_local: bool,
}

/// The bits of the native form: keys and addresses are the device's, memory is pinned.
const NATIVE: i32 = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

/// Negotiates for an application of API `version`.
///
/// # Errors
/// `ENODATA`: a bit that the native form uses was not offered.
pub(crate) fn negotiate(version: u32, hints: &Hints) -> Result<MrMode> {
    let legacy_local = |offered: bool| {
        // Without hints nothing limits the answer: what is needed is said.
        if offered || hints.mode.is_none_or(|mode| mode & FI_LOCAL_MR != 0) {
            Ok(MrMode {
                bits: FI_MR_BASIC,
                legacy_local: true,
            })
        } else {
            Err(FiErrno::ENODATA)
        }
    };
    let offered = hints.domain.as_ref().map(|domain| domain.mr_mode);
    if version < fi_version(1, 5) {
        // The field was an enumeration: unspecified, basic or scalable.
        return match offered {
            None | Some(FI_MR_UNSPEC | FI_MR_BASIC) => legacy_local(false),
            Some(_) => Err(FiErrno::ENODATA),
        };
    }
    let Some(offered) = offered else {
        return Ok(MrMode {
            bits: NATIVE | FI_MR_LOCAL,
            legacy_local: false,
        });
    };
    if offered & FI_MR_SCALABLE != 0 {
        return Err(FiErrno::ENODATA); // its keys and addresses are the application's
    }
    if offered & FI_MR_BASIC != 0 {
        // Basic stands for the three bits; fi_mr(3) lets only FI_MR_LOCAL stand beside it, up to 1.8.
        return match offered & !FI_MR_BASIC {
            0 => legacy_local(false),
            FI_MR_LOCAL if version <= fi_version(1, 8) => Ok(MrMode {
                bits: FI_MR_BASIC | FI_MR_LOCAL,
                legacy_local: false,
            }),
            _ => Err(FiErrno::ENODATA),
        };
    }
    // Local buffers are registered by the application: the device needs an lkey for each.
    let needed = NATIVE | FI_MR_LOCAL;
    if offered & needed == needed {
        Ok(MrMode {
            bits: needed,
            legacy_local: false,
        })
    } else {
        Err(FiErrno::ENODATA)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::getinfo::hints::DomainHints;

    fn offering(mr_mode: i32, mode: u64) -> Hints {
        Hints {
            mode: Some(mode),
            domain: Some(DomainHints {
                mr_mode,
                ..DomainHints::default()
            }),
            ..Hints::default()
        }
    }

    #[test]
    fn no_bit_comes_back_that_was_not_offered() {
        for version in [
            fi_version(1, 5),
            fi_version(1, 8),
            fi_version(1, 21),
            fi_version(2, 1),
        ] {
            for offered in 0..4096 {
                if let Ok(mode) = negotiate(version, &offering(offered, 0)) {
                    assert_eq!(mode.bits & !offered, 0, "{offered:#x} gave {mode:?}");
                    assert!(!mode.legacy_local);
                }
            }
        }
    }

    #[test]
    fn the_native_form_needs_its_bits() {
        let version = fi_version(1, 21);
        let all = NATIVE | FI_MR_LOCAL;
        assert!(negotiate(version, &offering(all, 0)).is_ok());
        assert!(negotiate(version, &offering(all | FI_MR_ENDPOINT, 0)).is_ok());
        for bit in [
            FI_MR_VIRT_ADDR,
            FI_MR_ALLOCATED,
            FI_MR_PROV_KEY,
            FI_MR_LOCAL,
        ] {
            assert_eq!(
                negotiate(version, &offering(all & !bit, 0)),
                Err(FiErrno::ENODATA)
            );
        }
        assert_eq!(negotiate(version, &offering(0, 0)), Err(FiErrno::ENODATA));
    }

    #[test]
    fn old_forms_follow_their_version() {
        let old = fi_version(1, 4);
        let basic = MrMode {
            bits: FI_MR_BASIC,
            legacy_local: true,
        };
        assert_eq!(
            negotiate(old, &offering(FI_MR_UNSPEC, FI_LOCAL_MR)),
            Ok(basic)
        );
        assert_eq!(negotiate(old, &Hints::default()), Ok(basic));
        assert!(negotiate(old, &offering(FI_MR_BASIC, 0)).is_err());
        assert!(negotiate(old, &offering(FI_MR_SCALABLE, FI_LOCAL_MR)).is_err());
        let both = offering(FI_MR_BASIC | FI_MR_LOCAL, 0);
        assert!(negotiate(fi_version(1, 8), &both).is_ok());
        assert!(negotiate(fi_version(1, 9), &both).is_err());
    }
}
