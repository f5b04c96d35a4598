"""Small models for the tests of `converters.models`: Megatron's tensors by canonical name, and copies done with numpy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from converters.catalog import Catalog, TensorInfo
from converters.catalog import Part as CatalogPart
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.megatron.model_args import ModelArgs
from converters.planning.plan import Op, reversed_copy

GOLDEN = Path(__file__).parents[1] / "golden"
FP32 = dtype("float32")


def make_catalog(shapes, args=None, config=None, element="float32"):
    """A catalog of whole, unsplit tensors."""
    tensors = {}
    for name, shape in shapes.items():
        array = StoredArray(
            key=name,
            shape=tuple(shape),
            starts=np.zeros((1, len(shape)), np.int64),
            sizes=np.array([shape], np.int64),
            records=np.zeros(1, np.int64),
        )
        kind = dtype("float32" if name.endswith("expert_bias") else element)
        tensors[name] = TensorInfo(name, kind, tuple(shape), "weight", (CatalogPart(array),))
    return Catalog(Path("memory"), "torch_dist", "Megatron-LM", tensors, args=args or {}, config=config or {})


# a Namespace as Megatron-LM 0.16 stores it, in the parts that matter
BASE = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 4,
    "vocab_size": 50,
    "padded_vocab_size": 64,
    "max_position_embeddings": 32,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "untie_embeddings_and_output_weights": True,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "qk_layernorm": False,
    "init_method_std": 0.02,
}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 10,
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
}
LATENT = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "rope_type": "rope",
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 20,
}
LAYER_NORM = {"normalization": "LayerNorm", "swiglu": False, "bias_gelu_fusion": False, "add_bias_linear": True}
FAMILIES = {
    "llama": {},
    "mistral": {"window_size": (7, 0)},
    "qwen2": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {"qk_layernorm": True, "kv_channels": 8},
    "qwen2_moe": EXPERTS
    | {"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 14, "moe_shared_expert_gate": True},
    "qwen3_moe": EXPERTS | {"qk_layernorm": True, "moe_layer_freq": "[0]+[1]*2"},
    "mixtral": EXPERTS,
    "deepseek_v2": EXPERTS | LATENT | {"q_lora_rank": None, "moe_router_pre_softmax": True},
    "deepseek_v3": EXPERTS
    | LATENT
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "mtp_num_layers": 1},
    "gpt2": {
        "group_query_attention": False,
        "normalization": "LayerNorm",
        "swiglu": False,
        "bias_gelu_fusion": True,
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    },
    "gpt_neox": LAYER_NORM | {"group_query_attention": False, "rotary_percent": 0.5},
    "starcoder2": LAYER_NORM,
    "nemotron": LAYER_NORM
    | {
        "squared_relu": True,
        "add_bias_linear": False,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": 0.5,
    },
    "granitemoeshared": EXPERTS | {"moe_shared_expert_intermediate_size": 14},
}


def case(family, **changes):
    """The Namespace of a family's small model."""
    return BASE | FAMILIES[family] | changes


def megatron_shapes(a):
    """Canonical name -> shape of every tensor that Megatron-Core stores for these arguments (TransformerEngine's spec)."""
    h, out = a["hidden_size"], {}
    out["embedding.word_embeddings.weight"] = (a["padded_vocab_size"], h)
    if a["position_embedding_type"] == "learned_absolute":
        out["embedding.position_embeddings.weight"] = (a["max_position_embeddings"], h)
    norms = ("weight", "bias") if a["normalization"] == "LayerNorm" else ("weight",)
    freq = a.get("moe_layer_freq", 1)
    freq = [0, 1, 1] if isinstance(freq, str) else [1] * a["num_layers"] if freq == 1 else freq
    for layer in range(a["num_layers"]):
        moe = bool(a.get("num_experts")) and bool(freq[layer])
        _layer(out, a, f"decoder.layers.{layer}.", moe, norms)
    for leaf in norms:
        out[f"decoder.final_layernorm.{leaf}"] = (h,)
    if a["untie_embeddings_and_output_weights"]:
        out["output_layer.weight"] = (a["padded_vocab_size"], h)
    for depth in range(a.get("mtp_num_layers") or 0):
        p = f"mtp.layers.{depth}."
        out |= {f"{p}{n}.weight": (h,) for n in ("enorm", "hnorm", "final_layernorm")} | {
            f"{p}eh_proj.weight": (h, 2 * h)
        }
        _layer(out, a, f"{p}transformer_layer.", True, norms)
    return out


