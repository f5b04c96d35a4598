"""What every storage format must pass: one class, inherited once for each format.

    from harness.conformance import Conformance, megatron_case

    class TestTheFormat(Conformance):
        FORMAT = "zarr"                                                  # what `Catalog.format` says
        CASES = (megatron_case("v009_zarr_llama_adam_tp2pp2"), ...)      # real checkpoints, each with its truth
        CHECKSUMS = False                                                # nothing in it tells that a payload byte flipped

`CASES[:DEEP]` are also damaged, poisoned, and run through the commands. A checkpoint that no architecture fits names the
commands that its tensors go through instead.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from converters.box import Box
from converters.errors import FormatError, IntegrityError
from converters.formats import open_checkpoint
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.optimizer.state import optimizer_state
from distckpt_cli.app import main
from harness.checkpoints import GOLDENS, flip, payloads, tree
from harness.legacy_cases import LEGACY
from harness.reshard_cases import expected
from harness.support import GOLDEN, load_safetensors, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader

MEGATRON = (("reshard", "SRC", "DST", "--tp", "1"), ("export-hf", "SRC", "DST"))
_PADDED = re.compile(r"(word_embeddings|output_layer)\.weight$")  # the truth has no rows of padding


@dataclass(frozen=True)
class Case:
    """A real checkpoint.

    Attributes:
        golden: Its folder in `tests/golden`.
        wanted: Makes the elements of every tensor by name in the catalog, as unsigned integers of their size.
        commands: Command lines that must work on it; SRC and DST stand for the folders.
        dtypes: Element types by name, where they are known; names that are absent are not compared.
    """

    golden: str
    wanted: Callable[[], dict[str, np.ndarray]]
    commands: tuple[tuple[str, ...], ...] = MEGATRON
    dtypes: dict[str, str] = field(default_factory=dict)


def megatron_case(golden: str, config: str | None = None, *, optimizer: bool | None = None) -> Case:
    """A golden whose tensors are those of a config in `golden/truth`: weights, and where it has any optimizer state that.

    Args:
        golden: The folder's name.
        config: The truth; by default as `GOLDENS` or `LEGACY` says.
        optimizer: Whether it holds optimizer state; by default unless its name says "weights".
    """
    config = config or (GOLDENS.get(golden) or LEGACY[golden])[0]
    optimizer = "weights" not in golden if optimizer is None else optimizer

    def wanted() -> dict[str, np.ndarray]:
        out = {}
        for key, value in expected(config, optimizer=optimizer).items():
            state, name = key.split("/", 1)
            out[name if state == "model" else f"optimizer.state.{state}.{name}"] = value
        return out

    return Case(golden, wanted)


def held(reader: Reader) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint, optimizer state under the parameters' names."""
    state = optimizer_state(reader)
    rest = {n: t for n, t in reader.catalog.tensors.items() if n not in state.replaced and t.kind != "optimizer"}
    named = {n: t for n, t in reader.catalog.tensors.items() if t.kind == "optimizer" and not state.tensors}
    return rest | named | dict(state.tensors)


