//! The open fabrics and domains: hints of `fi_getinfo(3)` can name one, and its answers name the
//! first. They are found by their addresses, which are not dereferenced: a handle in hints may be
//! that of another provider, or closed.

use forks::PerProcess;
use parking_lot::{Mutex, MutexGuard};
use weft::auth::AuthKey;
use weft::mr::Mode;

use crate::addr::Format;

/// An open fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fabric {
    pub(crate) name: String,
    /// The API version of the application.
    pub(crate) version: u32,
    /// The devices whose fabric had this name in `fi_getinfo(3)` when it was opened.
    pub(crate) devices: Vec<String>,
}

/// An open domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Domain {
    /// The name of its device.
    pub(crate) name: String,
    /// The handle of its fabric.
    pub(crate) fabric: usize,
    /// The API version of the application.
    pub(crate) version: u32,
    /// Whether its endpoints have many peers (`FI_EP_RDM`).
    pub(crate) rdm: bool,
    /// Whether its shared receive contexts can have connected endpoints on XRC.
    pub(crate) xrc: bool,
    /// What its registrations require of the application.
    pub(crate) mode: Mode,
    /// Whether peers' operations on its regions are counted (`FI_RMA_EVENT`).
    pub(crate) events: bool,
    /// Whether its regions may be persistent (`FI_RMA_PMEM`).
    pub(crate) durable: bool,
    /// The format of the addresses in its address vectors.
    pub(crate) format: Format,
    /// The traffic class of its connections.
    pub(crate) traffic_class: Option<u8>,
    pub(crate) auth: Option<AuthKey>,
}

struct Entry<T> {
    handle: usize,
    object: T,
}

/// Open objects of one kind, in the order in which they were opened. A forked child has copies of
/// the objects of its parent, and does not find them.
pub(crate) struct Opened<T: Send + 'static>(PerProcess<Mutex<List<T>>>);

struct List<T>(Vec<Entry<T>>);

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

pub(crate) static FABRICS: Opened<Fabric> = Opened::new();
pub(crate) static DOMAINS: Opened<Domain> = Opened::new();

impl<T: Clone + Send + 'static> Opened<T> {
    const fn new() -> Self {
        Self(PerProcess::new(Mutex::new(List(Vec::new()))))
    }

    fn lock(&'static self) -> MutexGuard<'static, List<T>> {
        self.0.get().lock()
    }

    pub(crate) fn add(&'static self, handle: usize, object: T) {
        self.lock().0.push(Entry { handle, object });
    }

    pub(crate) fn remove(&'static self, handle: usize) {
        self.lock().0.retain(|entry| entry.handle != handle);
    }

    /// The object with this handle.
    pub(crate) fn get(&'static self, handle: usize) -> Option<T> {
        let all = self.lock();
        let mut all = all.0.iter();
        let found = all.find(|entry| entry.handle == handle);
        found.map(|entry| entry.object.clone())
    }

    /// The handle of the first object that satisfies `condition`.
    pub(crate) fn first(&'static self, condition: impl Fn(&T) -> bool) -> Option<usize> {
        let all = self.lock();
        let mut all = all.0.iter();
        let found = all.find(|entry| condition(&entry.object));
        found.map(|entry| entry.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_one_is_found() {
        static LIST: Opened<u8> = Opened::new();
        let list = &LIST;
        assert_eq!(list.first(|_| true), None);
        for (handle, object) in [(8, 1), (16, 2), (24, 2)] {
            list.add(handle, object);
        }
        assert_eq!((list.get(16), list.get(17)), (Some(2), None));
        assert_eq!(list.first(|object| *object == 2), Some(16));
        list.remove(16);
        assert_eq!(
            (list.get(16), list.first(|object| *object == 2)),
            (None, Some(24))
        );
    }
}
