"""The test cases: small shell files with header comments (guest, needs, seconds, long, later,
kill-b), and an order that needs few boots.
"""

import dataclasses
import os
import pathlib
import re

from . import fabtests
from . import image as images
from . import mpich

CASES = images.HERE / "cases"
PROJECT = images.HERE.parent.parent
# The directory with the shared object; set WEFT_PROVIDER_DIR, inside the project, for another
# build.
WEFT_DIR = PROJECT / os.environ.get("WEFT_PROVIDER_DIR", "build/lib/libfabric")
WEFT_SO = WEFT_DIR / "libweft-fi.so"

# One boot serves all cases of a group.
GUESTS = ("one", "large", "pmem", "old", "pair")
# MiB of the guests that need more than 2048
MEMORY = {"large": 6144}
# MiB of persistent memory
PMEM = {"pmem": 128}


@dataclasses.dataclass
class Case:
    path: pathlib.Path
    name: str
    guest: str = "one"
    needs: str = ""
    seconds: int = 60
    # what it runs only with WEFT_VM_LONG; empty if it has one form
    long: str = ""
    # why only `--long` runs it; empty if each run does
    later: str = ""
    # seconds after a's `signal running`; the pair is booted for this case alone
    kill_b: float | None = None

    def functions(self):
        return ("a", "b") if self.guest == "pair" else ("run",)

    def missing(self):
        """Why the case cannot run; empty if it can."""
        if "weft" in self.needs.split() and not WEFT_SO.exists():
            return f"{WEFT_SO.relative_to(PROJECT)} is not built"
        if "fabtests" in self.needs.split() and not fabtests.ready():
            return "fabtests could not be downloaded"
        if "mpich" in self.needs.split() and not mpich.ready():
            return "MPICH could not be downloaded"
        return ""


def read(path):
    case = Case(path, path.stem)
    for key, value in re.findall(r"^# (guest|needs|seconds|long|later|kill-b): *(.+?) *$", path.read_text(), re.M):
        if key == "guest":
            if value not in GUESTS:
                raise ValueError(f"{path}: guest {value}")
            case.guest = value
        elif key == "needs":
            case.needs = value
        elif key == "seconds":
            case.seconds = int(value)
        elif key == "long":
            case.long = value
        elif key == "later":
            case.later = value
        else:
            case.kill_b = float(value)
    text = path.read_text()
    for function in case.functions():
        if not re.search(rf"^{function}\(\)", text, re.M):
            raise ValueError(f"{path}: no function {function}")
    return case


def select(names, long=False):
    """The cases with these names, by default those of `make check`; `long`: only those that it does
    not run in their longest form, or not at all."""
    found = [case for case in map(read, sorted(CASES.glob("*.sh"))) if case.long or case.later or not long]
    if names:
        unknown = set(names) - {case.name for case in found}
        if unknown:
            raise SystemExit(f"check: no such case: {' '.join(sorted(unknown))}")
        found = [case for case in found if case.name in names]
    elif not long:
        found = [case for case in found if not case.later]
    # cases that power a guest off come last in their group
    return sorted(found, key=lambda c: (GUESTS.index(c.guest), c.kill_b is not None))
