"""Checks of values: copies that must be equal, masters that must round to weights, impossible numbers.

Tensors are read in tiles, each as often as a question asks for it; nothing here grows with the model.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.errors import DistckptError, IntegrityError, Interrupted
from converters.events import Moved
from converters.io.arithmetic import BLOCK, UNSIGNED, squares
from converters.io.block_runner import TileChecker
from converters.io.questions import Question, RoundsTo, Together
from converters.io.sources import Sources
from converters.names import StateName, numberless, printable
from converters.verification.moments import PossibleMoments

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.dtypes import DType
    from converters.execute.work_sharing import WorkSharing
    from converters.formats.base import Reader
    from converters.io.arithmetic import Arithmetic
    from converters.verification.report import Check

_TILE = 1 << 20  # elements
_BLOCKS = 6 * 8 * BLOCK  # what is made of a block

# thresholds of `judge_values`
MOST_DENORMAL = 0.01  # part of a weight's elements that may be denormal: training leaves none, foreign memory many
UNUSUAL_RATIO = 10.0  # times the usual size among the same tensors of other layers: worth a look
IMPOSSIBLE_RATIO = 1000.0  # not by training
_VOCABULARY = ("word_embeddings.weight", "embed_tokens.weight", "wte.weight", "output_layer.weight", "lm_head.weight")
_FEWEST = 4  # layers that "the usual" takes
_SECOND_FACTOR = ".adapter.linear_out.weight"
_PAGE = 512  # elements


def tile_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of buffers that a worker holds: of two tiles."""
    elements = min(_TILE, max((t.numel for t in tensors.values()), default=1))
    return 2 * elements * max((t.dtype.itemsize for t in tensors.values()), default=1) + _BLOCKS


@dataclass(frozen=True, slots=True)
class TensorTask:
    """One tensor to be looked at, or two to be compared.

    Attributes:
        number: Among all tasks.
        names: The tensor; or two: the first is compared with the second.
        compare: "equal", "rounded" or, for moments, "possible" for two, "" for one.
        values: Whether statistics are wanted.
        nbytes: Bytes of the tensors.
    """

    number: int
    names: tuple[str, ...]
    compare: str
    values: bool
    nbytes: int


class TensorWorker:
    """Looks at tensors, one task at a time.

    Args:
        reader: The checkpoint.
        tensors: The tensors of the tasks, by name.
        sharing: Told about progress, asked whether to stop.
        bound: What m^2 / v of moments cannot exceed, see `moments`.
    """

    def __init__(
        self,
        reader: Reader,
        tensors: Mapping[str, TensorInfo],
        sharing: WorkSharing,
        bound: float = math.inf,
    ) -> None:
        self._tensors, self._bound = tensors, bound
        # whether checksums match was found when the files were read
        self._sources = Sources(reader, tensors, checked=False)
        self._checker = TileChecker(
            [self._sources, self._sources],
            moved=lambda nbytes: sharing.report(Moved(nbytes)),
            check=sharing.check,
        )
        self.close = self._checker.close

    def do(self, task: TensorTask) -> dict[str, Any]:
        """`wrong` elements, the `first`, how far moments `excess` their bound; `stats` by name; or why it `failed`."""
        infos = [self._tensors[name] for name in task.names]
        out: dict[str, Any] = {"wrong": 0, "first": None, "excess": 0.0, "stats": {}}
        try:
            shape = _common_shape(infos, task.compare) if task.compare else infos[0].shape
            stats = [Stats(info, number) for number, info in enumerate(infos)] if task.values else []
            questions: list[Question] = [*stats]
            if task.compare == "possible":
                moments = PossibleMoments(self._bound)
                questions.append(moments)
            elif task.compare:
                rounds = RoundsTo(infos[0], infos[1])
                questions.append(rounds)
            self._checker.ask(Together(questions), self._tiles(task.names[0], shape), *task.names)
            if task.compare == "possible":
                out |= {"wrong": moments.wrong, "excess": moments.excess}
            elif task.compare:
                out |= {"wrong": rounds.wrong, "first": rounds.first and rounds.first[0]}
            out["stats"] = {
                info.name: tensor_stats.document() for info, tensor_stats in zip(infos, stats, strict=False)
            }
        except Interrupted:
            raise
        except DistckptError as error:
            out["failed"] = str(error).replace("\n", "; ")
        return out

    def _tiles(self, name: str, shape: tuple[int, ...]) -> Iterator[Box]:
        """Tiles of a tensor along its stored pieces: each is read in few runs, however the tensor was split."""
        for chunk in self._sources.chunks(name):
            part = chunk.box.intersect(Box.whole(shape)) if shape else chunk.box
            if part is not None:
                yield from (tile.shifted(part.start) for tile in contiguous_tiles(Box.whole(part.shape), _TILE))


