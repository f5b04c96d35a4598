"""What a Hugging Face config.json says of its model: the facts that shape tensors, and the tensors that follow from them.

The tables of the architectures say which tensors a model has and what becomes of Megatron's; here they are asked with
Megatron's tensors that would be there, if config.json is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.catalog import TensorInfo
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError
from converters.megatron.bridge_families import WIDE_NORMS
from converters.megatron.heterogeneous import ENCODED, read_blocks
from converters.megatron.model_args import ModelArgs
from converters.megatron.tensor_axes import LAYER, OUTER
from converters.models.config import KEYS
from converters.models.export import emit_all
from converters.models.model import SET
from converters.models.rules import Emit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.models.model import Model

# made when a model is built, and stored by some versions of transformers all the same
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_BIASES = ("attention_bias", "mlp_bias", "use_bias")
_MOST, _MOST_OF_ANY = 1 << 31, 1 << 13
_COUNTED = ("num_layers", "num_attention_heads", "num_experts", "mtp_num_layers")  # rules go through them one by one
HEADS = ("lm_head.weight", "embed_out.weight")  # there or not, as the embedding is tied or not
# a norm that is one module with the projection behind it, but in latent attention and before experts
# (gpt_layer_specs.py, get_gpt_layer_with_transformer_engine_spec, core_v0.16.1)
_FUSED = re.compile(r"(self_attention|mlp)\.linear_(?:qkv|fc1)\.layer_norm_")
_STACK_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.|mtp_model_layer\.layers\.\d+\.)?")


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
    class_keys = {*model.settings(ModelArgs()), "vocab_size", "tie_word_embeddings", *KEYS["num_experts"]}
    # transformers ignores the keys of other models
    config = {key: value for key, value in config.items() if key in class_keys}
    table_facts = _table_facts(model, config)
    facts: dict[str, Any] = {name: value for name, value in table_facts.items() if name in KEYS}
    for fact, names in KEYS.items():
        size = _read_size(config, names)
        if size is not None and fact not in table_facts:
            facts[fact] = size
        if fact in _COUNTED and (size or 0) > _MOST_OF_ANY:
            raise FormatError(f"config.json says {names[0]} {size:,}, which is too large")
    for fact in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if not facts.get(fact):
            raise FormatError(f"config.json does not say {KEYS[fact][0]}")
    heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
    facts.setdefault("num_query_groups", heads)
    facts.setdefault("ffn_hidden_size", 4 * hidden)  # n_inner of GPT-2 is null
    facts.setdefault("moe_ffn_hidden_size", facts["ffn_hidden_size"])
    mla = model.fixed_facts.get("mla") is True
    if not mla and "head_dim" not in facts:
        facts["head_dim"] = hidden // heads
    if not facts["num_query_groups"] or heads % facts["num_query_groups"]:
        raise FormatError(
            f"config.json says {heads} heads, which {facts['num_query_groups']} query groups cannot share"
        )
    if "n_shared_experts" in config and "moe_shared_expert_intermediate_size" not in class_keys:
        facts["moe_shared_expert_size"] = (_read_size(config, ("n_shared_experts",)) or 0) * facts[
            "moe_ffn_hidden_size"
        ]
    lacking = next((name for name in _NEEDED if SET in model.needs.get(name, ()) and name not in facts), None)
    if lacking:
        raise FormatError(f"config.json does not say {KEYS[lacking][0]}")
    bias, qkv_bias = _biases(model, config, biased=biased)
    tied = config.get("tie_word_embeddings")
    return ModelArgs(
        **facts,
        tied_embeddings=tied if isinstance(tied, bool) else None,
        gated=model.fixed_facts.get("gated"),
        mla=mla,
        add_bias_linear=bias,
        add_qkv_bias=qkv_bias,
        moe_layers=_expert_layers(model, config, facts),
        **{name: value for name, value in table_facts.items() if name not in facts},
    )


def _table_facts(model: Model, config: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes tensors among the facts that no other architecture has."""
    stated = model.fixed_facts | model.facts(config)
    extras = {name: stated[name] for name in _SHAPING_EXTRAS if stated.get(name)}
    fields = (
        "num_layers",
        "num_query_groups",
        "ffn_hidden_size",
        "linear_layers",
        "qk_layernorm",
        "layer_pattern",
        "prediction_pattern",
        "moe_shared_expert_size",
    )
    facts = {name: stated[name] for name in fields if isinstance(stated.get(name), bool | tuple | int | str)}
    return {**facts, **({"extras": extras} if extras else {})}


