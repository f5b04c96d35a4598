"""Refuses a layout that a model cannot have, before anything is read, with the numbers and the nearest possible ones.

Facts: Megatron-Core 0.16.1, transformer/transformer_config.py (__post_init__), ssm/mamba_mixer.py, moe/moe_layer.py,
tensor_parallel/layers.py (`divide`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.parallel.pipeline import divisors, some_of
from converters.parallel.split import Outline, Split, split_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from converters.facts.model_args import ModelArgs
    from converters.parallel.layout import Layout

__all__ = ["check"]


@dataclass(frozen=True, slots=True)
class _Limit:
    """A number of the model that a parallel size has to fit.

    Attributes:
        number: 32.
        what: "attention heads".
        tensor: Name of a tensor that shows it; "" if none does.
        fits: Whether a parallel size is possible; by default, whether it divides `number`.
        must: What it must do, as the hint says it; by default "divide NUMBER".
    """

    number: int
    what: str
    tensor: str = ""
    fits: Callable[[int], bool] | None = None
    must: str = ""

    def allows(self, size: int) -> bool:
        return self.fits(size) if self.fits else self.number % size == 0


def check(args: ModelArgs, layout: Layout, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Makes sure that a job of this layout can hold this model.

    Args:
        layout: The wanted layout; that its sizes make a grid it has checked itself.
        shapes: Shape of every weight by canonical name, the embedding with as many rows as the target shall have.

    Returns:
        What is possible but needs a certain version, as sentences.

    Raises:
        RequestError: It cannot; with the numbers, a tensor that shows them, and the nearest possible values.
    """
    outline = Outline.of(args, shapes)
    dense, expert = _sizes(shapes, outline)
    limits = [*_heads(args, shapes), *_sections(args, shapes), *dense]
    if layout.etp is None:
        _refuse("tp", layout.tp, [*limits, *expert], shapes)
    else:
        _refuse("tp", layout.tp, limits, shapes)
        _refuse("etp", layout.etp, expert, shapes)
    if outline.num_experts:
        tensor = _first(shapes, ".mlp.router.weight", ".linear_fc1.weight")
        _refuse("ep", layout.ep, [_Limit(outline.num_experts, "experts", tensor)], shapes)
    elif layout.ep > 1:
        raise RequestError(f"--ep {layout.ep} is for a mixture of experts; this model has none", hint="leave --ep out")
    if layout.pp > 1 and {"encoder", "decoder"} <= {name.partition(".layers.")[0] for name in shapes}:
        raise RequestError("a model with encoder and decoder cannot be divided over --pp", hint="--pp 1")
    if layout.pp > 1 and not layout.order.endswith("pp") and layout.edp != layout.dp:
        raise RequestError(
            f"Megatron refuses ranks in the order {layout.order} when experts have another data-parallel size "
            f"({layout.edp}) than the dense part ({layout.dp}), even in a model without experts"
        )
    layout.pipeline(outline.num_layers, outline.mtp_layers)
    return list(_notes(args, layout, outline))


def _heads(args: ModelArgs, shapes: Mapping[str, Sequence[int]]) -> Iterator[_Limit]:
    """Attention heads and query groups; fewer groups than ranks must divide them (core 0.16)."""
    tensor = _first(shapes, ".self_attention.linear_qkv.weight", ".linear_q_up_proj.weight", ".linear_q_proj.weight")
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads and tensor:
        yield _Limit(heads, "attention heads", tensor)
    if groups and tensor and groups != heads and not args.mla:
        yield _Limit(
            groups,
            "query groups",
            tensor,
            fits=lambda tp: groups % tp == 0 or tp % groups == 0,
            must=f"divide {groups} or be a multiple of it",
        )


def _sections(args: ModelArgs, shapes: Mapping[str, Sequence[int]]) -> Iterator[_Limit]:
    """Groups of state-space layers, which their `B` and `C` rows do not show."""
    groups = args.extras.get("mamba_num_groups")
    tensor = _first(shapes, ".mixer.in_proj.weight.B")
    if tensor and isinstance(groups, int) and groups > 0:
        yield _Limit(groups, "Mamba groups", tensor)


def _first(shapes: Mapping[str, Sequence[int]], *endings: str) -> str:
    return next((name for ending in endings for name in shapes if name.endswith(ending)), "")


_EXPERTS = "of the experts' inner size"
_LABELS = {
    ".mlp.linear_fc1.weight": "of the MLP's inner size",
    ".mlp.linear_fc2.weight": "of the MLP's inner size",
    ".shared_experts.linear_fc1.weight": "of the shared experts' inner size",
    ".shared_experts.linear_fc2.weight": "of the shared experts' inner size",
    ".linear_qkv.weight": "rows of query, key and value",
    ".eh_proj.weight": "of the hidden size (MTP projection)",
    ".mixer.A_log": "Mamba heads",
}


def _sizes(shapes: Mapping[str, Sequence[int]], outline: Outline) -> tuple[list[_Limit], list[_Limit]]:
    """Every length that tensor parallelism divides, once: those of dense tensors, those of experts."""
    dense: dict[tuple[int, str], _Limit] = {}
    expert: dict[tuple[int, str], _Limit] = {}
    for name, shape in shapes.items():
        try:
            rule = split_rule(name)
        except RequestError:
            continue  # whether it matters is known when it is divided
        if rule.axis is None or rule.axis >= len(shape) or rule.vocab:
            continue  # the vocabulary is padded for every tp (vocabulary.py)
        number = shape[rule.axis]
        if rule.gated and outline.gated and number % 2 == 0:
            number //= 2
        what = _label(name, rule)
        (dense if rule.expert is None else expert).setdefault((number, what), _Limit(number, what, name))
    return list(dense.values()), list(expert.values())


def _label(name: str, rule: Split) -> str:
    if rule.expert is not None:
        return _EXPERTS
    return next(
        (text for ending, text in _LABELS.items() if name.endswith(ending)), "rows" if rule.axis == 0 else "columns"
    )


def _refuse(option: str, size: int, limits: Sequence[_Limit], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises for the first limit that a size breaks; the hint names sizes that all limits allow."""
    broken = next((limit for limit in limits if not limit.allows(size)), None)
    if broken is None:
        return
    candidates = range(1, broken.number + 1) if broken.fits else divisors(broken.number)
    good = [n for n in candidates if all(limit.allows(n) for limit in limits)]
    hint = f"--{option} must {broken.must or f'divide {broken.number}'}: try {some_of(good, size)}"
    verb = "divided among" if option == "ep" else "split over"
    raise RequestError(
        f"{broken.number} {broken.what} cannot be {verb} --{option} {size}",
        details=[f"{broken.tensor}  {tuple(shapes[broken.tensor])}"] if broken.tensor else [],
        hint=f"{hint}; or give the experts their own with --etp"
        if broken.what == _EXPERTS and option == "tp"
        else hint,
        tensor=broken.tensor or None,
    )


def _notes(args: ModelArgs, layout: Layout, outline: Outline) -> Iterator[str]:
    groups = args.num_query_groups
    if groups and not args.mla and groups < layout.tp:
        yield f"--tp {layout.tp} with {groups} query groups needs Megatron-Core 0.16 or later"
    if outline.tied and outline.mtp_layers and layout.pp > 1:
        yield "Megatron-Core 0.16 cannot save tied embeddings with MTP and --pp above 1"
