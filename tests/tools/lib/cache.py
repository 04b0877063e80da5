"""The cache outside the tree: downloads and builds of other projects' programs, each made once.

A directory there is complete if it contains the file `.complete`, which is written last.
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

CANNOT_DOWNLOAD = 75  # EX_TEMPFAIL: only on this status may a tier skip tests, and it must report them as skipped

TRIES = 3

# Messages of apt and pip for faults of the network or the mirror. Any other message is a failure.
TROUBLE = re.compile(
    r"Failed to fetch|Could not (connect|resolve)|Temporary failure|Connection (failed|refused|timed out|reset)"
    r"|Unable to connect|Hash Sum mismatch|File has unexpected size|50[0-9] +\w|Some index files failed to download"
    r"|Network is unreachable|Release file .* is not valid yet|NewConnectionError|ReadTimeout|Read timed out",
    re.I,
)


class CannotDownload(Exception):
    """A download failed after retries."""


class CannotMake(Exception):
    """A build failed: an error of this host or of the recipe."""


def say(text):
    print(f"weft: {text}", file=sys.stderr, flush=True)


def root():
    base = os.environ.get("WEFT_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "weft")
    return pathlib.Path(base)


@contextlib.contextmanager
def lock(name):
    """One process at a time makes the directory; others wait for its result."""
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
    prefix into the installed files; a stamp is written last and marks the directory as complete.
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
    """A temporary directory for downloads and builds, on the cache's file system."""
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
    """Runs a command that downloads, at most TRIES times."""
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
