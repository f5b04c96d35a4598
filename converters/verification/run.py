"""Whether a checkpoint is right: its structure, every record and checksum, its optimizer, and on request its values.

    report = verify("ckpt/iter_0050000", values=True)
    report.good, report.affected      # whether all is well; the tensors concerned

Nothing is written but a manifest, where one is asked for and all is well. Files are read from front to back, once; what has
to be compared with each other (masters with weights, copies with their originals) is read once more, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from converters.errors import DamagedFileError, FormatError, RequestError
from converters.events import Phase, PlanReady
from converters.execute.manifest import MEGATRON, OURS, listed_files, read_manifest, write_manifest
from converters.execute.work_sharing import WorkSharing
from converters.formats import open_checkpoint
from converters.formats.base import fingerprint_of
from converters.formats.folder import is_folder, read_small, status
from converters.io.memory import workers_and_memory
from converters.keywords import keyword, with_keywords
from converters.names import listed, printable
from converters.verification.blocks import BLOCK_BYTES
from converters.verification.duplicate_shards import report_duplicates
from converters.verification.files import FileRead, FileTask, RecordIndex
from converters.verification.hugging_face import check_transformers
from converters.verification.report import Finding, Report
from converters.verification.scan import FileWorker, joined
from converters.verification.structure import check_structure
from converters.verification.tensor_checks import SAVE, TensorChecks
from converters.verification.values import TensorTask, TensorWorker, tile_bytes
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.events import Listener, StopFlag
    from converters.execute.manifest import Manifest
    from converters.execute.work_sharing import SharingOptions
    from converters.formats.base import Reader
    from converters.verification.report import Check
    from converters.verification.scan import Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Which checks are made.

    Attributes:
        quick: Structure only; no payload is read.
        values: Look at all values, too: NaN, Inf, zeros, denormals, constants, layers unlike the others.
        write_manifest: List the files with their SHA-256, if nothing is wrong: `integrity.json`, as Megatron writes it, or
            `distckpt-manifest.json` for formats that Megatron does not know.
        threads: Workers in this process; None takes one for each core, 8 at most.
    """

    quick: bool = False
    values: bool = False
    write_manifest: bool = False
    threads: int | None = None


@with_keywords(keyword(option.name, option.default, option.type) for option in fields(VerifyOptions))
def verify(
    path: str | Path,
    *,
    format: str | None = None,
    follow_links: bool = False,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    **options: Any,
) -> Report:
    """Checks a checkpoint of any format, and reports errors and warnings; executes nothing in it.

    The process that calls this does all of it, with threads. Under torchrun, too: call it on one rank, or have ranks share
    the work with `torchrun ... -m distckpt_cli verify CKPT`.

    Args:
        path: The checkpoint, as for every command: a training root, an iteration, a file inside.
        format: Name of the format to read it as; None finds out.
        follow_links: Files of it may be links out of its folder.
        listener: Told about progress; see `converters.events`.
        stop: Polled between blocks; set it to end.
        options: See `VerifyOptions`.

    Returns:
        What was found; `good` is the answer. Also of a checkpoint so damaged that it cannot be opened.

    Raises:
        FormatError: Nothing there, or no checkpoint of a known format, or a file that may not be read.
        RequestError: A manifest was asked for that there is no place for.
        DestinationError: The manifest cannot be written.
        Interrupted: Asked to stop.
    """
    try:
        reader = open_checkpoint(path, format, follow_links=follow_links)
    except DamagedFileError as error:
        return unopened_report(error)
    return verify_reader(reader, VerifyOptions(**options), listener=listener, stop=stop)


def verify_reader(
    reader: Reader, options: VerifyOptions | None = None, **sharing_options: Unpack[SharingOptions]
) -> Report:
    """Looks at a checkpoint and says what is wrong with it.

    Args:
        reader: The checkpoint.
        options: Which checks are made.
        sharing_options: Who is told about progress, what stops it between blocks, and the ranks that do it together: see
            `WorkSharing`.
            Only rank 0's report has findings.

    Raises:
        Interrupted: Asked to stop, or another rank is lost.
        RequestError: A manifest was asked for that there is no place for.
        DestinationError: The manifest, or the ranks' scratch folder, cannot be written.
    """
    return _Verification(reader, options or VerifyOptions()).run(sharing_options)


