//! The permitted dependencies between packages: the figure in the design, section 2.

use serde_json::Value;
use std::collections::BTreeMap;

/// The packages that a shipped package may depend on. `dev`: for its tests only.
struct Allowed {
    package: &'static str,
    build: &'static [&'static str],
    dev: &'static [&'static str],
}

const ALLOWED: &[Allowed] = &[
    Allowed {
        package: "weft-fi",
        build: &[
            "weft",
            "atomic-ops",
            "forks",
            "libfabric-sys",
            "rdma-core-sys",
            "softverbs",
        ],
        dev: &[],
    },
    // the engine receives its backends from the caller; only its tests use softverbs
    Allowed {
        package: "weft",
        build: &["atomic-ops", "biased-lock", "forks", "rdma-core-sys"],
        dev: &["softverbs"],
    },
    // the mutex, which knows nothing of what it protects
    Allowed {
        package: "biased-lock",
        build: &[],
        dev: &[],
    },
    // statics of a forked child, for all that has any
    Allowed {
        package: "forks",
        build: &[],
        dev: &[],
    },
    // the arithmetic, which engine and device share
    Allowed {
        package: "atomic-ops",
        build: &[],
        dev: &[],
    },
    Allowed {
        package: "softverbs",
        build: &["atomic-ops", "forks", "rdma-core-sys"],
        dev: &[],
    },
    // exports softverbs' table under rdma-core's names, so it uses the table's type
    Allowed {
        package: "softverbs-dropin",
        build: &["softverbs", "forks", "rdma-core-sys"],
        dev: &[],
    },
    Allowed {
        package: "rdma-core-sys",
        build: &["forks"],
        dev: &[],
    },
    Allowed {
        package: "libfabric-sys",
        build: &[],
        dev: &[],
    },
];

/// Checks the output of `cargo metadata --no-deps`. Packages under tests/ and benches/ may have any
/// dependency, and no package may depend on them.
#[must_use]
pub fn breaches(metadata: &Value) -> Vec<String> {
    let root = metadata["workspace_root"].as_str().unwrap_or_default();
    let packages = metadata["packages"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let tests_only: BTreeMap<&str, bool> = packages
        .iter()
        .map(|package| (name(package), is_test(package, root)))
        .collect();
    let mut out = Vec::new();
    for package in packages {
        if tests_only[name(package)] {
            continue;
        }
        let Some(allowed) = ALLOWED
            .iter()
            .find(|allowed| allowed.package == name(package))
        else {
            out.push(format!(
                "{}: a package that the drawing of the dependencies does not have",
                name(package)
            ));
            continue;
        };
        for dependency in package["dependencies"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
        {
            let to = name(dependency);
            if !tests_only.contains_key(to) {
                continue; // from outside: docs/dependencies.md has those
            }
            let dev = dependency["kind"].as_str() == Some("dev");
            if !(allowed.build.contains(&to) || dev && allowed.dev.contains(&to)) {
                let kind = if dev {
                    "its tests depend"
                } else {
                    "it depends"
                };
                out.push(format!(
                    "{}: {kind} on {to}, against the direction of the arrows",
                    name(package)
                ));
            }
        }
    }
    out
}

/// External crates for which docs/dependencies.md gives no reason, and lines of that page for
/// crates that are not used.
#[must_use]
pub fn undocumented(metadata: &Value, page: &str) -> Vec<String> {
    let packages = metadata["packages"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let ours: Vec<&str> = packages.iter().map(name).collect();
    let mut used: Vec<&str> = packages
        .iter()
        .flat_map(|package| {
            package["dependencies"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default()
        })
        .map(name)
        .filter(|dependency| !ours.contains(dependency))
        .collect();
    used.sort_unstable();
    used.dedup();
    let listed: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(crate_name, _)| crate_name)
        .collect();
    let missing = used
        .iter()
        .filter(|name| !listed.contains(name))
        .map(|name| format!("{name}: docs/dependencies.md has no line for it"));
    let gone = listed
        .iter()
        .filter(|name| !used.contains(name))
        .map(|name| format!("{name}: in docs/dependencies.md, but nothing depends on it"));
    missing.chain(gone).collect()
}

fn name(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}

fn is_test(package: &Value, root: &str) -> bool {
    let manifest = package["manifest_path"].as_str().unwrap_or_default();
    let inside = manifest
        .strip_prefix(root)
        .unwrap_or(manifest)
        .trim_start_matches('/');
    inside.starts_with("tests/") || inside.starts_with("benches/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A package for a test: name, folder, dependencies with their kinds.
    type Package<'a> = (&'a str, &'a str, &'a [(&'a str, Option<&'a str>)]);

    fn workspace(packages: &[Package<'_>]) -> Value {
        let package = |(name, path, dependencies): &Package<'_>| {
            let dependencies: Vec<Value> = dependencies
                .iter()
                .map(|(name, kind)| json!({"name": name, "kind": kind}))
                .collect();
            json!({"name": name, "manifest_path": format!("/w/{path}/Cargo.toml"), "dependencies": dependencies})
        };
        json!({"workspace_root": "/w", "packages": packages.iter().map(package).collect::<Vec<_>>()})
    }

    #[test]
    fn the_arrows_as_drawn_are_kept() {
        let drawn = workspace(&[
            (
                "weft",
                "",
                &[
                    ("rdma-core-sys", None),
                    ("libc", None),
                    ("softverbs", Some("dev")),
                ],
            ),
            ("softverbs", "crates/softverbs", &[("rdma-core-sys", None)]),
            ("rdma-core-sys", "crates/rdma-core-sys", &[]),
            ("probe", "tests/probe", &[("softverbs", None)]),
        ]);
        assert_eq!(breaches(&drawn), [""; 0]);
    }

    #[test]
    fn an_arrow_backwards_is_seen() {
        let planted = workspace(&[
            ("weft", "", &[]),
            ("softverbs", "crates/softverbs", &[("weft", None)]),
        ]);
        assert_eq!(breaches(&planted).len(), 1);
        let planted = workspace(&[
            ("softverbs", "crates/softverbs", &[]),
            ("weft", "", &[("softverbs", None)]),
        ]);
        assert_eq!(
            breaches(&planted).len(),
            1,
            "softverbs is for the engine's tests only"
        );
        let planted = workspace(&[
            ("softverbs", "crates/softverbs", &[]),
            ("weft", "", &[("softverbs", Some("build"))]),
        ]);
        assert_eq!(breaches(&planted).len(), 1, "a build script is no test");
    }

    #[test]
    fn a_dependency_on_a_test_is_seen() {
        let planted = workspace(&[
            ("weft", "", &[("probe", None)]),
            ("probe", "tests/probe", &[]),
        ]);
        assert_eq!(breaches(&planted).len(), 1);
    }

    #[test]
    fn an_unknown_package_is_seen() {
        assert_eq!(
            breaches(&workspace(&[("helper", "crates/helper", &[])])).len(),
            1
        );
    }

    #[test]
    fn a_crate_without_a_reason_is_seen() {
        let used = workspace(&[("weft", "", &[("libc", None), ("rand", None)])]);
        let page = "| crate | why |\n| `libc` | types |\n| `gone` | nothing |\n";
        let seen = undocumented(&used, page);
        assert_eq!(seen.len(), 2, "{seen:?}");
        assert!(seen[0].starts_with("rand"));
        assert!(seen[1].starts_with("gone"));
    }
}
