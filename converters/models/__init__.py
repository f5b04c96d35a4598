"""Hugging Face architectures: one table each, and how a checkpoint's is found.

To add one, write its table and name it here. The order matters only where two tables fit the same model: the first is
taken, the other can be asked for by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.models import (
    deepseek_v2,
    deepseek_v3,
    gpt2,
    gpt_neox,
    granitemoeshared,
    llama,
    mistral,
    mixtral,
    nemotron,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    starcoder2,
)
from converters.models.export import HfMapping, check_hf_config, map_to_hf
from converters.models.model import Model, not_stated

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.facts.model_args import ModelArgs

__all__ = ["KNOWN", "HfMapping", "Model", "by_name", "check_hf_config", "infer", "map_to_hf"]

_TABLES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen2_moe,
    qwen3_moe,
    mixtral,
    granitemoeshared,
    deepseek_v2,
    deepseek_v3,
    gpt2,
    gpt_neox,
    starcoder2,
    nemotron,
)
KNOWN: tuple[Model, ...] = tuple(table.MODEL for table in _TABLES)


def by_name(name: str) -> Model:
    """The architecture called `qwen3_moe` or `Qwen3MoeForCausalLM`.

    Raises:
        RequestError: None is; the known ones are listed.
    """
    for model in KNOWN:
        if name.lower().replace("-", "_") in (model.name, model.architecture.lower()):
            return model
    raise RequestError(f"unknown architecture {name!r}", hint=f"--arch takes one of {', '.join(_names())}")


def infer(args: ModelArgs, catalog: Catalog) -> Model:
    """The architecture that computes what a checkpoint's model computes.

    Raises:
        RequestError: The model is not a decoder that is known here, or too little of it is known.
    """
    if not any(name.startswith("decoder.layers.") for name in catalog.weights):
        raise RequestError(
            "the checkpoint holds no decoder layers, so no known architecture fits",
            details=[f"for example {name}" for name in list(catalog.weights)[:2]],
        )
    reasons = {model.name: model.unexpressible(args) for model in KNOWN}
    for model in KNOWN:
        if not reasons[model.name]:
            return model
    close = sorted(KNOWN, key=lambda model: (len(reasons[model.name]), -KNOWN.index(model)))[:3]
    raise RequestError(
        "no known architecture computes what this model computes",
        details=[f"not {model.name}: {'; '.join(reasons[model.name][:4])}" for model in close],
        hint=not_stated(reasons[close[0].name]) or f"known: {', '.join(_names())}",
    )


def _names() -> list[str]:
    return [model.name for model in KNOWN]
