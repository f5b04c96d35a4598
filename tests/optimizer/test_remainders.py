"""Master weights that are stored as remainders of the weights: what they are is computed here once more, by other code."""

import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from converters.dtypes import dtype
from converters.errors import IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.io import gather
from converters.io.arithmetic import Arithmetic, unequal
from converters.io.remainders import join_masters
from converters.loading.loader import load as load_ranks
from converters.megatron.layout import Layout
from converters.optimizer.state import optimizer_state
from converters.optimizer.storage import complete_masters, keeps_remainders
from converters.pickles.nodes import Global, fields, set_field
from converters.verification.run import VerifyOptions, verify_reader
from converters.write.container import plan_torch
from converters.write.legacy import plan_legacy
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from harness.checkpoints import copy_golden, golden
from harness.reshard_cases import reshard
from harness.support import GOLDEN, read_tensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's DCP, of a process alone
NAMES = ("pao14_fsm_dp2", "pao16_full_tp2dp2", "pao16_dpr_tp2dp2", "paoM_dpr_dp2")
MASTER = "optimizer.state.param."
ROWS = 120  # of the vocabulary: what is behind them is padding


def master(weight, remainder):
    """Bits of the fp32 number of a weight's bits and a remainder, as TransformerEngine's adam.cu puts them together."""
    high = weight - 1 if remainder < 0 else weight
    return (high & 0xFFFF) << 16 | remainder & 0xFFFF


def kept(bits):
    """What TransformerEngine keeps of an fp32 number: the bits of the weight, and the remainder."""
    low = bits & 0xFFFF
    return (bits >> 16) + (low >= 1 << 15) & 0xFFFF, low - (1 << 16) if low >= 1 << 15 else low


@pytest.fixture(scope="module")
def expected():
    """Master weights of the checkpoint whose file has remainders by parameter, in fp32: the plainest one."""
    reader = open_checkpoint(golden("pao16_full_tp2dp2"))
    out = {}
    for name, info in reader.catalog.tensors.items():
        if name.startswith(MASTER):
            weights = read_tensor(reader, reader.catalog.tensors[name.removeprefix(MASTER)]).reshape(-1).tolist()
            remainders = read_tensor(reader, info).view("<f4").reshape(-1).tolist()
            values = [master(w, int(r)) for w, r in zip(weights, remainders, strict=True)]
            out[name.removeprefix(MASTER)] = np.array(values, "<u4").view("<f4").reshape(info.shape)
    assert len(out) == 15
    return out


def same(found, wanted):
    rows = min(len(found), len(wanted), ROWS) if len(found) != len(wanted) or len(found) > 100 else len(found)
    return np.array_equal(found.view("<u4")[:rows], wanted.view("<u4")[:rows])


def test_every_remainder_of_some_weights():
    remainders = np.arange(-(1 << 15), 1 << 15).astype(np.int16)
    for weight in (0x0000, 0x0001, 0x3F80, 0x7F80, 0x8000, 0xBF81, 0xFFFF):
        into = np.empty(len(remainders), "<u4")
        join_masters(np.full(len(remainders), weight, "<u2"), remainders.view("<u2"), into, "")
        assert into.tolist() == [master(weight, r) for r in remainders.tolist()]


def test_any_number_comes_back():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 2000, np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0xFFFF8000, 0x00008000  # ties, and a carry that wraps around
    pairs = [kept(value) for value in bits.tolist()]
    into = np.empty(len(bits), "<u4")
    join_masters(np.array([w for w, _ in pairs], "<u2"), np.array([r for _, r in pairs], "<i2").view("<u2"), into, "")
    assert np.array_equal(into, bits)


