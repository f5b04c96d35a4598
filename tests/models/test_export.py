"""Exports of real checkpoints: every element in its place, and in transformers the logits that Megatron computed."""

import dataclasses
import json

import numpy as np
import pytest

from converters import models
from converters.dtypes import from_option
from converters.errors import DestinationError, FormatError, RequestError
from converters.formats import open_checkpoint
from converters.formats.containers.safetensors_out import plan_shards
from converters.models import rules
from converters.planning.plan import Copy, Op
from converters.write.export import ExportOptions, choose_mapping, plan_export
from distckpt_cli.app import main
from harness import hf_reference
from harness.checkpoints import GOLDENS, copy_golden, golden, report_of, tree, truth
from harness.exports import LN1P, TOLERANCE, differing, export, exported, logit_difference
from harness.support import GOLDEN, load_safetensors


def widen(value):
    """bfloat16 bits as float32 bits."""
    return (value.astype(np.uint32) << 16) if value.dtype == np.uint16 else value


@pytest.mark.parametrize("name", GOLDENS)
def test_bits_and_logits(name, tmp_path):
    config, family = GOLDENS[name]
    options = {"dtype": from_option("fp32")} if name in LN1P else {}
    plan = export(GOLDEN / name, tmp_path / "out", **options)
    assert plan.facts["architecture"] == family
    if name in LN1P:
        want = hf_reference.expected(config, family, truth(config))
        for tensor, value in exported(tmp_path / "out").items():
            exact = widen(want[tensor]).view(np.float32) + np.float32("norm" in tensor)
            assert np.array_equal(value.view(np.float32), exact), tensor
    else:
        assert not differing(tmp_path / "out", config, family)
    if config not in ("llama4", "pao", "drop", "lion"):  # for which Megatron's forward was not recorded
        assert logit_difference(tmp_path / "out", config) <= TOLERANCE
    check_accounting(GOLDEN / name, tmp_path / "out")


def check_accounting(source, folder):
    """Each weight of the checkpoint is used or dropped with a reason, each written tensor has an origin."""
    report, catalog = report_of(folder), open_checkpoint(source).catalog
    used = {name for entry in report["targets"].values() for name in entry["from"]}
    dropped = {entry["tensor"]: entry["reason"] for entry in report["dropped"]}
    assert all(dropped.values())
    assert all(name in used or name in dropped for name in catalog.weights)
    assert used <= catalog.weights.keys()
    assert all(entry["from"] for entry in report["targets"].values())
    assert report["source_tensors"]["weights"] == len(catalog.weights)
    tensors = exported(folder)
    assert tensors.keys() == report["targets"].keys()
    assert report["total_size"] == sum(value.nbytes for value in tensors.values())
    buffers = ("e_score_correction_bias",)  # which transformers keeps beside the parameters
    assert report["parameters"] == sum(t.size for name, t in tensors.items() if not name.endswith(buffers))
    for name, entry in report["targets"].items():
        assert entry["shape"] == list(tensors[name].shape)
        assert (folder / entry["file"]).is_file()
    if any(t.kind == "optimizer" for t in catalog.tensors.values()):
        assert "optimizer state" in dropped.values()


def test_all_layouts_of_one_model_give_the_same_bytes(tmp_path):
    """Thirteen checkpoints of the same weights, four versions of Megatron, six optimizer layouts: one model.safetensors."""
    llamas = [name for name, (config, _) in GOLDENS.items() if config == "llama"]
    digests = set()
    for name in llamas:
        export(GOLDEN / name, tmp_path / name)
        digests.add(tree(tmp_path / name)["model.safetensors"])
    assert len(llamas) >= 11
    assert len(digests) == 1


# ---------------------------------------------------------------------- the proof has teeth


