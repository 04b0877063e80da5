//! The sources of a completion queue's completions, and their destination.
//!
//! A completion queue has a device queue for endpoints whose work requests complete there
//! (`device_queue.rs`), and any number of other sources, with their own polling. Each read of the
//! queue runs all of them. A source passes completions to a [`Sink`]: none, one or many for each
//! work completion that it polls.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::errno::Result;
use crate::queue::{Completion, CompletionError, EntryWriter};

/// Maximum number of completions that a source may pass to a read without room; they are queued in
/// the backlog.
pub(super) const BATCH: usize = 16;

/// A source of completions with its own polling, added to a completion queue by
/// [`CompletionQueue::add_source`](super::CompletionQueue::add_source).
///
/// All functions are called with the queue's lock held and must not call the queue.
pub trait Source: std::fmt::Debug + Send + Sync {
    /// Makes progress, and passes new completions to `sink`, in order: at most `max`, of which the
    /// queue holds those for which the reader has no room. 0: only other progress. If one step of
    /// the source completes several operations, the last step may exceed `max`.
    ///
    /// Called at most once per read of the queue, and not while the queue holds completions that
    /// an earlier call has passed.
    ///
    /// # Errors
    /// The source has lost completions: `EOVERRUN`. A read of the queue that has no completions
    /// returns the error. The other sources are run nevertheless.
    fn progress(&self, sink: &mut Sink<'_>, max: usize) -> Result<()>;

    /// Makes [`Self::fd`] readable when the source next has new completions or other progress to
    /// make. The caller calls [`Self::progress`] once more before it sleeps. After a failure, which
    /// each thread that sleeps has to find, [`Self::fd`] stays readable.
    ///
    /// # Errors
    /// The source cannot wake the caller, which then does not sleep.
    fn arm(&self) -> Result<()>;

    /// The descriptor that becomes readable after [`Self::arm`], if the source has one. It stays
    /// the same, and the source keeps it open. A source of a queue without a wait object may get
    /// one later, before a counter of its endpoint watches the queue. A counter of another endpoint
    /// that watches the queue already looks at it periodically, until it watches the queue once
    /// more. Several threads may wait for the descriptor, on the queue and on counters: one that
    /// has armed the source calls [`Self::progress`] and wakes the others.
    fn fd(&self) -> Option<RawFd>;
}

/// An entry of the backlog.
#[derive(Debug)]
pub(super) enum Entry {
    Done(Completion),
    Failed(CompletionError),
}

#[cold]
fn queue(backlog: &mut VecDeque<Entry>, entry: Entry) {
    backlog.push_back(entry);
}

/// Moves at most `max` completions of the backlog to `writer`, and stops at an error. Returns their
/// number.
pub(super) fn take<W: EntryWriter>(
    backlog: &mut VecDeque<Entry>,
    max: usize,
    writer: &mut W,
) -> usize {
    let mut count = 0;
    while count < max
        && let Some(Entry::Done(completion)) = backlog.front()
    {
        writer.write(completion);
        backlog.pop_front();
        count += 1;
    }
    count
}

/// Receives the completions of one read: stores them in the reader's buffer, or, after an error or
/// when the buffer is full, in the queue's backlog.
pub struct Sink<'a, W: EntryWriter + ?Sized = dyn EntryWriter + 'a> {
    writer: &'a mut W,
    /// Number of further completions that `writer` accepts.
    room: usize,
    backlog: &'a mut VecDeque<Entry>,
    /// [`EntryWriter::uses_sources`].
    sources: bool,
}

impl<W: EntryWriter + ?Sized> std::fmt::Debug for Sink<'_, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sink")
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

impl<'a, W: EntryWriter> Sink<'a, W> {
    #[inline(always)]
    pub(super) fn new(writer: &'a mut W, room: usize, backlog: &'a mut VecDeque<Entry>) -> Self {
        Self {
            sources: writer.uses_sources(),
            writer,
            room,
            backlog,
        }
    }

    /// Runs a source once, for at most `max` completions.
    ///
    /// # Errors
    /// The source's.
    #[inline]
    pub(super) fn run(&mut self, source: &dyn Source, max: usize) -> Result<()> {
        let room = if self.is_open() { self.room } else { 0 };
        // a source is compiled for one type of writer
        let mut sink: Sink<'_> = Sink {
            writer: self.writer,
            room,
            backlog: self.backlog,
            sources: self.sources,
        };
        let result = source.progress(&mut sink, max);
        self.room -= room - sink.room;
        if !self.backlog.is_empty() {
            self.room -= take(self.backlog, self.room, self.writer);
        }
        result
    }
}

