"""Quantized Hugging Face folders: imported as the numbers that transformers computes, whatever the layout; else refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from converters import Layout, diff
from converters.errors import DistckptError, IntegrityError, RequestError
from converters.io import gather as gather_module
from converters.io import scales as scales_module
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from harness import import_cases as cases
from harness.imports import exported, imported, same, tensors

pytestmark = pytest.mark.filterwarnings("ignore")
KEPT = ("norm", "embed", "lm_head", "mlp.gate.weight", "bias")


def factors(weight, block):
    """One scale for each block of a matrix."""
    rows, columns = (size or axis for size, axis in zip(block, weight.shape, strict=True))
    grid = torch.empty(math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            grid[i, j] = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].float().abs().max() / 448
    return grid


def quantize(folder, block=(16, 8), factor="weight_scale_inv", kind=torch.float32, stated=None):
    """Quantizes a folder's matrices; returns what they stand for."""
    truth, stored = {}, {}
    for name, value in tensors(folder).items():
        if any(word in name for word in KEPT) or value.dim() != 2:
            truth[name] = stored[name] = value
            continue
        grid = factors(value, block).to(kind)
        rows, columns = (size or axis for size, axis in zip(block, value.shape, strict=True))
        wide = grid.float().repeat_interleave(rows, 0)[: value.shape[0]]
        wide = wide.repeat_interleave(columns, 1)[:, : value.shape[1]]
        small = (value.float() / wide).to(torch.float8_e4m3fn)
        truth[name] = (small.float() * wide).to(torch.bfloat16)
        stored[name] = small
        stored[name.removesuffix("weight") + factor] = grid.reshape(()) if block == (None, None) else grid
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    method = stated or {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block)}
    cases.rewrite_config(folder, quantization_config=method)
    return truth


def compressed(strategy, **changes):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **changes}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }


FORMS = {
    "blocks": {},
    "uneven blocks": {"block": (10, 7)},
    "powers of two": {"kind": torch.float8_e8m0fnu},
    "bf16 rows": {
        "block": (1, None),
        "factor": "weight_scale",
        "kind": torch.bfloat16,
        "stated": compressed("channel"),
    },
    "tensor": {"block": (None, None), "factor": "weight_scale", "stated": compressed("tensor")},
    "compressed blocks": {
        "factor": "weight_scale",
        "stated": compressed("block", block_structure=[16, 8]),
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_weights_are_multiplied_out(name, form, tmp_path):
    """At a layout that cuts through blocks; there and back, the numbers are those of the formula, rounded once."""
    cases.save(name, tmp_path / "hf")
    truth = quantize(tmp_path / "hf", **FORMS[form])
    plan = imported(tmp_path / "hf", tmp_path / "out", Layout(tp=2))
    assert not same(exported(tmp_path / "out", tmp_path / "back"), truth)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    report = json.loads((tmp_path / "out" / "distckpt-report.json").read_text())
    scales = {n for n in load_file(tmp_path / "hf" / "model.safetensors") if "scale" in n}
    assert scales <= {drop["tensor"] for drop in report["dropped"]}
    assert any("quantized" in note for note in plan.notes)


def test_a_tile_is_smaller_than_a_tensor(tmp_path, monkeypatch):
    """The place of an element in its tensor decides its scale, not the place in what is read at a time."""
    monkeypatch.setattr(scales_module, "BLOCK", 50)
    cases.save("qwen3", tmp_path / "hf")
    truth = quantize(tmp_path / "hf", block=(10, 7))
    imported(tmp_path / "hf", tmp_path / "out", Layout(tp=2), max_memory=300 << 10, threads=2)
    assert not same(exported(tmp_path / "out", tmp_path / "back"), truth)


def test_transformers_computes_the_same(tmp_path):
    cases.save("qwen3", tmp_path / "hf")
    truth = quantize(tmp_path / "hf", block=(4, 4))
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    names = [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]
    assert len(names) > 10
    for name in names:
        value = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(value, truth[name]), name


def pack(folder, spoil=lambda stored: None):
    """Puts random MXFP4 experts into a folder of gpt-oss; returns what transformers makes of them."""
    seed = torch.Generator().manual_seed(5)
    truth, stored = {}, {}
    for name, value in tensors(folder).items():
        truth[name] = stored[name] = value
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = value.shape
            blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=seed, dtype=torch.uint8)
            scales = torch.randint(100, 130, blocks.shape[:3], generator=seed, dtype=torch.uint8)
            scales[0, :3, 0] = torch.tensor([0, 1, 250], dtype=torch.uint8)
            truth[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            assert truth[name].shape == value.shape
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            stored.pop(name)
    spoil(stored)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return truth


PACKED = {"hidden_size": 96, "intermediate_size": 64}


@pytest.mark.parametrize(("layout", "held"), [({}, None), ({"tp": 2, "ep": 2, "etp": 1}, None), ({"pp": 3}, 50)])
def test_packed_experts_are_those_of_transformers(layout, held, tmp_path, monkeypatch):
    if held:
        monkeypatch.setattr(gather_module, "_UNPACKED", held)  # which ends inside of a group
    cases.save("gpt_oss", tmp_path / "hf", **PACKED)
    truth = pack(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "out", Layout(**layout))
    assert not same(exported(tmp_path / "out", tmp_path / "back"), truth)
    assert diff(tmp_path / "hf", tmp_path / "out").identical
    assert diff(tmp_path / "hf", tmp_path / "back").identical


PACKED_WRONG = {
    "no scales": (
        lambda s: s.pop("model.layers.0.mlp.experts.down_proj_scales"),
        IntegrityError,
        "scales .* not there",
    ),
    "scales of other groups": (
        lambda s: s.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 96, 3, dtype=torch.uint8)}),
        RequestError,
        "not understood",
    ),
    "scales of another type": (
        lambda s: s.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 96, 2)}),
        RequestError,
        "not understood",
    ),
    "fewer rows": (
        lambda s: s.update(
            {
                "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(6, 90, 2, 16, dtype=torch.uint8),
                "model.layers.0.mlp.experts.down_proj_scales": torch.zeros(6, 90, 2, dtype=torch.uint8),
            }
        ),
        RequestError,
        "config.json does not fit",
    ),
}


