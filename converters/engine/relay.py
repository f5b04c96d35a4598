"""Errors told from one process to another: the same words and the same exit code there."""

from __future__ import annotations

import errno
import signal
from typing import Any

from converters.errors import DestinationError, DistckptError, FormatError, IntegrityError, Interrupted, RequestError
from converters.names import printable

__all__ = ["AGAIN", "Stopped", "disk_trouble", "packed", "unpacked"]

AGAIN = "run the same command again; finished work is kept"
_KINDS = {kind.kind: kind for kind in (DistckptError, FormatError, IntegrityError, RequestError, DestinationError)}


class Stopped(Interrupted):
    """Another rank was stopped by a signal, as this one may be in a moment."""


def packed(error: BaseException | None) -> dict[str, Any] | None:
    """An error as others can be told of it."""
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(signal.SIGINT, "finished work is kept", hint=AGAIN)
    error = disk_trouble(error) or error
    if not isinstance(error, DistckptError):
        error = DistckptError(f"internal error: {type(error).__name__}: {error}", hint="this is a bug in distckpt")
    return {
        "kind": error.kind,
        "message": error.message,
        "details": error.details,
        "hint": error.hint,
        "tensor": error.tensor,
        "signum": error.signum if isinstance(error, Interrupted) else 0,
        "passing": isinstance(error.__cause__, OSError),
    }


def disk_trouble(error: BaseException) -> FormatError | None:
    """What a failing disk says where nobody asked it anything that was expected to fail; None if it is no such word."""
    if not isinstance(error, OSError) or error.errno not in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM):
        return None
    what = printable(str(error.filename)) if error.filename else "a file"
    found = FormatError(
        f"looking at {what} failed: {error.strerror}", hint="check the disk, then run the same command again"
    )
    found.__cause__ = error
    return found


def unpacked(document: dict[str, Any], who: str | None) -> DistckptError:
    """The error another rank told of; its exit code is the same on all ranks."""
    message, hint = document["message"], document["hint"]
    if document["kind"] == Interrupted.kind:
        return Stopped(document["signum"], f"{who}: {message}" if who else message, hint=hint)
    details = [*document["details"], *([f"found by {who}"] if who else [])]
    kind = _KINDS.get(document["kind"], DistckptError)
    error = kind(message, details=details, hint=hint, tensor=document["tensor"])
    if document["passing"]:
        error.__cause__ = OSError("on another rank")
    return error
