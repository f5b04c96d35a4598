"""The report of a command that writes: lines of text, and a JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.io.cast import choose_device
from converters.names import fold, listed, printable
from converters.words import counted, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.execute.run import Stats
    from converters.write.write_plan import Conversion

_MOVED = ("bytes_read", "bytes_written", "bytes_kept", "records_checked", "underflowed")


@dataclass(frozen=True, repr=False)
class WriteReport:
    """The report on what was written, or with `dry_run` would be.

    Attributes:
        plan: What was decided: `plan.notes`, `plan.dropped`, `plan.advice`, `plan.facts`.
        stats: What moving it took; None of a dry run.
    """

    plan: Conversion
    stats: Stats | None

    @property
    def path(self) -> Path:
        """The new checkpoint: its iteration's folder, its folder, or the file."""
        return self.plan.destination / self.plan.folder

    def document(self) -> dict[str, Any]:
        """Everything as plain data, as `--json` prints it."""
        plan, job = self.plan, self.plan.job
        catalog = plan.reader.catalog
        notes = list(plan.notes) if self.stats is not None else self._notes()
        body = {
            "source": {"path": str(catalog.path), "format": catalog.format, "iteration": catalog.iteration},
            "destination": str(self.path),
            "tensors": len(job.sources),
            "dropped": [{"what": name, "reason": reason} for name, reason in plan.dropped],
            "notes": notes,
            **plan.facts,
            "files": [{"name": file.name, "bytes": file.size} for file in job.files],
            "peak_memory": job.peak_memory,
            "threads": job.threads,
            "dry_run": self.stats is None,
        }
        if self.stats is not None:
            moved = {name: getattr(self.stats, name) for name in _MOVED}
            losses = {"quantization_errors": self.stats.losses} if self.stats.losses else {}
            return {**body, **losses, **moved, "seconds": round(self.stats.seconds, 3)}
        free = plan.free_bytes
        return {**body, "bytes_read": job.bytes_read, "bytes_written": job.bytes_written, "free_bytes": free}

    def to_json(self) -> str:
        """`document` as JSON."""
        return json.dumps(self.document(), indent=2, default=str)

    def _notes(self) -> list[str]:
        """Of a dry run: also what only the real one looks at."""
        proof = self.plan.proof
        doubt = (
            [f"not checked with --dry-run: {proof.claim} ({format_size(proof.nbytes)} are read for it)"]
            if proof
            else []
        )
        if lack := self.plan.lack_of_room:
            doubt.append(
                f"not enough room in {printable(str(self.path.parent))}: {lack}; the real run would stop with exit code 5"
            )
        return [*self.plan.remarks, *doubt]

    def notes(self) -> list[str]:
        """Sentences to read after the lines."""
        return self._notes() if self.stats is None else list(self.plan.advice)

    def lines(self) -> Iterator[tuple[str, str]]:
        """`(label, text)` of each line that a person reads; the label is empty where it is that of the line above.

        Raises:
            RequestError: Of a dry run: the device that is asked for is missing.
        """
        yield from self.plan.summary
        for number, text in enumerate(self._left_out()):
            yield "" if number else "left out", text
        yield from self._planned_lines() if self.stats is None else self._result_lines(self.stats)

    def _planned_lines(self) -> Iterator[tuple[str, str]]:
        plan, job = self.plan, self.plan.job
        # what the real run would refuse
        choose_device(plan.options.device, computes=job.computes, buffers=job.peak_memory)
        free = plan.free_bytes
        yield "read", f"{format_size(job.bytes_read)} from {counted(len(set(plan.reader.files)), 'file')}"
        size = f"{format_size(job.bytes_written)} to {counted(len(job.files), 'file')} in {self.path}"
        yield "write", f"{size}  (free: {format_size(free)})"
        yield "workers", f"{job.threads}, {format_size(job.peak_memory)} of buffers"

    def _result_lines(self, stats: Stats) -> Iterator[tuple[str, str]]:
        plan, job = self.plan, self.plan.job
        rate = format_size(stats.bytes_written / stats.seconds) if stats.seconds > 0 else "-"
        resumed = f" ({format_size(stats.bytes_kept)} kept from before)" if stats.bytes_kept else ""
        size = f"{format_size(job.bytes_written)} in {counted(len(job.files), 'file')}{resumed}"
        yield "wrote", f"{self.path}  {size}, {stats.seconds:.1f} s, {rate}/s"
        if stats.losses:
            worst = max(stats.losses, key=lambda name: stats.losses[name]["relative"])
            text = f"at most {stats.losses[worst]['relative']:.2%} of a tensor's length ({printable(worst)})"
            yield "error", f"{text}; each in {plan.report_file}"
        if stats.underflowed:
            text = "that are not zero in the source became zero: fp16 has no number between 0 and 6e-8"
            yield "underflow", f"{counted(stats.underflowed, 'element')} {text}"
        report = f"; report in {plan.report_file}" if plan.report_file else ""
        checked = f"{counted(stats.records_checked, 'source record')} against their checksums"
        if stats.records_checked == 1:
            checked = "1 source record against its checksum"
        unchecked = "nothing: files are copied as they are" if plan.copied else "nothing: the source has no checksums"
        yield "checked", f"{checked if stats.records_checked else unchecked}{report}"

    def _left_out(self) -> Iterator[str]:
        """One line for each reason; names only where there are few."""
        catalog = self.plan.reader.catalog
        reasons: dict[str, list[str]] = {}
        for name, reason in self.plan.dropped:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            shown = [text for text, _ in fold(names)]
            if len(shown) > 2 and all(name in catalog.tensors for name in names):
                size = format_size(sum(catalog.tensors[name].nbytes for name in names))
                yield f"{reason} ({counted(len(names), 'tensor')}, {size})"
            else:
                yield f"{reason} ({listed(shown, 2)})"

    def __repr__(self) -> str:
        """The lines, as the command prints them."""
        texts = [f"{label.ljust(10)}{text}" for label, text in self.lines()]
        return "\n".join([*texts, *(f"note: {text}" for text in self.notes())])
