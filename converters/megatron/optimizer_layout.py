"""How optimizer state is laid out in a Megatron checkpoint, and what resharding each layout permits.

Facts: Megatron-Core, optimizer/distrib_optimizer.py (`sharding_type`) and Megatron-LM, training/checkpointing.py, tags
core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.megatron.optimizer_parts import MASTERS, Recognised, has_flat_files, optimizer_parts, stated_sharding
from converters.names import MASTER, StateName, state_names

if TYPE_CHECKING:
    from converters.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Resharding:
    """What Megatron's loader changes of an optimizer layout.

    Attributes:
        sizes: The parallel sizes that may differ from those of the job that saved.
        since: First Megatron-Core that reads it, as (0, 15); None where no version is known not to.
        until: Last one; None likewise.
        condition: What else has to be so if one of the sizes differs, which no checkpoint tells; "" if nothing.
    """

    sizes: frozenset[str]
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None
    condition: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """What the optimizer state looks like.

    Attributes:
        name: The algorithm and how it is kept: "Adam, not distributed", "Muon + Adam, layer-wise"; Megatron's name of the
            layout where it is Adam alone in a distributed optimizer; "none", or "unknown".
        reason: What says so.
        permits: What can be changed on resume, and by whom.
        states: Names of the stored states: exp_avg, exp_avg_sq, fp32_param.
        caution: Something that may be wrong with such files; None if nothing is known.
        masters: What is special about the master weights of a precision-aware optimizer; "" if nothing is.
    """

    name: str
    reason: str
    permits: str
    states: tuple[str, ...] = ()
    caution: str | None = None
    masters: str = ""


_PERMITS = {
    "none": "weights load at any layout; the optimizer starts fresh",
    "not distributed": "Megatron reshards it to any tp, pp, ep",
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
_ALL = frozenset(("tp", "pp", "vpp", "cp", "ep", "etp", "dp"))
_DATA = frozenset(("dp",))
_RESHARDING = {
    "not distributed": Resharding(_ALL),
    "fully_reshardable": Resharding(_ALL, since=(0, 15)),
    "fully_sharded_model_space": Resharding(_ALL, (0, 8), (0, 15)),
    "dp_reshardable": Resharding(_DATA, condition="the job cuts the same buckets"),
    "fully_sharded_bucket_space": Resharding(_DATA, (0, 6), (0, 14)),
    "dp_zero_gather_scatter": Resharding(_DATA),
    "distrib_optim.pt": Resharding(_DATA, condition="the job cuts the same buckets"),
}
_SHIFTED = (
    "saved with overlap_grad_reduce: Megatron-Core 0.15.0 to 0.19.0 may have stored the optimizer state of all but the "
    "first bucket shifted by its padding"
)


def optimizer_layout(catalog: Catalog) -> OptimizerLayout:
    """Which of Megatron's layouts the optimizer state has."""
    layout = _stored_layout(catalog)
    return layout if layout.name == "none" else replace(layout, masters=_masters(catalog))


def optimizer_resharding(catalog: Catalog) -> Resharding | None:
    """What `OptimizerLayout.permits` says, for a program; None where it is not known, or there is no optimizer state."""
    parts = optimizer_parts(catalog)
    if not parts.parts or parts.unknown or parts.lost or parts.layer_wise or parts.mixed:
        return None
    if catalog.format == "legacy":
        return _RESHARDING["distrib_optim.pt"] if has_flat_files(catalog) else Resharding(_DATA)
    if catalog.format not in ("torch_dist", "zarr"):
        return None
    return _RESHARDING.get((stated_sharding(catalog) or _guessed(catalog))[0])


