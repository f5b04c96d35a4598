"""The exit codes, in one place."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["EPILOG", "ExitCode"]


class ExitCode(IntEnum):
    """What a finished process says to its caller.

    Python's own code for an uncaught exception is 1, which here means "the answer is no"; `app.main` therefore catches
    everything. torchrun reports any failure of a worker as 1.
    """

    OK = 0
    NO = 1
    USAGE = 2
    SOURCE = 3
    REQUEST = 4
    DESTINATION = 5
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EPILOG = [
    ("0", "done, or the answer is yes"),
    ("1", "the answer is no: damaged, different (under torchrun: any failure)"),
    ("2", "the command line is wrong"),
    ("3", "the source is missing, unreadable or of unknown format"),
    ("4", "the request is impossible: layout, architecture, names"),
    ("5", "the destination exists, is full or may not be written"),
    ("70", "a bug in distckpt"),
    ("141", "the reader of the output left, as head does"),
    ("129, 130, 143", "hung up, interrupted, terminated, or a rank was lost; the same command continues"),
]
