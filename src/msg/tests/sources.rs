//! The device queue beside a further source of the same completion queue.

use std::os::fd::RawFd;

use super::*;
use crate::queue::WaitSet;
use crate::queue::source::{Sink, Source};

const ENDLESS: usize = usize::MAX;

/// A source that always has completions.
#[derive(Debug)]
struct Endless(WaitSet);

impl Source for Endless {
    fn progress(&self, sink: &mut Sink<'_>, max: usize) -> Result<()> {
        let completion = Completion {
            context: ENDLESS,
            ..Completion::default()
        };
        for _ in 0..max {
            sink.complete(&completion);
        }
        Ok(())
    }
    fn arm(&self) -> Result<()> {
        self.0.wake();
        Ok(())
    }
    fn fd(&self) -> Option<RawFd> {
        Some(self.0.fd())
    }
}

/// The backlog is bounded, and neither the device queue nor the source takes the other's turn.
#[test]
fn a_busy_source_and_the_device_queue_have_their_shares() {
    const MESSAGES: usize = 64;
    for max in [1, 2, 16] {
        let (client, server) = connected(false, |_| {});
        let source = Endless(WaitSet::new().unwrap());
        client.cq.add_source(Arc::new(source)).unwrap();
        let buffer = Buffer::all(&client.domain, 64);
        let target = Buffer::all(&server.domain, 64);
        for context in 0..MESSAGES {
            server.recv(&target, 64, context).unwrap();
            client.send(&buffer, 64, context).unwrap();
        }
        let (mut sent, mut others) = (Vec::new(), 0);
        let start = Instant::now();
        while sent.len() < MESSAGES {
            assert!(start.elapsed() < LIMIT, "{max}: {sent:?} and {others}");
            let mut writer = |completion: &Completion| match completion.context {
                ENDLESS => others += 1,
                context => sent.push(context),
            };
            client.cq.read(max, &mut writer).unwrap();
            assert!(client.cq.queued() <= 16, "{max}: {}", client.cq.queued());
        }
        assert_eq!(sent, (0..MESSAGES).collect::<Vec<_>>());
        assert!(others >= MESSAGES / 4, "{others} beside {MESSAGES}");
    }
}
