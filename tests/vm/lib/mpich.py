"""MPICH with mpi4py and its tests in the project's build directory, where a guest finds them: peers
of tests/tools/peers, and the interpreter of their virtual environment, which the guest lacks. All
Python is compiled here: in an emulated guest, which cannot write here, each process would compile
what it imports.
"""

import hashlib
import pathlib
import re
import shutil
import subprocess

from . import image as images

PROJECT = images.HERE.parent.parent
FOLDER = PROJECT / "build/vm/mpich"
CANNOT_DOWNLOAD = 75
# of the standard library: what no program needs here, and most of its size
LEFT_OUT = shutil.ignore_patterns("test", "tests", "site-packages", "config-*", "__pycache__", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "_tkinter*", "*.a")


def ready():
    return (FOLDER / "made-of").exists()


def prepare():
    """Copies them from the cache, where they are made once; copies nothing if the download fails."""
    made = subprocess.run([PROJECT / "tests/tools/peers", "mpich", "mpi4py-tests"], stdout=subprocess.PIPE, text=True)
    if made.returncode == CANNOT_DOWNLOAD:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return
    if made.returncode != 0:
        raise images.CannotMake("MPICH can't be made")
    mpich, tests = map(pathlib.Path, made.stdout.split())
    # the bytes of this file too: they decide what is copied, and how
    made_of = f"{mpich.name} {tests.name} {hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]}"
    if ready() and (FOLDER / "made-of").read_text() == made_of:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(mpich, FOLDER / "mpich", symlinks=True, ignore=shutil.ignore_patterns("python*", "__pycache__"))
    (packages,) = mpich.glob("lib/python*/site-packages")
    shutil.copytree(packages, FOLDER / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tests / "test", FOLDER / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    copy_interpreter(mpich / "bin/python")
    # unchecked: no process compares the files with their sources, which takes a request to the host each
    options = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([mpich / "bin/python", *options, *(FOLDER / name for name in ("python/lib", "packages", "tests"))], check=True)
    (FOLDER / "made-of").write_text(made_of)


def copy_interpreter(python):
    """The program, the libraries beside it, and the standard library."""
    script = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'), sep='\\n')"
    program, library = map(pathlib.Path, subprocess.run([python, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    home = FOLDER / "python"
    shutil.copytree(library, home / "lib" / library.name, ignore=LEFT_OUT)
    (home / "bin").mkdir()
    shutil.copy(program, home / "bin/python3")
    linked = subprocess.run(["ldd", program, *(home / "lib").rglob("lib-dynload/*.so")], stdout=subprocess.PIPE, text=True, check=True).stdout
    for path in set(re.findall(r"=> (/\S+)", linked)):
        # the guest has a newer libc
        if not re.match(r"(libc|libm|libpthread|libdl|libutil|librt|libresolv|libgcc_s)\.", pathlib.Path(path).name):
            shutil.copy(path, home / "lib")
