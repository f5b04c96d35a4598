"""How optimizer state is laid out in a Megatron checkpoint, and what resharding each layout permits.

Facts: Megatron-Core, optimizer/distrib_optimizer.py (`sharding_type`) and Megatron-LM, training/checkpointing.py, tags
core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.catalog import Catalog

__all__ = ["OptimizerLayout", "optimizer_layout"]


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """What the optimizer state looks like.

    Attributes:
        name: Megatron's name of the layout, "Adam, not distributed", "none", or "unknown".
        reason: What says so.
        permits: What can be changed on resume, and by whom.
        states: Names of the stored states: exp_avg, exp_avg_sq, fp32_param.
        caution: Something that may be wrong with such files; None if nothing is known.
    """

    name: str
    reason: str
    permits: str
    states: tuple[str, ...] = ()
    caution: str | None = None


_PERMITS = {
    "none": "weights load at any layout; the optimizer starts anew",
    "Adam, not distributed": "Megatron reshards it to any tp, pp, ep",
    "fully_reshardable": "Megatron-Core 0.15 or later reshards it to any tp, pp, ep, dp",
    "fully_sharded_model_space": "Megatron-Core 0.8 to 0.15 reshards it to any tp, pp, ep, dp; later ones cannot read it",
    "dp_reshardable": "Megatron changes only dp, with the same buckets; not tp, pp or ep (distckpt reshard does)",
    "fully_sharded_bucket_space": "Megatron-Core 0.6 to 0.14 changes only dp, later ones nothing (distckpt reshard does)",
    "dp_zero_gather_scatter": "Megatron changes only dp; not tp, pp or ep (distckpt reshard does)",
    "distrib_optim.pt": "Megatron-LM changes only dp; not tp, pp or ep (distckpt reshard does)",
    "fsdp_dtensor": "Megatron-FSDP changes the number of ranks",
    "FSDP2": "Megatron-LM loads it with any number of ranks, with --use-torch-fsdp2",
    "by parameter": "torch loads it with any number of ranks",
    "unknown": "not known",
}
_SHIFTED = (
    "saved with overlap_grad_reduce: Megatron-Core 0.15.0 to 0.19.0 may have stored the optimizer state of all but the "
    "first bucket shifted by its padding"
)


def optimizer_layout(catalog: Catalog) -> OptimizerLayout:
    """Which of Megatron's layouts the optimizer state has."""
    names = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    groups = [o.name for o in catalog.objects.values() if ".distributed.dp_group_idx_" in o.name]
    if not names and not groups:
        return OptimizerLayout("none", "no optimizer state is stored", _PERMITS["none"])
    states = sorted({_state(t.name) for t in names} - {""})
    if catalog.format == "legacy":
        return _legacy(catalog, tuple(states))
    if catalog.format == "megatron_dcp":
        return OptimizerLayout("FSDP2", "DTensors of torch's FSDP2", _PERMITS["FSDP2"], tuple(states))
    if catalog.weights and not catalog.megatron:
        reason = "a tensor for each state of a parameter"
        return OptimizerLayout("by parameter", reason, _PERMITS["by parameter"], tuple(states))
    found, reason = _stated(catalog) or _guessed(catalog)
    caution = None
    if found == "fully_reshardable" and catalog.args.get("overlap_grad_reduce") is True:
        caution = _SHIFTED
    return OptimizerLayout(found, reason, _PERMITS.get(found, _PERMITS["unknown"]), tuple(states), caution)


def _legacy(catalog: Catalog, states: tuple[str, ...]) -> OptimizerLayout:
    """Of a folder for each rank: the distributed optimizer has files of its own."""
    flat = any(file.name.endswith("/distrib_optim.pt") for file in catalog.files)
    name = "distrib_optim.pt" if flat else "Adam, not distributed"
    reason = "flat buffers in files of their own" if flat else "optimizer state in model_optim_rng.pt"
    permits = _PERMITS[name] if flat else "Megatron-LM loads it only at the same tp, pp, ep"
    return OptimizerLayout(name, reason, permits, states)


def _state(name: str) -> str:
    if name.startswith("optimizer.state."):
        return name.split(".")[2]
    return name.rpartition(".")[2] if ".bucket_idx_" in name else ""


def _stated(catalog: Catalog) -> tuple[str, str] | None:
    stated = catalog.content.get("distrib_optim_sharding_type")
    if isinstance(stated, str):
        return stated, "content_metadata"
    stated = _sharding_type(catalog.common)
    return (stated, "optimizer.param_state_sharding_type in the common state") if stated else None


def _sharding_type(common: Any) -> str | None:
    optimizer = common.get("optimizer") if isinstance(common, Mapping) else None
    if not isinstance(optimizer, Mapping):
        return None
    for group in (optimizer, *optimizer.values()):  # a mixture of experts has one per chained optimizer, under 0, 1, ..
        stated = group.get("param_state_sharding_type") if isinstance(group, Mapping) else None
        if isinstance(stated, str):
            return stated
    return None


def _guessed(catalog: Catalog) -> tuple[str, str]:
    tensors = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    if any(part.block is not None for t in tensors for part in t.parts):
        return "fully_sharded_model_space", "flattened optimizer tensors"
    if any(t.opaque for t in tensors):
        plans = catalog.producer is not None and catalog.producer[0].startswith("Megatron-Core 0.6")
        return ("fully_sharded_bucket_space" if plans else "dp_reshardable"), "flat optimizer buckets"
    if any(o.name.endswith(".param_state") for o in catalog.objects.values()):
        return "dp_zero_gather_scatter", "param_state objects"
    if any(t.name.startswith("optimizer.state.param.") for t in tensors):
        return "fully_reshardable", "keys optimizer.state.param.*"
    if any(t.name.startswith("optimizer.state.module.") for t in tensors):
        return "fsdp_dtensor", "keys optimizer.state.module.*"
    if any(t.name.startswith(("optimizer.state.fp32_param.", "optimizer.state.exp_avg.")) for t in tensors):
        return "Adam, not distributed", "optimizer tensors have the shapes of the weights, no sharding type is stated"
    return "unknown", "no key says"
