//! The handshake on both sides. `docs/protocol-rdm.md`, "Connecting".

use super::link::{Link, LinkKey, Role, State};
use super::peer::{Fate, PeerKey, When};
use super::recover::Unposted;
use super::{Core, Failure, Io};
use crate::errno::FiErrno;
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::xrc::CircuitRequest;
use crate::wire::rdm::{
    Bad, Body, EndpointId, Epoch, Hello, Listener, Packet, PeerIndex, Reason, Rejection, Reply,
    Request, Terms,
};

const MS: u64 = 1_000_000;
/// The first interval between dials, and the longest, in ns.
pub(in crate::rdm) const BACKOFF: (u32, u32) = (1_000_000, 250_000_000);
/// How long the acceptor of a broken link waits for a request, in ns.
pub(super) const ACCEPTOR_WAIT: u64 = 20 * MS;
/// How long the answer to a request for a link on a circuit is awaited. Its dialler owns nothing
/// by which it could notify the acceptor that it has given the request up.
pub(in crate::rdm) const LINK_REPLY_WAIT: u64 = 3_000 * MS;
/// Longest time that ATTACH takes, in ns; then the dialler ends the link.
pub(in crate::rdm) const ATTACH: u64 = 5_000 * MS;

/// A request that waits until older links have ended, or for a place.
pub(in crate::rdm) struct HeldRequest<H> {
    pub(super) peer: PeerKey,
    pub(in crate::rdm) held: H,
    pub(super) request: Request,
    /// [`Io::source_of`].
    pub(super) source: Listener,
    /// When it arrived, in ns.
    since: u64,
}

impl<I: Io> Core<I> {
    /// The earliest possible [`Peer::unattached`] of a peer that this side has needed all the time:
    /// its operations fail after the connect timeout, and the end of a link under way can delay
    /// that by the time of ATTACH.
    pub(super) fn earliest_unattached(&self) -> u64 {
        self.now.saturating_sub(self.config.timeout + 2 * ATTACH)
    }

    /// Dials a peer, which has neither out-link nor own link, now or when it may.
    pub(super) fn dial(&mut self, key: PeerKey, io: &mut I) {
        if self.left {
            return;
        }
        let earliest = self.earliest_unattached();
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if peer.dial.since == When::NONE {
            peer.dial.since = peer.dials_since(earliest).or(self.now);
            peer.dial.backoff = BACKOFF.0;
        }
        self.set_timer(key);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let pauses = peer.dial.not_before.get();
        if pauses.is_some_and(|time| time > self.now) || peer.dial.queued {
            return;
        }
        let Some(address) = peer.address else {
            // a peer that cannot be dialled: it may dial
            return;
        };
        if self.dials >= self.config.dials {
            peer.dial.queued = true;
            self.queue.push_back(key);
            return;
        }
        if !self.takes_place(key, true, io) {
            return;
        }
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        let (epoch, outs, requests) = (self.epoch, peer.outs, peer.requests);
        let (shows, former) = (peer.shows, peer.former);
        // a token that the peer has given since then is of the session that begins
        let fresh = shows.is_none() && former.is_some();
        let Ok(gives) = self.token(key) else {
            return self.plan(key, false);
        };
        let ended = self.ended_of_peer(key);
        let shown = shows.or(former);
        let link = Link {
            shown,
            fresh,
            requests,
            since: self.now,
            ..Link::new(key, Role::Own, epoch, Some(outs))
        };
        let Some(link) = self.links.insert(link) else {
            return;
        };
        self.epoch = epoch.next();
        self.dials += 1;
        if let Some(peer) = self.peers.get_mut(key) {
            peer.own = Some(link);
            peer.dial.begun = peer.dial.begun.or(self.now);
        }
        self.set_timer(key);
        let request = Request {
            listener: self.config.listener,
            id: self.config.id,
            auth: self.config.auth,
            epoch,
            ended,
            gives,
            shows: shown,
            fresh,
        };
        io.dial(link, address, &request);
    }

    /// *ended* of a request: all links that the peer has dialled before this epoch have ended.
    fn ended_of_peer(&self, key: PeerKey) -> Option<Epoch> {
        let peer = self.peers.get(key)?;
        if let Some(link) = peer.accepted.and_then(|link| self.links.get(link)) {
            return Some(link.epoch);
        }
        peer.newest.map(Epoch::next)
    }

