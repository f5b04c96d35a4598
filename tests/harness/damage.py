"""The catalogue of damage to torch DCP folders: one function for each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from converters.pickles.nodes import Global, Obj, fields, set_field
from harness.checkpoints import edit_metadata, flip, payloads

if TYPE_CHECKING:
    from pathlib import Path


def _state(folder: Path, change) -> None:
    edit_metadata(folder, change)


def _records(state) -> dict:
    return state["storage_data"]


def _tensor(state, key: str) -> Obj:
    return state["state_dict_metadata"][key]


def _index(state, key: str, number: int = 0):
    """An entry of `storage_data` for a tensor."""
    mine = [index for index in _records(state) if fields(index)["fqn"] == key]
    return sorted(mine, key=lambda index: str(fields(index)["offset"]))[number]


def _edit_info(state, key: str, number: int = 0, **changes) -> None:
    info = _records(state)[_index(state, key, number)]
    for name, value in changes.items():
        set_field(info, name, value)


def _sizes(node, values) -> Obj:
    return Obj(node.func, (tuple(values),))


KEY = "decoder.layers.mlp.linear_fc2.weight"


def _chunks(state, key: str = KEY) -> list:
    return fields(_tensor(state, key))["chunks"]


def absolute(folder):
    _state(folder, lambda s: _edit_info(s, KEY, relative_path="/etc/hostname"))


def upwards(folder):
    _state(folder, lambda s: _edit_info(s, KEY, relative_path="../outside.distcp"))


def linked(folder):
    path = sorted(folder.glob("*.distcp"))[0]
    outside = folder.parent / "outside.distcp"
    path.rename(outside)
    path.symlink_to(outside)


def fifo(folder):
    path = sorted(folder.glob("*.distcp"))[0]
    path.unlink()
    os.mkfifo(path)


def hole(folder):
    def change(state):
        chunks = _chunks(state)
        del chunks[1]

    _state(folder, change)


def overlap(folder):
    def change(state):
        one, other = _chunks(state)[:2]
        set_field(other, "offsets", fields(one)["offsets"])

    _state(folder, change)


def beyond(folder):
    def change(state):
        chunk = _chunks(state)[0]
        sizes = fields(chunk)["sizes"]
        set_field(chunk, "sizes", _sizes(sizes, (n * 3 for n in sizes.args[0])))

    _state(folder, change)


def negative(folder):
    _state(folder, lambda s: _edit_info(s, KEY, offset=-8))


def offset_past_end(folder):
    _state(folder, lambda s: _edit_info(s, KEY, offset=1 << 30))


def length_past_end(folder):
    _state(folder, lambda s: _edit_info(s, KEY, length=1 << 30))


def swapped(folder):
    def change(state):
        one, other = _index(state, KEY, 0), _index(state, KEY, 1)
        records = _records(state)
        records[one], records[other] = records[other], records[one]

    _state(folder, change)


def flipped(folder):
    _, path, at, size = next(p for p in payloads(folder, "weight") if p[3] > 100)
    flip(path, at + size // 2)


def truncated(folder):
    path = sorted(folder.glob("*.distcp"))[0]
    os.truncate(path, path.stat().st_size * 2 // 3)


def other_dtype(folder):
    def change(state):
        properties = fields(_tensor(state, KEY))["properties"]
        kind = Global("torch", "float16")
        if isinstance(properties.state, tuple):
            properties.state = (kind, *properties.state[1:])
        else:
            set_field(properties, "dtype", kind)

    _state(folder, change)


def missing_file(folder):
    sorted(folder.glob("*.distcp"))[0].unlink()


def zeroed_page(folder):
    path = sorted(folder.glob("*.distcp"))[0]
    raw = bytearray(path.read_bytes())
    raw[:400] = bytes(400)
    path.write_bytes(raw)


def absurd(folder):
    def change(state):
        tensor = _tensor(state, KEY)
        size = fields(tensor)["size"]
        set_field(tensor, "size", _sizes(size, (1 << 61, *size.args[0][1:])))

    _state(folder, change)


def smaller_than_its_record(folder):
    def change(state):
        chunk = _chunks(state)[0]
        sizes = fields(chunk)["sizes"]
        *front, last = sizes.args[0]
        set_field(chunk, "sizes", _sizes(sizes, (*front, last - 1)))

    _state(folder, change)


CATALOGUE = [
    absolute,
    upwards,
    linked,
    fifo,
    hole,
    overlap,
    beyond,
    negative,
    offset_past_end,
    length_past_end,
    swapped,
    flipped,
    truncated,
    other_dtype,
    missing_file,
    zeroed_page,
    absurd,
    smaller_than_its_record,
]
