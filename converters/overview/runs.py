"""Every checkpoint below a folder, with a cheap answer to "is it complete?".

    unfinished = [summary.path for summary in survey("runs") if summary.status == "incomplete"]

A training root counts as its iterations. Only names, sizes and metadata are read, never tensor data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import (
    DamagedFileError,
    DistckptError,
    FormatError,
    RequestError,
    UnfinishedError,
    UnsupportedError,
)
from converters.formats import open_checkpoint
from converters.formats.folder import exists, is_file, is_folder, read_small, scan, walk
from converters.formats.links import enclose
from converters.formats.registry import detect
from converters.formats.resolve import DATA_FOLDERS, ITERATION, TRACKER, iterations, missing, single_files
from converters.megatron.identity import SavedLayout, identify
from converters.models import infer, of_config
from converters.names import natural_key
from converters.remote.address import named_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.megatron.identity import Identity

_DEEPEST = 8
_GLOBAL_STEP = re.compile(r"global_step_\d+")  # ByteCheckpoint's iterations


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint in one row.

    Attributes:
        path: As it is named to the other commands.
        status: "complete": nothing that the metadata needs is missing; "incomplete": the save is unfinished, or files are
            missing or short; "unreadable": it cannot be opened.
        reason: Why it is not complete, one sentence; empty if it is.
        format: Name of the storage format; None if unreadable.
        framework: Who wrote it: "Megatron-LM", "NeMo 2", ...
        model: Architecture, where one is recognised.
        parameters: Elements of all weights without vocabulary padding.
        dtype: Element type that most bytes of the weights have, short: "bf16".
        iteration: Training iteration.
        layout: Of the job that saved it.
        optimizer: Name of the optimizer's layout, "none" without one.
        nbytes: Bytes of its files.
        modified: When its folder last changed, in seconds since 1970; None if that is not known.
        latest: The run's tracker file names it.
    """

    path: Path
    status: str
    reason: str = ""
    format: str | None = None
    framework: str | None = None
    model: str | None = None
    parameters: int | None = None
    dtype: str | None = None
    iteration: int | None = None
    layout: SavedLayout | None = None
    optimizer: str | None = None
    nbytes: int | None = None
    modified: float | None = None
    latest: bool = False


def survey(*paths: str | Path, follow_links: bool = False) -> Iterator[CheckpointSummary]:
    """Every checkpoint at and below the paths, in the order of their names; a checkpoint that two paths reach comes once.

    Args:
        paths: Folders to search.
        follow_links: Files of a checkpoint may be links out of its folder.

    Raises:
        FormatError: A path does not exist, or may not be read.
    """
    listed_paths: set[Path] = set()
    for path in paths:
        start = named_path(path)
        try:
            if not start.is_symlink() and not exists(start):
                raise missing(start)
        except OSError as error:
            raise FormatError(f"cannot read {start}: {error.strerror or error}") from error
        for checkpoint in checkpoints_below(start):
            real = checkpoint.resolve()
            if real not in listed_paths:
                listed_paths.add(real)
                yield summarize(checkpoint, follow_links=follow_links)


def checkpoints_below(root: Path, depth: int = 0) -> Iterator[Path]:
    """The checkpoints at or below a folder: iterations of a run, folders of a framework, files that are one of their own.

    Hidden folders and links to folders are not entered; neither is anything below a checkpoint.

    Raises:
        FormatError: The folder itself may not be listed; one below it that may not be is passed over.
    """
    if depth == 0:
        enclose(root)  # what is only looked for follows no link out of the folder, either
    if _is_checkpoint(root) or any(_is_checkpoint(root / name) for name in DATA_FOLDERS):
        yield root
        return
    if not is_folder(root):
        return
    try:
        with scan(root) as entries:
            folders = sorted(
                (
                    e.name
                    for e in entries
                    if not e.name.startswith(".") and e.is_dir() and not (root / e.name).is_symlink()
                ),
                key=natural_key,
            )
        names = iterations(root)
    except OSError as error:
        if depth == 0:
            raise FormatError(f"{root} cannot be listed: {error.strerror or error}") from error
        return
    names += [name for name in folders if _GLOBAL_STEP.fullmatch(name)]
    yield from (root / name for name in names)
    if not names:  # beside iterations lie a framework's own small files
        yield from single_files(root)
    if depth < _DEEPEST:
        for name in folders:
            if name not in names:
                yield from checkpoints_below(root / name, depth + 1)


def _is_checkpoint(path: Path) -> bool:
    """Whether a format claims a path, also one with files missing."""
    try:
        return detect(path) is not None
    except DistckptError:  # one, but damaged: opening it says how
        return True
    except OSError:
        return False


def summarize(path: Path, *, follow_links: bool = False) -> CheckpointSummary:
    """The row of a checkpoint, from names, sizes and metadata; never fails."""
    modified, latest = _modification_time(path), _is_tracked(path)
    try:
        catalog = open_checkpoint(path, follow_links=follow_links).catalog
    except (UnfinishedError, DamagedFileError) as error:
        return CheckpointSummary(path, "incomplete", error.message, modified=modified, latest=latest)
    except DistckptError as error:
        unsaved = (
            ITERATION.fullmatch(path.name) and not isinstance(error, UnsupportedError) and not _is_checkpoint(path)
        )
        status = "incomplete" if unsaved else "unreadable"
        return CheckpointSummary(path, status, error.message, modified=modified, latest=latest)
    identity = identify(catalog)
    errors = [problem.message for problem in catalog.problems if problem.severity == "error"]
    further = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return CheckpointSummary(
        path,
        "incomplete" if errors else "complete",
        errors[0] + further if errors else "",
        catalog.format,
        catalog.framework,
        _architecture_name(catalog, identity),
        identity.parameters,
        next(iter(identity.dtypes), None),
        catalog.iteration,
        identity.layout if catalog.megatron else None,
        identity.optimizer.name,
        identity.disk_bytes,
        modified,
        latest,
    )


def _architecture_name(catalog: Catalog, identity: Identity) -> str | None:
    named = catalog.config.get("model_type") if not catalog.megatron else None
    if isinstance(named, str):
        model = of_config(catalog.config)
        return model.name if model else named
    if identity.kind.name:
        return identity.kind.name
    try:
        return infer(identity.model, catalog).name
    except RequestError:
        return "hybrid" if identity.model.layer_kinds else None


def _modification_time(path: Path) -> float | None:
    """When a checkpoint changed; None if nothing says so.

    A folder of an object store has no time of its own: its newest file's counts. The hub tells no times at all.
    """
    try:
        seconds = path.stat().st_mtime
        if not seconds and is_folder(path):
            seconds = max((file.mtime_ns // 10**9 for _, file in walk(path)), default=0)
    except (OSError, DistckptError):
        return None
    return seconds or None


def _is_tracked(path: Path) -> bool:
    """Whether the tracker file of the run names this iteration."""
    tracker = path.parent / TRACKER
    try:
        text = read_small(tracker, 4096).decode("ascii", "replace").strip() if is_file(tracker) else ""
    except (OSError, FormatError):
        return False
    return path.name == (f"iter_{int(text):07d}" if text.isdigit() else text) if text else False
