"""Param groups of legacy checkpoints, and the inferred group of each parameter, which no file stores.

Megatron makes groups from every parameter's name and shape: biases and vectors are not decayed, and with a learning rate of
their own the embedding and the output layer stand apart.

Source: Megatron-Core, optimizer/__init__.py (`_get_param_groups`, `get_standard_config_overrides`), core_v0.4.0 to
core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.formats.common_state import Archive
from converters.megatron.buffers import Misfit
from converters.megatron.optimizer_parts import is_undecayed, torch_state
from converters.optimizer.read_groups import read_step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from converters.formats.containers.archive import PtFile
    from converters.pickles.nodes import Node
    from converters.torchzip.tensor_refs import TensorRef

_OUTER = ("embedding.word_embeddings.weight", "output_layer.weight")


def group_members(
    groups: Sequence[Any], parameters: Sequence[tuple[str, tuple[int, ...]]], args: Mapping[str, Any], label: str
) -> list[list[int]]:
    """Positions of the parameters of each group, in order.

    Args:
        parameters: Name in the model and shape of each.

    Raises:
        Misfit: Megatron does not make such groups of these parameters.
    """
    apart_lr = args.get("decoupled_lr")
    keys = []
    for group in groups:
        if not isinstance(group, Mapping):
            raise Misfit(f"{label}: a param group is not a dictionary")
        apart = group.get("is_decoupled_lr") is True or (apart_lr is not None and group.get("max_lr") == apart_lr)
        keys.append((group.get("wd_mult", group.get("pre_wd_mult", 1.0)) == 0.0, apart))
    if len(set(keys)) != len(keys):
        raise Misfit(f"{label}: {len(keys)} param groups with equal decay; which parameter is in which is not stored")
    any_apart = any(apart for _, apart in keys)
    members: list[list[int]] = [[] for _ in keys]
    for number, (name, shape) in enumerate(parameters):
        key = (is_undecayed(name, shape, args), any_apart and name in _OUTER)
        if key not in keys:
            raise Misfit(f"{label}: no param group is for {name}", tensor=name)
        members[keys.index(key)].append(number)
    return members


def common_optimizer(entry: Mapping[Any, Node], file: PtFile, folder: Path) -> dict[str, Node]:
    """What the common state of a torch_dist checkpoint would hold of one optimizer of a rank's file."""
    state = torch_state(entry)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in state.get("param_groups") or ()
        if isinstance(group, Mapping)
    ]
    states = state.get("state")
    items = states.values() if isinstance(states, Mapping) else ()
    steps = [item["step"] for item in items if isinstance(item, Mapping) and "step" in item]
    out: dict[str, Node] = {"optimizer": {"param_groups": groups}}

    def elements(ref: TensorRef) -> bytes:
        storage = f"data/{ref.storage}"
        return Archive(None, {storage: file.contents(folder, storage)}, file.name).elements(ref)

    if steps:  # torch's own Adam counts steps parameter by parameter; torch_dist keeps one for all of them
        step = read_step(steps[0], elements)
        out["optimizer"]["state"] = {"common_step": step}
        for group in groups:
            group.setdefault("step", step)
    if entry.get("grad_scaler") is not None:
        out["grad_scaler"] = entry["grad_scaler"]
    return out
