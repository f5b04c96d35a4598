"""Carrying out a job from beginning to end, in one process or on many ranks: room, staging, work, publication."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from converters.engine import run
from converters.errors import DestinationError, FormatError, IntegrityError
from converters.events import Note, Phase, PlanReady
from converters.names import printable
from converters.publish import Staging, beside, free_bytes, os_trouble
from converters.ranks import Ranks
from converters.team import Team, TeamStaging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from converters.engine import Stats
    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.job import Job

__all__ = ["execute"]


def execute(
    job: Job,
    reader: Reader,
    destination: Path,
    finish: Callable[[Staging], None],
    *,
    command: str,
    notes: Sequence[str] = (),
    extra_bytes: int = 0,
    overwrite: bool = False,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    ranks: Ranks | None = None,
) -> Stats:
    """Carries out a job; the destination appears complete, or not at all.

    Args:
        job: The work; planned alike on every rank.
        reader: The source.
        destination: Where the result shall appear; with several ranks, on a file system that all share.
        finish: Adds the small files, at the end; called on rank 0.
        command: The verb, as progress shows it.
        notes: Sentences a person should read.
        extra_bytes: What `finish` will add.
        overwrite: Replace an existing destination after success.
        listener: Told about progress, of all ranks, on rank 0.
        stop: Polled between tiles.
        ranks: The processes that do this together; by default this one alone.

    Raises:
        DistckptError: See `converters.engine.run`; also when the disk has not enough room, before anything is written.
            Every rank raises an error of the same exit code.
    """
    ranks = ranks or Ranks()
    tell = listener if listener is not None and ranks.rank == 0 else _ignore
    team = Team(ranks, destination, job.fingerprint, tell, stop) if ranks.world > 1 else None
    with team or contextlib.nullcontext():
        if team is not None and not team.leads:
            return _follow(job, reader, destination, stop, team)
        _need_room(destination, job.bytes_written + extra_bytes)
        tell(PlanReady(command, len(job.files), job.bytes_read, job.bytes_written, job.peak_memory))
        for text in notes:
            tell(Note(text))
        if team is not None:
            team.assemble()
        staging = Staging(
            destination, job.fingerprint, job.files, overwrite=overwrite, meeting=team.folder if team else None
        )
        try:
            stats = run(job, reader, staging, listener=tell, stop=stop, team=team)
            tell(Phase("publishing"))
            finish(staging)
            staging.publish()
        except (IntegrityError, FormatError) as error:
            if not isinstance(error.__cause__, OSError):  # no passing trouble with a disk: what was read of it is wrong
                if team is not None:
                    team.end(error)  # the others write into it until they know
                staging.discard()
            raise
        finally:
            staging.close()
    return stats


def _follow(job: Job, reader: Reader, destination: Path, stop: StopFlag | None, team: Team) -> Stats:
    """What ranks other than 0 do."""
    team.await_share()
    staging = TeamStaging(destination, job.fingerprint, team.ranks.rank)
    try:
        stats = run(job, reader, staging, stop=stop, team=team)
    finally:
        staging.close()
    team.await_end()
    return stats


def _ignore(event: object) -> None:
    pass


def _need_room(destination: Path, needed: int) -> None:
    try:
        staged = beside(destination, "partial")
        free = free_bytes(staged.parent)
        held = sum(f.stat().st_blocks * 512 for f in staged.rglob("*") if f.is_file()) if staged.is_dir() else 0
    except OSError as error:
        raise os_trouble(error, destination, "checking") from error
    if needed > free + held:
        raise DestinationError(
            f"not enough room for {printable(str(destination))}",
            details=[f"{needed:,} bytes are needed, {free:,} are free"],
            hint="free some space, or choose a directory on another disk",
        )
