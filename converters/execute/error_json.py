"""Errors as JSON, sent from one process to another: the same message and exit code there."""

from __future__ import annotations

import errno
import signal
from typing import Any

from converters.errors import DistckptError, FormatError, Interrupted, from_json
from converters.names import printable

AGAIN = "run the same command again; finished work is kept"


class Stopped(Interrupted):
    """Another rank was stopped by a signal, as this one may be in a moment."""


def pack_error(error: BaseException | None) -> dict[str, Any] | None:
    """An error as other ranks can be told of it, also one that is not ours."""
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(signal.SIGINT, "finished work is kept", hint=AGAIN)
    error = disk_trouble(error) or error
    if not isinstance(error, DistckptError):
        error = DistckptError(f"internal error: {type(error).__name__}: {error}", hint="this is a bug in distckpt")
    return error.to_json()


def disk_trouble(error: BaseException) -> FormatError | None:
    """The sentence for an unexpected OSError of a failing disk; None for another error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM):
        return None
    path = printable(str(error.filename)) if error.filename else "a file"
    failure = FormatError(
        f"access to {path} failed: {error.strerror}", hint="check the disk, then run the same command again"
    )
    failure.__cause__ = error
    return failure


def unpack_error(document: dict[str, Any], who: str | None) -> DistckptError:
    """The error another rank told of; its exit code is the same on all ranks."""
    error = from_json(document)
    if isinstance(error, Interrupted):
        return Stopped(error.signum, f"{who}: {error.message}" if who else error.message, hint=error.hint)
    error.details += [f"found by {who}"] if who else []
    return error
