//! The device as a program uses it, for its unit tests and its fuzz targets.

mod device;
mod input;
#[cfg(test)]
#[path = "../../tests/common/refuse.rs"]
pub(crate) mod refuse;

/// Runs the test with this path in a process of its own, unless it runs in one already, as each
/// test does under cargo-nextest, and returns whether it does. For tests that look at the state of
/// the whole process.
#[cfg(test)]
pub(crate) fn is_alone(path: &str) -> bool {
    let is_alone = std::env::args().any(|arg| arg == "--exact");
    if !is_alone {
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", path, "--nocapture"]);
        let out = test.output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        let errors = String::from_utf8_lossy(&out.stderr);
        let passed = out.status.success() && text.contains(" 1 passed");
        assert!(passed, "{text}{errors}");
    }
    is_alone
}

pub(crate) use device::*;
pub(crate) use input::Input;
