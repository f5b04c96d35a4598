"""Adapters of Megatron-Bridge: as a folder that the real `peft` loads, and merged into the weights by plain arithmetic."""

import json
import math
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from converters import Layout, models
from converters.catalog import TensorInfo
from converters.dtypes import dtype
from converters.errors import DistckptError, FormatError, IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.io import low_rank
from converters.megatron.adapters import read_adapters
from converters.megatron.model_args import ModelArgs
from converters.models.adapters import map_adapters
from converters.models.export import map_to_hf
from converters.planning.plan import prove
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness import hf_reference, import_cases
from harness import model_cases as cases
from harness.checkpoints import run_cli
from harness.imports import exported, imported, tensors
from harness.reshard_cases import by_parameter, read_with_torch
from harness.support import GOLDEN

BOTH = "mb_lora_tp2"  # a model and its adapters, tensor parallel 2; no section peft:
ALONE = (
    "mb_peft_full_tp2dp2",
    "mb_peft_dpr_tp2dp2",
)  # what a training run with peft: stores, for a model of the same sizes
ALPHA = {BOTH: 16.0, ALONE[0]: 8.0, ALONE[1]: 8.0}
RANK = 8
PREFIX = "base_model.model."


@contextmanager
def strict():
    """Every warning of peft is an error: keys that are missing, or that nobody wants."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        # peft's own entries for models whose experts transformers stacks
        warnings.filterwarnings(
            "ignore", message=r".*(rank|alpha)_pattern keys did not match.*\['\.\*\\\\\.gate_up_proj'\]"
        )
        yield


def stored(name):
    """A golden's weights as torch's own reader gives them, in fp64, by Megatron's names."""
    folder = next((GOLDEN / name).glob("iter_*"))
    arrays = {n: a for n, a in by_parameter(read_with_torch(folder)).items() if n.startswith("model/") and a.size}
    words = {n: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for n, a in arrays.items() if a.itemsize == 2}
    return {n.removeprefix("model/"): a.double().numpy() for n, a in words.items()}


def changes(arrays, alpha):
    """What the adapters add to each weight, by Megatron's names."""
    ends = ".adapter.linear_in.weight"
    return {
        f"{name.removesuffix(ends)}.weight": alpha
        / RANK
        * arrays[name.replace("linear_in", "linear_out")]
        @ arrays[name]
        for name in arrays
        if name.endswith(ends)
    }


def hugging_face(weights):
    """Weights by transformers' names, by the independent mapping of the tests."""
    plain = {f"model/{name}": value for name, value in weights.items() if ".adapter." not in name}
    return hf_reference.expected("mb_lora", "qwen3", plain)


def merged(base, adapters, alpha):
    delta = changes(adapters, alpha)
    assert any(np.abs(value).max() > 0.001 for value in delta.values())
    return hugging_face({name: value + delta.get(name, 0.0) for name, value in base.items() if ".adapter." not in name})


