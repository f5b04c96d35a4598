"""From the path a person typed to the folder that holds the checkpoint's data.

People give the training root, an iteration, a file inside it, NeMo's outer folder. All of them lead to one folder, and a
path that leads nowhere is answered with what is there instead.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import FormatError, UnfinishedError, UnsupportedError, UsageError
from converters.formats.folder import exists, is_file, is_folder, listing, read_small, scan, status
from converters.formats.links import enclose
from converters.formats.registry import Candidate, detect
from converters.names import listed, printable, quoted
from converters.remote.address import NO_LISTING, RemotePath, is_bucket, named_path

if TYPE_CHECKING:
    from converters.formats.folder import Entry

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"iter_(\d{7,})|release")
"""Names of Megatron's iteration folders."""
_ALONE = {"safetensors", "torch"}  # formats whose checkpoint may be one file
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".nemo", ".tar")
_LOOKED_AT = 1000
_PART = re.compile(r"model\.safetensors|pytorch_model\.bin|.*-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_OF_A_RANK = re.compile(r"mp_rank_\d+|tp_rank_\d+_pp_rank_\d+")
_PARTS_FILE = "model_weights.ckpt"
DATA_FOLDERS = ("weights", "model_weights")
"""Where NeMo 2 and NeMo 1 keep the data inside of their own folder."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def iterations(root: Path) -> list[str]:
    """Names of the iteration folders in a training root, oldest first."""
    with scan(root) as entries:
        names = [entry.name for entry in entries if ITERATION.fullmatch(entry.name) and _is_dir(entry)]
    return sorted(names, key=lambda name: (name == "release", len(name), name))


def resolve(path: str | Path, *, follow_links: bool = False) -> Path:
    """The folder with the checkpoint's data that `path` means, or the file if it is a checkpoint of its own.

    Args:
        path: A data folder, a training root with its tracker file, an iteration, NeMo's outer folder, or a file inside;
            a tar file is a folder.
        follow_links: Links in it may lead out of it.

    Raises:
        UsageError: The path is empty.
        FormatError: Nothing there, or more than one checkpoint and no tracker file to choose.
    """
    if not str(path):
        raise UsageError("no checkpoint was named: the path is empty", hint="is a shell variable unset?")
    named = named_path(path)
    if named.name in ("", ".."):  # the folder's own name tells frameworks apart: "weights", "model_weights"
        named = named.absolute() if not named.name else named.resolve()
    try:
        enclose(named, follow_links=follow_links)
        state = status(named)
    except OSError as error:
        raise FormatError(f"cannot read {printable(str(named))}: {error.strerror}") from error
    if state is None:
        raise missing(named)
    if not (state.folder or state.file):
        raise FormatError(f"{printable(str(named))} is neither a file nor a folder")
    rank = named if state.folder else named.parent
    if state.folder:
        _refuse_closed(named)
    _refuse_parts(rank)
    if rank.name.startswith("mp_rank_") and _is_data_folder(rank.parent):  # Megatron-LM: a folder for each rank
        return rank.parent
    if not is_folder(named):
        if _is_data_folder(named.parent) and not _stands_alone(named):
            _refuse_unfinished(named.parent)
            return named.parent
        if detect(named):
            return named
        _refuse_compressed(named)
        hint = f"distckpt inspect {quoted(named.parent)}" if named.name == TRACKER else None
        raise FormatError(
            f"{printable(str(named))} is {'not a checkpoint' if state.size else 'empty (0 bytes)'}", hint=hint
        )
    try:
        if state.file and len(inner := listing(named)) == 1 and is_folder(named / inner[0]):  # tar -cf it.tar folder
            named = named / inner[0]
        return _descend(named)
    except PermissionError as error:
        raise FormatError(f"cannot read {printable(str(error.filename))}: {error.strerror}") from error


def _stands_alone(file: Path) -> bool:
    """Whether a file is a checkpoint of its own although other files of such a format lie beside it."""
    file_format, folder_format = detect(file), detect(file.parent)
    if file_format is None or folder_format is None or not {file_format.name, folder_format.name} <= _ALONE:
        return False
    return file_format is not folder_format or not _PART.fullmatch(file.name)


def _refuse_parts(folder: Path) -> None:
    """NeMo 1 before its distributed checkpoints: one of these files alone would look like a small, whole model."""
    names = [f"{name}/{_PARTS_FILE}" for name in _names(folder) if _OF_A_RANK.fullmatch(name)]
    names += [_PARTS_FILE] if _OF_A_RANK.fullmatch(folder.name) else []
    shard_name = next((name for name in names if exists(folder / name)), None)
    if shard_name is not None:
        raise UnsupportedError(
            f"{printable(str(folder / shard_name))} is the part of one rank of a NeMo 1 model; that form is not read",
            hint="make one partition of it with NeMo 1 (megatron_change_num_partitions.py, to TP 1 and PP 1)",
        )


def _descend(folder: Path) -> Path:
    _refuse_unfinished(folder)
    _refuse_parts(folder)
    if _is_data_folder(folder):
        return folder
    if is_file(folder / TRACKER):
        return _by_tracker(folder)
    for name in DATA_FOLDERS:
        if _is_data_folder(folder / name):
            return folder / name
    if folder.name == "context" and _is_data_folder(folder.parent / "weights"):  # inside a NeMo 2 checkpoint
        return folder.parent / "weights"
    names = iterations(folder)
    if len(names) > 1:
        raise FormatError(
            f"{printable(str(folder))} holds {len(names)} iterations and no {TRACKER}",
            details=[f"from {names[0]} to {names[-1]}"],
            hint=f"name one: {quoted(folder / names[-1])}",
        )
    candidates = [folder / name for name in names] or _folders(folder)
    checkpoints, closed = list[Path](), list[Path]()
    for inner in candidates:
        try:
            inside = (inner / name for name in DATA_FOLDERS)
            if _is_data_folder(inner) or is_file(inner / TRACKER) or any(map(_is_data_folder, inside)):
                checkpoints.append(inner)
        except FormatError:  # one, but broken: opening it says how
            checkpoints.append(inner)
        except OSError:
            closed.append(inner)
    if len(checkpoints) == 1:
        return _descend(checkpoints[0])
    if names:
        _refuse_closed(folder / names[0])
        return folder / names[0]
    files = [] if checkpoints else single_files(folder)
    if len(files) == 1:  # nothing but model.pt
        return _descend(files[0]) if is_folder(files[0]) else files[0]
    if len(closed) == len(candidates) == 1 and not files:
        _refuse_closed(closed[0])
    raise _unknown(folder, checkpoints or files)


def single_files(folder: Path) -> list[Path]:
    """Files that are checkpoints of their own: `model.pt`, `model.nemo`."""
    inside, out = listing(folder), []
    for name in inside[:_LOOKED_AT]:
        if len(inside) == 1 or name.endswith(_FILES):
            with contextlib.suppress(OSError, FormatError):  # what is broken is said when it is named
                path = folder / name
                if is_file(path) and (_is_data_folder(path) or detect(path)):
                    out.append(path)
    return out


def _names(folder: Path) -> list[str]:
    try:
        return listing(folder)
    except OSError:  # a file in it may be read all the same
        return []


def _refuse_closed(folder: Path) -> None:
    """A folder that may not be listed or entered is said to be that, not what was looked for in it."""
    try:
        for name in listing(folder)[:1]:
            (folder / name).lstat()
    except PermissionError as error:
        raise FormatError(f"{printable(str(folder))} cannot be read: {error.strerror}") from error
    except OSError:  # a tar file, or said by who reads it
        return


def _is_data_folder(folder: Path) -> bool:
    """Whether a checkpoint's data begins here, be it in a format that we do not know or with files missing."""
    if not is_folder(folder):
        return False
    return detect(folder) is not None or any(exists(folder / name) for name in ("metadata.json", "common.pt"))


def _folders(folder: Path) -> list[Path]:
    with scan(folder) as entries:
        return sorted(folder / entry.name for entry in entries if _is_dir(entry))


def _is_dir(entry: Entry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links that lead in a circle
        return False


def _by_tracker(root: Path) -> Path:
    text = read_small(root / TRACKER, 4096).decode("ascii", "replace").strip()
    names = iterations(root)
    if text == "release":
        candidates = [root / "release"]
    elif text.isdigit():
        candidates = [root / f"iter_{int(text):07d}", root / f"global_step_{int(text)}"]  # the latter of ByteCheckpoint
    else:
        candidates = []
    folder = next((candidate for candidate in candidates if is_folder(candidate)), None)
    if folder is None:
        wrong = f"says {printable(text)!r}, which is neither a number nor 'release'"
        if candidates:
            wrong = f"names iteration {text}, but there is no {candidates[0].name}"
        raise FormatError(
            f"{TRACKER} {wrong}",
            details=[f"iterations present: {', '.join(names[-5:]) or 'none'}"],
            hint=f"name the iteration: {quoted(root / names[-1])}" if names else None,
        )
    return folder


def _refuse_unfinished(folder: Path) -> None:
    # NeMo puts NAME-unfinished beside a checkpoint while it is being written (lightning/pytorch/callbacks)
    for outer in (folder, folder.parent) if folder.name in DATA_FOLDERS else (folder,):
        alone = outer.name in ("", "..") or is_bucket(outer)
        marker = None if alone else outer.with_name(f"{outer.name}-unfinished")
        uploading = outer.with_name(f".{outer.name}.distckpt-upload") if isinstance(outer, RemotePath) else None
        if marker is not None and uploading is not None and _is_uploading(uploading):
            raise UnfinishedError(
                f"{printable(outer.name)} is unfinished: distckpt's mark {printable(uploading.name)} still lies beside it",
                hint="wait until the upload is complete, or run the command that began it again",
            )
        if marker is not None and exists(marker):
            raise UnfinishedError(
                f"{printable(outer.name)} is unfinished: NeMo's marker {printable(marker.name)} still lies beside it",
                hint="wait until the save is complete, or use an earlier checkpoint",
            )


def _is_uploading(mark: Path) -> bool:
    return exists(mark) and b'"uploading": true' in read_small(mark, 4096)


def _refuse_compressed(path: Path) -> None:
    head = Candidate(path).head
    method = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if method is not None:
        raise UnsupportedError(
            f"{printable(str(path))} is compressed with {method}, so nothing in it can be found without unpacking all of it",
            hint=f"mkdir unpacked && tar -xf {quoted(path)} -C unpacked && distckpt inspect unpacked",
        )


def missing(path: Path) -> FormatError:
    """The error for a path at which nothing is; it names what was most likely meant."""
    if not isinstance(path, RemotePath) and path.is_symlink():
        return FormatError(f"{printable(str(path))} is a dangling symbolic link, to {printable(str(path.readlink()))}")
    parent = path.parent
    near: list[str] = []
    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(path.name, listing(parent), n=1)
    hint = None
    if path.parts[:1] in (("http:",), ("https:",)):
        hint = NO_LISTING
    elif near:
        hint = f"did you mean {quoted(parent / near[0])}?"
    elif len(path.parts) == 2 and not path.is_absolute() and not exists(parent):  # meta-llama/Llama-3.1-8B
        hint = f"a model of the Hugging Face hub is hf://{printable(path.as_posix())}"
    return FormatError(f"{printable(str(path))} does not exist", hint=hint)


def _unknown(folder: Path, checkpoints: list[Path]) -> FormatError:
    names = listing(folder)
    if not names:
        return FormatError(f"{printable(str(folder))} is empty")
    if checkpoints:
        return FormatError(
            f"{printable(str(folder))} holds {len(checkpoints)} checkpoints", hint=f"name one: {quoted(checkpoints[0])}"
        )
    return FormatError(
        f"{printable(str(folder))} is not a checkpoint that distckpt knows",
        details=[
            f"found: {listed(names, 6)}",
            f"looked for: .metadata, metadata.json, {TRACKER}, iter_*, weights/, model.safetensors, pytorch_model.bin",
        ],
        hint="give the training root, an iter_* folder, or NeMo's checkpoint folder",
    )
