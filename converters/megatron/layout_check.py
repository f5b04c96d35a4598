"""Refuses a layout that a model cannot have, before anything is read, with the numbers and the nearest possible ones.

Facts: Megatron-Core 0.16.1, transformer/transformer_config.py (__post_init__), ssm/mamba_mixer.py, ssm/mamba_block.py,
ssm/gated_delta_net.py, moe/moe_layer.py, tensor_parallel/layers.py (`divide`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.megatron.outline import Outline
from converters.megatron.pipeline import divisors, list_nearest
from converters.megatron.split import Split, split_rule
from converters.megatron.vocabulary import is_vocabulary
from converters.model_parts import language_name
from converters.names import printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.megatron.layout import Layout
    from converters.megatron.model_args import ModelArgs


@dataclass(frozen=True, slots=True)
class _Limit:
    """A number of the model that a parallel size has to fit.

    Attributes:
        number: 32.
        unit: "attention heads".
        tensor: Name of a tensor that shows it; "" if none does.
        or_multiple: A parallel size may also be a multiple of the number; else it must divide it.
    """

    number: int
    unit: str
    tensor: str = ""
    or_multiple: bool = False

    def allows(self, size: int) -> bool:
        return self.number % size == 0 or (self.or_multiple and size % self.number == 0)


def check_layout(args: ModelArgs, layout: Layout, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Makes sure that a job of this layout can hold this model.

    Args:
        layout: The wanted layout; that its sizes make a grid it has checked itself.
        shapes: Shape of every weight by canonical name, the embedding with as many rows as the target shall have.

    Returns:
        What is possible but needs a certain version, as sentences.

    Raises:
        RequestError: It cannot; with the numbers, a tensor that shows them, and the nearest possible values.
    """
    if args.unknown:
        raise RequestError(
            f"the model is not understood: {printable(args.unknown[0])}",
            details=[printable(text) for text in args.unknown[1:8]],
            hint="distckpt convert --to safetensors keeps the weights as they are",
        )
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
        biased = next((name for name in shapes if ".mlp.experts." in name and name.endswith(".bias")), None)
        if biased and layout.expert_tp > 1:  # transformer_config.py: "Bias in Moe is only supported when ETP==1"
            raise RequestError(
                f"Megatron has no experts with biases at --etp {layout.expert_tp}",
                hint="give the experts their own with --etp 1",
                tensor=biased,
            )
    elif layout.ep > 1:
        raise RequestError(f"--ep {layout.ep} is for a mixture of experts; this model has none", hint="leave --ep out")
    elif layout.etp not in (None, 1, layout.tp, None if args.etp == args.tp else args.etp):
        text = f"--etp {layout.etp} is for a mixture of experts; this model has none"
        raise RequestError(text, hint="leave --etp out")
    stacks = {inner.partition(".layers.")[0] for name in shapes if (inner := language_name(name)) is not None}
    if layout.pp > 1 and {"encoder", "decoder"} <= stacks:  # pretrain_t5.py, model_provider
        raise RequestError("a model with encoder and decoder cannot be divided over --pp", hint="--pp 1")
    if layout.pp > 1 and not layout.order.endswith("pp") and layout.edp != layout.dp:
        raise RequestError(
            f"Megatron refuses ranks in the order {layout.order} when experts have another data-parallel size "
            f"({layout.edp}) than the dense part ({layout.dp}), even in a model without experts"
        )
    if args.layer_pattern and "hybrid_layer_pattern" not in args.extras and (layout.chunks > 1 or layout.pp_layout):
        raise RequestError(
            "a hybrid model of Megatron-Core before 0.19 has no virtual pipeline, and no stages but even ones and those of "
            "--first-layers and --last-layers",
            hint="leave --vpp and --pp-layout out",
        )
    for option, saved, divided_into in (
        ("moe_mlp_glu_interleave_size", args.etp or args.tp, layout.expert_tp),
        ("moe_shared_expert_glu_interleave_size", args.tp, layout.tp),
    ):
        if args.extras.get(option) and saved not in (None, divided_into):
            raise RequestError(
                f"with {option} {printable(str(args.extras[option]))} the rows of gate and up alternate within each "
                f"of {saved} tensor-parallel parts; no loader of Megatron divides them into {divided_into}",
                hint=f"--{'etp' if 'mlp' in option else 'tp'} {saved}",
            )
    layout.pipeline(outline.num_layers, outline.mtp_layers)
    return list(_notes(args, layout, outline))


