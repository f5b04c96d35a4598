"""Where a result may be written: what must not be there, what --overwrite deletes, and how much room there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from converters.errors import DestinationError
from converters.execute.disk import trouble_with
from converters.formats.folder import refresh
from converters.names import listed, printable, quoted
from converters.remote.address import RemotePath, is_bucket
from converters.remote.writing import WRITABLE

P = TypeVar("P", bound=Path)


def check_destination(
    source: Path, destination: Path, *, overwrite: bool = False, file: bool = False, push: bool = False
) -> None:
    """Checks that a destination may be written, before any work is done.

    Args:
        source: The outermost folder, or the file, of the source.
        destination: What shall be written.
        overwrite: It may be replaced.
        file: It is to be a file, not a folder.
        push: It may be, and has to be, a repository of the hub.

    Raises:
        DestinationError: It is (in) the source or around it, exists and is not empty, or cannot be created.
    """
    on_hub = destination.parts[:1] == ("hf:",)
    if push != on_hub:
        shown = printable(str(destination))
        if push:
            raise DestinationError(f"{shown} is not on the hub", hint="--push goes with hf://org/name")
        way = "export-hf SRC hf://org/name --push writes there; or write to a disk, then: hf upload org/name FOLDER"
        raise DestinationError(f"{shown} can only be read", hint=way)
    with trouble_with(destination, "checking"):  # a folder on the way may not be searched, a name is too long
        if isinstance(destination, RemotePath):
            _check_store(source, destination, overwrite, file)
        else:
            _check_destination(source, destination, overwrite, file)


def _check_destination(source: Path, destination: Path, overwrite: bool, file: bool) -> None:
    real, shown = resolved(destination), printable(str(destination))
    _refuse_overlap(source, real, shown)
    if destination.is_symlink() and not destination.exists():
        raise DestinationError(f"{shown} is a dangling symbolic link")
    if destination.exists():
        if real.is_mount():
            raise DestinationError(
                f"{shown} is a mount point, which nothing can be renamed onto", hint=f"use a folder in it: {shown}/NAME"
            )
        if file:
            _check_file(destination, overwrite)
        elif not destination.is_dir():
            raise DestinationError(f"{shown} exists and is not a directory", hint="choose another name")
        elif not is_empty(destination):
            message = f"{shown} already exists and is not empty"
            _refuse_existing(message, overwrite, _why_not_replaced(destination), "directory")
        if real == (cwd := Path.cwd()) or real in cwd.parents:
            verb = "is" if real == cwd else "contains"
            raise DestinationError(
                f"{shown} {verb} the working directory, and a new directory would take its place",
                hint=f"name one in it: {shown}/NAME",
            )
    ancestor = next((folder for folder in (real.parent, *real.parents) if folder.exists()), Path("/"))
    if not ancestor.is_dir():
        raise DestinationError(f"{printable(str(ancestor))} is not a directory")
    if ancestor not in (real.parent, real.parent.parent):  # such as where a disk is not mounted
        raise DestinationError(
            f"{printable(str(real.parent))} does not exist, nor does the directory above it",
            details=[f"there is {printable(str(ancestor))}"],
            hint=f"to create it: mkdir -p {quoted(real.parent)}",
        )
    if os.statvfs(ancestor).f_flag & os.ST_RDONLY:
        raise DestinationError(f"{printable(str(ancestor))} is on a read-only file system")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise DestinationError(f"no permission to write in {printable(str(ancestor))}")


def _refuse_overlap(source: Path, real: Path, shown: str) -> None:
    real_source = source.resolve()
    if real == real_source or real_source in real.parents or real in real_source.parents:
        relation = "the source itself" if real == real_source else "inside the source"
        relation = "a folder that contains the source" if real in real_source.parents else relation
        raise DestinationError(
            f"{shown} is {relation}", details=[f"source: {printable(str(source))}"], hint="choose another directory"
        )


def _check_store(source: Path, destination: RemotePath, overwrite: bool, file: bool) -> None:
    shown, scheme = printable(str(destination)), destination.parts[0][:-1]
    if scheme == "hf":  # whether it is empty is asked with the right to write
        if not is_bucket(destination):
            raise DestinationError(f"{shown} is a folder in a repository", hint="name the repository: hf://org/name")
        _refuse_overlap(source, destination, shown)
        return
    if scheme not in WRITABLE:
        raise DestinationError(f"{shown} can only be read", hint="write to s3://, gs:// or az://")
    if is_bucket(destination):
        raise DestinationError(f"{shown} is a whole bucket", hint=f"name a folder in it: {shown}/NAME")
    _refuse_overlap(source, destination, shown)
    refresh(destination.parent)
    if not destination.exists() or hidden(destination, "upload").exists():
        return  # the upload itself says whether it continues what lies there
    if destination.is_file() != file:
        kind = (
            "an object, and the result is a folder" if destination.is_file() else "a folder, and the result is one file"
        )
        raise DestinationError(f"{shown} is {kind}", hint="choose another name")
    refusal = None if file else _why_not_replaced(destination)
    _refuse_existing(f"{shown} already exists", overwrite, refusal)


def replaced(destination: Path) -> str | None:
    """What --overwrite would delete, as a sentence; None if there is nothing.

    Raises:
        DestinationError: It cannot be looked at.
    """
    if destination.parts[:1] == ("hf:",):
        return f"one commit replaces the model in {printable(str(destination))}; the repository's history keeps it"
    with trouble_with(destination, "checking"):
        if not destination.is_dir():
            return f"{printable(str(destination))} is replaced after success" if destination.exists() else None
        names = sorted(entry.name for entry in destination.iterdir())
    when = "when the result is complete and uploaded" if isinstance(destination, RemotePath) else "after success"
    sentence = f"{printable(str(destination))} is replaced {when}, with all in it"
    return f"{sentence}: {listed(names, 6)}" if names else None


def _check_file(destination: Path, overwrite: bool) -> None:
    """Checks that what exists in the place of a file may be replaced by one."""
    shown = printable(str(destination))
    if destination.is_dir():
        raise DestinationError(f"{shown} is a directory, and the result is one file", hint=f"name it: {shown}/model.pt")
    refusal = None
    if not destination.is_file() or not _is_archive(destination):
        refusal = DestinationError(
            f"{shown} is not a file that torch.save wrote: --overwrite does not delete it", hint="choose another name"
        )
    _refuse_existing(f"{shown} already exists", overwrite, refusal)


def _why_not_replaced(folder: Path) -> DestinationError | None:
    """Why --overwrite would not delete what is in a folder."""
    shown, names = printable(str(folder)), sorted(entry.name for entry in folder.iterdir())
    several = [name for name in names if name.startswith("iter_")]
    if not _is_ours(folder):
        message = f"{shown} does not look like a checkpoint or a model: --overwrite does not delete it"
    elif len(several) > 1:
        message = f"{shown} is a training run with {len(several)} iterations: --overwrite does not delete them all"
        names = several
    else:
        return None
    holds = f"it holds {', '.join(printable(name) for name in names[:4])}"
    return DestinationError(message, details=[holds], hint="choose another directory")


def _refuse_existing(message: str, overwrite: bool, refusal: DestinationError | None, kind: str = "name") -> None:
    """Refuses what exists where a result should be, but for what --overwrite may replace.

    Args:
        message: What exists.
        refusal: Why --overwrite would not delete it; None if it would.
        kind: What to choose another of.
    """
    if not overwrite:
        way = "" if refusal else ", or add --overwrite to replace it after success"
        raise DestinationError(message, hint=f"choose another {kind}{way}")
    if refusal is not None:
        raise refusal


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) in (b"", b"PK\x03\x04")


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder."""
    with os.scandir(folder) as entries:
        return next(entries, None) is None