def swap_parts(a, b):
    """A `_qkv_rows` that exchanges two of q, k, v where they have the same number of rows, else rotates within a group."""
    original = rules._qkv_rows

    def swapped(args):
        rows = list(original(args))
        dim, size = args.head_dim, args.num_attention_heads // args.num_query_groups * args.head_dim
        for part, at, to, n in rows:
            if {a, b} == {0, 1}:  # the queries of a group taken from where its key lies, and after
                yield (0, at + dim, to, n) if part == 0 else (1, at - size, to, n) if part == 1 else (part, at, to, n)
            else:
                yield {a: b, b: a}.get(part, part), at, to, n

    return swapped


def mutate_qk(patch):
    patch.setattr(rules, "_qkv_rows", swap_parts(0, 1))


def mutate_kv(patch):
    patch.setattr(rules, "_qkv_rows", swap_parts(1, 2))


def mutate_gate_up(patch):
    original = rules.GateUp.emit

    def emit(self, out, source, target):
        original(dataclasses.replace(self, gate=self.up, up=self.gate), out, source, target)

    patch.setattr(rules.GateUp, "emit", emit)


def mutate_expert_order(patch):
    original = rules.Experts.emit

    def emit(self, out, source, target):
        count = out.args.num_experts
        for expert in range(count):
            inner, outer = f"{source}mlp.experts.{expert}.", target + self.target.format(count - 1 - expert)
            for rule in self.rules:
                rule.emit(out, inner, outer)

    assert original
    patch.setattr(rules.Experts, "emit", emit)


def mutate_transpose(patch):
    """The matrix is read as if it were stored the other way round: same shape (it is square), other elements."""
    original = rules.Emit.whole

    def whole(self, name, source, op=Op.COPY, **options):
        square = len(source.shape) == 2 and source.shape[0] == source.shape[1]
        original(self, name, source, Op.COPY if square else op, **options)

    patch.setattr(rules.Emit, "whole", whole)


def mutate_add_one(patch):
    original = rules.Emit.whole

    def whole(self, name, source, op=Op.COPY, **options):
        original(self, name, source, Op.COPY if op is Op.ADD_ONE else op, **options)

    patch.setattr(rules.Emit, "whole", whole)


def mutate_router_bias(patch):
    original = rules.Emit.whole

    def whole(self, name, source, op=Op.COPY, **options):
        original(self, name, source, op, **options)
        if name.endswith("e_score_correction_bias"):
            last = self.copies.pop()
            for i in range(source.shape[0]):
                box = last.source_box.__class__((i,), (1,))
                back = last.source_box.__class__((source.shape[0] - 1 - i,), (1,))
                self.copies.append(Copy(source.name, box, name, back, op))

    patch.setattr(rules.Emit, "whole", whole)


def mutate_norms(patch):
    original = rules.Rename.emit
    other = {"input_layernorm.weight": "post_attention_layernorm.weight"}
    other |= {b: a for a, b in other.items()}

    def emit(self, out, source, target):
        original(dataclasses.replace(self, target=other.get(self.target, self.target)), out, source, target)

    patch.setattr(rules.Rename, "emit", emit)


