//! Rust source with comments and literals replaced by spaces, line by line: the rest is code.

/// One line: its code, and the text of its comments.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Line {
    /// The line with comments and the contents of literals replaced by spaces.
    pub code: String,
    /// The text of comments on the line.
    pub comment: String,
}

enum State {
    Code,
    LineComment,
    BlockComment(u32),
    Text { hashes: Option<usize> },
}

/// Splits a source text into lines of code and comment.
#[must_use]
pub fn lines(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut out = vec![Line::default()];
    let mut state = State::Code;
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        if c == '\n' {
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            out.push(Line::default());
            i += 1;
            continue;
        }
        let line = out.last_mut().expect("there is always a line");
        match state {
            State::Code => match c {
                '/' if at(i + 1) == '/' => state = State::LineComment,
                '/' if at(i + 1) == '*' => {
                    state = State::BlockComment(1);
                    i += 1;
                }
                '"' => {
                    state = State::Text {
                        hashes: raw_hashes(&chars, i),
                    }
                }
                '\'' if at(i + 1) == '\\' => {
                    i += 2; // an escaped character: up to its closing quote
                    while i + 1 < chars.len() && at(i + 1) != '\'' && at(i + 1) != '\n' {
                        i += 1;
                    }
                    i += 1;
                    line.code.push(' ');
                }
                '\'' if at(i + 2) == '\'' => {
                    i += 2;
                    line.code.push(' ');
                }
                _ => line.code.push(c),
            },
            State::LineComment => line.comment.push(c),
            State::BlockComment(depth) => {
                if c == '*' && at(i + 1) == '/' {
                    state = if depth == 1 {
                        State::Code
                    } else {
                        State::BlockComment(depth - 1)
                    };
                    i += 1;
                } else if c == '/' && at(i + 1) == '*' {
                    state = State::BlockComment(depth + 1);
                    i += 1;
                } else {
                    line.comment.push(c);
                }
            }
            State::Text { hashes: None } => {
                if c == '\\' && at(i + 1) != '\n' {
                    i += 1;
                } else if c == '"' {
                    state = State::Code;
                }
            }
            State::Text {
                hashes: Some(count),
            } => {
                if c == '"' && (1..=count).all(|n| at(i + n) == '#') {
                    i += count;
                    state = State::Code;
                }
            }
        }
        i += 1;
    }
    out
}

/// Number of `#` of a raw string whose quote is at `quote`; `None`: an ordinary string.
fn raw_hashes(chars: &[char], quote: usize) -> Option<usize> {
    let mut i = quote;
    while i > 0 && chars[i - 1] == '#' {
        i -= 1;
    }
    let hashes = quote - i;
    if i == 0 || chars[i - 1] != 'r' {
        return None;
    }
    let prefix = if i >= 2 && matches!(chars[i - 2], 'b' | 'c') {
        i - 2
    } else {
        i - 1
    };
    let part_of_a_name =
        prefix > 0 && (chars[prefix - 1].is_alphanumeric() || chars[prefix - 1] == '_');
    (!part_of_a_name).then_some(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        lines(text)
            .into_iter()
            .map(|line| line.code)
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn comments_are_not_code() {
        assert_eq!(code("a // b\nc /* d /* e */ f */ g"), "a \nc  g");
        assert_eq!(lines("a // b")[0].comment, "/ b");
    }

    #[test]
    fn literals_are_not_code() {
        assert_eq!(
            code(r#"f("unsafe {", 'x', '"', '\'', b"q") + 'a: &'b T"#),
            "f(,  ,  ,  , b) + 'a: &'b T"
        );
        assert_eq!(code("r#\"a \" b\"# c"), "r# c");
        assert_eq!(code("\"a \\\" b\" c"), " c");
    }

    #[test]
    fn a_literal_over_several_lines_keeps_their_number() {
        assert_eq!(lines("\"a\nb\"\nc").len(), 3);
        assert_eq!(lines("\"a\nb\"\nc")[2].code, "c");
    }
}
