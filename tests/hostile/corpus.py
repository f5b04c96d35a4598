"""Checkpoints that attack their reader, several hundred of them. Each is made here; none is kept as a file.

A payload that runs makes a harmless marker. `Case.make` builds one checkpoint in a folder and returns what to name on a
command line. Beside it lies `outside/`, which no file of a checkpoint may reach.
"""

# ruff: noqa: E501, TC003

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import struct
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.formats.common_state import Archive
from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.nodes import Global, Obj, PersId, fields, set_field
from harness import damage
from harness import hostile_headers as containers
from harness import hostile_pickles as pickles
from harness import hostile_tars as tars
from harness.checkpoints import edit_metadata
from harness.support import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CONTROL", "GOOD", "Case", "cases", "fired"]

GOOD = "qwen2_weights_tp2pp2"
ITERATION = "iter_0000010"
ZARR_FC1 = "decoder.layers.mlp.linear_fc1.weight"
CONTROL = (
    "\x1b[31mRED\x1b[0m\x1b]0;title\x07\r\nINJECTED\u202eevil\u2066[bold]x[/bold][link=http://x]\x9b2J\u2028%s{0}\t\x7f"
)


@dataclass(frozen=True)
class Case:
    """A hostile checkpoint.

    Args:
        group: pickle, bomb, zip, tensor, dcp, safetensors, tar, zarr, text, tree, crowd or name.
        name: What is done.
        make: Builds it in a folder, returns the path to name. `marker` is what a payload would make.
        refused: `verify` must say no.
        rival: How to open it with plain torch: "dcp" or "torch" and the file below the folder; empty if a rival has none.
        config: It attacks as the folder of `--hf-config`, too.
    """

    group: str
    name: str
    make: Callable[[Path, Path], Path]
    refused: bool = True
    rival: tuple[str, str] | None = None
    config: bool = False

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"


def fired(marker: Path) -> bool:
    """Whether a payload has run: some add a suffix."""
    return any(path.name.split(".")[0] == marker.name for path in marker.parent.iterdir())


def cases() -> list[Case]:
    """All of them, always in the same order."""
    from hostile.crowds import crowds  # which is made of what is here

    made = [
        *_payloads(), *_gadgets_everywhere(), *_bombs(), *_zips(), *_records(), *_metadata(), *_safetensors(), *_tars(),
        *_zarr(), *_texts(), *_trees(), *_links(), *crowds(), *_names(),
    ]  # fmt: skip
    titles = [case.title for case in made]
    assert len(set(titles)) == len(titles), [t for t in titles if titles.count(t) > 1]
    return made


# ---------------------------------------------------------------------- places where a pickle lies


def copied(name: str, into: Path, inner: str = "") -> Path:
    """A writable copy of a golden checkpoint."""
    shutil.copytree(GOLDEN / name / inner, into)
    return into


