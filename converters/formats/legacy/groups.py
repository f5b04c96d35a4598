"""Which param group of a Megatron optimizer a parameter belongs to: no file says it.

Megatron makes groups from every parameter's name and shape: biases and vectors are not decayed, and with a learning rate of
their own the embedding and the output layer stand apart.

Source: Megatron-Core, optimizer/__init__.py (`_get_param_groups`, `get_standard_config_overrides`), core_v0.4.0 to
core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.parallel.buffers import Misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["group_members"]

_OUTER = ("embedding.word_embeddings.weight", "output_layer.weight")


def group_members(
    groups: Sequence[Any], parameters: Sequence[tuple[str, tuple[int, ...]]], args: Mapping[str, Any], what: str
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
            raise Misfit(f"{what}: a param group is not a dictionary")
        apart = group.get("is_decoupled_lr") is True or (apart_lr is not None and group.get("max_lr") == apart_lr)
        keys.append((group.get("wd_mult", group.get("pre_wd_mult", 1.0)) == 0.0, apart))
    if len(set(keys)) != len(keys):
        raise Misfit(f"{what}: {len(keys)} param groups with equal decay; which parameter is in which is not stored")
    any_apart = any(apart for _, apart in keys)
    members: list[list[int]] = [[] for _ in keys]
    for number, (name, shape) in enumerate(parameters):
        key = (_undecayed(name, shape, args), any_apart and name in _OUTER)
        if key not in keys:
            raise Misfit(f"{what}: no param group is for {name}", tensor=name)
        members[keys.index(key)].append(number)
    return members


def _undecayed(name: str, shape: tuple[int, ...], args: Mapping[str, Any]) -> bool:
    if args.get("apply_wd_to_qk_layernorm") is True and ("q_layernorm." in name or "k_layernorm." in name):
        return False
    return name.endswith(".bias") or len(shape) == 1
