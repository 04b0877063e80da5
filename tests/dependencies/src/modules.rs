//! Which module of a crate may use which: the layers that the design and the module heads draw.

use crate::lexer;

/// A module of a crate and the modules that it may use, besides itself. A module that is not listed may use all, and be used
/// by all.
struct Layer {
    /// The folder of the crate's sources, with a slash behind it.
    sources: &'static str,
    /// The module: a folder or a file directly below `sources`.
    module: &'static str,
    /// Modules above it, which it must not use.
    above: &'static [&'static str],
}

const LAYERS: &[Layer] = &[
    // softverbs: entry points use the objects and queues, which do not use entry points
    Layer {
        sources: "crates/softverbs/src/",
        module: "entry",
        above: &[
            "abi", "agent", "cm", "cq", "dm", "events", "object", "peer", "process", "qp",
            "region", "srq", "xrc",
        ],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "object",
        above: &["abi", "agent", "cm", "cq", "qp", "srq", "xrc"],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "qp",
        above: &["abi", "cm"],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "srq",
        above: &["abi", "cm"],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "cq",
        above: &["abi", "cm"],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "xrc",
        above: &["abi", "cm"],
    },
    Layer {
        sources: "crates/softverbs/src/",
        module: "process",
        above: &["abi", "cm"],
    },
];

/// The uses of modules above its own in a file. Tests may use what they like.
#[must_use]
pub fn upward(path: &str, text: &str) -> Vec<String> {
    let is_of = |layer: &&Layer| {
        path.strip_prefix(layer.sources)
            .and_then(|rest| rest.strip_prefix(layer.module))
            .is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
    };
    let Some(layer) = LAYERS.iter().find(is_of) else {
        return Vec::new();
    };
    if is_test(path) {
        return Vec::new();
    }
    let mut out = Vec::new();
    let lines = lexer::lines(text);
    let ends = lines.windows(2).position(|pair| {
        pair[0].code.trim() == "#[cfg(test)]" && pair[1].code.trim_start().starts_with("mod ")
    });
    for (index, line) in lines[..ends.unwrap_or(lines.len())].iter().enumerate() {
        for used in used(&line.code) {
            if layer.above.contains(&used) {
                out.push(format!(
                    "{path}:{}: uses `{used}`, a module above `{}`",
                    index + 1,
                    layer.module
                ));
            }
        }
    }
    out
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/models.rs")
}

/// The modules that a line names by a path from the crate's root.
fn used(code: &str) -> impl Iterator<Item = &str> {
    code.match_indices("crate::").filter_map(|(at, prefix)| {
        let rest = &code[at + prefix.len()..];
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        let name = &rest[..end.unwrap_or(rest.len())];
        (!name.is_empty()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_of_a_module_above_is_seen() {
        let path = "crates/softverbs/src/qp/send.rs";
        assert_eq!(upward(path, "use crate::abi::Context;").len(), 1);
        assert_eq!(upward(path, "    let n = crate::cm::table();").len(), 1);
        assert_eq!(upward(path, "use crate::object::Context;"), [""; 0]);
        assert_eq!(upward(path, "// crate::abi"), [""; 0]);
        let file = "crates/softverbs/src/entry.rs";
        assert_eq!(upward(file, "use crate::object::Pd;").len(), 1);
        assert_eq!(
            upward(file, "#[cfg(test)]\nmod tests {\nuse crate::object::Pd;"),
            [""; 0]
        );
        assert_eq!(
            upward("crates/softverbs/src/abi/qp.rs", "use crate::qp;"),
            [""; 0]
        );
    }
}
