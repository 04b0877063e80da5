//! Which parts of memory are registered, and by what: disjoint ranges in order. No I/O.

/// A range, and what covers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part<M> {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) by: M,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Cover<M> {
    /// Disjoint, in order; neighbours by the same registration are one.
    parts: Vec<Part<M>>,
}

impl<M> Default for Cover<M> {
    fn default() -> Self {
        Self { parts: Vec::new() }
    }
}

impl<M: Clone + PartialEq> Cover<M> {
    pub(super) fn parts(&self) -> &[Part<M>] {
        &self.parts
    }

    /// Nothing covers this range any more.
    pub(super) fn cut(&mut self, start: u64, end: u64) {
        let mut left = Vec::with_capacity(self.parts.len() + 1);
        for part in self.parts.drain(..) {
            if part.end <= start || part.start >= end {
                left.push(part);
                continue;
            }
            if part.start < start {
                left.push(Part {
                    end: start,
                    ..part.clone()
                });
            }
            if part.end > end {
                left.push(Part { start: end, ..part });
            }
        }
        self.parts = left;
    }

    /// Only this covers the range from now on.
    pub(super) fn put(&mut self, start: u64, end: u64, by: &M) {
        self.cut(start, end);
        let at = self.parts.partition_point(|part| part.start < start);
        let by = by.clone();
        self.parts.insert(at, Part { start, end, by });
        self.parts.dedup_by(|next, part| {
            let one = part.end == next.start && part.by == next.by;
            if one {
                part.end = next.end;
            }
            one
        });
    }

    /// What covers all of these bytes by itself.
    pub(super) fn find(&self, addr: u64, len: u64) -> Option<&M> {
        let at = self.parts.partition_point(|part| part.start <= addr);
        let part = self.parts.get(at.checked_sub(1)?)?;
        (addr.checked_add(len)? <= part.end).then_some(&part.by)
    }

    /// From where to where parts touch each other around these bytes, if all of them are covered.
    pub(super) fn around(&self, addr: u64, len: u64) -> Option<(u64, u64)> {
        let end = addr.checked_add(len)?;
        let mut around: Option<(u64, u64)> = None;
        for part in &self.parts {
            match &mut around {
                Some(known) if known.1 == part.start => known.1 = part.end,
                Some(known) if known.0 <= addr && end <= known.1 => break,
                _ => around = Some((part.start, part.end)),
            }
        }
        around.filter(|known| known.0 <= addr && end <= known.1)
    }

    /// Of the pairs of parts that touch each other, the shortest.
    pub(super) fn shortest_pair(&self) -> Option<(u64, u64)> {
        let pairs = self.parts.windows(2).filter_map(|pair| match pair {
            [a, b] if a.end == b.start => Some((a.start, b.end)),
            _ => None,
        });
        pairs.min_by_key(|(start, end)| end - start)
    }

    /// The bytes of a range in order: address, length, and what covers them.
    pub(super) fn walk(&self, start: u64, len: u64) -> Vec<(u64, u64, Option<&M>)> {
        let end = start.saturating_add(len);
        let (mut at, mut list) = (start, Vec::new());
        for part in &self.parts {
            let (from, to) = (part.start.max(at), part.end.min(end));
            if from >= to {
                continue;
            }
            if from > at {
                list.push((at, from - at, None));
            }
            list.push((from, to - from, Some(&part.by)));
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

    /// The same, byte by byte.
    fn bytes(cover: &Cover<u8>) -> [Option<u8>; SPACE] {
        let mut bytes = [None; SPACE];
        for part in cover.parts() {
            bytes[part.start as usize..part.end as usize].fill(Some(part.by));
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
                if by == 0 {
                    cover.cut(start as u64, end as u64);
                    model[start..end].fill(None);
                } else {
                    cover.put(start as u64, end as u64, &by);
                    model[start..end].fill(Some(by));
                }
                prop_assert_eq!(bytes(&cover), model);
                for pair in cover.parts().windows(2) {
                    prop_assert!(pair[0].end <= pair[1].start);
                    prop_assert!(pair[0].end < pair[1].start || pair[0].by != pair[1].by);
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
