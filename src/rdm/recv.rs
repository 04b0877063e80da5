//! The arguments of calls that post receives, on an endpoint or on a shared receive context.

use super::iov::Iov;
use super::receive::Receive;
use crate::PeerIndex;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::LocalIov;
use crate::matching::Want;
use crate::mr::Desc;

/// Flags of receives that search the stored messages (`search.rs`); not all of them at once.
pub(super) const SEARCHES: Flags = Flags::PEEK.union(Flags::CLAIM).union(Flags::DISCARD);

/// Flags of receives.
const RECV_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::MORE)
    .union(Flags::MULTI_RECV)
    .union(SEARCHES);

/// Which receives compare the source of a message with the address of the call. The others match
/// messages of any peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Directed {
    /// Untagged receives (`FI_DIRECTED_RECV`).
    pub untagged: bool,
    /// Tagged receives (`FI_DIRECTED_RECV`, or `FI_TAGGED_DIRECTED_RECV`).
    pub tagged: bool,
}

impl Directed {
    /// All receives.
    pub const ALL: Self = Self {
        untagged: true,
        tagged: true,
    };

    /// The only address whose messages a receive matches that is called with `from`; `None`: the
    /// receive matches those of any peer.
    #[inline(always)]
    pub(super) fn source(self, tagged: bool, from: FiAddr) -> Option<FiAddr> {
        let compares = if tagged { self.tagged } else { self.untagged };
        (compares && from.0 != u64::MAX).then_some(from)
    }
}

/// The receive that a call asks for.
///
/// # Errors
/// `EINVAL`: too many buffers, or several with `FI_MULTI_RECV`. `EBADFLAGS`.
#[inline]
pub(super) fn receive_of(
    tagged: bool,
    local: &LocalIov<'_>,
    context: usize,
    flags: Flags,
) -> Result<Receive> {
    if flags.intersects(RECV_FLAGS.complement()) {
        return Err(FiErrno::EBADFLAGS);
    }
    let desc = local.common_desc();
    let receive = Receive {
        iov: Iov::new(local)?,
        desc: desc.unwrap_or(Desc::NULL),
        several: desc.is_none(),
        context,
        tagged,
        wanted: flags.contains(Flags::COMPLETION),
    };
    if is_multi(&receive, flags) && local.count() > 1 && !flags.intersects(SEARCHES) {
        return Err(FiErrno::EINVAL);
    }
    Ok(receive)
}

/// The receive that a call asks for, if it is of one buffer, and neither a search nor a
/// multi-receive buffer. `None`: [`receive_of`] is to be called.
#[inline(always)]
pub(super) fn plain_receive(
    tagged: bool,
    local: &LocalIov<'_>,
    context: usize,
    flags: Flags,
) -> Option<Receive> {
    const PLAIN: Flags = Flags::COMPLETION
        .union(Flags::TRANSMIT_COMPLETE)
        .union(Flags::MORE);
    // the flag has no effect on tagged receives
    let plain = if tagged {
        PLAIN.union(Flags::MULTI_RECV)
    } else {
        PLAIN
    };
    let [only] = local.iov() else {
        return None;
    };
    let accepted = !flags.intersects(plain.complement());
    accepted.then(|| Receive {
        iov: Iov::single_buffer(only),
        desc: local.common_desc().unwrap_or(Desc::NULL),
        several: false,
        context,
        tagged,
        wanted: flags.contains(Flags::COMPLETION),
    })
}

/// Whether it is a multi-receive buffer. Tagged receives have no such flag; it may be a default of
/// all receives.
#[inline]
pub(super) fn is_multi(receive: &Receive, flags: Flags) -> bool {
    !receive.tagged && flags.contains(Flags::MULTI_RECV)
}

/// The messages that a receive asks for. `tag`: `None` for an untagged one, otherwise the tag and
/// the ignored bits.
#[inline]
pub(super) fn want_of(tag: Option<(u64, u64)>, from: Option<PeerIndex>) -> Want {
    match tag {
        Some((tag, ignore)) => Want::tagged(tag, ignore, from),
        None => Want::untagged(from),
    }
}
