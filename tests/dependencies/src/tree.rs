//! The files of the tree.

use std::path::{Path, PathBuf};

/// The top of the tree.
#[must_use]
pub fn top() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors()
        .nth(2)
        .expect("tests/dependencies lies two levels deep")
        .to_owned()
}

/// Every text file with its path relative to the top, except build results, folders of hidden
/// tools, and binary files.
///
/// # Panics
/// If a directory or a file cannot be read.
#[must_use]
pub fn files() -> Vec<(String, String)> {
    let top = top();
    let mut out = Vec::new();
    let mut folders = vec![top.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the tree") {
            let path = entry.expect("an entry of the tree").path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let built = folder == top && matches!(name.as_str(), "target" | "build" | ".git");
            if built || name == "__pycache__" || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) =
                String::from_utf8(std::fs::read(&path).expect("a file of the tree"))
            {
                let relative = path
                    .strip_prefix(&top)
                    .expect("inside the tree")
                    .to_string_lossy()
                    .into_owned();
                out.push((relative, text));
            }
        }
    }
    out.sort();
    out
}

/// The Rust sources except generated bindings.
#[must_use]
pub fn sources() -> Vec<(String, String)> {
    files()
        .into_iter()
        .filter(|(path, _)| path.ends_with(".rs") && !path.ends_with("bindings.rs"))
        .collect()
}
