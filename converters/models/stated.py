"""Everything that a config.json says of its model, read with one list of names for all architectures.

That no key is overlooked is proved by `find_departures` (config_check.py).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.model_args import ModelArgs
from converters.megatron.option_values import first_stated
from converters.models.config import ACTIVATION_SPELLINGS, STATED, rope_parameters, without_idle_options
from converters.models.described import described
from converters.models.model import UNSET
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.models.model import Model

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
    config = without_idle_options(config)
    shapes = described(model, config, biased=biased)
    values = model.fixed_facts
    values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # Megatron's own default is another
    values |= {name: value for name, names in STATED.items() if (value := first_stated(config, names)) is not None}
    activation = first_stated(config, ("hidden_act", "activation_function", "mlp_hidden_act"))
    values["activation"] = ACTIVATION_SPELLINGS.get(activation, activation) if isinstance(activation, str) else None
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


def _without_experts(args: ModelArgs) -> ModelArgs:
    names = (f.name for f in fields(args) if f.name.startswith("moe_") or f.name == "num_experts")
    unused: dict[str, Any] = dict.fromkeys(names)
    return replace(args, **unused)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = rope_parameters(config)
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
