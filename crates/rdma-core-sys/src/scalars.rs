//! The kernel's scalar types that the headers use.

pub type __u8 = u8;
pub type __u16 = u16;
pub type __u32 = u32;
pub type __u64 = u64;
pub type __s32 = i32;
pub type __be16 = u16;
pub type __be32 = u32;
pub type __be64 = u64;
