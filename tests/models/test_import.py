"""Imports: every tensor where Megatron keeps it, back bit for bit, at any layout; what cannot be imported is refused."""

import json
import math
import re
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from converters import Layout, diff
from converters.box import Box
from converters.dtypes import dtype as cast_type
from converters.errors import DistckptError, FormatError, IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.io import padding as padding_module
from converters.models import ARCHITECTURES, nemotron_nas, rules
from converters.models.config_check import NEUTRAL
from converters.models.left_out import LEFT_OUT
from converters.planning.plan import Op
from converters.planning.routes import target_box_of
from converters.write import imported as imported_module
from converters.write.import_hf import plan_import
from harness import import_cases as cases
from harness.checkpoints import GOLDENS, tree
from harness.cli_support import here
from harness.imports import bits, exported, imported, megatron_bits, same, tensors, wrong_places
from harness.support import GOLDEN

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """Function that returns the folder of a case; each is made once."""
    root = tmp_path_factory.mktemp("hf")

    def make(name):
        if not (root / name).exists():
            cases.save(name, root / name)
        return root / name

    return make


@pytest.mark.parametrize("name", cases.CASES)
def test_there_and_back_every_bit_and_every_key(name, hf, tmp_path):
    source = hf(name)
    plan = imported(source, tmp_path / "job", mcore=cases.mcore(name))
    assert diff(source, tmp_path / "job").identical
    back = exported(tmp_path / "job", tmp_path / "back", arch=cases.family(name))
    assert same(back, tensors(source)) == []
    one, other = (AutoConfig.from_pretrained(place).to_dict() for place in (source, tmp_path / "back"))
    (other.get("rope_parameters") or {}).pop("type", None)  # the old spelling of rope_type, for old code
    assert one.keys() - other.keys() == set()
    differ = {key for key in one if one[key] != other[key]} - NEUTRAL
    alike = {"max_window_layers", "sliding_window"} if one.get("use_sliding_window") is False else set()
    yarn = {"rope_parameters"} if "yarn" in name else set()  # the same numbers, with their defaults
    assert differ <= {"head_dim", "num_key_value_heads", "n_inner"} | alike | yarn
    assert all(one[key] is None for key in differ - alike - yarn)
    report = json.loads((tmp_path / "job" / "distckpt-report.json").read_text())
    used = {origin for target in report["targets"].values() for origin in target["from"]}
    assert used | {d["tensor"] for d in report["dropped"]} == set(tensors(source))
    assert plan.job.peak_memory <= 64 << 20


@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "llama_bias_tied"])
def test_tensors_are_where_megatron_keeps_them(name, hf, tmp_path):
    imported(hf(name), tmp_path / "job", mcore=cases.mcore(name))
    assert wrong_places(name, hf(name), tmp_path / "job") == []


STATES = json.loads((GOLDEN / "extra_states.json").read_text())


@pytest.mark.parametrize(("mcore", "name"), [(mcore, name) for mcore in STATES for name in STATES[mcore]])
def test_extra_states_are_those_that_megatron_asks_for(mcore, name, hf, tmp_path):
    """Neither more nor fewer, or a job refuses the checkpoint with `--dist-ckpt-strictness raise_all`."""
    imported(hf(name), tmp_path / "job", mcore=mcore)
    objects = open_checkpoint(tmp_path / "job").catalog.objects
    pattern = r"(.*)\._extra_state/shard_[\d.]+_([\d.]+)"
    written = Counter(" ".join(key.groups()) for key in (re.fullmatch(pattern, key) for key in objects) if key)
    assert sorted(written) == STATES[mcore][name]
    assert all(count == math.prod(map(int, key.split()[1].split("."))) for key, count in written.items())


rules_qkv = rules._qkv_rows


def swapped_qkv(args):
    """Queries for keys, where there are as many."""
    for part, at, to, rows in rules_qkv(args):
        yield 1 - part if part < 2 else part, at, to, rows


def halves_exchanged(self, out, source, target):
    swapped = rules.GateUp(self.up, self.gate, self.source)
    original_gate(swapped, out, source, target)


