"""The result of `verify`: checks, each with a summary and findings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from converters.names import printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Container

_MOST_FINDINGS = 200
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, worth a look, or cannot be decided.

    Attributes:
        severity: "error"; "warning"; "unchecked": not understood, so neither right nor wrong.
        message: One sentence with the numbers.
        file: The file concerned, relative to the checkpoint.
        offset: First byte concerned in that file.
        needed: What should be there.
        found: What is there.
        tensors: Canonical names concerned.
        hint: What to do about it.
    """

    severity: str
    message: str
    file: str | None = None
    offset: int | None = None
    needed: str | None = None
    found: str | None = None
    tensors: tuple[str, ...] = ()
    hint: str | None = None


@dataclass
class Check:
    """One thing that was looked at.

    Attributes:
        name: "structure", "records", "checksums", "manifest", "copies", "optimizer" or "values".
        summary: What was found to be right, or why it could not be looked at.
        findings: What is wrong with it; of very many, the first.
        skipped: It was not looked at, or cannot be; `summary` says why.
        count: Number of findings by severity, those left out included.
    """

    name: str
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    skipped: bool = False
    count: dict[str, int] = field(default_factory=lambda: {"error": 0, "warning": 0, "unchecked": 0})

    def add(self, finding: Finding) -> None:
        """Adds a finding."""
        self.count[finding.severity] += 1
        if self.count[finding.severity] <= _MOST_FINDINGS:
            self.findings.append(finding)

    def error(self, message: str, **details: Any) -> None:
        """Adds an error; see `Finding`."""
        self.add(Finding("error", message, **details))

    def warn(self, message: str, **details: Any) -> None:
        """Adds a warning; see `Finding`."""
        self.add(Finding("warning", message, **details))

    def leave(self, message: str, **details: Any) -> None:
        """Adds something that is not checked because it is not understood, with the reason; see `Finding`."""
        self.add(Finding("unchecked", message, **details))

    def skip(self, reason: str) -> None:
        """Marks the check as not made."""
        self.skipped, self.summary = True, reason

    @property
    def status(self) -> str:
        """ "bad", "warning", "ok", "not checked" if nothing of it could be, or "skipped" if nothing was to be."""
        if self.count["error"]:
            return "bad"
        if self.count["warning"]:
            return "warning"
        if self.skipped:
            return "not checked" if self.count["unchecked"] else "skipped"
        return "ok"

    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "errors": self.count["error"],
            "warnings": self.count["warning"],
            "not_checked": self.count["unchecked"],
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass
class Report:
    """The result of `verify`; its repr has a summary line and the first findings.

    Attributes:
        path: The checkpoint.
        format: Its format.
        checks: In the order in which they were made.
        files: Files read.
        bytes_read: Bytes read.
        seconds: Wall time.
        manifest: The manifest that was written, or why none was.
    """

    path: str
    format: str
    checks: list[Check] = field(default_factory=list)
    files: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    manifest: str = ""

    def __str__(self) -> str:
        errors, warnings = (sum(check.count[kind] for check in self.checks) for kind in ("error", "warning"))
        lines = [
            f"{printable(self.path)} is {'good' if self.good else 'damaged'}: errors {errors:,}, warnings {warnings:,} "
            f"({self.format}, {counted(self.files, 'file')}, {counted(self.bytes_read, 'byte')} read)"
        ]
        for kind in ("error", "warning"):
            lines += [f"{c.name}: {f.message}" for c in self.checks for f in c.findings if f.severity == kind]
        left = errors + warnings - _SHOWN
        if self.unchecked:
            lines[0] += f"; not checked: {self.unchecked[0]}" + _and_more(len(self.unchecked))
        return "\n".join([*lines[: 1 + _SHOWN], *([f"and {left:,} more"] if left > 0 else [])])

    __repr__ = __str__

    def to_json(self) -> str:
        """`document` as JSON."""
        return json.dumps(self.document(), indent=2, default=str)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not any(check.count["error"] for check in self.checks)

    def check(self, name: str) -> Check:
        """The check of a name; a new one if there is none yet."""
        entry = next((check for check in self.checks if check.name == name), None)
        if entry is None:
            entry = Check(name)
            self.checks.append(entry)
        return entry

    @property
    def unchecked(self) -> list[str]:
        """Messages about what is not checked because it is not understood, each with the reason."""
        return [f.message for check in self.checks for f in check.findings if f.severity == "unchecked"]

    @property
    def affected(self) -> list[str]:
        """Names of the tensors that errors are about, in the order in which they were found."""
        errors = (finding for check in self.checks for finding in check.findings if finding.severity == "error")
        return list(dict.fromkeys(name for finding in errors for name in finding.tensors))

    def damaged(self, tensors: Container[str]) -> int:
        """Counts those of some tensors that errors are about."""
        return sum(name in tensors for name in self.affected)

    def document(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "path": self.path,
            "format": self.format,
            "good": self.good,
            "not_checked": self.unchecked,
            "checks": [check.document() for check in self.checks],
            "affected": self.affected,
            "files": self.files,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
            "manifest": self.manifest,
        }


def _and_more(number: int) -> str:
    return f" and {number - 1:,} more" if number > 1 else ""