impl<W: EntryWriter + ?Sized> Sink<'_, W> {
    /// Passes on the next completion. Allocates if the reader's buffer is full.
    #[inline(always)]
    pub fn complete(&mut self, completion: &Completion) {
        if self.room != 0 && self.backlog.is_empty() {
            self.writer.write(completion);
            self.room -= 1;
        } else {
            queue(self.backlog, Entry::Done(*completion));
        }
    }

    /// As [`Self::complete`], while [`Self::is_open`].
    #[inline(always)]
    pub(crate) fn complete_open(&mut self, completion: &Completion) {
        debug_assert!(self.is_open());
        self.writer.write(completion);
        self.room -= 1;
    }

    /// Passes on a failed operation. Allocates.
    #[inline(always)]
    pub fn fail(&mut self, error: CompletionError) {
        queue(self.backlog, Entry::Failed(error));
    }

    /// Passes on an entry.
    #[inline(always)]
    pub(super) fn pass(&mut self, entry: &Entry) {
        match entry {
            Entry::Done(completion) => self.complete(completion),
            Entry::Failed(error) => self.fail(*error),
        }
    }

    /// Number of further completions that the reader's buffer has room for.
    #[inline(always)]
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Whether the next `count` completions need their [`Completion::src_addr`]: the reader uses
    /// it, or has no room for them, so that another one reads them later.
    #[inline(always)]
    pub(crate) fn uses_sources(&self, count: usize) -> bool {
        self.sources || count > self.room || !self.backlog.is_empty()
    }

    /// Whether the next completion is stored in the reader's buffer.
    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.room != 0 && self.backlog.is_empty()
    }
}

impl<'a> Sink<'a> {
    /// A sink for a source, with the room of a reader. The backlog is empty.
    #[inline(always)]
    pub(super) fn of_reader<W: EntryWriter + 'a>(
        writer: &'a mut W,
        room: usize,
        backlog: &'a mut VecDeque<Entry>,
    ) -> Self {
        Self {
            sources: writer.uses_sources(),
            writer,
            room,
            backlog,
        }
    }

    /// As [`Sink::queueing`], for a source.
    pub(super) fn of_source(none: &'a mut NoReader, backlog: &'a mut VecDeque<Entry>) -> Self {
        Self {
            writer: none,
            room: 0,
            backlog,
            sources: true,
        }
    }
}

impl<'a> Sink<'a, NoReader> {
    /// A sink that queues all completions in the backlog.
    pub(super) fn queueing(none: &'a mut NoReader, backlog: &'a mut VecDeque<Entry>) -> Self {
        Self::new(none, 0, backlog)
    }

    /// Number of entries of the backlog.
    pub(super) fn queued(&self) -> usize {
        self.backlog.len()
    }
}

/// The writer of a sink without room, used outside a read.
#[derive(Debug)]
pub(super) struct NoReader;

impl EntryWriter for NoReader {
    fn write(&mut self, _: &Completion) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::errno::FiErrno;
    use crate::flags::Flags;
    use crate::queue::{CompletionQueue, Counter, CqConfig, WaitKind};
    use parking_lot::Mutex;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    /// Number of a completion of an endless source.
    const ENDLESS: usize = 99;

    /// A source that passes on the entries that the test has put into it.
    #[derive(Debug)]
    struct Scripted {
        ready: Mutex<VecDeque<Entry>>,
        /// Whether it has an unlimited number of completions behind these entries.
        endless: AtomicBool,
        fails: AtomicBool,
        calls: AtomicUsize,
        wait: Option<crate::queue::wait::WaitSet>,
        counter: Option<Arc<Counter>>,
    }

    impl Scripted {
        fn new(waits: bool, counter: Option<Arc<Counter>>) -> Arc<Self> {
            Arc::new(Self {
                ready: Mutex::default(),
                endless: AtomicBool::new(false),
                fails: AtomicBool::new(false),
                calls: AtomicUsize::new(0),
                wait: waits.then(|| crate::queue::wait::WaitSet::new().unwrap()),
                counter,
            })
        }

        fn put(&self, entries: impl IntoIterator<Item = Entry>) {
            self.ready.lock().extend(entries);
            if let Some(wait) = &self.wait {
                wait.wake();
            }
        }
    }