def base_folder(folder):
    """The model of the goldens without adapters, as transformers has it."""
    exported(GOLDEN / BOTH, folder, merge_adapter=GOLDEN / BOTH, lora_alpha=1.0)
    kind = torch.bfloat16
    plain = {n: torch.from_numpy(a).to(kind).contiguous() for n, a in hugging_face(stored(BOTH)).items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---------------------------------------------------------------------- alone


@pytest.mark.parametrize("name", [BOTH, *ALONE])
def test_peft_loads_the_adapters(name, tmp_path):
    from peft import PeftModel

    options = {"peft": True, "lora_alpha": ALPHA[BOTH]} if name == BOTH else {}
    exported(GOLDEN / name, tmp_path / "lora", **options)
    model = AutoModelForCausalLM.from_pretrained(base_folder(tmp_path / "base"), dtype=torch.float64)
    with strict():
        adapted = PeftModel.from_pretrained(model, tmp_path / "lora", autocast_adapter_dtype=False)
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {key.replace(".default", "") for key in adapted.state_dict() if "lora_" in key} == set(written)
    expected = merged(stored(BOTH), stored(name), ALPHA[name])
    state = adapted.double().merge_and_unload().state_dict()
    for key, value in expected.items():
        np.testing.assert_allclose(state[key].numpy(), value, rtol=1e-12, atol=1e-14, err_msg=key)


def test_what_is_written_and_said(tmp_path):
    result = run_cli("export-hf", GOLDEN / ALONE[0], tmp_path / "lora", "--dtype", "fp32", "--json")
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (8, 8, 0.0)
    report = json.loads((tmp_path / "lora" / "distckpt-report.json").read_text())
    assert (report["adapter"]["rank"], report["adapter"]["alpha"]) == (8, 8.0)
    assert sorted(p.name for p in (tmp_path / "lora").iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "distckpt-report.json")
    ]
    assert {t.dtype for t in tensors(tmp_path / "lora").values()} == {torch.float32}
    base = base_folder(tmp_path / "base")
    exported(GOLDEN / ALONE[0], tmp_path / "named", hf_config=base)
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    other = json.loads((base / "config.json").read_text()) | {"hidden_size": 64}
    (base / "config.json").write_text(json.dumps(other))
    with pytest.raises(RequestError, match="does not fit"):
        exported(GOLDEN / ALONE[0], tmp_path / "other", hf_config=base)


def adapted_case(family, rank=3, layers=None, mlp=False):
    """A model of a family with random weights, and adapters on every linear layer that peft can have one on.

    Args:
        mlp: In a model with experts also on dense layers and shared experts, which peft takes for the experts.
    """
    args = cases.case(family)
    shapes = cases.megatron_shapes(args)
    catalog = cases.make_catalog(shapes, args)
    mlp = mlp or not args.get("num_experts") or family == "granitemoeshared"
    bases = [
        n
        for n, s in shapes.items()
        if n.startswith("decoder.layers.")
        and len(s) == 2
        and ".experts." not in n
        and "router" not in n
        and not n.endswith("gate_weight")
        and (mlp or ".mlp." not in n)
        and (layers is None or int(n.split(".")[2]) in layers)
    ]
    names = {}
    for base in bases:
        stem = base.removesuffix("weight") + "adapter.linear_"
        names[f"{stem}in.weight"], names[f"{stem}out.weight"] = (rank, shapes[base][1]), (shapes[base][0], rank)
    infos = {n: TensorInfo(n, dtype("float32"), s, "weight", ()) for n, s in names.items()}
    facts = ModelArgs.from_catalog(catalog)
    return replace(catalog, tensors=catalog.tensors | infos), facts, shapes, names, catalog


