//! Slabs: tables with free lists, whose keys are not reused at once.

use std::fmt;
use std::marker::PhantomData;

/// Bits of a key that are the place; the others count its reuses.
const PLACE: u32 = 24;

/// The key of an entry: place and generation in 32 bits.
pub struct Key<T> {
    number: u32,
    of: PhantomData<fn() -> T>,
}

impl<T> Key<T> {
    /// From the number of a key, which may be of no entry.
    #[inline]
    pub const fn from_number(number: u32) -> Self {
        let of = PhantomData;
        Self { number, of }
    }

    /// The number.
    #[inline]
    pub const fn number(self) -> u32 {
        self.number
    }

    /// The place in the table.
    pub(super) const fn place(self) -> usize {
        (self.number & ((1 << PLACE) - 1)) as usize
    }
}

// not derived, because these do not depend on `T`
impl<T> Clone for Key<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Key<T> {}
impl<T> PartialEq for Key<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl<T> Eq for Key<T> {}
impl<T> std::hash::Hash for Key<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}
impl<T> fmt::Debug for Key<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, generation) = (self.place(), self.number >> PLACE);
        write!(f, "{place}.{generation}")
    }
}

enum Cell<T> {
    /// The next free place.
    Free(Option<u32>),
    Used(T),
}

/// A table of entries `T` with keys for `M`. Insertion allocates only if no place is free.
pub(super) struct Slab<M, T> {
    places: Vec<(u32, Cell<T>)>,
    free: Option<u32>,
    len: usize,
    of: PhantomData<fn() -> M>,
}

impl<M, T> Slab<M, T> {
    pub(super) const fn new() -> Self {
        Self {
            places: Vec::new(),
            free: None,
            len: 0,
            of: PhantomData,
        }
    }

    /// The number of entries.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Adds an entry. `None`: the slab has 2^24 entries.
    #[inline(always)]
    pub(super) fn insert(&mut self, value: T) -> Option<Key<M>> {
        let place = match self.free {
            Some(place) => place,
            None => self.grow()?,
        };
        let (generation, at) = self.places.get_mut(place as usize)?;
        if let Cell::Free(next) = at {
            self.free = *next;
        }
        *at = Cell::Used(value);
        self.len += 1;
        Some(Key::from_number(place | *generation << PLACE))
    }

    /// Whether [`Self::insert`] would fail.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free.is_none() && self.places.len() >> PLACE != 0
    }

    /// Adds a free place.
    #[cold]
    fn grow(&mut self) -> Option<u32> {
        let place = u32::try_from(self.places.len()).ok()?;
        if place >> PLACE != 0 {
            return None;
        }
        self.places.push((0, Cell::Free(None)));
        Some(place)
    }

    pub(super) fn remove(&mut self, key: Key<M>) -> Option<T> {
        self.get(key)?;
        let (generation, at) = &mut self.places[key.place()];
        *generation = generation.wrapping_add(1) & (u32::MAX >> PLACE);
        let value = std::mem::replace(at, Cell::Free(self.free));
        self.free = Some(key.place() as u32);
        self.len -= 1;
        match value {
            Cell::Used(value) => Some(value),
            Cell::Free(_) => None,
        }
    }

    /// As [`Self::remove`], without moving the entry.
    #[inline(always)]
    pub(super) fn free(&mut self, key: Key<M>) {
        let Some((generation, at @ Cell::Used(_))) = self.places.get_mut(key.place()) else {
            return;
        };
        if *generation != key.number >> PLACE {
            return;
        }
        *generation = generation.wrapping_add(1) & (u32::MAX >> PLACE);
        *at = Cell::Free(self.free);
        self.free = Some(key.place() as u32);
        self.len -= 1;
    }

    #[inline]
    pub(super) fn get(&self, key: Key<M>) -> Option<&T> {
        match self.places.get(key.place()) {
            Some((generation, Cell::Used(value))) if *generation == key.number >> PLACE => {
                Some(value)
            }
            _ => None,
        }
    }

    /// The keys of the entries that fulfil a condition; examines all.
    pub(super) fn keys_where(&self, is: impl Fn(&T) -> bool) -> Vec<Key<M>> {
        let places = self.places.iter().enumerate();
        let keys = places.filter_map(|(place, (generation, at))| match at {
            // a place fits into its bits
            Cell::Used(value) if is(value) => {
                Some(Key::from_number(place as u32 | *generation << PLACE))
            }
            _ => None,
        });
        keys.collect()
    }

    /// Whether an entry fulfils a condition; examines all.
    pub(super) fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        self.places.iter().any(|(_, at)| match at {
            Cell::Used(value) => is(value),
            Cell::Free(_) => false,
        })
    }

    #[inline]
    pub(super) fn get_mut(&mut self, key: Key<M>) -> Option<&mut T> {
        match self.places.get_mut(key.place()) {
            Some((generation, Cell::Used(value))) if *generation == key.number >> PLACE => {
                Some(value)
            }
            _ => None,
        }
    }

    /// The key of the first entry at or behind a place.
    pub(super) fn at_or_behind(&self, place: usize) -> Option<Key<M>> {
        let places = self.places.iter().enumerate().skip(place);
        let mut keys = places.filter_map(|(place, (generation, at))| {
            let key = Key::from_number(place as u32 | *generation << PLACE);
            matches!(at, Cell::Used(_)).then_some(key)
        });
        keys.next()
    }

    /// The key of the entry behind one, in the order of places.
    pub(super) fn after(&self, key: Key<M>) -> Option<Key<M>> {
        self.at_or_behind(key.place() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_removed_entries_find_nothing() {
        let mut slab = Slab::<u8, i32>::new();
        let first = slab.insert(1).unwrap();
        let second = slab.insert(2).unwrap();
        assert_eq!(slab.remove(first), Some(1));
        assert_eq!((slab.remove(first), slab.get(first)), (None, None));
        let third = slab.insert(3).unwrap();
        assert_eq!(third.place(), first.place(), "the place is reused");
        assert_eq!((slab.get(first), slab.get(third)), (None, Some(&3)));
        assert_eq!(slab.at_or_behind(0), Some(third));
        assert_eq!(
            (slab.after(third), slab.after(second)),
            (Some(second), None)
        );
        assert_eq!(slab.len(), 2);
    }
}
