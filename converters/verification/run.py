"""Whether a checkpoint is right: its structure, every record and checksum, its optimizer, and on request its values.

    report = verify(open_checkpoint("ckpt/iter_0050000"), VerifyOptions(values=True))
    report.good, report.affected      # whether all is well; the tensors concerned

Nothing is written but a manifest, where one is asked for and all is well. Files are read from front to back, once; what has
to be compared with each other (masters with weights, copies with their originals) is read once more, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.engine.crew import Crew
from converters.engine.manifest import MEGATRON, OURS, listed_files, read_manifest, write_manifest
from converters.errors import FormatError, IntegrityError, RequestError
from converters.events import Phase, PlanReady
from converters.formats.base import fingerprint_of
from converters.formats.folder import is_folder, read_small, status
from converters.names import fold, printable
from converters.optimizer.state import optimizer_state
from converters.verification.files import BLOCK_BYTES, FileRead, FileTask, FileWorker, RecordIndex
from converters.verification.report import Finding, Report
from converters.verification.structure import check_structure, is_tied
from converters.verification.values import TensorTask, TensorWorker, judge_values, tile_bytes, value_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from converters.catalog import TensorInfo
    from converters.engine.manifest import Manifest
    from converters.engine.ranks import Ranks
    from converters.errors import DamagedFileError
    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader

__all__ = ["VerifyOptions", "unopened", "verify"]

_MASTER = "optimizer.state.param."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How much is looked at.

    Attributes:
        quick: Structure only; no payload is read.
        values: Look at the values of all tensors, too.
        write_manifest: List the files with their SHA-256, if nothing is wrong.
        threads: Workers in this process.
    """

    quick: bool = False
    values: bool = False
    write_manifest: bool = False
    threads: int = 2


def verify(
    reader: Reader,
    options: VerifyOptions | None = None,
    *,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    ranks: Ranks | None = None,
    scratch: Path | None = None,
) -> Report:
    """Looks at a checkpoint and says what is wrong with it.

    Args:
        reader: The checkpoint.
        options: How much is looked at.
        listener: Told about progress, of all ranks, on rank 0.
        stop: Polled between blocks.
        ranks: The processes that do this together; by default this one alone. Only rank 0's report has findings.
        scratch: Where ranks meet, see `converters.engine.crew.scratch_folder`.

    Raises:
        Interrupted: Asked to stop, or another rank is lost.
        RequestError: A manifest was asked for that there is no place for.
        DestinationError: The manifest, or the ranks' scratch folder, cannot be written.
    """
    return _Verification(reader, options or VerifyOptions()).run(listener, stop, ranks, scratch)


def unopened(error: DamagedFileError) -> Report:
    """What can be said of a checkpoint that cannot be opened: which files that describe it are damaged.

    Args:
        error: What `open_checkpoint` ended with.
    """
    folder = Path(error.folder)
    report = Report(error.folder, "unknown")
    for name, text in error.files.items():
        report.check("structure").error(text, file=name, hint=_RESTORE)
    with contextlib.suppress(FormatError, OSError):
        manifest = read_manifest(folder)
        for name in error.files:
            if manifest is None:
                break
            wanted, got = manifest.files.get(name), hashlib.sha256(read_small(folder / name)).hexdigest()
            if wanted is not None and wanted != got:
                text = f"{printable(name)} is not the file that {manifest.name} lists"
                more = {"file": name, "needed": f"sha256 {wanted}", "found": f"sha256 {got}"}
                report.check("manifest").error(text, **more)
    for name in ("records", "checksums"):
        check = report.check(name)
        check.skipped, check.summary = True, "not read: the checkpoint cannot be opened"
    return report


