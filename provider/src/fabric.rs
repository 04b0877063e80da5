//! `fid_fabric`: the network that domains, passive endpoints and event queues belong to.

use weft::verbs::Device;

use crate::{getinfo, opened};

/// An open fabric.
pub(crate) struct Fabric {
    /// The API version that the application requested: it determines the layout of the
    /// application's structures.
    pub(crate) api_version: u32,
    /// As hints of `fi_getinfo(3)` find it.
    pub(crate) opened: opened::Fabric,
}

impl Fabric {
    /// Whether a device belongs to the fabric.
    pub(crate) fn has(&self, device: &Device) -> bool {
        getinfo::is_in_fabric(device, &self.opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_belongs_to_one_fabric() {
        let device = weft::verbs::devices(&[softverbs::backend()], false).remove(0);
        let open = |name: &str, devices: &[&str]| Fabric {
            api_version: 0,
            opened: opened::Fabric {
                name: name.to_owned(),
                version: 0,
                devices: devices.iter().map(|&name| name.to_owned()).collect(),
            },
        };
        assert!(open("softverbs", &[]).has(&device));
        for other in ["", "Ethernet", "softverbs2"] {
            assert!(!open(other, &["mlx5_0"]).has(&device), "{other}");
            // the fabric had this name when it was opened
            let fabric = open(other, &["mlx5_0", device.name()]);
            assert!(fabric.has(&device), "{other}");
        }
    }
}
