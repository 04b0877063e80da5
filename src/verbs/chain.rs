//! Requests that are collected, and posted as one list (`ibv_post_send(3)`).

#![allow(unsafe_code, reason = "calls verbs")]

use rdma_core_sys as sys;

use super::{Qp, SendRequest, Sge};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// The requests of a send queue that wait for further ones, with which they are posted.
#[derive(Debug, Default)]
pub(crate) struct DelayedRequests {
    /// Allocated with the first request.
    chain: Option<Box<Chain>>,
    /// Whether there are requests.
    delayed: bool,
}

impl DelayedRequests {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.delayed
    }

    /// Whether there is no room for another request.
    pub(crate) fn is_full(&self) -> bool {
        self.chain.as_ref().is_some_and(|chain| chain.is_full())
    }

    /// Appends a request. The caller has checked that there is room.
    ///
    /// # Safety
    /// As [`Qp::post_send`], for the post that follows.
    pub(crate) unsafe fn push(&mut self, request: &SendRequest<'_>) {
        let chain = self.chain.get_or_insert_with(|| Box::new(Chain::new()));
        // SAFETY: as this function.
        unsafe { chain.push(request) };
        self.delayed = true;
    }

    /// Posts the requests, in order. If the device refuses one, the queue pair is moved to its
    /// error state, in which the device flushes the requests: their operations were begun, and
    /// fail with a completion.
    #[inline(never)]
    pub(crate) fn post(&mut self, qp: &Qp) {
        self.delayed = false;
        if let Some(chain) = &mut self.chain {
            chain.post(qp);
        }
    }
}

/// Requests that are not posted yet, in order. Their buffers stay valid until they complete.
#[derive(Default)]
struct Chain {
    wrs: Vec<sys::ibv_send_wr>,
    /// The sges of all requests, in order.
    sges: Vec<Sge>,
}

// SAFETY: the pointers in the requests are used only by the post, which sets them before.
unsafe impl Send for Chain {}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chain({})", self.wrs.len())
    }
}

impl Chain {
    /// Maximum number of requests.
    const MAX: usize = 64;
    /// Maximum number of sges of all requests, and of one.
    const MAX_SGES: usize = 128;
    const MAX_IOV: usize = 16;

    /// Allocates room for all requests.
    fn new() -> Self {
        Self {
            wrs: Vec::with_capacity(Self::MAX),
            sges: Vec::with_capacity(Self::MAX_SGES),
        }
    }

    fn is_full(&self) -> bool {
        self.wrs.len() >= Self::MAX || self.sges.len() + Self::MAX_IOV > Self::MAX_SGES
    }

    /// # Safety
    /// As [`DelayedRequests::push`].
    unsafe fn push(&mut self, request: &SendRequest<'_>) {
        self.sges.extend_from_slice(request.sges());
        // SAFETY: plain data; the pointers in it are set before it is posted.
        let wr = unsafe { std::ptr::read(&raw const request.wr) };
        self.wrs.push(wr);
    }

    /// See [`DelayedRequests::post`].
    fn post(&mut self, qp: &Qp) {
        let Some(posted) = self.post_from(qp, 0).err() else {
            return self.clear();
        };
        warn_log!(
            EpData,
            "a list of requests could not be posted: {}",
            posted.1
        );
        let _ = qp.set_error();
        if let Err((_, error)) = self.post_from(qp, posted.0) {
            warn_log!(EpData, "nor flushed: {error}");
        }
        self.clear();
    }

    fn clear(&mut self) {
        self.wrs.clear();
        self.sges.clear();
    }

    /// Posts the requests behind the first `done`. An error has the number of requests that are
    /// posted.
    fn post_from(&mut self, qp: &Qp, done: usize) -> std::result::Result<(), (usize, FiErrno)> {
        let mut sge = 0;
        for wr in &mut self.wrs {
            wr.sg_list = super::wr::sg_list(&self.sges[sge..]);
            sge += wr.num_sge as usize;
        }
        let mut next = std::ptr::null_mut();
        for wr in self.wrs[done..].iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        if next.is_null() {
            return Ok(());
        }
        #[cfg(test)]
        self.wrs[done..].iter().for_each(|wr| qp.note_fence(wr));
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live, and the requests are a valid chain; the callers of `push`
        // keep the buffers valid.
        let posted = unsafe { sys::ibv_post_send(qp.raw, next, &raw mut bad) };
        self.result(posted, bad)
    }

    /// The result of a post that `bad` ended. A device that names no request has posted all.
    fn result(
        &self,
        posted: i32,
        bad: *mut sys::ibv_send_wr,
    ) -> std::result::Result<(), (usize, FiErrno)> {
        let result: Result<()> = FiErrno::from_post(posted);
        let is_bad = |wr: &sys::ibv_send_wr| std::ptr::eq(wr, bad);
        result.map_err(|error| {
            (
                self.wrs.iter().position(is_bad).unwrap_or(self.wrs.len()),
                error,
            )
        })
    }
}
