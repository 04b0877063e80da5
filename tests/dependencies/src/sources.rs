//! Rules for the text of Rust sources.

use crate::lexer::{self, Line};

/// The part of the tree that a file belongs to. Paths are relative to the top of the tree.
fn is_engine(path: &str) -> bool {
    path.starts_with("src/")
}

fn is_provider(path: &str) -> bool {
    path.starts_with("provider/")
}

/// Programs that use the provider from outside.
fn is_test(path: &str) -> bool {
    ["tests/", "benches/", "examples/"]
        .iter()
        .any(|top| path.starts_with(top))
}

/// Calls of verbs or of the connection manager in the engine or the provider, outside `src/verbs`.
#[must_use]
pub fn verb_calls(path: &str, text: &str) -> Vec<String> {
    if !(is_engine(path) || is_provider(path)) || path.starts_with("src/verbs") {
        return Vec::new();
    }
    matches(path, text, |code| {
        calls(code).map(|name| format!("calls `{name}`; only src/verbs calls verbs"))
    })
}

/// A name with the prefix of a verb that is called: directly, or as a field in parentheses.
fn calls(code: &str) -> Option<&str> {
    words(code).find_map(|(start, word)| {
        let verb = (word.starts_with("ibv_") || word.starts_with("rdma_"))
            && word.chars().all(|c| !c.is_ascii_uppercase());
        let after = code[start + word.len()..].trim_start();
        let called = after.starts_with('(')
            || after
                .strip_prefix(')')
                .is_some_and(|rest| rest.trim_start().starts_with('('));
        let declared = code[..start].trim_end().ends_with("fn");
        (verb && called && !declared).then_some(word)
    })
}

/// Mentions of libfabric's C structures outside the provider.
#[must_use]
pub fn libfabric_mentions(path: &str, text: &str) -> Vec<String> {
    if is_provider(path) || path.starts_with("crates/libfabric-sys/") || is_test(path) {
        return Vec::new();
    }
    let mention = |code: &str| words(code).any(|(_, word)| word == "libfabric_sys");
    matches(path, text, |code| {
        mention(code).then(|| {
            "mentions libfabric_sys; only provider/ sees libfabric's structures".to_owned()
        })
    })
}

/// Unsafe blocks and implementations without a `SAFETY:` line directly above.
#[must_use]
pub fn unsafe_without_reason(path: &str, text: &str) -> Vec<String> {
    let lines = lexer::lines(text);
    let mut out = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let block = words(&line.code).any(|(start, word)| {
            let after = line.code[start + word.len()..].trim_start();
            word == "unsafe" && (after.starts_with('{') || after.starts_with("impl"))
        });
        if block && !has_reason(&lines, index) {
            out.push(format!(
                "{path}:{}: unsafe without a `SAFETY:` line directly above",
                index + 1
            ));
        }
    }
    out
}

/// Whether a comment above the statement that contains line `index` gives a reason.
fn has_reason(lines: &[Line], index: usize) -> bool {
    if lines[index].comment.contains("SAFETY:") {
        return true;
    }
    for line in lines[..index].iter().rev() {
        let code = line.code.trim();
        if line.comment.contains("SAFETY:") {
            return true;
        }
        let comment_only = code.is_empty() && !line.comment.is_empty();
        let attribute = code.starts_with("#[") || code.starts_with("#![");
        // a line in the middle of a statement: the comment is above the statement
        let continues = !code.is_empty() && !code.ends_with([';', '{', '}', ',']);
        if !(comment_only || attribute || continues) {
            return false;
        }
    }
    false
}

/// The files that may read the environment. Each lists its variables, and a test compares the list
/// with the manual page.
const READ_ENVIRONMENT: [&str; 2] = [
    "crates/softverbs/src/environment.rs",
    "provider/src/ffi/param.rs",
];

/// Reads of the environment outside these files, except in tests: such variables would not be
/// documented.
#[must_use]
pub fn environment_reads(path: &str, text: &str) -> Vec<String> {
    let of_tests = path.contains("/tests/") || path.ends_with("tests.rs");
    let ours = ["src/", "provider/src/", "crates/"]
        .iter()
        .any(|top| path.starts_with(top));
    if !ours || of_tests || READ_ENVIRONMENT.contains(&path) {
        return Vec::new();
    }
    let (code, _) = text
        .split_once("\n#[cfg(test)]\nmod ")
        .unwrap_or((text, ""));
    matches(path, code, |code| {
        ["env::var(", "env::var_os(", "env::vars", "getenv("]
            .iter()
            .any(|read| code.contains(read))
            .then(|| format!("reads the environment; only {READ_ENVIRONMENT:?} do"))
    })
}