original_gate = rules.GateUp.emit


def turned_qkv(args):
    """The rows of keys and values exchanged, which there are as many of."""
    for part, at, to, rows in rules_qkv(args):
        yield (0, 2, 1)[part], at, to, rows


original_joined = rules.Joined.emit


def parts_exchanged(self, out, source, target):
    """The first two parts of a projection, which are of one shape, in each other's place."""
    first, *rest = self.sources
    names = (rest[0], first, *rest[1:]) if rest and "in_proj" in first else self.sources
    original_joined(rules.Joined(self.target, names, self.groups), out, source, target)


def neighbours_exchanged(copy, part):
    """Gate for the other half."""
    found = target_box_of(copy, part)
    rows = copy.target_box.shape[0]
    if not copy.target.endswith("linear_fc1.weight"):
        return found
    start = found.start[0] - rows if copy.target_box.start[0] else found.start[0] + rows
    return Box((start, *found.start[1:]), found.shape)


def heads_exchanged(copy, part):
    """The first two pieces of a fused projection, each in the place of the other."""
    found = target_box_of(copy, part)
    start = copy.target_box.start[0]
    if not copy.target.endswith("linear_qkv.weight") or start not in (0, 5):
        return found
    return Box((5 - start, *found.start[1:]), found.shape)


@dataclass(frozen=True)
class TurnedMatrix:
    """The matrix in place of attention, transposed; its shape does not tell."""

    def emit(self, out, source, target):
        tensor = out.source(source, "self_attention.weight")
        out.whole(target + "self_attn.linear_attn.weight", tensor, Op.TRANSPOSE)


def groups_exchanged(args):
    """Keys and values of a layer's first and last query group, each in the place of the other."""
    last = (args.num_query_groups - 1) * args.head_dim
    for part, at, to, rows in rules_qkv(args):
        yield part, at, {0: last, last: 0}.get(to, to) if part and last else to, rows


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("llama", "gate"), ("mixtral", "gate"), ("gpt2", "qkv"), ("gpt2", "transpose"), ("phi3", "turned")),
        *(("qwen3_next", "turned"), ("qwen3_next", "joined"), ("qwen3_5_text", "joined"), ("nemotron_h", "joined")),
        *(("bamba", "joined"), ("falcon_h1", "joined"), ("falcon_h1", "turned"), ("gpt_oss", "halves")),
        *(
            ("nemotron-nas", "gate"),
            ("nemotron-nas", "turned"),
            ("nemotron-nas", "matrices"),
            ("nemotron-nas", "groups"),
        ),
    ],
)
def test_one_mutated_rule_is_seen(name, rule, hf, tmp_path, monkeypatch):
    if rule == "gate":
        monkeypatch.setattr(rules.GateUp, "emit", halves_exchanged)
    elif rule == "turned":
        monkeypatch.setattr(rules, "_qkv_rows", turned_qkv)
    elif rule == "joined":
        monkeypatch.setattr(rules.Joined, "emit", parts_exchanged)
    elif rule == "halves":
        monkeypatch.setattr(imported_module, "target_box_of", neighbours_exchanged)
    elif rule == "matrices":
        monkeypatch.setattr(nemotron_nas, "_LINEAR_ATTENTION", (nemotron_nas._LINEAR_ATTENTION[0], TurnedMatrix()))
    elif rule == "groups":
        monkeypatch.setattr(rules, "_qkv_rows", groups_exchanged)
    elif rule == "qkv":
        monkeypatch.setattr(rules, "_qkv_rows", swapped_qkv)
    else:
        monkeypatch.setattr(imported_module, "target_box_of", heads_exchanged)
    imported(hf(name), tmp_path / "job")
    assert wrong_places(name, hf(name), tmp_path / "job") != []


ORACLES = ["llama_adam_tp2pp2", "qwen3_adam_tp2", "mixtral_adam_ep2tp2", "deepseek_mtp_adam_ep2pp2", "gpt_adam_tp2pp2"]


