"""The real megatron-core builds the model from the imported arguments, loads it strictly, and computes the same logits."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from converters import Layout
from converters.formats import open_checkpoint
from converters.pickles.nodes import Global
from harness import import_cases as cases
from harness.imports import imported, megatron_bits
from oracle.fixtures import run_oracle

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]

# how the oracle's Namespace spells them, for those of its arguments that an import states otherwise
RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
KNOWN = set(
    re.findall(r'^    "(\w+)":', (Path(__file__).parents[1] / "oracle" / "models.py").read_text(), re.MULTILINE)
)
UNSAID = ("params_dtype", "bf16", "fp16", "padded_vocab_size", "transformer_impl", "moe_grouped_gemm", "iteration")


def model_arguments(root):
    """The imported arguments as `--set` of the oracle, which fills in its own for the job."""
    args = open_checkpoint(root).catalog.args
    named = {RENAMED.get(name, name): value for name, value in args.items() if name not in UNSAID}
    kept = {name: value for name, value in named.items() if name in KNOWN and not isinstance(value, Global)}
    neutral = {"group_query_attention": False, "num_query_groups": 1, "swiglu": False, "add_bias_linear": True}
    neutral |= {"untie_embeddings_and_output_weights": False, "num_experts": None, "qk_layernorm": False}
    merged = neutral | {name: value for name, value in kept.items() if value is not None}
    fixed = ("ckpt_format", "tokenizer_type", "context_parallel_size", "virtual_pipeline_model_parallel_size")
    return {name: value for name, value in merged.items() if name not in fixed}


def expected(root, into):
    """Every tensor, whole and without padding, under the names on disk."""
    found, experts = {}, {}
    for name, bits in megatron_bits(root).items():
        value = torch.from_numpy(bits).view({2: torch.bfloat16, 4: torch.float32}[bits.itemsize])
        value = value[:251] if name.startswith(("embedding.word", "output_layer")) else value
        if hit := re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(linear_fc[12]\.(?:weight|bias))", name):
            experts.setdefault(f"{hit[1]}.experts.{hit[3]}", {})[int(hit[2])] = value
        else:
            found[name] = value
    found |= {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
    save_file({name: value.contiguous() for name, value in found.items()}, into)
    return into


def load(root, truth, layout, arguments, *more):
    options = [f"--{name}={value}" for name, value in layout.items()]
    options += [f"--set={name}={value!r}" for name, value in arguments.items()]
    code, answer = run_oracle("load", root, "--config", "llama", "--expected", truth, *options, *more)
    assert code == 0, answer


CASES = ["llama", "mixtral", "mistral", "glm4_moe"]
MORE = ["qwen2", "qwen3", "gpt2", "starcoder2", "llama_bias_tied", "qwen3_moe", "gpt_neox"]
MORE += ["phi3", "ministral", "smollm3", "seed_oss", "glm", "ernie4_5", "arcee", "granite", "granitemoe", "gpt_oss"]
MORE += ["glm4_moe_plain"]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_megatron_computes_the_logits_of_transformers(name, tmp_path):
    cases.save(name, tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "job", iteration=10)
    arguments = model_arguments(tmp_path / "job")
    truth = expected(tmp_path / "job", tmp_path / "truth.safetensors")
    load(tmp_path / "job", truth, {}, arguments, "--logits", tmp_path / "logits.safetensors")
    theirs = load_file(tmp_path / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        ours = model.eval()(theirs["tokens"]).logits
    # Megatron's unfused GELU is the exact one, whatever the arguments say
    close = 3e-2 if "tanh" in str(model.config.to_dict().get("hidden_act")) or name == "gpt2" else 1e-4
    assert (ours - theirs["logits"]).abs().max() < close
    if name not in MORE:
        imported(tmp_path / "hf", tmp_path / "job4", Layout(tp=2, pp=3), iteration=10)
        load(tmp_path / "job4", truth, {"tp": 2, "pp": 3}, arguments)


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3_next", {"tp": 2}), ("bamba", {"pp": 2}), ("nemotron_h_dense", {"tp": 2})]
)
def test_megatron_loads_what_a_cpu_cannot_compute(name, layout, tmp_path):
    """Mamba and gated delta nets: the real modules without their kernels take every tensor, strictly, bit for bit."""
    cases.save(name, tmp_path / "hf", **({"linear_num_value_heads": 4} if name == "qwen3_next" else {}))
    imported(tmp_path / "hf", tmp_path / "job", Layout(**layout), iteration=10)
    truth = expected(tmp_path / "job", tmp_path / "truth.safetensors")
    load(tmp_path / "job", truth, layout, model_arguments(tmp_path / "job"))
