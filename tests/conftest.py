"""What every test shares: `tests/` on the import path, `--all`, and the fixtures that run the real megatron-core."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)

from oracle.fixtures import megatron_checkpoint, megatron_load

__all__ = ["megatron_checkpoint", "megatron_load"]


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Plans that tests make are not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DISTCKPT_PLAN_CACHE", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def has_gpu():
    return any(Path("/dev").glob("nvidia[0-9]*"))  # asking torch would import it for every run


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    if not has_gpu():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: run with --all")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
