"""Instructions of the functions `count_NAME` of weft-bench, from a dump of callgrind: all of them,
and the share of the device.

The device is softverbs. It is a library of its own below libfabric's provider `verbs`, and linked
into the provider of weft. An instruction of the latter belongs to the innermost inlined function of
its address that is in softverbs or in weft, by the file of that function. An instruction of another
library, or of a crate that both use, belongs to the part that called the function.
"""

import collections
import os
import pathlib
import re
import subprocess
import tempfile

TOP = pathlib.Path(os.path.realpath(__file__)).parent.parent
PROVIDER, DEVICE = "provider", "device"
# Directories of this tree, and the parts to which their instructions belong.
FOLDERS = {"crates/softverbs/": DEVICE, "src/": PROVIDER, "provider/": PROVIDER, "benches/": PROVIDER}
# Whole libraries of one part.
OBJECTS = {"libibverbs": DEVICE, "librdmacm": DEVICE, "libfabric": PROVIDER}
# Work that is due once per millisecond is left out: callgrind makes it too frequent.
CLOCKWORK = "look_at_peers"
OPTIONS = ["-q", "--tool=callgrind", "--dump-instr=yes", "--separate-callers=12", "--compress-pos=no",
           "--compress-strings=no", "--toggle-collect=*count::count_*"]


class Function:
    """A function with its callers: `own` has the instructions of each address, `calls` the callees
    with their inclusive instructions."""

    def __init__(self):
        self.own = collections.Counter()
        self.calls = []

    def total(self):
        return sum(self.own.values()) + sum(cost for _, _, cost in self.calls)


def parse(dump):
    """The functions of a dump, by object and name."""
    functions = collections.defaultdict(Function)
    here, callee, expect_cost = None, {}, False
    with open(dump) as lines:
        for line in lines:
            word, _, value = line.rstrip("\n").partition("=")
            if word == "ob":
                obj = value
            elif word == "fn":
                here = functions[obj, value]
            elif word in ("cob", "cfn"):
                callee[word] = value
            elif word == "calls":
                expect_cost = True
            elif line.startswith("0x"):
                address, _, cost = line.split()
                if expect_cost:
                    here.calls.append((int(address, 16), (callee.get("cob", obj), callee["cfn"]), int(cost)))
                    callee, expect_cost = {}, False
                else:
                    here.own[int(address, 16)] += int(cost)
    return functions


def part_of_file(path):
    """The part that a source file belongs to, or None."""
    inside = path.removeprefix(f"{TOP}/")
    return None if inside == path else next((part for folder, part in FOLDERS.items() if inside.startswith(folder)), None)


def parts_of(obj, addresses):
    """The part of each address of an object that has softverbs linked into it."""
    text = "".join(f"{address:#x}\n" for address in addresses)
    ran = subprocess.run(["addr2line", "-a", "-i", "-e", obj], input=text, stdout=subprocess.PIPE, text=True, check=True)
    parts = {}
    for line in ran.stdout.splitlines():
        if line.startswith("0x"):
            address = int(line, 16)
        elif parts.get(address) is None:
            # the frames follow from the innermost one on
            parts[address] = part_of_file(line.rsplit(":", 1)[0])
    return parts


class Shares:
    """Divides the instructions of functions between provider and device."""

    def __init__(self, functions):
        self.functions = functions
        self.done = {}
        used = collections.defaultdict(set)
        for (obj, _), function in functions.items():
            used[obj].update(function.own, (address for address, _, _ in function.calls))
        self.parts = {}
        for obj, addresses in used.items():
            name = os.path.basename(obj)
            whole = next((part for start, part in OBJECTS.items() if name.startswith(start)), None)
            if whole:
                self.parts[obj] = dict.fromkeys(addresses, whole)
            elif re.match(r"libweft|weft", name):
                self.parts[obj] = parts_of(obj, addresses)

    def of(self, key, caller):
        """[all instructions, those of the device] of a function that `caller` calls, with its
        callees."""
        if (key, caller) in self.done:
            return self.done[key, caller]
        # a recursive call is part of the outer one
        self.done[key, caller] = [0, 0]
        function, parts = self.functions[key], self.parts.get(key[0], {})
        total, device = 0, 0
        for address, cost in function.own.items():
            total += cost
            device += cost * ((parts.get(address) or caller) == DEVICE)
        for address, callee, cost in function.calls:
            if CLOCKWORK in callee[1].split("'")[0]:
                continue
            whole = self.functions[callee].total()
            below = self.of(callee, parts.get(address) or caller)
            # the callee may have other callers with the same names
            share = cost / whole if whole else 0
            total += below[0] * share
            device += below[1] * share
        self.done[key, caller] = [total, device]
        return [total, device]


def count(argv, env, wrap=lambda argv: argv):
    """Runs weft-bench under callgrind. Returns for each counted function its instructions in each
    call, and those of them that belong to the device."""
    with tempfile.TemporaryDirectory() as scratch:
        dump = f"{scratch}/callgrind.out"
        ran = subprocess.run(wrap(["valgrind", *OPTIONS, f"--callgrind-out-file={dump}", *argv]), env=env,
                             stdout=subprocess.PIPE, text=True, check=True)
        calls = int(re.search(r"calls (\d+)", ran.stdout)[1])
        functions = parse(dump)
        shares = Shares(functions)
        found = {}
        for key in list(functions):
            name = re.search(r"\bcount::count_(\w+)", key[1].split("'")[0])
            if name:
                found[name[1]] = [n / calls for n in shares.of(key, PROVIDER)]
    return found