def test_a_number_in_the_middle_rounds_up_or_to_even():
    """TransformerEngine's weight is the upper one; what else rounds takes the even one. Both are right, no other is."""
    middle = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001], "<u4")
    fp32, bf16 = dtype("float32"), dtype("bfloat16")
    for weight, wrong in (
        ([0x3F81, 0x3F82, 0xBF81, 0x3F81], 0),
        ([0x3F80, 0x3F82, 0xBF80, 0x3F81], 0),
        ([0x3F82, 0x3F81, 0xBF82, 0x3F80], 4),
    ):
        assert unequal(Arithmetic(), middle, np.array(weight, "<u2"), fp32, bf16)[0] == wrong


@pytest.mark.parametrize("name", NAMES)
def test_masters_of_every_form(name, expected, tmp_path):
    reader = open_checkpoint(golden(name))
    assert all(info.dtype.name == "float32" for info in optimizer_state(reader).tensors.values())
    run_conversion(plan_torch(reader, tmp_path / "model.pt"))
    held = torch.load(tmp_path / "model.pt", weights_only=True)
    found = held["optimizer"]["state"]["param"]
    assert found.keys() == expected.keys()
    assert all(same(value.numpy(), expected[key]) for key, value in found.items())
    assert held["args"]["use_precision_aware_optimizer"] is False
    assert held["args"]["exp_avg_dtype"] == "torch.float32"


@pytest.mark.parametrize("name", NAMES)
def test_other_layouts_and_formats_hold_the_same(name, tmp_path):
    source = golden(name)
    plan, _ = reshard(name, tmp_path / "a", {"tp": 2, "pp": 2})
    assert plan.facts["changed_args"]["use_precision_aware_optimizer"] == {"from": True, "to": False}
    assert plan.facts["changed_args"]["exp_avg_sq_dtype"] == {"from": "torch.bfloat16", "to": "torch.float32"}
    reshard(name, tmp_path / "b", {"dp": 2}, optimizer="dp_reshardable")
    run_conversion(plan_legacy(open_checkpoint(source), tmp_path / "c", Layout(tp=2)))
    wanted = load_ranks(source, Layout(), 0, optimizer=True)
    for result in ("a", "b", "c"):
        reader = open_checkpoint(tmp_path / result)
        assert not keeps_remainders(optimizer_state(reader).tensors)
        found = load_ranks(tmp_path / result, Layout(), 0, optimizer=True)
        for key, value in wanted.items():
            assert value is None or same(found[key].float().numpy(), value.float().numpy()), key
        report = verify_reader(reader, VerifyOptions(values=True))
        assert report.good, str(report)
        assert report.check("optimizer").summary.startswith("15 master weights round to the weights")


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_gets_fp32_masters(name, expected):
    state = load_ranks(golden(name), Layout(), 0, optimizer=True)
    for key, value in expected.items():
        assert same(state[MASTER + key].numpy(), value), key


@pytest.mark.parametrize("name", [*NAMES, "hy16_dpr_tp2dp2", "gdn16_dpr_tp2dp2"])
def test_verify_is_silent(name):
    report = verify_reader(open_checkpoint(golden(name)), VerifyOptions(values=True))
    assert not any(check.findings for check in report.checks), str(report)
    assert report.check("optimizer").skipped == (name in NAMES)
    assert ("not checked" in report.check("optimizer").summary) == (name in NAMES)


def test_a_wrong_formula_is_seen(monkeypatch, expected):
    """Without the borrow every other master is one unit of bf16 too large: the comparisons above notice."""

    def wrong(weight, remainder, into, name):
        remainder = into.view(np.float32).astype(np.int16).view(np.uint16) if remainder is None else remainder
        np.left_shift(weight.astype(np.uint32), 16, out=into)
        np.bitwise_or(into, remainder, out=into)

    monkeypatch.setattr(gather, "join_masters", wrong)
    state = load_ranks(golden("pao16_full_tp2dp2"), Layout(), 0, optimizer=True)
    assert not all(same(state[MASTER + key].numpy(), value) for key, value in expected.items())


