"""How Megatron-LM's Namespace, Bridge and NeMo spell rotary embeddings and their scaling, and what each version heeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.layer_pattern import read_pattern
from converters.megatron.option_values import as_bool, as_float, as_int, first_stated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.option_values import Facts


def read_rope(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Takes how positions are rotated and scaled.

    Args:
        label: "args" of Megatron-LM, or "config" of Bridge and NeMo, which honour more options.
        options: Option -> value.
    """
    if options.get("use_rotary_position_embeddings") is True:  # Megatron-LM before 0.4
        facts.override("position_embedding_type", "rope", f"{label}.use_rotary_position_embeddings")
    if as_bool(options.get("multi_latent_attention")):
        _read_mla_rope(facts, label, options)
        return
    linear = as_float(options.get("seq_len_interpolation_factor", options.get("rotary_seq_len_interpolation_factor")))
    if not isinstance(options.get("rope_scaling"), bool | None):
        facts.extras.setdefault("rope_scaling", options["rope_scaling"])
    kind, numbers, source = None, {}, ""
    if options.get("position_embedding_type") == "yarn":
        kind, source, numbers = "yarn", "position_embedding_type", _yarn(options)
        if options.get("yarn_correction_range_round_to_int") is False:
            facts.extras["yarn_correction_range_round_to_int"] = False
    elif options.get("use_rope_scaling") is True or options.get("rope_scaling") is True:
        kind, source = "llama3", "use_rope_scaling" if "use_rope_scaling" in options else "rope_scaling"
        # rotary_pos_embedding.py fixes all but the factor
        numbers = {"rope_factor": options.get("rope_scaling_factor") or 8.0, **_LLAMA3}
        if label == "args" and numbers["rope_factor"] != 8:
            # GPTModel's default applies: no version of Megatron-LM's model builder (0.6 to 0.20) passes the argument on
            facts.notes.append(f"Megatron-LM ignores rope_scaling_factor {numbers['rope_factor']:g} and scales by 8")
            numbers["rope_factor"] = 8.0
    elif as_float(options.get("scale_factor")) and options.get("old_context_len"):  # NeMo 2 Llama31Config
        kind, source = "llama3", "scale_factor"
        numbers = {name: options.get(old) for name, old in _NEMO_LLAMA3.items()}
    if linear and linear != 1:
        if label == "args" and not _interpolates(options):
            facts.notes.append(f"Megatron-LM ignores rotary_seq_len_interpolation_factor {linear:g}")
        elif kind:
            facts.extras["seq_len_interpolation_factor"] = linear
        else:
            kind, source, numbers = "linear", "seq_len_interpolation_factor", {"rope_factor": linear}
    _put_rope(facts, kind, numbers, f"{label}.{source}")


def _interpolates(options: Mapping[str, Any]) -> bool:
    """Whether the job's Megatron-LM passes rotary_seq_len_interpolation_factor on to its model.

    Legacy models did (legacy/model/language_model.py); of Megatron-Core's, hybrids do from 0.18 on and all from 0.19 on
    (training/argument_utils.py, hybrid_config_from_args and gpt_config_from_args).
    """
    hybrid = read_pattern(options) is not None
    return (
        options.get("use_legacy_models") is True or ("null_tokenizer_eod_id" if hybrid else "yarn_beta_fast") in options
    )


def _read_mla_rope(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """MLA looks at rope_type alone, whose default is yarn (multi_latent_attention.py, core 0.10 to 0.20)."""
    numbers = _yarn(options)
    if (options.get("rope_type") or "yarn") == "yarn":
        if (as_float(numbers["rope_factor"]) or 1.0) > 1:  # with a factor of 1, yarn is the plain embedding
            _put_rope(facts, "yarn", numbers, f"{label}.rope_type")
    elif (as_float(numbers["rope_factor"]) or 1.0) > 1 and as_float(options.get("mscale_all_dim")):
        facts.extras["mscale_all_dim"] = options["mscale_all_dim"]  # scales the softmax without scaling the rotation


def _yarn(options: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's numbers; those that the command line cannot set are defaults of MLATransformerConfig."""
    numbers = {name: first_stated(options, (f"yarn_{old}", old)) for name, (old, _) in YARN.items()}
    return {name: YARN[name][1] if value is None else value for name, value in numbers.items()}


def _put_rope(facts: Facts, kind: str | None, numbers: Mapping[str, Any], source: str) -> None:
    facts.put("rope_scaling", kind, source)
    for name, value in numbers.items():
        facts.put(name, as_int(value) if name.endswith("embeddings") else as_float(value), source)


_LLAMA3 = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_position_embeddings": 8192}
_NEMO_LLAMA3 = {
    "rope_factor": "scale_factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position_embeddings": "old_context_len",
}
YARN: dict[str, tuple[str, Any]] = {
    "rope_factor": ("rotary_scaling_factor", 40.0),
    "rope_original_max_position_embeddings": ("original_max_position_embeddings", None),
    "rope_beta_fast": ("beta_fast", 32.0),
    "rope_beta_slow": ("beta_slow", 1.0),
    "rope_mscale": ("mscale", 1.0),
    "rope_mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Field -> option, default (core 0.14 transformer_config.py, MLATransformerConfig)."""