class Conformance:
    """The tests. `FORMAT`, `CASES` and, for formats without checksums, `CHECKSUMS` are for the format to set."""

    FORMAT: ClassVar[str]
    CASES: ClassVar[tuple[Case, ...]]
    CHECKSUMS: ClassVar[bool] = True
    DEEP: ClassVar[int] = 1

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.CASES, ids=[case.golden for case in self.CASES])
        if "deep" in metafunc.fixturenames:
            deep = self.CASES[: self.DEEP]
            metafunc.parametrize("deep", deep, ids=[case.golden for case in deep])

    @pytest.fixture
    def copy(self, deep, tmp_path):
        """A writable copy of a checkpoint: the whole of what the golden's folder holds."""
        shutil.copytree(GOLDEN / deep.golden, tmp_path / "src")
        return tmp_path / "src"

    # ------------------------------------------------------------------ what it holds

    def test_what_it_is(self, case):
        reader = open_checkpoint(GOLDEN / case.golden)
        assert reader.name == reader.catalog.format == self.FORMAT
        assert not reader.catalog.problems
        assert reader.catalog.framework

    def test_every_tensor_is_the_truth(self, case):
        reader, wanted = open_checkpoint(GOLDEN / case.golden), case.wanted()
        found = held(reader)
        assert found.keys() == wanted.keys()
        sources = Sources(reader, found)
        gatherer = Gatherer(sources)
        for name, info in found.items():
            value, true = read_tensor(reader, info), wanted[name]
            assert value.dtype == true.dtype, name
            unpadded = value[: true.shape[0]] if _PADDED.search(name) else value
            assert unpadded.shape == true.shape, name
            assert np.array_equal(unpadded, true), name
            assert case.dtypes.get(name, info.dtype.name) == info.dtype.name, name
            assert np.array_equal(gatherer.gather(name, Box.whole(info.shape)), value), f"{name}: the engine differs"
        sources.complete(gatherer)
        gatherer.close()
        assert (sources.records_checked > 0) == self.CHECKSUMS

    def test_truth_can_be_missed(self, case):
        """The comparison above sees one bit."""
        reader = open_checkpoint(GOLDEN / case.golden)
        name, info = next((n, t) for n, t in held(reader).items() if t.numel)
        value = read_tensor(reader, info)
        value.reshape(-1)[0] ^= 1
        true = case.wanted()[name]
        assert not np.array_equal(value[: true.shape[0]] if true.ndim else value, true)

    # ------------------------------------------------------------------ the commands

    def test_commands(self, deep, tmp_path, capsys):
        source = GOLDEN / deep.golden
        before = tree(source)
        for view in ([], ["--files"], ["--objects"], ["--tensors"], ["--json"]):
            assert main(["inspect", str(source), *view]) == 0
        said = capsys.readouterr()
        assert self.FORMAT in said.out
        assert "Traceback" not in said.err
        for number, command in enumerate(deep.commands):
            argv = [{"SRC": str(source), "DST": str(tmp_path / f"{number}")}.get(word, word) for word in command]
            assert main([*argv, "-n", "--progress", "off"]) == 0, argv
            assert not (tmp_path / f"{number}").exists()
            assert main([*argv, "--progress", "off"]) == 0, argv
            assert any(path.stat().st_size for path in (tmp_path / f"{number}").rglob("*") if path.is_file())
        assert tree(source) == before

    def test_the_source_is_read_only(self, copy, deep, tmp_path):
        """No file of it is opened for writing, created, renamed or touched."""
        times = {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))}
        before = tree(copy)
        for command in deep.commands:
            argv = [{"SRC": str(copy), "DST": str(tmp_path / command[0])}.get(word, word) for word in command]
            assert main([*argv, "--progress", "off"]) == 0
        assert tree(copy) == before
        assert {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))} == times

    def test_fingerprint(self, copy):
        """It changes with a byte of what is read at open, a file's size, and a file's time; else it stays."""
        path, at, _ = _weight(copy)
        fingerprint = open_checkpoint(copy).fingerprint()
        assert open_checkpoint(copy).fingerprint() == fingerprint
        status, raw = path.stat(), path.read_bytes()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert open_checkpoint(copy).fingerprint() != fingerprint
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert open_checkpoint(copy).fingerprint() != fingerprint
        path.write_bytes(raw)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        reader = open_checkpoint(copy)
        assert reader.fingerprint() == fingerprint
        path.write_bytes(raw + b"x")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert reader.fingerprint() != fingerprint

    # ------------------------------------------------------------------ damage

    def test_a_missing_file(self, copy, deep, tmp_path, capsys):
        path, _, _ = _weight(copy)
        path.unlink()
        self._refused(copy, deep, tmp_path, capsys, re.escape(path.name))

    @pytest.mark.parametrize("cut", ["empty", "half of a weight"])
    def test_a_short_file(self, cut, copy, deep, tmp_path, capsys):
        path, at, size = _weight(copy)
        os.truncate(path, 0 if cut == "empty" else at + size // 2)
        self._refused(copy, deep, tmp_path, capsys, re.escape(path.name))

    def test_a_flipped_byte(self, copy, deep, tmp_path, capsys):
        path, at, size = _weight(copy)
        flip(path, at + size // 2, 1)
        if self.CHECKSUMS:
            # a proof by values, where there is one, comes before the checksum, and names the tensor
            assert "CRC-32" in self._refused(copy, deep, tmp_path, capsys, f"{re.escape(path.name)}|round", codes=(1,))
            return
        reader = open_checkpoint(copy)  # whoever finds a checksum in the format after all makes this fail
        fd = os.open(path, os.O_RDONLY)
        try:
            for info in reader.catalog.tensors.values():
                for chunk in info.chunks():
                    if reader.files[reader.file_of(chunk.record)] == path:
                        assert reader.locate(chunk.record, lambda at, n: os.pread(fd, n, at)).crc is None
        finally:
            os.close(fd)

    def source(self, copy):
        """Where a damaged copy is read."""
        return copy

    def _refused(self, copy, deep, tmp_path, capsys, name, codes=(1, 3)):
        """Every command refuses a damaged copy, by the file's name, and publishes nothing; `inspect` shows what is wrong."""
        copy = self.source(copy)
        capsys.readouterr()
        if codes != (1,):  # noticed when it is opened: refused then, or an error that names the tensors concerned
            try:
                found = [
                    p.message for p in open_checkpoint(copy).catalog.problems if p.severity == "error" and p.tensors
                ]
            except FormatError as refusal:
                found = [str(refusal)]
            assert any(re.search(name, text) for text in found)
        text = ""
        for number, command in enumerate(deep.commands):
            target = tmp_path / f"out{number}"
            argv = [{"SRC": str(copy), "DST": str(target)}.get(word, word) for word in command]
            code = main([*argv, "--progress", "off"])
            text = capsys.readouterr().err
            assert code in codes, text
            assert re.search(name, text), text
            assert "Traceback" not in text
            assert not target.exists()
        return text

    # ------------------------------------------------------------------ trust

    def test_nothing_is_executed(self, copy, deep, tmp_path, capsys):
        """Every pickle of the checkpoint, one file at a time, becomes one that would run a command."""
        marker = tmp_path / "executed"
        evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
        pickle.loads(evil)
        assert marker.exists()
        marker.unlink()
        poisoned = 0
        for path in sorted(path for path in copy.rglob("*") if path.is_file()):
            raw = path.read_bytes()
            bad = _poison(raw, evil)
            if bad == raw:
                continue
            poisoned += 1
            path.write_bytes(bad)
            for number, command in enumerate((("inspect", "SRC", "--objects"), *deep.commands)):
                target = tmp_path / f"out{poisoned}-{number}"
                argv = [{"SRC": str(copy), "DST": str(target)}.get(word, word) for word in command]
                assert main([*argv, *(["--progress", "off"] if number else [])]) in (0, 1, 3, 4), argv
                assert not marker.exists(), f"{path.name}: {argv}"
            capsys.readouterr()
            path.write_bytes(raw)
        assert poisoned

    def test_a_pipe_in_place_of_a_file(self, copy):
        """Nobody waits for it: it is refused when the checkpoint is opened, or when it is read."""
        path, _, _ = _weight(copy)
        path.unlink()
        os.mkfifo(path)

        def read():
            reader = open_checkpoint(copy)
            gatherer = Gatherer(Sources(reader, reader.catalog.tensors))
            for name, info in reader.catalog.tensors.items():
                gatherer.gather(name, Box.whole(info.shape))

        with pytest.raises((FormatError, IntegrityError)):
            read()


def _weight(folder: Path) -> tuple[Path, int, int]:
    """File, first byte and bytes of a stored piece of a weight: the last one that is no scalar."""
    found = [p for p in payloads(folder, "weight") or payloads(folder) if p[3] > 8]
    return found[-1][1:]


_MEMBER = re.compile(rb"PK\x03\x04.{22}(..)(..)[^\x00/]*/data\.pkl", re.DOTALL)


def _poison(raw: bytes, evil: bytes) -> bytes:
    """A file with every pickle in it replaced: a bare one, and those that `torch.save` put into zip archives."""
    if raw[:1] == b"\x80" and b"." in raw[-1:]:
        return evil
    out = bytearray(raw)
    for found in _MEMBER.finditer(raw):
        name, extra = (int.from_bytes(n, "little") for n in found.groups())
        at = found.start() + 30 + name + extra
        out[at : at + len(evil)] = evil  # what follows the end of a pickle is not looked at by whoever loads it
    return bytes(out[: len(raw)])


CONTAINERS = (("convert", "SRC", "DST", "--to", "safetensors"), ("convert", "SRC", "DST/model.pt", "--to", "torch"))
TORCH_TYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BOOL": "bool",
    "C64": "complex64",
}
TORCH_TYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
TORCH_TYPES |= {f"{letter}{n}": f"{name}{n}" for letter, name in (("I", "int"), ("U", "uint")) for n in (8, 16, 32, 64)}


def own_case(golden: str) -> Case:
    """A golden with a truth of its own: every tensor by its name in the catalog."""
    path = GOLDEN / "truth" / f"{golden}.safetensors"
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    dtypes = {name: TORCH_TYPES[entry["dtype"]] for name, entry in header.items() if name != "__metadata__"}
    return Case(golden, lambda: load_safetensors(path), CONTAINERS[:1], dtypes)
