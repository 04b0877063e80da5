//! What a test needs from outside: the provider, the libfabrics, and the probe program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The directory with the provider under test, named as libfabric looks for it: `WEFT_PROVIDER_DIR`, or else
/// one with a provider built here and now, so that no stale one is tested.
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
    // The same link each time; another test may have made it already.
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

/// A libfabric to load the provider into.
#[derive(Clone, Debug)]
pub struct Libfabric {
    /// For messages.
    pub name: &'static str,
    /// What `dlopen` gets.
    pub path: PathBuf,
}

/// The system's libfabric, the one that Debian's `libfabric1` has.
pub fn system() -> Libfabric {
    Libfabric {
        name: "the system's",
        path: PathBuf::from("libfabric.so.1"),
    }
}

/// A libfabric that `tests/tools/peers` fetches and keeps, or `None` with a line that says why there is none.
///
/// # Panics
/// If it could be downloaded and still not be made.
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

/// The probe program in one of its roles, with nothing of the environment that would change the outcome.
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

/// Runs a probe and fails the test with all it said unless it ends well.
///
/// # Panics
/// If it does not.
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
