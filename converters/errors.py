"""The errors the library raises. The library never prints and never exits; the shell renders these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class DistckptError(Exception):
    """Base of all errors of the library: a message, details, a hint and an exit code.

    Args:
        message: One sentence: what is wrong.
        details: The facts, one per line: which file, which tensor, the numbers.
        hint: What to type or do next.
        tensor: Canonical name of the tensor concerned, if it is one.

    Attributes:
        shown_here: Of ranks that work together, whether this one shows it; None where that was not agreed.
    """

    exit_code: ClassVar[int] = 70
    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        details: list[str] | tuple[str, ...] = (),
        hint: str | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details = list(details)
        self.hint = hint
        self.tensor = tensor
        self.shown_here: bool | None = None

    def __str__(self) -> str:
        return "\n".join([self.message, *self.details])

    def to_json(self) -> dict[str, Any]:
        """The error as plain data, to tell another process of it: see `from_json`."""
        return {
            "class": next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in _KINDS),
            "message": self.message,
            "details": self.details,
            "hint": self.hint,
            "tensor": self.tensor,
            "signum": getattr(self, "signum", 0),
            "passing": isinstance(self.__cause__, OSError),
        }


class FormatError(DistckptError):
    """The source is missing, unreadable, unsafe, or no checkpoint that we know."""

    exit_code = 3
    kind = "source"


class DamagedFileError(FormatError):
    """A checkpoint's own description is damaged, so that it cannot be opened; to `verify` that is an answer.

    Args:
        folder: The folder with the checkpoint's data.
        files: What is wrong with each file, in one sentence, by its name there.
    """

    def __init__(self, folder: str, files: dict[str, str], **texts: Any) -> None:
        super().__init__("; ".join(files.values()), **texts)
        self.folder, self.files = folder, files


class StoreError(DistckptError):
    """An object store does not answer any more. This is no finding about the checkpoint."""

    exit_code = 3
    kind = "source"


class UnfinishedError(FormatError):
    """A checkpoint whose save has not ended: its framework's marker for that still lies beside it."""


class UnsupportedError(FormatError):
    """The source is whole and recognised, but in a form that this version does not read; readers may try another form."""

    exit_code = 4
    kind = "request"


class IntegrityError(DistckptError):
    """Bytes are damaged or missing, or do not match their checksum."""

    exit_code = 1
    kind = "damaged"


class RequestError(DistckptError):
    """The request cannot be met: an impossible layout, an unknown architecture, names that do not fit."""

    exit_code = 4
    kind = "request"


class UsageError(RequestError):
    """What was given cannot be meant, whatever the checkpoint: no path, a text that is no value, no memory to work in."""

    exit_code = 2
    kind = "usage"


class AddressError(UsageError):
    """A URL that cannot be meant: of an unknown kind, without a bucket, or with credentials in it."""


class DestinationError(DistckptError):
    """The destination exists, is full, may not be written, or is in use."""

    exit_code = 5
    kind = "destination"


class Interrupted(DistckptError):
    """Stopped by a signal; running the same command again continues.

    Args:
        signum: The signal's number; the exit code is 128 + signum.
    """

    kind = "interrupted"

    def __init__(self, signum: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.signum = signum


_KINDS = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, DistckptError) and kind is not DamagedFileError
}
"""What another process is told of by name; the files of damage are known where they were looked at."""


def from_json(document: Mapping[str, Any], prefix: str = "") -> DistckptError:
    """The error that another process told of: of the same exit code, and of the same class unless that needs more.

    Args:
        document: What `to_json` gave there.
        prefix: Put before the message.
    """
    message, hint = f"{prefix}{document['message']}", document["hint"]
    if document["class"] == "Interrupted":
        return Interrupted(document["signum"], message, hint=hint)
    error = _KINDS[document["class"]](message, details=document["details"], hint=hint, tensor=document["tensor"])
    if document["passing"]:  # with a disk: the same command may go on
        error.__cause__ = OSError("in another process")
    return error