def _common_shape(infos: list[TensorInfo], how: str) -> tuple[int, ...]:
    """The shape that both have, but for rows that pad the vocabulary."""
    shape_a, shape_b = (info.shape for info in infos)
    if len(shape_a) != len(shape_b) or shape_a[1:] != shape_b[1:]:
        raise IntegrityError(f"{infos[0].name} is {list(shape_a)}, {infos[1].name} is {list(shape_b)}")
    if how == "equal" and infos[0].dtype != infos[1].dtype:
        raise IntegrityError(f"{infos[0].name} is {infos[0].dtype}, {infos[1].name} is {infos[1].dtype}")
    return (min(shape_a[0], shape_b[0]), *shape_a[1:]) if shape_a else shape_a


_LEAST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}


def count(on: Arithmetic, bits: Any, kind: DType) -> tuple[Any, ...]:
    """Eight numbers of a block of elements: NaN, infinite, zero, denormal; the least and the largest finite one, the
    sum of the squares of those; and whether all have the bits of the first."""
    constant = bits[0] == bits[-1] and bool((bits == bits[0]).all())
    if not kind.floating:
        return 0, 0, np.count_nonzero(bits == 0), 0, 0.0, 0.0, 0.0, constant
    values, bad = on.values(bits, kind), (np.intp(0), np.intp(0))
    low = high = values
    total, finite = squares(on, values)
    if not finite:
        is_finite = np.isfinite(values)
        bad = np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values))
        low, high = (np.where(is_finite, values, limit) for limit in (math.inf, -math.inf))
    least, zero, denormal = _LEAST_NORMAL.get(kind.name, 0.0), np.intp(0), np.intp(0)
    small = np.abs(values) < least if least else values == 0
    if small.any():
        zero = np.count_nonzero(values == 0)
        denormal = np.count_nonzero(small) - zero
    return *bad, zero, denormal, low.min(), high.max(), total, constant


class Stats:
    """The check (`Question`) that collects statistics of one tensor of a task, by its number in the task."""

    columns = 8

    def __init__(self, info: TensorInfo, number: int = 0) -> None:
        self._kind, self._number = info.dtype, number
        self._first: Any = None
        self.numel = self.nan = self.inf = self.zero = self.denormal = 0
        self.low, self.high = math.inf, -math.inf
        self.squares = 0.0
        self.constant = True

    def __call__(self, on: Arithmetic, *bits: Any) -> Sequence[Any]:
        """See `count`."""
        return count(on, bits[self._number], self._kind)

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """See `Question`."""
        bits = arrays[self._number].reshape(-1)
        if not bits.size:
            return
        self.numel += bits.size
        if self._first is None:
            self._first = bits[0].copy()
        for name, total in zip(("nan", "inf", "zero", "denormal"), rows[:, :4].sum(0).tolist(), strict=True):
            setattr(self, name, getattr(self, name) + int(total))
        # zero has a sign, of which extremes know nothing
        self.low = min(self.low, float(rows[:, 4].min()) + 0.0)
        self.high = max(self.high, float(rows[:, 5].max()) + 0.0)
        for square in rows[:, 6].tolist():
            self.squares += square
        self.constant = self.constant and bool(rows[:, 7].all() and (bits[::BLOCK] == self._first).all())

    def document(self) -> dict[str, Any]:
        """Plain data; `rms` is of the finite elements."""
        finite = self.numel - self.nan - self.inf
        floating = self._kind.floating and finite > 0
        return {
            "numel": self.numel,
            "nan": self.nan,
            "inf": self.inf,
            "zero": self.zero,
            "denormal": self.denormal,
            "constant": self.constant and self.numel > 0,
            "min": self.low if floating else None,
            "max": self.high if floating else None,
            "rms": math.sqrt(self.squares / finite) if floating else None,
        }


def judge_values(check: Check, stats: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo]) -> None:
    """Reports values that a trained model cannot have, or seldom has.

    Never in a trained model: NaN, Inf; a negative second moment; weights of which more than 1 % are denormal; a matrix that
    is zero or constant while the same matrix of other layers is not; an embedding that is; a matrix 1,000 times as large
    as its siblings, or as small; a page of zeros or more in a matrix of which several siblings have none. Worth a look: a
    matrix that is zero in all layers, unless all second factors of LoRA are, which begin as zeros (Megatron-Bridge,
    peft/lora.py, `lora_B_init_method`); a weight whose root mean square is 10 times that of its siblings, or a tenth of it.

    Args:
        check: Where it is noted.
        stats: What `Stats` says of each tensor.
        tensors: The tensors.
    """
    siblings = _siblings(stats, tensors)
    untrained = all(s["zero"] == s["numel"] for name, s in stats.items() if name.endswith(_SECOND_FACTOR))
    for name, tensor_stats in stats.items():
        info = tensors[name]
        if untrained and name.endswith(_SECOND_FACTOR):
            continue
        if not info.dtype.floating or not tensor_stats["numel"]:
            continue
        shown, numel = printable(name), tensor_stats["numel"]
        for kind, word in (("nan", "NaN"), ("inf", "infinite")):
            if tensor_stats[kind]:
                check.error(
                    f"{shown}: {tensor_stats[kind]:,} of {numel:,} elements are {word}",
                    tensors=(name,),
                    needed="finite numbers",
                    found=f"{tensor_stats[kind]} {word}",
                )
        if name.startswith(str(StateName("exp_avg_sq", ""))) and (tensor_stats["min"] or 0) < 0:
            text = f"{shown}: a second moment cannot be negative, the smallest is {tensor_stats['min']:.3g}"
            check.error(text, tensors=(name,), needed=">= 0", found=f"{tensor_stats['min']:.3g}")
        if info.kind == "weight":
            _judge_weight(check, name, info, tensor_stats, siblings[name])
    for name, group in siblings.items():
        zeros, numel = stats[name]["zero"], stats[name]["numel"]
        if len(tensors[name].shape) < 2 or not tensors[name].dtype.floating or not _PAGE <= zeros < numel:
            continue
        if sum(not sibling["zero"] for sibling in group) >= _FEWEST:
            text = f"{printable(name)}: {zeros:,} of {numel:,} elements are zero, no other element is"
            check.error(f"{text}: an unwritten page looks like this", tensors=(name,), needed="0", found=f"{zeros}")


