//! Event queues.
//!
//! An event queue receives the results of the connections that are bound to it ([`CmSink`]). A
//! thread that reads the queue drives the connection manager: it takes events from the channels of
//! the queue's [`Dispatcher`], which passes each event to its endpoint; the endpoint reports the
//! result here.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Token;
use crate::conn::{CmSink, CmTarget, ConnectRequest, Dispatcher, Found, Outcome};
use crate::errno::{FiErrno, Result};
use crate::queue::{WaitKind, deadline};
use crate::verbs::PrivateData;
use crate::wire::cm_data::CmData;

/// Parameters of an event queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct EqConfig {
    /// The kind of the queue's wait object.
    pub wait: WaitKind,
}

/// An event.
#[derive(Debug)]
pub enum Event {
    /// A connection request reached a passive endpoint (`FI_CONNREQ`).
    ConnReq {
        /// The passive endpoint.
        pep: Token,
        /// Identifies the event in its queue.
        id: u64,
        /// The request. The reader takes it; dropping an untaken request rejects the connection.
        /// After a peek has taken it, the queue is empty for other readers until
        /// [`EventQueue::end_peek`].
        request: Option<ConnectRequest>,
        /// Data of the peer's application.
        data: CmData,
        /// For the provider: the object that a peek built from the request.
        attachment: Option<Box<dyn Any + Send>>,
    },
    /// An endpoint is connected (`FI_CONNECTED`).
    Connected {
        /// The endpoint.
        ep: Token,
        /// On the dialling side: data of the peer's acceptance.
        data: CmData,
    },
    /// A connection has ended (`FI_SHUTDOWN`): once per connection, after its operations were
    /// flushed to the completion queues.
    Shutdown {
        /// The endpoint.
        ep: Token,
    },
    /// An event that the application, or the provider for its own operations, has written.
    User {
        /// The number of the event.
        event: u32,
        /// The event's content.
        bytes: Box<[u8]>,
        /// The object that removes the event when it is closed. `None`: no object does.
        owner: Option<Token>,
    },
}

impl Event {
    /// The object that removes the event when it is closed.
    fn owner(&self) -> Option<Token> {
        match *self {
            Self::ConnReq { pep, .. } => Some(pep),
            Self::Connected { ep, .. } | Self::Shutdown { ep } => Some(ep),
            Self::User { owner, .. } => owner,
        }
    }

    /// Whether a peek has taken the request and has not ended.
    fn is_being_peeked(&self) -> bool {
        matches!(
            self,
            Self::ConnReq {
                request: None,
                attachment: None,
                ..
            }
        )
    }
}

/// An error event.
#[derive(Clone, Debug)]
pub struct EqError {
    /// The object of the event.
    pub owner: Token,
    /// The reason as libfabric's errno.
    pub err: FiErrno,
    /// The reason as the connection manager's status, made positive: an errno value, or the reason
    /// of a rejection. [`EqError::text`] names it.
    pub prov_errno: i32,
    /// Data of the peer's rejection.
    pub cm_data: CmData,
    /// `data` of `fi_eq_err_entry`: for operations of the provider.
    pub data: usize,
    /// `context` of `fi_eq_err_entry`; `None`: that of the object, which removes the error when it
    /// is closed. An error with a context of its own stays.
    pub context: Option<usize>,
}

impl EqError {
    /// The text of a [`EqError::prov_errno`] that is the reason of a rejection (InfiniBand
    /// specification, volume 1, "Rejection reason"), or 0: the connection manager has given no
    /// status. `None`: it is an errno value, or a reason that connection managers do not give for
    /// the requests of RC and XRC.
    pub const fn text(prov_errno: i32) -> Option<&'static CStr> {
        Some(match prov_errno {
            0 => c"the provider has no further information; err is the reason",
            1 => c"the peer has no queue pair for the connection",
            4 => c"the peer has waited too long for the next step of the connection",
            5 => c"the peer does not support the request",
            8 => c"nobody listens at the address of the peer",
            9 => c"the peer has no service of this type at the address",
            10 => c"the queue pair number is in use by an earlier connection",
            28 => c"the application of the peer has rejected the connection",
            _ => return None,
        })
    }
}

