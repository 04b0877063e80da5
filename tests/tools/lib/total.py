"""The last line of every tier's output."""

import re
import subprocess
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
        return 1 if self.failed else 0


def parse(line):
    match = LINE.match(line.strip())
    return Total(*map(int, match.groups())) if match else None


def of_command(argv, env=None, each=None):
    """Runs a command that prints a total last, passes on its other output immediately, and returns
    the total.

    A command without a total, or with a status that contradicts the total, counts as one failure.
    `env`: the command's environment; the caller's if it is None. `each` is called with each line.
    """
    last = ""
    try:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        print(f"can't be started, counted as one failure: {error}", flush=True)
        return Total(failed=1)
    with process.stdout:
        for line in process.stdout:
            if each:
                each(line.rstrip("\n"))
            if last:
                print(last, flush=True)
            last = line.rstrip("\n")
    status = process.wait()
    total = parse(last)
    if total is None:
        if last:
            print(last)
        print(f"ended with status {status} and without a total: counted as one failure", flush=True)
        return Total(failed=1)
    if bool(status) != bool(total.failed):
        print(f"says `{total}` but ended with status {status}: counted as one failure", flush=True)
        return total + Total(failed=1)
    return total
