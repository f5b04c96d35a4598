"""Safetensors files and indexes that must be refused, by what is wrong with them."""

from __future__ import annotations

import json


def write_safetensors(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "no bytes": (b"", b"", 0),
    "longer than the file": ({"a": entry(0, 8)}, b"x" * 8, 1 << 40),
    "longer than allowed": ({"a": entry(0, 8)}, b"x" * 8, 100_000_001),
    "the largest number": ({"a": entry(0, 8)}, b"x" * 8, (1 << 64) - 1),
    "not JSON": (b"{nonsense}", b"", None),
    "a list": (b"[]", b"", None),
    "a space first": (b" {}", b"", None),
    "nested too deep": (b'{"a":' + b"[" * 100_000, b"", None),
    "a key twice": (b'{"a":%b,"a":%b}' % (2 * (json.dumps(entry(0, 4)).encode(),)), b"xxxx", None),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, None),
    "the same place twice": ({"a": entry(0, 8), "b": entry(0, 8)}, b"x" * 8, None),
    "a hole": ({"a": entry(0, 4), "b": entry(8, 12)}, b"x" * 12, None),
    "a hole at the start": ({"a": entry(4, 8)}, b"x" * 8, None),
    "bytes at the end": ({"a": entry(0, 4)}, b"x" * 5, None),
    "end before begin": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"x" * 4, None),
    "negative": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b"", None),
    "shape and bytes": ({"a": entry(0, 8, shape=[3])}, b"x" * 8, None),
    "a huge shape": ({"a": entry(0, 8, shape=[1 << 62, 1 << 62])}, b"x" * 8, None),
    "an empty huge shape": ({"a": entry(0, 0, shape=[0, 1 << 62])}, b"", None),
    "shape of a bool": ({"a": entry(0, 4, shape=[True])}, b"xxxx", None),
    "unknown type": ({"a": entry(0, 4, dtype="F7")}, b"xxxx", None),
    "type that is a list": ({"a": entry(0, 4, dtype=["F32"])}, b"xxxx", None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"xxxx", None),
    "more than it should have": ({"a": {**entry(0, 4), "also": 1}}, b"xxxx", None),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"xxxx", None),
    "a number for an entry": ({"a": 3}, b"", None),
    "not a number": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"xxxx", None),
}  # fmt: skip


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


OUTSIDE = "which is no .safetensors file beside it"
BAD_INDEX = {
    "out of the folder": (lambda m: m.update({"lm_head.weight": "../x.safetensors"}), OUTSIDE),
    "absolute": (lambda m: m.update({"lm_head.weight": "/etc/x.safetensors"}), OUTSIDE),
    "backslash": (lambda m: m.update({"lm_head.weight": "a\\b.safetensors"}), OUTSIDE),
    "hidden": (lambda m: m.update({"lm_head.weight": ".x.safetensors"}), OUTSIDE),
    "another ending": (lambda m: m.update({"lm_head.weight": "x.bin"}), OUTSIDE),
    "not text": (lambda m: m.update({"lm_head.weight": 3}), OUTSIDE),
    "missing shard": (lambda m: m.update({"more": "model-00003-of-00002.safetensors"}), "no file for 1 of 3 shards"),
    "a tensor that is not there": (lambda m: m.update({"more": "model-00001-of-00002.safetensors"}), "lacks 1 tensor that"),
    "empty": (lambda m: m.clear(), "no weight_map"),
}  # fmt: skip
