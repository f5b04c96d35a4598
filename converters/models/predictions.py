"""Multi-token prediction layers: which a folder holds, which a table has places for.

    model.layers.61.enorm.weight  model.layers.61.self_attn.*          behind the others        DeepSeek-V3, GLM-4.5
    mtp.fc.weight  mtp.norm.weight  mtp.layers.0.self_attn.*           by themselves            Qwen3-Next, Qwen3.5
    mtp.layers.0.eh_proj.weight  mtp.layers.1.final_layernorm.weight   depth by depth           Nemotron-H
    model.mtp_layers.0.input_proj.weight  ..0.self_attn.*              by themselves            MiMo

No key of Qwen's config.json says that there is one, so its tensors do.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model


def can_hold_predictions(model: Model, args: ModelArgs) -> bool:
    """Whether the architecture has names for the prediction layers of a model."""
    # gpt_builders.py, core_v0.19.0: Megatron's are like the last decoder layer, Qwen's have attention in any case
    linear = bool(args.linear_layers) and args.linear_layers is not None and args.linear_layers[-1]
    numbered = model.predictions is None or "{}" in model.predictions[0]
    if model.hybrid and (not args.prediction_pattern or {*args.prediction_pattern} - model.hybrid.keys()):
        return False
    return bool(model.mtp) and not linear and (numbered or args.mtp_num_layers == 1)


def without_predictions(args: ModelArgs) -> ModelArgs:
    """The facts of a model whose prediction layers are left out."""
    return replace(args, mtp_num_layers=None, prediction_pattern=None)


def with_predictions(model: Model, args: ModelArgs, names: Collection[str]) -> ModelArgs:
    """The facts of a model with the prediction layers that a folder holds, if its config.json does not speak of them.

    Args:
        names: The tensors of the folder.
    """
    if model.predictions is None or args.mtp_num_layers is not None:
        return args
    layer = _numbered(model.predictions[1])
    return replace(args, mtp_num_layers=len({match[1] for name in names if (match := layer.match(name))}) or None)


def _numbered(prefix: str) -> re.Pattern[str]:
    """Matches what a prefix such as `model.layers.{}.` stands for; its group is the number."""
    before, behind = map(re.escape, prefix.split("{}"))
    return re.compile(rf"{before}(\d{{1,5}}){behind}")


def prediction_tensors(model: Model, args: ModelArgs, names: Collection[str]) -> list[str]:
    """The tensors of prediction layers among those of a folder."""
    if model.predictions is not None:
        return [name for name in names if name.startswith(model.predictions[0].partition("{}")[0])]
    layer = _numbered(model.layers)
    count, depths = args.num_layers or 0, args.mtp_num_layers or 0
    numbered = ((name, layer.match(name)) for name in names)
    return [name for name, match in numbered if match and count <= int(match[1]) < count + depths]


def keeps_predictions(args: ModelArgs, model: Model, mtp: str) -> bool:
    """Whether prediction layers are carried, as asked for with `--mtp`: "keep", "drop" or "auto".

    Raises:
        RequestError: They are to be kept, and there are none or no place for them.
    """
    if mtp not in ("keep", "drop", "auto"):
        raise RequestError(f"unknown choice {mtp!r} for multi-token prediction", hint="keep, drop or auto")
    if mtp == "keep" and not args.mtp_num_layers:
        raise RequestError("the model has no multi-token prediction layers to keep", hint="leave out --mtp")
    if mtp == "keep" and not can_hold_predictions(model, args):
        raise RequestError(
            f"{model.architecture} cannot hold multi-token prediction layers", hint="leave them out: --mtp drop"
        )
    return mtp != "drop" and bool(args.mtp_num_layers) and can_hold_predictions(model, args)