def _layer(out, a, p, moe, norms):
    h, heads, dim = a["hidden_size"], a["num_attention_heads"], a["kv_channels"]
    groups = a["num_query_groups"] if a["group_query_attention"] else heads
    s, bias = p + "self_attention.", a["add_bias_linear"]
    if a.get("multi_latent_attention"):
        q, kv, pos, nope, v = (
            a[n] for n in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim", "qk_head_dim", "v_head_dim")
        )
        out[p + "input_layernorm.weight"] = (h,)
        if q:
            out[s + "linear_q_down_proj.weight"] = (q, h)
            out[s + "linear_q_up_proj.layer_norm_weight"] = (q,)
        out[s + ("linear_q_up_proj.weight" if q else "linear_q_proj.weight")] = (heads * (nope + pos), q or h)
        out[s + "linear_kv_down_proj.weight"] = (kv + pos, h)
        out[s + "linear_kv_up_proj.layer_norm_weight"] = (kv,)
        out[s + "linear_kv_up_proj.weight"] = (heads * (nope + v), kv)
        out[s + "linear_proj.weight"] = (h, heads * v)
    else:
        for leaf in norms:
            out[s + f"linear_qkv.layer_norm_{leaf}"] = (h,)
        rows = (heads + 2 * groups) * dim
        out[s + "linear_qkv.weight"] = (rows, h)
        if bias or a["add_qkv_bias"]:
            out[s + "linear_qkv.bias"] = (rows,)
        out[s + "linear_proj.weight"] = (h, heads * dim)
        if bias:
            out[s + "linear_proj.bias"] = (h,)
        if a["qk_layernorm"]:
            out |= {s + f"{n}_layernorm.weight": (dim,) for n in "qk"}
    for leaf in norms:
        out[p + (f"pre_mlp_layernorm.{leaf}" if moe else f"mlp.linear_fc1.layer_norm_{leaf}")] = (h,)
    if not moe:
        _mlp(out, p + "mlp.", h, a["ffn_hidden_size"], a)
        return
    out[p + "mlp.router.weight"] = (a["num_experts"], h)
    if a.get("moe_router_enable_expert_bias"):
        out[p + "mlp.router.expert_bias"] = (a["num_experts"],)
    for expert in range(a["num_experts"]):
        _mlp(out, p + f"mlp.experts.{expert}.", h, a["moe_ffn_hidden_size"], a)
    if a.get("moe_shared_expert_intermediate_size"):
        _mlp(out, p + "mlp.shared_experts.", h, a["moe_shared_expert_intermediate_size"], a)
    if a.get("moe_shared_expert_gate"):
        out[p + "mlp.shared_experts.gate_weight"] = (1, h)


def _mlp(out, p, h, ffn, a):
    out[p + "linear_fc1.weight"] = ((1 + a["swiglu"]) * ffn, h)
    out[p + "linear_fc2.weight"] = (h, ffn)
    if a["add_bias_linear"]:
        out[p + "linear_fc1.bias"] = ((1 + a["swiglu"]) * ffn,)
        out[p + "linear_fc2.bias"] = (h,)


def random_arrays(shapes, seed=0):
    """Distinct float32 values, so that a misplaced element is seen."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def run_copies(copies, shapes, arrays, fill=0.0):
    """Does what the copies say, element by element, in float32."""
    out = {name: np.full(shape, fill, np.float32) for name, shape in shapes.items()}
    for copy in copies:
        piece = arrays[copy.source][copy.source_box.slices]
        if copy.op is Op.TRANSPOSE:
            piece = piece.T
        elif copy.op is Op.ADD_ONE:
            piece = piece + np.float32(1)
        elif copy.op is Op.SUBTRACT_ONE:
            piece = piece - np.float32(1)
        out[copy.target][copy.target_box.slices] = piece.reshape(copy.target_box.shape)
    return out


def run_back(mapping, shapes, arrays):
    """Undoes an export."""
    return run_copies([reversed_copy(copy) for copy in mapping.copies], shapes, arrays)


def golden_case(name, config):
    """A golden checkpoint's catalog, its ModelArgs, and its true values, with zeros for padding rows."""
    from converters.formats.torch_dist.reader import TorchDistReader

    folder = next((GOLDEN / name).glob("**/.metadata")).parent
    catalog = TorchDistReader.open(folder).catalog
    arrays = {}
    for key, tensor in load_file(GOLDEN / "truth" / f"{config}-bf16.safetensors").items():
        kind, _, parameter = key.split("/", 2)
        if kind not in ("model", "buffer"):
            continue
        canonical = re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.\2.\1.weight", parameter)
        if kind == "buffer" and canonical not in catalog.weights:  # yarn's tables, which are never stored
            continue
        value, shape = tensor.float().numpy(), catalog.weights[canonical].shape
        arrays[canonical] = np.pad(value, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])
    assert arrays.keys() == catalog.weights.keys()
    return catalog, ModelArgs.from_catalog(catalog), arrays