def unopened_report(error: DamagedFileError) -> Report:
    """The report of a checkpoint that cannot be opened: which of the files that describe it are damaged.

    Args:
        error: What `open_checkpoint` ended with.
    """
    folder = Path(error.folder)
    report = Report(error.folder, "unknown")
    for name, text in error.files.items():
        report.check("structure").error(text, file=name, hint=_RESTORE)
    with contextlib.suppress(FormatError, OSError):
        manifest = read_manifest(folder)
        if manifest is not None:
            listed = {name: digest for name, digest in manifest.files.items() if name in error.files}
            digests = {name: hashlib.sha256(read_small(folder / name)).hexdigest() for name in listed}
            _compare_manifest(report.check("manifest"), replace(manifest, files=listed, problems=()), (), digests)
    for name in ("records", "checksums"):
        report.check(name).skip("not read: the checkpoint cannot be opened")
    return report


class _Verification:
    """One run: the plan, which is the same on every rank, and what is made of the results."""

    def __init__(self, reader: Reader, options: VerifyOptions) -> None:
        self.reader, self.options, self.catalog = reader, options, reader.catalog
        self.report = Report(str(self.catalog.path), self.catalog.format)
        self.begin = time.monotonic()
        self.files: list[FileTask] = []
        self.positions: dict[str, tuple[int, ...]] = {}  # of each file, in the reader's list
        self.tensor_checks = TensorChecks(reader, self.report)
        self.manifest: Manifest | None = None
        self.listed: dict[str, int] = {}
        self.index = RecordIndex(reader)
        self._writes = options.write_manifest and not options.quick
        # as from a disk: each has several requests in flight of what comes next
        self._threads = workers_and_memory(options.threads, None)[0]

    def run(self, sharing_options: SharingOptions) -> Report:
        """See `verify_reader`."""
        check_structure(self.report.check("structure"), self.catalog)
        if self.options.write_manifest and not self.catalog.path.is_dir():
            raise RequestError("a manifest lists the files of a folder; this checkpoint is a single file")
        fingerprint = ""
        if not self.options.quick:
            fingerprint = fingerprint_of(self.reader)
            self._plan()
        else:
            sharing_options = {**sharing_options, "ranks": None}  # nothing to share: every rank finds the same
        tasks: list[FileTask | TensorTask] = [*self.files, *self.tensor_checks.tasks]
        digest = hashlib.sha256(f"{fingerprint} {self.options} {len(tasks)}".encode()).hexdigest()
        threads = self._threads
        with WorkSharing("verify", digest, threads=threads, **sharing_options) as sharing:
            if tasks:
                memory = threads * (BLOCK_BYTES + tile_bytes(self.tensor_checks.tensors))
                nbytes, count = sum(t.nbytes for t in tasks), len(self.positions)
                sharing.listener(PlanReady("verify", count, nbytes, nbytes, memory))
            results = sharing.map(tasks, lambda: _Worker(self, sharing)) if tasks else {}
            if sharing.leads:
                digests = self._conclude(results, fingerprint)
                if self._writes:
                    self._write_manifest(digests, sharing.listener)
            answer = sharing.finish({"good": self.report.good, "seconds": time.monotonic() - self.begin})
        self.report.seconds = answer["seconds"]
        if not sharing.leads and not answer["good"]:
            self.report.check("structure").error("rank 0 shows what is wrong")
        return self.report

    # ------------------------------------------------------------------ what is to be read

    def _plan(self) -> None:
        folder = self.catalog.path
        self.manifest = self._read_manifest()
        if self._writes and self.manifest is None:
            try:
                self.listed = listed_files(folder)
            except OSError as error:
                path = printable(str(error.filename or folder))
                raise FormatError(f"reading {path} failed: {error.strerror or error}") from error
        self._plan_files()
        self.tensor_checks.plan(len(self.files), values=self.options.values)

    def _plan_files(self) -> None:
        folder, positions = self.catalog.path, dict[str, list[int]]()
        base = folder if is_folder(folder) else folder.parent
        paths: dict[str, Path] = {}
        for position, path in enumerate(self.reader.files):
            name = self.reader.file_name(position)
            paths[name] = path
            positions.setdefault(name, []).append(position)
        sizes = {info.name: info.size for info in self.catalog.files if info.role != "unreferenced"}
        hashed = set(self.manifest.files if self.manifest else self.listed)
        reads = []
        for name in dict.fromkeys([*paths, *sizes, *sorted(hashed)]):
            size = sizes[name] if name in sizes else self._size(paths.get(name, base / name))
            if size is not None:  # else the structure says so, or the manifest
                reads.append(FileRead(name, tuple(positions.get(name, ())), size, name in hashed))
        self.positions = {file.name: file.positions for file in reads}
        self.files = list(FileTask.batches(reads))

    def _size(self, path: Path) -> int | None:
        try:
            file_status = status(path)
        except OSError:
            return None
        return None if file_status is None else file_status.size

    # ------------------------------------------------------------------ what was found

    def _conclude(self, results: Mapping[int, Any], fingerprint: str) -> Mapping[str, str]:
        """Fills the report; the SHA-256 of files where they are known."""
        report = self.report
        if self.options.quick:
            for name in ("records", "checksums"):
                report.check(name).skip("not read (--quick)")
            self._conclude_manifest()
            return {}
        check_transformers(report.check("structure"), self.catalog)
        scan = joined((results[task.number] for task in self.files), self.index, self.positions)
        self._conclude_files(scan)
        if self.manifest is not None:
            _compare_manifest(report.check("manifest"), self.manifest, self.positions, scan.sha256)
        report.files = len(self.positions)
        report.bytes_read = scan.read + sum(task.nbytes for task in self.tensor_checks.tasks)
        self.tensor_checks.conclude(results, values=self.options.values)
        order = ["structure", "records", "checksums", "manifest", "copies", "optimizer", "values"]
        report.checks.sort(key=lambda check: order.index(check.name))
        if report.damaged(self.catalog.weights):  # nothing that reads them all is of use
            for check in report.checks:
                check.findings = [replace(f, hint=_RESTORE) if f.hint == SAVE else f for f in check.findings]
        if self._has_changed(fingerprint):
            text = "the checkpoint changed while it was read: so the result is not valid"
            hint = "wait until nobody writes to it, then run the same command again"
            report.check("structure").error(text, hint=hint)
        return scan.sha256

    def _conclude_manifest(self) -> None:
        """Without reading payload: whether all files are there, and the sums of those that only describe it."""
        manifest = self._read_manifest()
        if manifest is None:
            return
        folder, describing = self.catalog.path, {info.name for info in self.catalog.files if not info.records}
        sizes = {name: size for name in manifest.files if (size := self._size(folder / name)) is not None}
        small = {name for name, size in sizes.items() if name in describing and size <= _DESCRIBING}
        summed = {name: hashlib.sha256(read_small(folder / name)).hexdigest() for name in sorted(small)}
        check = self.report.check("manifest")
        _compare_manifest(check, manifest, (), {**{name: manifest.files[name] for name in sizes}, **summed})
        files = f"{counted(len(manifest.files), 'file')} that {manifest.name} lists"
        check.summary = f"{files} {'is' if len(manifest.files) == 1 else 'are'} there; SHA-256 of "
        check.summary += f"{len(summed):,} that describe the data match, of the data not computed (--quick)"

    def _read_manifest(self) -> Manifest | None:
        try:
            return read_manifest(self.catalog.path)
        except FormatError as error:
            self.report.check("manifest").error(error.message, file=MEGATRON)
            return None

    def _has_changed(self, fingerprint: str) -> bool:
        try:
            return fingerprint_of(self.reader) != fingerprint
        except FormatError:
            return True

    def _conclude_files(self, scan: Scan) -> None:
        wanted = {n for *_, records in scan.findings for n in records}
        owners = self.index.tensors(wanted, self.tensor_checks.named)
        ownerless = {n for n in wanted if not owners[n]}  # the padding of a bucket
        owners |= self.index.tensors(ownerless, self.catalog.tensors)
        for file, name, text, at, needed, actual, records in scan.findings:
            tensors = tuple(dict.fromkeys(t for n in records for t in owners.get(n, ())))
            offset = at if at >= 0 else None
            finding = Finding("error", text, file, offset, needed, actual, tensors, _RESTORE)
            self.report.check(name).add(finding)
        check = self.report.check("records")
        pairs = zip(scan.fingerprints[::2], scan.fingerprints[1::2], strict=True)
        report_duplicates(check, self.reader, self.index, self.tensor_checks.named, pairs)
        read = sum(len(self.index.records(n)) for positions in self.positions.values() for n in positions)
        check.summary = f"{counted(read, 'record', verb='holds/hold')} what the metadata promises"
        if len(self.index) > read:
            check.summary += f", {counted(len(self.index) - read, 'record')} of missing files could not be read"
        verb = "archive is" if scan.archives == 1 else "archives are"
        check.summary += f", {scan.archives:,} {verb} whole" if scan.archives else ""
        sums = self.report.check("checksums")
        sums.summary = f"{scan.members:,} CRC-32 of {_size(scan.checked)} match"
        if not scan.unchecked or (self.manifest and scan.checked):
            return
        sums.skipped, none = not scan.checked, f"{self.catalog.format} stores none"
        if self.manifest:
            sums.summary = f"{none}; {self.manifest.name} lists the files"
            return
        before = f"{sums.summary}; " if scan.checked else ""
        sums.summary = f"{before}not checkable: {none} for {_size(scan.unchecked)} of tensors"
        if not any(self.report.check(name).count["error"] for name in ("structure", "records")):
            sums.summary += ", sizes fit and all could be read"

    # ------------------------------------------------------------------ the manifest

    def _write_manifest(self, digests: Mapping[str, str], listener: Listener) -> None:
        report, folder = self.report, self.catalog.path
        if self.manifest is not None:
            report.manifest = f"{self.manifest.name} is there already"
        elif not report.good:
            report.manifest = "not written: a manifest of damaged files would call them right"
        else:
            listener(Phase("writing the manifest"))
            if digests.keys() != self.listed.keys():
                raise FormatError("files came or went while the checkpoint was read; no manifest was written")
            name = MEGATRON if self.catalog.format in _MEGATRONS else OURS
            write_manifest(folder, name, digests)
            report.manifest = f"{name} lists {counted(len(digests), 'file')}"


