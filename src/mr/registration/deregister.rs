//! Ends the registrations of a region: its key is revoked first.

use super::Registration;
use super::segment_list::List;
use super::segments::Segments;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::mr::revocation::{AwaitedRevocation, Deregistration, Retired};
use crate::verbs::Mr;

/// Ends a registration: afterwards no access to the memory through it is possible. `reserved`: as
/// [`AwaitedRevocation::deregister`].
fn deregister(
    revocation: Option<&AwaitedRevocation<'_>>,
    mr: Mr,
    reserved: usize,
) -> Deregistration {
    match revocation {
        Some(revocation) => revocation.deregister(mr, reserved),
        None => match mr.deregister() {
            Ok(()) => Deregistration::Done,
            Err(mr) => Deregistration::Busy(mr),
        },
    }
}

impl Registration {
    /// Ends all registrations. After success no access to the memory through them is possible.
    ///
    /// # Errors
    /// `EBUSY`: an access was under way until the timeout. No new access can start. The caller can
    /// repeat the call.
    pub(in crate::mr) fn end(&self) -> Result<()> {
        let mut record = self.record.lock();
        if record.over {
            return Ok(());
        }
        if !record.withdrawn {
            record.withdrawn = true;
            if let Some(directory) = &self.directory {
                record.revoked = directory.withdraw(self.key());
            }
        }
        let directory = self.directory.as_ref();
        let revocation =
            directory.map(|directory| directory.await_acknowledgements(record.revoked));
        let mut mrs = self.mrs.write();
        let mut registered = std::mem::take(&mut *mrs);
        registered.extend(self.segments.iter().flat_map(Segments::take));
        if let Some(directory) = directory {
            registered.extend(directory.take_stuck(self.entry.generation));
        }
        // continues after a failure, so that no registration permits a new access
        for mr in registered {
            match deregister(revocation.as_ref(), mr, record.key_holders.len()) {
                Deregistration::Reserved(mr) => record.key_holders.push(mr),
                Deregistration::Busy(mr) => mrs.push(mr),
                Deregistration::Done => {}
            }
        }
        if !mrs.is_empty() {
            return Err(FiErrno::EBUSY);
        }
        let mut lists: Vec<_> = record.short_list.take().into_iter().collect();
        lists.extend(
            record
                .long_list
                .take()
                .into_iter()
                .flat_map(List::into_words),
        );
        let retired = Retired {
            keys: std::mem::take(&mut record.key_holders),
            lists,
            cell: record.cell.take(),
        };
        if let Some(revocation) = revocation {
            revocation.retire(retired);
        }
        record.over = true;
        Ok(())
    }

    /// Whether ending the registrations has begun.
    pub(in crate::mr) fn is_ending(&self) -> bool {
        self.record.lock().withdrawn
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.end().is_err() {
            warn_log!(
                Mr,
                "region with key {:#x}: the access of a stopped peer has not ended; \
                 its registrations are not freed",
                self.key()
            );
            // These registrations permit no access and their keys stay reserved. Deregistering them
            // would block again.
            self.mrs.get_mut().drain(..).for_each(std::mem::forget);
            // Peers may use the keys of the others, the lists and the event cell as well.
            std::mem::forget(std::mem::take(self.record.get_mut()));
        }
    }
}
