"""What a Hugging Face config.json says of its model: the facts that shape tensors, and the tensors that follow from them.

The tables of the architectures say which tensors a model has and what becomes of Megatron's; here they are asked with
Megatron's tensors that would be there, if config.json is right.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from converters.catalog import TensorInfo
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError
from converters.facts.model_args import ModelArgs
from converters.models.config import KEYS
from converters.models.export import emit_all
from converters.models.model import SET
from converters.models.rules import Emit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.models.model import Model

__all__ = ["COMPUTED", "KEYS", "described", "expected_shapes"]

# made when a model is built, and stored by some versions of transformers all the same
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_BIASES = ("attention_bias", "mlp_bias", "use_bias")
_MOST, _MOST_OF_ANY = 1 << 31, 1 << 13
_COUNTED = ("num_layers", "num_attention_heads", "num_experts", "mtp_num_layers")  # rules go through them one by one
_PLACE = re.compile(r"(?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?")


def described(model: Model, config: Mapping[str, Any], *, biased: bool) -> ModelArgs:
    """The facts of a model that shape its tensors; all others are None.

    Args:
        model: The table of its architecture.
        config: Content of config.json.
        biased: Whether the projections have a bias, if config.json does not say.

    Raises:
        FormatError: A size is no size, or one that is needed is not stated.
        RequestError: It describes a variant that the table does not have.
    """
    own = {*model.settings(ModelArgs()), "vocab_size", "tie_word_embeddings", *KEYS["num_experts"]}
    config = {key: value for key, value in config.items() if key in own}  # transformers ignores those of other models
    found: dict[str, Any] = {}
    for field, names in KEYS.items():
        size = _size(config, names)
        if size is not None:
            found[field] = size
        if field in _COUNTED and (size or 0) > _MOST_OF_ANY:
            raise FormatError(f"config.json says {names[0]} {size:,}, which no model has")
    for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if not found.get(field):
            raise FormatError(f"config.json does not say {KEYS[field][0]}")
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    found.setdefault("num_query_groups", heads)
    found.setdefault("ffn_hidden_size", 4 * hidden)  # n_inner of GPT-2 is null
    found.setdefault("moe_ffn_hidden_size", found["ffn_hidden_size"])
    mla = _only(model, "mla") is True
    if not mla and "head_dim" not in found:
        found["head_dim"] = hidden // heads
    if not found["num_query_groups"] or heads % found["num_query_groups"]:
        raise FormatError(
            f"config.json says {heads} heads, which {found['num_query_groups']} query groups cannot share"
        )
    if "n_shared_experts" in config:
        found["moe_shared_expert_size"] = (_size(config, ("n_shared_experts",)) or 0) * found["moe_ffn_hidden_size"]
    lacking = next((name for name in _NEEDED if SET in model.needs.get(name, ()) and name not in found), None)
    if lacking:
        raise FormatError(f"config.json does not say {KEYS[lacking][0]}")
    bias, qkv_bias = _biases(model, config, biased=biased)
    tied = config.get("tie_word_embeddings")
    return ModelArgs(
        **found,
        tied_embeddings=tied if isinstance(tied, bool) else None,
        gated=_only(model, "gated"),
        mla=mla,
        add_bias_linear=bias,
        add_qkv_bias=qkv_bias,
        moe_layers=_expert_layers(model, config, found),
    )


# sizes without which the shapes do not follow
_NEEDED = ("num_experts", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_shared_expert_size")


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise FormatError(f"config.json says {name} {value!r:.80}, which is no size")
    return value


def _only(model: Model, field: str) -> Any:
    """The one value that an architecture has for a field; None if there are several or it does not matter."""
    allowed = model.needs.get(field, ())
    return allowed[0] if len(allowed) == 1 and isinstance(allowed[0], bool | str) else None


def _biases(model: Model, config: Mapping[str, Any], *, biased: bool) -> tuple[bool, bool]:
    stated = {bool(config[name]) for name in _BIASES if name in config}
    allowed = model.needs.get("add_bias_linear", (True, False))
    if len(stated) > 1 or not stated <= set(allowed):
        shown = ", ".join(f"{name} {config[name]}" for name in _BIASES if name in config)
        raise RequestError(f"config.json says {shown}, a variant of {model.name} that is not known here")
    bias = stated.pop() if stated else bool(allowed[0]) if len(allowed) == 1 else biased
    only = _only(model, "add_qkv_bias")
    if only is not None:
        return bias, only
    return bias, bool(config["qkv_bias"]) if "qkv_bias" in config else biased if True not in allowed else bias


def _expert_layers(model: Model, config: Mapping[str, Any], found: Mapping[str, int]) -> tuple[bool, ...]:
    """Which layers have experts: `first_k_dense_replace`, `mlp_only_layers` and `decoder_sparse_step` say, else all."""
    layers = range(found["num_layers"])
    if not model.moe:
        return tuple(False for _ in layers)
    first, every = (_size(config, (name,)) for name in ("first_k_dense_replace", "moe_layer_freq"))
    step, dense = _size(config, ("decoder_sparse_step",)), config.get("mlp_only_layers") or ()
    if every not in (None, 1) or not isinstance(dense, list | tuple):
        raise RequestError(f"config.json says moe_layer_freq {every}, mlp_only_layers {dense!r:.80}: not known here")
    if model.dense and first is None and step is None:
        raise RequestError("config.json does not say which layers have experts")
    return tuple(n >= (first or 0) and n not in dense and (n + 1) % (step or 1) == 0 for n in layers)


def expected_shapes(model: Model, args: ModelArgs, *, mtp: int = 0) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model.

    Args:
        model: The table of its architecture.
        args: What `described` says.
        mtp: Multi-token prediction layers behind the others.
    """
    out = _Described(args, {}, args.vocab_size or 0)
    out.shapes = _shapes(args)
    emit_all(out, model, mtp)
    return {name: target.shape for name, target in out.targets.items()}


