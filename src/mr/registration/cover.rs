//! Map from address ranges to the registrations that cover them: disjoint ranges in a B-tree, so
//! that a change or a look-up among n ranges takes O(log n) steps. Does no I/O.

use std::collections::BTreeMap;

/// Disjoint address ranges with the registration that covers each. `M` identifies a registration.
#[derive(Clone, Debug)]
pub(super) struct Cover<M> {
    /// First byte to (the byte behind the last, registration). Disjoint; adjacent ranges of the
    /// same registration are merged.
    ranges: BTreeMap<u64, (u64, M)>,
}

impl<M> Default for Cover<M> {
    fn default() -> Self {
        Self {
            ranges: BTreeMap::new(),
        }
    }
}

impl<M: Clone + PartialEq> Cover<M> {
    /// The registration of each range, in ascending order of addresses.
    pub(super) fn into_registrations(self) -> impl Iterator<Item = M> {
        self.ranges.into_values().map(|(_, by)| by)
    }

    /// As [`Self::into_registrations`], by reference.
    pub(super) fn registrations(&self) -> impl Iterator<Item = &M> {
        self.ranges.values().map(|(_, by)| by)
    }

    /// Removes a range. The registrations that covered it, wholly or in part, are appended to
    /// `gone`, once for each of their ranges.
    pub(super) fn cut(&mut self, start: u64, end: u64, gone: &mut Vec<M>) {
        if start >= end {
            return;
        }
        // the range that begins before `start`
        if let Some((&first, (behind, by))) = self.ranges.range_mut(..start).next_back()
            && *behind > start
        {
            let (last, by) = (std::mem::replace(behind, start), by.clone());
            debug_assert!(first < start);
            if last > end {
                self.ranges.insert(end, (last, by.clone()));
            }
            gone.push(by);
        }
        while let Some((&first, _)) = self.ranges.range(start..end).next() {
            if let Some((behind, by)) = self.ranges.remove(&first) {
                if behind > end {
                    self.ranges.insert(end, (behind, by.clone()));
                }
                gone.push(by);
            }
        }
    }

    /// Covers the range by this registration alone. `gone` as for [`Self::cut`].
    pub(super) fn put(&mut self, start: u64, end: u64, by: &M, gone: &mut Vec<M>) {
        self.cut(start, end, gone);
        let (mut start, mut end) = (start, end);
        if let Some((&first, (behind, before))) = self.ranges.range(..start).next_back()
            && *behind == start
            && before == by
        {
            start = first;
        }
        if let Some((behind, next)) = self.ranges.get(&end)
            && next == by
        {
            let behind = *behind;
            self.ranges.remove(&end);
            end = behind;
        }
        self.ranges.insert(start, (end, by.clone()));
    }

    /// The registration that covers all of these bytes.
    pub(super) fn find(&self, addr: u64, len: u64) -> Option<&M> {
        let (_, (end, by)) = self.ranges.range(..=addr).next_back()?;
        (addr.checked_add(len)? <= *end).then_some(by)
    }

    /// The extent of the adjacent ranges around these bytes; `None` if a byte is not covered.
    pub(super) fn around(&self, addr: u64, len: u64) -> Option<(u64, u64)> {
        let wanted = addr.checked_add(len)?;
        let (&first, (last, _)) = self.ranges.range(..=addr).next_back()?;
        let (mut start, mut end) = (first, *last);
        for (&next, (behind, _)) in self.ranges.range(end..) {
            if next != end {
                break;
            }
            end = *behind;
        }
        if end < wanted || end <= addr {
            return None;
        }
        for (&first, (behind, _)) in self.ranges.range(..start).rev() {
            if *behind != start {
                break;
            }
            start = first;
        }
        Some((start, end))
    }

    /// The sub-ranges of a range in ascending order, gaps included: address, length, registration.
    pub(super) fn walk(&self, start: u64, len: u64) -> Vec<(u64, u64, Option<&M>)> {
        let end = start.saturating_add(len);
        let (mut at, mut list) = (start, Vec::new());
        let first = self
            .ranges
            .range(..=start)
            .next_back()
            .map(|(first, _)| *first);
        for (&from, (to, by)) in self.ranges.range(first.unwrap_or(start)..end) {
            let (from, to) = (from.max(at), (*to).min(end));
            if from >= to {
                continue;
            }
            if from > at {
                list.push((at, from - at, None));
            }
            list.push((from, to - from, Some(by)));
            at = to;
        }
        if at < end {
            list.push((at, end - at, None));
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPACE: usize = 40;

    /// The same as an array of bytes.
    fn bytes(cover: &Cover<u8>) -> [Option<u8>; SPACE] {
        let mut bytes = [None; SPACE];
        for (start, (end, by)) in &cover.ranges {
            bytes[*start as usize..*end as usize].fill(Some(*by));
        }
        bytes
    }

    proptest! {
        #[test]
        fn it_agrees_with_bytes(steps in prop::collection::vec((0..SPACE, 1..SPACE, 0..5_u8), 1..30)) {
            let mut cover = Cover::default();
            let mut model = [None; SPACE];
            for (start, len, by) in steps {
                let end = (start + len).min(SPACE);
                let mut gone = Vec::new();
                let mut covered: Vec<u8> = model[start..end].iter().flatten().copied().collect();
                if by == 0 {
                    cover.cut(start as u64, end as u64, &mut gone);
                    model[start..end].fill(None);
                } else {
                    cover.put(start as u64, end as u64, &by, &mut gone);
                    model[start..end].fill(Some(by));
                }
                gone.sort_unstable();
                gone.dedup();
                covered.sort_unstable();
                covered.dedup();
                prop_assert_eq!(gone, covered);
                prop_assert_eq!(bytes(&cover), model);
                let ranges: Vec<_> = cover.ranges.iter().map(|(start, (end, by))| (*start, *end, *by)).collect();
                for pair in ranges.windows(2) {
                    prop_assert!(pair[0].1 <= pair[1].0);
                    prop_assert!(pair[0].1 < pair[1].0 || pair[0].2 != pair[1].2);
                }
                for start in 0..SPACE {
                    for end in start + 1..=SPACE {
                        let (addr, len) = (start as u64, (end - start) as u64);
                        let range = &model[start..end];
                        let one = range.iter().all(|by| by.is_some() && *by == range[0]);
                        prop_assert_eq!(cover.find(addr, len).copied(), if one { range[0] } else { None });
                        let all = range.iter().all(Option::is_some);
                        prop_assert_eq!(cover.around(addr, len).is_some(), all);
                        let walked: Vec<_> = cover
                            .walk(addr, len)
                            .into_iter()
                            .flat_map(|(at, len, by)| (at..at + len).map(move |at| (at, by.copied())))
                            .collect();
                        let expected: Vec<_> = (start..end).map(|at| (at as u64, model[at])).collect();
                        prop_assert_eq!(walked, expected);
                    }
                }
            }
        }
    }
}