    /// A dial is no longer under way. [`Self::advance_changed`] begins the next one.
    pub(super) fn dialled(&mut self) {
        self.dials -= 1;
    }

    /// Removes an own link whose dial has failed, and plans the next dial. `again`: at once.
    fn remove_dial(&mut self, link: LinkKey, again: bool) -> Option<PeerKey> {
        let removed = self.links.remove(link)?;
        if removed.state == State::Dialling {
            self.dialled();
        }
        self.spend(&removed);
        self.unlink(removed.peer, link);
        self.plan(removed.peer, again);
        Some(removed.peer)
    }

    /// Plans the dial after one that has failed.
    pub(super) fn plan(&mut self, key: PeerKey, again: bool) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if !again {
            let pause = peer.dial.backoff.max(BACKOFF.0);
            peer.dial.not_before = When::at(self.now + u64::from(pause));
            peer.dial.backoff = (pause * 2).min(BACKOFF.1);
            self.set_timer(key);
        }
    }

    /// A dial has failed without a message of the peer.
    pub fn dial_failed(&mut self, link: LinkKey, failure: Failure, io: &mut I) {
        let Some(
            dialled @ Link {
                state: State::Dialling,
                ..
            },
        ) = self.links.get(link).copied()
        else {
            return;
        };
        let Some(key) = self.remove_dial(link, false) else {
            return;
        };
        if failure == Failure::Refused {
            self.after_refusal(&dialled, io);
        }
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// A dial was rejected with private data.
    pub fn rejected(&mut self, link: LinkKey, private_data: &[u8], io: &mut I) {
        self.rejected_by(link, Rejection::decode(private_data).ok(), io);
    }

    /// A dial was rejected; `None`: by another program.
    pub(in crate::rdm) fn rejected_by(
        &mut self,
        link: LinkKey,
        rejection: Option<Rejection>,
        io: &mut I,
    ) {
        let Some(Link {
            state: State::Dialling,
            peer: key,
            epoch,
            shown,
            ..
        }) = self.links.get(link).copied()
        else {
            return;
        };
        let fits = |rejection: &Rejection| rejection.epoch.is_none_or(|of| of == epoch);
        let Some(rejection) = rejection.filter(fits) else {
            return self.dial_failed(link, Failure::Refused, io);
        };
        // OTHER is about the token that was shown. The peer may have given another one since, and
        // OTHER to a request without a token violates the protocol
        let peer = self.peers.get(key);
        let token = peer.and_then(|peer| peer.shows.or(peer.former));
        let other = rejection.reason == Reason::Other && shown.is_some() && shown == token;
        self.remove_dial(link, other);
        self.end_silence(key);
        match rejection.reason {
            Reason::Foreign | Reason::Version | Reason::Transport => {
                self.fail(key, FiErrno::ECONNREFUSED, io)
            }
            Reason::Auth => self.fail(key, FiErrno::EACCES, io),
            Reason::Other if other => self.replaced(key, rejection.id, io),
            Reason::Known => self.known(key, rejection.id, io),
            // epochs of this endpoint are all before its next one, whatever the peer states
            // NODE does not reach the core: the link is dialled on another circuit
            Reason::Other | Reason::Stale | Reason::Busy | Reason::Node => {}
        }
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// The peer has no session any more, or another endpoint listens at its address.
    pub(super) fn replaced(&mut self, key: PeerKey, by: EndpointId, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let ends = std::mem::replace(&mut peer.ends, true);
        (peer.former, peer.shows) = (None, None);
        self.close_unattached(key, io);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        // operations that were posted after a failure are kept
        if peer.begun && !ends {
            let same = peer.id == Some(by);
            let fails = match (same, peer.probe) {
                (true, _) => Unposted::Kept,
                (false, true) => Unposted::KeptSince(peer.doubts),
                (false, false) => Unposted::Failed,
            };
            self.fail_ops(key, FiErrno::ECONNABORTED, fails, io);
            let kept = self.peers.get_mut(key).filter(|_| same);
            if let Some(peer) = kept.filter(|peer| !peer.waiting.is_empty() || peer.holds != 0) {
                peer.meant = peer.id;
            }
        }
        self.drop_links(key, io);
        // a request of the old one
        self.reject_held(key, Reason::Busy, None, io);
        self.end_session(key);
    }

    /// A connection request has arrived.
    pub fn requested(&mut self, held: I::Held, private_data: &[u8], io: &mut I) {
        match Request::decode(private_data) {
            Ok(request) => self.request(held, &request, io),
            Err(bad) => {
                let reason = match bad {
                    Bad::Version(_) => Reason::Version,
                    _ if CircuitRequest::decode(private_data).is_ok() => Reason::Transport,
                    _ => Reason::Foreign,
                };
                let rejection = Rejection {
                    version: VERSION,
                    epoch: None,
                    id: self.config.id,
                    newest: None,
                    reason,
                };
                io.reject(held, &rejection);
            }
        }
    }

    /// A connection request has arrived, which was decoded.
    pub(in crate::rdm) fn request(&mut self, held: I::Held, request: &Request, io: &mut I) {
        let id = self.config.id;
        let answer = |reason, epoch, newest| Rejection {
            version: VERSION,
            epoch,
            id,
            newest,
            reason,
        };
        let newest = self.ids.get(&request.id);
        let newest = newest.and_then(|peer| self.peers.get(*peer)?.newest);
        let answer = |reason| answer(reason, Some(request.epoch), newest);
        let source = io.source_of(&held, request);
        let host = io.host_of(&held, request);
        let key = match self.examine((request, source), io) {
            Ok(key) => key,
            Err(reason) => {
                io.reject(held, &answer(reason));
                return self.advance_changed(io);
            }
        };
        self.reject_held(key, Reason::Stale, Some(request.epoch), io);
        self.end_silence(key);
        self.note_source(key, host);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        peer.newest = Some(request.epoch);
        peer.requests = peer.requests.wrapping_add(1);
        peer.shows = Some(request.gives);
        (peer.leaves, peer.fate) = (false, Fate::Open);
        let (own, accepted) = (peer.own, peer.accepted);
        self.held.push(HeldRequest {
            peer: key,
            held,
            request: *request,
            source,
            since: self.now,
        });
        if let Some(own) = own
            && let Some(Link {
                fresh,
                state: State::Dialling,
                ..
            }) = self.links.get(own)
            && (*fresh || self.yields(request, io))
        {
            // NEW: it would end the session that begins now
            self.end_link(own, io);
        }
        if let Some(accepted) = accepted {
            self.end_link(accepted, io);
        }
        self.stated(key, (request.ended, Some(request.epoch)), io);
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// Rejects the request of a peer that waits for its answer.
    pub(super) fn reject_held(
        &mut self,
        key: PeerKey,
        reason: Reason,
        newest: Option<Epoch>,
        io: &mut I,
    ) {
        let Some(at) = self.held.iter().position(|it| it.peer == key) else {
            return;
        };
        let HeldRequest { held, request, .. } = self.held.swap_remove(at);
        let rejection = Rejection {
            version: VERSION,
            epoch: Some(request.epoch),
            id: self.config.id,
            newest,
            reason,
        };
        io.reject(held, &rejection);
        self.list_idle(key);
    }

    /// Whether the dialler of a request has given it up.
    fn is_late(&self, held: &HeldRequest<I::Held>) -> bool {
        self.config.circuits && held.since + LINK_REPLY_WAIT <= self.now
    }

    /// Rejects the requests that were given up: their links would keep their places until HELLO is
    /// not awaited any more. The peers keep their turns, for a dial of this side or their next
    /// requests.
    pub(super) fn reject_late(&mut self, io: &mut I) {
        while let Some(late) = self.held.iter().find(|held| self.is_late(held)) {
            self.reject_held(late.peer, Reason::Busy, None, io);
        }
    }

    /// Whether the epoch of a link is before this one.
    pub(super) fn is_before(&self, link: LinkKey, ended: Option<Epoch>) -> bool {
        let link = self.links.get(link);
        link.zip(ended)
            .is_some_and(|(link, ended)| link.epoch.is_before(ended))
    }

    /// The peer of a request, or the reason to reject it. `source`: [`Io::source_of`].
    fn examine(
        &mut self,
        (request, source): (&Request, Listener),
        io: &mut I,
    ) -> Result<PeerKey, Reason> {
        if request.auth != self.config.auth {
            return Err(Reason::Auth);
        }
        if request.id == self.config.id {
            return Err(Reason::Known);
        }
        if self.left {
            return Err(Reason::Busy);
        }
        let named = self.ids.get(&request.id).copied();
        let given = request.shows.and_then(|token| self.secrets.get(&token));
        let given = given.map(|peer| self.resolve(*peer));
        if request.fresh {
            return self.examine_fresh((request, source), named, given, io);
        }
        // tokens are forgotten with their session: one that this side has given to the peer since
        // then is of a session that has begun at the dialler, and whose HELLO was lost. Any other
        // token is of the session that this side has ended, perhaps by another address
        let current = given.is_some() && given == named;
        let ended = |key| {
            self.peers
                .get(key)
                .is_some_and(|peer| peer.former.is_some())
        };
        if request.shows.is_some() && !current && named.is_some_and(ended) {
            return Err(Reason::Other);
        }
        // the token of a request whose reply is under way belongs to a peer without endpoint id
        let new = |key: PeerKey| self.is_new(key);
        let found = match (named, given) {
            (named, None) if request.shows.is_none() => named,
            (Some(named), Some(given)) if named == given || new(given) => Some(named),
            (None, Some(given)) if new(given) => {
                self.name(given, request.id, io);
                Some(given)
            }
            _ => return Err(Reason::Other),
        };
        let Some(key) = found else {
            return self.newcomer((request, source), io);
        };
        let found = self.examine_peer((request, source), key, io)?;
        // an endpoint gives one token in a session: with another one it has begun the next session,
        // by a request of this side that has shown none
        let peer = self.peers.get(key).filter(|peer| peer.begun);
        let shows = peer.and_then(|peer| peer.shows);
        if shows.is_some_and(|shows| shows != request.gives) {
            self.end_replaced(request, key, io)?;
        }
        Ok(found)
    }

    /// The dialler of a request has ended the session.
    fn end_replaced(&mut self, request: &Request, key: PeerKey, io: &mut I) -> Result<(), Reason> {
        self.replaced(key, request.id, io);
        if self.ids.contains_key(&request.id) {
            // when its links have ended
            return Err(Reason::Busy);
        }
        self.name(key, request.id, io);
        Ok(())
    }

    /// As [`Self::examine`]: the dialler has ended the session of the token that it shows. A token
    /// of no session is no token, because the dialler cannot know whether this side has ended the
    /// session too.
    fn examine_fresh(
        &mut self,
        (request, source): (&Request, Listener),
        named: Option<PeerKey>,
        given: Option<PeerKey>,
        io: &mut I,
    ) -> Result<PeerKey, Reason> {
        let Some(key) = named else {
            return self.newcomer((request, source), io);
        };
        let begun = self.peers.get(key).is_some_and(|peer| peer.begun);
        if begun && given != named {
            return Err(Reason::Known);
        }
        let found = self.examine_peer((request, source), key, io)?;
        if begun {
            self.end_replaced(request, key, io)?;
        }
        Ok(found)
    }

    /// Whether a request of this peer can be accepted.
    fn examine_peer(
        &mut self,
        (request, source): (&Request, Listener),
        key: PeerKey,
        io: &mut I,
    ) -> Result<PeerKey, Reason> {
        let peer = self.peers.get(key).ok_or(Reason::Busy)?;
        if peer.begun && request.shows.is_none() {
            // the dialler may have freed its peer
            if self.links_of(key).next().is_none() {
                // only a dial with the token shows that
                self.doubt(key);
            } else if let Some(out) = peer.out {
                // the link may be at this side alone, which notices nothing while it is idle
                io.probe(out);
            }
            return Err(Reason::Known);
        }
        let is_late = |newest: Epoch| !newest.is_before(request.epoch);
        let is_void = |void: Epoch| request.epoch.is_before(void);
        if peer.newest.is_some_and(is_late) || peer.void.is_some_and(is_void) {
            return Err(Reason::Stale);
        }
        if peer.ends {
            // the old session is being dropped
            return Err(Reason::Busy);
        }
        // the dialler may not know that two of its addresses are this endpoint, so this is no
        // statement about its other link. HELLO on that makes the session known.
        let anew = !peer.begun && (request.shows.is_none() || request.fresh);
        if self.config.circuits && anew && self.has_accepted(key) {
            // its dialler has given up the link on which HELLO has not arrived in time, probably
            for link in self.links_of(key) {
                if self.links.get(link).is_some_and(Link::is_silent) {
                    self.silence(link, io);
                }
            }
            return Err(Reason::Busy);
        }
        let replaces = peer.accepted.is_some();
        if !replaces && !self.may_request((request, source), Some(key), io) {
            if self.peers.get(key).is_some_and(|peer| peer.begun) {
                // it has shown the token of the session
                self.line_up(key);
            }
            return Err(Reason::Busy);
        }
        Ok(key)
    }

    /// Whether packets of the peer are accepted on a link that it has dialled.
    fn has_accepted(&self, key: PeerKey) -> bool {
        let role = |link| self.links.get(link).map(|link: &Link| link.role);
        let mut links = self.links_of(key);
        links.any(|link| role(link) == Some(Role::Accepted))
    }

    /// The peer of an unknown endpoint id.
    fn newcomer(
        &mut self,
        (request, source): (&Request, Listener),
        io: &mut I,
    ) -> Result<PeerKey, Reason> {
        let at = self.addresses.get(&request.listener);
        let at = at.map(|at| self.resolve(*at));
        if !self.may_request((request, source), at, io) {
            return Err(Reason::Busy);
        }
        if let Some(at) = at {
            if self.is_new(at) {
                if self.peers.get(at).is_some_and(|peer| peer.ends) {
                    // the end of the session would drop the endpoint id
                    return Err(Reason::Busy);
                }
                self.name(at, request.id, io);
                return Ok(at);
            }
            self.doubt(at);
        }
        if self.peers.len() >= self.config.peers {
            return Err(Reason::Busy);
        }
        let address = Some(request.listener);
        let key = self.add_peer(address, None).map_err(|_| Reason::Busy)?;
        if at.is_none() && !self.is_own(request.listener) {
            self.addresses.insert(request.listener, key);
            self.names += u64::from(self.further.contains_key(&request.listener));
        }
        self.name(key, request.id, io);
        Ok(key)
    }

    /// Accepts the held request of a peer, when the links that it replaces have ended.
    pub(super) fn accept_held(&mut self, key: PeerKey, io: &mut I) {
        let Some(at) = self.held.iter().position(|it| it.peer == key) else {
            return;
        };
        if self.is_late(&self.held[at]) {
            return self.reject_held(key, Reason::Busy, None, io);
        }
        let request = self.held[at].request;
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        // a link that is being ended may have been the out-link
        let ending = |own: LinkKey| {
            let own = self.links.get(own);
            own.is_some_and(|own| own.state == State::Ending)
        };
        let own = peer.own;
        let own = own.filter(|own| ending(*own) || self.is_before(*own, request.ended));
        if peer.accepted.is_some() || own.is_some() || self.is_closing(key) {
            return;
        }
        if !self.takes_place(key, false, io) {
            return;
        }
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        let mark = peer.out.is_none().then_some(peer.outs);
        let ended = match peer.own.and_then(|own| self.links.get(own)) {
            Some(own) => own.epoch,
            None => self.epoch,
        };
        let link = Link {
            given: Some(request.gives),
            since: self.now,
            ..Link::new(key, Role::Accepted, request.epoch, mark)
        };
        let Ok(gives) = self.token(key) else {
            return self.reject_held(key, Reason::Busy, None, io);
        };
        let Some(link) = self.links.insert(link) else {
            return self.reject_held(key, Reason::Busy, None, io);
        };
        let HeldRequest { held, request, .. } = self.held.swap_remove(at);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.accepted = Some(link);
        }
        let reply = Reply {
            epoch: request.epoch,
            id: self.config.id,
            auth: self.config.auth,
            gives,
            ended: Some(ended),
            terms: self.terms(key, link, io),
        };
        let at = self.dialled_at(key);
        io.accept(link, held, &reply, at);
    }

    /// The terms of this side, as a grant on a link.
    fn terms(&mut self, key: PeerKey, link: LinkKey, io: &mut I) -> Terms {
        let (eager, application_keys) = (self.config.eager, self.config.application_keys);
        let (block_addr, block_rkey) = io.block(key, link);
        let Some(inbound) = self.open_window(key) else {
            return Terms::default();
        };
        let short = inbound.is_smallest();
        let grant = inbound.renew();
        let used = inbound.used();
        let Some(peer) = self.peers.get_mut(key) else {
            return Terms::default();
        };
        // the terms may get lost, so a peer that uses another link gets the grant there too
        peer.stated = Some(link);
        peer.restate = peer.out.is_some_and(|out| out != link);
        peer.recall = false;
        let terms = Terms {
            expected: peer.expected,
            used,
            grant,
            index: PeerIndex::new(key.number()),
            application_keys,
            block_addr,
            block_rkey,
            eager,
            device_atomics: self.config.device_atomics,
        };
        if short {
            self.recall_one(key);
        }
        terms
    }

    /// Whether the peer of a link may be the endpoint with this id: it is known as that, or no
    /// other peer is.
    pub(in crate::rdm) fn may_be(&self, link: LinkKey, id: EndpointId) -> bool {
        let key = self.links.get(link).map(|link| link.peer);
        let known = self.ids.get(&id).copied();
        key.is_some() && known.is_none_or(|of| Some(of) == key)
    }

    /// A reply has arrived.
    pub fn replied(&mut self, link: LinkKey, private_data: &[u8], io: &mut I) {
        self.replied_with(link, Reply::decode(private_data).ok(), io);
    }

    /// A reply has arrived; `None`: one that could not be decoded.
    pub(in crate::rdm) fn replied_with(&mut self, link: LinkKey, reply: Option<Reply>, io: &mut I) {
        let Some(
            dialled @ Link {
                state: State::Dialling,
                peer: key,
                epoch,
                ..
            },
        ) = self.links.get(link).copied()
        else {
            return;
        };
        let reply = reply.filter(|reply| {
            reply.epoch == epoch
                && reply.auth == self.config.auth
                && reply.id != self.config.id
                && self
                    .peers
                    .get(key)
                    .is_some_and(|peer| peer.id.is_none_or(|id| id == reply.id) || self.is_new(key))
        });
        let Some(reply) = reply else {
            self.end_link(link, io);
            self.after_refusal(&dialled, io);
            self.plan(key, false);
            return self.advance_changed(io);
        };
        let of = self.ids.get(&reply.id).copied().filter(|of| *of != key);
        if let Some(of) = of {
            self.end_link(link, io);
            if dialled.fresh || dialled.shown.is_none() {
                self.accepted_anew(of, &reply, io);
            }
            self.merge(key, of, io);
            return self.advance_changed(io);
        }
        self.name(key, reply.id, io);
        self.dialled();
        if let Some(link) = self.links.get_mut(link) {
            *link = Link {
                state: State::Greeting,
                terms: Some(reply.terms),
                ..dialled
            };
        }
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let first = !peer.begun;
        // another endpoint may have been at the address
        peer.leaves &= !first;
        peer.begun = true;
        (peer.shows, peer.former) = (Some(reply.gives), None);
        peer.void = reply.ended.or(peer.void);
        self.introduce(key, link, &reply.terms, io);
        self.take_terms(key, &reply.terms, first);
        self.stated(key, (Some(epoch), reply.ended), io);
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// Takes from the terms what is valid before the link is adopted: all but the numbers.
    pub(super) fn take_terms(&mut self, key: PeerKey, terms: &Terms, first: bool) {
        let eager = terms.eager.min(self.config.eager);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.to = terms.index;
            peer.eager = eager;
            if peer.outbound.receive(terms.grant, first) {
                peer.granted(false);
            }
        }
    }

    /// Posts HELLO when the link that the acceptor has ended has ended here too.
    pub(super) fn greet(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        let Some(own) = peer.own else {
            return;
        };
        let state = |link: LinkKey| self.links.get(link).map(|link| link.state);
        let ending = peer.accepted.and_then(state) == Some(State::Ending);
        if state(own) != Some(State::Greeting) || ending || self.is_closing(key) {
            return;
        }
        let Some(epoch) = self.links.get(own).map(|link| link.epoch) else {
            return;
        };
        let terms = self.terms(key, own, io);
        let further = self.config.further.iter().copied();
        let body = Body::Hello(Box::new(Hello::new(epoch, terms, further)));
        let Some(header) = self.header(key) else {
            return;
        };
        if io.control(own, &Packet { header, body }) {
            self.posted(key);
            if let Some(link) = self.links.get_mut(own) {
                (link.state, link.greeted) = (State::Up, true);
            }
        }
    }
}