def _compare_manifest(check: Check, manifest: Manifest, names: Iterable[str], digests: Mapping[str, str]) -> None:
    """Compares the files of a folder with those that its manifest lists."""
    for text in manifest.problems:
        check.error(text, file=manifest.name)
    for name, wanted in manifest.files.items():
        got, shown = digests.get(name), printable(name)
        if got is None:
            check.error(f"{shown} is missing or unreadable, {manifest.name} lists it", file=name)
        elif got != wanted:
            text = f"{shown} is not the file that {manifest.name} lists"
            check.error(text, file=name, needed=f"sha256 {wanted}", found=f"sha256 {got}")
    extra = [name for name in names if name not in manifest.files and name not in (MEGATRON, OURS)]
    if extra:
        check.warn(f"{listed(extra, 1)} is not listed in {manifest.name}", file=extra[0])
    verb = "is the one" if len(manifest.files) == 1 else "are those"
    check.summary = f"{counted(len(manifest.files), 'file')} {verb} that {manifest.name} lists"


_RESTORE = "restore the damaged files from a copy, or use another iteration"
_DESCRIBING = 1 << 20  # bytes: config.json, metadata.json, common.pt, an index
_MEGATRONS = ("torch_dist", "zarr", "legacy", "fsdp_dtensor")


class _Worker:
    """One thread's readers, of files and of tensors."""

    def __init__(self, run: _Verification, sharing: WorkSharing) -> None:
        self._files = FileWorker(run.reader, run.index, sharing, drop=not run.tensor_checks.tasks)
        bound = run.tensor_checks.moment_bound or math.inf
        self._tensors = TensorWorker(run.reader, run.tensor_checks.tensors, sharing, bound)

    def do(self, task: FileTask | TensorTask) -> dict[str, Any]:
        """Does any of them."""
        return self._files.do(task) if isinstance(task, FileTask) else self._tensors.do(task)

    def close(self) -> None:
        """Closes all files."""
        self._files.close()
        self._tensors.close()


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):,.2f} MiB"
