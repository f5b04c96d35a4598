"""What the tests of `verify` share: running it, and what a person would name of a golden."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from converters.formats import open_checkpoint
from converters.verification.run import VerifyOptions, verify_reader
from distckpt_cli.app import main
from harness.support import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from converters.verification.report import Report


def opened(name: str) -> Path:
    """What a person would name: the golden's own folder, or the one file in it that is the checkpoint."""
    folder = GOLDEN / name
    inside = [path for path in folder.iterdir() if path.name != "facts.json"]
    return inside[0] if len(inside) == 1 and inside[0].suffix in (".pt", ".nemo", ".tar", ".safetensors") else folder


def cli(*args: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["verify", *map(str, args), "--progress", "off"])
    return code, out.getvalue(), err.getvalue()


def found(folder: Path, **options) -> Report:
    return verify_reader(open_checkpoint(folder), VerifyOptions(**options))


def text_of(report: Report) -> str:
    return "\n".join(f"{c.name}: {f.message}" for c in report.checks for f in c.findings if f.severity == "error")


def golden_folder(name: str) -> Path:
    """The folder with the data of a golden of any format."""
    marks = (path.parent for mark in ("metadata.json", "mp_rank_*") for path in (GOLDEN / name).glob(f"**/{mark}"))
    return next(marks, GOLDEN / name)