def test_bytes_between_parameters_are_not_looked_at(tmp_path):
    """Megatron-Core leaves them as they come from the allocator (`torch.empty`); we write zeros."""
    reader = open_checkpoint(golden("hy16_dpr_tp2dp2"))
    raw = {n: t for n, t in reader.catalog.tensors.items() if t.opaque}
    used = {n: sum(p.array.key == n for t in optimizer_state(reader).tensors.values() for p in t.parts) for n in raw}
    assert all(used.values())
    reshard("hy16_dpr_tp2dp2", tmp_path / "out", {"dp": 2}, optimizer="dp_reshardable")
    written = open_checkpoint(tmp_path / "out")
    for info in (t for t in written.catalog.tensors.values() if t.opaque):
        assert np.isfinite(read_tensor(written, info).view("<f4")).all()


@pytest.mark.parametrize("name", NAMES)
def test_remainders_for_a_job_with_them(name, expected, tmp_path):
    """They are moved as they are, at any layout; Megatron loads them from dp_reshardable only."""
    options = {"optimizer": "dp_reshardable", "masters": "remainders"}
    plan, _ = reshard(name, tmp_path / "a", {"tp": 2, "pp": 2}, **options)
    assert not {"use_precision_aware_optimizer", "exp_avg_dtype"} & plan.facts["changed_args"].keys()
    assert any("0.17 or later" in note for note in plan.notes)
    raw = [t for t in open_checkpoint(tmp_path / "a").catalog.tensors.values() if t.opaque]
    assert {t.name.rpartition(".")[2]: t.dtype.name for t in raw} == {
        "param": "int16",
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
    }
    state = load_ranks(tmp_path / "a", Layout(), 0, optimizer=True)
    assert all(same(state[MASTER + key].numpy(), value) for key, value in expected.items())
    with pytest.raises(RequestError, match="loads no remainders from fully_reshardable"):
        reshard(name, tmp_path / "b", {"tp": 2}, masters="remainders")
    with pytest.raises(RequestError, match="remainders of them are not made"):
        reshard("llama_adam_tp2pp2", tmp_path / "b", {"tp": 2}, **options)
    assert not (tmp_path / "b").exists()


# ---------------------------------------------------------------------- what is not as it should be


def changed_copy(name, into, change):
    """A copy written by torch's own DCP after `change(tensors)`; objects are left out."""
    source = golden(name)
    metadata = FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    load(tensors, checkpoint_id=source, no_dist=True)
    change(tensors)
    save(tensors, storage_writer=FileSystemWriter(into), no_dist=True)
    for file in ("common.pt", "metadata.json"):
        shutil.copy(source / file, into / file)
    return into


def with_args(folder, **values):
    archive = Archive.read(folder / "common.pt")
    for key, value in values.items():
        assert key in fields(archive.tree["args"])
        set_field(archive.tree["args"], key, value)
    (folder / "common.pt").write_bytes(archive.dump(archive.tree, "common"))
    return folder


FC2 = "decoder.layers.mlp.linear_fc2.weight"


def no_integer(tensors):
    tensors[MASTER + FC2][1, 3, 5] += 0.5


def other_type(tensors):
    for key in [key for key in tensors if key.startswith(MASTER)]:
        tensors[key] = tensors[key].to(torch.int32)


def longer(tensors):
    key = MASTER + FC2
    tensors[key] = torch.cat([tensors[key], tensors[key]], dim=1)


def without_one(tensors):
    del tensors[MASTER + FC2]


def fp32_weight(tensors):
    tensors[FC2] = tensors[FC2].float()


def plain_masters(tensors):
    for key in [key for key in tensors if key.startswith(MASTER)]:
        tensors[key] = tensors[key.removeprefix(MASTER)].float() * (1 + 2.0**-12)