def mutate_halves_of_down(patch):
    """kv_b_proj is [heads, nope + v]; taking it as [nope + v, heads] keeps every shape."""
    original = rules.Rename.emit

    def emit(self, out, source, target):
        original(self, out, source, target)
        if self.target.endswith("kv_b_proj.weight"):
            last = out.copies.pop()
            rows, box = last.source_box.shape[0], last.source_box.__class__
            for i in range(0, rows, rows // 4):
                n, rest = rows // 4, last.source_box.shape[1:]
                out.copies.append(
                    Copy(last.source, box((i, 0), (n, *rest)), last.target, box((rows - n - i, 0), (n, *rest)))
                )

    patch.setattr(rules.Rename, "emit", emit)


BYTES = {
    "q and k": (mutate_qk, "llama_adam_tp2pp2"),
    "k and v": (mutate_kv, "llama_adam_tp2pp2"),
    "k and v of qwen2, with biases": (mutate_kv, "qwen2_weights_tp2pp2"),
    "q and k of gpt2": (mutate_qk, "gpt_untied_weights_tp2pp2"),
    "gate and up": (mutate_gate_up, "llama_adam_tp2pp2"),
    "gate and up of experts": (mutate_gate_up, "mixtral_adam_ep2tp2"),
    "gate and up of shared experts": (mutate_gate_up, "deepseek_v3_weights_pp2ep2"),
    "expert order": (mutate_expert_order, "qwen3_moe_weights_tp2ep2"),
    "a transpose": (mutate_transpose, "gpt_untied_weights_tp2pp2"),
    "one added to norms": (mutate_add_one, "llama_ln1p_weights_tp2pp2"),
    "router bias order": (mutate_router_bias, "deepseek_v3_weights_pp2ep2"),
    "the two norms of a layer": (mutate_norms, "llama_adam_tp2pp2"),
    "heads of the latent projection": (mutate_halves_of_down, "deepseek_v2_weights_pp2ep2"),
}


@pytest.mark.parametrize("mistake", BYTES)
def test_a_mistake_in_a_rule_turns_the_proof_red(mistake, tmp_path, monkeypatch):
    mutate, name = BYTES[mistake]
    config, family = GOLDENS[name]
    mutate(monkeypatch)
    options = {"dtype": from_option("fp32")} if name in LN1P else {}
    export(GOLDEN / name, tmp_path / "out", **options)  # the geometry is still sound: nothing else would notice
    assert differing(tmp_path / "out", config, family)
    assert logit_difference(tmp_path / "out", config) > TOLERANCE


# changes of config.json alone: only the logits can see them
SETTINGS = {
    "rope theta": ("llama_adam_tp2pp2", {"rope_theta": 500000.0, "rope_parameters.rope_theta": 500000.0}),
    "no rope scaling": ("llama31_weights_tp2pp2", {"rope_scaling": None, "rope_parameters.rope_type": "default"}),
    "epsilon": ("llama_adam_tp2pp2", {"rms_norm_eps": 1e-2}),
    "topk normalised": ("qwen3_moe_weights_tp2ep2", {"norm_topk_prob": False}),
    "fewer experts a token": ("mixtral_adam_ep2tp2", {"num_experts_per_tok": 1}),
    "window": ("mistral_weights_tp2pp2", {"sliding_window": 8}),
    "no window": ("mistral_weights_tp2pp2", {"sliding_window": None}),
    "gelu form": ("gpt_tanh_weights_tp2", {"activation_function": "gelu"}),
    "scaling factor": ("deepseek_v3_weights_pp2ep2", {"routed_scaling_factor": 1.0}),
    "groups": ("deepseek_v3_weights_pp2ep2", {"topk_group": 2}),
    "mscale": ("deepseek_v2_weights_pp2ep2", {"rope_parameters.mscale": 0.2, "rope_scaling.mscale": 0.2}),
}


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_mistake_in_config_json_turns_the_proof_red(mistake, tmp_path):
    name, changes = SETTINGS[mistake]
    export(GOLDEN / name, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    document = json.loads(path.read_text())
    for key, value in changes.items():
        inner = document
        *outer, last = key.split(".")
        for step in outer:
            inner = inner[step]
        assert last in inner
        assert inner[last] != value
        inner[last] = value
    path.write_text(json.dumps(document))
    assert logit_difference(tmp_path / "out", GOLDENS[name][0]) > TOLERANCE


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(("asked", "torch_name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_dtype(asked, torch_name, tmp_path):
    import torch
    from safetensors.torch import load_file

    export(GOLDEN / "deepseek_v3_weights_pp2ep2", tmp_path / "out", dtype=from_option(asked))
    export(GOLDEN / "deepseek_v3_weights_pp2ep2", tmp_path / "plain")
    got, plain = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "plain"))
    for name, value in plain.items():
        keep = name.endswith("e_score_correction_bias")
        wanted = value if keep else value.to(getattr(torch, torch_name))
        assert got[name].dtype == (torch.float32 if keep else getattr(torch, torch_name))
        assert torch.equal(got[name], wanted), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == torch_name


def test_rounding_is_to_nearest_even(tmp_path):
    """fp32 master-like weights to bf16: the cast is torch's, not a truncation."""
    import torch
    from safetensors.torch import load_file

    from harness.checkpoints import write_llama

    write_llama(tmp_path / "src", layers=2, hidden=64, ffn=96, vocab=256, dtype="float32")
    export(tmp_path / "src", tmp_path / "wide")
    export(tmp_path / "src", tmp_path / "narrow", dtype=from_option("bf16"))
    wide, narrow = (load_file(tmp_path / f / "model.safetensors") for f in ("wide", "narrow"))
    assert wide["model.norm.weight"].dtype == torch.float32
    assert all(torch.equal(narrow[name], value.bfloat16()) for name, value in wide.items())
    assert any(not torch.equal(narrow[name].float(), value) for name, value in wide.items())


def test_vocab_size(tmp_path):
    want = truth("llama")["model/embedding.word_embeddings.weight"]
    for asked in (1, 100, 120, 128):
        export(GOLDEN / "llama_adam_tp2pp2", tmp_path / str(asked), vocab_size=asked)
        got = exported(tmp_path / str(asked))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert got[name].shape == (asked, 32)
        assert np.array_equal(got["model.embed_tokens.weight"][:120], want[:asked])
        assert json.loads((tmp_path / str(asked) / "config.json").read_text())["vocab_size"] == asked
        dropped = report_of(tmp_path / str(asked))["dropped"]
        padding = [d for d in dropped if "padding rows" in d["reason"] or "are trained" in d["reason"]]
        assert all(("are trained" in d["reason"]) == (asked < 120) for d in padding)
        assert len(padding) == (0 if asked == 128 else 2)
    for asked in (0, -1, 129):
        with pytest.raises(RequestError, match="128 rows"):
            export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "no", vocab_size=asked)
    assert not (tmp_path / "no").exists()


def test_mtp(tmp_path):
    source = GOLDEN / "deepseek_mtp_adam_ep2pp2"
    for choice in ("auto", "keep", "drop"):
        export(source, tmp_path / choice, mtp=choice)
    kept, dropped = exported(tmp_path / "keep"), exported(tmp_path / "drop")
    assert tree(tmp_path / "auto") == tree(tmp_path / "keep")
    assert kept.keys() > dropped.keys()
    assert {name.startswith("model.layers.2.") for name in kept.keys() - dropped.keys()} == {True}
    configs = [json.loads((tmp_path / c / "config.json").read_text()) for c in ("keep", "drop")]
    assert [c["num_nextn_predict_layers"] for c in configs] == [1, 0]
    reasons = {d["tensor"]: d["reason"] for d in report_of(tmp_path / "drop")["dropped"]}
    assert "multi-token" in reasons["mtp.layers.0.eh_proj.weight"]
    assert logit_difference(tmp_path / "drop", "deepseek_mtp") <= TOLERANCE
    with pytest.raises(RequestError):
        export(source, tmp_path / "no", mtp="maybe")


@pytest.mark.parametrize("limit", [1, 3000, 8192, 20_000, 10**9])
def test_shards(limit, tmp_path):
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", max_shard_bytes=limit)
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "one")
    folder = tmp_path / "out"
    files = sorted(folder.glob("*.safetensors"))
    one = exported(tmp_path / "one")
    got = exported(folder)
    assert got.keys() == one.keys()
    assert all(np.array_equal(got[name], one[name]) for name in one)
    index = folder / "model.safetensors.index.json"
    if limit == 10**9:
        assert [path.name for path in files] == ["model.safetensors"]
        assert not index.exists()
        return
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert [path.name for path in files] == names
    document = json.loads(index.read_text())
    assert document["metadata"]["total_size"] == sum(value.nbytes for value in got.values())
    assert document["weight_map"].keys() == got.keys()
    for path in files:
        held = load_safetensors(path)
        assert {n for n, f in document["weight_map"].items() if f == path.name} == held.keys()
        assert sum(value.nbytes for value in held.values()) <= limit or len(held) == 1
    assert logit_difference(folder, "llama") <= TOLERANCE


