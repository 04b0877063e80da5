"""rdma-core's own Python tests, of the release that pyverbs is from."""
import glob
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request

from lib import process

HERE = os.path.dirname(os.path.abspath(__file__))
# pyverbs of a distribution is built for the distribution's Python.
PYTHON = "/usr/bin/python3"


class Unavailable(Exception):
    """Why the tests can't be run on this machine."""


def pyverbs_version():
    """The release of rdma-core that the installed pyverbs is from, as `44.0`, and its package's."""
    found = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", "python3-pyverbs"],
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if found.returncode != 0:
        raise Unavailable("pyverbs is not installed (Debian: python3-pyverbs)")
    return re.match(r"(?:\d+:)?([\d.]+)", found.stdout)[1], found.stdout


def source():
    """The directory `tests` of rdma-core, from the cache or fetched into it."""
    version, package = pyverbs_version()
    cache = os.environ.get("WEFT_CACHE") or os.path.expanduser("~/.cache/weft")
    target = os.path.join(cache, f"rdma-core-{version}", "tests")
    if os.path.isfile(os.path.join(target, "__init__.py")):
        return target
    os.makedirs(cache, exist_ok=True)
    problems = []
    for fetch in (from_repository, from_debian, from_github):
        with tempfile.TemporaryDirectory(dir=cache) as work:
            try:
                archive = fetch(version, package, work)
                if archive is None:
                    continue
                unpack(archive, work)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                os.rename(os.path.join(work, "tests"), target)
                return target
            except (OSError, subprocess.CalledProcessError, tarfile.TarError, Unavailable) as e:
                text = getattr(e, "stdout", None) or str(e)
                problems.append(f"{fetch.__name__}: {text.strip().splitlines()[-1]}")
    raise Unavailable(f"no source of rdma-core {version}: " + "; ".join(problems) +
                      ". Put its directory `tests` to " + target +
                      ", or set WEFT_RDMA_CORE to a clone of rdma-core")


def run(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, **options).stdout


def from_repository(version, _package, work):
    repository = os.environ.get("WEFT_RDMA_CORE")
    if not repository:
        return None
    archive = os.path.join(work, "git.tar")
    run("git", "-C", repository, "archive", "-o", archive, f"v{version}", "tests")
    return archive


def from_debian(version, package, work):
    """The upstream tarball by apt-get, with a source list of its own."""
    policy = run("apt-cache", "policy", "python3-pyverbs")
    origin = re.search(r"\d+ (https?://\S+) (\S+?)/(\S+) ", policy)
    if not origin:
        raise Unavailable("apt knows no archive that has python3-pyverbs")
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    signed = f"[signed-by={keyring}] " if os.path.exists(keyring) else ""
    with open(os.path.join(work, "sources.list"), "w") as f:
        f.write(f"deb-src {signed}{origin[1]} {origin[2]} {origin[3]}\n")
    os.makedirs(os.path.join(work, "lists", "partial"))
    os.makedirs(os.path.join(work, "cache", "archives", "partial"))
    apt = ["apt-get", "-q", "-o", f"Dir::Etc::sourcelist={work}/sources.list", "-o",
           "Dir::Etc::sourceparts=-", "-o", f"Dir::State::lists={work}/lists", "-o",
           f"Dir::Cache={work}/cache", "-o", "APT::Sandbox::User="]
    run(*apt, "update")
    run(*apt, "source", "--download-only", "--tar-only", f"rdma-core={package}", cwd=work)
    return glob.glob(os.path.join(work, "rdma-core_*.orig.tar.*"))[0]


def from_github(version, _package, work):
    url = f"https://github.com/linux-rdma/rdma-core/archive/refs/tags/v{version}.tar.gz"
    archive = os.path.join(work, "github.tar.gz")
    with urllib.request.urlopen(url, timeout=30) as answer, open(archive, "wb") as f:
        shutil.copyfileobj(answer, f)
    return archive


def unpack(archive, work):
    """Takes `tests/` out of an archive, whatever its top directory."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = re.search(r"(?:^|^[^/]+/)(tests/[^/]+\.py)$", member.name)
            if inside and member.isfile():
                member.name = inside[1]
                tar.extract(member, work)


class Worker:
    def __init__(self, tests, env, names=None):
        self.reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        command = [PYTHON, os.path.join(HERE, "worker.py"), tests, str(writer)]
        source = tempfile.TemporaryFile("w+")
        source.write("\n".join(names or []))
        source.seek(0)
        if names is None:
            command.append("--list")
        self.program = process.Program(command, env, pass_fds=(writer,), stdin=source)
        os.close(writer)
        self.buffer = b""

    def event(self, limit):
        """The next event; None at the end; TimeoutError when nothing comes in `limit` seconds."""
        deadline = time.monotonic() + limit
        while b"\n" not in self.buffer:
            if not select.select([self.reader], [], [], min(0.5, max(0.0, deadline - time.monotonic())))[0]:
                if time.monotonic() >= deadline:
                    raise TimeoutError
                # Children of a crashed worker may still hold the pipe.
                if self.program.process.poll() is not None:
                    return None
                continue
            data = os.read(self.reader, 65536)
            if not data:
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self):
        self.program.kill()
        os.close(self.reader)


def names(tests, env):
    worker = Worker(tests, env)
    try:
        event = worker.event(60)
        if event is None:
            raise SystemExit("the tests of rdma-core do not load:\n" + worker.program.text())
        return event["list"]
    finally:
        worker.close()


def run_tests(tests, wanted, env, limit, report):
    """Runs `wanted`, calling report(name, outcome, why, output, seconds) for each."""
    left = list(wanted)
    while left:
        worker = Worker(tests, env, left)
        current, started, holder, done = None, time.monotonic(), "", False
        try:
            while True:
                try:
                    event = worker.event(limit)
                except TimeoutError:
                    os.kill(worker.program.process.pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    why, text = f"hung for {limit} s", worker.program.where() + "\n" + worker.program.text()
                    break
                if event is None or "done" in event:
                    done = event is not None
                    worker.program.wait(time.monotonic() + 5)
                    code = worker.program.process.poll()
                    why, text = f"worker: {process.explain(code)}", worker.program.text()
                    break
                if "holder" in event:
                    holder = f"{event['holder']}: {event['why']}"
                elif "start" in event:
                    current, started = event["start"], time.monotonic()
                elif "end" in event and event["end"] in left:
                    left.remove(event["end"])
                    current = None
                    report(event["end"], event["outcome"], event["why"], event["trace"], time.monotonic() - started)
        finally:
            worker.close()
        if done:
            for name in left:
                report(name, "fail", f"did not run: {holder}", "", None)
            return
        # What ran when the worker died or hung is the one to blame; the rest gets a new worker.
        culprit = current or left[0]
        left.remove(culprit)
        report(culprit, "fail", why, text, time.monotonic() - started)
