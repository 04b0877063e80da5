//! Log lines of the engine go through one sink, which the provider connects to `fi_log`
//! (`fi_provider(3)`). Never called on the fast path.

use std::fmt::Arguments;
use std::sync::OnceLock;

use crate::errno::FiErrno;

/// Severity, in the order of `enum fi_log_level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A failure that concerns the user of the application.
    Warn,
    /// A decision, or the reason why a call is refused.
    Info,
    /// Details for developers.
    Debug,
}

/// The subsystem of a line; names of `enum fi_log_subsys`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subsystem {
    /// `FI_LOG_CORE`
    Core,
    /// `FI_LOG_FABRIC`
    Fabric,
    /// `FI_LOG_DOMAIN`
    Domain,
    /// `FI_LOG_EP_CTRL`
    EpCtrl,
    /// `FI_LOG_EP_DATA`
    EpData,
    /// `FI_LOG_CQ`
    Cq,
    /// `FI_LOG_EQ`
    Eq,
    /// `FI_LOG_MR`
    Mr,
}

/// The position in the source that logs a line.
#[derive(Clone, Copy, Debug)]
pub struct SourceLocation {
    inner: &'static str,
    /// Line number.
    pub line: u32,
}

impl SourceLocation {
    /// The position where [`log_place`](crate::log_place) is expanded: `inner` is the path of the
    /// function `here` in it, as [`std::any::type_name_of_val`] returns it.
    pub fn new(inner: &'static str, line: u32) -> Self {
        Self { inner, line }
    }

    /// The function with its type or, if it is free, its module: `Type::method`,
    /// `module::function`.
    pub fn function(&self) -> String {
        let mut path = self.inner;
        while let Some((outer, "here" | "{{closure}}")) = path.rsplit_once("::") {
            path = outer;
        }
        let Some((scope, name)) = path.rsplit_once("::") else {
            return path.to_owned();
        };
        // methods of a trait: `<Type as Trait>`; of a generic type: `Type<_>`
        let scope = scope.strip_prefix('<').unwrap_or(scope);
        let scope = scope.split(['<', ' ', '>']).next().unwrap_or(scope);
        let scope = scope.rsplit("::").find(|part| !part.is_empty());
        format!("{}::{name}", scope.unwrap_or_default())
    }
}

/// Receives log lines. Called from any thread, with engine locks held in part of the calls: an
/// implementation must not call the engine.
pub trait Sink: Sync {
    /// Whether a line of this level and subsystem would be logged.
    fn enabled(&self, level: Level, subsystem: Subsystem) -> bool;
    /// Logs a line, without its newline.
    fn log(
        &self,
        level: Level,
        subsystem: Subsystem,
        place: SourceLocation,
        message: Arguments<'_>,
    );
}

static SINK: OnceLock<&'static dyn Sink> = OnceLock::new();

/// Connects the sink, once per process; later calls have no effect. Lines logged before are
/// dropped.
pub fn set_sink(sink: &'static dyn Sink) {
    let _ = SINK.set(sink);
}

/// Whether a line would be logged; for lines that are costly to format.
pub(crate) fn enabled(level: Level, subsystem: Subsystem) -> bool {
    SINK.get()
        .is_some_and(|sink| sink.enabled(level, subsystem))
}

pub(crate) fn write(
    level: Level,
    subsystem: Subsystem,
    place: impl FnOnce() -> SourceLocation,
    message: Arguments<'_>,
) {
    if let Some(sink) = SINK.get()
        && sink.enabled(level, subsystem)
    {
        sink.log(level, subsystem, place(), message);
    }
}

/// Logs at `info` why a call is refused, and returns the call's errno.
#[cold]
#[inline(never)]
pub(crate) fn refuse(
    errno: FiErrno,
    subsystem: Subsystem,
    place: fn() -> SourceLocation,
    reason: Arguments<'_>,
) -> FiErrno {
    write(
        Level::Info,
        subsystem,
        place,
        format_args!("-{errno:?}: {reason}"),
    );
    errno
}

/// A closure that returns the [`SourceLocation`](crate::log::SourceLocation) of the expansion.
#[macro_export]
#[doc(hidden)]
macro_rules! log_place {
    () => {{
        fn here() {}
        || $crate::log::SourceLocation::new(::std::any::type_name_of_val(&here), ::core::line!())
    }};
}

macro_rules! warn_log {
    ($subsystem:ident, $($arg:tt)*) => {
        $crate::log::write(
            $crate::log::Level::Warn,
            $crate::log::Subsystem::$subsystem,
            $crate::log_place!(),
            format_args!($($arg)*),
        )
    };
}
macro_rules! info_log {
    ($subsystem:ident, $($arg:tt)*) => {
        $crate::log::write(
            $crate::log::Level::Info,
            $crate::log::Subsystem::$subsystem,
            $crate::log_place!(),
            format_args!($($arg)*),
        )
    };
}
/// The errno of a refused call; logs the reason at `info`. On the fast path only in a cold
/// function, because the arguments of the line are taken by reference.
macro_rules! refused {
    ($subsystem:ident, $errno:ident, $($arg:tt)*) => {
        $crate::log::refuse(
            $crate::errno::FiErrno::$errno,
            $crate::log::Subsystem::$subsystem,
            $crate::log_place!(),
            format_args!($($arg)*),
        )
    };
}
pub(crate) use {info_log, refused, warn_log};

#[cfg(test)]
mod tests {
    use super::*;

    fn free() -> SourceLocation {
        log_place!()()
    }

    struct Type<T>(T);

    impl<T> Type<T> {
        fn method(&self) -> SourceLocation {
            let inside = || log_place!()();
            inside()
        }
    }

    impl<T> From<T> for Type<T> {
        fn from(value: T) -> Self {
            assert_eq!(log_place!()().function(), "Type::from");
            Self(value)
        }
    }

    #[test]
    fn a_place_names_its_function_and_its_line() {
        assert_eq!(free().function(), "tests::free");
        assert_eq!(Type::from(1).method().function(), "Type::method");
        assert_eq!(log_place!()().line, line!());
    }
}