@pytest.mark.parametrize("name", ORACLES)
def test_what_megatron_wrote_comes_back(name, tmp_path):
    """Megatron's own bytes, exported and imported again, are the same, prediction layers included."""
    assert name in GOLDENS
    exported(GOLDEN / name, tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "job", Layout(tp=2))
    found = diff(GOLDEN / name, tmp_path / "job", ignore=["optimizer.*"])
    assert len(found.tensors) > 10
    assert {tensor.status for tensor in found.tensors} == {"identical"}


LAYOUTS = [
    ("qwen3", "torch_dist", Layout(tp=2, pp=3), {}),
    ("llama", "legacy", Layout(tp=4, pp=3), {}),
    ("qwen2_moe", "torch_dist", Layout(tp=2, ep=3, dp=3), {"mcore": "0.19"}),
    ("gpt2", "torch_dist", Layout(tp=4), {}),
    ("gpt2", "legacy", Layout(tp=2), {"iteration": 7}),
    ("deepseek_v3", "torch_dist", Layout(tp=2, pp=3, ep=2, dp=2), {"iteration": 12}),
    ("mixtral", "legacy", Layout(tp=2, ep=2, dp=2), {}),
    ("phi3", "torch_dist", Layout(tp=4), {}),
    ("qwen3_next", "torch_dist", Layout(tp=2, pp=3), {}),
    ("qwen3_5_text", "legacy", Layout(tp=2), {}),
    ("nemotron_h", "torch_dist", Layout(tp=2, ep=2, dp=2), {"mcore": "0.19"}),
    ("bamba", "legacy", Layout(), {}),
    ("gpt_oss", "torch_dist", Layout(tp=2, ep=3, etp=1, dp=3), {}),
    ("gpt_oss", "legacy", Layout(ep=2, dp=2), {}),
    ("nemotron-nas", "torch_dist", Layout(tp=2, pp=2), {}),
    ("nemotron-nas", "legacy", Layout(tp=2, pp=2), {}),
]


@pytest.mark.parametrize(("name", "to", "layout", "more"), LAYOUTS)
def test_any_layout_and_format(name, to, layout, more, hf, tmp_path):
    imported(hf(name), tmp_path / "job", layout, to=to, **more)
    tracker = (tmp_path / "job" / "latest_checkpointed_iteration.txt").read_text()
    assert tracker == str(more.get("iteration", "release"))
    back = exported(tmp_path / "job", tmp_path / "back", arch=cases.family(name))
    assert same(back, tensors(hf(name))) == []


def test_the_type_may_change_but_not_that_of_a_router_bias(hf, tmp_path):
    imported(hf("deepseek_v3"), tmp_path / "job", dtype=open_type("float32"))
    source, back = tensors(hf("deepseek_v3")), exported(tmp_path / "job", tmp_path / "back")
    assert all(torch.equal(source[name].float(), back[name]) for name in source)
    imported(hf("deepseek_v3"), tmp_path / "half", dtype=open_type("float16"))
    back = exported(tmp_path / "half", tmp_path / "half-back")
    for name, value in back.items():
        kept = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if kept else torch.float16)
        assert torch.equal(value, source[name].float() if kept else source[name].to(torch.float16))


def vocabulary_of(name, hf):
    own = load_file(hf(name) / "model.safetensors")
    kept = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"}
    return {kept[key]: value for key, value in own.items() if key in kept}