    impl Source for Scripted {
        fn progress(&self, sink: &mut Sink<'_>, max: usize) -> Result<()> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.fails.load(Ordering::Relaxed) {
                return Err(FiErrno::EOVERRUN);
            }
            let mut ready = self.ready.lock();
            if self.endless.load(Ordering::Relaxed) {
                let missing = max.saturating_sub(ready.len());
                ready.extend((0..missing).map(|_| done(ENDLESS)));
            }
            let count = ready.len().min(max);
            for entry in ready.drain(..count) {
                match entry {
                    Entry::Done(completion) => sink.complete(&completion),
                    Entry::Failed(error) => sink.fail(error),
                }
                if let Some(counter) = &self.counter {
                    counter.count(1);
                }
            }
            Ok(())
        }
        fn arm(&self) -> Result<()> {
            self.wait.as_ref().unwrap().clear();
            Ok(())
        }
        fn fd(&self) -> Option<RawFd> {
            self.wait.as_ref().map(|wait| wait.fd())
        }
    }

    fn done(number: usize) -> Entry {
        Entry::Done(Completion {
            src_addr: 100 + number as u64,
            ..Completion::new(number, Flags::RECV)
        })
    }

    fn failed(number: usize) -> Entry {
        Entry::Failed(CompletionError {
            completion: Completion::new(number, Flags::RECV),
            olen: 0,
            err: FiErrno::EIO,
            prov_errno: 0,
            vendor_err: None,
        })
    }

    fn domain() -> Arc<Domain> {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        Domain::open(&device, DomainConfig::default()).unwrap()
    }

    fn queue(domain: &Arc<Domain>, wait: WaitKind) -> Arc<CompletionQueue> {
        let config = CqConfig {
            wait,
            sources_only: true,
            ..CqConfig::default()
        };
        CompletionQueue::open(domain.queues(), config).unwrap()
    }

    /// Numbers of the completions of one read, each with its source address.
    fn read(cq: &CompletionQueue, max: usize) -> Result<Vec<usize>> {
        let mut numbers = Vec::new();
        let count = cq.read(max, &mut |completion: &Completion| {
            assert_eq!(completion.src_addr, 100 + completion.context as u64);
            numbers.push(completion.context);
        })?;
        assert_eq!(count, numbers.len());
        Ok(numbers)
    }

    #[test]
    fn one_call_passes_on_none_one_or_many_completions() {
        let cq = queue(&domain(), WaitKind::None);
        let sources = [Scripted::new(false, None), Scripted::new(false, None)];
        for source in &sources {
            cq.add_source(Arc::clone(source) as _).unwrap();
        }
        assert_eq!(read(&cq, 4), Err(FiErrno::EAGAIN));
        sources[0].put([done(1)]);
        assert_eq!(read(&cq, 4), Ok(vec![1]));
        sources[0].put((10..13).map(done));
        sources[1].put((20..22).map(done));
        assert_eq!(read(&cq, 2), Ok(vec![10, 11]));
        // the second source has passed its share of that read
        assert_eq!(read(&cq, 4), Ok(vec![20, 21, 12]));
        // more than [`BATCH`] completions
        sources[1].put((0..50).map(done));
        assert_eq!(read(&cq, 40), Ok((0..40).collect()));
        assert_eq!(read(&cq, 40), Ok((40..50).collect()));
        let calls = sources.each_ref().map(|s| s.calls.load(Ordering::Relaxed));
        assert_eq!(calls, [6, 6], "one per read");
    }

    #[test]
    fn completions_behind_an_error_wait_until_it_is_read() {
        let cq = queue(&domain(), WaitKind::None);
        let source = Scripted::new(false, None);
        cq.add_source(Arc::clone(&source) as _).unwrap();
        source.put([done(1), failed(2), done(3)]);
        assert_eq!(read(&cq, 4), Ok(vec![1]));
        source.put([done(4)]);
        assert_eq!(read(&cq, 4), Err(FiErrno::EAVAIL));
        assert_eq!(cq.read_error().unwrap().completion.context, 2);
        assert_eq!(read(&cq, 4), Ok(vec![3, 4]));
    }

    /// A source that always has completions takes no other source's turn, and does not fill the
    /// backlog, whatever the application reads at a time.
    #[test]
    fn a_busy_source_has_its_share() {
        for max in [1, 3, BATCH, 100] {
            let cq = queue(&domain(), WaitKind::None);
            let sources = [(); 3].map(|()| Scripted::new(false, None));
            for source in &sources {
                cq.add_source(Arc::clone(source) as _).unwrap();
            }
            sources[0].endless.store(true, Ordering::Relaxed);
            sources[2].endless.store(true, Ordering::Relaxed);
            sources[1].put((0..10).map(done));
            let mut own: Vec<usize> = Vec::new();
            // of each source's share, one completion at a time
            for _ in 0..10 * 3 * max {
                own.extend(read(&cq, max).unwrap().iter().filter(|n| **n != ENDLESS));
                assert!(cq.queued() <= 3 * BATCH, "{max}: {}", cq.queued());
            }
            assert_eq!(own, (0..10).collect::<Vec<_>>(), "reads of {max}");
        }
    }

    /// Progress without reads, for a counter for instance, fills the backlog to the queue's size.
    #[test]
    fn progress_without_reads_is_bounded_and_fair() {
        let config = CqConfig {
            size: 8,
            wait: WaitKind::None,
            sources_only: true,
            ..CqConfig::default()
        };
        let cq = CompletionQueue::open(domain().queues(), config).unwrap();
        let sources = [(); 2].map(|()| Scripted::new(false, None));
        for source in &sources {
            cq.add_source(Arc::clone(source) as _).unwrap();
        }
        sources[0].endless.store(true, Ordering::Relaxed);
        sources[1].put((0..4).map(done));
        for _ in 0..100 {
            assert!(cq.poll_ready());
            assert!(cq.queued() <= 8);
        }
        let numbers = read(&cq, 8).unwrap();
        let own: Vec<_> = numbers.into_iter().filter(|n| *n != ENDLESS).collect();
        assert_eq!(own, [0, 1, 2, 3]);
    }

    #[test]
    fn a_failed_source_does_not_stop_the_others() {
        let cq = queue(&domain(), WaitKind::None);
        let sources = [(); 3].map(|()| Scripted::new(false, None));
        for source in &sources {
            cq.add_source(Arc::clone(source) as _).unwrap();
        }
        sources[1].fails.store(true, Ordering::Relaxed);
        sources[2].put([done(1)]);
        // once outside a read, and once in a read
        assert_eq!(cq.progress(), Err(FiErrno::EOVERRUN));
        sources[0].put([done(2)]);
        assert_eq!(read(&cq, 4), Ok(vec![1, 2]));
        assert_eq!(read(&cq, 4), Err(FiErrno::EOVERRUN));
        let calls = sources.each_ref().map(|s| s.calls.load(Ordering::Relaxed));
        assert_eq!(calls, [3, 3, 3]);
    }

    #[test]
    fn a_source_wakes_a_reader_until_it_is_removed() {
        let cq = queue(&domain(), WaitKind::Unspec);
        let mute: Arc<dyn Source> = Scripted::new(false, None);
        assert_eq!(cq.add_source(mute), Err(FiErrno::EINVAL));
        let source = Scripted::new(true, None);
        let shared: Arc<dyn Source> = Arc::clone(&source) as _;
        cq.add_source(Arc::clone(&shared)).unwrap();
        assert_eq!(cq.trywait(), Ok(()));
        let putting = {
            let source = Arc::clone(&source);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                source.put([done(1)]);
            })
        };
        let mut ignore = |_: &Completion| {};
        assert_eq!(cq.sread(1, 1, None, &mut ignore), Ok(1));
        putting.join().unwrap();
        source.put([done(2)]);
        assert_eq!(cq.trywait(), Err(FiErrno::EAGAIN));
        assert_eq!(read(&cq, 1), Ok(vec![2]));
        cq.remove_source(&shared);
        source.put([done(3)]);
        let soon = Some(Duration::from_millis(10));
        let read = cq.sread(1, 1, soon, &mut ignore);
        assert_eq!(read, Err(FiErrno::EAGAIN));
        drop(shared);
        assert_eq!(Arc::strong_count(&source), 1);
    }

    /// A thread that sleeps when a source is added has not armed it.
    #[test]
    fn a_source_that_is_added_wakes_sleeping_readers() {
        let cq = queue(&domain(), WaitKind::Unspec);
        assert_eq!(cq.trywait(), Ok(()));
        let wait = cq.wait.as_ref().unwrap();
        assert!(!wait.is_ready());
        cq.add_source(Scripted::new(true, None) as _).unwrap();
        assert!(wait.is_ready());
        assert_eq!(cq.trywait(), Ok(()));
        assert!(!wait.is_ready());
    }

    /// The queue has a channel, but the source's completions do not make it readable.
    #[test]
    fn a_source_wakes_those_who_wait_for_a_counter() {
        let domain = domain();
        let config = CqConfig {
            wait: WaitKind::Unspec,
            ..CqConfig::default()
        };
        let cq = CompletionQueue::open(domain.queues(), config).unwrap();
        let counter = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
        let source = Scripted::new(true, Some(Arc::clone(&counter)));
        cq.add_source(Arc::clone(&source) as _).unwrap();
        counter.watch(&cq);
        let putting = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            source.put([done(1), done(2)]);
        });
        let limit = Some(Duration::from_secs(20));
        assert_eq!(counter.wait(2, limit), Ok(()));
        putting.join().unwrap();
        assert_eq!(read(&cq, 4), Ok(vec![1, 2]));
    }

    /// The failure of a queue ends the waits of all threads for a counter.
    #[test]
    fn a_failed_source_ends_the_waits_for_a_counter() {
        let domain = domain();
        for kind in [WaitKind::None, WaitKind::Unspec] {
            let cq = queue(&domain, WaitKind::Unspec);
            let counter = Counter::open(domain.queues(), kind).unwrap();
            let source = Scripted::new(true, None);
            cq.add_source(Arc::clone(&source) as _).unwrap();
            counter.watch(&cq);
            let limit = Some(Duration::from_secs(20));
            std::thread::scope(|scope| {
                let waits = [(); 2].map(|()| scope.spawn(|| counter.wait(1, limit)));
                std::thread::sleep(Duration::from_millis(20));
                source.fails.store(true, Ordering::Relaxed);
                source.put([]);
                for wait in waits {
                    assert_eq!(wait.join().unwrap(), Err(FiErrno::EOVERRUN));
                }
            });
        }
    }

    /// A thread that was told to wait polls the descriptor; another one then finds the failure.
    #[test]
    fn a_failure_leaves_the_descriptor_of_a_counter_readable() {
        let domain = domain();
        let cq = queue(&domain, WaitKind::Unspec);
        let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        let source = Scripted::new(true, None);
        cq.add_source(Arc::clone(&source) as _).unwrap();
        counter.watch(&cq);
        assert_eq!(counter.trywait(), Ok(()));
        source.fails.store(true, Ordering::Relaxed);
        source.put([]);
        for _ in 0..2 {
            // clears the event of the source
            assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
            let poll = crate::queue::wait::WaitSet::new().unwrap();
            poll.add(counter.fd().unwrap()).unwrap();
            assert!(poll.is_ready());
        }
    }

    #[test]
    fn a_queue_of_sources_alone_has_no_device_queue() {
        let domain = domain();
        let cq = queue(&domain, WaitKind::None);
        assert_eq!(cq.device_cq().err(), Some(FiErrno::EINVAL));
        assert!(
            CompletionQueue::open(domain.queues(), CqConfig::default())
                .is_ok_and(|cq| cq.device_cq().is_ok())
        );
    }

    /// Counts its calls.
    #[derive(Default)]
    struct Thread(AtomicUsize);

    impl crate::queue::Assisted for Thread {
        fn assist(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each way of polling looks at what the domain's thread has to do.
    #[test]
    fn all_who_poll_assist_the_thread_of_the_domain() {
        let domain = domain();
        let thread = Arc::new(Thread::default());
        let assisted: std::sync::Weak<Thread> = Arc::downgrade(&thread);
        domain.queues().set_assisted(assisted);
        let cq = queue(&domain, WaitKind::Unspec);
        let counter = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
        let source = Scripted::new(true, None);
        cq.add_source(Arc::clone(&source) as _).unwrap();
        let looks = |act: &dyn Fn()| {
            let before = thread.0.load(Ordering::Relaxed);
            for _ in 0..1000 {
                act();
            }
            thread.0.load(Ordering::Relaxed) - before
        };
        let ways: [(&str, &dyn Fn()); 6] = [
            ("fi_cq_read", &|| drop(read(&cq, 1))),
            ("fi_cq_read of 0", &|| drop(read(&cq, 0))),
            ("fi_poll", &|| _ = cq.poll_ready()),
            ("fi_poll of a counter", &|| _ = counter.poll()),
            ("fi_trywait", &|| _ = cq.trywait()),
            ("fi_trywait of a counter", &|| _ = counter.trywait()),
        ];
        for (name, act) in ways {
            assert!(looks(act) != 0, "{name}");
        }
    }
}
