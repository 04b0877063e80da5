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
    let segment = OwnSegment::create(1, 0, true).unwrap();
    let regions = Regions::new().unwrap();
    let mut live: Vec<Live> = Vec::new();
    let mut dead: Vec<Key> = Vec::new();
    let mut seen = HashSet::new();
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => {
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
                let key = regions.register(&segment, pd, range, access).unwrap();
                assert!(key.0 != 0 && seen.insert(key.0), "a key comes back");
                live.push(Live {
                    key,
                    pd,
                    range,
                    access,
                });
            }
            1 if !live.is_empty() => {
                let gone = live.swap_remove(input.below(live.len()));
                regions.deregister(&segment, gone.key, |_| true).unwrap();
                dead.push(gone.key);
            }
            _ => {
                let (region, key) = match input.u8() % 3 {
                    0 if !dead.is_empty() => (None, dead[input.below(dead.len())]),
                    1 => {
                        let key = Key(input.u32());
                        (live.iter().find(|region| region.key == key).copied(), key)
                    }
                    _ if !live.is_empty() => {
                        let region = live[input.below(live.len())];
                        (Some(region), region.key)
                    }
                    _ => continue,
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
                        .filter(|r| {
                            r.pd == pd && (!write || r.access & IBV_ACCESS_LOCAL_WRITE != 0)
                        })
                        .and_then(|r| r.finds(addr, u64::from(len)))
                };
                assert_eq!(regions.local(&sge, pd, write), expected);
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
                let found = resolve(&segment.map, target, addr, u64::from(len), right);
                assert_eq!(found.map(|place| place.addr), expected);
            }
        }
    }
}