def test_safetensors_files_are_canonical(tmp_path):
    """The library itself reads them, the header says `pt`, the elements begin aligned and follow each other."""
    from safetensors import safe_open

    export(GOLDEN / "deepseek_v3_weights_pp2ep2", tmp_path / "out", max_shard_bytes=20_000)
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert (8 + length) % 64 == 0
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__")
        at = 0
        for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
            assert begin == at
            at = end
        assert 8 + length + at == len(raw)


def test_too_many_shards_are_refused():
    _, mapping, _ = choose_mapping(open_checkpoint(GOLDEN / "llama_adam_tp2pp2").catalog, ExportOptions())
    many = {f"{name}.{i}": t for name, t in mapping.targets.items() for i in range(7000)}
    with pytest.raises(RequestError, match="shards"):
        plan_shards(many, 1)


@pytest.fixture
def reference(tmp_path):
    """A Hugging Face folder as a hub download leaves it: config, tokenizer, remote code, and weights of its own."""
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "made")
    folder = tmp_path / "reference"
    folder.mkdir()
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config |= {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.0", "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0"}\r\n')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "modeling_x.py").write_text("x = 1\n")
    (folder / "model.safetensors").write_bytes(b"old weights")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "subfolder").mkdir()
    return folder


def test_hf_config_is_taken_over(reference, tmp_path):
    plan = export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", hf_config=reference)
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["torch_dtype"] == "bfloat16"  # what was written, not what the reference held
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / "model.safetensors.index.json").exists()
    assert (out / "model.safetensors").stat().st_size > 40_000
    assert not (out / "modeling_x.py").exists()
    assert any("left out: modeling_x.py; --copy-code" in note for note in plan.notes)
    assert logit_difference(out, "llama") <= TOLERANCE