enum Item {
    Event(Event, Option<Weak<dyn CmTarget>>),
    Error(EqError),
}

impl Item {
    /// The object that removes the item when it is closed. A later object may have the token of an
    /// object that leaves its items.
    fn owner(&self) -> Option<Token> {
        match self {
            Self::Event(event, _) => event.owner(),
            Self::Error(error) => error.context.is_none().then_some(error.owner),
        }
    }
}

#[derive(Default)]
struct Fifo {
    items: VecDeque<Item>,
    /// Whether a reader runs [`CmTarget::before_shutdown`] for the first event, without the lock.
    /// Until it has ended, the queue is empty for other readers.
    preparing: bool,
    /// The identification of the last connection request.
    last_id: u64,
}

impl Fifo {
    /// Whether a read returns [`FiErrno::EAGAIN`].
    fn has_nothing(&self) -> bool {
        self.preparing
            || match self.items.front() {
                None => true,
                Some(Item::Event(event, _)) => event.is_being_peeked(),
                Some(Item::Error(_)) => false,
            }
    }
}

/// An event queue. Reading it drives the connection manager. Thread safe.
pub struct EventQueue {
    kind: WaitKind,
    dispatcher: Dispatcher,
    /// The last lock of the lock order (`docs/locking.md`).
    fifo: Mutex<Fifo>,
}

impl std::fmt::Debug for EventQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventQueue").finish_non_exhaustive()
    }
}

