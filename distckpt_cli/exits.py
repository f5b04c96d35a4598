"""The exit codes, in one place."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a process.

    Python's own code for an uncaught exception is 1, which here means "a problem was found"; `app.main` therefore catches
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
    ("0", "success"),
    ("1", "problem found: damaged, different, files missing (under torchrun: any failure)"),
    ("2", "the command line is wrong"),
    ("3", "the source is missing, damaged so that it cannot be opened, or no checkpoint"),
    ("4", "not possible or not supported: layout, architecture, names, a form of the source"),
    ("5", "the destination exists, is full or may not be written"),
    ("70", "a bug in distckpt"),
    ("141", "broken pipe: the program that reads the output, such as head, has ended"),
    ("129, 130, 143", "hung up, interrupted, terminated, or a rank was lost; the same command continues"),
]
