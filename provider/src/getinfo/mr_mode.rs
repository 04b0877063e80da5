//! The `mr_mode` of an answer: it contains only bits that the application offered and that the
//! provider uses.
//!
//! `docs/mr-modes.md` has the order of the forms.

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::{Form, Mode};
use weft::wire::raw_key::MAX_RAW_KEY_SIZE;

use super::hints::Hints;
use super::offer::{MR_KEY_SIZE, Offer};

/// The requirements of an endpoint's registrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MrMode {
    /// `domain_attr->mr_mode`
    pub(crate) bits: i32,
    /// `FI_LOCAL_MR` of `fi_info.mode`, the form of `FI_MR_LOCAL` before API 1.5.
    pub(crate) legacy_local: bool,
    /// The modes that `bits` and `legacy_local` mean.
    pub(crate) mode: Mode,
}

impl MrMode {
    /// A form that has one `mr_mode` bit for each mode.
    fn plain(mode: Mode) -> Self {
        Self {
            bits: mode.bits().cast_signed(),
            legacy_local: false,
            mode,
        }
    }

    /// A form with one of the two values that meant several modes before API 1.5.
    fn old(bits: i32, legacy_local: bool) -> Self {
        let mut mode = if bits & FI_MR_BASIC != 0 {
            Mode::NATIVE
        } else {
            Mode::empty()
        };
        mode.set(Mode::LOCAL, legacy_local || bits & FI_MR_LOCAL != 0);
        Self {
            bits,
            legacy_local,
            mode,
        }
    }

    /// Bytes of its keys (`mr_key_size`).
    pub(crate) fn key_size(self) -> usize {
        if self.mode.contains(Mode::RAW) {
            MAX_RAW_KEY_SIZE
        } else {
            MR_KEY_SIZE
        }
    }

    /// The form for the engine. Descriptors are valid or NULL from API 1.22 on (fi_mr(3) there).
    pub(crate) fn form(self, version: u32) -> Form {
        Form::new(self.mode, version >= fi_version(1, 22))
    }
}

/// The abilities of a device that make mode bits unnecessary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Able {
    /// Memory without pages can be registered (`FI_MR_ALLOCATED` off).
    pub(crate) on_demand: bool,
    /// Peers' operations on a region can be counted (`FI_MR_RMA_EVENT`).
    pub(crate) events: bool,
}

impl Able {
    pub(crate) fn of(offer: &Offer) -> Self {
        Self {
            on_demand: offer.on_demand(),
            events: offer.events,
        }
    }
}

/// The bits that a form can have.
const KNOWN: Mode = Mode::NATIVE
    .union(Mode::LOCAL)
    .union(Mode::RAW)
    .union(Mode::MMU_NOTIFY)
    .union(Mode::RMA_EVENT)
    .union(Mode::ENDPOINT);

/// Bits that are not added to a form merely because the application offered them. Forms with one of
/// these bits come last.
const SPECIAL: Mode = Mode::RAW.union(Mode::RMA_EVENT).union(Mode::ENDPOINT);

/// The forms for an application of API `version`, best first. With `forced`, only that form.
///
/// # Errors
/// `ENODATA`: the application did not offer a bit that every form of the device uses, or offered
/// bits that exclude each other.
pub(crate) fn forms(
    version: u32,
    hints: &Hints,
    able: impl Fn() -> Able,
    forced: Option<Mode>,
) -> Result<Vec<MrMode>> {
    let offered = offers(version, hints)?;
    let counting = counts(hints);
    if counting && !able().events {
        return Err(FiErrno::ENODATA);
    }
    let mut forms = offered.forms(&able, counting);
    if let Some(forced) = forced {
        // only if the application offered it: as single bits, or as a value from before API 1.5
        forms = match offered {
            Offered::Bits { bits, exact }
                if bits.contains(forced) && (!exact || bits == forced) =>
            {
                vec![MrMode::plain(forced)]
            }
            _ => forms
                .into_iter()
                .filter(|form| form.mode == forced)
                .collect(),
        };
    }
    forms.retain(|form| works(form.mode, &able));
    if forms.is_empty() {
        return Err(FiErrno::ENODATA);
    }
    Ok(forms)
}

/// As [`forms`], for endpoints with many peers that access no region: the form without bits, unless
/// the application offered a value from before API 1.5. Every device supports it: without on-demand
/// paging the engine registers no regions, and uses local buffers without their descriptors.
///
/// # Errors
/// As [`forms`].
pub(crate) fn local_forms(
    version: u32,
    hints: &Hints,
    forced: Option<Mode>,
) -> Result<Vec<MrMode>> {
    let mut hints = hints.clone();
    hints.mode = Some(hints.mode.unwrap_or(0) & !FI_LOCAL_MR);
    let domain = hints.domain.get_or_insert_default();
    let old = FI_MR_BASIC | FI_MR_SCALABLE;
    if version >= fi_version(1, 5) && domain.mr_mode & old == 0 && !hints.exact && forced.is_none()
    {
        domain.mr_mode = 0;
    }
    let able = || Able {
        on_demand: true,
        events: true,
    };
    forms(version, &hints, able, forced)
}

