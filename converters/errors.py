"""The errors the library raises. The library never prints and never exits; the shell renders these."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "DamagedFileError",
    "DestinationError",
    "DistckptError",
    "FormatError",
    "IntegrityError",
    "Interrupted",
    "RequestError",
]


class DistckptError(Exception):
    """Anything we refuse or cannot do, said so that a person can act on it.

    Args:
        message: One sentence: what is wrong.
        details: The facts, one per line: which file, which tensor, the numbers.
        hint: What to type or do next.
        tensor: Canonical name of the tensor concerned, if it is one.
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

    def __str__(self) -> str:
        return "\n".join([self.message, *self.details])


class FormatError(DistckptError):
    """The source is missing, unreadable, unsafe, or in a format nobody here knows."""

    exit_code = 3
    kind = "source"


class DamagedFileError(FormatError):
    """A checkpoint's own description is damaged, so that it cannot be opened; to `verify` that is an answer.

    Args:
        folder: The folder with the checkpoint's data.
        files: What is wrong with each file, in one sentence, by its name there.
    """

    def __init__(self, folder: str, files: dict[str, str], **more: Any) -> None:
        super().__init__("; ".join(files.values()), **more)
        self.folder, self.files = folder, files


class IntegrityError(DistckptError):
    """The answer is no: bytes are damaged, missing, or do not agree with their own checksum."""

    exit_code = 1
    kind = "damaged"


class RequestError(DistckptError):
    """The request cannot be met: an impossible layout, an unknown architecture, names that do not fit."""

    exit_code = 4
    kind = "request"


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
