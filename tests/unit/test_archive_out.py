"""Files of many tensors that we stream are, byte for byte, what torch.save writes; and torch loads them, mapped."""

from __future__ import annotations

import hashlib
import io
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.box import Box
from converters.catalog import Catalog, Part, TensorInfo
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.errors import DistckptError, RequestError
from converters.execute.publish import Staging
from converters.execute.run import Run
from converters.formats.base import Reader
from converters.formats.containers.archive_out import ArchiveFile, ArchiveOutput
from converters.planning.job import Job
from converters.planning.plan import Copy, Op, Piece, end_to_end
from converters.torchzip.records import Payload
from converters.torchzip.records_out import global_node, tensor_node

if TYPE_CHECKING:
    from pathlib import Path

    from converters.pickles.nodes import Obj


class Raw(Reader):
    """A source of tensors that lie one behind the other in a file."""

    name = "raw"

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.files, self._places, infos = [path], [], {}
        with path.open("wb") as file:
            for record, (name, tensor) in enumerate(tensors.items()):
                at, raw = file.tell(), tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                file.write(raw.data if raw.size else b"")
                self._places.append(Payload(at, raw.size, None, at, raw.size))
                shape = tuple(tensor.shape)
                array = StoredArray(
                    name, shape, *(np.array([n], np.int64) for n in ((0,) * len(shape), shape)), np.array([record])
                )
                infos[name] = TensorInfo(name, dtype(str(tensor.dtype)), shape, "weight", (Part(array),))
        self.catalog = Catalog(path.parent, "raw", "test", infos)

    def file_of(self, record):
        return 0

    def locate(self, record, read):
        return self._places[record]

    def fingerprint(self):
        return hashlib.sha256(self.files[0].read_bytes()).hexdigest()


def write(tmp_path: Path, tensors: dict[str, torch.Tensor], files: list[ArchiveFile], **options) -> dict[str, bytes]:
    """Streams files out of tensors with the real engine."""
    source = Raw(tmp_path / "raw", tensors)
    output = ArchiveOutput(files)
    sources = source.catalog.tensors
    job = Job.build(
        sources, output.routes, output.files, source_fingerprint=source.fingerprint(), seals=output, **options
    )
    staging = Staging(tmp_path / "out", job.fingerprint, job.files)
    Run(job, source, staging.folder, staging.journal).run()
    written = {file.name: (staging.folder / file.name).read_bytes() for file in files}
    staging.discard()
    return written


def whole(name: str, tensor: torch.Tensor, op: Op = Op.COPY) -> list[Copy]:
    box = Box.whole(tuple(tensor.shape))
    return [Copy(name, box, name, Box.whole(box.shape[::-1]) if op is Op.TRANSPOSE else box, op)]


def made(kind: torch.dtype, *shape: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + torch.Size(shape).numel()) % 97).reshape(shape).to(kind)


def same_as_torch(written: bytes, saved: object, path: Path) -> bool:
    torch.save(saved, path)  # torch names the folder inside after the file
    return written == path.read_bytes()


def plain(file: ArchiveFile, tensors: dict[str, torch.Tensor]) -> dict[str, Obj]:
    return {
        name: file.tensor(Piece(name, dtype(str(t.dtype)), tuple(t.shape), copies=whole(name, t) if t.numel() else []))
        for name, t in tensors.items()
    }


CASES = {
    "one": {"w": made(torch.float32, 3, 5)},
    "types": {
        name: made(getattr(torch, name), 4, 3)
        for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8")
    },
    "new types": {"a": made(torch.float8_e4m3fn, 7), "b": made(torch.uint16, 2, 2), "c": made(torch.float8_e5m2, 3)},
    "empty": {"a": torch.zeros(0), "b": made(torch.float32, 3), "c": torch.zeros(2, 0, dtype=torch.bfloat16)},
    "scalar": {"step": torch.tensor(7.0), "count": torch.tensor(3)},
    "digits": {str(n): made(torch.float32, n + 1) for n in range(12)},  # names that torch's own keys meet
    "same shape": {f"layers.{n}.w": made(torch.bfloat16, 2, 2, start=n) for n in range(300)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_what_torch_saves(case, tmp_path):
    tensors = CASES[case]
    file = ArchiveFile("model.pt")
    file.tree = {"model": plain(file, tensors), "iteration": 10, "lr": [0.1, (1, 2)]}
    written = write(tmp_path, tensors, [file])["model.pt"]
    assert same_as_torch(written, {"model": tensors, "iteration": 10, "lr": [0.1, (1, 2)]}, tmp_path / "model.pt")
    loaded = torch.load(io.BytesIO(written), weights_only=True)
    for name, tensor in tensors.items():
        assert torch.equal(loaded["model"][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("count", [2, 9, 10, 54, 55, 1000])
def test_any_number_of_tensors(count, tmp_path):
    """The id that torch stores depends on how many there are, in a way of its own."""
    tensors = {f"w{n}": made(torch.float32, 2, start=n) for n in range(count)}
    file = ArchiveFile("deep/er/model.pt")
    file.tree = plain(file, tensors)
    written = write(tmp_path, tensors, [file])
    assert same_as_torch(written["deep/er/model.pt"], tensors, tmp_path / "model.pt")


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "bool", "int64"])), max_size=6
    )
)
def test_any_tensors(tmp_path_factory, shapes):
    tmp_path = tmp_path_factory.mktemp("any")
    tensors = {f"t{n}": made(getattr(torch, kind), *shape, start=n) for n, (shape, kind) in enumerate(shapes)}
    file = ArchiveFile("x.pt")
    file.tree = plain(file, tensors)
    assert same_as_torch(write(tmp_path, tensors, [file])["x.pt"], tensors, tmp_path / "x.pt")


