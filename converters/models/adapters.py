"""Adapters of Megatron as those of a Hugging Face model, for the `peft` library.

The rules of the architecture say which rows of a weight are whose; the rows of an adapter's B are the weight's, and all
modules that a fused weight becomes share its A:

    linear_qkv (rows, columns)   | q0 | q1 | k0 | v0 | ...     ->  q_proj.lora_B  rows q0 q1 ..   q_proj.lora_A = A
    linear_out (rows, rank)      | q0 | q1 | k0 | v0 | ...         k_proj.lora_B  rows k0 ..      k_proj.lora_A = A
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.errors import RequestError
from converters.megatron.adapters import is_adapter
from converters.models.export import HfMapping, applied_rules
from converters.models.rules import Emit, MissingTensor
from converters.names import fold, listed_lines
from converters.planning.plan import Copy, Drop, Op, Target, pieces_of, prove
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.megatron.adapters import Adapters
    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model

_PREFIX = "base_model.model."
# peft 0.21 (utils/transformers_weight_conversion.py) takes these in a model with experts for those of the experts, which
# transformers 5 stacks, also where they are named in full: the adapter of a dense layer or a shared expert would get lost
_EXPERTS_OWN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def map_adapters(
    catalog: Catalog, args: ModelArgs, model: Model, adapters: Adapters, *, dtype: DType | None = None
) -> HfMapping:
    """Maps adapters; the model's own weights, if they are there, are left out by name.

    Args:
        catalog: The checkpoint.
        args: Facts of its model.
        model: The architecture of the model that the adapters are for.
        adapters: What `facts.adapters.read_adapters` says of the checkpoint.
        dtype: Type for the adapters; None leaves each as stored.

    Returns:
        The tensors of `adapter_model.safetensors`; `config` is adapter_config.json.

    Raises:
        RequestError: The architecture cannot express the model, or has no module for an adapter.
    """
    model.requires(args)
    weights = {
        name: replace(pair.rows, name=name, shape=pair.shape, parts=()) for name, pair in adapters.factors.items()
    }
    modules = _modules(args, model, weights)
    targets: dict[str, Target] = {}
    copies: list[Copy] = []
    for module, pieces in modules.items():
        factors = adapters.factors[pieces[0].source]
        for info, letter in ((factors.columns, "A"), (factors.rows, "B")):
            rows = factors.rank if letter == "A" else sum(_rows(copy)[2] for copy in pieces)
            name = f"{_PREFIX}{module}.lora_{letter}.weight"
            targets[name] = Target(name, dtype or info.dtype, (rows, info.shape[1]))
            for at, to, n in [(0, 0, rows)] if letter == "A" else map(_rows, pieces):
                width = info.shape[1]
                copies.append(Copy(info.name, Box((at, 0), (n, width)), name, Box((to, 0), (n, width))))
    drops = [
        Drop(name, None, "belongs to the model that the adapters are for")
        for name in catalog.weights
        if not is_adapter(name)
    ]
    notes = []
    if adapters.dropout and adapters.dropout_behind:
        notes.append("the job's dropout came behind the adapters, peft's comes before them: only training differs")
    return HfMapping(targets, copies, drops, _config(catalog, args, adapters, modules), {}, notes)


def _modules(args: ModelArgs, model: Model, weights: Mapping[str, TensorInfo]) -> dict[str, list[Copy]]:
    """Which rows of which weight each module of the Hugging Face model consists of.

    Raises:
        RequestError: A weight becomes no module of its own, or not all of it does.
    """
    out = Emit(args, weights, 0)
    for rule, source, target in applied_rules(args, model):
        with suppress(MissingTensor):
            rule.emit(out, source, target)
    shapes = {name: info.shape for name, info in weights.items()}
    prove(pieces_of(out.targets, out.copies).values(), shapes, out.drops)
    modules: dict[str, list[Copy]] = defaultdict(list)
    for copy in out.copies:
        modules[copy.target].append(copy)
    experts = any(args.moe_layers or ())
    odd = [
        name
        for name, copies in modules.items()
        if not name.endswith(".weight")
        or out.targets[name].matrix is not None
        or (experts and name.split(".")[-2] in _EXPERTS_OWN)
        or len({copy.source for copy in copies}) > 1
        or any(_columns(copy) != (0, weights[copy.source].shape[1]) for copy in copies)
        or any(copy.op not in (Op.COPY, Op.TRANSPOSE) for copy in copies)
    ]
    if odd:
        raise RequestError(
            f"peft cannot express adapters of {counted(len(odd), 'weight')} of {model.architecture}",
            details=listed_lines([text for text, _ in fold(odd)], 8),
            hint="--merge-adapter merges them into the model's weights",
        )
    return {name.removesuffix(".weight"): copies for name, copies in modules.items()}


def _rows(copy: Copy) -> tuple[int, int, int]:
    """First row at the source and at the target, and how many; a Conv1D of transformers has its rows as columns."""
    axis = 1 if copy.op is Op.TRANSPOSE else 0
    return copy.source_box.start[0], copy.target_box.start[axis], copy.source_box.shape[0]


def _columns(copy: Copy) -> tuple[int, int]:
    return copy.source_box.start[1], copy.source_box.shape[1]


def _config(
    catalog: Catalog, args: ModelArgs, adapters: Adapters, modules: Mapping[str, Sequence[Copy]]
) -> dict[str, Any]:
    """adapter_config.json, as `peft.LoraConfig` reads it (peft 0.21, tuners/lora/config.py)."""
    alpha = adapters.alpha
    ranks = {module: adapters.factors[copies[0].source].rank for module, copies in modules.items()}
    base = catalog.config.get("hf_model_id")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if isinstance(base, str) and base else None,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": _targets(args, list(modules)),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != adapters.rank},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": any(copy.op is Op.TRANSPOSE for copies in modules.values() for copy in copies),
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _targets(args: ModelArgs, modules: Sequence[str]) -> list[str]:
    """The modules as peft looks for them: by their last name if every layer has just one of it, else in full."""
    layers = args.num_layers or 0
    leaves: dict[str, int] = defaultdict(int)
    for module in modules:
        leaves[module.rpartition(".")[2]] += 1
    if any(args.moe_layers or ()) or any(count != layers for count in leaves.values()):
        return list(modules)
    return sorted(leaves)
