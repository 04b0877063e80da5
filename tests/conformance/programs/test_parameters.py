"""The parameters: the manual page and `fi_info -e` agree on each."""

import re
import unittest

from lib import programs

from . import common

PAGE = programs.TOP / "docs" / "man" / "fi_weft.7.md"


def documented():
    """The page's parameters, by name: type, and text with default."""
    section = PAGE.read_text().split("\n# RUNTIME PARAMETERS\n")[1].split("\n# ")[0]
    found = re.findall(r"(?m)^\*(FI_WEFT_\w+)\* \((\w+)\)\n: ((?:.+\n)+)", section)
    return {name: (kind, " ".join(text.split())) for name, kind, text in found}


class Parameters(unittest.TestCase):
    maxDiff = None

    def shown(self, libfabric):
        shown = programs.run([libfabric.program("fi_info"), "-e"], libfabric.env())
        self.assertEqual(shown.status, 0, shown)
        return shown.out

    @common.per_release
    def test_the_manual_page_has_what_is_shown(self, libfabric):
        found = re.findall(r"(?m)^# (FI_WEFT_\w+): (\w+).*\n# weft: (.*)$", self.shown(libfabric))
        self.assertEqual(documented(), {name: (kind, text) for name, kind, text in found})

    def test_each_default_is_in_the_text(self):
        for name, (_, text) in documented().items():
            self.assertRegex(text, r" \(default: .+\)$", name)

    def test_no_other_page_has_a_list_of_its_own(self):
        """The manual page has the only list: a second one would become wrong."""
        for page in [programs.TOP / "README.md", *(programs.TOP / "docs").glob("*.md")]:
            self.assertNotRegex(page.read_text(), r"(?m)^\| *`FI_WEFT_", page.name)


if __name__ == "__main__":
    unittest.main()
