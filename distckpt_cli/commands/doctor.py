"""`distckpt doctor`: what an error of a training job or a converter means, and what to run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from converters.errors import FormatError, RequestError
from converters.names import quoted
from distckpt_cli.console import UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Speaking, output, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.overview.symptoms import Diagnosis
    from distckpt_cli.console import Console

Log = Annotated[str, typer.Argument(metavar="LOG", help="A log file, - for standard input, or the text of an error.")]


@spread
def doctor(
    log: Log,
    ckpt: Annotated[
        str | None,
        typer.Argument(metavar="[CKPT]", help="The checkpoint that the log is about; the suggested commands name it."),
    ] = None,
    *,
    job: Annotated[
        str | None,
        output("--for", metavar="FLAGS", help="Flags of a job: say whether it loads the checkpoint LOG."),
    ] = None,
    names: Annotated[bool, output("--names", help="Print only names of the errors.")] = False,
    speaking: Speaking,
) -> int:
    """Explain errors of Megatron, NeMo, Megatron-Bridge, torch and other converters: what they mean and what to run.

    Exit code 0 if an error is recognised, 1 if none is.

    With --for "--tp 4 --pp 2 --mcore 0.16 --use-distributed-optimizer", the first argument is a checkpoint: says whether
    a job with these flags loads it, and if not, which command rewrites it. Exit code 0 if it does, or if that cannot be
    decided, 1 if not.

        $ distckpt doctor train.log ckpt/iter_0050000
        $ distckpt doctor 'ShardedTensor.flattened_range is not supported.'
        $ kubectl logs trainer | distckpt doctor -
        $ distckpt doctor ckpt --for '--tp 4 --pp 2 --mcore 0.16 --use-distributed-optimizer'
    """
    if job is not None:
        if ckpt is not None or names:
            raise UsageProblem("--for takes one checkpoint", hint='distckpt doctor CKPT --for "--tp 4 --pp 2"')
        return _examine(log, job, speaking)
    from converters.overview.symptoms import diagnose

    if ckpt is not None:
        _check_exists(ckpt)
    with _lines(log) as lines:
        diagnoses = diagnose(lines)
    console = speaking.console
    if speaking.as_json:
        console.document("distckpt.doctor/1", {"errors": [_document(diagnosis, ckpt) for diagnosis in diagnoses]})
    elif names:
        console.lines(diagnosis.symptom.name for diagnosis in diagnoses)
    else:
        _show(console, diagnoses, ckpt)
    return ExitCode.OK if diagnoses else ExitCode.NO


_ANSWERS = {True: "yes", False: "no", None: "not decided"}


def _examine(source: str, flags: str, speaking: Speaking) -> int:
    """Whether a job loads a checkpoint."""
    from converters.formats import open_checkpoint
    from converters.overview.job import Job
    from converters.overview.job_fit import job_findings
    from converters.overview.job_remedy import job_remedy

    try:
        job = Job.parse(flags)
    except RequestError as error:
        raise UsageProblem(error.message, hint=error.hint) from None
    catalog = open_checkpoint(source).catalog
    findings = job_findings(catalog, job)
    loads = not any(finding.fits is False for finding in findings)
    remedy = "" if loads else job_remedy(catalog, job).replace("CKPT", quoted(source))
    console = speaking.console
    if speaking.as_json:
        reasons = [{"subject": f.subject, "answer": _ANSWERS[f.fits], "reason": f.reason} for f in findings]
        console.document("distckpt.doctor-job/1", {"loads": loads, "reasons": reasons, "remedy": remedy or None})
        return ExitCode.OK if loads else ExitCode.NO
    undecided = any(finding.fits is None for finding in findings)
    answer = ("yes, as far as the flags and files say" if undecided else "yes") if loads else "no"
    console.fact("loads", answer, style="ok" if loads else "error")
    styles = {True: "ok", False: "error", None: "warning"}
    for finding in findings:
        console.fact(finding.subject, f"{_ANSWERS[finding.fits]}: {finding.reason}", style=styles[finding.fits])
    if remedy:
        console.next_step(remedy)
    elif not loads:
        console.note("no single command is known that makes it so")
    return ExitCode.OK if loads else ExitCode.NO


@contextlib.contextmanager
def _lines(log: str) -> Iterator[Iterator[str]]:
    if not log.strip():
        raise UsageProblem("no log was named: the text is empty", hint="is a shell variable unset?")
    if log == "-":
        if sys.stdin is None:  # Python's word for one that is closed
            raise FormatError("standard input is closed")
        yield iter(sys.stdin)
    elif "\n" not in log and len(log) < 4096 and os.path.lexists(log):
        path = Path(log)
        if path.is_dir():
            shown = quoted(log)
            hint = (
                f"distckpt verify {shown} examines a checkpoint; doctor {shown} --for FLAGS says whether a job loads it"
            )
            raise UsageProblem(f"{log} is a folder, not a log", hint=hint)
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield iter(file)
        except OSError as error:
            raise FormatError(f"reading {log} failed: {error.strerror or error}") from error
    elif "/" in log and not any(character.isspace() for character in log):
        raise FormatError(f"{log} does not exist")
    else:
        yield iter(log.splitlines())


def _check_exists(ckpt: str) -> None:
    from converters.formats.folder import exists
    from converters.remote.address import named_path

    path = named_path(ckpt)
    if not exists(path):
        raise FormatError(f"{path} does not exist", hint="the second argument is the checkpoint that the log is about")


def _remedies(diagnosis: Diagnosis, ckpt: str | None) -> list[str]:
    return [text.replace("CKPT", quoted(ckpt) if ckpt else "CKPT") for text in diagnosis.symptom.remedies]


def _show(console: Console, diagnoses: list[Diagnosis], ckpt: str | None) -> None:
    for number, diagnosis in enumerate(diagnoses):
        if number:
            console.out()
        times = f"  ({diagnosis.count:,} lines)" if diagnosis.count > 1 else ""
        console.fact(
            "error",
            f"line {diagnosis.line}: {diagnosis.text}{times}",
            style="warning" if diagnosis.symptom.harmless else "error",
        )
        console.fact("means", diagnosis.symptom.meaning + (" The job may go on." if diagnosis.symptom.harmless else ""))
        for row, text in enumerate(_remedies(diagnosis, ckpt)):
            console.fact("" if row else "try", text, style="hint")
    if not diagnoses:
        console.out("no error that distckpt knows")
        console.next_step(f"distckpt verify {quoted(ckpt) if ckpt else 'CKPT'}")


def _document(diagnosis: Diagnosis, ckpt: str | None) -> dict[str, object]:
    return {
        "name": diagnosis.symptom.name,
        "line": diagnosis.line,
        "text": diagnosis.text,
        "count": diagnosis.count,
        "meaning": diagnosis.symptom.meaning,
        "harmless": diagnosis.symptom.harmless,
        "remedies": _remedies(diagnosis, ckpt),
    }
