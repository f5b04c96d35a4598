"""Whether a config.json describes a model as Megatron has it: of a folder that is imported, or beside an export.

That an import overlooks no key is proved, not assumed: the architecture's own table writes a config.json for the facts
that were read, and every key of the two must agree, unless it is listed here as one that does not change what the model
computes.

    config.json  --completed-->  all keys  --stated-->  ModelArgs  --Model.settings, completed-->  all keys
                                    '----------------------- compared by `find_departures` ------------'
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from converters.models import of_config
from converters.models.config import (
    ACTIVATION_SPELLINGS,
    KEYS,
    STATED,
    rope_parameters,
    without_idle_options,
)
from converters.names import printable
from converters.transformers_config import class_keys, completed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.megatron.model_args import ModelArgs
    from converters.models.export import HfMapping
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

# names of one fact in the config.json of different architectures
_ALONE = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "sliding_window", "layer_types"),
    *("use_parallel_residual", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "mlp_only_layers"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
)
_NAMES_OF_FACTS = (
    *(names for field, names in KEYS.items() if field not in ("max_position_embeddings", "mtp_num_layers")),
    ("hidden_act", "activation_function"),
    STATED["norm_epsilon"],
    *((name,) for name in _ALONE),
)


def find_departures(model: Model, args: ModelArgs, config: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration that a model with these facts contradicts, as sentences; empty if there are none.

    Args:
        args: What `stated` made of it.
        config: The whole configuration.
    """
    written = model.config(args, vocab_size=args.vocab_size or 0, dtype="float32")
    config, ours = without_idle_options(config), completed(model.name, written)
    skipped = {*NEUTRAL, *_ROPE, *_PATTERN, *_ROUNDING}
    if config.get("use_sliding_window") is False:
        skipped |= set(_WINDOW)
    out = []
    groups, experts, chosen = args.moe_num_groups or 1, args.num_experts or 0, args.moe_topk or 0
    if experts and (chosen > experts or experts % groups or (groups > 1 and experts // groups < 2)):
        out.append(f"{experts} experts in {groups} groups, {chosen} chosen for each token: no router can do that")
    compared = ({*class_keys(model.name), *written} - skipped) & config.keys() & ours.keys()
    differing = [(key, config[key], ours[key]) for key in sorted(compared) if not _same(key, config[key], ours[key])]
    differing += _masks_and_positions(config, written, complete=True)
    return out + [
        f"{key} is {printable(repr(stated))[:80]}; Megatron-LM has only {printable(repr(written_value))[:80]}"
        for key, stated, written_value in differing
    ]


def find_contradictions(config: Mapping[str, Any], mapping: HfMapping) -> list[str]:
    """Where a config.json that a person supplies does not describe the exported model; empty if it does.

    Only what it states is compared: transformers leaves out what equals a default.

    Args:
        config: Its content.
        mapping: The export.
    """
    config, differing = without_idle_options(config), []
    if (kind := config.get("model_type")) is not None and of_config(config) is not of_config(mapping.config):
        differing.append(("model_type", kind, mapping.config["model_type"]))
    for names in _NAMES_OF_FACTS:
        exported_key, stated = _lookup(mapping.config, names), _lookup(config, names)
        if names[0] == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if exported_key is not None and stated is not None and not _same(names[0], stated[1], exported_key[1]):
            differing.append((*stated, exported_key[1]))
    differing += _masks_and_positions(config, mapping.config, complete=False)
    return [
        f"config.json says {key} {stated!s:.200}, but the checkpoint gives {exported!s:.200}"
        for key, stated, exported in differing
    ]


def _lookup(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any] | None:
    for name in names:
        if name in config and (config[name] is not None or name == "sliding_window"):
            return name, config[name]
    return None


def _masks_and_positions(
    config: Mapping[str, Any], written: Mapping[str, Any], *, complete: bool
) -> Iterator[tuple[str, Any, Any]]:
    """What is no key of a class, or a section of it: name, what a configuration says, what Megatron's model has.

    Args:
        complete: What the configuration does not say counts, too.
    """
    if config.get("is_causal") is False:  # of no class, but read by transformers' masks for all of them
        yield "is_causal", False, True
    stated_sections, of_class = _rotary_sections(config), set()
    if not complete and rope_parameters(config)["partial_rotary_factor"] is None:
        of_class = {"partial_rotary_factor"}  # whose default is the class's
    sections = _rotary_sections(written)
    if not any("rope_theta" in section for section in sections.values()):
        return  # no positions are rotated
    for kind, section in sections.items():
        stated = stated_sections.get(kind, {})
        if not complete and not ("rope_theta" in stated and "rope_theta" in section):
            continue
        for key in sorted({*stated, *section} - of_class):
            if not _same(key, stated.get(key), section.get(key)):
                yield f"{kind}{key}", stated.get(key), section.get(key)


def _rotary_sections(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of the rotary embedding that matter; of each kind of layers, if they have different ones."""
    parameters = rope_parameters(config)
    sections = {f"{kind}.": _effective(section) for kind, section in parameters.items() if isinstance(section, dict)}
    plain = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
    return {"": _effective(plain), **sections}


def _same(key: str, stated: Any, written: Any) -> bool:
    if stated is None and key in _DERIVED:
        return True
    if key in _GROUPS:
        stated, written = stated or 1, written or 1
    if isinstance(stated, bool) is not isinstance(written, bool):
        return bool(stated) is bool(written) and stated in (None, False, 0) and written in (None, False, 0)
    if isinstance(stated, str) and isinstance(written, str):
        return ACTIVATION_SPELLINGS.get(stated, stated) == ACTIVATION_SPELLINGS.get(written, written)
    if isinstance(stated, float) and isinstance(written, int | float):
        return math.isclose(stated, written, rel_tol=1e-12)
    return bool(stated == written)


def _effective(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What of the rotary embedding's parameters changes what is computed, with what absence stands for."""
    out = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    if out.get("partial_rotary_factor") == 1:
        del out["partial_rotary_factor"]
    if out.get("rope_type") == "default":
        return {key: out[key] for key in ("rope_theta", "rope_type", "partial_rotary_factor") if key in out}
    if out.get("rope_type") == "yarn" and isinstance(out.get("factor"), int | float) and out["factor"] >= 1:
        mscale, all_dim = out.pop("mscale", None), out.get("mscale_all_dim") or 0.0
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "mscale_all_dim": 0.0}
        out = defaults | out
        if out.get("attention_factor") is None:
            stated = mscale and all_dim and isinstance(mscale, int | float) and isinstance(all_dim, int | float)
            scale = _mscale(out["factor"], mscale) / _mscale(out["factor"], all_dim) if stated else None
            out["attention_factor"] = _mscale(out["factor"], 1.0) if scale is None else scale
    return out


def _mscale(factor: float, mscale: float) -> float:
    """How YaRN scales attention (modeling_rope_utils.py, get_mscale; yarn_rotary_pos_embedding.py)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
