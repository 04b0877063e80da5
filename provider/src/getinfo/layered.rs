//! Queries of layered providers, and which of them would list the same answers twice.
//!
//! A layered provider calls `fi_getinfo` with an internal flag of libfabric. ofi_rxm does so once
//! for each of its templates, in this order: for verbs, for tcp (which it asks for a shared receive
//! context), for any provider, and for any provider with collectives. With hints of the application
//! it names verbs and tcp in the first two queries, and libfabric does not pass these on to other
//! providers. Without hints it names no provider, so that weft receives four queries, and the
//! answers to the first three become equal entries of `weft;ofi_rxm`. Only the first of the three
//! is answered.
//!
//! libfabric calls the provider itself, without the flag, in each call of the application whose
//! layered queries named no provider. That query separates one call of the application from the
//! next one of the same thread.

use std::cell::Cell;
use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};

use libfabric_sys::FI_SHARED_CONTEXT;
use weft::rdm;
use weft::verbs::Device;

use super::hints::Hints;
use crate::ffi::param;

/// libfabric's `OFI_CORE_PROV_ONLY` (include/ofi.h), the same in all releases from 1.17 to 2.6.
const CORE_PROV_ONLY: u64 = 1 << 59;

/// Whether the query comes from a layered provider, and not from the application itself.
pub(crate) fn is_layered(flags: u64) -> bool {
    flags & CORE_PROV_ONLY != 0
}

/// Whether endpoints with many peers are listed for a device.
pub(crate) fn lists_rdm(device: &Device) -> bool {
    param::values().rdm && rdm::Limits::of(device).is_some()
}

/// Whether a device is left out of the answer to this query: the query comes from a layered
/// provider and names no provider, and the device has endpoints with many peers itself. libfabric
/// lists the entries of layered providers before those of an external provider, so an answer would
/// be preferred to these endpoints. If all devices have such endpoints, libfabric passes no such
/// query (`disable_layering`, `provider.rs`), also if the application names weft alone. With a
/// device that has none, the two queries that name weft cannot be distinguished, and both are
/// answered.
pub(crate) fn leaves_out(device: &Device, flags: u64, hints: &Hints) -> bool {
    is_layered(flags) && !hints.names_weft && lists_rdm(device)
}

/// Whether entries for this query would repeat those that this thread's call of `fi_getinfo` has
/// already listed. The caller passes each query of the thread once, in order.
pub(crate) fn is_repeated(
    version: u32,
    node: Option<&CStr>,
    service: Option<&CStr>,
    flags: u64,
    hints: &Hints,
) -> bool {
    thread_local! {
        // without a destructor: libfabric closes the provider before threads end
        static LAST: Cell<Sequence> = const { Cell::new(Sequence::Start) };
    }
    let query = if !is_layered(flags) {
        Query::Direct
    } else if hints.names_weft {
        return false; // each template that the application may have named is answered
    } else {
        Query::layered(version, node, service, flags, hints)
    };
    let (next, repeated) = LAST.get().next(query);
    LAST.set(next);
    repeated
}

/// A query, as far as repetitions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query {
    /// A query of the application.
    Direct,
    /// A query of a layered provider that names no provider: a digest of its arguments without the
    /// receive context, and whether the receive context is a shared one.
    Layered { digest: u64, shared: bool },
}

impl Query {
    fn layered(
        version: u32,
        node: Option<&CStr>,
        service: Option<&CStr>,
        flags: u64,
        hints: &Hints,
    ) -> Self {
        let mut hints = hints.clone();
        let mut shared = false;
        if let Some(ep) = &mut hints.ep {
            shared = ep.rx_ctx_cnt == FI_SHARED_CONTEXT;
            ep.rx_ctx_cnt = 0;
        }
        if let Some(rx) = &mut hints.rx {
            rx.size = 0; // ofi_rxm has another default for a shared context
        }
        let mut hasher = DefaultHasher::new();
        (version, node, service, flags, hints).hash(&mut hasher);
        Self::Layered {
            digest: hasher.finish(),
            shared,
        }
    }
}

/// The part of ofi_rxm's sequence without hints that arrived on a thread since its last direct
/// query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sequence {
    Start,
    /// A query with this digest was answered.
    First(u64),
    /// The same query with a shared context followed.
    Second(u64),
}

impl Sequence {
    /// The sequence with `query`, and whether that query repeats its first one.
    fn next(self, query: Query) -> (Self, bool) {
        match (self, query) {
            (
                Self::First(first),
                Query::Layered {
                    digest,
                    shared: true,
                },
            ) if first == digest => (Self::Second(first), true),
            (
                Self::Second(first),
                Query::Layered {
                    digest,
                    shared: false,
                },
            ) if first == digest => (Self::Start, true),
            (
                _,
                Query::Layered {
                    digest,
                    shared: false,
                },
            ) => (Self::First(digest), false),
            _ => (Self::Start, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Query = Query::Layered {
        digest: 7,
        shared: false,
    };
    const SHARED: Query = Query::Layered {
        digest: 7,
        shared: true,
    };
    const OTHER: Query = Query::Layered {
        digest: 8,
        shared: false,
    };

    /// Which of the queries are answered.
    fn answered(queries: &[Query]) -> Vec<bool> {
        let mut last = Sequence::Start;
        let answers = queries.iter().map(|query| {
            let (next, repeated) = last.next(*query);
            last = next;
            !repeated
        });
        answers.collect()
    }

    #[test]
    fn without_hints_two_of_four_are_answered_in_every_call() {
        let call = [ASKED, SHARED, ASKED, ASKED, Query::Direct];
        let once = [true, false, false, true, true];
        assert_eq!(answered(&call), once);
        assert_eq!(answered(&[call, call].concat()), [once, once].concat());
    }

    #[test]
    fn with_hints_all_are_answered() {
        for call in [
            vec![ASKED, ASKED, Query::Direct],
            vec![ASKED, Query::Direct],
            vec![SHARED, SHARED, Query::Direct],
            vec![ASKED, OTHER, SHARED, ASKED],
            vec![ASKED, Query::Direct, SHARED, ASKED],
        ] {
            let twice = [call.clone(), call].concat();
            assert!(answered(&twice).iter().all(|answered| *answered));
        }
    }

    /// A release of ofi_rxm without the first template, or with another order: an entry may be
    /// listed twice, but none is missing.
    #[test]
    fn in_other_sequences_the_first_answer_stays() {
        assert_eq!(answered(&[SHARED, ASKED, ASKED]), [true; 3]);
        assert_eq!(answered(&[ASKED, ASKED, SHARED]), [true, true, false]);
        assert_eq!(answered(&[OTHER, SHARED, ASKED]), [true; 3]);
    }
}