def rezip(raw: bytes, change: dict[str, bytes | None], **options: Any) -> bytes:
    """An archive with some members replaced, by the end of their names; None leaves one out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            ending = next((end for end in change if info.filename.endswith(end)), None)
            content = old.read(info) if ending is None else change[ending]
            if content is not None:
                new.writestr(info.filename, content, **options)
    return out.getvalue()


def _into_file(path: Path, data: bytes) -> None:
    path.write_bytes(rezip(path.read_bytes(), {"/data.pkl": data}))


def _into_record(folder: Path, kind: str, data: bytes) -> None:
    """Puts a record with another pickle at the end of its file, and lets the metadata point there."""

    def change(state: dict[str, Any]) -> None:
        entries = state["storage_data"]
        tensors = state["state_dict_metadata"]
        wanted = "BytesStorageMetadata" if kind == "object" else "TensorStorageMetadata"
        index = next(i for i in entries if tensors[fields(i)["fqn"]].func.name == wanted)
        info = entries[index]
        said = fields(info)
        path = folder / said["relative_path"]
        whole = path.read_bytes()
        record = whole[said["offset"] : said["offset"] + said["length"]]
        new = rezip(record, {"/data.pkl": data})
        path.write_bytes(whole + new)
        set_field(info, "offset", len(whole))
        set_field(info, "length", len(new))

    edit_metadata(folder, change)


@dataclass(frozen=True)
class Place:
    """A pickle in a checkpoint.

    Args:
        name: What it is called here.
        golden: The checkpoint it lies in.
        put: Replaces it: folder of the copy, bytes.
        named: What to name on the command line, below the copy.
        two: It is a pickle of torch.save, of protocol 2.
        rival: As `Case.rival`.
    """

    name: str
    golden: str
    put: Callable[[Path, bytes], None]
    named: str = ""
    two: bool = True
    rival: tuple[str, str] | None = None


def _file(name: str, golden: str, path: str, *, named: str = "") -> Place:
    return Place(name, golden, lambda f, data: _into_file(f / path, data), named, rival=("torch", path))


def _record(name: str, golden: str, kind: str, inner: str) -> Place:
    return Place(name, golden, lambda f, data: _into_record(f / inner, kind, data), rival=("dcp", inner))


def _metadata_of(name: str, golden: str, inner: str) -> Place:
    where = f"{inner}/.metadata".lstrip("/")
    return Place(name, golden, lambda f, data: (f / where).write_bytes(data) and None, two=False, rival=("dcp", inner))


@cache
def _places() -> tuple[Place, ...]:
    bridge, nemo2 = "bridge_llama4_weights_tp2pp2", "nemo2_llama4_weights_tp2pp2"
    weights = f"{next((GOLDEN / nemo2).glob('*/weights')).parent.name}/weights"
    zarr = "v009_zarr_llama_adam_tp2pp2"
    shard = sorted(p.relative_to(GOLDEN / zarr) for p in (GOLDEN / zarr).rglob("shard_*.pt"))[0]
    legacy, rank = "legacy_llama_distopt_tp2pp2dp2", f"{ITERATION}/mp_rank_01_001"
    return (
        _metadata_of("metadata of torch_dist", "llama_adam_tp2pp2", ITERATION),
        _file("common.pt", GOOD, f"{ITERATION}/common.pt"),
        _record("tensor in distcp", GOOD, "tensor", ITERATION),
        _record("object in distcp", GOOD, "object", ITERATION),
        _record("common_state of 0.19", "v019_llama_fullyreshardable_tp2dp2", "object", ITERATION),
        _file("model_optim_rng.pt", legacy, f"{rank}/model_optim_rng.pt"),
        _file("distrib_optim.pt", legacy, f"{rank}/distrib_optim.pt"),
        _file("shard of zarr", zarr, str(shard)),
        _file("common.pt of zarr", zarr, f"{ITERATION}/common.pt"),
        _file("torch file", "torch_mixtral_megatron", "model.pt", named="model.pt"),
        _file("pytorch_model.bin", "hf_gpt2_bin", "pytorch_model.bin"),
        _file("one of several bins", "hf_mixtral_bin", "pytorch_model-00002-of-00003.bin"),
        _metadata_of("metadata of dcp", "dcp_plain", ""),
        _metadata_of("metadata of fsdp_dtensor", "fsdp_llama_dp2", ITERATION),
        _metadata_of("metadata of megatron_dcp", "mlm_fsdp2_llama_dp2", ITERATION),
        _metadata_of("metadata of veScale", "vescale_llama_tp2pp2dp2", "model"),
        _metadata_of("metadata of veScale's optimizer", "vescale_llama_tp2pp2dp2", "optimizer/pp_0"),
        _metadata_of("metadata of ByteCheckpoint", "bytecheckpoint_llama_dp2", "global_step_2/optimizer"),
        _file("extra state of ByteCheckpoint", "bytecheckpoint_llama_dp2", str(_extra_state())),
        _file("train_state.pt of Bridge", bridge, f"{ITERATION}/train_state.pt"),
        _file("common.pt of NeMo 2", nemo2, f"{weights}/common.pt"),
    )


def _extra_state() -> Path:
    root = GOLDEN / "bytecheckpoint_llama_dp2"
    return sorted(p.relative_to(root) for p in root.glob("**/extra_state*/*") if p.is_file())[0]


def _placed(place: Place, name: str, data: Callable[[str], bytes], group: str, *, refused: bool) -> Case:
    def make(folder: Path, marker: Path) -> Path:
        copy = copied(place.golden, folder / "ckpt")
        place.put(copy, data(str(marker)))
        return copy / place.named

    return Case(group, f"{name} in {place.name}", make, refused, place.rival)


UNREAD = {"train_state.pt of Bridge", "extra state of ByteCheckpoint"}
"""Places whose pickle no command needs; it is carried along as bytes or left out."""


def _payloads() -> Iterator[Case]:
    """Every payload of `hostile_pickles`, each in another place."""
    places = _places()
    for number, template in enumerate([*pickles.code_cases("/m"), *pickles.trick_cases()]):

        def data(marker: str, number: int = number) -> bytes:
            return [*pickles.code_cases(marker), *pickles.trick_cases()][number].data

        place = places[number % len(places)]
        yield _placed(place, template.name, data, "pickle", refused=place.name not in UNREAD)


def _nest(original: bytes, payload: Obj, protocol: int) -> bytes:
    """The tree that was there, with a call somewhere inside."""
    tree = parse(original)
    if isinstance(tree, dict):
        tree["zzz"] = [payload]
    else:
        state = fields(tree)
        set_field(tree, next(name for name in reversed(state)), {"a": (payload, 1)})
    return dumps(tree, protocol)


def _gadgets_everywhere() -> Iterator[Case]:
    """The commonest payloads in every place, alone and inside of what was there."""
    for place in _places():

        def alone(marker: str) -> bytes:
            return dumps(pickles.call("posix:system", f"mkdir {marker}"), 2)

        def loader(marker: str) -> bytes:
            inner = pickles._torch_zip(dumps(pickles.call("os:mkdir", marker), 4))
            return dumps(pickles.call("torch.storage:_load_from_bytes", inner), 2)

        def opcodes(marker: str) -> bytes:
            return b"\x80\x02(X" + struct.pack("<I", len(marker)) + marker.encode() + b"ios\nmkdir\n0}."

        refused = place.name not in UNREAD
        yield _placed(place, "posix.system alone", alone, "pickle", refused=refused)
        yield _placed(place, "_load_from_bytes", loader, "pickle", refused=refused)
        yield _placed(place, "INST, then dropped", opcodes, "pickle", refused=refused)
        yield _inside(place, refused)


def _inside(place: Place, refused: bool) -> Case:
    def make(folder: Path, marker: Path) -> Path:
        copy = copied(place.golden, folder / "ckpt")
        before: list[bytes] = []

        def put(raw: bytes) -> bytes:
            before.append(raw)
            return _nest(raw, pickles.call("os:mkdir", str(marker)), 2 if place.two else 4)

        _swap_pickle(place, copy, put)
        assert before
        return copy / place.named

    return Case("pickle", f"os.mkdir inside of the tree in {place.name}", make, refused, place.rival)


def _swap_pickle(place: Place, copy: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the pickle that is in a place."""
    kind, where = place.rival or ("", "")
    if not place.two:
        path = copy / where / ".metadata"
        path.write_bytes(change(path.read_bytes()))
    elif kind == "torch" and "shard_" not in where:
        with zipfile.ZipFile(copy / where) as archive:
            raw = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
        place.put(copy, change(raw))
    else:
        record = dumps([1, {"b": 2}], 2)  # some of these hold a tensor: what is beside it does not matter
        place.put(copy, change(dumps({"a": parse(record)}, 2)))


INERT_BOMBS = {
    *("deep list", "tuple graph", "list graph", "list in itself", "tuple in itself", "bytearray of 10^11"),
    *("many floats", "many one-character strings"),
}
"""Data that is odd and costs nothing if nobody walks all of it; as a common state it says nothing."""


def _bombs() -> Iterator[Case]:
    """Every resource bomb of `hostile_pickles`, in a place each; those that are inert may be accepted."""
    places = [p for p in _places() if p.name not in UNREAD]
    for number, template in enumerate(pickles.bomb_cases()):
        for place in (places[number % 2], places[2 + number % (len(places) - 2)]):
            refused = template.name not in INERT_BOMBS
            yield _placed(place, template.name, lambda _, d=template.data: d, "bomb", refused=refused)


# ---------------------------------------------------------------------- zip files


