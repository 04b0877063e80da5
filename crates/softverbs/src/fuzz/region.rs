//! Keys: registered, used and ended in any order.

use std::collections::HashSet;

use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_sge,
};

use super::Input;
use crate::key::Key;
use crate::region::{Range, Regions, Target, resolve};
use crate::segment::OwnSegment;

#[derive(Clone, Copy)]
struct Live {
    key: Key,
    pd: u32,
    range: Range,
    access: u32,
}

impl Live {
    /// The address of `len` bytes at `addr`, computed without the possibility of wrapping.
    fn finds(&self, addr: u64, len: u64) -> Option<u64> {
        let (addr, len) = (u128::from(addr), u128::from(len));
        let (start, room) = (u128::from(self.range.iova), u128::from(self.range.len));
        (addr >= start && addr + len <= start + room)
            .then(|| self.range.addr.wrapping_add((addr - start) as u64))
    }
}

/// While a key is valid, it gives access to its own range with its own rights. Afterwards it gives
/// no access.
///
/// # Panics
/// If this property does not hold.
pub fn regions(data: &[u8]) {
    let mut input = Input::new(data);
    let mut case = Case {
        segment: OwnSegment::create(1, 0, true).unwrap(),
        regions: Regions::new().unwrap(),
        live: Vec::new(),
        dead: Vec::new(),
        seen: HashSet::new(),
    };
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => case.register(&mut input),
            1 if !case.live.is_empty() => case.deregister(&mut input),
            _ => case.use_key(&mut input),
        }
    }
}

/// The regions, and the model of them.
struct Case {
    segment: OwnSegment,
    regions: Regions,
    live: Vec<Live>,
    dead: Vec<Key>,
    seen: HashSet<u32>,
}

impl Case {
    fn register(&mut self, input: &mut Input<'_>) {
        let len = input.edgy();
        let range = Range {
            addr: input.edgy(),
            len,
            // A region never wraps around: the registration calls check this.
            iova: input.edgy().min(u64::MAX - len),
        };
        let pd = u32::from(input.u8() % 3);
        let rights = [
            0,
            IBV_ACCESS_LOCAL_WRITE,
            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
            IBV_ACCESS_REMOTE_READ,
        ];
        let access = rights[input.below(4)];
        let key = self.regions.register(&self.segment, pd, range, access);
        let key = key.unwrap();
        assert!(key.0 != 0 && self.seen.insert(key.0), "a key comes back");
        self.live.push(Live {
            key,
            pd,
            range,
            access,
        });
    }

    fn deregister(&mut self, input: &mut Input<'_>) {
        let gone = self.live.swap_remove(input.below(self.live.len()));
        self.regions
            .deregister(&self.segment, gone.key, |_| true)
            .unwrap();
        self.dead.push(gone.key);
    }

    /// A key to use, and its region if it is valid.
    fn choose(&self, input: &mut Input<'_>) -> Option<(Option<Live>, Key)> {
        let (live, dead) = (&self.live, &self.dead);
        Some(match input.u8() % 3 {
            0 if !dead.is_empty() => (None, dead[input.below(dead.len())]),
            1 => {
                let key = Key(input.u32());
                (live.iter().find(|region| region.key == key).copied(), key)
            }
            _ if !live.is_empty() => {
                let region = live[input.below(live.len())];
                (Some(region), region.key)
            }
            _ => return None,
        })
    }

    /// Uses a key for an sge, and as a peer would.
    fn use_key(&self, input: &mut Input<'_>) {
        let Some((region, key)) = self.choose(input) else {
            return;
        };
        let near = region.map_or(0, |region| region.range.iova);
        let addr = near.wrapping_add(input.edgy());
        let len = input.edgy() as u32;
        let pd = u32::from(input.u8() % 3);
        let write = input.u8().is_multiple_of(2);
        let sge = ibv_sge {
            addr,
            length: len,
            lkey: key.0,
        };
        let expected = if len == 0 {
            Some(addr)
        } else {
            region
                .filter(|r| r.pd == pd && (!write || r.access & IBV_ACCESS_LOCAL_WRITE != 0))
                .and_then(|r| r.finds(addr, u64::from(len)))
        };
        assert_eq!(self.regions.local(&sge, pd, write), expected);
        let right = if write {
            IBV_ACCESS_REMOTE_WRITE
        } else {
            IBV_ACCESS_REMOTE_READ
        };
        let target = Target {
            key,
            addr,
            pd,
            qp: 2,
        };
        let expected = region
            .filter(|r| r.pd == pd && r.access & right != 0)
            .and_then(|r| r.finds(addr, u64::from(len)));
        let found = resolve(&self.segment.map, target, addr, u64::from(len), right);
        assert_eq!(found.map(|place| place.addr), expected);
    }
}
