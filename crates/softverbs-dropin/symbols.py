"""The exported symbols of shared libraries and their versions, for build-dropin and build-rdmacm."""
import collections
import re
import subprocess
import sys

Symbol = collections.namedtuple("Symbol", "name version default data size")


def run(*command, stderr=None):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True).stdout


def installed(name, package):
    """The path of the installed library of that name."""
    for line in run("/sbin/ldconfig", "-p").splitlines():
        if line.strip().startswith(name + " "):
            return line.split("=>")[1].strip()
    sys.exit(f"no {name} is installed; the drop-in takes its versions from one (Debian: {package})")


def exported(library):
    """The versioned symbols that a library defines."""
    symbols = []
    for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        field = line.split()
        if len(field) < 8 or field[6] in ("UND", "ABS", "Ndx") or "@" not in field[7]:
            continue
        name, _, version = field[7].partition("@")
        default = version.startswith("@")
        symbols.append(Symbol(name, version.lstrip("@"), default, field[3] == "OBJECT", int(field[2], 0)))
    if not symbols:
        sys.exit(f"{library} exports no versioned symbol")
    return symbols


def version_script(symbols):
    """The versions in their order, each following the one before; the private one stands alone."""
    versions = {s.version for s in symbols}
    private = sorted(v for v in versions if "PRIVATE" in v)
    public = sorted(versions.difference(private), key=lambda v: [int(n) for n in re.findall(r"\d+", v)])
    text = []
    for version, parent in zip(public + private, [None] + public[:-1] + [None] * len(private)):
        names = sorted(s.name for s in symbols if s.version == version)
        text.append(version + " {")
        if names:
            text.append("\tglobal:\n" + "".join(f"\t\t{n};\n" for n in names).rstrip())
        if parent is None and version == public[0]:
            text.append("\tlocal: *;")
        text.append("}" + (f" {parent}" if parent else "") + ";\n")
    return "\n".join(text)
