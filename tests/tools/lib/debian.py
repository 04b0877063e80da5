"""Packages of Debian suites other than this machine's, without touching this machine's sources.

apt keeps its lists and its downloads for them in the cache.
"""

import os
import subprocess
import time

from . import cache

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "http://deb.debian.org/debian"
LISTS_FRESH = 6 * 3600


def architecture():
    return cache.download(["dpkg", "--print-architecture"]).strip()


class Suite:
    """apt-get for one suite. The caller holds the cache's lock of that suite."""

    def __init__(self, name):
        self.name = name
        self.home = cache.root() / "apt" / name
        for folder in ("lists/partial", "cache/archives/partial"):
            (self.home / folder).mkdir(parents=True, exist_ok=True)
        mirror = os.environ.get("WEFT_DEBIAN_MIRROR", MIRROR)
        lines = [f"{kind} [signed-by={KEYRING}] {mirror} {name} main\n" for kind in ("deb", "deb-src")]
        (self.home / "sources.list").write_text("".join(lines))

    def apt(self, *command, cwd=None):
        options = {
            "Dir::Etc::sourcelist": self.home / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": self.home / "lists",
            "Dir::Cache": self.home / "cache",
            # a mirror may serve a Release file that has just expired; its signature is still
            # checked
            "Acquire::Check-Valid-Until": "false",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Acquire::Retries": "2",
            # the downloading user of apt may not be able to enter the cache
            "APT::Sandbox::User": "root",
        }
        argv = ["apt-get", "-q", "-y"]
        for key, value in options.items():
            argv += ["-o", f"{key}={value}"]
        return cache.download(argv + list(command), cwd=cwd)

    def update(self):
        stamp = self.home / "updated"
        if stamp.exists() and 0 <= _age(stamp) < LISTS_FRESH:
            return
        # without this option apt succeeds if it has fetched nothing
        self.apt("update", "-o", "APT::Update::Error-Mode=any")
        stamp.touch()

    def packages(self, names, into):
        """Downloads binary packages and unpacks them, without installing, into a directory."""
        with cache.lock(f"apt-{self.name}"), cache.scratch() as scratch:
            self.update()
            self.apt("download", *names, cwd=scratch)
            for deb in sorted(scratch.glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", deb, into], check=True)

    def source(self, name, into):
        """Downloads the upstream tarball of a source package and unpacks it; returns the
        directory."""
        with cache.lock(f"apt-{self.name}"), cache.scratch() as scratch:
            self.update()
            self.apt("source", "--download-only", "--tar-only", name, cwd=scratch)
            (tarball,) = scratch.glob("*.orig.tar.*")
            subprocess.run(["tar", "-xf", tarball, "-C", into], check=True)
        (folder,) = [path for path in into.iterdir() if path.is_dir()]
        return folder


def _age(path):
    return time.time() - path.stat().st_mtime
