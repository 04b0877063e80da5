//! Objects that a thread can wait on.

/// How a queue can be waited on (`enum fi_wait_obj`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitKind {
    /// Not at all: reads only.
    None,
    /// By the queue's own blocking read; no object is shown to the application.
    #[default]
    Unspec,
    /// By a file descriptor that the application may poll as well.
    Fd,
}
