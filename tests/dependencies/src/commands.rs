//! Checks that the commands on a page exist.

/// The targets of a Makefile.
#[must_use]
pub fn targets(makefile: &str) -> Vec<&str> {
    makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, rest)| {
            !rest.starts_with('=')
                && !name.is_empty()
                && name.chars().all(|c| c.is_ascii_lowercase() || c == '-')
        })
        .map(|(name, _)| name)
        .collect()
}

/// `make TARGET` in a page's code for which the Makefile has no target.
#[must_use]
pub fn breaches(path: &str, page: &str, makefile: &str) -> Vec<String> {
    let targets = targets(makefile);
    let mut out = Vec::new();
    let mut fenced = false;
    for (index, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let pieces: Vec<&str> = if fenced {
            vec![line]
        } else {
            line.split('`').skip(1).step_by(2).collect()
        };
        for piece in pieces {
            let mut words = piece
                .split_whitespace()
                .skip_while(|word| *word != "make")
                .skip(1);
            let Some(target) = words.find(|word| !word.contains('=') && !word.starts_with('-'))
            else {
                continue;
            };
            let is_a_name = target.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            if is_a_name && !targets.contains(&target) {
                out.push(format!(
                    "{path}:{}: `make {target}`, which the Makefile does not have",
                    index + 1
                ));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAKEFILE: &str = "X := 1\nall: ## build\n\t@cargo build\ncheck-fast: all\n.PHONY: all\n";

    #[test]
    fn targets_are_found() {
        assert_eq!(targets(MAKEFILE), ["all", "check-fast"]);
    }

    #[test]
    fn a_command_that_does_not_exist_is_seen() {
        for planted in [
            "run `make fly`",
            "```\nmake fly\n```",
            "`PREFIX=/usr make DESTDIR=x fly`",
        ] {
            assert_eq!(
                breaches("README.md", planted, MAKEFILE).len(),
                1,
                "{planted}"
            );
        }
        for fine in [
            "run `make check-fast`",
            "we make fly",
            "`make`",
            "```sh\nmake all # builds\n```",
        ] {
            assert_eq!(breaches("README.md", fine, MAKEFILE), [""; 0], "{fine}");
        }
    }
}
