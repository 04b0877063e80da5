//! Another address for an endpoint that is not enabled (`fi_setname(3)`).

use std::net::SocketAddr;

use super::listen::{is_in_the_way, is_in_use};
use crate::errno::{FiErrno, Result};

/// The outcome of [`rename`].
#[derive(Debug)]
pub(crate) enum Renamed<T> {
    /// The endpoint has the address already.
    Same,
    /// What is bound to the address, in place of what is bound to the earlier one.
    To(T),
    /// The address cannot be used, and what was bound to the earlier one was in the way: this is
    /// bound to it again; `None`: another process has taken the port meanwhile.
    Back(Option<T>, FiErrno),
}

/// Binds an endpoint to `addr` by `open`. Port 0 stands for the port that the endpoint has
/// (`fi_cm(3)`: a service address is allocated if none "has yet been assigned"), or for a free one.
/// `own`: the address to which the endpoint is bound, by what `release` closes. It stays bound
/// until the new one is, except where it is in the way.
///
/// # Errors
/// Those of `open`: nothing has changed.
pub(crate) fn rename<T>(
    own: Option<SocketAddr>,
    addr: SocketAddr,
    open: impl Fn(SocketAddr) -> Result<T>,
    release: impl FnOnce(),
) -> Result<Renamed<T>> {
    let mut wanted = addr;
    if let Some(own) = own.filter(|_| addr.port() == 0) {
        wanted.set_port(own.port());
    }
    if own == Some(wanted) {
        return Ok(Renamed::Same);
    }
    let mut opened = open(wanted);
    let is_own = |error: &FiErrno| own.is_some_and(|own| is_in_the_way(own, wanted, *error));
    let released = opened.as_ref().is_err_and(is_own);
    if released {
        release();
        opened = open(wanted);
    }
    if wanted != addr && opened.as_ref().is_err_and(|error| is_in_use(*error)) {
        opened = open(addr);
    }
    match opened {
        Ok(opened) => Ok(Renamed::To(opened)),
        Err(error) if released => {
            let back = own.and_then(|own| open(own).ok());
            Ok(Renamed::Back(back, error))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// The result of a call with these errors at the addresses that have one, and the steps.
    fn steps(
        own: Option<&str>,
        to: &str,
        errors: &[(&str, FiErrno)],
    ) -> (Result<Renamed<SocketAddr>>, Vec<String>) {
        let steps = RefCell::new(Vec::new());
        let open = |at: SocketAddr| {
            steps.borrow_mut().push(at.to_string());
            // once each: a later attempt succeeds
            let tries = steps
                .borrow()
                .iter()
                .filter(|step| **step == at.to_string())
                .count();
            let mut errors = errors.iter().filter(|(refused, _)| addr(refused) == at);
            errors
                .nth(tries - 1)
                .map_or(Ok(at), |(_, error)| Err(*error))
        };
        let release = || steps.borrow_mut().push("release".to_owned());
        let renamed = rename(own.map(addr), addr(to), open, release);
        (renamed, steps.into_inner())
    }

    #[test]
    fn the_port_stays_unless_the_address_has_one() {
        let (renamed, steps) = steps(None, "10.0.0.1:0", &[]);
        assert!(matches!(renamed, Ok(Renamed::To(_))));
        assert_eq!(steps, ["10.0.0.1:0"]);
        let own = Some("10.0.0.1:7");
        for same in ["10.0.0.1:0", "10.0.0.1:7"] {
            let (renamed, steps) = self::steps(own, same, &[]);
            assert!(matches!(renamed, Ok(Renamed::Same)));
            assert!(steps.is_empty());
        }
        let (renamed, _) = self::steps(own, "10.0.0.2:0", &[]);
        assert!(matches!(renamed, Ok(Renamed::To(at)) if at == addr("10.0.0.2:7")));
        // unless it is in use there
        let taken = [("10.0.0.2:7", FiErrno::EADDRINUSE); 2];
        let (renamed, steps) = self::steps(own, "10.0.0.2:0", &taken);
        assert!(matches!(renamed, Ok(Renamed::To(at)) if at == addr("10.0.0.2:0")));
        assert_eq!(steps.last().unwrap(), "10.0.0.2:0");
    }

    #[test]
    fn the_earlier_address_is_released_where_it_is_in_the_way() {
        let own = Some("10.0.0.1:7");
        let (renamed, steps) = steps(own, "0.0.0.0:7", &[("0.0.0.0:7", FiErrno::EADDRNOTAVAIL)]);
        assert!(matches!(renamed, Ok(Renamed::To(_))));
        assert_eq!(steps, ["0.0.0.0:7", "release", "0.0.0.0:7"]);
        // and bound again if that does not help
        let taken = [("0.0.0.0:7", FiErrno::EADDRINUSE); 2];
        let (renamed, steps) = self::steps(own, "0.0.0.0:7", &taken);
        let Ok(Renamed::Back(Some(back), FiErrno::EADDRINUSE)) = renamed else {
            panic!("{renamed:?}");
        };
        assert_eq!(back, addr("10.0.0.1:7"));
        assert_eq!(steps.last().unwrap(), "10.0.0.1:7");
        // an address of another host, and another port
        let foreign = [("203.0.113.1:7", FiErrno::EADDRNOTAVAIL)];
        let (renamed, steps) = self::steps(own, "203.0.113.1:7", &foreign);
        assert!(matches!(renamed, Err(FiErrno::EADDRNOTAVAIL)));
        assert_eq!(steps.len(), 1);
        let (renamed, steps) =
            self::steps(own, "10.0.0.1:8", &[("10.0.0.1:8", FiErrno::EADDRINUSE)]);
        assert!(matches!(renamed, Err(FiErrno::EADDRINUSE)));
        assert_eq!(steps.len(), 1);
    }
}
