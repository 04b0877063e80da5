//! Operations of a peer in the endpoint's operation table: lists through one slab, so that a post
//! allocates nothing once the table has grown.

use crate::rdm::slab::{Key, Slab};
use crate::wire::rdm::{Credit, Number};

/// An operation of the table.
pub(in crate::rdm) enum OpMark {}
pub(in crate::rdm) type OpKey = Key<OpMark>;

/// Credit that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uses {
    /// A message with a payload of so many bytes: EAGER, or RTS if the payload or the credit does
    /// not permit EAGER.
    Message(u64),
    /// A packet of an operation that was posted before, which uses this amount: NOTICE, DATA. It is
    /// posted before operations that wait: they may wait for the end of that one.
    Part(Credit),
    /// A packet that uses this amount and is answered: ATOMIC. The peer is held for it from the
    /// first post of the packet on, as for an RTS.
    Request(Credit),
    /// An answer, which uses none. It is posted before operations that wait for credit.
    Answer,
}

/// The form in which a packet is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// With its payload.
    Whole,
    /// A message as RTS.
    Rts,
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Entry<O> {
    pub(super) op: O,
    pub(super) uses: Uses,
    /// Waits for *processed*.
    pub(in crate::rdm) ack: bool,
    /// Since it was posted the first time: its number, form and credit.
    pub(super) number: Number,
    pub(super) form: Form,
    pub(in crate::rdm) spent: Credit,
    /// Its SEND has completed.
    pub(super) sent: bool,
    /// The peer has processed it.
    pub(in crate::rdm) acked: bool,
    /// It was completed.
    pub(super) done: bool,
    /// If it waits: the count of doubts about the peer's address when it was posted.
    pub(super) doubts: u32,
    next: Option<OpKey>,
}

impl<O> Entry<O> {
    pub(super) const fn new(op: O, uses: Uses, ack: bool) -> Self {
        Self {
            op,
            uses,
            ack,
            number: Number::new(0),
            form: Form::Whole,
            spent: Credit::ZERO,
            sent: false,
            acked: !ack,
            done: false,
            doubts: 0,
            next: None,
        }
    }
}

/// The table.
pub(in crate::rdm) type Table<O> = Slab<OpMark, Entry<O>>;

/// A list of operations, in order.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::rdm) struct List {
    ends: Option<(OpKey, OpKey)>,
}

impl List {
    /// The list of one operation.
    pub(super) const fn of(key: OpKey) -> Self {
        Self {
            ends: Some((key, key)),
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.ends.is_none()
    }

    pub(super) fn first(&self) -> Option<OpKey> {
        self.ends.map(|(first, _)| first)
    }

    pub(super) fn push<O>(&mut self, table: &mut Table<O>, key: OpKey) {
        if let Some(entry) = table.get_mut(key) {
            entry.next = None;
        }
        self.ends = Some(match self.ends {
            Some((first, last)) => {
                if let Some(last) = table.get_mut(last) {
                    last.next = Some(key);
                }
                (first, key)
            }
            None => (key, key),
        });
    }

    /// Puts one back that was the first.
    pub(super) fn push_front<O>(&mut self, table: &mut Table<O>, key: OpKey) {
        let first = self.first();
        if let Some(entry) = table.get_mut(key) {
            entry.next = first;
        }
        let last = self.ends.map_or(key, |(_, last)| last);
        self.ends = Some((key, last));
    }

    /// Takes the first one out of the list; it stays in the table.
    pub(super) fn pop<O>(&mut self, table: &Table<O>) -> Option<OpKey> {
        let (first, last) = self.ends?;
        let next = Self::next(table, first);
        self.ends = next.map(|next| (next, last));
        Some(first)
    }

    /// The operation behind one of a list.
    pub(super) fn next<O>(table: &Table<O>, key: OpKey) -> Option<OpKey> {
        table.get(key).and_then(|entry| entry.next)
    }

    /// Appends another list.
    pub(super) fn append<O>(&mut self, table: &mut Table<O>, other: &mut Self) {
        let Some((first, last)) = other.ends.take() else {
            return;
        };
        self.ends = Some(match self.ends {
            Some((begin, end)) => {
                if let Some(end) = table.get_mut(end) {
                    end.next = Some(first);
                }
                (begin, last)
            }
            None => (first, last),
        });
    }

    /// Adds another list, each operation in front of those that are later. Both lists are in order,
    /// and stay so. A list that begins behind the end of this one is appended.
    pub(super) fn merge<O: Copy>(
        &mut self,
        table: &mut Table<O>,
        other: &mut Self,
        is_later: impl Fn(O, O) -> bool,
    ) {
        let later = |table: &Table<O>, key: OpKey, than: OpKey| {
            let (op, than) = (table.get(key), table.get(than));
            op.zip(than)
                .is_some_and(|(op, than)| is_later(op.op, than.op))
        };
        if let (Some((_, last)), Some(first)) = (self.ends, other.first())
            && later(table, last, first)
        {
            let mut own = std::mem::take(self);
            while let (Some(next), Some(first)) = (own.first(), other.first()) {
                let from = match later(table, next, first) {
                    true => &mut *other,
                    false => &mut own,
                };
                if let Some(key) = from.pop(table) {
                    self.push(table, key);
                }
            }
            self.append(table, &mut own);
        }
        self.append(table, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order() {
        let mut table = Table::new();
        let (mut list, mut other) = (List::default(), List::default());
        for op in 0..3 {
            let entry = Entry::new(op, Uses::Answer, false);
            let key = table.insert(entry).unwrap();
            list.push(&mut table, key);
            let key = table
                .insert(Entry {
                    op: op + 3,
                    ..entry
                })
                .unwrap();
            other.push(&mut table, key);
        }
        list.append(&mut table, &mut other);
        assert!(other.is_empty());
        other.append(&mut table, &mut list);
        let mut order = Vec::new();
        while let Some(key) = other.pop(&table) {
            order.push(table.remove(key).unwrap().op);
        }
        assert_eq!(order, [0, 1, 2, 3, 4, 5]);
        assert_eq!((table.len(), other.first()), (0, None));
    }

    #[test]
    fn merged_lists_are_in_order() {
        let cases: [[&[u32]; 3]; 7] = [
            [&[], &[1, 2], &[1, 2]],
            [&[1, 2], &[], &[1, 2]],
            [&[1, 2], &[3, 4], &[1, 2, 3, 4]],
            [&[3, 4], &[1, 2], &[1, 2, 3, 4]],
            [&[1, 4, 5], &[2, 3, 6], &[1, 2, 3, 4, 5, 6]],
            [&[2, 3], &[1, 4], &[1, 2, 3, 4]],
            [&[1, 3], &[2], &[1, 2, 3]],
        ];
        for [own, other, expected] in cases {
            let mut table = Table::new();
            let mut list = |ops: &[u32]| {
                let mut list = List::default();
                for op in ops {
                    let entry = Entry::new(*op, Uses::Message(0), false);
                    let key = table.insert(entry).unwrap();
                    // one that was in another list before
                    table.get_mut(key).unwrap().next = Some(key);
                    list.push(&mut table, key);
                }
                list
            };
            let (mut own, mut other) = (list(own), list(other));
            own.merge(&mut table, &mut other, |op, than| op > than);
            assert!(other.is_empty());
            let mut order = Vec::new();
            while let Some(key) = own.pop(&table) {
                order.push(table.remove(key).unwrap().op);
            }
            assert_eq!(order, expected);
        }
    }
}
