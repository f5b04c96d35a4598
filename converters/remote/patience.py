"""Retries of failing requests: temporary failures, with growing pauses, for `--retry-for` seconds."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, TypeVar

from converters.errors import DistckptError
from converters.remote.failures import StatedError, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.remote.address import Root

RETRY_SECONDS = 120.0
"""For how long a request is made again by default."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
_patience: list[float] = []
_T = TypeVar("_T")


def retry_for(seconds: float | None = None) -> float:
    """For how long a request that fails is made again; sets it if a number is passed.

    The environment says it (`DISTCKPT_RETRY_FOR`, seconds) unless it was set.
    """
    if seconds is not None:
        _patience[:] = [seconds]
    if not _patience:
        try:
            _patience[:] = [float(os.environ.get("DISTCKPT_RETRY_FOR", RETRY_SECONDS))]
        except ValueError:
            _patience[:] = [RETRY_SECONDS]
    return _patience[0]


def patiently(root: Root, key: str, request: Callable[[], _T], *, renew: Callable[[], None] | None = None) -> _T:
    """The answer to a request, which is repeated while its failure may be temporary.

    Args:
        root: The store, for errors.
        key: The object or prefix asked for.
        request: Makes it, once.
        renew: Looks for credentials anew, once, where they have expired.

    Raises:
        FileNotFoundError: The store has no such object.
        OSError: What went wrong, in one sentence; `filename` is the address.
    """
    begin, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return request()
        except (StatedError, DistckptError):
            raise
        except Exception as error:  # obstore's own, and those of the network
            failure = failure_of(error, root)
            if failure is None:
                raise
        if failure.expired and renew is not None:
            renew()
            renew = None
            continue
        waited = time.monotonic() - begin
        if not failure.temporary or waited + pause > retry_for():
            raise failure.error(f"{root}/{key}" if key else str(root), waited) from None
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)
