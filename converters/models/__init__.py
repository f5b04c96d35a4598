"""Hugging Face architectures: one table each, and how a checkpoint's is found.

To add one, write its table and name it here. The order matters only where two tables fit the same model: the first is
taken, the other can be asked for by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.model_kind import refuse_kind
from converters.models import (
    arcee,
    bailing_moe_v2,
    bamba,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoe,
    granitemoeshared,
    llama,
    mimo,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    nemotron_nas,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
)
from converters.models.model import not_stated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import Catalog
    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model

_TABLES = (
    *(llama, mistral, qwen2, mimo, qwen3, qwen2_moe, qwen3_moe, mixtral, granitemoeshared, deepseek_v2),
    *(deepseek_v3, gpt2, gpt_neox, starcoder2, nemotron, phi3, seed_oss, smollm3, ministral, glm, glm4_moe),
    *(
        glm4_moe_lite,
        dots1,
        bailing_moe_v2,
        ernie4_5,
        arcee,
        granite,
        granitemoe,
        qwen3_next,
        qwen3_5_text,
        qwen3_5_moe_text,
        nemotron_h,
    ),
    *(bamba, gpt_oss, gemma, gemma2, gemma3_text, olmoe, minimax_m2, exaone4, falcon_h1, nemotron_nas),
)
ARCHITECTURES: tuple[Model, ...] = tuple(table.MODEL for table in _TABLES)


def of_config(config: Mapping[str, Any]) -> Model | None:
    """The architecture that a config.json describes; None if it is not known."""
    kind = config.get("model_type")
    if kind == "mistral" and "layer_types" in config:
        kind = "ministral"  # as transformers' AutoConfig does
    if kind == "bailing_moe" and config.get("architectures") == ["BailingMoeV2ForCausalLM"]:
        kind = "bailing_moe_v2"  # Ling 2.0's files may say the type of the first generation, whose class is another
    return next((model for model in ARCHITECTURES if kind in (model.name, *model.aliases)), None)


def by_name(name: str) -> Model:
    """The architecture called `qwen3_moe` or `Qwen3MoeForCausalLM`.

    Raises:
        RequestError: None is; the known ones are listed.
    """
    for model in ARCHITECTURES:
        if name.lower().replace("-", "_") in (model.name, model.architecture.lower(), *model.aliases):
            return model
    raise RequestError(f"unknown architecture {name!r}", hint=f"--arch takes one of {', '.join(_names())}")


def infer(args: ModelArgs, catalog: Catalog) -> Model:
    """The architecture that computes what a checkpoint's model computes.

    Raises:
        RequestError: The model is not a decoder that is known here, or too little of it is known.
    """
    if not any(name.startswith("decoder.layers.") for name in catalog.language):
        refuse_kind(catalog)
        raise RequestError(
            "the checkpoint holds no decoder layers, so no known architecture fits",
            details=[f"for example {name}" for name in list(catalog.weights)[:2]],
        )
    reasons = {model.name: model.unexpressible(args) for model in ARCHITECTURES}
    for model in ARCHITECTURES:
        if not reasons[model.name]:
            return model
    close = sorted(ARCHITECTURES, key=lambda model: (len(reasons[model.name]), -ARCHITECTURES.index(model)))[:3]
    raise RequestError(
        "no known architecture computes what this model computes",
        details=[f"not {model.name}: {'; '.join(reasons[model.name][:4])}" for model in close],
        hint=not_stated(reasons[close[0].name]) or f"known: {', '.join(_names())}",
    )


def _names() -> list[str]:
    return [model.name for model in ARCHITECTURES]
