"""How master weights are stored: as fp32, or as what the bf16 weights beside them lack (`io.remainders`).

A precision-aware optimizer keeps int16 remainders. Megatron-Core writes them as int16 in `fully_sharded_model_space` and
`dp_reshardable`; in `fully_reshardable`, `dp_zero_gather_scatter` and `distrib_optim.pt` they pass through fp32 buffers and
are whole numbers in fp32 (optimizer/distrib_optimizer.py, `_get_main_param_and_optimizer_states` and
`get_parameter_state_dp_zero`, core_v0.14.0 to main). No argument tells: `store_param_remainders` is not one, and
TransformerEngine before 2.1 keeps fp32 masters with the same flags. So the element type decides, and where that is fp32 the
values do, with the weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.catalog import Remainders
from converters.dtypes import dtype
from converters.errors import IntegrityError, RequestError
from converters.io.block_runner import TileChecker
from converters.io.questions import RoundsTo
from converters.io.remainders import are_remainders
from converters.io.sources import Sources
from converters.megatron.buffers import Misfit
from converters.names import (
    MASTER,
    fold,
    folded,
    listed_lines,
    master_name,
    parameter_of,
    printable,
    quoted,
    state_names,
)
from converters.pickles.nodes import Global

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader

_FP32, _INT16 = dtype("float32"), dtype("int16")
_SAMPLE = 1 << 12  # elements


def complete_masters(reader: Reader, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of an optimizer with master weights in fp32, whatever they are stored as.

    Args:
        reader: The checkpoint.
        tensors: The optimizer's tensors by canonical name, as they are stored.

    Raises:
        IntegrityError: Some parameters have none, though they have other state.
        RequestError: It cannot be said what the master weights are.
    """
    masters = {name: at.parameter for name, at in state_names(tensors) if at.state == MASTER}
    _refuse_missing(reader.catalog, tensors, set(masters.values()))
    narrow = [name for name in masters if tensors[name].dtype.name == "int16"]
    not_floating = [name for name in masters if not tensors[name].dtype.floating and name not in narrow]
    if not_floating:
        kind = tensors[not_floating[0]].dtype
        raise _not_understood(reader.catalog, f"are {kind}, which no known optimizer keeps them in", not_floating)
    wide = []
    if _may_keep_remainders(reader.catalog):
        beside = reader.catalog.weights
        wide = [
            name
            for name, parameter in masters.items()
            if tensors[name].dtype.name == "float32"
            and (weight := beside.get(parameter)) is not None
            and weight.dtype.name == "bfloat16"
        ]
        wide = wide if wide and _are_remainders(reader, tensors, wide) else []
    out = dict(tensors) | {name: _completed(reader.catalog, tensors[name]) for name in (*narrow, *wide)}
    if _are_fp16(reader.catalog):
        out |= {name: replace(out[name], coarse=True) for name in masters if out[name].remainders is None}
    return out


def _refuse_missing(catalog: Catalog, tensors: Mapping[str, TensorInfo], with_master: set[str]) -> None:
    """A parameter that has other state has a master weight where others have one, unless it is one itself."""
    for name, (_, parameter) in state_names(tensors) if with_master else ():
        weight = catalog.weights.get(parameter)
        if parameter not in with_master and weight is not None and weight.dtype.name != "float32":
            raise IntegrityError(
                f"{printable(master_name(parameter))} is missing",
                details=[f"there is {printable(name)}, and {len(with_master):,} other parameters have master weights"],
                hint="distckpt verify says what else is; --optimizer none keeps the weights",
                tensor=master_name(parameter),
            )


