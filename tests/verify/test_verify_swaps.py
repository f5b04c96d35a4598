"""What production systems do to checkpoints, with every checksum in order: which of it `verify` finds, and by which check.

Each damage is one row. `None` says that nothing but a manifest finds it; that it is so is tested, too, so that a row that
begins to be found turns red here and is entered.
"""

from __future__ import annotations

import os
import shutil
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from converters import verify
from converters.errors import FormatError
from converters.execute.manifest import listed_files, write_manifest
from converters.formats import open_checkpoint
from distckpt_cli.app import main
from harness.checkpoints import payloads, write_llama
from harness.on_disk import read, sealed, write
from harness.support import GOLDEN
from harness.verify_cases import cli, golden_folder, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIST, DIST_WEIGHTS, MOE = "llama_adam_tp2pp2", "qwen2_weights_tp2pp2", "mixtral_adam_ep2tp2"
FULL, BUCKETS, EMBEDDED = (
    "llama_fullyreshardable_tp2pp2dp2",
    "llama_dpreshardable_tp2pp2dp2",
    "v019_llama_fullyreshardable_tp2dp2",
)
ZARR, LEGACY, LEGACY_DIST = "v009_zarr_llama_adam_tp2pp2", "legacy_llama_adam_tp2pp2", "legacy_llama_distopt_tp2pp2dp2"
FSDP, DCP, PLAIN = "fsdp_llama_tp2dp2", "mlm_fsdp2_llama_dp2", "fsdp2_llama_dp2"
BYTE, VESCALE, TORCH, BINS = (
    "bytecheckpoint_llama_dp2",
    "vescale_llama_tp2pp2dp2",
    "torch_mixtral_megatron",
    "hf_mixtral_bin",
)
EVERY = [
    DIST,
    DIST_WEIGHTS,
    MOE,
    FULL,
    BUCKETS,
    EMBEDDED,
    ZARR,
    LEGACY,
    LEGACY_DIST,
    FSDP,
    DCP,
    PLAIN,
    BYTE,
    VESCALE,
    TORCH,
    BINS,
]


def checks(place: Path, **options) -> tuple[set[str], str]:
    """The checks that say no, and all they say, tensors too; "opening" where it cannot even be opened."""
    try:
        report = verify(place, **options)
    except FormatError as error:
        return {"opening"}, str(error)
    texts = [f"{c.name}: {f.message}" for c in report.checks for f in c.findings]
    return {check.name for check in report.checks if check.count["error"]}, "\n".join([*texts, *report.affected])


