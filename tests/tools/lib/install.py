"""Installs missing packages by apt and prints one line; does nothing if all are installed."""

import os
import shutil
import subprocess
import sys

from . import cache


def find(program):
    # some tools sit in sbin, which is not on every user's PATH
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")


def ensure(programs, files=None):
    """`programs`: program -> Debian package. `files`: file that must exist -> Debian package."""
    missing = {package for program, package in programs.items() if not find(program)}
    missing |= {package for file, package in (files or {}).items() if not os.path.exists(file)}
    if not missing:
        return
    names = sorted(missing)
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not find("apt-get"):
        raise cache.CannotMake(f"missing, and this is no Debian: {' '.join(names)}")
    if sudo and (not find("sudo") or subprocess.run(sudo + ["true"], capture_output=True).returncode != 0):
        raise cache.CannotMake(f"missing, and no right to install; do: sudo apt-get install {' '.join(names)}")
    cache.say(f"installing by apt: {' '.join(names)}")
    with cache.lock("apt-install"):
        apt = sudo + ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "-o", "DPkg::Lock::Timeout=300"]
        cache.download(apt + ["update"])
        cache.download(apt + ["install", "--no-install-recommends"] + names)


def ensure_pip():
    """pip for the Python that runs this."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        ensure({"pip3": "python3-pip"})
