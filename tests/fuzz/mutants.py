"""Mutations of checkpoints that keep enough of their structure to get far, each reproducible from its number.

A mutant is a golden checkpoint, and changes to it. A change replaces bytes in one part of one file: of the file itself, of
the pickle in an archive (which is then packed anew), of a JSON header whose length is made to fit, or of a member's header
in a tar file whose checksum is made to fit. Changes to a tree of folders are a word and two names. So a mutant that found
a mistake is kept as one line of JSON.
"""

# ruff: noqa: TC003

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import shutil
import struct
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.support import GOLDEN
from hostile.corpus import ITERATION, rezip

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "Mutant", "build", "contents", "mutant", "mutants_of"]


@dataclass(frozen=True)
class Target:
    """What is mutated.

    Args:
        golden: The checkpoint.
        files: Files in it that are changed, as globs.
        part: "bytes", "pickle" (of a torch.save file), "zip" (its structure), "record" (a pickle or a header within a
            .distcp), "json", "safetensors", "tar" or "tree".
        named: What to open, below the copy.
    """

    golden: str
    files: tuple[str, ...]
    part: str
    named: str = ""


_DIST, _OLD = "qwen2_weights_tp2pp2", "v009_llama_modelspace_tp2pp2dp2"
_LEGACY, _ZARR = "legacy_llama_distopt_tp2pp2dp2", "nemo1_zarr_llama4_weights_tp2pp2"
TARGETS: dict[str, Target] = {
    "metadata": Target(_DIST, (f"{ITERATION}/.metadata",), "raw pickle"),
    "metadata of 0.9": Target(_OLD, (f"{ITERATION}/.metadata",), "raw pickle"),
    "metadata of buckets": Target("llama_dpreshardable_tp2pp2dp2", (f"{ITERATION}/.metadata",), "raw pickle"),
    "metadata of dcp": Target("dcp_plain", (".metadata",), "raw pickle"),
    "metadata of meshes": Target("dtensor_2d", (".metadata",), "raw pickle"),
    "metadata of FSDP2": Target("mlm_fsdp2_llama_dp2", (f"{ITERATION}/.metadata",), "raw pickle"),
    "metadata of Megatron-FSDP": Target("fsdp_llama_dp2", (f"{ITERATION}/.metadata",), "raw pickle"),
    "metadata of veScale": Target("vescale_llama_tp2pp2dp2", ("**/.metadata",), "raw pickle"),
    "metadata of ByteCheckpoint": Target("bytecheckpoint_llama_dp2", ("**/.metadata",), "raw pickle"),
    "common.pt": Target(_DIST, (f"{ITERATION}/common.pt",), "pickle"),
    "common.pt with optimizer": Target("llama_dpreshardable_tp2pp2dp2", (f"{ITERATION}/common.pt",), "pickle"),
    "distcp": Target(_DIST, (f"{ITERATION}/*.distcp",), "record"),
    "distcp of 0.19": Target("v019_llama_fullyreshardable_tp2dp2", (f"{ITERATION}/*.distcp",), "record"),
    "model_optim_rng.pt": Target(_LEGACY, (f"{ITERATION}/*/model_optim_rng.pt",), "pickle"),
    "distrib_optim.pt": Target(_LEGACY, (f"{ITERATION}/*/distrib_optim.pt",), "pickle"),
    "mp_rank tree": Target(_LEGACY, (f"{ITERATION}/*",), "tree"),
    "tree of experts": Target("legacy_mixtral_distopt_ep2pp2", (f"{ITERATION}/*",), "tree"),
    "torch file": Target("torch_mixtral_megatron", ("model.pt",), "pickle", "model.pt"),
    "zip": Target("torch_mixtral_megatron", ("model.pt",), "zip", "model.pt"),
    "zip of common.pt": Target(_DIST, (f"{ITERATION}/common.pt",), "zip"),
    "bins": Target("hf_mixtral_bin", ("*.bin",), "zip"),
    "safetensors": Target("hf_llama_safetensors", ("*.safetensors",), "safetensors"),
    "index": Target("hf_llama_safetensors", ("*.index.json", "config.json"), "json"),
    "zarray": Target(_ZARR, ("model_weights/*/.zarray",), "json"),
    "zarr tree": Target(_ZARR, ("model_weights/*", "model_weights/*/*"), "tree"),
    "model_config.yaml": Target(_ZARR, ("model_config.yaml",), "text"),
    "run_config.yaml": Target("bridge_llama4_weights_tp2pp2", (f"{ITERATION}/run_config.yaml",), "text"),
    "io.json": Target("nemo2_llama4_weights_tp2pp2", ("*/context/io.json", "*/context/model.yaml"), "text"),
    "distcp tree": Target(_DIST, (f"{ITERATION}/*", "*"), "tree"),
    "tar": Target("nemo2_llama4_weights_tp2pp2", (), "tar", "model.tar"),
}

