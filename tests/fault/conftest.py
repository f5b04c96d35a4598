"""`tests/fault/` on the import path, the warm process that all its tests share, and the memory in which it works."""

import itertools
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from injection import COMPILER, Server


@pytest.fixture(scope="session")
def memory(tmp_path_factory):
    """A function that makes new folders in memory, where there is such a place: nothing is lost by it, and much time won."""
    root, numbers = tmp_path_factory.mktemp("memory"), itertools.count()

    def make():
        folder = root / str(next(numbers))
        folder.mkdir()
        return folder

    yield make
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def server(memory):
    """Runs command lines in forked children; calls fail where a C compiler is there to make the shim."""
    made = Server(memory(), shim=COMPILER is not None)
    yield made
    made.close()
