"""`export-hf --quantize fp8-block`: the bits of transformers' own formula, in files that it loads; what is lost is said."""

import json
import signal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, Fp8Quantize
from transformers.quantizers.auto import AutoHfQuantizer

from converters import Layout, diff, export_hf, verify
from converters.box import Box
from converters.dtypes import dtype
from converters.errors import Interrupted, RequestError
from converters.events import Moved, StopFlag
from converters.formats import open_checkpoint
from converters.io.quantize import Loss, quantized
from converters.planning.tasks import _tiles
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness import import_cases as cases
from harness.checkpoints import tree
from harness.cli_support import here
from harness.imports import imported, same, tensors
from harness.rank_jobs import ranks

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
CASES = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "mixtral": {"head_dim": 64},
    "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 128} | LATENT,
    "starcoder2": {},
}
STACKED = ("gpt_oss", "granitemoe", "granitemoeshared")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Function that returns a case as a checkpoint saved with tp 2; each is made once."""
    root = tmp_path_factory.mktemp("quantize")

    def make(name, **changes):
        folder = root / "-".join((name, *changes))
        if not folder.exists():
            cases.save(name, root / "hf" / folder.name, **(SIZES | CASES[name] | changes))
            imported(root / "hf" / folder.name, folder, Layout(tp=2))
        return folder

    return make


def by_transformers(weights, names):
    """Weights as transformers quantizes them."""
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    op = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    out = {}
    for name, value in weights.items():
        out |= op._quantize_one(name, value) if name in names else {name: value}
    return out


def scaled(tensors_of_folder):
    """The weights that have scales."""
    return {n.removesuffix("_scale_inv") for n in tensors_of_folder if n.endswith("_scale_inv")}


def multiplied(stored):
    """What a reader computes of quantized tensors, in bf16."""
    out = {}
    for name, value in stored.items():
        if f"{name}_scale_inv" in stored:
            grid = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = (value.float() * grid).to(torch.bfloat16)
        if not name.endswith("_scale_inv"):
            out[name] = value
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_transformers(name, megatron, tmp_path):
    export_hf(megatron(name), tmp_path / "plain")
    export_hf(megatron(name), tmp_path / "fp8", quantize="fp8-block")
    stored = tensors(tmp_path / "fp8")
    assert not same(stored, by_transformers(tensors(tmp_path / "plain"), scaled(stored)))
    assert len(scaled(stored)) >= 12
    own = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert own.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert own == json.loads((tmp_path / "plain" / "config.json").read_text())
    assert verify(tmp_path / "fp8").good


def modules_of_transformers(folder):
    """The modules that transformers loads in FP8 where there is a GPU, by the names that the folder has for them."""
    config = AutoConfig.from_pretrained(folder)
    quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    quantizer._process_model_before_weight_loading(model)
    kinds = (FP8Linear, FP8Experts)
    modules = {name for name, module in model.named_modules() if isinstance(module, kinds)}
    return {name.replace(".mlp.", ".block_sparse_moe.") if config.model_type == "mixtral" else name for name in modules}


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 320}, {"moe_intermediate_size": 64}])
@pytest.mark.parametrize("name", CASES)
def test_transformers_expects_the_same_weights_in_fp8(name, changes, megatron, tmp_path):
    """Also where some matrices stay as they are, as 320 is not a multiple of 128; and no linear layer is overlooked."""
    if name in ("qwen3", "mixtral", "starcoder2") and "moe_intermediate_size" in changes:
        pytest.skip("has no such size")
    export_hf(megatron(name, **changes), tmp_path / "fp8", quantize="fp8-block")
    wanted = {weight.removesuffix(".weight") for weight in scaled(tensors(tmp_path / "fp8"))}
    wanted = {module.partition(".experts.")[0] + ".experts" if ".experts." in module else module for module in wanted}
    assert modules_of_transformers(tmp_path / "fp8") == wanted
    some = next(weight for weight in wanted if "self_attn" in weight)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(some)
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert modules_of_transformers(tmp_path / "fp8") == wanted - {some}


def test_transformers_loads_the_folder(megatron, tmp_path):
    """Without a GPU it multiplies the weights out, and so do we."""
    export_hf(megatron("deepseek_v3"), tmp_path / "fp8", quantize="fp8-block")
    truth = multiplied(tensors(tmp_path / "fp8"))
    (tmp_path / "truth").mkdir()
    save_file(truth, tmp_path / "truth" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "truth" / "config.json").write_text(json.dumps(config))
    states = []
    for folder in ("fp8", "truth"):
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values())
        states.append(model.state_dict())
    assert not same(*states)
    imported(tmp_path / "fp8", tmp_path / "start", Layout(tp=2))
    export_hf(tmp_path / "start", tmp_path / "back")
    assert not same(tensors(tmp_path / "back"), truth)
    assert diff(tmp_path / "fp8", tmp_path / "start").identical


def test_what_servers_put_together_is_of_one_type(megatron, tmp_path):
    """kv_a_proj has 192 rows; q_a_proj, which could be quantized, goes with it."""
    report = export_hf(megatron("deepseek_v3"), tmp_path / "fp8", quantize="fp8-block")
    stored = tensors(tmp_path / "fp8")
    kinds = {leaf: stored[f"model.layers.1.self_attn.{leaf}.weight"].dtype for leaf in ("q_a_proj", "q_b_proj")}
    assert kinds == {"q_a_proj": torch.bfloat16, "q_b_proj": torch.float8_e4m3fn}
    assert any("6 matrices stay as they are" in note for note in report.plan.notes)


def losses(folder):
    """What a folder's report says, beside what numpy computes of the two folders."""
    return json.loads((folder / "distckpt-report.json").read_text())["quantization_errors"]