@pytest.mark.parametrize("asked", [False, True])
def test_code_is_copied_only_when_it_is_asked_for(asked, reference, tmp_path):
    """Neither .py files nor the settings that make transformers run them; and it is said in both cases."""
    from transformers import AutoConfig

    auto_map = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "someone/repository--modeling_x.X"}
    for name in ("config.json", "tokenizer_config.json"):
        document = json.loads((reference / name).read_text())
        (reference / name).write_text(json.dumps(document | {"auto_map": auto_map}))
    (reference / "secret").symlink_to("/etc/hostname")
    (reference / "tokenizer.pkl").write_bytes(b"x")
    plan = export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", hf_config=reference, copy_code=asked)
    out, (first, second) = tmp_path / "out", plan.notes[-2:]
    for name in ("modeling_x.py", "tokenizer.pkl"):
        assert (out / name).exists() == asked
        assert name in first
    for name in ("config.json", "tokenizer_config.json"):
        assert ("auto_map" in json.loads((out / name).read_text())) == asked
    assert ("runs only with trust_remote_code" if asked else "--copy-code copies it") in first
    assert not (out / "secret").exists()
    assert "links to outside" in second
    if not asked:
        assert type(AutoConfig.from_pretrained(out, trust_remote_code=True)).__name__ == "LlamaConfig"


def test_code_of_what_is_not_given(capsys, tmp_path):
    assert main(["export-hf", str(GOLDEN / "llama_adam_tp2pp2"), str(tmp_path / "out"), "--copy-code"]) == 2
    assert "--hf-config" in capsys.readouterr().err