def _edit_bytes(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def _central(raw: bytes, number: int = 0) -> int:
    """Where the n-th entry of the central directory begins."""
    at = raw.rfind(b"PK\x05\x06")
    at = int.from_bytes(raw[at + 16 : at + 20], "little")
    for _ in range(number):
        at += 46 + sum(int.from_bytes(raw[at + k : at + k + 2], "little") for k in (28, 30, 32))
    return at


def _end(raw: bytes) -> int:
    return raw.rfind(b"PK\x05\x06")


def _twice(raw: bytes) -> bytes:
    out = io.BytesIO(raw)
    with zipfile.ZipFile(out, "a") as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr(name, b"\x80\x02}.")
    return out.getvalue()


def _more(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        out = io.BytesIO(raw)
        with zipfile.ZipFile(out, "a") as archive:
            archive.writestr(zipfile.ZipInfo(name), content, method)
        return out.getvalue()

    return change


def _deflated(raw: bytes) -> bytes:
    return rezip(raw, {}, compress_type=zipfile.ZIP_DEFLATED)


def _bomb(raw: bytes) -> bytes:
    return rezip(raw, {"/data/0": bytes(300 << 20)}, compress_type=zipfile.ZIP_DEFLATED)


def _field(at: int, new: bytes, number: int = 0) -> Callable[[bytes], bytes]:
    return lambda raw: _edit_bytes(raw, _central(raw, number) + at, new)


def _every(at: int, new: bytes) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        count = int.from_bytes(raw[_end(raw) + 10 : _end(raw) + 12], "little")
        for number in range(count):
            raw = _edit_bytes(raw, _central(raw, number) + at, new)
        return raw

    return change


def _local(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: _edit_bytes(raw, at, new)


def _tail(at: int, new: bytes) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        raw = rezip(raw, {})  # without zip64's end, which would count instead
        return _edit_bytes(raw, _end(raw) + at, new)

    return change


def _renamed(raw: bytes) -> bytes:
    at = _central(raw)
    size = int.from_bytes(raw[at + 28 : at + 30], "little")
    return _edit_bytes(raw, at + 46, b"../" + raw[at + 49 : at + 46 + size])


def _zip64(raw: bytes) -> bytes:
    """Sizes that say: look into the extra field, where there is none."""
    return _edit_bytes(raw, _central(raw) + 20, b"\xff" * 8)


def _zip64_end(raw: bytes) -> bytes:
    """An end of zip64 that points to a directory elsewhere."""
    end = _end(raw)
    fake = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, 1 << 60, 1 << 62)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1)
    return raw[:end] + fake + locator + _edit_bytes(raw[end:], 8, b"\xff" * 12)


def _overlapping(raw: bytes) -> bytes:
    """Two members that lie at the same place."""
    return _edit_bytes(raw, _central(raw, 1) + 42, raw[_central(raw) + 42 : _central(raw) + 46])


ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "data.pkl twice": _twice,
    "a member outside": _more("../../evil", b"x"),
    "an absolute member": _more("/etc/evil", b"x"),
    "a member with control characters": _more("model/" + CONTROL.replace("\0", ""), b"x"),
    "TorchScript": _more("model/constants.pkl", b"\x80\x02}."),
    "all deflated": _deflated,
    "a deflated bomb": _bomb,
    "renamed in the directory alone": _renamed,
    "encrypted": _every(8, b"\x01\x08"),
    "method 99": _every(10, b"\x63\x00"),
    "checksums of zero": _every(16, bytes(4)),
    "sizes of 4 GiB": _every(20, b"\xfe\xff\xff\xff\xfe\xff\xff\xff"),
    "sizes in an extra field that is not there": _zip64,
    "zip64 directory elsewhere": _zip64_end,
    "offset beyond the end": _field(42, b"\xfe\xff\xff\x7f"),
    "members that overlap": _overlapping,
    "local header of something else": _local(0, b"PKXX"),
    "local name of another length": _local(26, b"\xff\xff"),
    "local sizes that disagree": _local(18, b"\x01\0\0\0\x01\0\0\0"),
    "65535 members": _tail(8, b"\xfe\xff\xfe\xff"),
    "directory of 4 GiB": _tail(12, b"\xfe\xff\xff\xff"),
    "directory behind the end": _tail(16, b"\xfe\xff\xff\xff"),
    "a comment that is not there": _tail(20, b"\xff\xff"),
    "a comment with an end in it": lambda raw: (
        _tail(20, b"\x40\x00")(raw) + (b"PK\x05\x06" + bytes(18)).ljust(64, b"x")
    ),
    "something in front": lambda raw: b"#!/bin/sh\nexit\n" + raw,
    "something behind": lambda raw: raw + bytes(70_000),
    "no end": lambda raw: raw[: _end(raw)],
    "only an end": lambda raw: b"PK\x05\x06" + bytes(18),
    "an extra field that is too long": _field(30, b"\xff\xff"),
    "another disk": _tail(4, b"\x07\x00\x07\x00"),
    "byteorder big": lambda raw: rezip(raw, {"/byteorder": b"big"}),
    "no version": lambda raw: rezip(raw, {"/version": None, "/.format_version": None}),
    "a 7z file": lambda raw: b"7z\xbc\xaf\x27\x1c" + raw[6:],
}
HARMLESS_ZIPS = {"no version", "checksums of zero", "local sizes that disagree"}
"""No version is needed; a checksum of 0 is how torch says that there is none, and `verify` says so; all readers take
sizes from the directory."""


def _zips() -> Iterator[Case]:
    places = [p for p in _places() if p.rival and p.rival[0] == "torch" and p.name not in UNREAD]
    for number, (name, change) in enumerate(ZIPS.items()):
        for place in (places[number % len(places)], places[(number + 3) % len(places)]):

            def make(folder: Path, _: Path, place: Place = place, change: Any = change) -> Path:
                copy = copied(place.golden, folder / "ckpt")
                path = copy / (place.rival or ("", ""))[1]
                path.write_bytes(change(path.read_bytes()))
                return copy / place.named

            opaque = name == "byteorder big" and place.name == "shard of zarr"
            yield Case("zip", f"{name} in {place.name}", make, refused=name not in HARMLESS_ZIPS and not opaque)


# ---------------------------------------------------------------------- tensors in records, and DCP's metadata


def _tensor_tree(path: Path) -> tuple[Archive, Any]:
    archive = Archive.read(path)
    return archive, archive.tree


