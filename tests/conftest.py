"""What every test shares: `--all`, the fixtures that run the real megatron-core."""

import gc
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of child processes import the same sources
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)

from harness.processes import end_all, forget_failure
from oracle.fixtures import megatron_checkpoint, megatron_load

__all__ = ["megatron_checkpoint", "megatron_load"]


def has_gpu():
    return any(Path("/dev").glob("nvidia[0-9]*"))  # asking torch would import it for every run


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours stay with one worker, so that the fixture of a module is made once; who is idle takes from the end."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_configure():
    """Temporary folders are in memory where there is room: most of the time of a test that writes is waiting for syncs."""
    memory, room = Path("/dev/shm"), 6 << 30
    free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) << 10
    if os.access(memory, os.W_OK) and min(free, shutil.disk_usage(memory).free) > room:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_collection_finish():
    """What was imported and collected stays; looking through it again and again for garbage costs a tenth."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails leaves nothing behind that would fail another one."""
    report = yield
    failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    if failed and not item.config.getoption("usepdb"):
        forget_failure(call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    try:
        return (yield)
    finally:
        end_all()


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
