"""libfabric's fabtests in the project's build directory, where a guest finds them. They run with
the guest's libfabric.
"""

import pathlib
import shutil
import subprocess

from . import image as images

PROJECT = images.HERE.parent.parent
FOLDER = PROJECT / "build/vm/fabtests"
CANNOT_DOWNLOAD = 75


def ready():
    return (FOLDER / "bin/fi_msg").exists()


def prepare():
    """Copies them from the cache, where they are built once; copies none if the download fails."""
    made = subprocess.run([PROJECT / "tests/tools/peers", "fabtests"], stdout=subprocess.PIPE, text=True)
    if made.returncode == CANNOT_DOWNLOAD:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return
    if made.returncode != 0:
        raise images.CannotMake("fabtests can't be built")
    source = pathlib.Path(made.stdout.strip())
    stamp = FOLDER / "made-of"
    if ready() and stamp.exists() and stamp.read_text() == source.name:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(source / "bin", FOLDER / "bin")
    stamp.write_text(source.name)
