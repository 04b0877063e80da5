"""The cache outside the tree: downloads and builds of other people's programs, each made once.

A directory there is complete or absent: it is made under another name and renamed when it is whole.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

CANNOT_DOWNLOAD = 75  # EX_TEMPFAIL: a tier may skip on it, loudly; nothing else may be skipped

TRIES = 3

# What apt and pip say when the network or the mirror is at fault. Anything else is our own fault.
TROUBLE = re.compile(
    r"Failed to fetch|Could not (connect|resolve)|Temporary failure|Connection (failed|refused|timed out|reset)"
    r"|Unable to connect|Hash Sum mismatch|File has unexpected size|50[0-9] +\w|Some index files failed to download"
    r"|Network is unreachable|Release file .* is not valid yet|NewConnectionError|ReadTimeout|Read timed out",
    re.I,
)


class CannotDownload(Exception):
    """The network could not be had after retries."""


class CannotMake(Exception):
    """Something on this host, or in the recipe, is wrong."""


def say(text):
    print(f"weft: {text}", file=sys.stderr, flush=True)


def root():
    base = os.environ.get("WEFT_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "weft")
    return pathlib.Path(base)


@contextlib.contextmanager
def lock(name):
    """One maker at a time; the others wait for its result."""
    root().mkdir(parents=True, exist_ok=True)
    with open(root() / f".{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(name, digest, make):
    """The finished directory of `name`; `make(directory)` fills it if its recipe is new.

    The directory's name is the same while it is made and afterwards, because builds write their
    prefix into what they install; a stamp written last says that it is whole.
    """
    path = root() / "peers" / f"{name}-{digest}"
    stamp = path / ".complete"
    if stamp.exists():
        return path
    with lock(name):
        if stamp.exists():
            return path
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        make(path)
        stamp.touch()
        for old in path.parent.glob(f"{name}-*"):
            if old != path and re.fullmatch(re.escape(name) + "-[0-9a-f]{12}", old.name):
                shutil.rmtree(old, ignore_errors=True)
    return path


@contextlib.contextmanager
def scratch():
    """A directory for downloads and builds, on the cache's file system, gone afterwards."""
    root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=root()) as path:
        yield pathlib.Path(path)


def run(argv, log, cwd=None, env=None):
    """Runs a build step; its output goes to `log` and is shown only when it fails."""
    with open(log, "a") as out:
        out.write(f"$ {' '.join(map(str, argv))}\n")
        out.flush()
        status = subprocess.run(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode
    if status != 0:
        raise CannotMake(f"{argv[0]} ended with status {status}:\n{tail(log)}")


def download(argv, cwd=None):
    """Runs a command that downloads, a few times."""
    for attempt in range(1, TRIES + 1):
        done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return done.stdout
        text = done.stdout + done.stderr
        last = "\n".join(text.splitlines()[-12:])
        if not TROUBLE.search(text):
            raise CannotMake(f"{' '.join(map(str, argv))} ended with status {done.returncode}:\n{last}")
        say(f"a download failed, try {attempt} of {TRIES}")
        if attempt < TRIES:
            time.sleep(5 * attempt)
    raise CannotDownload(last)


def tail(log, lines=25):
    return "\n".join(pathlib.Path(log).read_text(errors="replace").splitlines()[-lines:])
