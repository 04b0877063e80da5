"""Many processes with one RDM endpoint each, of tests/conformance/c/rdm/scale.c: what they take,
and how it grows with their number."""

import contextlib
import math
import os
import pathlib
import re
import selectors
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace

from . import programs

SOURCE = programs.TOP / "tests" / "conformance" / "c" / "rdm" / "scale.c"
# Seconds for one command of all processes.
PATIENCE = 360


class Failed(Exception):
    """A process has ended, or has not answered in time."""


def compile_to(program):
    subprocess.run(["gcc", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE), "-lfabric"], check=True)


@dataclass(frozen=True)
class Subject:
    """A provider as the processes run it."""

    name: str
    provider: str
    xrc: bool = False
    progress: str = "manual"
    env: tuple = ()  # further variables, as pairs
    command: object = None  # from a command line to the one that is executed; None: the same
    loopback: bool = True  # the processes of emulated node n have the address 127.0.0.(n + 1)
    address: str = "-"  # otherwise
    most: int = 10**9  # processes

    def node(self, number):
        return f"127.0.0.{number + 1}" if self.loopback else self.address


@dataclass
class Usage:
    """What a process has at one moment."""

    private: int  # bytes of anonymous memory
    shared: int  # bytes of the files of memory that it has made; those of n processes count once
    tables: int  # bytes of page tables
    descriptors: int
    sockets: int

    @staticmethod
    def of(pid):
        def sizes(name):
            text = pathlib.Path(f"/proc/{pid}/{name}").read_text()
            return {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}

        rollup = sizes("smaps_rollup")
        files, descriptors, sockets = {}, 0, 0
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{fd}"
                kind = os.readlink(path)
                descriptors += 1
                sockets += kind.startswith("socket:")
                if kind.startswith("/memfd:"):
                    # all pages that the file has, mapped or not
                    stat = os.stat(path)
                    files[stat.st_ino] = stat.st_blocks * 512
        # without such files: what it has mapped, each page shared by n processes counted as 1/n
        shared = sum(files.values()) or rollup.get("Pss_Shmem", 0)
        return Usage(rollup["Anonymous"], shared, sizes("status")["VmPTE"], descriptors, sockets)


