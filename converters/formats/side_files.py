"""What lies in a checkpoint's folder beside its tensors: recognised by the names that trainers give it.

| path in an iteration | who writes it |
|---|---|
| `tokenizer/` | Megatron-LM after core 0.19 (`save_tokenizer_assets`), Megatron-Bridge |
| `modelopt_state/` | ModelOpt: a folder of distributed checkpointing of its own, the same for every layout |
| `hf/` | Megatron-Bridge: the weights as a Hugging Face folder |
| `train_dataloader_dprank000.pt`, `energon/`, `dataloader_state/` | the data loader of each data-parallel rank |
| `non_persistent/`, `iter_*_local*` | NVRx: local checkpoints of single ranks |
| `integrity.json`, `distckpt-manifest.json` | lists of the files |

Sources: Megatron-LM megatron/training/checkpointing.py (save_tokenizer_assets, save_dataloader_state) of 2026-08,
megatron/core/post_training/modelopt/checkpointing.py; Megatron-Bridge training/checkpointing.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import FormatError
from converters.formats.folder import entry_status, is_folder, scan, walk
from converters.formats.source_file import read_failure
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import Catalog
    from converters.formats.folder import Entry, Status

_MOST_FILES = 10_000
_KINDS = (
    ("tokenizer", re.compile(r"tokenizer/.*", re.DOTALL)),
    ("modelopt", re.compile(r"modelopt_state/.*", re.DOTALL)),
    ("hf", re.compile(r"hf/.*", re.DOTALL)),
    ("dataloader", re.compile(r"(.*/)?train_dataloader_dprank\d+\.pt|(energon|dataloader_state)/.*", re.DOTALL)),
    ("local", re.compile(r"(non_persistent|iter_\d+_local[^/]*)/.*", re.DOTALL)),
    ("manifest", re.compile(r"integrity\.json|distckpt-manifest\.json|distckpt-report\.json")),
    ("report", re.compile(r"distckpt\.json")),
    ("temporary", re.compile(r".*\.(tmp|partial)", re.DOTALL)),
    ("configuration", re.compile(r"run_config\.yaml|train_state\.pt|model_config\.yaml|config\.json")),
    ("unreferenced", re.compile(r".*\.distcp", re.DOTALL)),
)


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file beside the tensors.

    Attributes:
        name: Path in the checkpoint's folder.
        kind: "tokenizer", "modelopt", "hf", "dataloader", "local", "manifest", "report" (distckpt's own), "temporary",
            "configuration", "unreferenced" (data that belongs to no record), "special" (a link, a device), or "unknown".
        size: Bytes.
        mtime_ns: Time of its last change.
    """

    name: str
    kind: str
    size: int
    mtime_ns: int


def side_files(catalog: Catalog) -> list[SideFile]:
    """The files in a checkpoint's folder that its reader does not read, in order. No link to a folder is followed.

    Raises:
        FormatError: There are too many, or a folder cannot be listed.
    """
    folder = catalog.path
    if not is_folder(folder):
        return []
    read = {info.name for info in catalog.files if info.records or info.role in ("data", "metadata", "common state")}
    within = {name.partition("/")[0] for name in read if "/" in name}
    out: list[SideFile] = []
    zarr = catalog.format == "zarr"
    try:
        with scan(folder) as entries:
            # beside a zarr array, KEY.sync/ are locks of its writers
            unread = (e for e in entries if e.name not in read and not (zarr and e.name.endswith(".sync")))
            listed = sorted(unread, key=lambda entry: entry.name)
            top_level = [e for e in listed if not (e.is_dir(follow_symlinks=False) and e.name in within)]
            for path, state in (each for entry in top_level for each in _below(catalog, entry)):
                if len(out) == _MOST_FILES:
                    raise FormatError(
                        f"{printable(str(folder))} holds more than {_MOST_FILES:,} files beside its tensors"
                    )
                out.append(SideFile(path, _kind(path) if state.file else "special", state.size, state.mtime_ns))
    except OSError as error:
        raise read_failure(error.filename or folder, error) from error
    strays = (info.name for info in catalog.files if info.role == "other" and info.name.partition("/")[0] in within)
    sizes = {info.name: info.size or 0 for info in catalog.files}
    return out + [SideFile(name, _kind(name), sizes[name], 0) for name in strays]


def _below(catalog: Catalog, entry: Entry) -> Iterator[tuple[str, Status]]:
    if entry.is_dir(follow_symlinks=False):
        yield from walk(catalog.path / entry.name, f"{entry.name}/")
    else:
        yield entry.name, entry_status(catalog.path, entry)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), "unknown")
