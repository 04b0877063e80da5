//! `fid_fabric`: the network that domains, passive endpoints and event queues belong to.

use weft::verbs::Device;

use crate::getinfo;

/// An open fabric.
pub(crate) struct Fabric {
    /// The API version that the application requested: it determines the layout of the
    /// application's structures.
    pub(crate) api_version: u32,
    pub(crate) name: String,
    /// The devices that belonged to it when it was opened.
    pub(crate) devices: Vec<String>,
}

impl Fabric {
    /// Whether a device belongs to the fabric: it did when the fabric was opened, or it has a port
    /// there now. The name of an InfiniBand fabric contains the prefix that the subnet manager
    /// assigns, which may change; and `fi_getinfo` names a device's fabric by one of its ports,
    /// which may go down.
    pub(crate) fn has(&self, device: &Device) -> bool {
        self.devices.iter().any(|name| name == device.name())
            || getinfo::has_port_in(device, &self.name)
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
            name: name.to_owned(),
            devices: devices.iter().map(|&name| name.to_owned()).collect(),
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