def test_tied_tensors_and_views_share_a_storage(tmp_path):
    base = made(torch.bfloat16, 6, 4)
    first, second = made(torch.float32, 2, 3), made(torch.float32, 4, start=50)
    flat = torch.cat([first.reshape(-1), torch.zeros(2), second])
    file = ArchiveFile("model.pt")
    kind, wide = dtype("bfloat16"), dtype("float32")
    shared = file.storage([Piece("base", kind, (6, 4), copies=whole("base", base))])
    parts = [
        (0, Piece("first", wide, (2, 3), copies=whole("first", first))),
        (8, Piece("second", wide, (4,), copies=whole("second", second))),
    ]
    buffer = file.storage(end_to_end(parts, wide, 12))
    file.tree = {
        "embedding": tensor_node(shared, kind, (6, 4)),
        "output": tensor_node(shared, kind, (6, 4)),
        "row": tensor_node(shared, kind, (4,), offset=8),
        "column": tensor_node(shared, kind, (6,), offset=1, strides=(4,)),
        "buffer": tensor_node(buffer, wide, (12,)),
    }
    written = write(tmp_path, {"base": base, "first": first, "second": second}, [file])["model.pt"]
    saved = {"embedding": base, "output": base.view(6, 4), "row": base[2], "column": base[:, 1], "buffer": flat}
    assert same_as_torch(written, saved, tmp_path / "model.pt")


def test_casts_transposes_fills_and_several_files(tmp_path):
    tensors = {"a": made(torch.float32, 300, 70), "b": made(torch.bfloat16, 33, 5)}
    one, two = ArchiveFile("r0/one.pt"), ArchiveFile("r1/two.pt")
    half = dtype("bfloat16")
    one.tree = {"a": one.tensor(Piece("a", half, (300, 70), copies=whole("a", tensors["a"])))}
    padded = [Copy("b", Box.whole((33, 5)), "b", Box((0, 1), (33, 5)))]
    two.tree = [
        two.tensor(Piece("a", dtype("float32"), (70, 300), copies=whole("a", tensors["a"], Op.TRANSPOSE))),
        two.tensor(Piece("b", half, (40, 6), copies=padded, fills=[Box((0, 0), (33, 1)), Box((33, 0), (7, 6))])),
        two.literal(dtype("uint8"), (3,), b"abc"),
    ]
    written = write(tmp_path, tensors, [one, two], max_memory=1 << 20, threads=3)
    expected = torch.zeros(40, 6, dtype=torch.bfloat16)
    expected[:33, 1:] = tensors["b"]
    assert same_as_torch(written["r0/one.pt"], {"a": tensors["a"].bfloat16()}, tmp_path / "one.pt")
    letters = torch.tensor(list(b"abc"), dtype=torch.uint8)
    saved = [tensors["a"].T.contiguous(), expected, letters]
    assert same_as_torch(written["r1/two.pt"], saved, tmp_path / "two.pt")


def test_what_another_archive_held_is_adopted(tmp_path):
    from converters.formats.containers.archive import PtFile

    state = {"rng": [torch.arange(5, dtype=torch.uint8), torch.arange(12).view(3, 4)[1]], "again": None}
    state["again"] = state["rng"][0]
    torch.save(state, tmp_path / "state.pt")
    source = PtFile.read(tmp_path, "state.pt")
    members = {name: source.contents(tmp_path, name) for name in source.members}
    weight = made(torch.float32, 3)
    file = ArchiveFile("model.pt")
    file.tree = {
        "w": file.tensor(Piece("w", dtype("float32"), (3,), copies=whole("w", weight))),
        "state": file.adopt(source.tree, members),
    }
    written = write(tmp_path, {"w": weight}, [file])["model.pt"]
    loaded = torch.load(io.BytesIO(written), weights_only=True)
    assert torch.equal(loaded["w"], weight)
    assert loaded["state"]["rng"][0] is loaded["state"]["again"]
    assert [t.tolist() for t in loaded["state"]["rng"]] == [[0, 1, 2, 3, 4], [4, 5, 6, 7]]
    assert loaded["state"]["rng"][1].untyped_storage().nbytes() == 96  # the view's whole storage
    with pytest.raises(RequestError, match="is not there"):
        ArchiveFile("model.pt").adopt(PtFile.read(tmp_path, "state.pt").tree, {})