@pytest.fixture
def copy(tmp_path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = tmp_path / golden_folder(name).name
        shutil.copytree(golden_folder(name), folder)
        return folder / opened(name).name if opened(name).is_file() else folder

    return make


def data_files(place: Path) -> list[Path]:
    """Files with elements of tensors, the one with the most of them first."""
    held: dict[Path, int] = {}
    for _, path, _, size in payloads(place):
        held[path] = held.get(path, 0) + size
    return sorted(held, key=lambda path: (-held[path], path))


def weight(place: Path, suffix: str = "mlp.linear_fc1.weight") -> str:
    """A matrix of the second layer, or any."""
    names = list(open_checkpoint(place).catalog.weights)
    found = [n for n in names if ".1." in n and n.endswith(suffix)]
    large = [n for n, t in open_checkpoint(place).catalog.weights.items() if len(t.shape) == 2]
    return (found or [n for n in large if ".1." in n] or large)[0]


# ---------------------------------------------------------------------- files


def last_file_cut(place):
    path = data_files(place)[0]
    os.truncate(path, path.stat().st_size * 3 // 4)


def file_without_its_last_bytes(place):
    path = data_files(place)[0]
    os.truncate(path, path.stat().st_size - 1)


def file_empty(place):
    os.truncate(data_files(place)[0], 0)


def file_lost(place):
    data_files(place)[0].unlink()


def file_zeroed(place):
    """Allocated, never written."""
    path = data_files(place)[0]
    path.write_bytes(bytes(path.stat().st_size))


def zeroed_page(place):
    """A page of 512 bytes in the elements, checksums as they were."""
    _, path, at, size = max(payloads(place, "weight"), key=lambda p: p[3])
    raw = bytearray(path.read_bytes())
    raw[at : at + min(512, size)] = bytes(min(512, size))
    path.write_bytes(raw)


def grown(place):
    """The same file twice, one behind the other: an append where a write was meant."""
    path = data_files(place)[0]
    path.write_bytes(path.read_bytes() * 2)


def bytes_behind(place):
    """The rest of a longer file that was there before."""
    path = data_files(place)[0]
    path.write_bytes(path.read_bytes() + bytes(100))


FILES = [
    bytes_behind,
    last_file_cut,
    file_without_its_last_bytes,
    file_empty,
    file_lost,
    file_zeroed,
    grown,
    zeroed_page,
]
# zarr and ByteCheckpoint have no checksums; what a master weight does not tell is found by a manifest only
MISSED = {(zeroed_page, BYTE), (file_zeroed, ZARR)}


@pytest.mark.parametrize("name", EVERY)
def test_files(name, copy):
    """Every one is found in every format, the affected file named."""
    folder = copy(name)
    before = (
        {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if folder.is_dir()
        else {folder: folder.read_bytes()}
    )
    for damage in FILES:
        damage(folder)
        found, text = checks(folder)
        assert "opening" not in found or folder.suffix == ".pt", (damage.__name__, text)  # it is an answer, exit code 1
        if damage in (grown, bytes_behind) and not found:  # nothing that is read is wrong: worth a look
            assert "bytes behind its last record" in text, damage.__name__
        else:
            assert bool(found) == ((damage, name) not in MISSED), (damage.__name__, text)
        for path, raw in before.items():
            if not path.exists() or path.read_bytes() != raw:
                path.write_bytes(raw)
    assert checks(folder)[0] == set()


# ---------------------------------------------------------------------- values in their places, checksums right


def shifted(place):
    """Elements 64 places further on: an offset that is wrong by one alignment."""
    name = weight(place)
    write(place, name, np.roll(read(place, name).reshape(-1), 64).reshape(read(place, name).shape))


def of_another_iteration(place):
    """One weight as it was some steps ago."""
    name = weight(place)
    write(place, name, read(place, name) ^ 8)


def halves_exchanged(place):
    """Gate and up, or two tensor-parallel ranks' rows."""
    name = weight(place)
    values = read(place, name)
    write(place, name, np.concatenate(np.split(values, 2)[::-1]))


def layers_exchanged(place):
    one = weight(place)
    other = one.replace(".1.", ".0.", 1)
    a, b = read(place, one), read(place, other)
    write(place, one, b)
    write(place, other, a)


def rank_written_twice(place):
    """The first half of the rows, which one rank has, in place of those of the other one, too."""
    name = weight(place)
    top = np.split(read(place, name), 2)[0]
    write(place, name, np.concatenate([top, top]))


def zeros(place):
    name = weight(place)
    values = read(place, name)
    values.reshape(-1)[:256] = 0
    write(place, name, values)


def nan_page(place):
    name = weight(place)
    values = read(place, name)
    values.reshape(-1)[:256] = 0x7FC0 if values.dtype.itemsize == 2 else 0x7FC00000
    write(place, name, values)


def scaled(place):
    """Twice as large: a sum over two ranks that was meant to be a mean."""
    name = weight(place)
    values = read(place, name)
    exponent = 1 << (7 if values.dtype.itemsize == 2 else 23)
    write(place, name, np.where(values == 0, values, values + np.asarray(exponent, values.dtype)))


VALUES = [
    shifted,
    of_another_iteration,
    halves_exchanged,
    layers_exchanged,
    rank_written_twice,
    zeros,
    nan_page,
    scaled,
]
WITH_MASTERS = [DIST, MOE, BUCKETS, LEGACY, LEGACY_DIST, ZARR, DCP]


@pytest.mark.parametrize("name", WITH_MASTERS)
def test_weights_that_are_not_those_of_the_optimizer(name, copy):
    """All found where there are master weights, the tensor named, whatever the format."""
    place = copy(name)
    wrong = weight(place)
    other = wrong.replace(".1.", ".0.", 1)
    right = {n: read(place, n) for n in (wrong, other)}
    for damage in VALUES:
        damage(place)
        found, text = checks(place)
        assert "optimizer" in found, damage.__name__
        assert wrong in text or other in text or wrong.replace(".1.", ".{0..1}.", 1) in text
        for n in right:
            write(place, n, right[n])
    assert checks(place)[0] == set()


@pytest.mark.parametrize("damage", VALUES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [DIST_WEIGHTS, TORCH, BINS, FSDP])
def test_weights_without_masters(name, damage, copy):
    """NaN is found by its value, a shard written twice by its checksum; of the others nothing but a manifest knows."""
    place = copy(name)
    folder = open_checkpoint(place).catalog.path
    digests = {n: _digest(folder / n) for n in listed_files(folder)} if folder.is_dir() else {}
    damage(place)
    found, text = checks(place, values=True)
    if damage is nan_page:
        assert "values" in found
        assert "elements are NaN" in text
    elif damage is rank_written_twice and name == DIST_WEIGHTS:
        assert "gate and up are the same elements" in text  # of this tensor that is what it looks like: a warning
        assert not found
    else:
        assert found == set(), "it is found now: enter it above"
    if digests:
        write_manifest(folder, "integrity.json", digests)
        assert "manifest" in checks(place)[0]


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------------- optimizer state of elsewhere

STATE = "optimizer.state.exp_avg"


def second(name: str) -> str:
    return name.replace("exp_avg.", "exp_avg_sq.")


def moments_exchanged(place):
    """First and second moment."""
    name = f"{STATE}.{weight(place)}"
    a, b = read(place, name), read(place, second(name))
    write(place, name, b)
    write(place, second(name), a)


def moment_of_another_rank(place):
    """The first moment of the other half of the rows."""
    name = f"{STATE}.{weight(place)}"
    write(place, name, np.concatenate(np.split(read(place, name), 2)[::-1]))


def moment_shifted(place):
    name = f"{STATE}.{weight(place)}"
    values = read(place, name)
    write(place, name, np.roll(values.reshape(-1), 64).reshape(values.shape))


def moment_of_another_layer(place):
    name = f"{STATE}.{weight(place)}"
    write(place, second(name), read(place, second(name).replace(".1.", ".0.", 1)))


MOMENTS = [moments_exchanged, moment_of_another_rank, moment_shifted, moment_of_another_layer]


@pytest.mark.parametrize("damage", MOMENTS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [DIST, LEGACY, ZARR, FSDP, EMBEDDED])
def test_moments_that_do_not_belong_together(name, damage, copy):
    """Masters and weights are in order; what Adam cannot have made is found with --values."""
    place = copy(name)
    damage(place)
    assert checks(place)[0] == set()
    found, text = checks(place, values=True)
    assert "optimizer" in found
    assert "elements of the first moment are too large for the second" in text
    assert f"{STATE}.{weight(place)}" in text


def test_both_moments_of_another_parameter_are_not_found(copy):
    """In principle: nothing else depends on them. Documented in `converters.verification`."""
    place = copy(DIST)
    one = f"{STATE}.{weight(place)}"
    other = one.replace(".1.", ".0.", 1)
    for a, b in ((one, other), (second(one), second(other))):
        x, y = read(place, a), read(place, b)
        write(place, a, y)
        write(place, b, x)
    assert checks(place, values=True)[0] == set()


@pytest.mark.parametrize("changes", [{"optimizer": "sgd"}, {"adam_beta1": None}, {"adam_beta2": 0.5}])
def test_moments_of_an_unknown_optimizer_are_not_judged(changes, copy):
    from dataclasses import replace

    from converters.verification.run import VerifyOptions
    from converters.verification.run import verify_reader as run

    place = copy(DIST)
    moments_exchanged(place)
    reader = open_checkpoint(place)
    reader.catalog = replace(reader.catalog, args={**reader.catalog.args, **changes})
    report = run(reader, VerifyOptions(values=True))
    assert not any("first moment" in f.message for check in report.checks for f in check.findings)


def test_distributed_optimizer_of_another_rank(copy):
    place = copy(LEGACY_DIST)
    one, other = (place / f"mp_rank_0{n}_000" / "distrib_optim.pt" for n in (0, 1))
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)
    found, text = checks(place)
    assert found & {"optimizer", "structure"}
    assert "optimizer" in text


# ---------------------------------------------------------------------- files of elsewhere


@pytest.mark.parametrize("damage", [file_empty, file_zeroed, last_file_cut])
def test_the_file_with_an_embedded_common_state(damage, copy):
    """Megatron-Core 0.19: without it the checkpoint cannot be opened; that is an answer."""
    place = copy(EMBEDDED)
    damage(place)
    code, out, _ = cli(place)
    assert code == 1
    assert data_files(GOLDEN / EMBEDDED)[0].name in out


@pytest.mark.parametrize("pages", [0, 1])
def test_a_lost_page_among_many_layers(pages, tmp_path):
    """4 KiB of zeros at a multiple of 4 KiB, checksum and all: no other layer has a zero."""
    folder = tmp_path / "iter_0000007"
    write_llama(folder, layers=6, hidden=128, ffn=256, vocab=512, tp=1, pp=1, dtype="float32")
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    values = read(folder, name)
    values.reshape(-1)[2048 : 2048 + 1024 * pages] = 0
    write(folder, name, values)
    found, text = checks(folder, values=True)
    assert found == ({"values"} if pages else set())
    assert not pages or f"{name}: 1,024 of 65,536 elements are zero, no other element is" in text


def test_two_ranks_files_exchanged_in_legacy(copy):
    """Same sizes, and weights, masters and moments go with each other: the arguments in the files tell."""
    place = copy(LEGACY)
    names = sorted(path.name for path in place.iterdir())
    (place / names[0]).rename(place / "x")
    (place / names[2]).rename(place / names[0])
    (place / "x").rename(place / names[2])
    found, text = checks(place)
    assert found == {"structure"}
    assert f"{names[0]}/model_optim_rng.pt is of tensor-parallel rank 1, not 0: files were swapped" in text
    words = ["convert", str(place), str(place.parent / "out"), "--to", "torch_dist", "--progress", "off"]
    assert main(words) == 1
    assert not (place.parent / "out").exists()


def test_two_expert_ranks_files_exchanged_in_legacy(copy):
    """The dense weights are the same in both files, and the experts fit each other's places."""
    place = copy("legacy_mixtral_distopt_ep2pp2")
    assert checks(place)[0] == set()
    one, other = place / "mp_rank_00_000_000", place / "mp_rank_00_000_001"
    one.rename(place / "x")
    other.rename(one)
    (place / "x").rename(other)
    found, text = checks(place)
    assert "structure" in found
    assert f"{one.name}/model_optim_rng.pt is of expert-parallel rank 1, not 0: files were swapped" in text


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.load imports megatron-core's classes
def test_files_of_two_saves_in_legacy(copy):
    """The answer is no, not that nobody can say."""
    import torch

    place = copy(LEGACY)
    path = sorted(place.iterdir())[1] / "model_optim_rng.pt"
    tree = torch.load(path, weights_only=False)
    torch.save(tree | {"iteration": 9}, path)
    found, text = checks(place)
    assert found == {"structure"}
    assert "two iterations are mixed: " in text


def test_one_ranks_file_in_place_of_anothers(copy):
    place = copy(LEGACY)
    names = sorted(path.name for path in place.iterdir())
    shutil.copy(place / names[0] / "model_optim_rng.pt", place / names[2] / "model_optim_rng.pt")
    found, text = checks(place)
    assert "structure" in found
    assert "is of tensor-parallel rank 0, not 1" in text


def test_a_file_copied_over_anothers_in_torch_dist(copy):
    """Weights alone, every record of the same size and kind: the same bytes lie in two places."""
    place = copy(DIST_WEIGHTS)
    rows = {}
    for name, path, at, size in payloads(place, "weight"):
        rows.setdefault((name, size), []).append((path, at, size))
    pair = next(found for (name, _), found in rows.items() if len(found) == 2 and "linear_qkv.weight" in name)
    (one, begin, size), (other, there, _) = pair
    data = one.read_bytes()[begin : begin + size]
    raw = bytearray(other.read_bytes())
    raw[there : there + size] = data
    sealed(raw, there, there + size, zlib.crc32(data))
    other.write_bytes(raw)
    found, text = checks(place)
    assert found == {"records"}
    assert "has the same elements in two places: a shard was written twice" in text
    assert one.name in text
    assert other.name in text


def test_equal_constants_are_no_twins(copy):
    place = copy(DIST_WEIGHTS)
    name = weight(place)
    write(place, name, np.zeros_like(read(place, name)))
    assert checks(place)[0] == set()


def test_files_of_another_iteration(copy):
    """The folder of iteration 20 with what was saved at 10; the same in every format of Megatron."""
    for name in (DIST, ZARR, LEGACY, FSDP, EMBEDDED):
        place = copy(name)
        place = open_checkpoint(place).catalog.path
        moved = place.rename(place.parent / "iter_0000020")
        found, text = checks(moved, quick=True)
        assert found == {"structure"}
        assert "iter_0000020 holds the state of iteration 10: files of another save, or a renamed folder" in text
        shutil.rmtree(place.parent / golden_folder(name).name, ignore_errors=True)
        shutil.rmtree(moved, ignore_errors=True)


def test_arguments_of_another_job(copy):
    from dataclasses import replace

    from converters.verification.run import VerifyOptions
    from converters.verification.run import verify_reader as run

    for args, words in (
        ({"world_size": 2}, "__2_0.distcp is of rank 2, the arguments are those of a job of 2 ranks"),
        ({"num_layers": 4}, "args say num_layers 4, but the checkpoint holds 2 layers"),
        ({"hidden_size": 64}, "args say hidden_size 64"),
        ({"ffn_hidden_size": 96}, "args say ffn_hidden_size 96"),
        ({"num_query_groups": 4}, "args say num_query_groups 4"),
        ({"vocab_size": 500}, "vocab_size is 500, but the embedding has 128 rows"),
    ):
        reader = open_checkpoint(copy(DIST).parent / "iter_0000010")
        reader.catalog = replace(reader.catalog, args={**reader.catalog.args, **args})
        report = run(reader, VerifyOptions(quick=True))
        assert words in "\n".join(f.message for f in report.check("structure").findings)
        shutil.rmtree(reader.catalog.path)


@pytest.mark.parametrize("content", ["", "1", "20", "10 ", "garbage"])
def test_a_tracker_that_was_written_in_part(content, copy, tmp_path):
    place = copy(DIST)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    found, text = checks(tmp_path, quick=True)
    if content.strip() == "10":
        assert found == set()
    else:
        assert found == {"opening"}
        assert "latest_checkpointed_iteration.txt" in text
    assert checks(place, quick=True)[0] == set()  # the iteration itself is in order


def test_a_stale_shard(copy):
    place = copy(DIST)
    shutil.copy(place / "__0_0.distcp", place / "__4_0.distcp")
    found, text = checks(place)
    assert found == set()
    assert "__4_0.distcp" in text
    assert "belongs to no record; left over from another save?" in text


def test_experts_exchanged(copy):
    """Two experts' weights: the masters tell; masters, too: nothing does, and every expert is as good in the other place."""
    place = copy(MOE)
    names = [n for n in open_checkpoint(place).catalog.weights if ".experts.0." in n and ".0.mlp" in n]
    masters = [n for n in open_checkpoint(place).catalog.tensors if "fp32_param" in n and n.endswith(names[0])]
    for name in (*names[:1], *masters[:1]):
        other = name.replace(".experts.0.", ".experts.1.")
        a, b = read(place, name), read(place, other)
        write(place, name, b)
        write(place, other, a)
        found, _ = checks(place, values=True)
        assert found == ({"optimizer"} if name in names else set())
