"""`tests/fault/` on the import path, and the warm process that all its tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from injection import COMPILER, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Runs command lines in forked children; calls fail where a C compiler is there to make the shim."""
    made = Server(tmp_path_factory.mktemp("shim"), shim=COMPILER is not None)
    yield made
    made.close()