/// The forms of regions of an offer, best first.
///
/// # Errors
/// As [`forms`].
pub(crate) fn of_offer(
    version: u32,
    hints: &Hints,
    offer: &Offer,
    forced: Option<Mode>,
) -> Result<Vec<MrMode>> {
    let mut forms = match is_local(hints, offer) {
        true => local_forms(version, hints, forced),
        false => forms(version, hints, || Able::of(offer), forced),
    }?;
    if offer.ep.xrc {
        forms.retain(|form| is_protected_on_xrc(form.mode));
    }
    if forms.is_empty() {
        return Err(FiErrno::ENODATA);
    }
    Ok(forms)
}

/// Whether endpoints on XRC have regions of this form. Every peer that reaches one endpoint of an
/// XRC domain can name the receive queues of all, so a region cannot belong to one endpoint.
fn is_protected_on_xrc(mode: Mode) -> bool {
    !mode.contains(Mode::ENDPOINT)
}

/// Whether peers access no region of the endpoints that the hints request.
fn is_local(hints: &Hints, offer: &Offer) -> bool {
    let sides = hints.tx.map_or(0, |tx| tx.caps) | hints.rx.map_or(0, |rx| rx.caps);
    let primary = (hints.caps | sides) & offer.ep.primary_caps;
    // 0: all capabilities. Connected endpoints have one form for each answer.
    offer.ep.number == FI_EP_RDM && primary != 0 && primary & (FI_RMA | FI_ATOMIC) == 0
}

/// Whether peers' operations on regions are to be counted.
pub(crate) fn counts(hints: &Hints) -> bool {
    (hints.caps | hints.rx.map_or(0, |rx| rx.caps)) & FI_RMA_EVENT != 0
}

/// Whether a device supports a form.
fn works(mode: Mode, able: &impl Fn() -> Able) -> bool {
    KNOWN.contains(mode)
        && (mode.intersects(Mode::ALLOCATED | Mode::MMU_NOTIFY) || able().on_demand)
        && (!mode.contains(Mode::RMA_EVENT) || able().events)
}

/// The application's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offered {
    /// Single bits. `exact`: they are the form of an object, so no other form is possible.
    Bits { bits: Mode, exact: bool },
    /// `FI_MR_BASIC` with these bits, and whether `FI_LOCAL_MR`.
    Basic(i32, bool),
    /// `FI_MR_SCALABLE`, and whether `FI_LOCAL_MR`.
    Scalable(bool),
    /// Either of the last two.
    Unspecified(bool),
}

fn offers(version: u32, hints: &Hints) -> Result<Offered> {
    // Without hints nothing limits the answer, and the first form is the best one for the device.
    let local = hints.mode.is_none_or(|mode| mode & FI_LOCAL_MR != 0);
    let offered = hints.domain.as_ref().map(|domain| domain.mr_mode);
    if version < fi_version(1, 5) {
        // Before API 1.5 the field was an enumeration: unspecified, basic or scalable.
        return match offered {
            None | Some(FI_MR_UNSPEC) => Ok(Offered::Unspecified(local)),
            Some(FI_MR_BASIC) => Ok(Offered::Basic(FI_MR_BASIC, local)),
            Some(FI_MR_SCALABLE) => Ok(Offered::Scalable(local)),
            Some(_) => Err(FiErrno::ENODATA),
        };
    }
    let Some(offered) = offered else {
        return Ok(Offered::Bits {
            bits: Mode::NATIVE | Mode::LOCAL,
            exact: true,
        });
    };
    match offered & (FI_MR_BASIC | FI_MR_SCALABLE) {
        0 => Ok(Offered::Bits {
            bits: Mode::from_bits_truncate(offered.cast_unsigned()) & KNOWN,
            exact: hints.exact,
        }),
        // Both exclude other bits; up to 1.8, fi_mr(3) allows FI_MR_LOCAL with FI_MR_BASIC.
        FI_MR_BASIC => match offered & !FI_MR_BASIC {
            0 => Ok(Offered::Basic(FI_MR_BASIC, local)),
            FI_MR_LOCAL if version <= fi_version(1, 8) => {
                Ok(Offered::Basic(FI_MR_BASIC | FI_MR_LOCAL, false))
            }
            _ => Err(FiErrno::ENODATA),
        },
        FI_MR_SCALABLE if offered == FI_MR_SCALABLE => Ok(Offered::Scalable(local)),
        _ => Err(FiErrno::ENODATA),
    }
}