_SHAPING_EXTRAS = ("attention_output_gate", "bridge_family", "mamba_rms_norm", "moe_latent_size", ENCODED)
# sizes without which the shapes do not follow
_NEEDED = ("num_experts", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_shared_expert_size")


def _read_size(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise FormatError(f"config.json says {name} {value!r:.80}, which is not a size")
    return value


def _biases(model: Model, config: Mapping[str, Any], *, biased: bool) -> tuple[bool, bool]:
    names = [name for name in _BIASES if name in config and name != model.qkv_bias]
    stated = {bool(config[name]) for name in names}
    allowed = model.needs.get("add_bias_linear", (True, False))
    if len(stated) > 1 or not stated <= set(allowed):
        shown = ", ".join(f"{name} {config[name]}" for name in names)
        raise RequestError(f"config.json says {shown}, an unknown variant of {model.name}")
    bias = stated.pop() if stated else bool(allowed[0]) if len(allowed) == 1 else biased
    only = model.fixed_facts.get("add_qkv_bias")
    if only is not None:
        return bias, only
    if model.qkv_bias in config:
        return bias, bool(config[model.qkv_bias])
    return bias, biased if True not in allowed else bias


def _expert_layers(model: Model, config: Mapping[str, Any], facts: Mapping[str, int]) -> tuple[bool, ...]:
    """Which layers have experts: `first_k_dense_replace`, `mlp_only_layers` and `decoder_sparse_step` say, else all.

    GLM-4.7 lists them.
    """
    layers = range(facts["num_layers"])
    if model.hybrid:
        return tuple(symbol == "E" for symbol in model.facts(config)["layer_pattern"])
    if not model.moe:
        return tuple(False for _ in layers)
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == len(layers) and {*kinds} <= {"dense", "sparse"}:
        return tuple(kind == "sparse" for kind in kinds)
    first, every = (_read_size(config, (name,)) for name in ("first_k_dense_replace", "moe_layer_freq"))
    step, dense = _read_size(config, ("decoder_sparse_step",)), config.get("mlp_only_layers") or ()
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
    out = Described(args, {}, args.vocab_size or 0)
    emit_all(out, model, mtp)
    return {name: target.shape for name, target in out.targets.items()}


def own_names(model: Model, tensors: Iterable[str]) -> dict[str, str]:
    """The names in a folder by those of the class with a head; the one without has no prefix, nor have GPT-2's own files."""
    prefix, _, rest = model.layers.partition(".")
    names = list(tensors)
    bare = any(n.startswith(rest.split("{")[0]) for n in names) and not any(n.startswith(f"{prefix}.") for n in names)
    return {f"{prefix}.{name}" if bare and name not in HEADS else name: name for name in names}


@dataclass
class Described(Emit):
    """Rules applied to tensors that need not exist: those that TransformerEngine's layers would have.

    Attributes:
        canonical: Shapes of the tensors that were asked for.
    """

    canonical: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = _sizes(self.args)
        self._block_sizes = _block_sizes(self.args)

    def source(self, prefix: str, *names: str) -> TensorInfo:
        """The tensor that Megatron would have; what has no shape of its own is a norm or a bias."""
        fused = _FUSED.match(names[0])
        apart = fused is not None and (self.args.mla if fused[1] == "self_attention" else self._mixed(prefix))
        name = prefix + names[1 if apart and len(names) > 1 else 0]
        key = re.sub(r"experts\.\d+\.", "experts.", _STACK_LAYER.sub("", name))
        axes, sizes = OUTER.get(key) or LAYER.get(key), self._block_sizes.get(prefix, self._sizes)
        names_of_sizes = ("H",) if axes is None else axes.sizes
        if self.args.extras.get("bridge_family") in WIDE_NORMS and names_of_sizes == ("head",):
            names_of_sizes = ("q_heads",) if ".q_" in name else ("k_heads",)
        shape = tuple(int(size) if size.isdigit() else sizes[size] for size in names_of_sizes)
        self.canonical[name] = shape
        return TensorInfo(name, dtype("float32"), shape, "weight", ())

    def _mixed(self, prefix: str) -> bool:
        """Whether a layer has experts; those of multi-token prediction are like the last, but in a hybrid, whose say so."""
        if ".mtp_model_layer." in prefix:
            return False
        layers = self.args.moe_layers or (False,)
        number = prefix.split(".")[2]
        return layers[int(number)] if prefix.startswith("decoder.") and int(number) < len(layers) else layers[-1]


def _sizes(args: ModelArgs) -> dict[str, int]:
    """The sizes of Megatron's tensors, by their names in `tensor_axes`."""
    hidden, heads, dim = args.hidden_size or 0, args.num_attention_heads or 0, args.head_dim or 0
    gated, doubled = bool(args.extras.get("attention_output_gate")), 1 + bool(args.gated)
    nope, rope, value = args.qk_head_dim or 0, args.qk_pos_emb_head_dim or 0, heads * (args.v_head_dim or 0)
    latent = args.extras.get("moe_latent_size")
    mamba_heads, delta_heads = args.mamba_num_heads or 0, args.linear_num_value_heads or 0
    sizes: dict[str, int | None] = {
        "H": hidden,
        "eh": 2 * hidden,
        "V": args.vocab_size,
        "positions": args.max_position_embeddings,
        "qkv": ((1 + gated) * heads + 2 * (args.num_query_groups or 0)) * dim,
        "head": dim,
        "sinks": heads,
        "q_heads": heads * dim,
        "k_heads": (args.num_query_groups or 0) * dim,
        "heads": value if args.mla else heads * dim,
        "q_rank": args.q_lora_rank,
        "kv_rank": args.kv_lora_rank,
        "q_up": heads * (nope + rope),
        "kv_down": (args.kv_lora_rank or 0) + rope,
        "kv_up": heads * nope + value,
        "fc1": doubled * (args.ffn_hidden_size or 0),
        "ffn": args.ffn_hidden_size,
        "experts": args.num_experts,
        "expert_fc1": doubled * (args.moe_ffn_hidden_size or 0),
        "expert_ffn": args.moe_ffn_hidden_size,
        "shared_fc1": doubled * (args.moe_shared_expert_size or 0),
        "shared_ffn": args.moe_shared_expert_size,
        "latent": latent,
        "expert_H": latent or hidden,
        **dict.fromkeys(("mamba_heads", "skip"), mamba_heads),
        "inner": mamba_heads * (args.mamba_head_dim or 0),
        "mamba_kernel": 4,  # ssm/mamba_mixer.py, core_v0.16.1
        "states": (args.mamba_num_groups or 0) * (args.mamba_state_dim or 0),
        **dict.fromkeys(("delta_heads", "decay", "time_step"), delta_heads),
        "value_head": args.linear_value_head_dim,
        "value": delta_heads * (args.linear_value_head_dim or 0),
        "key": (args.linear_num_key_heads or 0) * (args.linear_key_head_dim or 0),
        "delta_kernel": args.linear_conv_kernel_dim,
    }
    return {name: size or 0 for name, size in sizes.items()}


def _block_sizes(args: ModelArgs) -> dict[str, dict[str, int]]:
    """The same for each layer, by the prefix of its names, where the layers have different sizes."""
    if (text := args.extras.get(ENCODED)) is None:
        return {}
    blocks = read_blocks(text, args.num_attention_heads or 0, args.hidden_size or 0)
    return {
        f"decoder.layers.{number}.": _sizes(
            replace(args, num_query_groups=block.query_groups, ffn_hidden_size=block.ffn_hidden_size)
        )
        for number, block in enumerate(blocks)
    }