def test_what_is_lost_is_said(megatron, tmp_path):
    export_hf(megatron("qwen3"), tmp_path / "plain")
    done = here("export-hf", megatron("qwen3"), tmp_path / "fp8", "--quantize", "fp8-block", "--json")
    printed = json.loads(done.out)
    assert printed["quantization_errors"] == losses(tmp_path / "fp8")
    plain, stored = tensors(tmp_path / "plain"), tensors(tmp_path / "fp8")
    assert losses(tmp_path / "fp8").keys() == scaled(stored)
    for name, loss in losses(tmp_path / "fp8").items():
        grid = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        gaps = (stored[name].float() * grid - plain[name].float()).numpy()
        assert loss["max_abs"] == np.abs(gaps).max()
        length = np.linalg.norm(plain[name].double().numpy())
        assert loss["relative"] == pytest.approx(np.linalg.norm(gaps.astype(np.float64)) / length, rel=1e-12)
        assert 0.02 < loss["relative"] < 0.04
    shown = here("export-hf", megatron("qwen3"), tmp_path / "again", "--quantize", "fp8-block").out
    assert "21 of 36 tensors to FP8" in shown
    assert "at most 2.6" in shown


WIDE = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 2}


def test_bytes_depend_neither_on_threads_nor_memory_nor_layout(megatron, tmp_path):
    """Tiles of 64 KiB cut a row of blocks of down_proj, which is 256 KiB."""
    source = megatron("qwen3", **WIDE)
    export_hf(source, tmp_path / "one", quantize="fp8-block", threads=1)
    plan = plan_export(
        open_checkpoint(source), tmp_path / "two", ExportOptions(quantize="fp8-block", max_memory=128 << 10)
    )
    assert len([task for task in plan.job.tasks if "mlp.down_proj" in task.tiles[0].source]) >= 8
    run_conversion(plan)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    hf = source.parent / "hf" / source.name
    imported(hf, tmp_path / "pp", Layout(pp=2))
    export_hf(tmp_path / "pp", tmp_path / "three", quantize="fp8-block")
    assert tensors(tmp_path / "three").keys() == tensors(tmp_path / "one").keys()
    assert losses(tmp_path / "three") == losses(tmp_path / "one")
    weights = "model.safetensors"
    assert (tmp_path / "three" / weights).read_bytes() == (tmp_path / "one" / weights).read_bytes()


def test_losses_survive_an_interruption(megatron, tmp_path):
    """The journal says what tasks lost that are not done again."""
    source = megatron("qwen3", **WIDE)
    options = {"quantize": "fp8-block", "max_memory": 128 << 10}
    export_hf(source, tmp_path / "whole", **options)
    stop, moved = StopFlag(), []

    def listener(event):
        moved.extend([event] if isinstance(event, Moved) else [])
        if len(moved) > 12:
            stop.set(signal.SIGTERM)

    with pytest.raises(Interrupted):
        export_hf(source, tmp_path / "out", stop=stop, listener=listener, threads=1, **options)
    journal = (tmp_path / ".out.distckpt-partial" / ".journal").read_text()
    assert '"losses":[["model.' in journal
    report = export_hf(source, tmp_path / "out", threads=1, **options)
    assert report.stats.bytes_kept
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_ranks_share_the_work_and_the_sums(megatron, tmp_path):
    source, small = megatron("qwen3", **WIDE), ("--quantize", "fp8-block", "--max-memory", "128KiB")
    export_hf(source, tmp_path / "one", quantize="fp8-block", max_memory=128 << 10)
    done = ranks(2, "export-hf", source, tmp_path / "two", *small, "--json")
    assert done.codes == [0, 0], done.err
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert json.loads(done.out)["quantization_errors"] == losses(tmp_path / "one")