_INTERESTING = (
    0,
    1,
    2,
    3,
    7,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 62),
    (1 << 63) - 1,
)
_WORDS: tuple[str, ...] = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "1",
        "1e400",
        "NaN",
        "[]",
        "{}",
        '""',
        '"x"',
        "9" * 400,
        "[[[[[]]]]]",
        "1.5",
        "\\u0000",
    ),
    *(
        '"\\u001b[2J"',
        '"../x"',
        "-0",
        "18446744073709551616",
        "!!python/name:os.system",
        "*a",
        "&a",
        "<<",
        "? ",
        "|",
        "---",
    ),
)


@dataclass(frozen=True)
class Mutant:
    """A golden checkpoint with changes.

    Args:
        target: Key of `TARGETS`.
        changes: `[file, at, deleted bytes, inserted bytes in hex]`, or `[file, verb, other file]` of a tree.
    """

    target: str
    changes: tuple[tuple[Any, ...], ...]

    def line(self) -> str:
        """As it is kept in `seeds`."""
        return json.dumps([self.target, self.changes])

    @classmethod
    def of(cls, line: str) -> Mutant:
        """The inverse of `line`."""
        target, changes = json.loads(line)
        return cls(target, tuple(tuple(change) for change in changes))


def mutants_of(path: Path) -> list[Mutant]:
    """Those that are kept in a file."""
    return [Mutant.of(line) for line in path.read_text().splitlines() if line.strip()]


# ---------------------------------------------------------------------- making one up


def mutant(target: str, number: int) -> Mutant:
    """The mutant of that number: always the same, on any machine."""
    rng = random.Random(f"{target} {number}")
    what = TARGETS[target]
    files = _files(target)
    changes: list[tuple[Any, ...]] = []
    file = rng.choice(files)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if what.part == "tree":
            verb = rng.choice(("delete", "swap", "copy", "empty", "cut", "folder", "link", "pipe", "rename", "flip"))
            changes.append((rng.choice(files), verb, rng.choice((rng.choice(files), *_NAMES))))
            continue
        raw = _part(target, file)
        if raw:
            changes.append((file, *_splice(rng, raw, what.part)))
    if what.part != "tree":  # places are those of the original: the last one first
        changes.sort(key=lambda change: change[1], reverse=True)
    return Mutant(target, tuple(changes))


_NAMES = (
    *(
        "mp_rank_00",
        "mp_rank_00_000",
        "mp_rank_-1_0",
        "mp_rank_99999_00",
        "mp_rank_01_001_001",
        "iter_0000011",
        "release",
    ),
    *("__0_0.distcp", "__9_9.distcp", "common.pt", ".metadata", "metadata.json", ".zarray", "0.0.0", "9.9.9", "00.0"),
)


@cache
def _files(target: str) -> tuple[str, ...]:
    what = TARGETS[target]
    root = GOLDEN / what.golden
    if what.part == "tar":
        return ("model.tar",)
    found = {str(p.relative_to(root)) for pattern in what.files for p in root.glob(pattern) if p.name != "facts.json"}
    return tuple(sorted(f for f in found if what.part == "tree" or (root / f).is_file()))


@cache
def _part(target: str, file: str) -> bytes:
    """The bytes that are changed."""
    what = TARGETS[target]
    if what.part == "tar":
        return _tar(what.golden)
    raw = (GOLDEN / what.golden / file).read_bytes()
    if what.part == "pickle":
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
    if what.part == "safetensors":
        return raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    return raw


