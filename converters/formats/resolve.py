"""From the path a person typed to the folder that holds the checkpoint's data.

People give the training root, an iteration, a file inside it, NeMo's outer folder. All of them lead to one folder, and a
path that leads nowhere is answered with what is there instead.
"""

from __future__ import annotations

import difflib
import re
import stat
from pathlib import Path

from converters.errors import FormatError
from converters.formats.folder import read_small
from converters.formats.registry import detect
from converters.names import printable

__all__ = ["TRACKER", "iterations", "resolve"]

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})|release")
_DATA_FOLDERS = ("weights", "model_weights")  # NeMo 2, NeMo 1


def iterations(root: Path) -> list[str]:
    """Names of the iteration folders in a training root, oldest first."""
    found = [path.name for path in root.iterdir() if _ITERATION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda name: (name == "release", len(name), name))


def resolve(path: str | Path) -> Path:
    """The folder with the checkpoint's data that `path` means, or the file if it is a checkpoint of its own.

    Args:
        path: A data folder, a training root with its tracker file, an iteration, NeMo's outer folder, or a file inside.

    Raises:
        FormatError: Nothing there, or more than one checkpoint and no tracker file to choose.
    """
    if not str(path):
        raise FormatError("no checkpoint was named: the path is empty", hint="is a shell variable unset?")
    given = Path(path).expanduser()
    if given.name in ("", ".."):  # the folder's own name tells frameworks apart: "weights", "model_weights"
        given = given.absolute() if not given.name else given.resolve()
    try:
        mode = given.stat().st_mode
    except FileNotFoundError:
        raise _nowhere(given) from None
    except OSError as error:
        raise FormatError(f"cannot read {printable(str(given))}: {error.strerror}") from error
    rank = given if stat.S_ISDIR(mode) else given.parent
    if rank.name.startswith("mp_rank_") and _is_data_folder(rank.parent):  # Megatron-LM: a folder for each rank
        return rank.parent
    if not stat.S_ISDIR(mode):
        if _is_data_folder(given.parent):
            _refuse_unfinished(given.parent)
            return given.parent
        if detect(given):
            return given
        raise FormatError(
            f"{printable(str(given))} is a file, not a checkpoint folder",
            hint=f"distckpt inspect {printable(str(given.parent))}",
        )
    try:
        return _descend(given)
    except PermissionError as error:
        raise FormatError(f"cannot read {printable(str(error.filename))}: {error.strerror}") from error


def _descend(folder: Path) -> Path:
    _refuse_unfinished(folder)
    if _is_data_folder(folder):
        return folder
    if (folder / TRACKER).is_file():
        return _by_tracker(folder)
    for name in _DATA_FOLDERS:
        if _is_data_folder(folder / name):
            return folder / name
    if folder.name == "context" and _is_data_folder(folder.parent / "weights"):  # inside a NeMo 2 checkpoint
        return folder.parent / "weights"
    names = iterations(folder)
    if len(names) > 1:
        raise FormatError(
            f"{printable(str(folder))} holds {len(names)} iterations and no {TRACKER}",
            details=[f"from {names[0]} to {names[-1]}"],
            hint=f"name one: {printable(str(folder / names[-1]))}",
        )
    candidates = [folder / name for name in names] or [path for path in sorted(folder.iterdir()) if path.is_dir()]
    found = [
        inner
        for inner in candidates
        if _is_data_folder(inner) or any(_is_data_folder(inner / d) for d in _DATA_FOLDERS)
    ]
    if len(found) == 1:
        return _descend(found[0])
    if names:
        return folder / names[0]
    raise _unknown(folder, found)


def _is_data_folder(folder: Path) -> bool:
    """Whether a checkpoint's data begins here, be it in a format that we do not know or with files missing."""
    if not folder.is_dir():
        return False
    return detect(folder) is not None or any((folder / name).exists() for name in ("metadata.json", "common.pt"))


def _by_tracker(root: Path) -> Path:
    text = read_small(root / TRACKER, 4096).decode("ascii", "replace").strip()
    names = iterations(root)
    if text != "release" and not text.isdigit():
        raise FormatError(
            f"{TRACKER} says {printable(text)!r}, which is neither a number nor 'release'",
            details=[f"iterations present: {', '.join(names[-5:]) or 'none'}"],
            hint=f"name the iteration: {printable(str(root / names[-1]))}" if names else None,
        )
    folder = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise FormatError(
            f"{TRACKER} names iteration {text}, but there is no {folder.name}",
            details=[f"iterations present: {', '.join(names[-5:]) or 'none'}"],
            hint=f"name the iteration: {printable(str(root / names[-1]))}" if names else None,
        )
    return folder


def _refuse_unfinished(folder: Path) -> None:
    # NeMo puts NAME-unfinished beside a checkpoint while it is being written (lightning/pytorch/callbacks)
    for outer in (folder, folder.parent) if folder.name in _DATA_FOLDERS else (folder,):
        marker = outer.with_name(f"{outer.name}-unfinished") if outer.name not in ("", "..") else None
        if marker is not None and marker.exists():
            raise FormatError(
                f"{printable(outer.name)} is unfinished: NeMo's marker {printable(marker.name)} still lies beside it",
                hint="wait until the save is complete, or use an earlier checkpoint",
            )


def _nowhere(path: Path) -> FormatError:
    parent = path.parent
    near: list[str] = []
    if parent.is_dir():
        try:
            near = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
        except OSError:
            near = []
    hint = f"did you mean {printable(str(parent / near[0]))}?" if near else None
    return FormatError(f"{printable(str(path))} does not exist", hint=hint)


def _unknown(folder: Path, found: list[Path]) -> FormatError:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return FormatError(f"{printable(str(folder))} is empty")
    if found:
        return FormatError(
            f"{printable(str(folder))} holds {len(found)} checkpoints",
            hint=f"name one: {printable(str(found[0]))}",
        )
    shown = ", ".join(printable(name) for name in names[:6]) + (", ..." if len(names) > 6 else "")
    return FormatError(
        f"{printable(str(folder))} is not a checkpoint that distckpt knows",
        details=[f"found: {shown}", f"looked for: .metadata, metadata.json, {TRACKER}, iter_*, weights/"],
        hint="give the training root, an iter_* folder, or NeMo's checkpoint folder",
    )