def _heads(args: ModelArgs, shapes: Mapping[str, Sequence[int]]) -> Iterator[_Limit]:
    """Attention heads and query groups; fewer groups than ranks must divide them (core 0.16)."""
    tensor = _first(shapes, ".self_attention.linear_qkv.weight", ".linear_q_up_proj.weight", ".linear_q_proj.weight")
    heads = args.num_attention_heads
    if heads and tensor:
        yield _Limit(heads, "attention heads", tensor)
    for groups, name in _query_groups(args, tensor).items():
        if name and groups != heads and not args.mla:
            yield _Limit(groups, "query groups", name, or_multiple=True)


def _query_groups(args: ModelArgs, tensor: str) -> dict[int, str]:
    """Numbers of query groups, each with a tensor of that many: `tensor`, unless the layers have different numbers."""
    if not args.blocks:
        return {args.num_query_groups: tensor} if args.num_query_groups else {}
    numbered = ((block.query_groups, number) for number, block in enumerate(args.blocks))
    return {
        groups: f"decoder.layers.{number}.self_attention.linear_qkv.weight" for groups, number in numbered if groups
    }


def _sections(args: ModelArgs, shapes: Mapping[str, Sequence[int]]) -> Iterator[_Limit]:
    """Groups of Mamba layers and heads of gated delta nets, which the rows of their projections do not show."""
    for ending, number, unit in (
        ("mixer.in_proj.weight.B", args.mamba_num_groups, "Mamba groups"),
        (".self_attention.in_proj.weight.query", args.linear_num_key_heads, "key heads of the gated delta net"),
        (".self_attention.in_proj.weight.value", args.linear_num_value_heads, "value heads of the gated delta net"),
    ):
        tensor = _first(shapes, ending)
        if tensor and number:
            yield _Limit(number, unit, tensor)


def _first(shapes: Mapping[str, Sequence[int]], *endings: str) -> str:
    return next((name for ending in endings for name in shapes if name.endswith(ending)), "")


_EXPERTS = "of the experts' inner size"
_LABELS = {
    ".mlp.linear_fc1.weight": "of the MLP's inner size",
    ".mlp.linear_fc2.weight": "of the MLP's inner size",
    ".shared_experts.linear_fc1.weight": "of the shared experts' inner size",
    ".shared_experts.linear_fc2.weight": "of the shared experts' inner size",
    ".linear_qkv.weight": "rows of query, key and value",
    ".adapter.linear_in.weight": "(rank of the adapters)",
    ".eh_proj.weight": "of the hidden size (MTP projection)",
    "mixer.A_log": "Mamba heads",
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
        if rule.axis is None or rule.axis >= len(shape) or is_vocabulary(name):
            continue  # the vocabulary is padded for every tp (vocabulary.py)
        number = shape[rule.axis]
        if rule.gated and outline.gated is not None and outline.gates(name) and number % 2 == 0:
            number //= 2
        unit = _label(name, rule)
        (dense if rule.expert is None else expert).setdefault((number, unit), _Limit(number, unit, name))
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
    good = [n for n in divisors(broken.number) if all(limit.allows(n) for limit in limits)]
    rule = f"divide {broken.number}{' or be a multiple of it' if broken.or_multiple else ''}"
    hint = f"--{option} must {rule}: try {list_nearest(good, size)}"
    verb = "divided among" if option == "ep" else "split over"
    raise RequestError(
        f"{broken.number} {broken.unit} cannot be {verb} --{option} {size}",
        details=[f"{broken.tensor}  {tuple(shapes[broken.tensor])}"] if broken.tensor else [],
        hint=f"{hint}; or give the experts their own with --etp"
        if broken.unit == _EXPERTS and option == "tp"
        else hint,
        tensor=broken.tensor or None,
    )


def _notes(args: ModelArgs, layout: Layout, outline: Outline) -> Iterator[str]:
    groups = min(_query_groups(args, ""), default=None)
    if groups and not args.mla and groups < layout.tp:
        yield f"--tp {layout.tp} with {counted(groups, 'query group')} needs Megatron-Core 0.16 or later"
    if outline.tied and outline.mtp_layers and layout.pp > 1:
        yield "Megatron-Core 0.16 cannot save tied embeddings with MTP and --pp above 1"