@pytest.mark.parametrize(
    ("name", "change", "code", "text"),
    [
        ("pao16_full_tp2dp2", no_integer, 4, "whole numbers for some parameters only"),
        ("pao16_full_tp2dp2", other_type, 4, "are int32, which no known optimizer keeps them in"),
        ("pao16_full_tp2dp2", longer, 4, "but the weight beside it is"),
        ("pao16_full_tp2dp2", without_one, 1, "is missing"),
        ("pao16_full_tp2dp2", fp32_weight, 1, "do not round to the weights"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, code, text, tmp_path):
    reader = open_checkpoint(changed_copy(name, tmp_path / "iter_0000010", change))
    kind = {1: IntegrityError, 4: RequestError}[code]
    for plan in (
        lambda: plan_reshard(reader, tmp_path / "out", Layout(tp=2)),
        lambda: plan_legacy(reader, tmp_path / "out", Layout(tp=2)),
        lambda: plan_torch(reader, tmp_path / "out.pt"),
    ):
        with pytest.raises(kind, match=text):
            run_conversion(plan())
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000010"]


def test_a_number_that_is_no_remainder_is_met_while_reading():
    for value in (0.5, 32768.0, -32769.0, float("nan"), float("inf")):
        into = np.array([1.0, value], "<f4").view("<u4")
        with pytest.raises(IntegrityError, match="no remainders"):
            join_masters(np.zeros(2, "<u2"), None, into, "x")


def test_plain_masters_of_a_precision_aware_job_stay_plain(tmp_path):
    source = changed_copy("pao16_full_tp2dp2", tmp_path / "iter_0000010", plain_masters)
    found = optimizer_state(open_checkpoint(source)).tensors
    assert all(info.remainders is None for info in found.values())
    assert verify_reader(open_checkpoint(source)).good
    plan, _ = reshard(source, tmp_path / "out", {"tp": 2})
    assert "use_precision_aware_optimizer" not in plan.facts["changed_args"]


def test_int16_is_a_remainder_whatever_the_arguments_say(expected, tmp_path):
    source = with_args(copy_golden("pao14_fsm_dp2", tmp_path / "iter_0000010"), use_precision_aware_optimizer=False)
    state = load_ranks(source, Layout(), 0, optimizer=True)
    assert all(same(state[MASTER + key].numpy(), value) for key, value in expected.items())


def test_whole_numbers_of_another_job_are_wrong_masters(tmp_path):
    source = with_args(copy_golden("pao16_full_tp2dp2", tmp_path / "iter_0000010"), use_precision_aware_optimizer=False)
    with pytest.raises(IntegrityError, match="do not round to the weights"):
        run_conversion(plan_reshard(open_checkpoint(source), tmp_path / "out", Layout(tp=2)))
    assert not (tmp_path / "out").exists()
    with pytest.raises(IntegrityError, match="do not round to the weights"):
        load_ranks(source, Layout(tp=2), 1, optimizer=True)


@pytest.mark.parametrize("values", [{"overlap_grad_reduce": True, "ddp_bucket_size": 2049}])
def test_a_state_that_may_be_shifted(values, tmp_path):
    """With padding between buckets the end of the state tells: it is zero where the state was shifted."""
    source = with_args(copy_golden("pao16_full_tp2dp2", tmp_path / "iter_0000010"), **values)
    optimizer_state(open_checkpoint(source))  # it ends with what Adam has computed

    def shifted(tensors):
        for key in tensors:
            if key.startswith("optimizer.state.") and key.endswith("word_embeddings.weight"):
                tensors[key].zero_()

    lost = with_args(changed_copy("pao16_full_tp2dp2", tmp_path / "b" / "iter_0000010", shifted), **values)
    with pytest.raises(RequestError, match="may have been saved shifted"):
        optimizer_state(open_checkpoint(lost))
    report = verify_reader(open_checkpoint(lost))
    assert report.good
    assert "may have been saved shifted" in report.check("optimizer").summary


# ---------------------------------------------------------------------- the real loader


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("pao16_dpr_tp2dp2", {"tp": 4}),
        pytest.param("pao14_fsm_dp2", {"pp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param("pao16_full_tp2dp2", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("paoM_dpr_dp2", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_megatron_loads_the_masters(name, layout, expected, megatron_load, tmp_path):
    """megatron-core takes the result of a job with remainders for one without, bit for bit as computed here."""
    plain = open_checkpoint(golden("pao16_full_tp2dp2"))
    wanted = {}
    for key, value in expected.items():
        held = {
            "model": key,
            "exp_avg": f"optimizer.state.exp_avg.{key}",
            "exp_avg_sq": f"optimizer.state.exp_avg_sq.{key}",
        }
        for kind, stored in held.items():
            info = plain.catalog.tensors[stored]
            bits = torch.from_numpy(read_tensor(plain, info).view(f"i{info.dtype.itemsize}"))
            wanted[f"{kind}/0/{key}"] = bits.view(getattr(torch, info.dtype.name))
        wanted[f"master/0/{key}"] = torch.from_numpy(value)
    rows = {k: v[:ROWS].contiguous() if len(v) > ROWS and v.shape[1:] == (32,) else v for k, v in wanted.items()}
    save_file(rows, tmp_path / "truth.safetensors")
    reshard(name, tmp_path / "out", layout)
    answer = megatron_load(tmp_path / "out", tmp_path / "truth.safetensors", "llama", optimizer=True, **layout)
    assert answer["ok"], answer
    assert all(rank["compared"]["master"] for rank in answer["optimizer"])


def test_remainders_are_recognised_without_arguments(tmp_path):
    """Without common.pt no argument says that the optimizer is precision-aware: then the values decide."""
    whole, lost = GOLDEN / "pao16_full_tp2dp2", tmp_path / "lost"
    shutil.copytree(whole, lost)
    next(lost.glob("*/common.pt")).unlink()
    masters = [optimizer_state(open_checkpoint(path)).tensors for path in (whole, lost)]
    assert masters[0].keys() == masters[1].keys()
    assert all((a.remainders is None) == (masters[1][n].remainders is None) for n, a in masters[0].items())


def held_in_fp16(masters):
    """What FusedAdam stores of fp32 numbers that it keeps as fp16 with a scale."""
    scale = np.float32(np.abs(masters).max() / (np.finfo(np.float16).max / 2))
    return (masters / scale).astype(np.float16).astype(np.float32) * scale


def test_masters_that_fp16_held_may_lie_beside_their_weights():
    """--main-params-dtype fp16: the weights were made before the rounding, so a tenth does not round to them."""
    generator = np.random.default_rng(5)
    masters = generator.normal(size=4096).astype(np.float32)
    weights = masters.astype(ml_dtypes.bfloat16).view(np.uint16)
    stored = held_in_fp16(masters)

    def wrong(have, coarse):
        kinds = dtype("float32"), dtype("bfloat16")
        return int(unequal(Arithmetic(), have.view(np.uint32), weights, *kinds, coarse=coarse)[0])

    assert wrong(masters, coarse=False) == 0
    assert wrong(stored, coarse=False) > 100
    assert wrong(stored, coarse=True) == 0
    assert wrong(stored[::-1].copy(), coarse=True) > 4000
    assert wrong(np.roll(stored, 1), coarse=True) > 4000
    assert wrong(stored * np.float32(1.02), coarse=True) > 4000


@pytest.mark.parametrize(("kind", "coarse"), [("float16", True), ("float32", False)])
def test_the_arguments_say_whether_fp16_held_them(kind, coarse):
    catalog = open_checkpoint(golden("llama_fullyreshardable_tp2pp2dp2")).catalog
    changed = {"use_precision_aware_optimizer": True, "main_params_dtype": Global("torch", kind)}
    catalog = replace(catalog, args={**catalog.args, **changed})
    masters = {name: info for name, info in catalog.tensors.items() if name.startswith("optimizer.state.param.")}
    reader = open_checkpoint(golden("llama_fullyreshardable_tp2pp2dp2"))
    reader.catalog = catalog
    assert masters
    assert {info.coarse for info in complete_masters(reader, masters).values()} == {coarse}
