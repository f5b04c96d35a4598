"""Everything that a config.json says of its model, and the keys of it that Megatron's model would contradict.

The facts are read with one list of names for all architectures. That none was overlooked is proved, not assumed: the
architecture's own table writes a config.json for these facts, and every key of the two must agree, unless it is listed
here as one that does not change what the model computes.

    config.json  --completed-->  all keys  --stated-->  ModelArgs  --Model.settings, completed-->  all keys
                                    '----------------------- compared by `find_departures` ------------'
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.model_args import ModelArgs
from converters.models.config import STATED
from converters.models.described import described
from converters.models.model import SET, UNSET
from converters.names import printable
from converters.transformers_config import class_keys, completed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.models.model import Model

NEUTRAL = frozenset(
    {
        # of any configuration: names, types of files, what is returned beside the logits, generation
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "model_type"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "is_decoder"),
        # heads that classify, and what nothing reads in a language model
        *("id2label", "label2id", "problem_type", "classifier_dropout", "chunk_size_feed_forward", "pretraining_tp"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        # dropout is of training, and Megatron has one for what some architectures have two for
        *("embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout", "hidden_dropout"),
        "original_max_position_embeddings",  # what longrope needs
        *("no_rope_layer_interval", "sliding_window_pattern"),  # what a list replaced
        # of Mamba: how its kernel is called, and with what a new model begins; of its experts: what is done at once
        *("use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap"),
        *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "z_loss_coefficient"),
        *("expand", "mamba_expand", "mtp_layers_block_type"),  # the width is heads times head_dim
    }
)
"""Keys that do not change the logits; tests/models/test_import_config.py compares them with and without."""

# compared as a whole, or read by a rule into one fact
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
_PATTERN = ("decoder_sparse_step", "mlp_only_layers")
_WINDOW = ("sliding_window", "max_window_layers")
# what None stands for is what `described` took
_DERIVED = ("head_dim", "num_key_value_heads", "n_inner")
_ROUNDING = ("chunk_size", "mamba_chunk_size")  # how many steps a kernel takes at once
_GROUPS = ("n_group", "topk_group")
_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def stated(model: Model, config: Mapping[str, Any], *, biased: bool) -> ModelArgs:
    """All facts of a model.

    Args:
        model: The table of its architecture.
        config: The whole configuration, from `completed`.
        biased: Whether the projections have a bias, if it does not say.

    Raises:
        FormatError: A size is no size, or one that is needed is not stated.
        RequestError: It describes a variant that the table does not have.
    """
    shapes = described(model, config, biased=biased)
    values: dict[str, Any] = {
        name: allowed[0]
        for name, allowed in model.needs.items()
        if len(allowed) == 1 and allowed[0] is not SET and allowed[0] is not UNSET
    }
    values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # Megatron's own default is another
    values |= {name: value for name, names in STATED.items() if (value := _first(config, names)) is not None}
    activation = _first(config, ("hidden_act", "activation_function", "mlp_hidden_act"))
    values["activation"] = _ACTIVATIONS.get(activation, activation) if isinstance(activation, str) else None
    values["zero_centered_norm"] = model.zero_centered
    if UNSET in model.needs.get("window_size", ()) and len(model.needs["window_size"]) > 1:
        values["window_size"] = config.get("sliding_window")
    if len(model.needs.get("moe_pre_softmax", ())) > 1:
        values["moe_pre_softmax"] = not config.get("norm_topk_prob")
    if config.get("n_group") not in (None, 0, 1) and config.get("topk_method") != "greedy":
        values |= {"moe_num_groups": config["n_group"], "moe_group_topk": config.get("topk_group")}
    if values.get("position_embedding_type") in (None, "rope"):
        values |= _rope(config)
        yarn = values["rope_scaling"] == "yarn" and not shapes.mla
        values["position_embedding_type"] = "yarn" if yarn else "rope"
    values |= model.facts(config)
    field_names = {f.name for f in fields(ModelArgs)}
    extras = {name: value for name, value in values.items() if name not in field_names and value is not None}
    args = replace(shapes, extras=extras, **{name: value for name, value in values.items() if name in field_names})
    return args if model.moe or "E" in (args.layer_pattern or "") else _without_experts(args)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _without_experts(args: ModelArgs) -> ModelArgs:
    names = (f.name for f in fields(args) if f.name.startswith("moe_") or f.name == "num_experts")
    unused: dict[str, Any] = dict.fromkeys(names)
    return replace(args, **unused)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding, in the spelling of transformers 4 or 5."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(section) if isinstance(section, dict) else {}
    parameters.setdefault("rope_theta", _first(config, ("rope_theta", "rotary_emb_base")))
    parameters.setdefault("partial_rotary_factor", _first(config, ("partial_rotary_factor", "rotary_pct")))
    parameters.setdefault("rope_type", parameters.get("type") or "default")
    return parameters


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(config)
    kind = parameters["rope_type"]
    if kind not in _ROPE_TYPES:
        raise RequestError(
            f"config.json says rope_type {printable(repr(kind))[:80]}: Megatron-LM has no such embedding"
        )
    theta, partial = parameters["rope_theta"], parameters["partial_rotary_factor"]
    out: dict[str, Any] = {
        "rotary_base": float(theta) if isinstance(theta, int | float) else None,
        "rotary_percent": 1.0 if partial is None else float(partial),
        "rope_scaling": None if kind == "default" else kind,
    }
    if kind == "default":
        return out
    out["rope_factor"] = parameters.get("factor")
    if kind in ("llama3", "yarn"):
        out["rope_original_max_position_embeddings"] = parameters.get("original_max_position_embeddings")
    if kind == "llama3":
        return out | {f"rope_{name}": parameters.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        # transformers looks at mscale only where both are given (modeling_rope_utils.py, _compute_yarn_parameters)
        both = parameters.get("mscale") and parameters.get("mscale_all_dim")
        if parameters.get("truncate") is False:
            out["yarn_correction_range_round_to_int"] = False
        out |= {
            "rope_beta_fast": parameters.get("beta_fast") or 32.0,
            "rope_beta_slow": parameters.get("beta_slow") or 1.0,
            "rope_mscale": float(parameters["mscale"]) if both else 1.0,
            "rope_mscale_all_dim": float(parameters.get("mscale_all_dim") or 0.0),
        }
    return out


def find_departures(model: Model, args: ModelArgs, config: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration that a model with these facts contradicts, as sentences; empty if there are none.

    Args:
        args: What `stated` made of it.
        config: The whole configuration.
    """
    written = model.config(args, vocab_size=args.vocab_size or 0, dtype="float32")
    ours = completed(model.name, written)
    skipped = {*NEUTRAL, *_ROPE, *_PATTERN, *_ROUNDING}
    if config.get("use_sliding_window") is False:
        skipped |= set(_WINDOW)
    # of no class, but read by transformers' masks for all of them
    out = ["is_causal is False; Megatron-LM's masks are causal"] if config.get("is_causal") is False else []
    groups, experts, chosen = args.moe_num_groups or 1, args.num_experts or 0, args.moe_topk or 0
    if experts and (chosen > experts or experts % groups or (groups > 1 and experts // groups < 2)):
        out.append(f"{experts} experts in {groups} groups, {chosen} chosen for each token: no router can do that")
    for key in sorted({*class_keys(model.name), *written} - skipped):
        if key not in config or key not in ours:
            continue
        one, other = config[key], ours[key]
        if not _same(key, one, other):
            out.append(f"{key} is {printable(repr(one))[:80]}; Megatron-LM has only {printable(repr(other))[:80]}")
    if args.position_embedding_type not in ("learned_absolute", "none"):
        one, other = _effective(_parameters(config)), _effective(_parameters(ours))
        for key in sorted({*one, *other}):
            if not _same(key, one.get(key), other.get(key)):
                text = f"{printable(repr(one.get(key)))[:80]}; Megatron-LM has only {other.get(key)!r:.80}"
                out.append(f"{key} of rope_parameters is {text}")
    return out


def _same(key: str, one: Any, other: Any) -> bool:
    if one is None and key in _DERIVED:
        return True
    if key in _GROUPS:
        one, other = one or 1, other or 1
    if isinstance(one, bool) is not isinstance(other, bool):
        return bool(one) is bool(other) and one in (None, False, 0) and other in (None, False, 0)
    if isinstance(one, str) and isinstance(other, str):
        return _ACTIVATIONS.get(one, one) == _ACTIVATIONS.get(other, other)
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _effective(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What of the rotary embedding's parameters changes what is computed, with what absence stands for."""
    out = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    if out.get("partial_rotary_factor") == 1:
        del out["partial_rotary_factor"]
    if out.get("rope_type") == "default":
        return {key: out[key] for key in ("rope_theta", "rope_type", "partial_rotary_factor") if key in out}
    if out.get("rope_type") == "yarn" and isinstance(out.get("factor"), int | float) and out["factor"] >= 1:
        mscale, every = out.pop("mscale", None), out.get("mscale_all_dim") or 0.0
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale_all_dim": 0.0}
        out = defaults | out
        if out.get("attention_factor") is None:
            scale = _mscale(out["factor"], mscale) / _mscale(out["factor"], every) if mscale and every else None
            out["attention_factor"] = _mscale(out["factor"], 1.0) if scale is None else scale
    return out


def _mscale(factor: float, mscale: float) -> float:
    """How YaRN scales attention (modeling_rope_utils.py, get_mscale; yarn_rotary_pos_embedding.py)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
