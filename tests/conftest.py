"""What every test shares: `tests/` on the import path, `--all`, and the fixtures that run the real megatron-core."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle.fixtures import megatron_checkpoint, megatron_load

__all__ = ["megatron_checkpoint", "megatron_load"]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: run with --all")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