/// Marks of unfinished work.
#[must_use]
pub fn left_open(path: &str, text: &str) -> Vec<String> {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME")];
    text.lines()
        .enumerate()
        .filter(|(_, line)| words(line).any(|(_, word)| marks.contains(&word)))
        .map(|(index, _)| format!("{path}:{}: a mark for later", index + 1))
        .collect()
}

fn matches(path: &str, text: &str, rule: impl Fn(&str) -> Option<String>) -> Vec<String> {
    lexer::lines(text)
        .iter()
        .enumerate()
        .filter_map(|(index, line)| Some(format!("{path}:{}: {}", index + 1, rule(&line.code)?)))
        .collect()
}

/// The identifiers of a line with their positions.
fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    code.split(move |c| !is_part(c))
        .filter(|word| !word.is_empty())
        .map(|word| (word.as_ptr().addr() - code.as_ptr().addr(), word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_the_environment_are_found_outside_their_files_and_tests() {
        let read = "let on = std::env::var_os(NAME);\n";
        let places = |path| environment_reads(path, read).len();
        assert_eq!(places("crates/softverbs/src/sync.rs"), 1);
        assert_eq!(places("src/mr/region.rs"), 1);
        assert_eq!(places("crates/softverbs/src/environment.rs"), 0);
        assert_eq!(places("crates/softverbs/tests/queues.rs"), 0);
        assert_eq!(places("src/msg/tests.rs"), 0);
        let in_tests = format!("fn f() {{}}\n\n#[cfg(test)]\nmod tests {{\n{read}}}\n");
        assert!(environment_reads("src/mr/region.rs", &in_tests).is_empty());
    }

    #[test]
    fn a_verb_called_outside_its_module_is_seen() {
        for planted in [
            "let r = unsafe { (b.verbs.ibv_reg_mr)(pd, a, l, f) };",
            "sys::inline::ibv_post_send(qp, wr, bad)",
            "(b.cm.rdma_connect) (id, p)",
        ] {
            assert_eq!(verb_calls("src/msg/post.rs", planted).len(), 1, "{planted}");
            assert_eq!(
                verb_calls("provider/src/ep/msg_ep.rs", planted).len(),
                1,
                "{planted}"
            );
            assert_eq!(verb_calls("src/verbs/qp.rs", planted), [""; 0]);
            assert_eq!(verb_calls("crates/softverbs/src/qp.rs", planted), [""; 0]);
        }
        for fine in [
            "// ibv_post_send(qp)",
            "rdma_core_sys::system::backend()",
            "let w: ibv_wc = x;",
            "\"ibv_reg_mr(3)\"",
            "fn ibv_like(a: u8) {",
        ] {
            assert_eq!(verb_calls("src/msg/post.rs", fine), [""; 0]);
        }
    }

    #[test]
    fn libfabric_outside_the_provider_is_seen() {
        assert_eq!(
            libfabric_mentions("src/mr/region.rs", "use libfabric_sys::fid;").len(),
            1
        );
        assert_eq!(
            libfabric_mentions("crates/softverbs/src/lib.rs", "libfabric_sys::X").len(),
            1
        );
        assert_eq!(
            libfabric_mentions("provider/src/mr.rs", "use libfabric_sys::fid;"),
            [""; 0]
        );
        assert_eq!(
            libfabric_mentions("src/mr/region.rs", "/// not libfabric_sys"),
            [""; 0]
        );
    }

    #[test]
    fn unsafe_without_a_reason_is_seen() {
        for planted in [
            "let a = unsafe { f() };",
            "// why\nunsafe impl Send for X {}",
            "// SAFETY: other\nlet b = 1;\nunsafe { f() };",
            "// SAFETY: x\n\nunsafe { f() }",
        ] {
            assert_eq!(unsafe_without_reason("a.rs", planted).len(), 1, "{planted}");
        }
        for fine in [
            "// SAFETY: f is total\nlet a = unsafe { f() };",
            "// SAFETY: f is\n// total\nunsafe { f() };",
            "// SAFETY: f is total\nlet a =\n    unsafe { f() };",
            "// SAFETY: total\n#[allow(x)]\nunsafe impl Send for X {}",
            "unsafe fn f() {}",
            "unsafe extern \"C\" { fn f(); }",
            "let s = \"unsafe {\";",
        ] {
            assert_eq!(unsafe_without_reason("a.rs", fine), [""; 0], "{fine}");
        }
    }

    #[test]
    fn a_mark_for_later_is_seen() {
        assert_eq!(left_open("a.rs", concat!("// TO", "DO: more")).len(), 1);
        assert_eq!(left_open("a.rs", concat!("let MASTO", "DON = 1;")), [""; 0]);
    }
}