@pytest.mark.parametrize(("spoil", "kind", "words"), PACKED_WRONG.values(), ids=PACKED_WRONG)
def test_packed_experts_that_do_not_fit_are_refused(spoil, kind, words, tmp_path):
    cases.save("gpt_oss", tmp_path / "hf", **PACKED)
    pack(tmp_path / "hf", spoil)
    with pytest.raises(kind, match=words):
        imported(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_diff_multiplies_too(tmp_path):
    cases.save("qwen3", tmp_path / "hf")
    quantize(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "out")
    assert diff(tmp_path / "hf", tmp_path / "out").identical
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight_scale_inv"][0, 0] *= 2
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    report = diff(tmp_path / "hf", tmp_path / "out")
    assert not report.identical
    assert [t.name for t in report.tensors if t.differs] == ["model.layers.1.mlp.up_proj.weight"]


def without(key):
    def spoil(folder, stored):
        del stored[key]

    return spoil


def replaced(key, value):
    def spoil(folder, stored):
        stored[key] = value

    return spoil


def stated(**changes):
    def spoil(folder, stored):
        document = json.loads((folder / "config.json").read_text())["quantization_config"]
        cases.rewrite_config(folder, quantization_config=document | changes)

    return spoil


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (without(f"{UP}_scale_inv"), IntegrityError, "scale"),
        (replaced(f"{UP}_scale_inv", torch.ones(3, 3)), IntegrityError, r"\[3, 3\]"),
        (replaced(f"{UP}_scale_inv", torch.ones(3, dtype=torch.int32)), RequestError, "not understood"),
        (without(UP), DistckptError, "no place|the folder lacks"),
        (stated(weight_block_size=[32, 32]), IntegrityError, "blocks of 32 x 32"),
        (stated(weight_block_size=[0, 8]), DistckptError, "two positive numbers"),
        (stated(quant_method="awq"), RequestError, "awq"),
        (stated(quant_method="gptq", bits=4), RequestError, "gptq"),
        (stated(quant_method="mxfp4"), RequestError, "mxfp4"),
        (stated(fmt="e5m2"), RequestError, "by an unknown method"),
        (stated(quant_method="compressed-tensors", format="pack-quantized"), RequestError, "pack-quantized"),
        (stated(quant_method=["fp8"]), RequestError, "by an unknown method"),
    ],
)
def test_what_is_not_understood_is_refused(spoil, kind, words, tmp_path):
    cases.save("qwen3", tmp_path / "hf")
    quantize(tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    spoil(tmp_path / "hf", stored)
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(kind, match=words):
        plan_import(tmp_path / "hf", tmp_path / "out", Layout(), ImportOptions())
    assert not (tmp_path / "out").exists()
