"""Reading safetensors: one file, or a folder of them with an index.

A header is taken only as the format's own library writes it: no key twice, tensors that lie one behind the other from the
first byte of the data to the last, sizes that follow from type and shape. The format has no checksums.

Source: the format section of the safetensors README; `validate` in its tensor.rs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from converters.box import strides
from converters.catalog import Problem
from converters.dtypes import from_safetensors
from converters.errors import FormatError
from converters.formats.broken import damage_in
from converters.formats.containers.archive import FileTensor
from converters.formats.containers.index import indexed_tensors, read_index
from converters.formats.containers.reader import WholeReader
from converters.formats.folder import exists, is_folder, listing, open_source
from converters.formats.plain_json import parse_json, read_json
from converters.names import listed, printable, quoted
from converters.torchzip.records import Payload
from converters.torchzip.tensor_refs import TensorRef

if TYPE_CHECKING:
    from pathlib import Path

    from converters.torchzip.records import Read

INDEX = "model.safetensors.index.json"
_SINGLE, _ENDING = "model.safetensors", ".safetensors"
_SIDECAR = "distckpt.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass
class SafetensorsFile:
    """A file's header, with what `PtFile` offers. Every tensor has a storage of its own.

    Attributes:
        tensors: The tensors by name, in the order in which they lie in the file.
        ranges: First byte and bytes of each storage.
    """

    name: str
    size: int
    tensors: dict[str, TensorRef]
    ranges: dict[str, tuple[int, int]]
    position: int = -1

    def storages(self) -> dict[str, int]:
        """See `PtFile`."""
        return {key: nbytes for key, (_, nbytes) in self.ranges.items()}

    def locate(self, storage: str, read: Read) -> Payload:
        """See `PtFile`."""
        begin, nbytes = self.ranges[storage]
        return Payload(begin, nbytes, None, begin, nbytes)

    def checksums(self) -> str:
        """See `PtFile`; the format has none."""
        return ""


class SafetensorsReader(WholeReader):
    """An open safetensors file, or a folder of them."""

    name: ClassVar[str] = "safetensors"

    @classmethod
    def open(cls, path: Path) -> SafetensorsReader:
        """Reads the header of every file; no tensor data.

        Raises:
            FormatError: A header that the format forbids, shards that do not fit their index, a name in two files.
        """
        folder, wanted = (path, _shards(path)) if is_folder(path) else (path.parent, {path.name: None})
        problems: list[Problem] = []
        files = []
        for name in wanted:
            with damage_in(folder, name):
                files.append(_read(folder, name, problems))
        tensors: dict[str, FileTensor] = {}
        for file in files:
            stored, names = file.tensors, wanted[file.name]
            if names is not None:
                stored = indexed_tensors(stored, names, folder / file.name, INDEX, problems)
            twice = next((name for name in stored if name in tensors), None)
            if twice is not None:
                two = f"{printable(tensors[twice].file.name)} and {printable(file.name)}"
                hint = f"no model has both; to open one of them, name it: {quoted(folder / file.name)}"
                raise FormatError(f"{printable(twice)} is in two files, {two}", tensor=twice, hint=hint)
            tensors |= {name: FileTensor(ref, file) for name, ref in stored.items()}
        label = INDEX if len(files) > 1 else files[0].name
        return cls(path, files, label, {"model": tensors}, _job(folder) if folder == path else {}, problems)


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """The files of a folder, and the tensors that the index expects in each; None if there is no index."""
    if exists(folder / INDEX):
        return dict(read_index(folder, INDEX, _ENDING))
    if exists(folder / _SINGLE):
        return {_SINGLE: None}
    names = [name for name in listing(folder) if name.endswith(_ENDING)]
    for name in names:
        match = _SHARD.fullmatch(name)
        total = int(match[3]) if match else 0
        lacking = [f"{match[1]}-{n:05d}-of-{match[3]}{_ENDING}" for n in range(1, total + 1)] if match else []
        lacking = [shard for shard in lacking if shard not in names]
        if lacking:
            raise FormatError(
                f"there is no file for {len(lacking)} of {total} shards: {listed(lacking, 8)}",
                hint=f"copy them, and {INDEX}, from where the others came",
            )
    return dict.fromkeys(names)


def _job(folder: Path) -> dict[str, Any]:
    """What `distckpt` left beside the tensors about the job that saved them."""
    if not exists(folder / _SIDECAR):
        return {}
    document = read_json(folder / _SIDECAR)
    return {k: v for k, v in document.items() if k != "schema"} if isinstance(document, dict) else {}


def _read(folder: Path, name: str, problems: list[Problem]) -> SafetensorsFile:
    """A file's header."""
    label = printable(name)
    with open_source(folder / name) as source:
        size = source.size
        length = int.from_bytes(source.read(0, 8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            limit = f"the format allows {_MAX_HEADER:,}" if length > _MAX_HEADER else f"the file has {size:,}"
            raise FormatError(f"{label} is cut short or damaged: its header would be {length:,} bytes, {limit}")
        raw = source.read(8, length)
    if raw[:1] != b"{":
        raise FormatError(f"{label} is not a safetensors file: its header begins with {raw[:1]!r}")
    header = parse_json(raw, f"the header of {label}")
    header.pop("__metadata__", None)
    entries = {tensor: _entry(tensor, entry, label) for tensor, entry in header.items()}
    tensors: dict[str, TensorRef] = {}
    ranges: dict[str, tuple[int, int]] = {}
    end, beyond = 0, []
    for number, (tensor, (kind, shape, begin, stop)) in enumerate(
        sorted(entries.items(), key=lambda item: item[1][2:])
    ):
        if begin != end:
            wrong = "overlaps the one before it" if begin < end else f"leaves {begin - end} bytes before it unused"
            raise FormatError(f"{label}: {printable(tensor)} at {begin} {wrong}", tensor=tensor)
        end = stop
        ranges[str(number)] = 8 + length + begin, stop - begin
        tensors[tensor] = TensorRef(str(number), kind, math.prod(shape), 0, shape, strides(shape))
        if 8 + length + stop > size:
            beyond.append(tensor)
    if beyond:
        text = f"{label} is {size:,} bytes, its header needs {8 + length + end:,}"
        problems.append(Problem("error", text, file=name, tensors=tuple(beyond)))
    elif 8 + length + end < size:
        raise FormatError(f"{label}: {size - 8 - length - end} bytes follow the last tensor")
    return SafetensorsFile(name, size, tensors, ranges)


def _entry(tensor: str, entry: Any, label: str) -> tuple[Any, tuple[int, ...], int, int]:
    """`(type, shape, first byte, one past the last)` of a tensor in a header."""
    try:
        kind, shape, (begin, stop) = from_safetensors(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, stop)
        good = len(entry) == 3 and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{label}: the entry of {printable(tensor)} is invalid", tensor=tensor) from error
    if not good or len(shape) > 64 or stop - begin != math.prod(shape) * kind.itemsize:
        raise FormatError(
            f"{label}: {printable(tensor)} of type {kind} and shape {list(shape)[:16]} cannot be bytes "
            f"{printable(str(begin))} to {printable(str(stop))}",
            tensor=tensor,
        )
    return kind, shape, begin, stop