def keeps_remainders(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether master weights are computed from remainders."""
    return any(info.remainders is not None and info.remainders.weight is not None for info in tensors.values())


def as_remainders(catalog: Catalog, tensors: Mapping[str, TensorInfo], optimizer: str) -> dict[str, TensorInfo]:
    """The tensors of an optimizer with the remainders of master weights themselves, in int16, as a job with them stores.

    Args:
        catalog: The checkpoint's.
        tensors: What `complete_masters` gave.
        optimizer: The form in which they will be stored.

    Raises:
        RequestError: Megatron-Core loads none from this form, or the checkpoint has none.
    """
    if not keeps_remainders(tensors):
        raise RequestError(
            "the checkpoint's master weights are fp32; remainders of them are not made, as the weights would have to be "
            "rounded anew",
            hint=f"leave --masters out: {quoted(catalog.root)} is for a job without remainders",
        )
    if optimizer != "dp_reshardable":
        raise RequestError(
            f"Megatron-Core loads no remainders from {optimizer}: its own files of this kind end with an AssertionError in "
            "TransformerEngine's set_scaled_state",
            hint="--masters remainders --optimizer dp_reshardable, for 0.17 and later; or --masters fp32 for a job without "
            "--use-precision-aware-optimizer",
        )
    out = dict(tensors)
    for name, info in tensors.items():
        if info.remainders is not None:
            narrow = None if info.remainders.dtype == _INT16 else replace(info.remainders, weight=None)
            out[name] = replace(info, dtype=_INT16, remainders=narrow)
    return out


def _are_fp16(catalog: Catalog) -> bool:
    """Whether the job had --main-params-dtype fp16, whose values are rounded after the weights were made of them.

    FusedAdam gives the weights what it has computed in fp32, and then keeps that as fp16 with a scale for each parameter
    (TransformerEngine, pytorch/optimizers/fused_adam.py, `_apply_scale`; `get_unscaled_state` is what is stored).
    """
    args = catalog.job_options
    main = args.get("main_params_dtype")
    fp16 = isinstance(main, Global) and main.path in ("torch.float16", "torch.half")
    return args.get("use_precision_aware_optimizer") is True and fp16


def _may_keep_remainders(catalog: Catalog) -> bool:
    """Whether the arguments of the job allow fp32 tensors to hold remainders; without any, nothing rules them out."""
    args = catalog.job_options
    if not args:
        return catalog.megatron
    main = args.get("main_params_dtype")
    narrow = isinstance(main, Global) and main.path != "torch.float32"
    return args.get("use_precision_aware_optimizer") is True and not narrow


def _completed(catalog: Catalog, info: TensorInfo) -> TensorInfo:
    weight = catalog.weights.get(parameter_of(info.name))
    if weight is None or weight.dtype.name != "bfloat16":
        beside = "there is no weight beside it" if weight is None else f"the weight beside it is {weight.dtype}"
        raise _not_understood(catalog, f"are {info.dtype}, the lower halves of fp32 numbers, but {beside}", [info.name])
    if weight.shape[1:] != info.shape[1:] or len(weight.shape) != len(info.shape) or weight.shape[:1] < info.shape[:1]:
        text = f"are {list(info.shape)}, the lower halves of fp32 numbers, but the weight beside it is {list(weight.shape)}"
        raise _not_understood(catalog, text, [info.name])
    return replace(info, dtype=_FP32, remainders=Remainders(info.dtype, weight))


def _are_remainders(reader: Reader, tensors: Mapping[str, TensorInfo], names: list[str]) -> bool:
    """Whether fp32 tensors hold remainders, by a sample of their values and of the weights.

    Raises:
        RequestError: Some do and some do not, or nothing tells.
    """
    weights = reader.catalog.weights
    remainders, plain = list[str](), list[str]()
    chosen = [name for _, members in fold(names) for name in sample_evenly(members)]
    compared = {name: tensors[name] for name in chosen} | {n: weights[n] for n in map(parameter_of, chosen)}
    sources = Sources(reader, compared, checked=False)
    with contextlib.closing(TileChecker([sources, sources])) as checker:
        for name in chosen:
            master, weight = tensors[name], weights[parameter_of(name)]
            question = _Remainders(master, weight)
            checker.ask(question, [first_elements(master, weight)], name, weight.name)
            if question.whole_numbers and question.wrong:
                remainders.append(name)
            elif not question.whole_numbers:
                plain.append(name)
    if bool(remainders) == bool(plain):
        text = "are whole numbers for some parameters only" if plain else "and the weights may both be remainders"
        raise _not_understood(reader.catalog, f"{text}: are they remainders?", remainders or chosen)
    return bool(remainders)


@dataclass
class _Remainders(RoundsTo):
    """Also whether all elements of a master weight are whole numbers that remainders can be."""

    whole_numbers: bool = True

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        super().add(tile, rows, arrays)
        self.whole_numbers &= are_remainders(arrays[0].view(np.float32))


def first_elements(master: TensorInfo, weight: TensorInfo) -> Box:
    """A box of the first elements that both have, few enough for a sample."""
    if len(master.shape) != len(weight.shape):
        raise Misfit(
            f"{master.name} is {list(master.shape)}, {weight.name} is {list(weight.shape)}", tensor=master.name
        )
    common = common_elements(master, weight)
    return next(iter(contiguous_tiles(common, _SAMPLE)), common)


def common_elements(master: TensorInfo, weight: TensorInfo) -> Box:
    """The elements that both have: the vocabulary may be padded otherwise."""
    return Box.whole(tuple(map(min, master.shape, weight.shape)))


def sample_evenly(members: list[str], most: int = 16) -> list[str]:
    """Some of them, evenly spread: a wrong order of ranks or experts may leave the first and the last where they are."""
    steps = min(most, len(members)) - 1
    return [members[i * (len(members) - 1) // steps] for i in range(steps + 1)] if steps else members[:1]


def _not_understood(catalog: Catalog, text: str, names: list[str]) -> RequestError:
    return RequestError(
        f"the master weights of the optimizer {text}",
        details=listed_lines(folded(names), 8),
        hint=f"--optimizer none leaves the state out; distckpt convert {quoted(catalog.root)} OUT --to safetensors "
        "keeps the weights",
        tensor=names[0],
    )