@pytest.mark.parametrize(("name", "dtype"), [("llama", None), ("qwen2", None), ("llama", "float32")])
def test_padding_rows_are_the_mean(name, dtype, hf, tmp_path, monkeypatch):
    """Of all 251 rows, in fp32, rounded once; read in any tiles, by any threads, the bytes are the same."""
    kind = dtype and cast_type(dtype)
    imported(hf(name), tmp_path / "zero", Layout(tp=2), dtype=kind)
    imported(hf(name), tmp_path / "mean", Layout(tp=2), pad="mean", dtype=kind, threads=1)
    zero, mean = megatron_bits(tmp_path / "zero"), megatron_bits(tmp_path / "mean")
    for key, value in vocabulary_of(name, hf).items():
        row = bits(value.double().mean(0).float().to(torch.bfloat16).to(torch.float32 if dtype else torch.bfloat16))
        assert mean[key].shape == zero[key].shape == (256, value.shape[1])
        assert not zero[key][251:].any()
        assert (mean[key][251:] == row).all()
        zero[key] = mean[key]
    assert not [key for key in zero if not np.array_equal(zero[key], mean[key])]
    assert diff(hf(name), tmp_path / "mean").identical or dtype
    assert not dtype or not same(
        exported(tmp_path / "mean", tmp_path / "b"), exported(tmp_path / "zero", tmp_path / "a")
    )
    monkeypatch.setattr(padding_module, "_ROWS", 480)  # ten rows at a time
    imported(hf(name), tmp_path / "again", Layout(tp=2), pad="mean", dtype=kind, threads=3, max_memory=400 << 10)
    assert {path: tree(tmp_path / "again")[path] for path in tree(tmp_path / "again") if ".distcp" in path} == {
        path: content for path, content in tree(tmp_path / "mean").items() if ".distcp" in path
    }
    imported(hf(name), tmp_path / "legacy", Layout(tp=2), pad="mean", dtype=kind, to="legacy")
    again = megatron_bits(tmp_path / "legacy")
    assert not [key for key in mean if not np.array_equal(again[key], mean[key])]


