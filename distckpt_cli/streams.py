"""stdout and stderr that are closed, full, or without a reader: the exit code stays right.

An answer that cannot be written is an error of its own, never "the answer is no". What cannot be said on stderr is not said.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def careful_streams() -> Iterator[None]:
    """While it lasts, stdout and stderr are as described above; a closed one is as good as /dev/null
    but for a document, see `Console.document`."""
    with contextlib.ExitStack() as stack:
        for redirect, stream, required in (
            (contextlib.redirect_stdout, sys.stdout, True),
            (contextlib.redirect_stderr, sys.stderr, False),
        ):
            target: Any = stream if stream is not None else stack.enter_context(open(os.devnull, "w"))
            with contextlib.suppress(AttributeError, ValueError):  # a stream that a test or a notebook put there
                target.reconfigure(errors="backslashreplace")
            stack.enter_context(redirect(_Careful(target, required, absent=stream is None)))
        yield


class _Careful:
    """A text stream whose failures to write are ours to judge."""

    def __init__(self, stream: Any, required: bool, *, absent: bool) -> None:
        self._stream, self._required, self.absent = stream, required, absent
        self.failure: DestinationError | None = None  # kept, as Typer swallows it where it tries the stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's.

        Raises:
            BrokenPipeError: Nobody reads the answer.
            DestinationError: The answer cannot be written.
        """
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """As the stream's; raises as `write`."""
        self._try(self._stream.flush)

    def _try(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            discard_rest(self._stream)
            if not self._required:
                return
            if isinstance(error, BrokenPipeError):
                raise
            self.failure = DestinationError(f"the answer cannot be written to stdout: {error.strerror or error}")
            raise self.failure from error


def discard_rest(stream: Any) -> None:
    """Sends what is left for a stream nowhere: Python would complain of it when it exits."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
