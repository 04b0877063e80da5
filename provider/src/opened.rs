//! The open fabrics and domains: hints of `fi_getinfo(3)` can name one, and its answers name the
//! first. They are found by their addresses, which are not dereferenced: a handle in hints may be
//! that of another provider, or closed.

use parking_lot::Mutex;
use weft::mr::Mode;

/// An open fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fabric {
    pub(crate) name: String,
    /// The API version of the application.
    pub(crate) version: u32,
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
    /// What its registrations require of the application.
    pub(crate) mode: Mode,
}

struct Entry<T> {
    handle: usize,
    /// A child has copies of the objects of its parent, and no use of them.
    process: u32,
    object: T,
}

/// Open objects of one kind, in the order in which they were opened.
pub(crate) struct Opened<T>(Mutex<Vec<Entry<T>>>);

pub(crate) static FABRICS: Opened<Fabric> = Opened::new();
pub(crate) static DOMAINS: Opened<Domain> = Opened::new();

impl<T: Clone> Opened<T> {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub(crate) fn add(&self, handle: usize, object: T) {
        self.0.lock().push(Entry {
            handle,
            process: std::process::id(),
            object,
        });
    }

    pub(crate) fn remove(&self, handle: usize) {
        self.0.lock().retain(|entry| entry.handle != handle);
    }

    /// The object with this handle.
    pub(crate) fn get(&self, handle: usize) -> Option<T> {
        let all = self.0.lock();
        let mut all = all.iter();
        let found = all.find(|entry| entry.handle == handle);
        found.map(|entry| entry.object.clone())
    }

    /// The handle of the first object that this process has opened and that satisfies `condition`.
    pub(crate) fn first(&self, condition: impl Fn(&T) -> bool) -> Option<usize> {
        let process = std::process::id();
        let all = self.0.lock();
        let mut all = all.iter().filter(|entry| entry.process == process);
        let found = all.find(|entry| condition(&entry.object));
        found.map(|entry| entry.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_one_of_this_process_is_found() {
        let list = Opened::new();
        assert_eq!(list.first(|_: &u8| true), None);
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
        list.0.lock()[0].process ^= 1;
        assert_eq!(list.first(|_| true), Some(24));
    }
}
