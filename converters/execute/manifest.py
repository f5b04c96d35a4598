"""Lists of the files of a checkpoint with their SHA-256, as Megatron writes them, and ours where it does not.

    integrity.json              {"algorithm": "sha256", "files": {"__0_0.distcp": "9f86d0...", ...}}

Megatron-Core writes it with `--verify-integrity` (0.17.1 and later; rank 0, after everything else) and compares it when it
loads with that option. Folders that Megatron does not know get the same document under a name of ours.

Source: megatron/core/dist_checkpointing/validation.py (`save_integrity_manifest`), tags core_v0.17.1 to core_v0.19.0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from converters.errors import DestinationError, FormatError
from converters.execute.destination import hidden
from converters.execute.disk import raise_error, sync_folder, trouble_with, write_synced
from converters.formats.folder import is_folder, listing
from converters.formats.plain_json import read_json
from converters.names import printable
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Mapping

MEGATRON, OURS = "integrity.json", "distckpt-manifest.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that lies in a checkpoint.

    Attributes:
        name: Its file name.
        files: SHA-256 by path relative to the folder, as hexadecimal digits.
        trouble: Entries that cannot be compared, in words.
    """

    name: str
    files: Mapping[str, str]
    problems: tuple[str, ...] = ()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a folder, None if there is none. What it says is not believed: names must stay in the folder.

    Raises:
        FormatError: There is one, but it cannot be read.
    """
    names = listing(folder) if is_folder(folder) else []
    name = next((name for name in (MEGATRON, OURS) if name in names), None)
    if name is None:
        return None
    document = read_json(folder / name, _LIMIT)
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise FormatError(f"{name} does not list any files")
    algorithm = document.get("algorithm", "sha256")
    if algorithm != "sha256":
        raise FormatError(f"{name} has checksums of the kind {printable(str(algorithm))[:40]!r}, not sha256")
    digests_by_path, problems = dict[str, str](), list[str]()
    for path, digest in files.items():
        if not _stays_inside(path):
            problems.append(f"{name} names {printable(path)[:200]!r}, which is not a file of this folder")
        elif not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            problems.append(f"{name} has no SHA-256 for {printable(path)[:200]}")
        else:
            digests_by_path[path] = digest
    return Manifest(name, digests_by_path, tuple(problems))


def _stays_inside(path: str) -> bool:
    parts = path.split("/")
    return 0 < len(path) <= 4096 and "\0" not in path and not {"", ".", ".."}.intersection(parts)


def listed_files(folder: Path) -> dict[str, int]:
    """Sizes of all files that a manifest of a folder lists, by relative path: regular files, no manifest, no link."""
    out: dict[str, int] = {}
    unfinished = [hidden(Path(manifest), "partial").name for manifest in (MEGATRON, OURS)]
    for directory, folders, names in os.walk(folder, onerror=raise_error):
        folders.sort()
        for name in names:
            if name in unfinished:
                continue  # left by a run that was killed
            path = Path(directory) / name
            relative = str(PurePosixPath(path.relative_to(folder)))
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and relative not in (MEGATRON, OURS):
                out[relative] = status.st_size
    return {name: out[name] for name in sorted(out)}


def write_manifest(folder: Path, name: str, digests: Mapping[str, str]) -> Path:
    """Writes a manifest, complete or not at all; the same bytes as Megatron writes for these files.

    Args:
        folder: The checkpoint.
        name: `MEGATRON` or `OURS`.
        digests: SHA-256 by relative path.

    Raises:
        DestinationError: It cannot be written.
    """
    if isinstance(folder, RemotePath):
        raise DestinationError("a manifest is not written into an object store", hint="write it before the upload")
    data = json.dumps({"algorithm": "sha256", "files": dict(sorted(digests.items()))}, indent=2).encode()
    path = folder / name
    temporary = hidden(path, "partial")
    with trouble_with(path, "writing"):
        try:
            temporary.unlink(missing_ok=True)  # left by a run that was killed
            write_synced(temporary, data)
            temporary.replace(path)
            sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    return path
