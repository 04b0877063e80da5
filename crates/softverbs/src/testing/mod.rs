//! The device as a program uses it, for its unit tests and its fuzz targets.

mod device;
mod input;
#[cfg(test)]
#[path = "../../tests/common/refuse.rs"]
pub(crate) mod refuse;

pub(crate) use device::*;
pub(crate) use input::Input;
