"""Comments and pages have lines of at most 100 columns, which the formatter does not see to."""

import pathlib
import re
import unittest

TOP = pathlib.Path(__file__).resolve().parents[3]
COLUMNS = 100
CODE = ("src", "provider", "crates/softverbs/src")
PAGES = ("README.md", "docs/*.md", "docs/man/*.md")
COMMENT = re.compile(r"\s*//[/!]?")
FENCE = re.compile(r"\s*(```|~~~)")
# a row of a table, or an address alone
WHOLE = re.compile(r"\s*(\||\S+://\S*$)")


def wide(text, is_page):
    """Numbers of the lines that are too long, and could be broken."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        comment = COMMENT.match(line)
        if not comment and not is_page:
            continue
        content = line if is_page else line[comment.end():]
        if FENCE.match(content):
            fenced = not fenced
        elif len(line) > COLUMNS and not (is_page and fenced) and not WHOLE.match(content):
            yield number


class Width(unittest.TestCase):
    def test_lines(self):
        long = "x " * 60
        self.assertEqual(list(wide(f"{long}\n| {long}\n```\n{long}\n```\n{long}", True)), [1, 6])
        self.assertEqual(list(wide(f"// {long}\nlet {long}\n    /// | {long}\n// https://{'x' * 100}\n", False)), [1])

    def test_pages_and_comments(self):
        files = [(path, True) for pattern in PAGES for path in TOP.glob(pattern)]
        files += [(path, False) for folder in CODE for path in (TOP / folder).rglob("*.rs")]
        self.assertGreater(len(files), 500)
        found = [f"{path.relative_to(TOP)}:{number}" for path, page in files for number in wide(path.read_text(), page)]
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