def _stored_layout(catalog: Catalog) -> OptimizerLayout:
    names = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    if not names and not any(item.of_optimizer for item in catalog.objects.values()):
        return OptimizerLayout("none", "no optimizer state is stored", _PERMITS["none"])
    states = sorted({_state(t.name) for t in names} - {""})
    if catalog.format == "legacy":
        return _legacy(catalog, tuple(states))
    if catalog.format == "megatron_dcp":
        return OptimizerLayout("FSDP2", "DTensors of torch's FSDP2", _PERMITS["FSDP2"], tuple(states))
    if catalog.weights and not catalog.megatron:
        reason = "a tensor for each state of a parameter"
        return OptimizerLayout("by parameter", reason, _PERMITS["by parameter"], tuple(states))
    parts = optimizer_parts(catalog)
    sharding, reason = stated_sharding(catalog) or _guessed(catalog)
    caution = None
    if sharding == "fully_reshardable" and catalog.job_options.get("overlap_grad_reduce") is True:
        caution = _SHIFTED
    name = _layout_name(parts, sharding)
    permits = _PERMITS.get(sharding, _PERMITS["unknown"])
    if parts.mixed and sharding == "dp_reshardable":
        permits = _PERMITS["dp_zero_gather_scatter"]
    if parts.unknown or parts.lost:
        permits, caution = "none of it is moved (--optimizer none)", str((*parts.unknown, *parts.lost)[0])
    return OptimizerLayout(name, reason, permits, tuple(states), caution)


def _masters(catalog: Catalog) -> str:
    """How a precision-aware optimizer stores its master weights; the element types and the arguments tell."""
    masters = [t for t in catalog.tensors.values() if t.kind == "optimizer" and _state(t.name) in {"param", *MASTERS}]
    narrow = any(t.dtype.name == "int16" for t in masters)
    if not catalog.megatron or not (narrow or catalog.args.get("use_precision_aware_optimizer") is True):
        return ""
    in_fp32 = "as fp32, or as remainders of the weights in fp32 (verify says which)"
    stored = "as remainders of the weights (int16)" if narrow else in_fp32
    parts = optimizer_parts(catalog)
    return f"precision-aware {parts if parts.parts else 'optimizer'}: master weights {stored}"


def _layout_name(parts: Recognised, layout: str) -> str:
    """What a person calls it."""
    if not parts.parts or (str(parts) == "Adam" and layout != "not distributed"):
        return layout
    return str(parts) if parts.layer_wise and not parts.mixed else f"{parts}, {layout}"


def _legacy(catalog: Catalog, states: tuple[str, ...]) -> OptimizerLayout:
    """Of a folder for each rank: the distributed optimizer has files of its own."""
    flat = has_flat_files(catalog)
    parts = optimizer_parts(catalog)
    layer_wise = any("/layer_wise_optimizer_" in file.name for file in catalog.files)
    if layer_wise:
        permits = "Megatron-LM loads it only at the same tp, pp, ep, dp"
        reason = "a file layer_wise_optimizer_N.pt for each data-parallel rank"
        name = str(parts) if parts.parts else "layer-wise"
        return OptimizerLayout(name, reason, permits, states)
    name = "distrib_optim.pt" if flat else _layout_name(parts, "not distributed")
    reason = "flat buffers in files of their own" if flat else "optimizer state in model_optim_rng.pt"
    permits = _PERMITS["distrib_optim.pt"] if flat else "Megatron-LM loads it only at the same tp, pp, ep"
    return OptimizerLayout(name, reason, permits, states)


def _state(name: str) -> str:
    if (parts := StateName.parse(name)) is not None:
        return parts.state
    return name.rpartition(".")[2] if ".bucket_idx_" in name else ""


def _guessed(catalog: Catalog) -> tuple[str, str]:
    tensors = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    if any(part.block is not None for t in tensors for part in t.parts):
        return "fully_sharded_model_space", "flattened optimizer tensors"
    if any(t.opaque for t in tensors):
        plans = catalog.producer is not None and catalog.producer[0].startswith("Megatron-Core 0.6")
        return ("fully_sharded_bucket_space" if plans else "dp_reshardable"), "flat optimizer buckets"
    if any(o.name.endswith(".param_state") for o in catalog.objects.values()):
        return "dp_zero_gather_scatter", "param_state objects"
    states = {parts.state for _, parts in state_names(t.name for t in tensors)}
    if MASTER in states:
        return "fully_reshardable", "keys optimizer.state.param.*"
    if "module" in states:
        return "fsdp_dtensor", "keys optimizer.state.module.*"
    if states:
        return "not distributed", "optimizer tensors have the shapes of the weights, no sharding type is stated"
    return "unknown", "no key says"
