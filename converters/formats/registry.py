"""The formats that are read: one declaration each. Nothing heavy is imported to find out which one a checkpoint is in.

A declaration says how the format is recognised by names and small files, which class reads it, and what is shown to work:
`distckpt formats` prints that. The class's module is imported only when a checkpoint of that format is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, cast

from converters.errors import FormatError
from converters.formats.broken import damaged_file
from converters.formats.folder import exists, is_file, is_folder, listing, open_source, read_small
from converters.formats.plain_json import read_json
from converters.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from converters.formats.base import Reader

METADATA_LIMIT = 8 << 30
BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save began its files with before torch 1.6: a magic number, alone in a pickle."""
_MEGATRON = (b"all_local_plans", b"mcore_data", b"/shard_0")
_WRAPPED = re.compile(rb"model\d*\.module\.(?:module\.)*(?:embedding|decoder|encoder|mtp|output_layer)\.")
_BARE = re.compile(rb"model\d*\.(?:embedding|decoder|encoder|mtp|output_layer)\.")


class Candidate:
    """A folder, or a file that may be a checkpoint of its own, as detection sees it; each look is taken once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def names(self) -> frozenset[str]:
        """Names in the folder; none for a file."""
        return frozenset(listing(self.path)) if is_folder(self.path) else frozenset()

    @cached_property
    def backend(self) -> str | None:
        """The backend that `metadata.json` names; None if there is no such file."""
        return backend_of(self.path) if "metadata.json" in self.names else None

    @cached_property
    def metadata(self) -> bytes:
        """The bytes of DCP's `.metadata`; none if there is no such file."""
        return read_small(self.path / ".metadata", METADATA_LIMIT) if ".metadata" in self.names else b""

    @cached_property
    def inner(self) -> tuple[bytes, ...]:
        """The bytes of every `.metadata` of DCP files, here or in the folders for the model and the optimizer."""
        here = (self.metadata,) if self.metadata else ()
        folders = dcp_folders(self.path) if not here and self.names else []
        return here or tuple(read_small(self.path / name / ".metadata", METADATA_LIMIT) for name in folders)

    @cached_property
    def head(self) -> bytes:
        """The first 512 bytes of a file; none of a folder."""
        if not is_file(self.path):
            return b""
        with open_source(self.path) as source:
            return source.read(0, 512)

    def has(self, *endings: str) -> bool:
        """Whether a name in the folder ends so."""
        return any(name.endswith(endings) for name in self.names)


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format.

    Attributes:
        name: What `inspect` calls it, and what `--from` and `--to` take.
        reader: `module:class` below this package.
        read: What is shown to be read, with versions.
        written: What is shown to load what we write; empty if it is not written.
    """

    name: str
    summary: str
    reader: str
    detect: Callable[[Candidate], bool]
    read: str
    written: str = ""

    def load(self) -> type[Reader]:
        """The reader's class; its module is imported by this."""
        module, _, name = self.reader.partition(":")
        return cast("type[Reader]", getattr(import_module(f"{__package__}.{module}"), name))


def detect(path: Path) -> Format | None:
    """The first format that a folder, or a file, is in; None if we know none."""
    candidate = Candidate(path)
    return next((entry for entry in REGISTRY if entry.detect(candidate)), None)


def backend_of(folder: Path) -> str | None:
    """The `sharded_backend` that `metadata.json` names; None if there is no such file.

    Raises:
        DamagedFileError: It is not the JSON that Megatron writes.
    """
    path = folder / "metadata.json"
    if not exists(path):
        return None
    document = read_json(path, 1 << 20)
    if not isinstance(document, dict):
        raise damaged_file(folder, {path.name: f"{path.name} is not what Megatron writes: a dictionary"})
    return str(document.get("sharded_backend"))


def _has_file(path: Path) -> bool:
    """Whether there is a regular file; what may not be looked at, a loop of links or a broken tar file, holds none."""
    try:
        return is_file(path)
    except (OSError, FormatError):
        return False


def dcp_folders(folder: Path) -> list[str]:
    """Inner folders that hold the DCP files of one checkpoint, each with a slash at its end: `model/`, `optimizer/pp_0/`.

    Raises:
        OSError: There are some, and another that cannot be read.
        FormatError: Likewise, of a tar file that is refused.
    """
    folders: list[str] = []
    failure: Exception | None = None
    for name in ("model", "optimizer", "optim"):
        try:
            if is_file(folder / name / ".metadata"):
                folders.append(f"{name}/")
            elif name != "model" and is_folder(folder / name):
                stages = [stage for stage in listing(folder / name) if re.fullmatch(r"pp_\d+", stage)]
                folders += [f"{name}/{stage}/" for stage in sorted(stages, key=natural_key)]
        except (OSError, FormatError) as error:
            failure = failure or error
    if folders and failure is not None:
        raise failure
    return folders


def _torch_dist(candidate: Candidate) -> bool:
    """`metadata.json` names the backend or, if it is lost, DCP files with what only Megatron puts beside or into them."""
    if candidate.backend is not None:
        return candidate.backend == "torch_dist"
    if ".metadata" in candidate.names and "common.pt" not in candidate.names:
        return any(mark in candidate.metadata for mark in _MEGATRON)
    return ".metadata" in candidate.names or candidate.has(".distcp")


def _fsdp_dtensor(candidate: Candidate) -> bool:
    """DCP files of Megatron-FSDP: its wrappers are part of every key."""
    return "metadata.json" not in candidate.names and _WRAPPED.search(candidate.metadata) is not None