def _rebuilt(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Changes the first tensor of a torch file: `change` gets the arguments of `_rebuild_tensor_v2` as a list."""

    def edit(folder: Path) -> None:
        path = folder / "model.pt"
        with zipfile.ZipFile(path) as archive:
            raw = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
        tree = parse(raw)
        seen: set[int] = set()

        def find(node: Any) -> Obj | None:
            if id(node) in seen:
                return None
            seen.add(id(node))
            if isinstance(node, Obj) and isinstance(node.func, Global) and node.func.name == "_rebuild_tensor_v2":
                return node
            inner: list[Any] = []
            if isinstance(node, dict):
                inner = list(node.values())
            elif isinstance(node, (list, tuple)):
                inner = list(node)
            elif isinstance(node, Obj):
                inner = [*node.args, node.state, *(node.items or ()), *(value for _, value in node.pairs or ())]
            return next((hit for n in inner if (hit := find(n)) is not None), None)

        node = find(tree)
        assert node is not None
        args = list(node.args)
        change(args)
        node.args = tuple(args)
        _into_file(path, dumps(tree, 2))

    return edit


def _with(position: int, value: Any) -> Callable[[Path], None]:
    return _rebuilt(lambda args: args.__setitem__(position, value))


def _storage(position: int, value: Any) -> Callable[[Path], None]:
    def change(args: list[Any]) -> None:
        inner = list(args[0].value)
        inner[position] = value
        args[0] = PersId(tuple(inner))

    return _rebuilt(change)


TENSORS: dict[str, Callable[[Path], None]] = {
    "strides of 0 over 2^40": _rebuilt(lambda a: (a.__setitem__(2, (1 << 40,)), a.__setitem__(3, (0,)))),
    "negative strides": _rebuilt(lambda a: a.__setitem__(3, tuple(-n for n in a[3]))),
    "negative shape": _rebuilt(lambda a: a.__setitem__(2, tuple(-n for n in a[2]))),
    "shape of 2^62": _rebuilt(lambda a: a.__setitem__(2, (1 << 62, 1 << 62))),
    "offset beyond the storage": _with(1, 1 << 60),
    "negative offset": _with(1, -4),
    "shape of text": _with(2, "ab"),
    "shape in itself": _with(2, [[]]),
    "as many dimensions as fit": _rebuilt(lambda a: (a.__setitem__(2, (1,) * 5000), a.__setitem__(3, (1,) * 5000))),
    "storage on meta": _storage(3, "meta"),
    "storage by the name of a path": _storage(2, "../../../outside/secret"),
    "storage of 2^61 elements": _storage(4, 1 << 61),
    "storage of fewer elements": _storage(4, 1),
    "storage of an unknown type": _storage(1, Global("torch", "EvilStorage")),
    "storage that is a device": _storage(3, "cuda:" + "9" * 5000),
}


def _records() -> Iterator[Case]:
    for name, edit in TENSORS.items():

        def make(folder: Path, _: Path, edit: Any = edit) -> Path:
            copy = copied("torch_mixtral_megatron", folder / "ckpt")
            edit(copy)
            return copy / "model.pt"

        yield Case("tensor", name, make, refused=name != "storage that is a device")


def _dcp(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: edit_metadata(folder, change)


def first_key(state: dict[str, Any], kind: str = "TensorStorageMetadata") -> str:
    return next(key for key, value in state["state_dict_metadata"].items() if value.func.name == kind)


def renamed_key(new: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        old = "decoder.final_layernorm.weight"
        state["state_dict_metadata"][new] = state["state_dict_metadata"].pop(old)
        for index in state["storage_data"]:
            if fields(index)["fqn"] == old:
                set_field(index, "fqn", new)

    return change


def _all_info(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for info in state["storage_data"].values():
            for name, value in changes.items():
                set_field(info, name, value)

    return change


def _sizes(
    new: Callable[[tuple[int, ...]], Any], of: str = "sizes", first: str = ""
) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for chunk in fields(state["state_dict_metadata"][first or damage.KEY])["chunks"]:
            node = fields(chunk)[of]
            set_field(chunk, of, Obj(node.func, (new(node.args[0]),)))

    return change


def _many_chunks(state: dict[str, Any]) -> None:
    chunks = fields(state["state_dict_metadata"][damage.KEY])["chunks"]
    chunks.extend(chunks[:1] * 60_000)


def _global_size(size: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        tensor = state["state_dict_metadata"][damage.KEY]
        set_field(tensor, "size", Obj(fields(tensor)["size"].func, (size,)))

    return change


DCP: dict[str, Callable[[dict[str, Any]], None]] = {
    "path with control characters": _all_info(relative_path=CONTROL),
    "path that is a number": _all_info(relative_path=7),
    "path of null": _all_info(relative_path="a\0b.distcp"),
    "path of 100 kB": _all_info(relative_path="a" * 100_000),
    "path of a lone surrogate": _all_info(relative_path="\udcff.distcp"),
    "path to /proc": _all_info(relative_path="/proc/self/environ"),
    "path to /dev/zero": _all_info(relative_path="/dev/zero"),
    "path outside": _all_info(relative_path="../../outside/secret"),
    "offset of 2^80": _all_info(offset=1 << 80),
    "offset of text": _all_info(offset="0"),
    "offset of a float": _all_info(offset=0.5),
    "length of 0": _all_info(length=0),
    "length of -1": _all_info(length=-1),
    "all at the same place": _all_info(offset=0),
    "chunks with negative offsets": _sizes(lambda s: tuple(-n - 1 for n in s), "offsets"),
    "chunks of another rank": _sizes(lambda s: (*s, 1)),
    "chunks of no rank": _sizes(lambda s: ()),
    "chunks of text": _sizes(lambda s: "abc"),
    "chunks of 2^70": _sizes(lambda s: tuple(1 << 70 for _ in s)),
    "empty chunks": _sizes(lambda s: tuple(0 for _ in s)),
    "60,000 chunks at one place": _many_chunks,
    "shape of 2^62 squared": _global_size((1 << 62, 1 << 62, 1 << 62)),
    "negative shape": _global_size((-2, 32, 48)),
    "shape of bools": _global_size((True, 32, 48)),
    "shape of nothing": _global_size(()),
    "no tensors": lambda s: s["state_dict_metadata"].clear(),
    "no records": lambda s: s["storage_data"].clear(),
    "tensors of text": lambda s: s.__setitem__("state_dict_metadata", "all of them"),
    "records in a list": lambda s: s.__setitem__("storage_data", [1, 2]),
    "keys of numbers": lambda s: s["state_dict_metadata"].update({5: 6, None: None}),
    "an empty key": renamed_key(""),
    "key of a path": renamed_key("../../outside/evil"),
    "absolute key": renamed_key("/tmp/evil"),
    "key of null": renamed_key("a\0b"),
    "key of dots": renamed_key("." * 1000),
    "key of 1 MB": renamed_key("k" * (1 << 20)),
    "layer of 10^4000": renamed_key("decoder.layers." + "9" * 4000 + ".mlp.linear_fc1.weight"),
    "layer 10^9": renamed_key("decoder.layers.1000000000.mlp.linear_fc1.weight"),
    "expert 10^12": renamed_key("decoder.layers.0.mlp.experts.experts.1000000000000.linear_fc1.weight"),
    "braces in a key": renamed_key("decoder.layers.{0..9999999999}.{}{0}{a.__class__}.weight"),
    "layers in other digits": renamed_key("decoder.layers.\u0663.mlp.linear_fc1.weight"),
    "object with a huge grid": renamed_key("x/shard_0_999999999999"),
    "optimizer of an optimizer": renamed_key("optimizer.state." * 2000 + "exp_avg.x"),
}
HARMLESS_DCP = {
    "optimizer of an optimizer",
    "shape of bools",
    "an empty key",
    "key of a path",
    "absolute key",
    "key of null",
}
HARMLESS_DCP |= {"key of dots", "key of 1 MB", "object with a huge grid", "braces in a key", "layers in other digits"}
"""Odd names of tensors: no file is ever named after them."""


def _metadata() -> Iterator[Case]:
    for change in damage.CATALOGUE:

        def make(folder: Path, _: Path, change: Any = change) -> Path:
            copy = copied(GOOD, folder / "ckpt" / ITERATION, ITERATION)
            change(copy)
            return copy

        yield Case("dcp", change.__name__, make, refused=change is not damage.swapped)
    for name, edit in DCP.items():

        def craft(folder: Path, _: Path, edit: Any = edit) -> Path:
            copy = copied(GOOD, folder / "ckpt" / ITERATION, ITERATION)
            edit_metadata(copy, edit)
            return copy

        yield Case("dcp", name, craft, refused=name not in HARMLESS_DCP)


# ---------------------------------------------------------------------- safetensors


def _safetensors() -> Iterator[Case]:
    for name, (header, data, length) in containers.HOSTILE.items():

        def make(folder: Path, _: Path, header: Any = header, data: bytes = data, length: Any = length) -> Path:
            (folder / "ckpt").mkdir()
            containers.write_safetensors(folder / "ckpt" / "model.safetensors", header, data, length)
            return folder / "ckpt"

        yield Case("safetensors", name, make)
    index: dict[str, Callable[[Path], None]] = {
        name: (lambda f, c=change: containers.edit_index(f, c)) for name, (change, _) in containers.BAD_INDEX.items()
    }
    names = {
        "to outside": "../outside/secret.safetensors",
        "null": "a\0.safetensors",
        "control": CONTROL + ".safetensors",
        "dots": "..",
        "empty": "",
        "long": "a" * 100_000 + ".safetensors",
        "device": "/dev/zero",
    }
    for name, new in names.items():
        index[f"file named {name}"] = lambda f, n=new: containers.edit_index(
            f, lambda m: m.update({"lm_head.weight": n})
        )
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def linked(target: str) -> Callable[[Path], None]:
        return lambda f: ((f / one).unlink(), (f / one).symlink_to(target), None)[-1]

    index |= {
        "link to /dev/zero": linked("/dev/zero"),
        "link to itself": linked(one),
        "link to a folder": linked("/"),
        "link to nothing": linked("nothing"),
        "a pipe": lambda f: ((f / one).unlink(), os.mkfifo(f / one), None)[-1],
        "a folder": lambda f: ((f / one).unlink(), (f / one).mkdir(), None)[-1],
        "the same file twice": lambda f: ((f / one).unlink(), os.link(f / two, f / one), None)[-1],
        "index with a key twice": lambda f: _text(
            f / "model.safetensors.index.json", '{"weight_map":{},"weight_map":{}}'
        ),
        "index of a list": lambda f: _text(f / "model.safetensors.index.json", "[]"),
        "index 100,000 deep": lambda f: _text(f / "model.safetensors.index.json", "[" * 100_000),
        "index of NaN": lambda f: _text(f / "model.safetensors.index.json", '{"weight_map": NaN}'),
        "weight_map of a list": lambda f: _text(f / "model.safetensors.index.json", '{"weight_map": [1]}'),
    }
    for name, change in index.items():

        def edit(folder: Path, _: Path, change: Any = change) -> Path:
            copy = copied("hf_llama_safetensors", folder / "ckpt")
            change(copy)
            return copy

        yield Case("safetensors", f"index: {name}", edit)


def _text(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------------- tar and zarr


def _tars() -> Iterator[Case]:
    for name, (content, _) in tars.HOSTILE.items():

        def make(folder: Path, _: Path, content: bytes = content) -> Path:
            (folder / "ckpt").mkdir()
            path = folder / "ckpt" / "evil.nemo"
            path.write_bytes((b"" if content.startswith(tars.GOOD) else tars.GOOD) + content + bytes(1024))
            return path

        yield Case("tar", name, make)

    def bomb(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        path = folder / "ckpt" / "evil.tar"
        path.write_bytes(b"".join(tars.member(f"d/{n}") for n in range(20_000)) + bytes(1024))
        return path

    def nested(folder: Path, marker: Path) -> Path:
        """A whole checkpoint in a tar file, whose pickle is hostile."""
        copy = copied(GOOD, folder / "inner")
        _into_file(copy / ITERATION / "common.pt", dumps(pickles.call("os:mkdir", str(marker)), 2))
        (folder / "ckpt").mkdir()
        with tarfile.open(folder / "ckpt" / "evil.nemo", "w:") as tar:
            tar.add(copy, arcname=".")
        return folder / "ckpt" / "evil.nemo"

    def deep(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        path = folder / "ckpt" / "evil.tar"
        long = tars.member("././@LongLink", b"d/" * 100_000 + b"x\0", b"L")
        path.write_bytes(long + tars.member("short", b"x") + bytes(1024))
        return path

    yield Case("tar", "20,000 members", bomb)
    yield Case("tar", "hostile pickle inside", nested)
    yield Case("tar", "100,000 folders deep", deep)


ZARRAY: dict[str, dict[str, Any] | bytes] = {
    "pickle filter": {"filters": [{"id": "pickle"}]},
    "codec that is not known": {"compressor": {"id": "evil"}},
    "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    "objects": {"dtype": "|O"},
    "objects with a codec": {"dtype": "|O", "filters": [{"id": "json2"}]},
    "a structure": {"dtype": [["a", "<f4"], ["b", "|O"]]},
    "text": {"dtype": "<U1000000"},
    "kvstore of http": {"kvstore": {"driver": "http", "base_url": "http://127.0.0.1:9/"}},
    "kvstore of s3": {"kvstore": "s3://bucket/evil/", "driver": "zarr"},
    "kvstore of a file": {"kvstore": {"driver": "file", "path": "/etc/"}},
    "path": {"path": "../../outside"},
    "separator that climbs": {"dimension_separator": "/../"},
    "chunks of 0": {"chunks": [1, 0, 32]},
    "chunks of 2^62": {"chunks": [1 << 62, 1 << 62, 1]},
    "chunks of 1 in 2^40": {"shape": [1 << 40, 96, 32], "chunks": [1, 1, 1]},
    "shape of 2^40": {"shape": [1 << 40, 96, 32]},
    "negative chunks": {"chunks": [-1, 96, 32]},
    "shape of text": {"shape": "2"},
    "shape of 10^1000": {"shape": [10**1000, 1, 1]},
    "order that is not known": {"order": "\x1b[31m"},
    "version 3": {"zarr_format": 3},
    "fill value of a list": {"fill_value": [[[[]]]]},
    "a name with control characters": {CONTROL: 1},
    "nothing": b"",
    "100,000 deep": b"[" * 100_000,
    "a number of 5,000 digits": b'{"shape": [' + b"9" * 5000 + b"]}",
    "not UTF-8": b"\xff\xfe{}",
    "a name twice": b'{"zarr_format":2,"zarr_format":3}',
}
HARMLESS_ZARR = {"fill value of a list"}


def _zarr() -> Iterator[Case]:
    for name, change in ZARRAY.items():

        def make(folder: Path, _: Path, change: Any = change) -> Path:
            copy = copied("nemo1_zarr_llama4_weights_tp2pp2", folder / "ckpt")
            path = copy / "model_weights" / f"model.{ZARR_FC1}" / ".zarray"
            if isinstance(change, bytes):
                path.write_bytes(change)
            else:
                path.write_text(json.dumps(json.loads(path.read_text()) | change))
            return copy

        yield Case("zarr", name, make, refused=name not in HARMLESS_ZARR)

    def linked(folder: Path, _: Path) -> Path:
        copy = copied("nemo1_zarr_llama4_weights_tp2pp2", folder / "ckpt")
        path = copy / "model_weights" / f"model.{ZARR_FC1}" / "0.0.0"
        path.unlink()
        path.symlink_to(folder / "outside" / "secret")
        return copy

    def sync(folder: Path, _: Path) -> Path:
        copy = copied("nemo1_zarr_llama4_weights_tp2pp2", folder / "ckpt")
        path = copy / "model_weights" / f"model.{ZARR_FC1}" / "0.0.0"
        path.unlink()
        os.mkfifo(path)
        return copy

    yield Case("zarr", "chunk that is a link to outside", linked)
    yield Case("zarr", "chunk that is a pipe", sync)


# ---------------------------------------------------------------------- JSON and YAML around the tensors

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefghijkl")
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"b{n}: &b{n}\n  <<: [{', '.join(f'*b{k}' for k in range(max(0, n - 60), n)) or '*a'}]\n  k{n}: 1\n"
    for n in range(60)
)
YAMLS = {
    "python object": "model: !!python/object/apply:os.mkdir [{marker}]\n",
    "python module": "model: !!python/module:os\nother: !!python/name:os.system\n",
    "python object new": "!!python/object/new:subprocess.Popen [[mkdir, {marker}]]\n",
    "tags that are not known": "model: !evil {a: 1}\nhidden_size: !<tag:evil> 7\n",
    "billion laughs": LAUGHS,
    "merges of merges": MERGES,
    "alias to itself": "a: &a\n  b: *a\n",
    "100,000 deep": "a: " + "[" * 100_000,
    "keys of lists": "? [a, b]\n: 1\n? {a: b}\n: 2\n",
    "a number of a million digits": "hidden_size: " + "9" * 1_000_000 + "\n",
    "sexagesimal number": "hidden_size: " + "1:" * 200_000 + "1\n",
    "control characters": 'num_layers: "\\e[31mRED\\x9b2J\\u202e\\nINJECTED"\n"\\e[2J\\nINJECTED": 3\n',
    "many documents": "---\na: 1\n" * 1000,
    "not UTF-8": b"\xff\xfea\x00",
    "wrong types": "num_layers: [1]\nhidden_size: {a: b}\nnum_attention_heads: 2001-01-01\nmodel: 7\n",
    "huge sizes": f"num_layers: {10**18}\nhidden_size: {10**18}\nnum_attention_heads: {10**18}\nffn_hidden_size: -1\n",
    "targets": "model:\n  _target_: os.mkdir\n  _args_: [{marker}]\n",
    "infinite": "num_layers: .inf\nhidden_size: .nan\n",
}
JSONS: dict[str, str | bytes] = {
    "100,000 deep": "[" * 100_000,
    "deep objects": '{"a":' * 50_000,
    "a number of 5,000 digits": '{"sharded_backend": ' + "9" * 5000 + "}",
    "control characters": json.dumps({"sharded_backend": CONTROL, "architectures": [CONTROL], "model_type": CONTROL}),
    "lone surrogate": '{"sharded_backend": "\\ud800", "model_type": "\\ud800"}',
    "NaN": '{"sharded_backend": NaN, "hidden_size": NaN, "num_hidden_layers": Infinity}',
    "a list": "[1]",
    "null": "null",
    "not UTF-8": b"\xff\xfe\x00",
    "UTF-16": json.dumps({"sharded_backend": "torch_dist"}).encode("utf-16"),
    "no text": b"",
    "backend of an object": '{"sharded_backend": {"a": [1]}}',
    "wrong types": json.dumps({"sharded_backend": 1, "hidden_size": "x", "num_hidden_layers": [1], "vocab_size": {}}),
    "huge sizes": json.dumps(dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size", "head_dim"), 10**30)),
    "auto_map": json.dumps({"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True}),
}


def _texts() -> Iterator[Case]:
    bridge, nemo1, nemo2 = (
        "bridge_llama4_weights_tp2pp2",
        "nemo1_zarr_llama4_weights_tp2pp2",
        "nemo2_llama4_weights_tp2pp2",
    )
    files = {
        "run_config.yaml": (bridge, f"{ITERATION}/run_config.yaml"),
        "model_config.yaml": (nemo1, "model_config.yaml"),
        "model.yaml": (nemo2, "*/context/model.yaml"),
    }
    for name, text in YAMLS.items():
        for number, (short, (golden, where)) in enumerate(files.items()):
            if number != len(name) % 3 and name not in ("python object", "billion laughs", "control characters"):
                continue

            def make(folder: Path, marker: Path, golden: str = golden, where: str = where, text: Any = text) -> Path:
                copy = copied(golden, folder / "ckpt")
                (path,) = copy.glob(where)
                raw = text if isinstance(text, bytes) else text.replace("{marker}", str(marker)).encode()
                path.write_bytes(raw)
                return copy

            yield Case("text", f"{name} in {short}", make, refused=False)
    for name, text in JSONS.items():
        places = {
            "metadata.json": (GOOD, f"{ITERATION}/metadata.json"),
            "config.json": ("hf_llama_safetensors", "config.json"),
            "io.json": (nemo2, "*/context/io.json"),
            "tracker": (GOOD, "latest_checkpointed_iteration.txt"),
            "integrity.json": (GOOD, f"{ITERATION}/integrity.json"),
        }
        for short, (golden, where) in places.items():

            def put(folder: Path, _: Path, golden: str = golden, where: str = where, text: Any = text) -> Path:
                copy = copied(golden, folder / "ckpt")
                found = list(copy.glob(where)) or [copy / where]
                if "latest" in where:
                    (copy / ITERATION).rename(copy / "iter_0000011")
                _text(found[0], text)
                return copy

            yield Case("text", f"{name} in {short}", put, refused=False, config=short == "config.json")
    manifest = {
        "files outside": {"algorithm": "sha256", "files": {"../../outside/secret": "0" * 64}},
        "absolute files": {"algorithm": "sha256", "files": {"/etc/hostname": "0" * 64}},
        "an unknown sum": {"algorithm": "os.system", "files": {"common.pt": "0" * 64}},
        "sums of numbers": {"algorithm": "sha256", "files": {"common.pt": 7, "": "", ".": "0"}},
        "a huge one": {"algorithm": "sha256", "files": {f"f{n}": "0" * 64 for n in range(100_000)}},
    }
    for name, document in manifest.items():

        def listed(folder: Path, _: Path, document: Any = document) -> Path:
            copy = copied(GOOD, folder / "ckpt")
            _text(copy / ITERATION / "integrity.json", json.dumps(document))
            return copy

        yield Case("text", f"manifest with {name}", listed)

    def code(folder: Path, marker: Path) -> Path:
        copy = copied("hf_llama_safetensors", folder / "ckpt")
        config = json.loads((copy / "config.json").read_text())
        config |= {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "model_type": "evil"}
        _text(copy / "config.json", json.dumps(config))
        for name in ("evil.py", "__init__.py", "setup.py", "conftest.py", "sitecustomize.py", "torch.py"):
            _text(copy / name, f"import os\nos.mkdir({str(marker)!r})\n")
        return copy

    yield Case("text", "auto_map with code beside it", code, refused=False, config=True)


# ---------------------------------------------------------------------- trees of files, and names


def _trees() -> Iterator[Case]:
    def rank(folder: Path) -> Path:
        return folder / ITERATION / "mp_rank_01_001"

    def renamed(new: str) -> Callable[[Path], None]:
        return lambda f: rank(f).rename(f / ITERATION / new) and None

    def linked(target: str) -> Callable[[Path], None]:
        return lambda f: (shutil.rmtree(rank(f)), rank(f).symlink_to(target), None)[-1]

    def argument(**values: Any) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            for path in folder.glob(f"{ITERATION}/mp_rank_*/model_optim_rng.pt"):
                archive = Archive.read(path)
                for name, value in values.items():
                    set_field(archive.tree["args"], name, value)
                path.write_bytes(archive.dump(archive.tree, "archive"))

        return change

    changes: dict[str, Callable[[Path], None]] = {
        "rank of 10^4000 digits": renamed("mp_rank_" + "9" * 200 + "_000"),
        "rank in other digits": renamed("mp_rank_\u0661\u0661_001"),
        "negative rank": renamed("mp_rank_-1_001"),
        "rank with control characters": renamed("mp_rank_01_001" + CONTROL.replace("/", "")),
        "rank far away": renamed("mp_rank_99999999_99999999"),
        "rank is a link to the root": linked("/"),
        "rank is a link to its parent": linked(".."),
        "rank is a link to itself": linked("mp_rank_01_001"),
        "rank is missing": lambda f: shutil.rmtree(rank(f)),
        "rank is a file": lambda f: (shutil.rmtree(rank(f)), rank(f).write_bytes(b"x"), None)[-1],
        "rank is empty": lambda f: [p.unlink() for p in rank(f).iterdir()] and None,
        "file is a pipe": lambda f: ((rank(f) / "model_optim_rng.pt").unlink(), os.mkfifo(rank(f) / "model_optim_rng.pt"), None)[-1],
        "sizes of 10^18": argument(tensor_model_parallel_size=10**18, pipeline_model_parallel_size=10**18),
        "sizes of text": argument(tensor_model_parallel_size="2\x1b[2J", num_layers=[[]]),
        "sizes of zero": argument(tensor_model_parallel_size=0, pipeline_model_parallel_size=0, num_layers=0),
        "negative sizes": argument(num_layers=-1, num_attention_heads=-4, hidden_size=-1),
        "experts of 10^15": argument(num_experts=10**15),
        "layers of 10^15": argument(num_layers=10**15),
        "virtual stages of 10^15": argument(virtual_pipeline_model_parallel_size=10**15),
        "huge vocabulary": argument(padded_vocab_size=10**18, vocab_size=10**18),
        "infinite rotary base": argument(rotary_base=float("inf"), norm_epsilon=float("nan")),
        "pipeline layout of a bomb": argument(pipeline_model_parallel_layout="Et*999999999999|" * 50),
        "arguments with control characters": argument(**{"save": CONTROL, "name" + CONTROL: CONTROL}),
    }  # fmt: skip
    for name, change in changes.items():

        def make(folder: Path, _: Path, change: Any = change) -> Path:
            copy = copied("legacy_llama_distopt_tp2pp2dp2", folder / "ckpt")
            change(copy)
            return copy

        yield Case("tree", name, make, refused=False)

    def args_of_dist(**values: Any) -> Callable[[Path, Path], Path]:
        def make(folder: Path, _: Path) -> Path:
            copy = copied(GOOD, folder / "ckpt")
            path = copy / ITERATION / "common.pt"
            archive = Archive.read(path)
            everything = (
                dict.fromkeys(fields(archive.tree["args"]), values.get("every")) if "every" in values else values
            )
            for name, value in everything.items():
                set_field(archive.tree["args"], name, value)
            path.write_bytes(archive.dump(archive.tree, "archive"))
            return copy

        return make

    arguments: dict[str, dict[str, Any]] = {
        "layers of 10^15": {"num_layers": 10**15},
        "heads of 10^15": {"num_attention_heads": 10**15, "num_query_groups": 10**15},
        "experts of 10^15": {"num_experts": 10**15, "moe_layer_freq": 1},
        "moe_layer_freq of code": {"num_experts": 4, "moe_layer_freq": "__import__('os').mkdir('evil')"},
        "moe_layer_freq of a bomb": {"num_experts": 4, "moe_layer_freq": "([1]*10**9)*10**9"},
        "pipeline layout of a bomb": {"pipeline_model_parallel_layout": "Et*999999999999|" * 50},
        "stages of 10^15": {"pipeline_model_parallel_size": 10**15, "world_size": 10**18},
        "floats that are not numbers": {"rotary_base": float("nan"), "norm_epsilon": float("inf"), "lr": float("-inf")},
        "text for numbers": {"num_layers": "2", "hidden_size": b"32", "vocab_size": None},
        "numbers of 1000 bytes": {"hidden_size": 1 << 480, "iteration": -(1 << 480), "seq_length": 1 << 480},
        "types that do not exist": {"params_dtype": Global("torch", "evil64"), "activation_func": Global("a", "b")},
        "control characters": {"save": CONTROL, "tokenizer_type": CONTROL, "position_embedding_type": CONTROL},
        "control characters in names": {"x" + CONTROL: CONTROL},
        "a list of itself": {"loop": _loop()},
        "all lists of themselves": {"every": _loop()},
        "all a graph of 10^40 paths": {"every": _graph()},
        "all deep": {"every": _deep()},
        "all numbers of 4,000 bits": {"every": 1 << 500},
        "all negative": {"every": -1},
        "all empty": {"every": {}},
        "all of nothing": {"every": None},
        "all not a number": {"every": float("nan")},
        "all control characters": {"every": CONTROL},
        "all calls": {"every": Obj(Global("evil", "Evil"), ("x", 1))},
    }
    for name, values in arguments.items():
        yield Case("tree", f"arguments: {name}", args_of_dist(**values), refused=False)


def _loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _graph() -> list[Any]:
    made: list[Any] = [1]
    for _ in range(40):
        made = [made] * 10
    return made


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(150):
        made = [made]
    return made


LINKS = {
    "a file of torch_dist": (GOOD, f"{ITERATION}/__0_0.distcp"),
    "the metadata of torch_dist": (GOOD, f"{ITERATION}/.metadata"),
    "common.pt": (GOOD, f"{ITERATION}/common.pt"),
    "metadata.json": (GOOD, f"{ITERATION}/metadata.json"),
    "the tracker": (GOOD, "latest_checkpointed_iteration.txt"),
    "an iteration": (GOOD, ITERATION),
    "a file of 0.19": ("v019_llama_fullyreshardable_tp2dp2", f"{ITERATION}/*.distcp"),
    "a file of dcp": ("dcp_plain", "*.distcp"),
    "a folder of veScale": ("vescale_llama_tp2pp2dp2", "model"),
    "a file of veScale": ("vescale_llama_tp2pp2dp2", "optimizer/pp_0/*.distcp"),
    "the metadata of ByteCheckpoint": ("bytecheckpoint_llama_dp2", "global_step_2/optimizer/.metadata"),
    "a rank's folder": ("legacy_llama_distopt_tp2pp2dp2", f"{ITERATION}/mp_rank_01_001"),
    "a rank's weights": ("legacy_llama_distopt_tp2pp2dp2", f"{ITERATION}/mp_rank_01_001/model_optim_rng.pt"),
    "a rank's optimizer": ("legacy_llama_distopt_tp2pp2dp2", f"{ITERATION}/mp_rank_00_000/distrib_optim.pt"),
    "a safetensors file": ("hf_llama_safetensors", "model-00001-of-00002.safetensors"),
    "an index": ("hf_llama_safetensors", "model.safetensors.index.json"),
    "a bin file": ("hf_mixtral_bin", "pytorch_model-00002-of-00003.bin"),
    "an array of zarr": ("nemo1_zarr_llama4_weights_tp2pp2", f"model_weights/model.{ZARR_FC1}"),
    "a chunk of zarr": ("nemo1_zarr_llama4_weights_tp2pp2", f"model_weights/model.{ZARR_FC1}/0.0.0"),
    "a .zarray": ("nemo1_zarr_llama4_weights_tp2pp2", f"model_weights/model.{ZARR_FC1}/.zarray"),
    "a shard of zarr": ("v009_zarr_llama_adam_tp2pp2", f"{ITERATION}/rng_state/*.pt"),
    "model_config.yaml": ("nemo1_zarr_llama4_weights_tp2pp2", "model_config.yaml"),
    "the weights of NeMo 2": ("nemo2_llama4_weights_tp2pp2", "*/weights"),
    "the context of NeMo 2": ("nemo2_llama4_weights_tp2pp2", "*/context"),
    "run_config.yaml": ("bridge_llama4_weights_tp2pp2", f"{ITERATION}/run_config.yaml"),
    "train_state.pt": ("bridge_llama4_weights_tp2pp2", f"{ITERATION}/train_state.pt"),
    "config.json": ("hf_llama_safetensors", "config.json"),
    "a tokenizer": ("hf_llama_safetensors", "generation_config.json"),
}
"""What lies outside, whole and right, while the checkpoint has a link to it: nobody may read it for that."""


def _links() -> Iterator[Case]:
    for name, (golden, where) in LINKS.items():

        def make(folder: Path, _: Path, golden: str = golden, where: str = where) -> Path:
            copy = copied(golden, folder / "ckpt")
            path = min(copy.glob(where))
            path.rename(folder / "outside" / path.name)
            path.symlink_to(folder / "outside" / path.name)
            return copy

        yield Case("tree", f"{name} is a link to outside", make, config=golden.startswith("hf_llama"))


def _names() -> Iterator[Case]:
    """Control characters, bidirectional overrides, new lines and markup wherever a name is shown."""
    flat = CONTROL.replace("/", "|")

    def metadata(change: Callable[[dict[str, Any]], None], golden: str = GOOD, inner: str = ITERATION):
        def make(folder: Path, _: Path) -> Path:
            copy = copied(golden, folder / "ckpt" / inner, inner)
            edit_metadata(copy, change)
            return copy

        return make

    def header(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        entry = containers.entry(0, 8)
        document = {CONTROL: entry, "__metadata__": {"format": CONTROL, CONTROL: CONTROL}}
        containers.write_safetensors(folder / "ckpt" / "model.safetensors", document, b"x" * 8)
        return folder / "ckpt"

    def file_names(golden: str, inner: str) -> Callable[[Path, Path], Path]:
        def make(folder: Path, _: Path) -> Path:
            copy = copied(golden, folder / "ckpt")
            for name in (
                flat,
                flat + ".distcp",
                flat + ".pt",
                "model-" + flat + ".safetensors",
                "__9_0" + flat,
                "mp_rank_" + flat,
            ):
                (copy / inner / name).write_bytes(b"x")
            (copy / inner / ("folder" + flat)).mkdir()
            (copy / inner / os.fsdecode(b"\xff\xfe bytes")).write_bytes(b"x")
            return copy

        return make

    def own_name(folder: Path, _: Path) -> Path:
        return copied(GOOD, folder / "ckpt" / flat)

    def missing_own_name(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        return folder / "ckpt" / flat

    def keys(folder: Path, _: Path) -> Path:
        copy = copied("torch_mixtral_megatron", folder / "ckpt")
        archive = Archive.read(copy / "model.pt")
        weights = archive.tree["model"].pairs
        weights += [(CONTROL, weights[0][1]), ("decoder.layers.0." + CONTROL, weights[0][1])]
        archive.tree[CONTROL] = {CONTROL: CONTROL, "a\nINJECTED": ["\nINJECTED"]}
        (copy / "model.pt").write_bytes(archive.dump(archive.tree, "archive"))
        return copy / "model.pt"

    def array(folder: Path, _: Path) -> Path:
        copy = copied("nemo1_zarr_llama4_weights_tp2pp2", folder / "ckpt")
        old = copy / "model_weights" / f"model.{ZARR_FC1}"
        shutil.copytree(old, old.with_name("model." + flat))
        return copy

    def global_name(folder: Path, _: Path) -> Path:
        copy = copied(GOOD, folder / "ckpt")
        _into_file(copy / ITERATION / "common.pt", b"\x80\x04\x8c\x02os\x8c" + _short(CONTROL) + b"\x93)R.")
        return copy

    def tar_names(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        path = folder / "ckpt" / "evil.tar"
        path.write_bytes(tars.member(flat[:60], b"x") + bytes(1024))
        return path

    yield Case("name", "tensor of torch_dist", metadata(renamed_key(CONTROL)), refused=False)
    yield Case("name", "weight of torch_dist", metadata(renamed_key("decoder.layers.0." + CONTROL)), refused=False)
    yield Case(
        "name", "moment of torch_dist", metadata(renamed_key("optimizer.state.exp_avg." + CONTROL)), refused=False
    )
    yield Case("name", "object of torch_dist", metadata(_rename_object), refused=False)
    yield Case("name", "tensor of safetensors", header, refused=False)
    yield Case("name", "keys of a torch file", keys, refused=False)
    yield Case("name", "array of zarr", array, refused=False)
    yield Case("name", "global in a pickle", global_name)
    yield Case("name", "files beside distcp", file_names(GOOD, ITERATION), refused=False)
    yield Case("name", "files beside iterations", file_names(GOOD, ""), refused=False)
    yield Case("name", "files beside ranks", file_names("legacy_llama_adam_tp2pp2", ITERATION), refused=False)
    yield Case("name", "files beside safetensors", file_names("hf_llama_safetensors", ""), refused=False, config=True)
    yield Case(
        "name", "files beside arrays", file_names("nemo1_zarr_llama4_weights_tp2pp2", "model_weights"), refused=False
    )
    yield Case(
        "name", "files of a Bridge checkpoint", file_names("bridge_llama4_weights_tp2pp2", ITERATION), refused=False
    )
    yield Case("name", "files of NeMo 1", file_names("nemo1_zarr_llama4_weights_tp2pp2", ""), refused=False)
    yield Case("name", "the checkpoint's own", own_name, refused=False)
    yield Case("name", "a checkpoint that is not there", missing_own_name)
    yield Case("name", "members of a tar file", tar_names)


def _short(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return bytes([len(raw)]) + raw


def _rename_object(state: dict[str, Any]) -> None:
    old = first_key(state, "BytesStorageMetadata")
    new = CONTROL + "/shard_0_1"
    state["state_dict_metadata"][new] = state["state_dict_metadata"].pop(old)
    for index in state["storage_data"]:
        if fields(index)["fqn"] == old:
            set_field(index, "fqn", new)