def test_a_folder_of_the_hubs_cache_is_copied(reference, tmp_path):
    """Its files are links to `blobs`, two folders above."""
    cache = tmp_path / "cache" / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    for number, path in enumerate(p for p in sorted(reference.iterdir()) if p.is_file()):
        path.rename(cache / "blobs" / str(number))
        (cache / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{number}")
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", hf_config=cache / "snapshots" / "abc")
    assert (tmp_path / "out" / "tokenizer.json").exists()


CONTRADICTIONS = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "rope_theta": 12345.0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_contradicting_config_is_refused(key, reference, tmp_path):
    config = json.loads((reference / "config.json").read_text())
    config[key] = CONTRADICTIONS[key]
    if key == "rope_theta":
        config["rope_parameters"][key] = config[key]
    (reference / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="does not fit"):
        export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", hf_config=reference)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_reference_without_a_usable_config_is_refused(content, tmp_path):
    (tmp_path / "ref").mkdir()
    if content is not None:
        (tmp_path / "ref" / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"config\.json"):
        export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", hf_config=tmp_path / "ref")


def test_arch(tmp_path):
    # a mistral without a window is a llama under another name
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", arch="mistral")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    assert logit_difference(tmp_path / "out", "llama") <= TOLERANCE
    export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "named", arch="LlamaForCausalLM")
    with pytest.raises(RequestError, match="unknown architecture 'bert'") as caught:
        export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "no", arch="bert")
    assert "llama" in caught.value.hint
    for source, arch in (
        ("llama_adam_tp2pp2", "gpt2"),
        ("llama_adam_tp2pp2", "mixtral"),
        ("mixtral_adam_ep2tp2", "llama"),
        ("deepseek_v3_weights_pp2ep2", "deepseek_v2"),
        ("qwen2_weights_tp2pp2", "llama"),
        ("qwen3_adam_tp2", "qwen2"),
        ("mistral_weights_tp2pp2", "llama"),
    ):
        with pytest.raises(RequestError):
            export(GOLDEN / source, tmp_path / "no", arch=arch)
    assert not (tmp_path / "no").exists()


def test_an_inference_that_fits_nothing_is_refused_with_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(
        models, "ARCHITECTURES", tuple(m for m in models.ARCHITECTURES if m.name in ("gpt2", "mixtral"))
    )
    with pytest.raises(RequestError, match="no known architecture") as caught:
        export(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out")
    assert any(line.startswith("not gpt2: ") for line in caught.value.details)


def test_config_files_load_in_transformers(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    export(GOLDEN / "llama31_weights_tp2pp2", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_type"] == "llama3"
    GenerationConfig.from_pretrained(tmp_path / "out")


def test_nothing_is_written_by_planning(tmp_path):
    before = tree(golden("llama_adam_tp2pp2"))
    plan = plan_export(open_checkpoint(GOLDEN / "llama_adam_tp2pp2"), tmp_path / "a" / "out")
    assert plan.facts["targets"]
    assert not list(tmp_path.iterdir())
    assert tree(golden("llama_adam_tp2pp2")) == before


@pytest.mark.parametrize("where", [".", "inside", "..", "../.."])
def test_a_destination_in_or_around_the_source_is_refused(where, tmp_path):
    source = copy_golden("llama_adam_tp2pp2", tmp_path / "run" / "iter_0000010")
    before = tree(tmp_path)
    with pytest.raises(DestinationError):
        export(source, source / where)
    assert tree(tmp_path) == before


def test_overwrite_replaces_only_after_success(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me until the end")
    with pytest.raises(DestinationError, match="not empty"):
        export(GOLDEN / "llama_adam_tp2pp2", out)
    with pytest.raises(DestinationError, match="does not look like a checkpoint or a model"):
        export(GOLDEN / "llama_adam_tp2pp2", out, overwrite=True)
    (out / "config.json").write_text("{}")
    with pytest.raises(RequestError):
        export(GOLDEN / "llama_adam_tp2pp2", out, overwrite=True, arch="gpt2")
    assert (out / "mine.txt").exists()
    export(GOLDEN / "llama_adam_tp2pp2", out, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