class Group:
    """Processes that execute the same commands."""

    def __init__(self, subject, program, count, nodes, env, descriptors=None):
        self.subject, self.program, self.count, self.nodes = subject, program, count, nodes
        self.env = {**env, **dict(subject.env)}
        self.descriptors = descriptors
        self.processes = []
        self.errors = tempfile.TemporaryFile()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()
            if process.poll() is None:
                process.kill()
            process.wait()
        self.errors.close()

    def node_of(self, number):
        """Processes of a node are adjacent."""
        return number * self.nodes // self.count

    def start(self, number):
        node = self.node_of(number)
        argv = [self.program, self.subject.provider, self.subject.node(node), self.subject.progress]
        if self.subject.xrc:
            argv.append("xrc")
        if self.descriptors:
            argv = ["prlimit", f"--nofile={self.descriptors}", *argv]
        env = dict(self.env, SOFTVERBS_NODE=str(node)) if self.nodes > 1 else self.env
        process = subprocess.Popen(
            [str(word) for word in argv], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, bufsize=0
        )
        # These processes, and no others of the machine, end if they take too much memory.
        pathlib.Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        self.processes.append(process)
        return process

    def problem(self, what):
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")
        return Failed(f"{self.subject.name}, {self.count} processes: {what}\n{text[-2000:]}")

    def answers(self, asked):
        """The lines of these processes, in their order."""
        lines, parts = {}, {process: b"" for process in asked}
        end = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as waiting:
            for process in asked:
                waiting.register(process.stdout, selectors.EVENT_READ, process)
            while waiting.get_map():
                ready = waiting.select(max(0, end - time.monotonic()))
                if not ready:
                    raise self.problem("no answer")
                for key, _ in ready:
                    process = key.data
                    parts[process] += os.read(process.stdout.fileno(), 4096)
                    if not parts[process] or (not parts[process].endswith(b"\n") and process.poll() is not None):
                        raise self.problem(f"a process has ended with status {process.wait()}")
                    if parts[process].endswith(b"\n"):
                        lines[process] = parts[process].decode().split()
                        waiting.unregister(process.stdout)
        return [lines[process] for process in asked]

    def ask(self, text, of=None):
        """Lets these processes, or all, execute a command at the same time."""
        asked = self.processes if of is None else of
        for number, process in enumerate(asked):
            line = text(number) if callable(text) else text
            try:
                process.stdin.write(f"{line}\n".encode())
            except BrokenPipeError:
                raise self.problem(f"a process has ended with status {process.wait()}") from None
        return self.answers(asked)

    def open_one(self):
        """One more process with an endpoint: seconds from its start, and of its processor time."""
        wall, cpu, name = self.ask("open", [self.start(len(self.processes))])[0]
        return int(wall) / 1e6, int(cpu) / 1e6, name

    def open_all(self, at_once=False):
        """Opens the endpoints, one after the other unless `at_once`, and inserts all names
        everywhere. Returns the times of each, and the processor time of each insertion."""
        if at_once:
            asked = [self.start(number) for number in range(self.count)]
            opened = [(int(wall) / 1e6, int(cpu) / 1e6, name) for wall, cpu, name in self.ask("open", asked)]
        else:
            opened = [self.open_one() for _ in range(self.count)]
        with tempfile.NamedTemporaryFile("w") as names:
            names.write("".join(f"{name}\n" for _, _, name in opened))
            names.flush()
            inserted = self.ask(lambda number: f"insert {self.count} {number} {names.name}")
        return opened, [int(cpu) / 1e6 for _, cpu, _ in inserted]

    def run(self, size, each, exchange):
        """Lets the processes exchange messages: `exchange(number)` is what one sends to and receives
        from. Returns seconds of wall time and the processor time of each."""
        begin = time.monotonic()
        done = self.ask(lambda number: f"run {size} {each} {exchange(number)}")
        wall = time.monotonic() - begin
        self.ask("rest")
        return wall, [int(cpu) / 1e6 for _, cpu, _ in done]

    def all_to_all(self, size, each):
        return self.run(size, each, lambda _: "all all")

    def incast(self, size, each):
        """All send to process 0."""
        return self.run(size, each, lambda number: "0 none" if number else "none all")

    def usages(self):
        for process in self.processes:
            if process.poll() is not None:
                raise self.problem(f"a process has ended with status {process.returncode}")
        return [Usage.of(process.pid) for process in self.processes]

    def close_all(self):
        begin = time.monotonic()
        alive = [process for process in self.processes if process.poll() is None]
        done = self.ask("close", alive)
        for process in alive:
            if process.wait(PATIENCE) != 0:
                raise self.problem(f"a process has ended with status {process.returncode}")
        return time.monotonic() - begin, [int(cpu) / 1e6 for _, cpu in done]


@dataclass
class Star:
    """What a process uses: without peers, when it is connected to all of them, and a while after the
    last one was killed, in which it has called nothing."""

    alone: Usage
    used: Usage
    after: Usage


def star(subject, program, peers, progress, descriptors, env):
    """Lets one process connect to so many others, with so many descriptors for each, and be
    answered."""
    subject = replace(subject, progress=progress)
    with Group(subject, program, peers + 1, 1, env, descriptors) as group:
        group.open_all(at_once=True)
        first, last = group.processes[0], group.processes[-1]
        alone = Usage.of(first.pid)
        group.run(8, 4, lambda number: "none 0" if number else "all none")
        group.incast(8, 4)
        used = Usage.of(first.pid)
        last.kill()
        last.wait()
        time.sleep(1)
        after = Usage.of(first.pid)
        group.close_all()
    return Star(alone, used, after)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def slope(points):
    """The slope of a line through the logarithms of these pairs, by least squares; 1 is linear."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 2:
        return math.nan
    x0, y0 = mean(x for x, _ in logs), mean(y for _, y in logs)
    return sum((x - x0) * (y - y0) for x, y in logs) / sum((x - x0) ** 2 for x, _ in logs)
