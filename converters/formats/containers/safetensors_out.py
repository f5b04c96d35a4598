"""Hugging Face's safetensors folders: how tensors are laid out in shards, and the index over them.

    model.safetensors, or model-00001-of-000NN.safetensors + model.safetensors.index.json

    +--------+-------------------------------------------+---------------------------------+
    | 8 bytes| JSON: name -> dtype, shape, data_offsets  | elements, little endian, C order|
    | length | padded with spaces                        |                                 |
    +--------+-------------------------------------------+---------------------------------+

Source: the format section of the safetensors README; names and index as transformers' `save_pretrained` writes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import DestinationError, IntegrityError, RequestError
from converters.planning.job import OutputFile
from converters.planning.routes import Location

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from converters.planning.plan import Target

DEFAULT_SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 4096  # so that the elements begin on a page; the format allows any number of trailing spaces in the header
_MAX_HEADER = 100_000_000  # safetensors refuses longer ones


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """Where every tensor goes.

    Attributes:
        files: The shards, headers included.
        locations: For each tensor, its shard and first byte.
        index: Contents of `model.safetensors.index.json`; None for a single file.
    """

    files: Sequence[OutputFile]
    locations: Mapping[str, Location]
    index: bytes | None


def plan_shards(
    targets: Mapping[str, Target], max_shard_bytes: int = DEFAULT_SHARD_BYTES, stem: str = "model"
) -> SafetensorsLayout:
    """Cuts tensors into shards of at most `max_shard_bytes` of elements, in their order; a larger tensor gets its own.

    Args:
        stem: What the files' names begin with.

    Raises:
        RequestError: `max_shard_bytes` makes so many shards or so long a header that no loader takes it.
    """
    shards: list[list[Target]] = [[]]
    shard_bytes = 0
    for target in targets.values():
        if shards[-1] and shard_bytes + target.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(target)
        shard_bytes += target.nbytes
    if len(shards) > 99_999:
        raise RequestError(f"{len(shards)} shards are more than their names can count", hint="raise --max-shard-size")
    files, locations, weight_map = [], {}, {}
    for number, shard in enumerate(shards):
        numbers = "" if len(shards) == 1 else f"-{number + 1:05d}-of-{len(shards):05d}"
        name = f"{stem}{numbers}.safetensors"
        # wide elements first keeps every tensor aligned to its own element size
        ordered = sorted(shard, key=lambda target: -target.dtype.itemsize)
        header = _header(ordered)
        at = len(header)
        for target in ordered:
            locations[target.name] = Location(number, at)
            weight_map[target.name] = name
            at += target.nbytes
        files.append(OutputFile(name, at, header))
    index = None
    if len(shards) > 1:
        total = sum(target.nbytes for target in targets.values())
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index = json.dumps(document, indent=2).encode() + b"\n"
    return SafetensorsLayout(files, locations, index)


def check_readable(path: Path) -> None:
    """Opens a file that was written with the reader of the safetensors library, which reads and checks its header.

    Raises:
        IntegrityError: It does not open.
        DestinationError: The disk fails.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np"):
            pass
    except OSError as error:  # the library calls every refusal to open a file "not found"
        raise DestinationError(
            f"{path.name} was written, but cannot be read back: {error.strerror or 'the disk refuses to open it'}",
            hint="check the disk, then run the same command again",
        ) from error
    except SafetensorError as error:
        raise IntegrityError(
            f"{path.name} was written, but the safetensors library does not open it: {error}"
        ) from error


def _header(targets: Iterable[Target]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for target in targets:
        if target.dtype.safetensors is None:
            raise RequestError(f"safetensors cannot hold {target.name}: it has no element type {target.dtype}")
        entries[target.name] = {
            "dtype": target.dtype.safetensors,
            "shape": list(target.shape),
            "data_offsets": [at, at + target.nbytes],
        }
        at += target.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    if len(raw) + _ALIGNMENT > _MAX_HEADER:
        raise RequestError(f"one shard would need a header of {len(raw)} bytes", hint="lower --max-shard-size")
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw
