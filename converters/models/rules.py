"""The rules a model table is written in. Each says how some tensors of Megatron become tensors of Hugging Face.

A rule is data; `emit` turns it into region copies for one place in the model (a layer, an expert). A rule with a `when`
applies if that field of `ModelArgs` is set, and then its source must exist; a tensor that no rule takes is found by
`converters.planning.plan.prove`. The opposite conversion is `converters.planning.plan.reversed_copy` of each copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from converters.box import Box
from converters.errors import RequestError
from converters.planning.plan import Copy, Drop, Op, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import TensorInfo
    from converters.dtypes import DType
    from converters.megatron.model_args import ModelArgs


class MissingTensor(RequestError):
    """A rule's source does not exist."""


@dataclass
class Emit:
    """What the rules of one model produce.

    Attributes:
        vocab: Rows of the vocabulary to export.
        cast: Type for floating tensors; None leaves each as stored.
        add_one: Whether norm weights are stored as gamma - 1 and the target wants gamma.
        targets: Hugging Face tensors, in the order of its files.
        copies: What moves.
        drops: What is left out.
    """

    args: ModelArgs
    weights: Mapping[str, TensorInfo]
    vocab: int
    cast: DType | None = None
    add_one: bool = False
    targets: dict[str, Target] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)

    def applies(self, when: str | None, unless: str | None = None) -> bool:
        """Whether a rule's conditions hold."""
        return (when is None or bool(self.args.fact(when))) and not (unless and self.args.fact(unless))

    def source(self, prefix: str, *names: str) -> TensorInfo:
        """The first tensor of these names that exists.

        Raises:
            MissingTensor: None exists.
        """
        for name in names:
            tensor = self.weights.get(prefix + name)
            if tensor is not None:
                return tensor
        wanted = " or ".join(prefix + name for name in names)
        raise MissingTensor(f"the checkpoint has no tensor {wanted}", tensor=prefix + names[0])

    def target(
        self,
        name: str,
        source: TensorInfo,
        shape: tuple[int, ...],
        *,
        keep_dtype: bool = False,
        matrix: tuple[int, ...] | None = None,
    ) -> None:
        """Declares a tensor to be written, with the type of its source unless a cast was asked for."""
        dtype = self.cast if self.cast is not None and source.dtype.floating and not keep_dtype else source.dtype
        self.targets[name] = Target(name, dtype, shape, matrix)

    def whole(self, name: str, source: TensorInfo, op: Op = Op.COPY, *, keep_dtype: bool = False) -> None:
        """A target that is a whole source tensor, through an op."""
        shape = source.shape[::-1] if op is Op.TRANSPOSE else source.shape
        self.target(name, source, shape, keep_dtype=keep_dtype)
        self.copies.append(Copy(source.name, Box.whole(source.shape), name, Box.whole(shape), op))

    def rows(self, name: str, source: TensorInfo, pieces: list[tuple[int, int, int]]) -> None:
        """A target made of row ranges `(source row, target row, rows)` of a matrix or vector."""
        shape = (sum(n for _, _, n in pieces), *source.shape[1:])
        self.target(name, source, shape)
        for piece in pieces:
            self.copy_rows(name, source, *piece)

    def copy_rows(self, name: str, source: TensorInfo, first: int, target_first: int, rows: int) -> None:
        """Copies rows of a matrix or vector into a target that is declared."""
        zero, shape = (0,) * (len(source.shape) - 1), (rows, *source.shape[1:])
        self.copies.append(Copy(source.name, Box((first, *zero), shape), name, Box((target_first, *zero), shape)))


class Rule(Protocol):
    """How some tensors under a prefix of Megatron's names become tensors under a prefix of Hugging Face's."""

    def emit(self, out: Emit, source: str, target: str) -> None:
        """Adds this rule's targets, copies and drops.

        Args:
            out: Where to.
            source: Prefix of Megatron's names: `decoder.layers.7.`
            target: Prefix of Hugging Face's: `model.layers.7.`
        """
        ...


@dataclass(frozen=True)
class Rename:
    """One tensor under another name.

    Attributes:
        target: Hugging Face's name.
        sources: Megatron's names; the first that exists is taken (layer specs spell norms differently).
        norm: A norm's weight, which may be stored as gamma - 1.
        plain: A norm's weight that Hugging Face stores as gamma though it stores the model's other norms as gamma - 1.
        transpose: For transformers' Conv1D, whose weights are (in, out).
        fp32: Never cast: consumers expect float32 (router bias).
        when: Field of `ModelArgs`, or one of its `extras`, that must be set.
        unless: Field that must not be.
    """

    target: str
    sources: tuple[str, ...]
    norm: bool = False
    plain: bool = False
    transpose: bool = False
    fp32: bool = False
    when: str | None = None
    unless: str | None = None

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        if not out.applies(self.when, self.unless):
            return
        tensor = out.source(source, *self.sources)
        add_one = (self.norm and out.add_one) or (self.plain and bool(out.args.zero_centered_norm))
        op = Op.TRANSPOSE if self.transpose else Op.ADD_ONE if add_one else Op.COPY
        out.whole(target + self.target, tensor, op, keep_dtype=self.fp32)


@dataclass(frozen=True)
class SwappedHalves:
    """A projection of two vectors, one behind the other, that Hugging Face has in the other order."""

    target: str
    source: str

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        tensor, name = out.source(source, self.source), target + self.target
        rows, columns = tensor.shape
        half = columns // 2
        out.target(name, tensor, tensor.shape)
        for at in (0, half):
            box, swapped = Box((0, at), (rows, half)), Box((0, half - at), (rows, half))
            out.copies.append(Copy(tensor.name, box, name, swapped))


@dataclass(frozen=True)
class Vocab:
    """A matrix with one row per token: Megatron pads it to a multiple of `make_vocab_size_divisible_by * tp` rows."""

    target: str
    source: str
    untied: bool = False

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        if self.untied and out.args.tied_embeddings:
            return
        tensor = out.source(source, self.source)
        out.rows(target + self.target, tensor, [(0, 0, out.vocab)])
        if out.vocab < tensor.shape[0]:
            trained = out.args.vocab_size
            cut = trained is not None and out.vocab < trained
            reason = (
                f"beyond --vocab-size, although {trained} rows are trained" if cut else "padding rows of the vocabulary"
            )
            out.drops.append(Drop(tensor.name, Box.rows(tensor.shape, out.vocab), reason))


_QKV = "self_attention.linear_qkv"


def _qkv_rows(args: ModelArgs) -> Iterator[tuple[int, int, int, int]]:
    """Row ranges of a fused QKV projection: `(part, source row, row within the part, rows)`, part 0, 1, 2 is q, k, v.

    Megatron keeps the queries of a group beside their key and value, so that splitting rows over tensor parallel ranks
    splits groups. With 4 heads in 2 groups of head_dim rows each:

        linear_qkv  | q0 | q1 | k0 | v0 | q2 | q3 | k1 | v1 |
                    '--- group 0 ------''---- group 1 ------'
        q_proj      | q0 | q1 | q2 | q3 |
        k_proj      | k0 | k1 |
        v_proj      | v0 | v1 |

    With an output gate (Qwen3-Next), the gates of a group lie behind its queries, and in q_proj each behind its query:

        linear_qkv  | q0 | q1 | g0 | g1 | k0 | v0 | ..        q_proj  | q0 | g0 | q1 | g1 | ..

    Source: megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors (0.6 to 0.20).
    """
    heads, groups, dim = args.num_attention_heads, args.num_query_groups, args.head_dim
    if heads is None or groups is None or dim is None:
        raise RequestError("the numbers of heads and query groups are not known, so QKV cannot be taken apart")
    queries = heads // groups * dim
    gated = bool(args.extras.get("attention_output_gate"))
    for group in range(groups):
        at = group * ((1 + gated) * queries + 2 * dim)
        if gated:
            for head in range(heads // groups):
                to = 2 * (group * queries + head * dim)
                yield 0, at + head * dim, to, dim
                yield 0, at + queries + head * dim, to + dim, dim
            at += queries
        else:
            yield 0, at, group * queries, queries
        yield 1, at + queries, group * dim, dim
        yield 2, at + queries + dim, group * dim, dim


@dataclass(frozen=True)
class QKV:
    """A fused QKV projection as three, weight and (with `add_qkv_bias`) bias.

    Attributes:
        targets: Hugging Face's names of query, key and value.
        groups: Query groups of this layer, where the layers have different numbers; None for those of the model.
    """

    targets: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    groups: int | None = None

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        for leaf in (".weight", ".bias") if out.args.add_qkv_bias else (".weight",):
            tensor = out.source(source, _QKV + leaf)
            pieces: tuple[list[tuple[int, int, int]], ...] = ([], [], [])
            args = out.args if self.groups is None else replace(out.args, num_query_groups=self.groups)
            for part, at, to, rows in _qkv_rows(args):
                pieces[part].append((at, to, rows))
            for name, piece in zip(self.targets, pieces, strict=True):
                out.rows(target + name + leaf, tensor, piece)


@dataclass(frozen=True)
class FusedQKV:
    """A fused QKV projection with all queries, then all keys, then all values.

    Attributes:
        transpose: For GPT-2's Conv1D, whose weights are (in, out).
    """

    target: str
    transpose: bool = False

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        weight, args = out.source(source, _QKV + ".weight"), out.args
        name, inner = target + self.target + ".weight", weight.shape[1]
        rows = list(_qkv_rows(args))
        starts = {part: sum(n for other, _, _, n in rows if other < part) for part in range(3)}
        pieces = [(at, starts[part] + to, n) for part, at, to, n in rows]
        if self.transpose:
            out.target(name, weight, weight.shape[::-1])
            for at, to, n in pieces:
                box = Box((at, 0), (n, inner))
                out.copies.append(Copy(weight.name, box, name, Box((0, to), (inner, n)), Op.TRANSPOSE))
        else:
            out.rows(name, weight, pieces)
        if args.add_qkv_bias:
            out.rows(target + self.target + ".bias", out.source(source, _QKV + ".bias"), pieces)


@dataclass(frozen=True)
class Joined:
    """Several tensors of Megatron as one, group by group; in a mixer it stores each part of a projection by itself.

        query  | q0 | q1 |    key  | k0 | k1 |   ..      in_proj_qkvz  | q0 | k0 | v0 | z0 | q1 | k1 | v1 | z1 |

    Attributes:
        target: Hugging Face's name.
        sources: Megatron's names, in the order of their rows within a group.
        groups: Field of `ModelArgs` with the number of groups; None for one.
    """

    target: str
    sources: tuple[str, ...]
    groups: str | None = None

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        tensors = [out.source(source, name) for name in self.sources]
        groups = (getattr(out.args, self.groups) if self.groups else 1) or 0
        if not groups or any(tensor.shape[0] % groups for tensor in tensors):
            raise RequestError(f"the rows of {tensors[0].name} are not those of {groups} groups")
        counts = [tensor.shape[0] // groups for tensor in tensors]
        name, target_first = target + self.target, 0
        out.target(name, tensors[0], (sum(counts) * groups, *tensors[0].shape[1:]))
        for group in range(groups):
            for tensor, rows in zip(tensors, counts, strict=True):
                out.copy_rows(name, tensor, group * rows, target_first, rows)
                target_first += rows


@dataclass(frozen=True)
class GateUp:
    """The first projection of a gated MLP as two, weight and (with `add_bias_linear`) bias.

    In a checkpoint the halves are whole, whatever the layout that saved it; in a rank's memory at tp 2 they are not:

        linear_fc1, stored   | gate (ffn rows)  | up (ffn rows)  |
        rank 0 | rank 1      | gate 0 | up 0 |  | gate 1 | up 1  |

    Source: megatron/core/transformer/mlp.py, apply_swiglu_sharded_factory (0.4 to 0.20).
    """

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    source: str = "mlp.linear_fc1"

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        for leaf in (".weight", ".bias") if out.args.add_bias_linear else (".weight",):
            tensor = out.source(source, self.source + leaf)
            half = tensor.shape[0] // 2
            out.rows(target + self.gate + leaf, tensor, [(0, 0, half)])
            out.rows(target + self.up + leaf, tensor, [(half, 0, tensor.shape[0] - half)])


@dataclass(frozen=True)
class Experts:
    """The same rules for each expert; names contain its number in both worlds."""

    target: str
    rules: tuple[Rule, ...]

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        for expert in range(out.args.num_experts or 0):
            inner, outer = f"{source}mlp.experts.{expert}.", target + self.target.format(expert)
            for rule in self.rules:
                rule.emit(out, inner, outer)


@dataclass(frozen=True)
class StackedExperts:
    """One matrix of every expert, or one bias, stacked in one tensor (experts, rows, columns).

    Attributes:
        transpose: The matrices are (in, out).
    """

    target: str
    source: str
    transpose: bool = False

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        name, count = target + self.target, out.args.num_experts or 0
        for expert in range(count):
            tensor = out.source(source, f"mlp.experts.{expert}.{self.source}")
            shape = tensor.shape[::-1] if self.transpose else tensor.shape
            if not expert:
                out.target(name, tensor, (count, *shape))
            box = Box((expert, *(0,) * len(shape)), (1, *shape))
            op = Op.TRANSPOSE if self.transpose else Op.COPY
            out.copies.append(Copy(tensor.name, Box.whole(tensor.shape), name, box, op))


@dataclass(frozen=True)
class InterleavedExperts:
    """The first projections of gated experts, stacked, in turn a column of the gate and one of the other half (gpt-oss).

        linear_fc1 of an expert  | gate (ffn rows) | up (ffn rows) |       gate_up_proj  (hidden, g0 u0 g1 u1 ..)

    Its copies refer to (experts, hidden, ffn, 2), in which each half is a box. Source: transformers 5.23,
    GptOssExperts; Megatron-Bridge, gpt_oss_bridge.py (2026-08).
    """

    target: str

    def emit(self, out: Emit, source: str, target: str) -> None:
        """See `Rule`."""
        count = out.args.num_experts or 0
        for leaf, suffix in ((".weight", ""), (".bias", "_bias")):
            name = target + self.target + suffix
            for expert in range(count):
                tensor = out.source(source, f"mlp.experts.{expert}.linear_fc1{leaf}")
                half, rest = tensor.shape[0] // 2, tensor.shape[1:]
                if not expert:
                    out.target(name, tensor, (count, *rest, 2 * half), matrix=(count, *rest, half, 2))
                zero, op = (0,) * len(rest), Op.TRANSPOSE if rest else Op.COPY
                for which in range(2):
                    box = Box((expert, *zero, 0, which), (1, *rest, half, 1))
                    rows = Box((which * half, *zero), (half, *rest))
                    out.copies.append(Copy(tensor.name, rows, name, box, op))