def _siblings(
    stats: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo]
) -> dict[str, list[Mapping[str, Any]]]:
    """For each weight, what is known of the same weight in other layers and experts."""
    # one list for all of a group: what is asked of it is a median, which one member does not change
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    siblings = {name: groups[numberless(name)] for name in stats if tensors[name].kind == "weight"}
    for name, group in siblings.items():
        group.append(stats[name])
    return siblings


def _judge_weight(
    check: Check,
    name: str,
    info: TensorInfo,
    stats: Mapping[str, Any],
    siblings: list[Mapping[str, Any]],
) -> None:
    shown, nonzero = printable(name), stats["numel"] - stats["zero"]
    denormal_share = stats["denormal"] / stats["numel"]
    if denormal_share > MOST_DENORMAL:
        least = _LEAST_NORMAL[info.dtype.name]
        text = f"{shown}: {100 * denormal_share:.0f} % of its elements are denormal (below {least:.2g})"
        note = check.warn if info.dtype.name == "float16" else check.error  # fp16 begins to be denormal at 6e-5
        note(f"{text}: uninitialized memory looks like this", tensors=(name,))
        return
    if stats["constant"] and stats["numel"] > 1:
        _judge_constant(check, name, info, stats, siblings)
    elif nonzero and len(siblings) >= _FEWEST:
        sizes = [s["rms"] for s in siblings if s["rms"] is not None]
        middle = statistics.median(sizes) if sizes else 0.0
        ratio = stats["rms"] / middle if middle and stats["rms"] is not None else 1.0
        if ratio >= UNUSUAL_RATIO or ratio <= 1 / UNUSUAL_RATIO:
            far = len(info.shape) > 1 and (ratio >= IMPOSSIBLE_RATIO or ratio <= 1 / IMPOSSIBLE_RATIO)
            text = (
                f"{shown}: its root mean square is {stats['rms']:.3g}, that of the same weight elsewhere {middle:.3g}"
            )
            (check.error if far else check.warn)(
                text, tensors=(name,), needed=f"{middle:.3g}", found=f"{stats['rms']:.3g}"
            )


def _judge_constant(
    check: Check, name: str, info: TensorInfo, stats: Mapping[str, Any], siblings: list[Mapping[str, Any]]
) -> None:
    value = "zero" if stats["zero"] == stats["numel"] else f"{stats['min']:.6g}"
    others = [s for s in siblings if s is not stats]
    varied = any(not s["constant"] for s in others)
    text = f"{printable(name)}: all {stats['numel']:,} elements are {value}"
    if len(info.shape) < 2:  # norms begin as ones, biases as zeros
        if varied and len(others) >= _FEWEST:
            check.warn(f"{text}, those of other layers are not", tensors=(name,))
    elif varied:
        check.error(f"{text}, those of other layers are not", tensors=(name,))
    elif name.endswith(_VOCABULARY):
        check.error(text, tensors=(name,))
    else:  # what begins as zeros may still be: the last projection of an adapter, a head that is not trained
        check.warn(text + (", in every layer" if others else ""), tensors=(name,))


def value_tasks(
    tensors: Mapping[str, TensorInfo],
    pairs: Mapping[str, tuple[str, str]],
    *,
    values: bool,
    first: int,
    read: Collection[str] = (),
) -> Iterator[TensorTask]:
    """The tasks: a comparison for each pair, then statistics of each tensor that is in no pair.

    Args:
        tensors: All tensors.
        pairs: Tensor -> (how, tensor) that it is compared with.
        values: Whether values are looked at.
        first: Number of the first task.
        read: Tensors that are read also if values are not looked at: reading shows whether they are what they should be.
    """
    number, paired = first, set[str]()
    for name, (how, reference) in pairs.items():
        nbytes = tensors[name].nbytes + tensors[reference].nbytes
        yield TensorTask(number, (name, reference), how, values and how == "rounded", nbytes)
        paired |= {name, reference} if how == "rounded" else set()
        number += 1
    for name, info in tensors.items():
        if not values and name not in read:
            continue
        if name not in paired and info.dtype.itemsize in UNSIGNED and info.dtype.itemsize < 16 and info.kind != "copy":
            yield TensorTask(number, (name,), "", values, info.nbytes)
            number += 1
