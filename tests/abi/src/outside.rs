//! The parts outside the test: the provider, the libfabrics, and the probe program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The directory of the provider under test, with the file name that libfabric searches for:
/// `WEFT_PROVIDER_DIR`, or a directory with the provider built by this call, so that no outdated
/// build is tested.
///
/// # Panics
/// If the provider does not build.
pub fn provider_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("WEFT_PROVIDER_DIR") {
        return PathBuf::from(dir);
    }
    let top = top();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let build = Command::new(cargo)
        .args(["build", "-q", "-p", "weft-fi"])
        .current_dir(&top)
        .status()
        .expect("cargo starts");
    assert!(build.success(), "the provider does not build");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| top.join("target"), PathBuf::from);
    let debug = top.join(target).join("debug");
    let dir = debug.join("abi-provider");
    std::fs::create_dir_all(&dir).expect("a directory for the provider");
    // The link is always the same; another test may have made it.
    let link = dir.join("libweft-fi.so");
    match std::os::unix::fs::symlink(debug.join("libweft_fi.so"), link) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => panic!("{error}"),
        _ => dir,
    }
}

/// The top of the source tree.
pub fn top() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.join("../..").canonicalize().expect("the source tree")
}

/// A libfabric that loads the provider.
#[derive(Clone, Debug)]
pub struct Libfabric {
    /// For error messages.
    pub name: &'static str,
    /// The argument of `dlopen`.
    pub path: PathBuf,
}

/// The system's libfabric: Debian's package `libfabric1`.
pub fn system() -> Libfabric {
    Libfabric {
        name: "the system's",
        path: PathBuf::from("libfabric.so.1"),
    }
}

/// A libfabric that `tests/tools/peers` downloads and caches. `None`: it is not available; a line
/// with the reason is printed.
///
/// # Panics
/// If it was downloaded but could not be built.
pub fn peer(name: &'static str) -> Option<Libfabric> {
    let output = Command::new(top().join("tests/tools/peers"))
        .arg(name)
        .output()
        .expect("tests/tools/peers starts");
    if output.status.code() == Some(75) {
        eprintln!("skipped: {name} can't be downloaded");
        return None;
    }
    assert!(
        output.status.success(),
        "tests/tools/peers {name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let prefix = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Some(Libfabric {
        name,
        path: Path::new(&prefix).join("lib/libfabric.so.1"),
    })
}

/// The probe program in one of its roles, without the environment variables that would change its
/// result.
pub fn probe(program: &str, libfabric: &Libfabric, provider: &Path, role: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FI_") {
            command.env_remove(name);
        }
    }
    command
        .arg(&libfabric.path)
        .arg(role)
        .env("FI_PROVIDER_PATH", provider)
        .env("RUST_BACKTRACE", "0");
    command
}

/// Runs a probe; if it fails, fails the test with the probe's output.
///
/// # Panics
/// If the probe fails.
pub fn must(mut command: Command) -> Output {
    let output = command.output().expect("the probe starts");
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
