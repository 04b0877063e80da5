"""The list of expected failures and skips, and the verdict on each result.

A line of the list is `KIND | NAME | OWNER | REASON`. KIND is `fail`, `skip`, or `may` for a test
that skips or passes depending on the machine (a GPU, huge pages). OWNER is the module that will
make it pass, or `none` if it needs a feature that is not emulated. NAME may contain `*` unless KIND
is `fail`. A failure or a skip that is not in the list is a failure, and so is a pass of a test in
the list (unless `may`): the list can only shrink. A name stands for the test in every release of
rdma-core, `[release] name` for the test in one release.
"""
import fnmatch

from lib.total import Total


class Entry:
    def __init__(self, kind, name, owner, reason):
        self.kind, self.name, self.owner, self.reason = kind, name, owner, reason
        self.used = False


class Expected:
    def __init__(self, path):
        self.path, self.entries = path, []
        with open(path) as file:
            for number, line in enumerate(file, 1):
                field = [f.strip() for f in line.split("|")]
                if not line.strip() or line.startswith("#"):
                    continue
                if len(field) != 4 or field[0] not in ("fail", "skip", "may") or not all(field):
                    raise SystemExit(f"{path}:{number}: want `fail|skip|may | name | owner | reason`")
                if field[0] == "fail" and "*" in field[1]:
                    raise SystemExit(f"{path}:{number}: a failure is listed by its whole name")
                self.entries.append(Entry(*field))

    def find(self, name):
        """The first line for a result: lines for one release come before lines for all."""
        for wanted in (name, name.partition("] ")[2]) if name.startswith("[") else (name,):
            for entry in self.entries:
                if entry.name == wanted or (entry.kind != "fail" and "*" in entry.name
                                            and fnmatch.fnmatchcase(wanted, entry.name.replace("[", "[[]"))):
                    entry.used = True
                    return entry
        return None


class Tally:
    """Counts and prints results as they come."""

    def __init__(self, expected, verbose):
        self.expected, self.verbose = expected, verbose
        self.passed = self.failed = self.skipped = self.known = 0
        self.failures = []

    def result(self, name, outcome, why="", output="", seconds=None):
        """`outcome` is pass, fail or skip. Returns whether it was as expected."""
        entry = self.expected.find(name)
        time = "" if seconds is None else f" ({seconds:.1f} s)"
        may = entry is not None and entry.kind == "may"
        if outcome == "pass" and (entry is None or may):
            self.passed += 1
            print(f"ok    {name}{time}", flush=True)
            return True
        if entry is not None and (outcome == entry.kind or may and outcome == "skip"):
            if outcome == "skip":
                self.skipped += 1
                print(f"skip  {name}: {one_line(why)}", flush=True)
            else:
                self.known += 1
                print(f"known {name}{time}: {entry.reason} ({entry.owner}): {one_line(why)}", flush=True)
                if self.verbose:
                    print(indent(output))
            return True
        if outcome == "pass":
            why = f"passes, but {self.expected.path} has it as `{entry.kind}`: take the line out"
        elif outcome == "skip":
            why = f"skipped, and not on the list of skips: {why}"
        elif entry is not None:
            why = f"listed as `{entry.kind}`, but failed: {why}"
        self.failed += 1
        self.failures.append(name)
        print(f"FAIL  {name}{time}: {why}", flush=True)
        if output.strip():
            print(indent(output), flush=True)
        return False

    def no_network(self, name, why):
        """Counts and prints programs that could not be downloaded as skipped, listed or not."""
        self.skipped += 1
        print(f"SKIP  {name}: {why}", flush=True)

    def stale(self, releases):
        """Lines of the list that matched no result: tests that are gone or misspelt.

        `releases` ran; lines for other releases are ignored.
        """
        for entry in self.expected.entries:
            release = entry.name[1:].partition("] ")[0] if entry.name.startswith("[") else ""
            if not entry.used and release in releases:
                self.failed += 1
                self.failures.append(entry.name)
                print(f"FAIL  {entry.name}: listed in {self.expected.path}, but there is no such test")

    def summary(self):
        """Prints the totals and returns the exit status."""
        if self.failures:
            print("failed: " + ", ".join(self.failures))
        if self.known:
            print(f"{self.known} fail as listed in {self.expected.path}; they count as skipped")
        total = Total(self.passed, self.failed, self.skipped + self.known)
        print(total, flush=True)
        return total.status


def one_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def indent(text, most=60):
    lines = text.rstrip().splitlines()
    if len(lines) > most:
        lines = [f"[{len(lines) - most} lines before]"] + lines[-most:]
    return "\n".join("      | " + line for line in lines)
