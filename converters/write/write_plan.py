"""The plan of a command that writes, and its execution: in one process or on many ranks.

A writer is a module with `plan_<format>(reader, destination, ...) -> Conversion`. It decides and proves everything, reads
and writes no tensor data, and says in the conversion what a person and a program may want to know of it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from converters.errors import DestinationError, FormatError, IntegrityError, RequestError
from converters.events import Moved, Note, Phase, PlanReady
from converters.execute.destination import beside, free_bytes, replaced
from converters.execute.disk import trouble_with
from converters.execute.hub_upload import HubUpload
from converters.execute.journal import JOURNAL, Journal
from converters.execute.leftovers import about_run
from converters.execute.publish import Staging
from converters.execute.ranks import Ranks
from converters.execute.run import Run, Stats
from converters.execute.upload import FILES_AT_ONCE, Upload
from converters.execute.work_sharing import FunctionWorker, SharingOptions, WorkSharing
from converters.formats.base import fingerprint_of
from converters.formats.containers.safetensors_out import check_readable
from converters.formats.folder import Status, read_small, status
from converters.io.cast import choose_device
from converters.io.memory import workers_and_memory
from converters.names import printable
from converters.planning.job import Job
from converters.planning.plan import account
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader
    from converters.optimizer.proof import Masters, RoundingTask
    from converters.planning.job import OutputFile
    from converters.planning.routes import Routes
    from converters.write.tied_head import TiedHead

_NOTHING = Status(False, False, 0, 0)

ExtraFile = bytes | Path | Callable[[Stats], bytes]
"""Contents of a small file: given, those of another file, or made when everything else is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What a person may ask of every command that writes.

    Attributes:
        max_memory: Bytes of buffers; None: see `workers_and_memory`.
        threads: Workers in this process; None as well.
        overwrite: Replace an existing destination after success.
        scratch: For a destination in an object store: where the result is made before it is uploaded.
        device: Where elements are cast: `cpu`, `cuda`, `cuda:N`, or `auto`, a GPU if there is one and it has work.

    Raises:
        RequestError: An option has a value that is none of its `CHOICES`.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The words that an option takes, where it takes no others."""

    max_memory: int | None = None
    threads: int | None = None
    overwrite: bool = False
    scratch: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, words in self.CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise RequestError(
                    f"{name}={printable(str(value))!r} is not a choice", hint=f"choose {', '.join(words)}"
                )

    @property
    def resources(self) -> dict[str, Any]:
        """These options alone, for a plan that another one is made of."""
        return {option.name: getattr(self, option.name) for option in fields(WriteOptions)}

    def job(
        self,
        reader: Reader,
        sources: Mapping[str, TensorInfo],
        routes: Routes,
        files: Sequence[OutputFile],
        **arguments: Any,
    ) -> Job:
        """`Job.build` with these resources; `more` are its further arguments."""
        source = reader.catalog.path
        threads, memory = workers_and_memory(self.threads, self.max_memory, source)
        return Job.build(
            sources,
            routes,
            files,
            source_fingerprint=fingerprint_of(reader),
            max_memory=memory,
            threads=threads,
            distant=isinstance(source, RemotePath),
            **arguments,
        )


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Something to be written, decided and proved, with nothing moved yet.

    Attributes:
        command: The verb, as progress shows it: `reshard`.
        destination: Where the result will appear; with several ranks, on a file system that all share.
        job: The work; planned alike on every rank.
        folder: Where in the destination the checkpoint lies: `iter_0050000`; empty if it is the destination itself.
        copied: Names of tensors and objects whose files are copied as they are, beside what the job reads.
        extra_files: Small files of the result by name within the destination, in the order in which they are written.
        dropped: `(what, reason)` of what is not carried over: tensors and objects by their names.
        notes: Sentences a person should read before it begins.
        summary: What it is, as `(label, text)` lines.
        facts: The same and more for a program, as JSON has it.
        advice: Sentences a person should read when it is done.
        next_step: A command to type then; empty if there is none.
        report_file: Name of the extra file that accounts for everything; empty if there is none.
        options: What was asked.
        single: The destination is a file: the job's only one.
        proof: What has to be proved of the source's data before anything is written; None if nothing is in doubt.
    """

    command: str
    reader: Reader
    destination: Path
    job: Job
    folder: str = ""
    copied: Collection[str] = frozenset()
    extra_files: Mapping[str, ExtraFile] = field(default_factory=dict)
    dropped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    summary: tuple[tuple[str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    next_step: str = ""
    report_file: str = ""
    options: WriteOptions = field(default_factory=WriteOptions)
    single: bool = False
    proof: Masters | TiedHead | None = None

    def __post_init__(self) -> None:
        """Every tensor of the source is read, copied with its file, or left out with a reason, in every plan.

        Raises:
            RequestError: One is neither.
        """
        elsewhere = (*self.copied, *(name for name, _ in self.dropped))
        account(self.reader.catalog.tensors, self.job.sources, elsewhere)

    @property
    def _made_at(self) -> Path:
        """Where the result is made: beside the destination, or for one in an object store on a disk."""
        if isinstance(self.destination, RemotePath):
            return (self.options.scratch or Path(tempfile.gettempdir())) / "result"
        return self.destination

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be written where the result is made.

        Raises:
            DestinationError: It cannot be looked at.
        """
        return free_bytes(beside(self._made_at, "partial").parent)

    @property
    def lack_of_room(self) -> str:
        """How many bytes are needed and free, if the result does not fit where it is made; else empty."""
        return _lack_of_room(self._made_at, self.job.bytes_written + _extra_bytes(self.extra_files))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, doubts about the source, and what `overwrite` deletes: to be read before it begins."""
        doubts = (problem.message for problem in self.reader.catalog.problems if problem.severity == "warning")
        gone = replaced(self.destination) if self.options.overwrite else None
        return tuple(dict.fromkeys((*self.notes, *doubts, *([gone] if gone else []))))


def run_conversion(plan: Conversion, *, typed: Sequence[str] = (), **sharing_options: Unpack[SharingOptions]) -> Stats:
    """Carries out a conversion; the destination appears complete, or not at all.

    Args:
        plan: What to do; with several ranks, every one of them has made the same plan.
        typed: The words of the command line, named where an interrupted run left files.
        sharing_options: `listener`, told about progress of all ranks, on rank 0; `stop`, polled between tiles; `ranks`, the
            processes that do this together, by default this one alone.

    Raises:
        DistckptError: See `converters.execute.run.Run`; also when the disk has not enough room, before anything is written.
            Every rank raises an error of the same exit code.
    """
    job, destination = plan.job, plan.destination
    about = about_run(plan.command, plan.reader.catalog.path, destination, typed)
    if isinstance(destination, RemotePath):
        return _run_into_store(plan, destination, about, typed, sharing_options)
    with WorkSharing(
        plan.command, job.fingerprint, threads=job.threads, destination=destination, **sharing_options
    ) as sharing:
        notify = sharing.listener
        if plan.proof is not None:
            _prove(plan.proof, sharing)
        device, device_note = choose_device(
            plan.options.device, computes=job.computes, local_rank=sharing.ranks.local, buffers=job.peak_memory
        )
        if not sharing.leads:
            return _run_as_follower(plan, sharing, device)
        if lack := plan.lack_of_room:
            raise DestinationError(
                f"not enough room for {printable(str(destination))}",
                details=[lack],
                hint="free some space, or choose a directory on another disk",
            )
        notify(PlanReady(plan.command, len(job.files), job.bytes_read, job.bytes_written, job.peak_memory))
        for text in (*plan.remarks, *([device_note] if device_note else [])):
            notify(Note(text))
        sharing.assemble()
        staging = Staging(
            destination,
            job.fingerprint,
            job.files,
            overwrite=plan.options.overwrite,
            meeting=sharing.folder,
            single=plan.single,
            about=about,
        )
        for text in staging.notes:
            notify(Note(text))
        try:
            sharing.broadcast(None)  # the folder is prepared
            stats = Run(job, plan.reader, staging.folder, staging.journal, sharing=sharing, device=device).run()
            notify(Phase("publishing"))
            for name, content in plan.extra_files.items():
                staging.add(name, _extra_contents(content, stats))
            for file in job.files:
                if file.name.endswith(".safetensors"):
                    check_readable(staging.folder / file.name)
            staging.publish()
        except (IntegrityError, FormatError) as error:
            if not isinstance(error.__cause__, OSError):  # no passing trouble with a disk: what was read of it is wrong
                sharing.end(error)  # the others write into it until they know
                staging.discard()
            elif staging.folder.exists():
                staged_at = printable(str(staging.folder))
                error.details.append(f"what is written so far is kept in {staged_at}; the same command continues it")
            raise
        finally:
            staging.close()
    return stats


def _run_into_store(
    plan: Conversion,
    destination: RemotePath,
    about: Mapping[str, Any],
    typed: Sequence[str],
    sharing_options: SharingOptions,
) -> Stats:
    """Makes the result on a disk, as any other, and uploads it."""
    job, options, ranks = plan.job, plan.options, sharing_options.get("ranks") or Ranks()
    kind = HubUpload if destination.parts[0] == "hf:" else Upload
    upload = kind(destination, job.fingerprint, options.scratch, overwrite=options.overwrite, ranks=ranks, about=about)
    with contextlib.closing(upload):
        with WorkSharing("upload", job.fingerprint, destination=upload.folder, **sharing_options) as sharing:
            if sharing.leads:
                sharing.assemble()
                for text in upload.begin():
                    sharing.listener(Note(text))
            is_staged = sharing.finish(sharing.leads and upload.is_staged)
        if is_staged:
            stats = Stats()
            stats.bytes_kept = job.bytes_written
        else:
            staged = replace(plan, destination=upload.staged, options=replace(options, overwrite=False))
            stats = run_conversion(staged, typed=typed, **sharing_options)
        meeting = upload.folder / "upload"
        with WorkSharing(
            "upload", job.fingerprint, threads=FILES_AT_ONCE, destination=meeting, **sharing_options
        ) as sharing:
            upload.run(sharing)
            sharing.finish(None)
        if ranks.rank == 0:
            upload.tidy_up()
    return stats


def _prove(proof: Masters | TiedHead, sharing: WorkSharing) -> None:
    """Shares a proof among threads and ranks; all of them raise if it fails, for the others wait for what comes next."""
    sharing.listener(Phase(f"checking {proof.claim}"))
    sharing.listener(PlanReady("check", 0, proof.nbytes, proof.nbytes, 0))

    def make_worker() -> FunctionWorker:
        worker = proof.worker()

        def do(task: RoundingTask) -> bool:
            answer = worker.do(task)
            sharing.report(Moved(task.nbytes))
            return answer

        return FunctionWorker(do, worker.close)

    results = sharing.map(proof.tasks, make_worker)
    if sharing.leads:
        proof.judge(results)


def _extra_contents(content: ExtraFile, stats: Stats) -> bytes:
    if isinstance(content, bytes):
        return content
    return read_small(content) if isinstance(content, Path) else content(stats)


def _extra_bytes(files: Mapping[str, ExtraFile]) -> int:
    try:
        return sum(
            len(content) if isinstance(content, bytes) else (status(content) or _NOTHING).size
            for content in files.values()
            if not callable(content)
        )
    except OSError as error:
        raise FormatError(f"reading {printable(str(error.filename))} failed: {error.strerror or error}") from error


def _run_as_follower(plan: Conversion, sharing: WorkSharing, device: str) -> Stats:
    """What ranks other than 0 do."""
    sharing.broadcast(None)  # rank 0 has prepared the folder
    folder = beside(plan.destination, "partial")
    with contextlib.closing(Journal(folder / f"{JOURNAL}-{sharing.ranks.rank}", plan.job.fingerprint)) as journal:
        stats = Run(plan.job, plan.reader, folder, journal, sharing=sharing, device=device).run()
    sharing.finish(None)
    return stats


def _lack_of_room(destination: Path, needed: int) -> str:
    """How many bytes are needed and free, if the result does not fit on its disk; else empty."""
    with trouble_with(destination, "checking"):
        staged = beside(destination, "partial")
        free = free_bytes(staged.parent)
        staged_bytes = sum(f.stat().st_blocks * 512 for f in staged.rglob("*") if f.is_file()) if staged.is_dir() else 0
    return f"{needed:,} bytes are needed, {free:,} are free" if needed > free + staged_bytes else ""
