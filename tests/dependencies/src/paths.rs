//! The tree contains no path of a developer's machine.

/// The first parts of such paths; split, so that this file does not match itself.
const BEGINNINGS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
    concat!("/root", "/."),
    concat!("C:\\Us", "ers\\"),
];

/// Lines with a path of one machine. A placeholder such as `<name>` may follow.
#[must_use]
pub fn breaches(path: &str, text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for beginning in BEGINNINGS {
            let begins = |(at, _): (usize, &str)| {
                let own =
                    !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_-.$}~*".contains(c));
                own && line[at + beginning.len()..]
                    .starts_with(|c: char| c.is_alphanumeric() || c == '.')
            };
            if line.match_indices(beginning).any(begins) {
                out.push(format!("{path}:{}: a path under {beginning}", index + 1));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_developers_path_is_seen() {
        let planted = [
            concat!("cd /ho", "me/anna/weft"),
            concat!("file:///wo", "rk/x"),
            concat!("\"/root", "/.cache\""),
        ];
        for line in planted {
            assert_eq!(breaches("README.md", line).len(), 1, "{line}");
        }
    }

    #[test]
    fn other_paths_are_fine() {
        for line in [
            concat!("mount /root", "/proc"),
            concat!("$DIR/wo", "rk/x"),
            "/tmp/x",
            concat!("/ho", "me/<you>/weft"),
            concat!("net", "wo", "rk/x"),
        ] {
            assert_eq!(breaches("README.md", line), [""; 0], "{line}");
        }
    }
}