@cache
def _tar(golden: str) -> bytes:
    """Of a fixed order and times, so that a mutant means the same everywhere."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted((GOLDEN / golden).rglob("*")):
            info = tarfile.TarInfo(str(path.relative_to(GOLDEN / golden)))
            info.type, info.mode = (tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE), 0o644
            content = b"" if path.is_dir() else path.read_bytes()
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _splice(rng: random.Random, raw: bytes, part: str) -> tuple[int, int, str]:
    """Where, how much goes, what comes."""
    if part in ("pickle", "raw pickle") and rng.random() < 0.75:
        return _pickle_splice(rng, raw)
    if part in ("zip", "record") and rng.random() < 0.8:
        return _zip_splice(rng, raw)
    if part in ("json", "safetensors", "text") and rng.random() < 0.7:
        return _text_splice(rng, raw)
    if part == "tar" and rng.random() < 0.8:
        return _tar_splice(rng, raw)
    at = rng.randrange(len(raw))
    kind = rng.randrange(5)
    if kind == 0:
        return at, 1, bytes([raw[at] ^ 1 << rng.randrange(8)]).hex()
    if kind == 1:
        return at, 1, bytes([rng.randrange(256)]).hex()
    if kind == 2:
        return at, rng.choice((1, 2, 4, 50, len(raw) - at)), ""
    if kind == 3:
        other = rng.randrange(len(raw))
        return at, 0, raw[other : other + rng.choice((1, 4, 60, 300))].hex()
    width = rng.choice((1, 2, 4, 8))
    return at, width, (rng.choice(_INTERESTING) & (1 << 8 * width) - 1).to_bytes(width, "little").hex()


@cache
def _opcodes(raw: bytes) -> tuple[tuple[int, int, str], ...]:
    """`(at, length, name)` of each opcode, as far as it can be read."""
    found: list[tuple[int, int, str]] = []
    try:
        begin, name = 0, ""
        for op, _, at in pickletools.genops(raw):
            assert at is not None
            if name:
                found.append((begin, at - begin, name))
            begin, name = at, op.name
    except Exception:
        pass
    return tuple(found)


def _pickle_splice(rng: random.Random, raw: bytes) -> tuple[int, int, str]:
    """Changes whole opcodes: their numbers, their order, what they refer to."""
    ops = _opcodes(raw)
    if not ops:
        return 0, 1, ""
    at, length, name = rng.choice(ops)
    kind = rng.randrange(6)
    if kind == 0:
        return at, length, ""
    if kind == 1:
        other, size, _ = rng.choice(ops)
        return at, length, raw[other : other + size].hex()
    if kind == 2:
        other, size, _ = rng.choice(ops)
        return at, 0, raw[other : other + size].hex()
    if kind == 3:  # another value of its own
        value = rng.choice(_INTERESTING)
        wide = value & 0xFFFFFFFF
        choices = [
            b"K" + bytes([value & 255]),
            b"M" + struct.pack("<H", value & 0xFFFF),
            b"J" + struct.pack("<I", wide),
        ]
        choices += [b"\x8a\x08" + struct.pack("<q", value), b"N", b"\x88", b")", b"]", b"}", b"\x8c\x01a", b"X\0\0\0\0"]
        choices += [b"G" + struct.pack(">d", rng.choice((0.5, float("nan"), float("inf"), 1e308)))]
        return at, length, rng.choice(choices).hex()
    if kind == 4 and name in ("BINGET", "LONG_BINGET"):
        return at, length, (b"h" + bytes([rng.randrange(256)])).hex()
    same = [(a, n) for a, n, other in ops if other == name]
    other, size = rng.choice(same)
    return at, length, raw[other : other + size].hex()


def _zip_splice(rng: random.Random, raw: bytes) -> tuple[int, int, str]:
    """Changes a field of a header, of the directory, or of its end."""
    layouts = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22}
    mark = rng.choice(tuple(layouts))
    places, at = [], raw.find(mark)
    while at >= 0:
        places.append(at)
        at = raw.find(mark, at + 1)
    if not places:
        return rng.randrange(len(raw)), 1, ""
    at = rng.choice(places) + rng.randrange(2, layouts[mark]) // 2 * 2
    width = rng.choice((1, 2, 4))
    value = rng.choice(
        (*_INTERESTING, rng.randrange(1 << 16), len(raw), int.from_bytes(raw[at : at + 4], "little") + 1)
    )
    return at, width, (value & (1 << 8 * width) - 1).to_bytes(width, "little").hex()


def _text_splice(rng: random.Random, raw: bytes) -> tuple[int, int, str]:
    """Replaces a number, a word or a piece in quotes by something else."""
    import re

    found = [m.span() for m in re.finditer(rb'"[^"\n]*"|[\w.+-]+|[\[\]{}:,]', raw)]
    if not found:
        return 0, 0, rng.choice(_WORDS).encode().hex()
    begin, end = rng.choice(found)
    other = rng.choice(found)
    new = rng.choice((rng.choice(_WORDS).encode(), raw[other[0] : other[1]], b""))
    return begin, end - begin, new.hex()


def _tar_splice(rng: random.Random, raw: bytes) -> tuple[int, int, str]:
    """Changes a field of a member's header."""
    headers = [at for at in range(0, len(raw), 512) if raw[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(headers)
    begin, size = rng.choice(((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
    kinds = b"0123457xgLKSMVD\0Z"
    new = rng.choice((
        b"../x".ljust(size, b"\0")[:size], bytes(size), b"7" * size, b"\xff" * size, b"\x80" + b"\xff" * (size - 1),
        bytes([rng.choice(kinds)]) * size, b"a/" * (size // 2) + b"a" * (size % 2), rng.randbytes(size),
    ))  # fmt: skip
    return at + begin, size, new[:size].hex()


# ---------------------------------------------------------------------- building it


def _apply(raw: bytes, changes: list[tuple[Any, ...]]) -> bytes:
    for _, at, gone, new in changes:
        raw = raw[:at] + bytes.fromhex(new) + raw[at + gone :]
    return raw


def _fitting_sums(raw: bytes) -> bytes:
    """A tar file with the checksums of its headers made to fit, where they can be found."""
    out = bytearray(raw)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def contents(made: Mutant) -> list[tuple[str, bytes]]:
    """The parts that are changed, by their file, as they are afterwards; none of a tree."""
    if TARGETS[made.target].part == "tree":
        return []
    files = dict.fromkeys(change[0] for change in made.changes)
    parts = [(file, _apply(_part(made.target, file), [c for c in made.changes if c[0] == file])) for file in files]
    return [(file, _fitting_sums(raw) if file == "model.tar" else raw) for file, raw in parts]


def build(made: Mutant, folder: Path) -> Path:
    """Writes it below a folder.

    Returns:
        What to name on a command line.
    """
    what = TARGETS[made.target]
    copy = folder / "ckpt"
    if what.part == "tar":
        copy.mkdir(parents=True)
        (copy / "model.tar").write_bytes(next((raw for _, raw in contents(made)), _tar(what.golden)))
        return copy / "model.tar"
    shutil.copytree(GOLDEN / what.golden, copy)
    if what.part == "tree":
        for file, verb, other in made.changes:
            _disturb(copy, copy / file, verb, other)
        return copy / what.named
    for file, new in contents(made):
        path = copy / file
        if what.part == "pickle":
            new = rezip(path.read_bytes(), {"/data.pkl": new})
        elif what.part == "safetensors":
            raw = path.read_bytes()
            rest = raw[8 + int.from_bytes(raw[:8], "little") :]
            new = len(new).to_bytes(8, "little") + new + rest
        path.write_bytes(new)
    return copy / what.named


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _disturb(root: Path, path: Path, verb: str, other: str) -> None:
    """One change to a tree; what is not there any more is left alone."""
    if not os.path.lexists(path):
        return
    second = root / other if "/" in other or (root / other).exists() else path.with_name(other)
    same = second == path or second in path.parents or path in second.parents
    verbs: dict[str, Callable[[], Any]] = {
        "delete": lambda: _remove(path),
        "empty": lambda: (_remove(path), path.touch()),
        "folder": lambda: (_remove(path), path.mkdir()),
        "link": lambda: (_remove(path), path.symlink_to(second)),
        "pipe": lambda: (_remove(path), os.mkfifo(path)),
        "cut": lambda: os.truncate(path, path.stat().st_size // 2) if path.is_file() else None,
        "flip": lambda: path.write_bytes(_flipped(path.read_bytes())) if path.is_file() else None,
    }
    if verb in verbs:
        verbs[verb]()
    elif not same and verb == "copy" and path.is_dir() == second.is_dir() and os.path.lexists(second):
        _remove(second)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, second)
    elif not same and verb in ("swap", "rename") and second.parent.is_dir():
        middle = root / "between"
        path.rename(middle)
        if os.path.lexists(second):
            second.rename(path)
        middle.rename(second)


def _flipped(raw: bytes) -> bytes:
    return (
        raw[: len(raw) // 2]
        + bytes(b ^ 0xFF for b in raw[len(raw) // 2 : len(raw) // 2 + 4])
        + raw[len(raw) // 2 + 4 :]
    )