def test_a_file_without_streamed_tensors(tmp_path):
    file = ArchiveFile("args.pt")
    file.tree = {
        "dtype": global_node("torch", "bfloat16"),
        "t": file.literal(dtype("int64"), (), (5).to_bytes(8, "little")),
    }
    written = write(tmp_path, {"unused": torch.zeros(1)}, [file])["args.pt"]
    assert same_as_torch(written, {"dtype": torch.bfloat16, "t": torch.tensor(5)}, tmp_path / "args.pt")


def test_tensors_are_mapped(tmp_path):
    tensors = {"a": made(torch.float32, 100, 3), "b": made(torch.bfloat16, 77)}
    file = ArchiveFile("model.pt")
    file.tree = plain(file, tensors)
    path = tmp_path / "model.pt"
    path.write_bytes(write(tmp_path, tensors, [file])["model.pt"])
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


ZEROS = Piece("zeros", dtype("float32"), (2,), fills=[Box((0,), (2,))])


def test_an_archive_with_a_storage_that_was_not_sealed_is_not_ended():
    file = ArchiveFile("x.pt")
    file.tree = [file.tensor(ZEROS) for _ in range(3)]
    output = ArchiveOutput([file])
    output.seal(0, 0)
    with pytest.raises(DistckptError, match=r"2 storages not filled: x.pt"):
        list(output.end())


def test_a_reference_to_another_files_storage_is_refused():
    one, two = ArchiveFile("one.pt"), ArchiveFile("two.pt")
    two.tree = one.tensor(ZEROS)
    with pytest.raises(RequestError, match=r"two.pt refers to a tensor of another file"):
        ArchiveOutput([two])


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_hundred_thousand_tensors_are_planned_in_seconds(count):
    file = ArchiveFile("model.pt")
    kind, box = dtype("bfloat16"), Box.whole((64, 64))
    begin = time.process_time()
    file.tree = {
        f"w{n}": file.tensor(Piece(f"w{n}", kind, (64, 64), copies=[Copy(f"w{n}", box, f"w{n}", box)]))
        for n in range(count)
    }
    output = ArchiveOutput([file])
    assert (
        time.process_time() - begin < count / 1000
    )  # 5 s for the hundred thousand; looking through all for each: hours
    assert output.files[0].size > count * 64 * 64 * 2


@pytest.mark.slow
def test_members_beyond_four_gibibytes(tmp_path):
    numel = (2 << 30) + 100
    path = tmp_path / "model.pt"
    small = made(torch.float32, 5)
    torch.save(
        {"a": torch.zeros(numel, dtype=torch.uint8), "b": torch.zeros(numel, dtype=torch.uint8), "c": small}, path
    )
    file = ArchiveFile("model.pt")
    kind = dtype("uint8")
    file.tree = {name: file.tensor(Piece(name, kind, (numel,), fills=[Box((0,), (numel,))])) for name in "ab"}
    file.tree |= {"c": file.tensor(Piece("c", dtype("float32"), (5,), copies=whole("c", small)))}
    source = Raw(tmp_path / "raw", {"c": small})
    output = ArchiveOutput([file])
    job = Job.build(
        source.catalog.tensors, output.routes, output.files, source_fingerprint=source.fingerprint(), seals=output
    )
    staging = Staging(tmp_path / "out", job.fingerprint, job.files)
    Run(job, source, staging.folder, staging.journal).run()
    with path.open("rb") as theirs, (staging.folder / "model.pt").open("rb") as ours:
        while block := theirs.read(16 << 20):
            assert block == ours.read(16 << 20)
        assert not ours.read(1)


def test_what_an_interrupted_run_had_as_a_literal_is_part_of_the_jobs_identity():
    """A run with other contents of the same size, such as another random state, must not go on with it."""

    def fingerprint(content):
        file = ArchiveFile("model.pt")
        file.tree = {"state": file.literal(dtype("uint8"), (3,), content)}
        output = ArchiveOutput([file])
        return Job.build({}, output.routes, output.files, source_fingerprint="x", seals=output).fingerprint

    assert fingerprint(b"abc") == fingerprint(b"abc")
    assert fingerprint(b"abc") != fingerprint(b"abd")
