//! The table of `docs/conformance.md`: each row names a test in the tree, or a deviation in the
//! page's own list.

use std::collections::{BTreeMap, BTreeSet};

/// Columns of a row: id, sentence, test, device, verdict.
const COLUMNS: usize = 5;
const HEAD: [&str; COLUMNS] = ["id", "sentence", "test", "on", "verdict"];

/// The cells of a line of a table; none for other lines.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

fn spans(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The words of a verdict that name deviations.
fn deviations(verdict: &str) -> impl Iterator<Item = &str> {
    verdict
        .split(|c: char| !(c.is_alphanumeric() || c == '-'))
        .filter(|word| word.starts_with("D-"))
}

/// Whether a source has a function, a case or a role of this name.
fn names(path: &str, text: &str, name: &str) -> bool {
    let whole = |before: &str| {
        let at = format!("{before}{name}");
        text.match_indices(&at).any(|(index, _)| {
            let rest = &text[index + at.len()..];
            !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
        })
    };
    if path.ends_with(".rs") {
        whole("fn ") || text.contains(&format!("\"{name}\""))
    } else if path.ends_with(".py") {
        whole("def ")
    } else if path.contains("/c/mr/") {
        // a function that no table names is never run
        text.contains(&format!("CASE({name},"))
    } else {
        path.ends_with(".c") && whole(" ")
    }
}

/// The errors of the page. `files`: the tree's files with their paths.
#[must_use]
pub fn breaches(page: &str, files: &[(String, String)]) -> Vec<String> {
    let texts: BTreeMap<_, _> = files
        .iter()
        .map(|(path, text)| (path.as_str(), text.as_str()))
        .collect();
    let mut short = BTreeMap::new();
    let mut known = BTreeSet::new();
    let mut rows = Vec::new();
    let mut inside = false;
    for (index, line) in page.lines().enumerate() {
        let Some(cells) = cells(line) else {
            inside = false;
            continue;
        };
        if cells == HEAD {
            inside = true;
        } else if cells[0].starts_with("---") {
        } else if inside {
            rows.push((index + 1, cells));
        } else if let [name, directory] = cells[..]
            && name.ends_with("/`")
        {
            short.insert(name.trim_matches('`'), directory.trim_matches('`'));
        } else if cells[0].starts_with("D-") && cells.len() == 3 && !cells[2].is_empty() {
            known.insert(cells[0]);
        }
    }
    let mut out = Vec::new();
    let mut ids = BTreeSet::new();
    let mut used = BTreeSet::new();
    for (line, cells) in &rows {
        let mut say = |what: String| out.push(format!("docs/conformance.md:{line}: {what}"));
        let [id, _, tests, on, verdict] = cells[..] else {
            say(format!("{} columns", cells.len()));
            continue;
        };
        if !ids.insert(id) {
            say(format!("{id} is there twice"));
        }
        if on.is_empty() {
            say(format!("{id} names no device"));
        }
        let mut named = 0;
        for span in spans(tests) {
            let mut words = span.split_whitespace();
            let path = words.next().unwrap_or_default();
            let path = short
                .iter()
                .find_map(|(prefix, directory)| {
                    Some(format!("{directory}{}", path.strip_prefix(*prefix)?))
                })
                .unwrap_or_else(|| path.to_owned());
            let Some(text) = texts.get(path.as_str()) else {
                say(format!("{id}: there is no {path}"));
                continue;
            };
            let mut any = path.ends_with(".sh");
            for name in words {
                any = true;
                if !names(&path, text, name) {
                    say(format!("{id}: {path} has no {name}"));
                }
            }
            if !any {
                say(format!("{id}: which test of {path}?"));
            }
            named += 1;
        }
        let mut deviates = false;
        for name in deviations(verdict) {
            deviates = true;
            used.insert(name);
            if !known.contains(name) {
                say(format!("{id}: {name} is not among the deviations"));
            }
        }
        if named == 0 && !deviates {
            say(format!("{id} has neither a test nor a deviation"));
        }
        if !deviates && !verdict.starts_with("kept") {
            say(format!("{id} has no verdict"));
        }
    }
    for name in known.difference(&used) {
        out.push(format!("docs/conformance.md: {name} is no row's deviation"));
    }
    if rows.is_empty() {
        out.push("docs/conformance.md: no rows".to_owned());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(rows: &str) -> String {
        format!(
            "| abbreviation | directory |\n| --- | --- |\n| `mr/` | `tests/c/mr/` |\n\n\
             | id | sentence | test | on | verdict |\n| --- | --- | --- | --- | --- |\n{rows}\n\
             | name | what | why |\n| --- | --- | --- |\n| D-one | otherwise | because |\n"
        )
    }

    fn tree() -> Vec<(String, String)> {
        [
            (
                "tests/c/mr/close.c",
                "static void idle(void)\n\tCASE(idle_peer, \"keys\"),",
            ),
            (
                "src/keys.rs",
                "#[test]\nfn many_keys() {}\n(\"a_case\", f),",
            ),
            ("tests/vm/01.sh", "run() { :; }"),
            ("tests/t.py", "    def test_all(self):"),
        ]
        .map(|(path, text)| (path.to_owned(), text.to_owned()))
        .to_vec()
    }

    const FINE: &str = "| a-1 | x | `mr/close.c idle_peer`; `src/keys.rs many_keys a_case` | soft0 | kept |\n\
        | a-2 | x | `tests/vm/01.sh` | rxe0 | kept: more |\n\
        | a-3 | x | `tests/t.py test_all` | any | D-one |\n\
        | a-4 | x | | none | D-one |\n";

    #[test]
    fn what_is_there_is_fine() {
        assert_eq!(breaches(&page(FINE), &tree()), [""; 0]);
    }

    #[test]
    fn what_is_missing_is_seen() {
        for planted in [
            "| b | x | `mr/close.c idle_pee` | soft0 | kept |",
            "| b | x | `mr/close.c idle` | soft0 | kept |",
            "| b | x | `mr/open.c idle_peer` | soft0 | kept |",
            "| b | x | `mr/close.c` | soft0 | kept |",
            "| b | x | `src/keys.rs many` | soft0 | kept |",
            "| b | x | `tests/t.py test_al` | soft0 | kept |",
            "| b | x | | none | kept |",
            "| b | x | | none | D-two |",
            "| b | x | `tests/vm/01.sh` | rxe0 | |",
            "| b | x | `tests/vm/01.sh` | | kept |",
            "| a-1 | x | `tests/vm/01.sh` | rxe0 | kept |",
            "| b | x | `tests/vm/01.sh` | kept |",
        ] {
            let found = breaches(&page(&format!("{FINE}{planted}\n")), &tree());
            assert!(!found.is_empty(), "{planted}");
            assert!(found.len() <= 2, "{planted}: {found:?}");
        }
    }

    #[test]
    fn a_page_without_rows_or_with_a_deviation_of_nothing_is_seen() {
        assert_eq!(breaches("# Nothing", &tree()).len(), 1);
        let without = FINE.replace("D-one", "kept");
        assert!(breaches(&page(&without), &tree()).len() >= 2);
    }
}