impl Offered {
    /// Every offered form that weft supports, independent of the device, best first. With
    /// `counting`, each form has `FI_MR_RMA_EVENT` if it was offered; if it was not, the form with
    /// the fewest bits comes first, because then no key is an rkey of the device.
    fn forms(self, able: &impl Fn() -> Able, counting: bool) -> Vec<MrMode> {
        match self {
            Self::Bits { bits, exact: true } => vec![MrMode::plain(bits)],
            Self::Bits { bits, exact: false } => {
                let announced = bits.contains(Mode::RMA_EVENT);
                let mut needed = Mode::empty();
                needed.set(Mode::RMA_EVENT, counting && announced);
                let mut native = bits & (Mode::NATIVE | Mode::LOCAL | needed);
                if !native.contains(Mode::ALLOCATED) && !able().on_demand {
                    // the application must notify the device of pages that are present
                    needed |= Mode::MMU_NOTIFY;
                    native |= bits & Mode::MMU_NOTIFY;
                }
                let mut least = Mode::empty();
                if !bits.contains(Mode::ALLOCATED) || !able().on_demand {
                    least |= Mode::ALLOCATED;
                }
                let mut modes = vec![native, native & (least | needed)];
                if counting && !announced {
                    modes.reverse();
                }
                modes.extend(
                    SPECIAL
                        .iter()
                        .filter(|bit| bits.contains(*bit) && !needed.contains(*bit))
                        .map(|bit| native | bit),
                );
                modes.dedup();
                modes.into_iter().map(MrMode::plain).collect()
            }
            Self::Basic(bits, local) => vec![MrMode::old(bits, local)],
            Self::Scalable(local) => vec![MrMode::old(FI_MR_SCALABLE, local)],
            Self::Unspecified(local) => vec![
                MrMode::old(FI_MR_BASIC, local),
                MrMode::old(FI_MR_SCALABLE, local),
            ],
        }
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

    const PAGING: Able = Able {
        on_demand: true,
        events: true,
    };
    const PINNING: Able = Able {
        on_demand: false,
        events: true,
    };
    const VERSIONS: [u32; 5] = [
        fi_version(1, 4),
        fi_version(1, 5),
        fi_version(1, 8),
        fi_version(1, 21),
        fi_version(2, 1),
    ];

    /// Every possible offer: every combination of bits, with and without `FI_LOCAL_MR`.
    fn every_offer(mut f: impl FnMut(u32, i32, u64, Able, Result<Vec<MrMode>>)) {
        for version in VERSIONS {
            for bits in 0..4096 {
                for mode in [0, FI_LOCAL_MR] {
                    for able in [PAGING, PINNING] {
                        let hints = offering(bits, mode);
                        f(
                            version,
                            bits,
                            mode,
                            able,
                            forms(version, &hints, || able, None),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn no_bit_comes_back_that_was_not_offered() {
        let mut answers = 0;
        every_offer(|version, bits, mode, _, answer| {
            for form in answer.into_iter().flatten() {
                answers += 1;
                if version >= fi_version(1, 5) {
                    assert_eq!(form.bits & !bits, 0, "{bits:#x} gave {form:?}");
                }
                assert!(!form.legacy_local || mode & FI_LOCAL_MR != 0);
            }
        });
        assert!(answers > 1000);
    }

    #[test]
    fn what_comes_back_works_and_is_chosen_again() {
        every_offer(|version, bits, _, able, answer| {
            let Ok(answer) = answer else { return };
            for (index, form) in answer.iter().enumerate() {
                let pages = Mode::ALLOCATED | Mode::MMU_NOTIFY;
                assert!(form.mode.intersects(pages) || able.on_demand);
                assert!(
                    !answer[..index].contains(form),
                    "{bits:#x} gave {form:?} twice"
                );
                // an object that is opened with the answer has exactly this form
                let mut hints =
                    offering(form.bits, if form.legacy_local { FI_LOCAL_MR } else { 0 });
                hints.exact = true;
                assert_eq!(forms(version, &hints, || able, None), Ok(vec![*form]));
            }
        });
    }

    #[test]
    fn the_native_form_comes_first_wherever_it_was_offered() {
        for bits in 0..4096 {
            let bits = bits & !(FI_MR_BASIC | FI_MR_SCALABLE);
            let native = Mode::NATIVE.bits().cast_signed();
            if bits & native == native {
                let answer = forms(fi_version(1, 21), &offering(bits, 0), || PAGING, None).unwrap();
                assert_eq!(answer[0].bits, bits & (native | FI_MR_LOCAL));
            }
        }
    }

    #[test]
    fn pairs_that_exclude_each_other_are_refused() {
        let refused = |version, bits| {
            let hints = offering(bits, FI_LOCAL_MR);
            assert_eq!(
                forms(version, &hints, || PAGING, None),
                Err(FiErrno::ENODATA)
            );
        };
        for version in [fi_version(1, 9), fi_version(2, 1)] {
            for bit in 2..12 {
                refused(version, FI_MR_BASIC | 1 << bit);
                refused(version, FI_MR_SCALABLE | 1 << bit);
            }
            refused(version, FI_MR_BASIC | FI_MR_SCALABLE);
        }
        refused(fi_version(1, 4), FI_MR_LOCAL);
    }

    #[test]
    fn old_forms_follow_their_version() {
        let basic = |legacy_local| MrMode::old(FI_MR_BASIC, legacy_local);
        for version in [fi_version(1, 4), fi_version(1, 8), fi_version(1, 21)] {
            for (mode, local) in [(0, false), (FI_LOCAL_MR, true)] {
                let hints = offering(FI_MR_BASIC, mode);
                assert_eq!(
                    forms(version, &hints, || PINNING, None),
                    Ok(vec![basic(local)])
                );
            }
        }
        let unspecified = offering(FI_MR_UNSPEC, FI_LOCAL_MR);
        let answer = forms(fi_version(1, 4), &unspecified, || PINNING, None);
        assert_eq!(answer, Ok(vec![basic(true)]));
        let both = offering(FI_MR_BASIC | FI_MR_LOCAL, 0);
        assert!(forms(fi_version(1, 8), &both, || PINNING, None).is_ok());
        assert!(forms(fi_version(1, 9), &both, || PINNING, None).is_err());
    }

    /// Without on-demand paging the application must notify of present pages; with it, it need not.
    #[test]
    fn pages_are_there_or_told_of() {
        let version = fi_version(1, 21);
        let answer = |bits, able: Able| {
            let list = forms(version, &offering(bits, 0), || able, None);
            list.map(|list| list.iter().map(|form| form.bits).collect::<Vec<_>>())
        };
        let all = FI_MR_MMU_NOTIFY | FI_MR_PROV_KEY;
        assert_eq!(answer(0, PINNING), Err(FiErrno::ENODATA));
        assert_eq!(answer(FI_MR_PROV_KEY, PINNING), Err(FiErrno::ENODATA));
        assert_eq!(answer(all, PINNING), Ok(vec![all, FI_MR_MMU_NOTIFY]));
        assert_eq!(answer(all, PAGING), Ok(vec![FI_MR_PROV_KEY, 0]));
        let both = all | FI_MR_ALLOCATED;
        let pinned = FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        assert_eq!(answer(both, PINNING), Ok(vec![pinned, FI_MR_ALLOCATED]));
        let mut exact = offering(all, 0);
        exact.exact = true;
        let answer = forms(version, &exact, || PINNING, None).unwrap();
        assert_eq!(answer[0].bits, all);
    }

    #[test]
    fn events_are_counted_with_the_bit_or_without() {
        let version = fi_version(1, 21);
        let answer = |bits, able: Able| {
            let mut hints = offering(bits, 0);
            hints.caps = FI_RMA | FI_RMA_EVENT;
            let list = forms(version, &hints, || able, None);
            list.map(|list| list.iter().map(|form| form.bits).collect::<Vec<_>>())
        };
        let native = Mode::NATIVE.bits().cast_signed() | FI_MR_LOCAL;
        assert_eq!(answer(native, PAGING), Ok(vec![0, native]));
        assert_eq!(answer(native, PINNING), Ok(vec![FI_MR_ALLOCATED, native]));
        let announced = native | FI_MR_RMA_EVENT;
        assert_eq!(
            answer(announced, PAGING),
            Ok(vec![announced, FI_MR_RMA_EVENT])
        );
        let without = Able {
            events: false,
            ..PAGING
        };
        assert_eq!(answer(native, without), Err(FiErrno::ENODATA));
        assert_eq!(answer(announced, without), Err(FiErrno::ENODATA));
    }

    #[test]
    fn regions_of_one_endpoint_are_not_protected_on_xrc() {
        assert!(!is_protected_on_xrc(Mode::NATIVE | Mode::ENDPOINT));
        assert!(is_protected_on_xrc(KNOWN & !Mode::ENDPOINT));
    }

    #[test]
    fn a_forced_form_is_the_only_one() {
        let forced = Mode::NATIVE;
        let version = fi_version(1, 21);
        let all = offering(!(FI_MR_BASIC | FI_MR_SCALABLE) & 4095, 0);
        let answer = forms(version, &all, || PINNING, Some(forced));
        assert_eq!(answer, Ok(vec![MrMode::plain(forced)]));
        let fewer = offering(FI_MR_LOCAL | FI_MR_VIRT_ADDR, 0);
        assert_eq!(
            forms(version, &fewer, || PINNING, Some(forced)),
            Err(FiErrno::ENODATA)
        );
    }
}
