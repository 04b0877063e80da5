"""The one line in which every tier ends."""

import re
from dataclasses import dataclass

LINE = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")


@dataclass
class Total:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other):
        return Total(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    @property
    def status(self):
        return 1 if self.failed or not self.passed else 0


def parse(line):
    match = LINE.match(line.strip())
    return Total(*map(int, match.groups())) if match else None
