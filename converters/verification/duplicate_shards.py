"""Records with the same bytes in two places of one tensor: a shard that was written twice, or a file copied over another.

Their checksums are in the files; equal ones are looked at again. What is constant may be equal: zeros before the first step,
norms that begin as ones.

Records are compared byte by byte, not by `io.block_runner`: the same bytes are the fault, whatever they mean, and a record
need not be a box of a tensor (flat buckets, views on one storage).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from converters.errors import FormatError
from converters.formats.folder import open_source
from converters.names import fold, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader
    from converters.torchzip.records import Payload
    from converters.verification.files import RecordIndex
    from converters.verification.report import Check

_SMALLEST = 64  # bytes: a bias of a few elements may well be equal
_MOST = 10_000  # records that are looked at again
_BLOCK = 1 << 20
_WIDEST = 16  # bytes of an element


def fingerprint(payload: Payload) -> int:
    """A number that equal elements have in common; 0 for what is too small to tell, or has no checksum."""
    if payload.crc is None or payload.nbytes < _SMALLEST:
        return 0
    where = payload.offset - payload.crc_offset  # views on one storage have its checksum in common
    return zlib.crc32(f"{payload.crc_nbytes} {where} {payload.nbytes}".encode()) << 31 | payload.crc >> 1 or 1


def report_duplicates(
    check: Check,
    reader: Reader,
    index: RecordIndex,
    tensors: Mapping[str, TensorInfo],
    fingerprints: Iterable[tuple[int, int]],
) -> None:
    """Reports tensors that have the same elements in two places.

    Args:
        check: Where it is noted.
        reader: The checkpoint.
        index: Its records.
        tensors: The tensors to be named.
        fingerprints: `(record, fingerprint)` of each.
    """
    groups: list[list[int]] = []
    for group in _equal(fingerprints):
        if sum(map(len, groups)) < _MOST and _varied(reader, group[0]):
            groups.append(group)
    owners = index.tensors({record for group in groups for record in group}, tensors)
    duplicates: dict[str, tuple[int, int]] = {}
    for group in groups:
        by_tensor: dict[str, list[int]] = {}
        for record in group:
            for name in owners[record]:
                by_tensor.setdefault(name, []).append(record)
        for name, (first, *more_records) in by_tensor.items():
            duplicate = next((file_b for file_b in more_records if _same(reader, first, file_b)), None)
            if duplicate is not None:
                duplicates.setdefault(name, (first, duplicate))
    halves = {name for name, pair in duplicates.items() if _gate_and_up(tensors[name], pair)}
    for name in sorted(halves):
        check.warn(
            f"{printable(name)}: gate and up are the same elements, which no training makes of different ones",
            tensors=(name,),
            hint="either they were made equal on purpose, or one was written in the place of the other",
        )
    for text, names in fold(name for name in duplicates if name not in halves):
        file_a, file_b = (printable(reader.file_name(reader.file_of(record))) for record in duplicates[names[0]])
        verb = "has" if len(names) == 1 else "have each"
        check.error(
            f"{printable(text)} {verb} the same elements in two places: a shard was written twice ({file_a} and {file_b})",
            tensors=tuple(names),
            file=file_b,
            hint="restore the file of one of them from a copy",
        )


def _gate_and_up(info: TensorInfo, pair: tuple[int, int]) -> bool:
    """Whether two records are the same rows of the two halves of a gated projection, which may be equal by design."""
    if "linear_fc1" not in info.name or not info.shape:
        return False
    starts = [chunk.box.start for chunk in info.chunks() if chunk.record in pair]
    half = info.shape[0] // 2
    return len(starts) == 2 and abs(starts[0][0] - starts[1][0]) == half and starts[0][1:] == starts[1][1:]


def _equal(fingerprints: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Records with the same fingerprint."""
    pairs: NDArray[np.int64] = np.array([pair for pair in fingerprints if pair[1]], np.int64).reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 1], kind="stable")]
    edges = np.flatnonzero(np.diff(pairs[:, 1])) + 1
    for group in np.split(pairs[:, 0], edges) if len(edges) + 1 < len(pairs) else []:
        if len(group) > 1:
            yield group.tolist()


def _varied(reader: Reader, record: int) -> bool:
    """Whether a record holds more than one element again and again."""
    start = b""
    try:
        for block in _blocks(reader, record):
            start = start or block[:_WIDEST]
            if block != start * (len(block) // len(start)) + start[: len(block) % len(start)]:
                return True
    except FormatError:
        pass
    return False


def _same(reader: Reader, record_a: int, record_b: int) -> bool:
    try:
        return all(a == b for a, b in zip(_blocks(reader, record_a), _blocks(reader, record_b), strict=True))
    except (FormatError, ValueError):  # ends early
        return False


def _blocks(reader: Reader, record: int) -> Iterator[bytes]:
    with open_source(reader.files[reader.file_of(record)]) as source:
        payload = reader.locate(record, source.read)
        for at in range(payload.offset, payload.offset + payload.nbytes, _BLOCK):
            yield source.read(at, min(_BLOCK, payload.offset + payload.nbytes - at))
