//! Regions that are bound to one endpoint (`FI_MR_ENDPOINT`): the endpoint's own key directory.

#![allow(unsafe_code, reason = "registers memory as C does")]

use super::endpoints::{End, config};
use crate::domain::{Domain, DomainConfig};
use crate::mr::{Access, Buffer, Form, Mode, MrConfig, Region, RegionConfig};
use crate::queue::BindFlags;
use crate::rdm::{AddressVector, Endpoint};

/// The directory exists from the first region of the endpoint to the close of the endpoint, whether
/// the endpoint is enabled, cannot be enabled, or neither.
#[test]
fn a_directory_lives_until_its_endpoint_is_closed() {
    let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
    let form = Form::new(Mode::LOCAL | Mode::ALLOCATED | Mode::ENDPOINT, false);
    let mr = MrConfig {
        form,
        ..MrConfig::default()
    };
    let domain = Domain::open(
        &device,
        DomainConfig {
            mr,
            ..DomainConfig::default()
        },
    )
    .unwrap();
    let count = || domain.mr().directory_count();
    let memory = [0_u8; 64];
    let before = count();
    for (fails, enabled) in [(false, false), (true, false), (true, true), (false, true)] {
        let ep = Endpoint::new(&domain, config()).unwrap();
        let buffers = [Buffer {
            addr: memory.as_ptr().cast(),
            len: memory.len(),
        }];
        let attributes = RegionConfig {
            buffers: &buffers,
            access: Access::REMOTE_READ,
            requested_key: 5,
            ..RegionConfig::default()
        };
        // SAFETY: the region is dropped before the memory.
        let region = unsafe { Region::register(domain.mr(), &attributes) }.unwrap();
        region.bind_endpoint(ep.scope()).unwrap();
        region.enable().unwrap();
        assert_eq!(count(), before + 1);
        let cq = super::endpoints::queue(&domain, 0);
        let av = AddressVector::open(4).unwrap();
        ep.bind_vector(&av).unwrap();
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        if fails {
            ep.fail_to_enable().unwrap();
            assert_eq!(count(), before + 1, "has the record of the region");
        }
        if enabled {
            ep.enable().unwrap();
        }
        drop(region);
        let end = End { ep, cq, av };
        end.ep.close();
        assert_eq!(count(), before, "{fails} {enabled}");
    }
}