def is_full(folder: Path) -> bool:
    """Whether there is a folder with something in it."""
    return folder.is_dir() and not is_empty(folder)


def resolved(path: Path) -> Path:
    """The path without links on the way; its last part need not exist.

    Raises:
        DestinationError: It cannot be looked at.
    """
    with trouble_with(path, "checking"):
        return path.parent.resolve() / path.name if not path.exists() else path.resolve()


def hidden(path: P, suffix: str) -> P:
    """A name that nobody sees, of what belongs to a path and lies beside it."""
    return path.with_name(f".{path.name}.distckpt-{suffix}")


def beside(destination: Path, suffix: str) -> Path:
    """The hidden folder beside a destination that holds what is not the result yet."""
    return hidden(resolved(destination), suffix)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds what a checkpoint or a model folder holds, so that replacing it is what was meant."""
    marks = {"distckpt-report.json", "latest_checkpointed_iteration.txt", "config.json", ".metadata", "metadata.json"}
    return any(path.name in marks or path.name.endswith(".safetensors") for path in folder.iterdir())


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write on the file system that will hold `path`.

    Raises:
        DestinationError: It cannot be looked at.
    """
    with trouble_with(path, "checking"):
        folder = path.resolve()
        while not folder.exists():
            folder = folder.parent
        status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
