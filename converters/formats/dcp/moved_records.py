"""The `.metadata` of torch DCP when one record of a data file has another length: the records behind it lie elsewhere.

Source: torch/distributed/checkpoint/filesystem.py (`_StorageInfo`: relative_path, offset, length), torch 2.1 to 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.nodes import Obj, PickleFormatError, fields, set_field

if TYPE_CHECKING:
    from converters.catalog import ObjectInfo

_HINT = "distckpt reshard CKPT OUT --mcore 0.16 writes common.pt, which is edited without .metadata"


def with_longer_record(raw: bytes, info: ObjectInfo, length: int) -> bytes:
    """The pickle with another length of one record; it may become shorter, too.

    Args:
        raw: The whole `.metadata`.
        info: The record as it is.
        length: Its bytes in the result.

    Raises:
        RequestError: The pickle is too large to be taken apart, or not as torch writes it.
    """
    try:
        tree = parse(raw, label=".metadata")
        if dumps(tree, raw[1]) != raw:
            raise RequestError(".metadata is not written as torch writes it, so no record can be moved", hint=_HINT)
    except PickleFormatError as error:
        raise RequestError(f".metadata cannot be changed: {error.message}", hint=_HINT) from error
    stored: Any = fields(tree).get("storage_data") if isinstance(tree, Obj) else None
    if not isinstance(stored, dict):
        raise RequestError(".metadata has no storage_data", hint=_HINT)
    moved = 0
    for entry in stored.values():
        at = fields(entry) if isinstance(entry, Obj) else {}
        if type(at.get("offset")) is not int or type(at.get("length")) is not int:
            raise RequestError(".metadata does not say where a record lies", hint=_HINT)
        if at.get("relative_path") != info.file:
            continue
        if at["offset"] == info.start and at["length"] == info.length:
            set_field(entry, "length", length)
            moved += 1
        elif at["offset"] >= info.start + info.length:
            set_field(entry, "offset", at["offset"] + length - info.length)
        elif at["offset"] + at["length"] > info.start:
            raise RequestError(f"another record of {info.file} overlaps {info.key}", hint=_HINT)
    if moved != 1:
        raise RequestError(f".metadata names {info.key} {moved} times", hint=_HINT)
    return dumps(tree, raw[1])
