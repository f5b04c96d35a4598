"""What the keys of a state dictionary mean that a training loop gave to torch DCP.

DCP flattens nested dictionaries into keys and notes the path of each (`planner_data`), so a module's name, dots and all, is
one element of it:

    model.model.layers.0.mlp.up_proj.weight          ("model", "model.layers.0.mlp.up_proj.weight")
    optim.state.lm_head.weight.exp_avg               ("optim", "state", "lm_head.weight", "exp_avg")
    optimizer.state.lm_head.weight.exp_avg           ("optimizer", "state.lm_head.weight.exp_avg")         flattened
    train_state.step                                 ("train_state", "step")

Weights keep the names that the model gave them, if it is the only one. Optimizer state is
`optimizer.state.exp_avg.lm_head.weight`, as for every other format. What is neither keeps its key.

Sources: torch/distributed/checkpoint/{default_planner,_nested_dict,state_dict}.py, torch 2.2 to 2.13.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from converters.names import StateName
from converters.pickles.nodes import Global

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.pickles.nodes import Node

_MODEL = re.compile(r"model(_?state(_?dict)?)?|module|state_dict|weights|net(work)?", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim(izer)?s?(_?state(_?dict)?)?", re.IGNORECASE)
_FLATTENED = re.compile(r"(?:optimizers?\.)?state\.(.+)\.([^.]+)", re.DOTALL)
_HUGGING_FACE = re.compile(
    r"(?:model|language_model|transformer|gpt_neox|bert|roberta)\.(?:model\.|decoder\.)?"
    r"(?:layers|h|encoder\.layer|block)\.\d+\.(?:self_attn|mlp|attn|attention|input_layernorm|ln_1)\."
)

Path = tuple[str, ...]


class Named(NamedTuple):
    """A key, understood.

    Attributes:
        name: Its name in the catalog.
        kind: "weight", "optimizer" or "other".
    """

    name: str
    kind: str


def paths(keys: Iterable[str], planner_data: Node) -> dict[str, Path]:
    """Where each key was in the nested dictionary; the key alone where nothing tells."""
    planned = planner_data if isinstance(planner_data, dict) else {}
    return {key: _path(planned.get(key)) or (key,) for key in keys}


def _path(node: Node) -> Path:
    if not isinstance(node, tuple | list):
        return ()
    # a type may be a dictionary's key: veScale's optimizer has one level for each
    parts = [f"{part.module}.{part.name}" if isinstance(part, Global) else part for part in node]
    return tuple(str(part) for part in parts) if all(isinstance(part, str | int) for part in parts) else ()


def name_keys(paths_of: Mapping[str, Path]) -> dict[str, Named]:
    """The meaning of every tensor key.

    Args:
        paths_of: From `paths`, of all tensors.
    """
    out: dict[str, Named] = {}
    others: dict[str, Path] = {}
    for key, path in paths_of.items():
        state = _optimizer_state(path)
        if state is not None:
            out[key] = Named(str(StateName(*state)), "optimizer")
        elif any(_OPTIMIZER.fullmatch(part) for part in path[:-1]):
            out[key] = Named(key, "optimizer")
        else:
            others[key] = path
    # names of modules have dots; without any, this is no model, and all of it is alike
    models = {path[:-1] for path in others.values() if "." in path[-1]} or {path[:-1] for path in others.values()}
    alone = len(models) == 1 and _MODEL.fullmatch("".join(next(iter(models))[-1:]))
    for key, path in others.items():
        kind = "weight" if path[:-1] in models else "other"
        out[key] = Named(path[-1] if alone and kind == "weight" else key, kind)
    return _unique(out)


def _optimizer_state(path: Path) -> tuple[str, str] | None:
    """`(state, parameter)` of an optimizer's tensor."""
    if len(path) >= 3 and path[-3] == "state":
        return path[-1], path[-2]
    flat = _FLATTENED.fullmatch(path[-1])
    if flat is not None and (len(path) == 1 or _OPTIMIZER.fullmatch(path[-2])):
        return flat[2], flat[1]
    return None


def _unique(named: Mapping[str, Named]) -> dict[str, Named]:
    """Names that two keys would share are given to neither: they keep their keys."""
    counts: dict[str, int] = {}
    for item in named.values():
        counts[item.name] = counts.get(item.name, 0) + 1
    return {key: item if counts[item.name] == 1 else Named(key, item.kind) for key, item in named.items()}


def hugging_face(names: Iterable[str]) -> bool:
    """Whether modules are called as in transformers, so that weights load there under the names they have."""
    return any(_HUGGING_FACE.match(name) for name in names)