class _Described(Emit):
    """Rules applied to tensors that need not exist."""

    shapes: Mapping[str, tuple[int, ...]]

    def source(self, prefix: str, *names: str) -> TensorInfo:
        """The tensor that Megatron would have; what is not in `shapes` is a norm or a bias."""
        name = prefix + names[0]
        key = re.sub(r"experts\.\d+\.", "experts.", _PLACE.sub("", name))
        return TensorInfo(name, dtype("float32"), self.shapes.get(key, (self.args.hidden_size or 0,)), "weight", ())


def _shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Megatron's shapes, but for those of (hidden_size,), without the place in the model."""
    hidden, vocab, heads = args.hidden_size or 0, args.vocab_size or 0, args.num_attention_heads or 0
    dim, experts, doubled = args.head_dim or 0, args.num_experts or 0, 1 + bool(args.gated)
    out: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "embedding.position_embeddings.weight": (args.max_position_embeddings or 0, hidden),
        "output_layer.weight": (vocab, hidden),
        "self_attention.q_layernorm.weight": (dim,),
        "self_attention.k_layernorm.weight": (dim,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.expert_bias": (experts,),
        "mlp.shared_experts.gate_weight": (1, hidden),
        "eh_proj.weight": (hidden, 2 * hidden),
    }
    widths = {
        "": args.ffn_hidden_size,
        "experts.": args.moe_ffn_hidden_size,
        "shared_experts.": args.moe_shared_expert_size,
    }
    for kind, width in widths.items():
        out[f"mlp.{kind}linear_fc1.weight"] = (doubled * (width or 0), hidden)
        out[f"mlp.{kind}linear_fc1.bias"] = (doubled * (width or 0),)
        out[f"mlp.{kind}linear_fc2.weight"] = (hidden, width or 0)
    rows, inner = (heads + 2 * (args.num_query_groups or 0)) * dim, heads * dim
    if args.mla:
        q, kv, nope = args.q_lora_rank or 0, args.kv_lora_rank or 0, args.qk_head_dim or 0
        rope, inner = args.qk_pos_emb_head_dim or 0, heads * (args.v_head_dim or 0)
        out["self_attention.linear_q_down_proj.weight"] = (q, hidden)
        out["self_attention.linear_q_up_proj.layer_norm_weight"] = (q,)
        out["self_attention.linear_q_up_proj.weight"] = (heads * (nope + rope), q)
        out["self_attention.linear_q_proj.weight"] = (heads * (nope + rope), hidden)
        out["self_attention.linear_kv_down_proj.weight"] = (kv + rope, hidden)
        out["self_attention.linear_kv_up_proj.layer_norm_weight"] = (kv,)
        out["self_attention.linear_kv_up_proj.weight"] = (heads * nope + inner, kv)
    out["self_attention.linear_qkv.weight"], out["self_attention.linear_qkv.bias"] = (rows, hidden), (rows,)
    out["self_attention.linear_proj.weight"] = (hidden, inner)
    return out
