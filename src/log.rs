//! What the engine has to say to a person goes through one sink, which the provider connects to
//! `fi_log`. Never called on the fast path.

use std::fmt::Arguments;
use std::sync::OnceLock;

/// How much it matters; the order is `enum fi_log_level`'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something failed that the user should know of.
    Warn,
    /// A decision worth seeing once.
    Info,
    /// For the developer.
    Debug,
}

/// Which part speaks; names are those of `enum fi_log_subsys`.
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

/// Where messages go. Called from any thread, sometimes with the engine's locks held: an
/// implementation must not call back into the engine.
pub trait Sink: Sync {
    /// Whether a message of this kind would be shown.
    fn enabled(&self, level: Level, subsystem: Subsystem) -> bool;
    /// Shows a message, one line without its newline.
    fn log(&self, level: Level, subsystem: Subsystem, message: Arguments<'_>);
}

static SINK: OnceLock<&'static dyn Sink> = OnceLock::new();

/// Connects the sink, once per process; later calls change nothing. Until then messages are
/// dropped.
pub fn set_sink(sink: &'static dyn Sink) {
    let _ = SINK.set(sink);
}

/// Whether anybody would see such a message; for those that cost something to make.
pub(crate) fn enabled(level: Level, subsystem: Subsystem) -> bool {
    SINK.get()
        .is_some_and(|sink| sink.enabled(level, subsystem))
}

pub(crate) fn write(level: Level, subsystem: Subsystem, message: Arguments<'_>) {
    if let Some(sink) = SINK.get()
        && sink.enabled(level, subsystem)
    {
        sink.log(level, subsystem, message);
    }
}

macro_rules! warn_log {
    ($subsystem:ident, $($arg:tt)*) => {
        $crate::log::write($crate::log::Level::Warn, $crate::log::Subsystem::$subsystem, format_args!($($arg)*))
    };
}
macro_rules! info_log {
    ($subsystem:ident, $($arg:tt)*) => {
        $crate::log::write($crate::log::Level::Info, $crate::log::Subsystem::$subsystem, format_args!($($arg)*))
    };
}
pub(crate) use {info_log, warn_log};