impl EventQueue {
    /// Opens an event queue.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub fn open(config: EqConfig) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            kind: config.wait,
            dispatcher: Dispatcher::new()?,
            fifo: Mutex::default(),
        }))
    }

    /// Passes the first event to `take` and, unless it fails or `peek` is set, removes the event.
    /// If a peek takes the request of [`Event::ConnReq`], the caller then calls [`Self::end_peek`].
    ///
    /// Does not wait for an event. The reader of [`Event::Shutdown`] first moves the endpoint's
    /// completions to the completion queues, which takes at most 0.55 s and acquires locks of the
    /// connection and of the queues (`docs/locking.md`). `take` runs with the queue's lock held and
    /// must not call the engine.
    ///
    /// # Errors
    /// - `EAGAIN`: the queue is empty.
    /// - `EAVAIL`: the first event is an error, which [`Self::read_error`] returns.
    /// - Those of `take`, for instance `ETOOSMALL`.
    pub fn read<R>(&self, peek: bool, take: impl FnOnce(&mut Event) -> Result<R>) -> Result<R> {
        self.read_found(peek, take, &mut Found::Events)
    }

    /// As [`Self::read`]. `found`: what was found if the queue is empty.
    fn read_found<R>(
        &self,
        peek: bool,
        take: impl FnOnce(&mut Event) -> Result<R>,
        found: &mut Found,
    ) -> Result<R> {
        let mut fifo = self.fifo.lock();
        // also while another reader has the first event: the descriptor stays readable until the
        // events of the connection manager are taken, and a waiting thread would spin
        if fifo.has_nothing() {
            drop(fifo);
            *found = self.progress();
            fifo = self.fifo.lock();
        }
        // `before_shutdown` may block, and takes locks that precede this one in the lock order
        while !fifo.preparing
            && let Some(Item::Event(_, prepare)) = fifo.items.front_mut()
            && let Some(target) = prepare.take()
        {
            fifo.preparing = true;
            drop(fifo);
            if let Some(target) = target.upgrade() {
                target.before_shutdown();
            }
            fifo = self.fifo.lock();
            fifo.preparing = false;
            // another reader may have found nothing meanwhile
            self.dispatcher.wait().wake();
        }
        if fifo.has_nothing() {
            self.dispatcher.wait().clear();
            return Err(FiErrno::EAGAIN);
        }
        let result = match fifo.items.front_mut() {
            None => return Err(FiErrno::EAGAIN),
            Some(Item::Error(_)) => return Err(FiErrno::EAVAIL),
            Some(Item::Event(event, _)) => take(event)?,
        };
        let taken = if peek { None } else { fifo.items.pop_front() };
        if fifo.items.is_empty() {
            self.dispatcher.wait().clear();
        }
        drop(fifo);
        // dropping an untaken request rejects it, which must not be done under the lock
        drop(taken);
        Ok(result)
    }

    /// Ends a peek that has taken the request of the event `id`: stores the object that was built
    /// from it in the event, or, with `None`, removes the event. Wakes the other readers.
    ///
    /// # Errors
    /// The object, if the event was removed meanwhile because its passive endpoint is closed.
    pub fn end_peek(
        &self,
        id: u64,
        object: Option<Box<dyn Any + Send>>,
    ) -> std::result::Result<(), Option<Box<dyn Any + Send>>> {
        let mut fifo = self.fifo.lock();
        let this =
            |item: &Item| matches!(item, Item::Event(Event::ConnReq { id: i, .. }, _) if *i == id);
        let Some(at) = fifo.items.iter().position(this) else {
            return Err(object);
        };
        match (object, fifo.items.get_mut(at)) {
            (Some(object), Some(Item::Event(Event::ConnReq { attachment, .. }, _))) => {
                *attachment = Some(object);
            }
            // the event has neither a request nor an object, so dropping it rejects nothing
            _ => drop(fifo.items.remove(at)),
        }
        self.adjust_wait(&fifo);
        Ok(())
    }

    /// Makes the wait object readable if a read returns an event or an error.
    fn adjust_wait(&self, fifo: &Fifo) {
        if fifo.has_nothing() {
            self.dispatcher.wait().clear();
        } else {
            self.dispatcher.wait().wake();
        }
    }

    /// Takes the error that [`Self::read`] stopped at. Never blocks.
    ///
    /// # Errors
    /// `EAGAIN`: the first event is not an error.
    pub fn read_error(&self) -> Result<EqError> {
        let mut fifo = self.fifo.lock();
        match fifo.items.pop_front() {
            Some(Item::Error(error)) => {
                if fifo.items.is_empty() {
                    self.dispatcher.wait().clear();
                }
                Ok(error)
            }
            Some(other) => {
                fifo.items.push_front(other);
                Err(FiErrno::EAGAIN)
            }
            None => Err(FiErrno::EAGAIN),
        }
    }

    /// As [`Self::read`], but waits for an event. `None`: no limit.
    ///
    /// # Errors
    /// As [`Self::read`]. `EAGAIN`: the timeout has passed. `EINTR`: a signal handler ran.
    /// `ENOSYS`: the queue was opened without a wait object.
    pub fn sread<R>(
        &self,
        peek: bool,
        timeout: Option<Duration>,
        take: impl FnOnce(&mut Event) -> Result<R>,
    ) -> Result<R> {
        if self.kind == WaitKind::None {
            return Err(FiErrno::ENOSYS);
        }
        let deadline = deadline(timeout);
        let mut take = Some(take);
        loop {
            let mut found = Found::Events;
            let take_once = |event: &mut Event| match take.take() {
                Some(take) => take(event),
                // cannot be reached: a call of `take`, successful or not, ends the loop
                None => Err(FiErrno::EAGAIN),
            };
            let result = self.read_found(peek, take_once, &mut found);
            match result {
                Err(FiErrno::EAGAIN) => {}
                result => return result,
            }
            if take.is_none() || !self.dispatcher.wait_after(found, deadline)? {
                return Err(FiErrno::EAGAIN);
            }
        }
    }

    /// Appends an event (`fi_eq_write(3)`, or one of the provider's own) and wakes the waiting
    /// threads. `owner`: the object whose close removes the event ([`Self::forget`]).
    pub fn write(&self, event: u32, bytes: &[u8], owner: Option<Token>) {
        self.push(Event::User {
            event,
            bytes: bytes.into(),
            owner,
        });
    }

    /// Appends the failure of an operation of the provider's own on the object `owner`, and wakes
    /// the waiting threads.
    pub fn write_error(&self, owner: Token, err: FiErrno) {
        self.push_error(EqError {
            owner,
            err,
            prov_errno: 0,
            cm_data: CmData::EMPTY,
            data: 0,
            context: None,
        });
    }

    /// As [`Self::write_error`], for one of several operations on the object: with the context that
    /// the application gave this operation, and `data` of `fi_eq_err_entry`. The error stays when
    /// the object is closed.
    pub fn write_operation_error(&self, owner: Token, err: FiErrno, context: usize, data: usize) {
        self.push_error(EqError {
            owner,
            err,
            prov_errno: 0,
            cm_data: CmData::EMPTY,
            data,
            context: Some(context),
        });
    }

    /// Removes the queued events of `owner`, which is about to be closed. Those of address vectors
    /// stay (`fi_av(3)`).
    pub fn forget(&self, owner: Token) {
        let mut gone = Vec::new();
        {
            let mut fifo = self.fifo.lock();
            let mut kept = VecDeque::with_capacity(fifo.items.len());
            for item in fifo.items.drain(..) {
                if item.owner() == Some(owner) {
                    gone.push(item);
                } else {
                    kept.push_back(item);
                }
            }
            fifo.items = kept;
            // the events behind one that was being peeked can be read
            self.adjust_wait(&fifo);
        }
        // dropping a request rejects it, which must not be done under the lock
        drop(gone);
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`): processes the events of the
    /// connection manager and of the devices that make it readable without an event of the queue.
    ///
    /// # Errors
    /// `EAGAIN`: the queue has an event, or more of those events are left; the caller reads the
    /// queue instead of waiting. `EINVAL`: no wait object.
    pub fn trywait(&self) -> Result<()> {
        if self.kind == WaitKind::None {
            return Err(FiErrno::EINVAL);
        }
        if self.fifo.lock().has_nothing() {
            self.progress();
        }
        let wait = self.dispatcher.wait();
        {
            let fifo = self.fifo.lock();
            if !fifo.has_nothing() {
                return Err(FiErrno::EAGAIN);
            }
            wait.clear();
        }
        match wait.is_ready() {
            true => Err(FiErrno::EAGAIN),
            false => Ok(()),
        }
    }

    /// The descriptor to poll for reading, if the queue has a wait object. The queue owns it.
    pub fn fd(&self) -> Option<RawFd> {
        (self.kind != WaitKind::None).then(|| self.dispatcher.wait().fd())
    }

    /// The kind of the queue's wait object.
    pub fn wait_kind(&self) -> WaitKind {
        self.kind
    }

    fn next_id(&self) -> u64 {
        let mut fifo = self.fifo.lock();
        fifo.last_id += 1;
        fifo.last_id
    }

    fn push(&self, event: Event) {
        self.push_item(Item::Event(event, None));
    }

    fn push_error(&self, error: EqError) {
        self.push_item(Item::Error(error));
    }

    fn push_item(&self, item: Item) {
        let mut fifo = self.fifo.lock();
        fifo.items.push_back(item);
        self.dispatcher.wait().wake();
    }

    /// Takes events of the connection manager until this queue has an event that can be read, or as
    /// many as one call takes.
    fn progress(&self) -> Found {
        self.dispatcher.progress(|| !self.fifo.lock().has_nothing())
    }
}

impl CmSink for EventQueue {
    fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    fn report(&self, owner: Token, outcome: Outcome) {
        let decode = |private_data: &PrivateData| CmData::decode(private_data.bytes());
        self.push_item(match outcome {
            Outcome::Requested(request) => {
                let data = CmData::decode(request.data());
                let event = Event::ConnReq {
                    pep: owner,
                    id: self.next_id(),
                    request: Some(request),
                    data,
                    attachment: None,
                };
                Item::Event(event, None)
            }
            Outcome::Connected(private_data) => {
                let data = decode(&private_data);
                Item::Event(Event::Connected { ep: owner, data }, None)
            }
            Outcome::Failed {
                err,
                status,
                private_data,
            } => Item::Error(EqError {
                owner,
                err,
                prov_errno: status,
                cm_data: decode(&private_data),
                data: 0,
                context: None,
            }),
            Outcome::Ended(target) => Item::Event(Event::Shutdown { ep: owner }, Some(target)),
        });
    }

    fn forget(&self, owner: Token) {
        Self::forget(self, owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(eq: &EventQueue, peek: bool) -> Result<u32> {
        eq.read(peek, |event| match event {
            Event::User { event, .. } => Ok(*event),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn events_come_in_order_and_can_be_looked_at() {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        assert_eq!(number(&eq, false), Err(FiErrno::EAGAIN));
        assert_eq!(eq.trywait(), Ok(()));
        eq.write(1, b"a", Some(Token(1)));
        eq.write(2, b"b", Some(Token(2)));
        assert_eq!(eq.trywait(), Err(FiErrno::EAGAIN));
        assert_eq!(number(&eq, true), Ok(1));
        assert_eq!(number(&eq, false), Ok(1));
        let refused: Result<()> = eq.read(false, |_| Err(FiErrno::ETOOSMALL));
        assert_eq!(refused, Err(FiErrno::ETOOSMALL));
        assert_eq!(number(&eq, false), Ok(2));
        assert_eq!(number(&eq, false), Err(FiErrno::EAGAIN));
        assert!(
            !eq.dispatcher.wait().is_ready(),
            "an empty queue must not be readable"
        );
    }

    /// `fi_trywait(3)` processes what makes the descriptor readable although no event of the queue
    /// follows: here an event of an identifier without an endpoint.
    #[test]
    fn a_descriptor_without_an_event_is_quiet_after_trywait() {
        let config = EqConfig { wait: WaitKind::Fd };
        let eq = EventQueue::open(config).unwrap();
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let channel = eq.dispatcher.registry().channel(&device).unwrap();
        let id = channel.create_id().unwrap();
        let addr = (std::net::Ipv4Addr::LOCALHOST, 9).into();
        id.resolve_addr(None, addr).unwrap();
        eq.dispatcher.wait().wake();
        assert!(eq.dispatcher.wait().is_ready());
        assert_eq!(eq.trywait(), Ok(()));
        assert!(!eq.dispatcher.wait().is_ready());
        eq.write(1, b"", Some(Token(1)));
        assert_eq!(eq.trywait(), Err(FiErrno::EAGAIN));
        assert!(eq.dispatcher.wait().is_ready());
        drop(id);
    }

    #[test]
    fn an_error_stops_reading_until_it_is_taken() {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        assert_eq!(eq.read_error().err(), Some(FiErrno::EAGAIN));
        eq.push_error(EqError {
            owner: Token(3),
            err: FiErrno::ECONNREFUSED,
            prov_errno: 28,
            cm_data: CmData::EMPTY,
            data: 0,
            context: None,
        });
        eq.write(1, b"", Some(Token(1)));
        assert_eq!(number(&eq, false), Err(FiErrno::EAVAIL));
        assert_eq!(eq.read_error().unwrap().err, FiErrno::ECONNREFUSED);
        assert_eq!(eq.read_error().err(), Some(FiErrno::EAGAIN));
        assert_eq!(number(&eq, false), Ok(1));
    }

    #[test]
    fn a_closed_owner_s_events_are_forgotten() {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        for event in 0..4 {
            eq.write(event, b"", Some(Token(event as usize % 2)));
        }
        eq.forget(Token(0));
        assert_eq!(number(&eq, false), Ok(1));
        assert_eq!(number(&eq, false), Ok(3));
        assert_eq!(number(&eq, false), Err(FiErrno::EAGAIN));
    }

    /// An object at the address of a closed address vector is closed, while events of the vector
    /// are unread.
    #[test]
    fn events_of_a_closed_vector_stay() {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let address = Token(0x1000);
        eq.write_operation_error(address, FiErrno::EINVAL, 7, 1);
        eq.write(5, b"", None);
        // those of the later object
        eq.write_error(address, FiErrno::ENOMEM);
        eq.write(6, b"", Some(address));
        eq.forget(address);
        assert_eq!(number(&eq, false), Err(FiErrno::EAVAIL));
        let error = eq.read_error().unwrap();
        assert_eq!((error.owner, error.context), (address, Some(7)));
        assert_eq!(number(&eq, false), Ok(5));
        assert_eq!(number(&eq, false), Err(FiErrno::EAGAIN));
    }

    /// An endpoint whose flush takes as long as the test wants.
    struct Slow(std::sync::Barrier);

    impl CmTarget for Slow {
        fn cm_event(&self, _: crate::verbs::CmEvent) {}
        fn before_shutdown(&self) {
            self.0.wait();
            self.0.wait();
        }
    }

    fn shutdown(event: &mut Event) -> Result<bool> {
        Ok(matches!(event, Event::Shutdown { .. }))
    }

    /// One reader flushes the endpoint's operations before it returns `FI_SHUTDOWN`. Others do not
    /// get the event before that, nor spin meanwhile.
    #[test]
    fn no_reader_gets_the_end_of_a_connection_too_early() {
        for peek in [false, true] {
            let config = EqConfig {
                wait: WaitKind::Unspec,
            };
            let eq = EventQueue::open(config).unwrap();
            let slow = Arc::new(Slow(std::sync::Barrier::new(2)));
            let target: Arc<dyn CmTarget> = Arc::clone(&slow) as _;
            eq.report(Token(1), Outcome::Ended(Arc::downgrade(&target)));
            eq.write(1, b"behind", Some(Token(2)));
            std::thread::scope(|scope| {
                let first = scope.spawn(|| eq.read(peek, shutdown));
                slow.0.wait();
                assert_eq!(eq.read(false, shutdown), Err(FiErrno::EAGAIN));
                assert_eq!(eq.trywait(), Ok(()));
                assert!(!eq.dispatcher.wait().is_ready());
                let second = scope.spawn(|| eq.sread(false, None, shutdown));
                std::thread::sleep(Duration::from_millis(10));
                slow.0.wait();
                assert_eq!(first.join().unwrap(), Ok(true));
                // the second reader gets the event that the first leaves
                assert_eq!(second.join().unwrap(), Ok(peek));
            });
            assert_eq!(eq.read(false, shutdown).is_ok(), peek);
            assert_eq!(eq.read(false, shutdown), Err(FiErrno::EAGAIN));
        }
    }

    /// A reader does not spin while the events of the connection manager cannot be taken, and gets
    /// other events.
    #[test]
    fn a_waiting_reader_pauses_after_an_error() {
        let (backend, events) = crate::verbs::replaced::with_failing_events();
        let device = crate::verbs::devices(&[backend], false).remove(0);
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let channel = eq.dispatcher.registry().channel(&device).unwrap();
        let id = channel.create_id().unwrap();
        let to = (std::net::Ipv4Addr::LOCALHOST, 9).into();
        id.resolve_addr(None, to).unwrap();
        let time = Some(Duration::from_millis(100));
        let begin = std::time::Instant::now();
        assert_eq!(eq.sread(false, time, |_| Ok(())), Err(FiErrno::EAGAIN));
        assert!(begin.elapsed() >= Duration::from_millis(100));
        let calls = events.calls.load(std::sync::atomic::Ordering::Relaxed);
        assert!((1..20).contains(&calls), "{calls} calls");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                eq.write(9, b"", None);
            });
            assert_eq!(eq.sread(false, None, |_| Ok(())), Ok(()));
        });
        drop(id);
    }

    #[test]
    fn a_waiting_reader_is_woken() {
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let short = Some(Duration::from_millis(10));
        assert_eq!(eq.sread(false, short, |_| Ok(())), Err(FiErrno::EAGAIN));
        let writer = {
            let eq = Arc::clone(&eq);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                eq.write(9, b"", None);
            })
        };
        assert_eq!(eq.sread(false, None, |_| Ok(())), Ok(()));
        writer.join().unwrap();
    }
}