@pytest.mark.parametrize(("shape", "most"), [((1024, 128), 1 << 14), ((128, 1024), 1 << 14), ((384, 640), 5 << 14)])
def test_tiles_cut_no_block(shape, most):
    boxes = [box for box, _ in _tiles(shape, 2, 2 * most, 128)]
    assert all(n % 128 == 0 for box in boxes for n in (*box.start, *box.shape))
    assert all(box.volume <= most for box in boxes)
    assert sum(box.volume for box in boxes) == shape[0] * shape[1]
    assert len({box.start for box in boxes}) == len(boxes) > 1
    assert all(box.inside(shape) for box in boxes)
    assert _tiles(shape, 2, 4 * shape[0] * shape[1], 128) == [(Box.whole(shape), 2 * shape[0] * shape[1])]


def test_blocks_of_zeros_and_of_tiny_numbers():
    """transformers has a factor of 0 for a block whose largest number is below 1.3e-36; all else is as it has it."""
    values = torch.randn(128, 128 * 9, generator=torch.Generator().manual_seed(5)) * torch.logspace(
        -46, 18, 9
    ).repeat_interleave(128)
    values[:, :128] = 0
    codes = np.empty(values.shape, np.uint8)
    factors, loss = quantized(values.numpy().view(np.uint32), dtype("float32"), "w", codes)
    (name, wanted), (_, inverse) = by_transformers({"w.weight": values}, {"w.weight"}).items()
    assert name == "w.weight"
    own = torch.from_numpy(factors.view(np.float32))
    good = inverse[0] > 0
    assert 6 <= int(good.sum()) < 9
    assert torch.equal(own[0][good], inverse[0][good])
    blocks = torch.from_numpy(codes).view(128, 9, 128)
    assert torch.equal(blocks[:, good], wanted.view(torch.uint8).view(128, 9, 128)[:, good])
    read = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * own.repeat_interleave(128, 1)
    assert torch.isfinite(read).all()
    assert float((read - values).abs().max()) == loss.largest
    assert Loss.from_json(json.loads(json.dumps(loss.to_json()))) == loss
    assert sum([loss, Loss()], Loss(0.5, Fraction(1, 3), Fraction(1))) == Loss(0.5, Fraction(1, 3), Fraction(1)) + loss


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_cannot_be_quantized(value, megatron, tmp_path):
    source = megatron("qwen3")
    hf = tmp_path / "hf"
    hf.mkdir()
    original = source.parent / "hf" / source.name
    (hf / "config.json").write_bytes((original / "config.json").read_bytes())
    weights = load_file(original / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][130, 7] = value
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    imported(hf, tmp_path / "start")
    with pytest.raises(RequestError, match=r"layers\.1\.mlp\.up_proj.* infinite or NaN elements"):
        export_hf(tmp_path / "start", tmp_path / "fp8", quantize="fp8-block")
    assert not (tmp_path / "fp8").exists()


def test_what_cannot_be_quantized_is_refused(megatron, tmp_path):
    for name in STACKED:
        cases.save(name, tmp_path / "hf" / name)
        imported(tmp_path / "hf" / name, tmp_path / name)
        with pytest.raises(RequestError, match="keeps its experts in one tensor"):
            export_hf(tmp_path / name, tmp_path / "out", quantize="fp8-block", arch=name)
    for name in ("llama", "gpt2"):
        cases.save(name, tmp_path / "hf" / name)
        imported(tmp_path / "hf" / name, tmp_path / name)
        with pytest.raises(RequestError, match=f"no weight of this {name} can be quantized"):
            export_hf(tmp_path / name, tmp_path / "out", quantize="fp8-block")
    with pytest.raises(RequestError, match="int4"):
        export_hf(megatron("qwen3"), tmp_path / "out", quantize="int4")
    with pytest.raises(RequestError, match="on the cpu"):
        export_hf(megatron("qwen3"), tmp_path / "out", quantize="fp8-block", device="cuda")
    done = here("export-hf", megatron("qwen3"), tmp_path / "out", "--quantize", "fp8")
    assert (done.code, "fp8-block" in done.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_config_json_of_quantized_weights_does_not_make_plain_ones_so(megatron, tmp_path):
    """`--hf-config` may name the folder that was imported, in FP8; what is exported then is bf16, or FP8 as asked."""
    export_hf(megatron("qwen3"), tmp_path / "fp8", quantize="fp8-block")
    report = export_hf(megatron("qwen3"), tmp_path / "plain", hf_config=tmp_path / "fp8")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert any("of quantized weights" in note for note in report.plan.notes)
    export_hf(megatron("qwen3"), tmp_path / "again", hf_config=tmp_path / "fp8", quantize="fp8-block")
    documents = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("fp8", "again")]
    assert documents[0]["quantization_config"] == documents[1]["quantization_config"]