def with_head(source, folder, change):
    """A tied model that stores its output layer too."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    own = load_file(file)
    save_file(own | {"lm_head.weight": change(own["model.embed_tokens.weight"].clone())}, file, {"format": "pt"})
    return folder


def one_bit_off(value):
    value.view(torch.uint16)[250, 3] ^= 1
    return value


def test_a_tied_output_layer_that_is_stored_is_the_embedding(hf, tmp_path):
    plan = imported(with_head(hf("qwen2"), tmp_path / "equal", lambda value: value), tmp_path / "out")
    assert ("lm_head.weight", "config.json ties it to the embedding") in plan.dropped
    imported(hf("qwen2"), tmp_path / "plain")
    assert megatron_bits(tmp_path / "out").keys() == megatron_bits(tmp_path / "plain").keys()


@pytest.mark.parametrize("change", [one_bit_off, torch.Tensor.float, lambda value: value[1:]])
def test_a_tied_output_layer_of_its_own_is_refused(change, hf, tmp_path):
    """transformers 5 computes with it, others with the embedding."""
    folder = with_head(hf("qwen2"), tmp_path / "folder", change)
    with pytest.raises(RequestError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the two differ"):
        imported(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def open_type(name):
    from converters.dtypes import dtype

    return dtype(name)


def test_flags_and_arguments_are_the_models(hf, tmp_path):
    imported(hf("deepseek_v3"), tmp_path / "job", Layout(tp=2))
    words = shlex.split((tmp_path / "job" / "megatron_args.txt").read_text())
    assert words[words.index("--moe-layer-freq") + 1] == "([0]*1+[1]*2)"
    assert words[words.index("--padded-vocab-size") + 1] == "256"
    assert words[words.index("--hidden-dropout") + 1] == "0.0"
    assert {"--multi-latent-attention", "--qk-layernorm", "--disable-bias-linear", "--bf16"} <= set(words)
    assert not {"--tensor-model-parallel-size", "--lr", "--seq-length", "--global-batch-size"} & set(words)
    args = open_checkpoint(tmp_path / "job").catalog.args
    assert (args["tensor_model_parallel_size"], args["num_experts"], args["padded_vocab_size"]) == (2, 6, 256)


@pytest.mark.parametrize(("alias", "name"), [("kimi_k2", "deepseek_v3"), ("deci", "nemotron-nas")])
def test_another_name_of_the_same_model(alias, name, hf, tmp_path):
    source = shutil.copytree(hf(name), tmp_path / "hf")
    cases.rewrite_config(source, model_type=alias, auto_map={"AutoConfig": "x.C"})
    plan = imported(source, tmp_path / "job")
    assert dict(plan.summary)["model"].startswith(f"{name} ")
    assert same(exported(tmp_path / "job", tmp_path / "back"), tensors(hf(name))) == []


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_family_that_is_left_out_says_why(kind, hf, tmp_path):
    source = shutil.copytree(hf("llama"), tmp_path / "hf")
    cases.rewrite_config(source, model_type=kind)
    with pytest.raises(RequestError, match=f"a {kind} is not imported: ") as error:
        plan_import(source, tmp_path / "job", Layout())
    assert LEFT_OUT[kind] in error.value.message
    assert kind not in {model.name for model in ARCHITECTURES}
    assert not (tmp_path / "job").exists()


def test_sharded_folders_and_torch_files(hf, tmp_path):
    cases.save("qwen3", tmp_path / "sharded", shard="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    imported(tmp_path / "sharded", tmp_path / "job")
    assert same(exported(tmp_path / "job", tmp_path / "back"), tensors(hf("qwen3"))) == []
    shutil.copytree(hf("gpt2"), tmp_path / "bin")
    own = tensors(hf("gpt2"))
    (tmp_path / "bin" / "model.safetensors").unlink()
    # as GPT-2's own files are: without the prefix of the class with a head, and with its buffers
    named = {name.removeprefix("transformer."): value for name, value in own.items()}
    torch.save(named | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "bin" / "pytorch_model.bin")
    imported(tmp_path / "bin", tmp_path / "job2", Layout(tp=2))
    assert same(exported(tmp_path / "job2", tmp_path / "back2"), own) == []


def test_tokenizer_files_go_along_and_code_does_not(hf, tmp_path):
    source = shutil.copytree(hf("llama"), tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "x.T"}, "a": 1}')
    (source / "modeling_x.py").write_text("raise SystemExit(99)")
    (source / "README.md").write_text("a model")
    (source / ".env").write_text("a secret")
    (source / "checkpoint").mkdir()
    (source / "checkpoint" / "optimizer.pt").write_bytes(b"state")
    cases.rewrite_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.M"})
    plan = imported(source, tmp_path / "a job")
    release = {path.name for path in (tmp_path / "a job" / "release").iterdir()}
    assert release == {".metadata", "__0_0.distcp", "common.pt", "metadata.json"}
    reason = "no Megatron job reads it"
    assert {(n, reason) for n in (".env", "README.md", "checkpoint/", "modeling_x.py")} <= set(plan.dropped)
    assert not any("safetensors" in name for name, why in plan.dropped if why == reason)
    imported(source, tmp_path / "legacy", to="legacy")
    assert [path.name for path in (tmp_path / "legacy" / "release").iterdir()] == ["mp_rank_00"]
    kept = {path.name for path in (tmp_path / "a job" / "tokenizer").iterdir()}
    assert kept == {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"}
    assert "auto_map" not in "".join(p.read_text() for p in (tmp_path / "a job" / "tokenizer").iterdir())
    words = shlex.split((tmp_path / "a job" / "megatron_args.txt").read_text())
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path / "a job" / "tokenizer")
    assert any("code of the folder was left out" in note for note in plan.notes)


# ---------------------------------------------------------------------- bad input


def without(source, name):
    found = tensors(source)
    del found[name]
    save_file(found, source / "model.safetensors", {"format": "pt"})


def reshaped(source, name):
    found = tensors(source)
    found[name] = found[name][:-1].clone()
    save_file(found, source / "model.safetensors", {"format": "pt"})


def added(source, name):
    save_file(tensors(source) | {name: torch.zeros(3)}, source / "model.safetensors", {"format": "pt"})


Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
BAD = {
    "a stranger": (lambda f: cases.rewrite_config(f, model_type="frobnicate"), RequestError, "'frobnicate'"),
    "code": (
        lambda f: cases.rewrite_config(f, model_type="mine", auto_map={"AutoConfig": "x.C"}),
        RequestError,
        "never run",
    ),
    "quantized": (
        lambda f: cases.rewrite_config(f, quantization_config={"quant_method": "gptq"}),
        RequestError,
        "by an unknown method: gptq",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), FormatError, "no config.json"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), FormatError, "config.json"),
    "a word for a size": (lambda f: cases.rewrite_config(f, hidden_size="wide"), FormatError, "does not take"),
    "no heads": (lambda f: cases.rewrite_config(f, num_attention_heads=0), FormatError, "does not take"),
    "missing tensor": (lambda f: without(f, NORM), IntegrityError, "the folder lacks"),
    "a row too few": (lambda f: reshaped(f, Q), RequestError, "by config.json"),
    "another width": (lambda f: cases.rewrite_config(f, intermediate_size=60), RequestError, "by config.json"),
    "a tensor too many": (lambda f: added(f, "model.layers.0.mlp.up_proj.scale"), RequestError, "no place"),
    "a layer too many": (lambda f: cases.rewrite_config(f, num_hidden_layers=2), RequestError, "no place"),
    "longrope": (
        lambda f: cases.rewrite_config(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        RequestError,
        "rope_type 'dynamic'",
    ),
    "Llama 3.2's factor": (
        lambda f: cases.rewrite_config(f, rope_parameters=cases.LLAMA3 | {"factor": 32.0, "rope_theta": 5e5}),
        RequestError,
        "factor 32",
    ),
    "half a bias": (lambda f: cases.rewrite_config(f, attention_bias=True), RequestError, "attention_bias"),
    "a broken theta": (
        lambda f: cases.rewrite_config(f, rope_parameters={"rope_type": "default", "rope_theta": 10000.5}),
        RequestError,
        "whole number",
    ),
    "another activation": (lambda f: cases.rewrite_config(f, hidden_act="gelu"), RequestError, "gelu"),
    "an adapter": (
        lambda f: ((f / "config.json").unlink(), (f / "adapter_config.json").write_text("{}")),
        RequestError,
        "an adapter",
    ),
    "GGUF": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "m.gguf").write_bytes(b"GGUF")),
        RequestError,
        "GGUF",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_imported_is_refused(what, hf, tmp_path):
    spoil, kind, text = BAD[what]
    source = shutil.copytree(hf("llama"), tmp_path / "hf")
    spoil(source)
    with pytest.raises(DistckptError) as caught:
        plan_import(source, tmp_path / "job", Layout())
    assert isinstance(caught.value, kind)
    assert text in f"{caught.value} {caught.value.details}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_missing_shards_and_an_index_that_lies(tmp_path):
    source = tmp_path / "hf"
    cases.save("llama", source, shard="20KB")
    index = source / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first = sorted(source.glob("*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(FormatError, match="no file for 1 of"):
        plan_import(source, tmp_path / "job", Layout())
    first.write_bytes(kept)
    document["weight_map"][NORM] = sorted({*document["weight_map"].values()} - {document["weight_map"][NORM]})[0]
    index.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="lacks 1 tensor that"):
        plan_import(source, tmp_path / "job", Layout())


def test_layouts_that_cannot_be(hf, tmp_path):
    with pytest.raises(RequestError, match="attention heads"):
        plan_import(hf("llama"), tmp_path / "job", Layout(tp=3))
    with pytest.raises(RequestError):
        plan_import(hf("mixtral"), tmp_path / "job", Layout(ep=4, dp=4))


# ---------------------------------------------------------------------- the command


def test_the_command(hf, tmp_path):
    source, out = str(hf("qwen3")), tmp_path / "job"
    done = here("import-hf", source, str(out), "--tp", "2", "--dry-run", "--json")
    plan = json.loads(done.out)
    assert (done.code, plan["schema"], plan["architecture"]) == (0, "distckpt.import-hf/1", "qwen3")
    assert "--qk-layernorm" in plan["arguments"]
    assert not out.exists()
    done = here("import-hf", source, str(out), "--tp", "2")
    assert done.code == 0, done.err
    assert here("diff", source, str(out)).code == 0
    assert here("verify", str(out)).code == 0
    assert here("import-hf", source, str(out)).code == 5
    assert here("import-hf", source, str(tmp_path / "x"), "--mcore", "0.7").code == 2
    assert here("import-hf", str(GOLDEN / "llama_adam_tp2pp2"), str(tmp_path / "x")).code == 4