def _megatron_dcp(candidate: Candidate) -> bool:
    """DCP files with Megatron's names and its version of checkpoints, and without its wrappers."""
    if "metadata.json" in candidate.names or b"checkpoint_version" not in candidate.metadata:
        return False
    return _BARE.search(candidate.metadata) is not None and not _WRAPPED.search(candidate.metadata)


def _vescale(candidate: Candidate) -> bool:
    """DCP files whose metadata is of veScale's own classes."""
    return "metadata.json" not in candidate.names and any(b"vescale.checkpoint" in raw for raw in candidate.inner)


def _bytecheckpoint(candidate: Candidate) -> bool:
    """Metadata of ByteCheckpoint's own classes."""
    return "metadata.json" not in candidate.names and any(
        b"bytecheckpoint.checkpointer" in raw for raw in candidate.inner
    )


def _torch_dcp(candidate: Candidate) -> bool:
    """Any other DCP files, or a folder of them for the model and one for the optimizer."""
    return "metadata.json" not in candidate.names and (".metadata" in candidate.names or bool(candidate.inner))


def _zarr(candidate: Candidate) -> bool:
    """`metadata.json` names the backend or, if it is lost, a folder holds an array."""
    if candidate.backend is not None:
        return candidate.backend == "zarr"
    folders = [candidate.path / name for name in candidate.names if not name.endswith(".sync")]
    return any(_has_file(folder / name) for folder in folders for name in (".zarray", "zarr.json"))


def _legacy(candidate: Candidate) -> bool:
    """`mp_rank_*` folders and nothing of a later format."""
    later = {".metadata", "metadata.json"} & candidate.names
    return not later and any(name.startswith("mp_rank_") for name in candidate.names)


def _safetensors(candidate: Candidate) -> bool:
    """A file or a folder of files named so."""
    return candidate.has(".safetensors", "safetensors.index.json") or (
        candidate.path.suffix == ".safetensors" and bool(candidate.head)
    )


def _torch(candidate: Candidate) -> bool:
    """Names of Hugging Face or NeMo 1 in a folder; a file that begins as torch.save's do, now or before 1.6."""
    archive = candidate.head[:4] == b"PK\x03\x04" and b"data.pkl" in candidate.head
    folder = {"pytorch_model.bin", "pytorch_model.bin.index.json", "model_weights.ckpt"}
    return bool(folder & candidate.names) or archive or candidate.head.startswith(BEFORE_ZIP)


REGISTRY: tuple[Format, ...] = (
    Format(
        "torch_dist",
        "torch_dist of Megatron-LM, NeMo and Megatron-Bridge",
        "torch_dist.reader:TorchDistReader",
        _torch_dist,
        read="Megatron-Core 0.9.0, 0.12.0, 0.14.0, 0.16.1, 0.19.1, 0.20.0 (main of 2026-08)",
        written="loaded by Megatron-Core 0.16.1, 0.19.1",
    ),
    Format(
        "zarr",
        "zarr of Megatron-Core 0.4 to 0.15 and NeMo 1",
        "zarr.reader:ZarrReader",
        _zarr,
        read="Megatron-Core 0.9.0",
    ),
    Format(
        "legacy",
        "mp_rank_* folders of Megatron-LM's --ckpt-format torch",
        "legacy.reader:LegacyReader",
        _legacy,
        read="Megatron-Core 0.12.0, 0.16.1",
        written="loaded by Megatron-LM 0.16.1",
    ),
    Format(
        "fsdp_dtensor",
        "fsdp_dtensor of Megatron-FSDP",
        "dcp.fsdp_dtensor:FsdpDtensorReader",
        _fsdp_dtensor,
        read="Megatron-Core 0.16.1",
    ),
    Format(
        "megatron_dcp",
        "torch_dcp of Megatron-LM, with --use-torch-fsdp2",
        "dcp.megatron_dcp:MegatronDcpReader",
        _megatron_dcp,
        read="Megatron-Core 0.16.1",
    ),
    Format(
        "vescale",
        "veScale: model/ and optimizer/pp_*/",
        "dcp.vescale:VeScaleReader",
        _vescale,
        read="made after the source of veScale 0.1.18",
    ),
    Format(
        "bytecheckpoint",
        "ByteCheckpoint: model/, optimizer/, extra_state/",
        "dcp.bytecheckpoint:ByteCheckpointReader",
        _bytecheckpoint,
        read="ByteCheckpoint 0.0.3 with FSDP2",
    ),
    Format(
        "torch_dcp",
        "torch.distributed.checkpoint folders of any model: FSDP2, HSDP, DTensors, plain tensors",
        "dcp.torch_dcp:TorchDcpReader",
        _torch_dcp,
        read="torch 2.13",
    ),
    Format(
        "safetensors",
        "safetensors, a file or a Hugging Face folder",
        "containers.safetensors:SafetensorsReader",
        _safetensors,
        read="transformers 5, safetensors 0.8",
        written="loaded by safetensors 0.8, transformers 5",
    ),
    Format(
        "torch",
        "one file of torch.save with a state dict, Hugging Face's pytorch_model.bin, an undivided .nemo of NeMo 1",
        "containers.torch_file:TorchFileReader",
        _torch,
        read="torch 2.13",
        written="loaded by torch 2.13 with weights_only and mmap",
    ),
)
"""Every format we read, in the order in which they are tried."""
