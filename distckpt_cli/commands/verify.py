"""`distckpt verify`: whether a checkpoint is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.names import folded, listed, quoted
from converters.words import counted, format_size
from distckpt_cli.console import Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Ckpt, Looking, flag, panel, spread

if TYPE_CHECKING:
    from converters.verification.report import Check, Report

_panel = panel("What to check")
_SHOWN = 8
_WORDS = {
    "ok": ("ok", "ok"),
    "bad": ("BAD", "error"),
    "warning": ("look", "warning"),
    "not checked": ("?", "warn"),  # not understood
    "skipped": ("-", "dim"),  # not asked for, or nothing there that could be looked at
}


@dataclass(frozen=True)
class Checks:
    """Which checks are made."""

    quick: bool = flag(_panel, "Check structure only; read no tensor data.", "--quick")
    values: bool = flag(
        _panel, "Check values, too: NaN, Inf, zeros, denormals, constants, layers unlike the others.", "--values"
    )
    write_manifest: bool = flag(
        _panel,
        "If nothing is wrong, write SHA-256 of all files: integrity.json, as Megatron-Core 0.17.1 and later.",
        "--write-manifest",
    )


@spread
def verify(
    ckpt: Ckpt,
    checks: Checks,
    looking: Looking,
) -> int:
    """Check a checkpoint: structure, every record and checksum, optimizer against weights.

    Exit code 0 if nothing is wrong, 1 if something is; warnings do not change it. Reads every file once, masters and
    weights twice; executes nothing in them. Writes nothing but the manifest of --write-manifest.

    --values reports as errors: NaN and Inf; a negative second moment; weights of which more than 1 % are denormal; a
    matrix that is constant in one layer only; a matrix 1,000 times as large or as small as in other layers. At 10 times
    it warns.

        $ distckpt verify ckpt/iter_0050000
        $ distckpt verify ckpt --quick
        $ distckpt verify ckpt --values --json | jq '.checks[] | select(.status == "bad")'
        $ distckpt verify ckpt --write-manifest
    """
    if checks.quick and (checks.values or checks.write_manifest):
        option = "--values" if checks.values else "--write-manifest"
        raise UsageProblem(f"--quick reads no payload, {option} reads all")
    console = looking.console
    from converters.errors import DamagedFileError
    from converters.formats import open_checkpoint
    from converters.verification.run import VerifyOptions, unopened_report, verify_reader

    options = VerifyOptions(**vars(checks), threads=looking.threads)
    try:
        reader = open_checkpoint(ckpt, follow_links=looking.follow_links)
    except DamagedFileError as error:
        report = unopened_report(error)
    else:
        with looking.watched(console) as watched:
            report = verify_reader(reader, options, **watched)
    if looking.as_json:
        console.document("distckpt.verify/1", report.document())
    else:
        _show(console, report, ckpt)
    return ExitCode.OK if report.good else ExitCode.NO


def _show(console: Console, report: Report, ckpt: str) -> None:
    name = quoted(ckpt)
    for check in report.checks:
        _show_check(console, check)
    affected = folded(report.affected)
    if affected:
        console.fact("affects", listed(affected, len(affected) if console.verbose else 4))
    if report.manifest:
        console.fact("manifest", report.manifest)
    if report.files:
        text = f"{format_size(report.bytes_read)} from {counted(report.files, 'file')}"
        console.read_fact(text, report.bytes_read, report.seconds)
    console.facts("unchecked", report.unchecked)
    unchecked = f"  (not checked: {len(report.unchecked):,})" if report.unchecked else ""
    console.fact("good" if report.good else "damaged", ckpt + unchecked, style="ok" if report.good else "error")
    if not report.good:
        hints = [f.hint for check in report.checks for f in check.findings if f.severity == "error" and f.hint]
        for hint in dict.fromkeys(hints):
            console.label("hint:", hint.replace("CKPT", name), "hint")
    elif all(check.name in ("structure", "records", "checksums") and check.skipped for check in report.checks[1:]):
        console.next_step(f"distckpt verify {name}")


def _show_check(console: Console, check: Check) -> None:
    word, style = _WORDS[check.status]
    findings = [f for f in check.findings if f.severity != "unchecked"]  # those have lines of their own
    shown = findings if console.verbose else findings[:_SHOWN]
    lines = [check.summary]
    if check.status in ("bad", "warning"):
        mark = "look: " if check.status == "bad" else ""
        lines = [(mark if f.severity == "warning" else "") + f.message for f in shown]
    hidden = check.count["error"] + check.count["warning"] - len(shown)
    lines += [f"and {hidden:,} more{'' if console.verbose else ' (-v)'}"] if hidden else []
    console.fact(check.name, f"{word:<5} {lines[0]}", style=style)
    for line in lines[1:]:
        console.fact("", f"      {line}")
