"""The commands in README, `make help`, docs/ and the man page, and how each is tested."""

import re
from dataclasses import dataclass

from . import programs

LISTED = programs.TOP / "tests" / "tools" / "commands"

# the first word of a command in a span of code, after settings of the environment
PROGRAMS = (
    "make|cargo|gcc|man|fi_info|fi_pingpong|fi_strerror|modprobe|rdma|ip|ibv_devinfo|ibv_devices|ulimit|sysctl"
    "|apt|apt-get|perf|gdb|strace|valgrind|(?:tests|benches|examples|crates)/\\S+"
)
SPAN = re.compile(rf"^(?:[A-Z_]+=\S* )*(?:{PROGRAMS})(?: |$)")
# files and folders, and sources with the names of tests; not commands
FILE = re.compile(r"^(?:tests|benches|examples|crates)/(?:\S+|\S+\.(?:c|rs|sh) .*)$")
# a line of a block for one of two terminals
TERMINAL = re.compile(r"\s+# on (?:one|another)(?: terminal)?$")

# how a listed command is tested, or why it is not
KINDS = {
    "run": "run by the tier `conformance`; its output matches the expression",
    "status": "run by the tier `conformance`, and ends with status 0",
    "vm": "run by the tier `vm`; its output matches the expression",
    "tier": "a tier, or a part of one",
    "long": "takes more than five minutes, or a machine with nothing else to do",
    "hardware": "needs an RDMA device",
    "system": "changes the system or the tree",
    "pattern": "no command before something is put in",
    "name": "a program that a sentence is about, not a command to type",
}


@dataclass(frozen=True)
class Command:
    lines: tuple  # one line, or a block whose lines depend on each other; with comments
    where: str  # the document

    @property
    def text(self):
        """The command's name in the list."""
        return " ; ".join(bare(line) for line in self.lines)


@dataclass(frozen=True)
class Listing:
    kind: str
    note: str  # the expression, or the reason


class BadListing(Exception):
    pass


def documents():
    """The texts that contain commands, by name."""
    found = [programs.TOP / "README.md"]
    for folder, pattern in (("docs", "**/*.md"), ("tests", "*/README.md")):
        found += sorted((programs.TOP / folder).glob(pattern))
    return {str(path.relative_to(programs.TOP)): path.read_text() for path in found}


def bare(line):
    """The line without its comment."""
    return re.sub(r"\s+# .*", "", line).strip()


def of_block(block, where):
    """The commands of a block of shell: one per line, or one if the lines depend on each other."""
    lines = [line for line in block.splitlines() if bare(line) and not line.startswith("#")]
    if any(line.startswith(("export ", "cd ")) or TERMINAL.search(line) for line in lines):
        return [Command(tuple(lines), where)]
    return [Command((bare(line),), where) for line in lines]


def of_text(text, where):
    """The commands of the fenced blocks of shell, and the spans of code that are commands."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", text)
    rest = re.sub(r"(?ms)^```.*?^```$", "", text)
    spans = [span for span in re.findall(r"`([^`\n]+)`", rest) if SPAN.match(span) and not FILE.match(span)]
    return [command for block in blocks for command in of_block(block, where)] + [Command((span,), where) for span in spans]


def of_makefile(text):
    """The commands of `make help`: each target, alone and with the settings on its line."""
    found = []
    for target, about in re.findall(r"(?m)^([a-z-]+):.* ## (.*)$", text):
        found.append(Command((f"make {target}",), "make help"))
        settings = re.findall(r"\b[A-Z]+=(?:'[^']*'|\"[^\"]*\"|[^\s,;:\]'\"])+(?:;\S+)?", about)
        if settings:
            found.append(Command((f"make {target} {' '.join(settings)}",), "make help"))
    return found


def shown():
    """Every command once, from the first document that contains it."""
    found = [command for where, text in documents().items() for command in of_text(text, where)]
    found += of_makefile((programs.TOP / "Makefile").read_text())
    first = {}
    for command in found:
        first.setdefault(command.text, command)
    return list(first.values())


def listings(text=None):
    """The list, by command."""
    found = {}
    for line in (LISTED.read_text() if text is None else text).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(.*?)\s+# (\w+): (\S.*)", line)
        if not match or match[2] not in KINDS:
            raise BadListing(f"no kind, or no reason: {line}")
        if match[1] in found:
            raise BadListing(f"twice: {match[1]}")
        found[match[1]] = Listing(match[2], match[3])
    return found