def check_family(family, folder, layers=None):
    """The delta of each module, as peft computes it of what is mapped, is the delta of Megatron's weight, mapped."""
    from peft import PeftModel

    full, facts, shapes, names, plain = adapted_case(family, layers=layers)
    model = models.by_name(family)
    mapping = map_adapters(full, facts, model, read_adapters(full, 7.0))
    prove(mapping.pieces.values(), {n: t.shape for n, t in full.tensors.items()}, mapping.drops)
    factors = cases.random_arrays(names)
    lora = cases.run_copies(mapping.copies, {n: t.shape for n, t in mapping.targets.items()}, factors)
    delta = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    for name in names:
        if name.endswith("linear_in.weight"):
            base = name.replace("adapter.linear_in.", "")
            delta[base] = np.float32(7 / 3) * factors[name.replace("linear_in", "linear_out")] @ factors[name]
    whole = map_to_hf(plain, facts, model, mtp="drop")
    expected = cases.run_copies(whole.copies, {n: t.shape for n, t in whole.targets.items()}, delta)

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole.config))
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    before = {n: t.clone() for n, t in base.state_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(mapping.config))
    save_file({n: torch.from_numpy(a) for n, a in lora.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    with strict():
        adapted = PeftModel.from_pretrained(base, folder)
    after = adapted.merge_and_unload().state_dict()
    modules = {n.removeprefix(PREFIX).partition(".lora_")[0] for n in lora}
    assert modules
    for name, value in after.items():
        wanted = expected[name] if name.removesuffix(".weight") in modules else 0.0
        np.testing.assert_allclose((value - before[name]).numpy(), wanted, atol=2e-5, err_msg=name)


OFTEN = ("gpt2", "qwen2", "deepseek_v3")


@pytest.mark.parametrize(
    "family",
    [f if f in OFTEN else pytest.param(f, marks=pytest.mark.slow) for f in dict.fromkeys([*OFTEN, *cases.FAMILIES])],
)
def test_rows_are_those_that_the_family_gives_the_weight(family, tmp_path):
    check_family(family, tmp_path / family)


def test_adapters_on_some_layers_are_on_those_alone(tmp_path):
    check_family("llama", tmp_path / "llama", layers=(1,))


# ---------------------------------------------------------------------- merged


def assert_rounded(got, exact):
    """Each value is the exact one rounded to bf16, but where fp32's own error decides between two neighbours."""
    for name, value in exact.items():
        slack = 1e-6 * np.abs(value) + 1e-7
        low, high = (torch.from_numpy(v).to(torch.bfloat16).double().numpy() for v in (value - slack, value + slack))
        found = got[name].double().numpy()
        assert got[name].dtype == torch.bfloat16
        assert ((low <= found) & (found <= high)).all(), name
        assert (low == high).mean() > 0.95


@pytest.mark.parametrize("held", [None, 40])
def test_a_models_own_adapters_are_merged(held, tmp_path, monkeypatch):
    if held:
        monkeypatch.setattr(low_rank, "_BLOCK_ELEMENTS", held)  # blocks of a few rows and columns
    got = exported(GOLDEN / BOTH, tmp_path / "hf", merge_adapter=GOLDEN / BOTH, lora_alpha=ALPHA[BOTH])
    assert_rounded(got, merged(stored(BOTH), stored(BOTH), ALPHA[BOTH]))
    report = json.loads((tmp_path / "hf" / "distckpt-report.json").read_text())
    assert report["adapter"]["merged"].startswith("W + alpha / rank * B @ A in fp32")
    assert "adapter merged" in report["targets"]["model.layers.0.self_attn.k_proj.weight"]["ops"]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_adapters_of_another_checkpoint_are_merged(layout, tmp_path):
    imported(base_folder(tmp_path / "hf"), tmp_path / "base", Layout(**layout))
    got = exported(tmp_path / "base", tmp_path / "merged", merge_adapter=GOLDEN / ALONE[0])
    assert_rounded(got, merged(stored(BOTH), stored(ALONE[0]), ALPHA[ALONE[0]]))
    result = run_cli("export-hf", tmp_path / "base", tmp_path / "cli", "--merge-adapter", GOLDEN / ALONE[0])
    assert result.returncode == 0, result.stderr
    assert "in fp32" in result.stdout
    assert all(torch.equal(value, got[name]) for name, value in tensors(tmp_path / "cli").items())


def test_adapters_are_not_overwritten(tmp_path):
    root = shutil.copytree(GOLDEN / BOTH, tmp_path / "lora")
    options = ExportOptions(merge_adapter=root, lora_alpha=1.0, overwrite=True)
    reader = open_checkpoint(imported(base_folder(tmp_path / "hf"), tmp_path / "base").destination)
    with pytest.raises(DistckptError):
        plan_export(reader, root, options)


def test_adapters_are_checked_against_their_checksums(tmp_path):
    root = shutil.copytree(GOLDEN / ALONE[0], tmp_path / "lora")
    reader = open_checkpoint(root)
    info = reader.catalog.weights["decoder.layers.0.mlp.linear_fc2.adapter.linear_out.weight"]
    chunk = info.chunks()[0]
    path = reader.files[reader.file_of(chunk.record)]
    raw = bytearray(path.read_bytes())
    payload = reader.locate(chunk.record, lambda at, n: bytes(raw[at : at + n]))
    raw[payload.offset] ^= 1
    path.write_bytes(raw)
    imported(base_folder(tmp_path / "hf"), tmp_path / "base")
    with pytest.raises(IntegrityError, match=r"linear_fc2\.adapter\.linear_out.*checksum"):
        exported(tmp_path / "base", tmp_path / "merged", merge_adapter=root)
    assert not (tmp_path / "merged").exists()


# ---------------------------------------------------------------------- refused


def edited(*pairs):
    def spoil(folder):
        path = next(folder.glob("iter_*")) / "run_config.yaml"
        text = path.read_text()
        head, mark, section = text.partition("\npeft:\n")
        for old, new in pairs:
            assert section.count(old) >= 1
            section = section.replace(old, new, 1)
        path.write_text(head + mark + section)

    return spoil


SPOILED = {
    "another kind": (edited(("peft.lora.LoRA", "peft.dora.DoRA")), RequestError, "unknown kind"),
    "another rank": (edited(("  dim: 8", "  dim: 4")), RequestError, "dim 4, but the adapters have rank 8"),
    "half a rank": (edited(("  dim: 8", "  dim: 7.5")), RequestError, "dim 7.5"),
    "negative alpha": (edited(("  alpha: 8", "  alpha: -8")), FormatError, "alpha -8"),
    "alpha in words": (edited(("  alpha: 8", "  alpha: much")), FormatError, "alpha much"),
    "alpha not there": (edited(("  alpha: 8\n", "")), RequestError, "the adapters' alpha is not stated"),
    "endless alpha": (edited(("  alpha: 8", "  alpha: .inf")), FormatError, "alpha inf"),
    "dropout in words": (edited(("  dropout: 0.0", "  dropout: [1]")), FormatError, "dropout"),
}


@pytest.mark.parametrize(("spoil", "kind", "words"), SPOILED.values(), ids=SPOILED)
def test_settings_that_make_no_sense_are_refused(spoil, kind, words, tmp_path):
    root = shutil.copytree(GOLDEN / ALONE[0], tmp_path / "lora")
    spoil(root)
    with pytest.raises(kind, match=words):
        exported(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


REQUESTS = {
    "nobody says what for": (BOTH, {}, "--peft"),
    "no adapters": ("mb_qwen3", {"peft": True}, "has no adapters"),
    "no adapters to merge": ("mb_qwen3", {"merge_adapter": GOLDEN / "mb_qwen3"}, "has no adapters"),
    "two sets of adapters": (BOTH, {"merge_adapter": GOLDEN / ALONE[0]}, "adapters of its own"),
    "adapters of another model": ("mb_qwen3", {"merge_adapter": GOLDEN / ALONE[0]}, "do not fit"),
    "nothing says alpha": (BOTH, {"peft": True}, "alpha"),
    "another alpha": (ALONE[0], {"lora_alpha": 3.0}, "contradicts"),
    "no number": (BOTH, {"peft": True, "lora_alpha": math.inf}, "positive"),
    "alpha of nothing": ("mb_qwen3", {"lora_alpha": 3.0}, "needs adapters, and the checkpoint has none"),
    "both at once": (BOTH, {"peft": True, "merge_adapter": GOLDEN / BOTH}, "choose one"),
    "a check of a whole model": (ALONE[0], {"check": True}, "whole models"),
}


@pytest.mark.parametrize(("name", "options", "words"), REQUESTS.values(), ids=REQUESTS)
def test_requests_that_cannot_be_met_are_refused(name, options, words, tmp_path):
    with pytest.raises(RequestError) as caught:
        plan_export(open_checkpoint(GOLDEN / name), tmp_path / "out", ExportOptions(**options))
    assert words in f"{caught.value} {caught.value.hint}"


def test_a_shared_expert_that_peft_takes_for_experts_is_refused():
    full, facts, *_ = adapted_case("deepseek_v3", mlp=True)
    with pytest.raises(RequestError, match="peft cannot express adapters of") as caught:
        map_adapters(full, facts, models.by_name("deepseek_v3"), read_adapters(full, 7.0))
    assert "shared_experts" in " ".join(caught.value.details)


NAMES = {
    "of experts": "decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight",
    "canonical": "decoder.layers.0.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight",
    "DoRA": "decoder.layers.0.self_attention.linear_qkv.adapter.weight_magnitude",
    "of another part": "vision_model.decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight",
    "of a layer without a rule": "decoder.layers.0.self_attention.linear_other.adapter.linear_in.weight",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_adapters_that_peft_cannot_express_are_named(name):
    catalog = open_checkpoint(GOLDEN / ALONE[0]).catalog
    info = next(iter(catalog.weights.values()))
    added = {n: replace(info, name=n) for n in (name, name.replace("linear_in", "linear_out"))}
    if name == NAMES["of a layer without a rule"]:
        added[name.replace("linear_in", "linear_out")] = replace(info, name=name, shape=(32, RANK))
    catalog = replace(catalog, tensors=catalog.tensors | added)
    facts, model = ModelArgs.from_catalog(catalog), models.by_name("qwen3")
    with pytest.raises(DistckptError) as caught:
        map_adapters(catalog, facts, model, read_adapters(catalog))
    shown = f"{caught.value} {' '.join(caught.value.details)}"
    assert name.partition(".adapter")[0].rpartition(".")[2] in shown
    assert isinstance(caught.value, RequestError)


def test_half_an_adapter_is_damage():
    catalog = open_checkpoint(GOLDEN / ALONE[0]).catalog
    gone = "decoder.layers.0.mlp.linear_fc2.adapter.linear_out.weight"
    with pytest.raises(IntegrityError, match="only linear_in"):
        read_adapters(replace(catalog, tensors={n: t for n, t in catalog.tensors.items() if n != gone}))


def test_an_interrupted_merge_goes_on(tmp_path):
    """Many tiles, adapters from a torch file, whose records have checksums: the bytes are those of a run in one go."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1}
    import_cases.save("qwen3", tmp_path / "hf", **sizes)
    imported(tmp_path / "hf", tmp_path / "base")
    weights = open_checkpoint(tmp_path / "base").catalog.weights
    seed = torch.Generator().manual_seed(3)
    factors = {}
    for name, info in weights.items():
        if "linear_" in name and len(info.shape) == 2:
            stem = name.removesuffix("weight") + "adapter.linear_"
            factors[f"{stem}in.weight"] = torch.randn(5, info.shape[1], generator=seed) / 8
            factors[f"{stem}out.weight"] = torch.randn(info.shape[0], 5, generator=seed) / 8
    assert len(factors) == 8
    torch.save(factors, tmp_path / "adapters.pt")
    options = ExportOptions(
        merge_adapter=tmp_path / "adapters.pt", lora_alpha=10.0, max_memory=256 << 10, threads=2, overwrite=True
    )

    def run(into, stop=None):
        plan = plan_export(open_checkpoint(tmp_path / "base"), into, options)
        assert len(plan.job.tasks) > 12
        run_conversion(plan, stop=stop)

    run(tmp_path / "whole")
    polls = iter(range(1000))
    with pytest.raises(DistckptError):
        run(tmp_path / "parts", stop=SimpleNamespace(is_set=lambda: next(polls) > 8, signum=None))
    run(tmp_path / "parts")
    got = tensors(tmp_path / "parts")
    assert all(torch.equal(value, got[name]) for name, value in tensors(tmp_path / "whole").items())
    base = load_file(tmp_path / "hf" / "model.safetensors")
    down = "decoder.layers.0.mlp.linear_fc2.adapter.linear_"
    exact = base["model.layers.0.mlp.down_proj.weight"].double()
    exact += 2.0 * factors[f"{down}out.weight"].double() @ factors[f"{down}in.weight"].double()
    name = "model.layers.0.mlp.down_proj.weight"
    assert_rounded({name: got[name]}, {name: exact.numpy()})
