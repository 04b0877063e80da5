//! The two endpoints of a case: connected, or with many peers.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, open_ep};
use abi_tests::pair::{Pair, Role};
use libfabric_sys::*;

/// Two endpoints of one domain, bound to the setup's completion queue. The client accesses the
/// regions of the server.
pub(crate) struct Ends {
    pub(crate) client: *mut fid_ep,
    pub(crate) server: *mut fid_ep,
    /// Their addresses for each other. Connected endpoints ignore them.
    pub(crate) to_server: fi_addr_t,
    pub(crate) to_client: fi_addr_t,
    /// Where their receives are posted: the endpoints, or their shared contexts.
    pub(crate) client_rx: *mut fid_ep,
    pub(crate) server_rx: *mut fid_ep,
    /// The address vector, NULL for connected endpoints.
    av: *mut fid_av,
}

impl Ends {
    /// Endpoints of the type of the setup's `fi_info`.
    ///
    /// # Safety
    /// An open setup of `lib`.
    pub(crate) unsafe fn open(lib: &Lib, setup: &Setup) -> Self {
        let info = setup.info.first();
        // SAFETY: the caller passes an open setup.
        unsafe {
            if (*(*info).ep_attr).type_ == FI_EP_RDM {
                return Self::with_av(setup, info);
            }
            let shares = (*(*info).ep_attr).rx_ctx_cnt == FI_SHARED_CONTEXT;
            let context = || shares.then(|| open_srx(setup, info));
            let (of_client, of_server) = (context(), context());
            let Pair { client, server } = Pair::connect(lib, setup, info, |ep, role| {
                assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
                let own = match role {
                    Role::Client => of_client,
                    Role::Server => of_server,
                };
                if let Some(own) = own {
                    assert_eq!(bind(ep, own, 0), 0, "binding the receive context");
                }
            });
            Self {
                client,
                server,
                client_rx: of_client.unwrap_or(client),
                server_rx: of_server.unwrap_or(server),
                to_server: FI_ADDR_UNSPEC,
                to_client: FI_ADDR_UNSPEC,
                av: null_mut(),
            }
        }
    }

    unsafe fn with_av(setup: &Setup, info: *mut fi_info) -> Self {
        // SAFETY: the caller passes an open setup; fids as they are opened.
        unsafe {
            let domain = setup.domain;
            let mut attr = std::mem::zeroed::<fi_av_attr>();
            let mut av = null_mut();
            let ret = call!(
                (*domain).ops,
                av_open,
                domain,
                &raw mut attr,
                &raw mut av,
                null_mut()
            );
            assert_eq!(ret, 0, "fi_av_open");
            let open = || {
                let ep = open_ep(setup, info);
                assert_eq!(bind(ep, av, 0), 0, "binding the address vector");
                assert_eq!(control(ep, FI_ENABLE, null_mut()), 0, "fi_enable");
                let mut name = [0_u64; 16];
                let mut len = size_of_val(&name);
                let to = name.as_mut_ptr().cast();
                let ret = call!((*ep).cm, getname, &raw mut (*ep).fid, to, &raw mut len);
                assert_eq!(ret, 0, "fi_getname");
                let mut addr = FI_ADDR_NOTAVAIL;
                let ret = call!(
                    (*av).ops,
                    insert,
                    av,
                    name.as_ptr().cast(),
                    1,
                    &raw mut addr,
                    0,
                    null_mut()
                );
                assert_eq!(ret, 1, "fi_av_insert");
                (ep, addr)
            };
            let ((client, to_client), (server, to_server)) = (open(), open());
            Self {
                client,
                server,
                client_rx: client,
                server_rx: server,
                to_server,
                to_client,
                av,
            }
        }
    }

    /// Whether a refused access ends the connection for the application.
    pub(crate) fn are_connected(&self) -> bool {
        self.av.is_null()
    }

    /// Closes both.
    ///
    /// # Safety
    /// Neither is closed yet.
    pub(crate) unsafe fn close(self) {
        // SAFETY: the caller's promise.
        unsafe {
            assert_eq!(close(self.client), 0, "closing the client");
            assert_eq!(close(self.server), 0, "closing the server");
            for (own, ep) in [(self.client_rx, self.client), (self.server_rx, self.server)] {
                if own != ep {
                    assert_eq!(close(own), 0, "closing a receive context");
                }
            }
            if !self.av.is_null() {
                assert_eq!(close(self.av), 0, "closing the address vector");
            }
        }
    }
}

/// Opens a shared receive context.
unsafe fn open_srx(setup: &Setup, info: *mut fi_info) -> *mut fid_ep {
    let mut srx = null_mut();
    // SAFETY: the caller passes an open setup and a whole info.
    let ret = unsafe {
        let domain = setup.domain;
        call!(
            (*domain).ops,
            srx_ctx,
            domain,
            (*info).rx_attr,
            &raw mut srx,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_srx_context");
    srx
}