class _Verification:
    """One run: the plan, which is the same on every rank, and what is made of the results."""

    def __init__(self, reader: Reader, options: VerifyOptions) -> None:
        self.reader, self.options, self.catalog = reader, options, reader.catalog
        self.report = Report(str(self.catalog.path), self.catalog.format)
        self.begin = time.monotonic()
        self.files: list[FileTask] = []
        self.lookups: list[TensorTask] = []
        self.tensors: dict[str, TensorInfo] = dict(self.catalog.tensors)
        self.pairs: dict[str, tuple[str, str]] = {}
        self.named: Mapping[str, TensorInfo] = self.catalog.tensors  # flat buckets under the names of their parameters
        self.shown: dict[str, str] = {}  # states under the names that they are stored under
        self.manifest: Manifest | None = None
        self.listed: dict[str, int] = {}
        self.index = RecordIndex(reader)
        self._writes = options.write_manifest and not options.quick

    def run(
        self, listener: Listener | None, stop: StopFlag | None, ranks: Ranks | None, scratch: Path | None
    ) -> Report:
        """See `verify`."""
        check_structure(self.report.check("structure"), self.catalog)
        if self.options.write_manifest and not self.catalog.path.is_dir():
            raise RequestError("a manifest lists the files of a folder; this checkpoint is a single file")
        fingerprint = ""
        if not self.options.quick:
            fingerprint = fingerprint_of(self.reader)
            self._plan()
        else:
            ranks = None  # nothing to share: every rank finds the same
        tasks: list[FileTask | TensorTask] = [*self.files, *self.lookups]
        digest = hashlib.sha256(f"{fingerprint} {self.options} {len(tasks)}".encode()).hexdigest()
        threads = self.options.threads
        crew = Crew("verify", digest, threads=threads, ranks=ranks, scratch=scratch, listener=listener, stop=stop)
        with crew:
            if tasks and crew.leads and listener is not None:
                nbytes, memory = sum(t.nbytes for t in tasks), threads * (BLOCK_BYTES + tile_bytes(self.tensors))
                count = sum(len(task.files) for task in self.files)
                listener(PlanReady("verify", count, nbytes, nbytes, memory))
            results = crew.map(tasks, lambda: _Worker(self, crew)) if tasks else {}
            if crew.leads:
                self._conclude(results, fingerprint)
                if self._writes:
                    self._write_manifest(results, listener)
            answer = crew.agree({"good": self.report.good, "seconds": time.monotonic() - self.begin})
        self.report.seconds = answer["seconds"]
        if not crew.leads and not answer["good"]:
            self.report.check("structure").error("rank 0 shows what is wrong")
        return self.report

    # ------------------------------------------------------------------ what is to be read

    def _reading(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OSError as error:
            what = printable(str(error.filename or self.catalog.path))
            raise FormatError(f"reading {what} failed: {error.strerror or error}") from error

    def _plan(self) -> None:
        folder = self.catalog.path
        try:
            self.manifest = read_manifest(folder)
        except FormatError as error:
            self.report.check("manifest").error(error.message, file=MEGATRON)
        if self._writes and self.manifest is None:
            self.listed = self._reading(lambda: listed_files(folder))
        self._plan_files()
        self._pair()
        first = len(self.files)
        self.lookups = list(value_tasks(self.tensors, self.pairs, values=self.options.values, first=first))

    def _plan_files(self) -> None:
        folder, positions = self.catalog.path, dict[str, list[int]]()
        base = folder if is_folder(folder) else folder.parent
        paths: dict[str, Path] = {}
        for position, path in enumerate(self.reader.files):
            name = str(path.relative_to(base)) if path.is_relative_to(base) else path.name
            paths[name] = path
            positions.setdefault(name, []).append(position)
        sizes = {info.name: info.size for info in self.catalog.files if info.role != "unreferenced"}
        hashed = set(self.manifest.files if self.manifest else self.listed)
        reads = []
        for name in dict.fromkeys([*paths, *sizes, *sorted(hashed)]):
            size = sizes[name] if name in sizes else self._size(paths.get(name, base / name))
            if size is not None:  # else the structure says so, or the manifest
                reads.append(FileRead(name, tuple(positions.get(name, ())), size, name in hashed))
        self.files = list(FileTask.batches(reads))

    def _size(self, path: Path) -> int | None:
        try:
            found = status(path)
        except OSError:
            return None
        return None if found is None else found.size

    def _pair(self) -> None:
        """What is to be compared: copies with their originals, masters with weights."""
        for label, copy in self.catalog.copies.items():
            if copy.name in self.catalog.tensors:
                self.tensors[label] = replace(copy, name=label, kind="copy")
                self.pairs[label] = ("equal", copy.name)
        words, output = "embedding.word_embeddings.weight", "output_layer.weight"
        if is_tied(self.catalog) and {words, output} <= self.catalog.weights.keys():
            self.pairs[output] = ("equal", words)
        check = self.report.check("optimizer")
        try:
            state = optimizer_state(self.reader)
        except (IntegrityError, FormatError) as error:
            check.error(printable(error.message), tensors=(error.tensor,) if error.tensor else (), hint=_SAVE)
            for text in error.details[:12]:
                check.error(printable(text))
            return
        except RequestError as error:
            check.skipped, check.summary = True, f"not understood: {printable(error.message)}"
            return
        kept = {name: info for name, info in self.catalog.tensors.items() if name not in state.replaced}
        for older in ("fp32_param", "master_param"):
            for name, info in state.tensors.items():
                stored = name.replace(_MASTER, f"optimizer.state.{older}.", 1)
                if stored != name and stored in kept and kept[stored].parts == info.parts:
                    self.shown[name] = stored
        self.named = {**kept, **{name: info for name, info in state.tensors.items() if name not in self.shown}}
        weights = self.catalog.weights
        for name, info in state.tensors.items():
            parameter = name.removeprefix(_MASTER)
            if not name.startswith(_MASTER) or parameter not in weights or info.parts == weights[parameter].parts:
                continue
            self.tensors[name] = info
            self.pairs[name] = ("rounded", parameter)
        if not any(how == "rounded" for how, _ in self.pairs.values()):
            check.skipped = True
            why = "no master weights" if state.tensors else "no optimizer state"
            check.summary = f"the checkpoint has {why}: nothing to compare the weights with"

    # ------------------------------------------------------------------ what was found

    def _conclude(self, results: Mapping[int, Any], fingerprint: str) -> None:
        report = self.report
        if self.options.quick:
            for name in ("records", "checksums"):
                check = report.check(name)
                check.skipped, check.summary = True, "not read (--quick)"
            return
        scans = [results[task.number] for task in self.files]
        names = [file.name for task in self.files for file in task.files]
        digests = {name: digest for scan in scans for name, digest in scan["sha256"].items()}
        self._conclude_files(scans)
        self._conclude_manifest(names, digests)
        report.files = len(names)
        report.bytes_read = sum(scan["read"] for scan in scans) + sum(t.nbytes for t in self.lookups)
        self._conclude_pairs(results)
        if self.options.values:
            stats: dict[str, Any] = {}
            for task in self.lookups:
                stats |= results[task.number]["stats"]
            check = report.check("values")
            judge_values(check, stats, self.tensors)
            numel = sum(found["numel"] for found in stats.values())
            check.summary = (
                f"{numel:,} elements of {len(stats):,} tensors: no NaN, no Inf, none empty or out of proportion"
            )
        order = ["structure", "records", "checksums", "manifest", "copies", "optimizer", "values"]
        report.checks.sort(key=lambda check: order.index(check.name))
        if self._damaged_weights():  # nothing that reads them all is of use
            for check in report.checks:
                check.findings = [replace(f, hint=_RESTORE) if f.hint == _SAVE else f for f in check.findings]
        if self._changed(fingerprint):
            text = "the checkpoint changed while it was read: what was found of it holds for no moment"
            report.check("structure").error(
                text, hint="wait until nobody writes to it, then run the same command again"
            )

    def _damaged_weights(self) -> int:
        """Number of weights that something is wrong with."""
        errors = (f for c in self.report.checks for f in c.findings if f.severity == "error")
        return len({t for finding in errors for t in finding.tensors} & self.catalog.weights.keys())

    def _changed(self, fingerprint: str) -> bool:
        try:
            return fingerprint_of(self.reader) != fingerprint
        except FormatError:
            return True

    def _conclude_files(self, scans: list[dict[str, Any]]) -> None:
        found = [note for scan in scans for note in scan["findings"]]
        wanted = {n for *_, records in found for n in records}
        owners = self.index.tensors(wanted, self.named)
        lost = {n for n in wanted if not owners[n]}  # the padding of a bucket
        owners |= self.index.tensors(lost, self.catalog.tensors)
        for file, name, text, at, needed, there, records in found:
            tensors = tuple(dict.fromkeys(t for n in records for t in owners.get(n, ())))
            offset = at if at >= 0 else None
            finding = Finding("error", text, file, offset, needed, there, tensors, "restore this file from a copy")
            self.report.check(name).add(finding)
        archives, members, checked, unchecked = (
            sum(scan[name] for scan in scans) for name in ("archives", "members", "checked", "unchecked")
        )
        records = self.report.check("records")
        records.summary = f"{len(self.index):,} records hold what the metadata promises"
        whole = "archive is" if archives == 1 else "archives are"
        records.summary += f", {archives:,} {whole} whole" if archives else ""
        sums = self.report.check("checksums")
        sums.summary = f"{members:,} CRC-32 of {_size(checked)} match"
        if unchecked and self.manifest and not checked:
            sums.skipped, sums.summary = (
                True,
                f"{self.catalog.format} stores none; {self.manifest.name} lists the files",
            )
        if unchecked and not self.manifest:
            sums.skipped = not checked
            before = "" if sums.skipped else f"{sums.summary}; "
            sums.summary = f"{before}not checkable: {self.catalog.format} stores none for {_size(unchecked)} of tensors"
            if not any(self.report.check(name).count["error"] for name in ("structure", "records")):
                sums.summary += ", sizes fit and all could be read"

    def _conclude_manifest(self, names: list[str], digests: Mapping[str, str]) -> None:
        manifest = self.manifest
        if manifest is None:
            return
        check = self.report.check("manifest")
        for text in manifest.trouble:
            check.error(text, file=manifest.name)
        for name, wanted in manifest.files.items():
            got = digests.get(name)
            shown = printable(name)
            if got is None:
                check.error(f"{shown} is missing or unreadable, {manifest.name} lists it", file=name)
            elif got != wanted:
                text = f"{shown} is not the file that {manifest.name} lists"
                check.error(text, file=name, needed=f"sha256 {wanted}", found=f"sha256 {got}")
        extra = [name for name in names if name not in manifest.files and name not in (MEGATRON, OURS)]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            check.warn(f"{printable(extra[0])}{more} is not listed in {manifest.name}", file=extra[0])
        check.summary = f"{len(manifest.files):,} files are those that {manifest.name} lists"

    def _conclude_pairs(self, results: Mapping[int, Any]) -> None:
        counted, failed = dict.fromkeys(("equal", "rounded", ""), 0), dict[str, list[tuple[str, str]]]()
        masters: list[str] = []
        wrong: dict[str, str] = {}  # masters, by their parameter
        differing: list[tuple[TensorTask, Mapping[str, Any]]] = []
        for task in self.lookups:
            result, name, parameter = results[task.number], task.names[0], task.names[-1]
            counted[task.compare] += 1
            if task.compare == "rounded":
                masters.append(parameter)
            if "failed" in result:
                failed.setdefault(task.compare, []).append((name, result["failed"]))
            elif result["wrong"]:
                differing.append((task, result))
            if task.compare == "rounded" and ("failed" in result or result["wrong"]):
                wrong[parameter] = self.shown.get(name, name)
        for how, found in failed.items():
            names = [self.shown.get(name, name) for name, _ in found]
            folded = [text for text, _ in fold(names)]
            listed = ", ".join(map(printable, folded[:3])) + (f" and {len(folded) - 3} more" if len(folded) > 3 else "")
            text = f"{len(found):,} tensors cannot be read: {listed}; {printable(found[0][1])}"
            self.report.check(_CHECKS[how]).error(text, tensors=tuple(names))
        if counted["equal"]:
            self.report.check("copies").summary = f"{counted['equal']:,} copies equal their originals"
        if masters:
            self._conclude_masters(masters, wrong)
        for task, result in differing:
            self._differs(task, result)

    def _differs(self, task: TensorTask, result: Mapping[str, Any]) -> None:
        name, other = task.names
        verb = "differ from" if task.compare == "equal" else "do not round to"
        share = f"{result['wrong']:,} of {math.prod(self.tensors[name].shape):,} elements, first at {result['first']}"
        text = f"{printable(name)}: {share}, {verb} {printable(other)}"
        self.report.check(_CHECKS[task.compare]).error(
            text, tensors=(other if task.compare == "equal" else self.shown.get(name, name),)
        )

    def _conclude_masters(self, masters: list[str], wrong: Mapping[str, str]) -> None:
        check = self.report.check("optimizer")
        check.summary = f"{len(masters):,} master weights round to the weights beside them"
        right = [name for name in masters if name not in wrong]
        if len(right) == len(masters):
            return
        text = f"{len(wrong):,} of {len(masters):,} master weights do not round to the weights beside them"
        if self.catalog.content.get("distrib_optim_sharding_type") == "fully_reshardable":
            text += "; Megatron-Core 0.15.0 to 0.19.0 saved optimizer state shifted when there were several buckets"
        check.error(text, tensors=tuple(wrong.values()), hint=_SAVE)
        touched = self._damaged_weights()
        weights = f"all weights but {touched:,}" if touched else "all weights"
        listed = ", ".join(text for text, _ in fold(right)[:4])
        state = f"the optimizer state of {len(right):,} of {len(masters):,} parameters"
        check.warn(f"what can be saved: {weights}; {state}" + (f": {listed}" if listed else ""), hint=_SAVE)

    # ------------------------------------------------------------------ the manifest

    def _write_manifest(self, results: Mapping[int, Any], listener: Listener | None) -> None:
        report, folder = self.report, self.catalog.path
        if self.manifest is not None:
            report.manifest = f"{self.manifest.name} is there already"
        elif not report.good:
            report.manifest = "not written: a list of damaged files would call them right"
        else:
            if listener is not None:
                listener(Phase("writing the manifest"))
            digests = {n: d for task in self.files for n, d in results[task.number]["sha256"].items()}
            if digests.keys() != self.listed.keys():
                raise FormatError("files came or went while the checkpoint was read; no manifest was written")
            name = MEGATRON if self.catalog.format in _MEGATRONS else OURS
            write_manifest(folder, name, digests)
            report.manifest = f"{name} lists {len(digests):,} files"


_CHECKS = {"equal": "copies", "rounded": "optimizer", "": "values"}
_RESTORE = "restore the damaged files from a copy, or use another iteration"
_SAVE = "distckpt reshard CKPT OUT --optimizer none keeps the weights"
_MEGATRONS = ("torch_dist", "zarr", "legacy", "fsdp_dtensor")


class _Worker:
    """One thread's readers, of files and of tensors."""

    def __init__(self, run: _Verification, crew: Crew) -> None:
        self._files = FileWorker(run.reader, run.index, crew, drop=not run.lookups)
        self._tensors = TensorWorker(run.reader, run.tensors, crew)

    def do(self, task: FileTask | TensorTask) -> dict[str, Any]:
        """Does either."""
        return self._files.do(task) if isinstance(task, FileTask) else self._tensors.do(task)

    def close(self) -> None:
        """Closes all files."""
        self._files.close()
        self._tensors.close()


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):,.2f} MiB"
