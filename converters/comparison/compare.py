"""Compares two checkpoints: plans it, names, shapes, arguments, state; then compares every value.

plan = plan_diff(open_checkpoint("a"), open_checkpoint("b"), DiffOptions(rtol=1e-2))
report = run_diff(plan)
report.identical, [tensor.name for tensor in report.differing]
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Unpack

from converters.comparison.facts import Fact, Facts, compare_arguments, compare_facts
from converters.comparison.folders import comparable
from converters.comparison.pairs import Side, match
from converters.comparison.report import DiffReport, TensorReport
from converters.comparison.run import blaming, read_values, split_work, tile_size
from converters.comparison.trees import ABSENT
from converters.comparison.values import Tolerance
from converters.errors import IntegrityError, RequestError
from converters.events import Note, PlanReady
from converters.execute.work_sharing import WorkSharing
from converters.formats import open_checkpoint
from converters.formats.base import fingerprint_of
from converters.io.memory import workers_and_memory
from converters.keywords import keyword, with_keywords
from converters.megatron.damage import refuse_damage
from converters.names import any_of, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from converters.comparison.pairs import Matching, Pair
    from converters.comparison.run import WorkItem
    from converters.comparison.values import Difference
    from converters.events import Listener, StopFlag
    from converters.execute.work_sharing import SharingOptions
    from converters.formats.base import Reader


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """The options of a comparison.

    Attributes:
        rtol: Values may be apart by `atol + rtol * max(|a|, |b|)`, and of different types, if one of the two is given; else
            bits and types must be equal.
        atol: See `rtol`.
        tensors: Patterns of the tensors to be compared, and nothing else; empty for everything.
        ignore: Patterns of what is left out: tensors, `args.*`, `iteration`, `rng_state.*`, `opt_param_scheduler.*`.
        quick: Names, shapes, types and what is said about them; no values.
        vocab_size: True rows of the vocabulary; None takes the checkpoints' word.
        arch: Architecture of a Hugging Face folder beside a Megatron checkpoint, where the inferred one is wrong.
        max_memory: Bytes of buffers; None takes 64 MiB, 512 MiB where an object store is read.
        threads: Workers in this process; None takes one for each core, 4 to 8; 32 where an object store is read.
    """

    rtol: float | None = None
    atol: float | None = None
    tensors: Sequence[str] = ()
    ignore: Sequence[str] = ()
    quick: bool = False
    vocab_size: int | None = None
    arch: str | None = None
    max_memory: int | None = None
    threads: int | None = None

    @property
    def tolerance(self) -> Tolerance | None:
        """How far apart values may be; None asks for equal bits, and equal types."""
        if self.rtol is None and self.atol is None:
            return None
        return Tolerance(self.rtol or 0.0, self.atol or 0.0)


@dataclass(frozen=True)
class DiffPlan:
    """A planned comparison; no tensor has been read, but for samples that name the optimizer's buckets.

    Attributes:
        sides: A and B.
        options: What was asked.
        matching: Which elements belong together.
        arguments: Arguments that are not the same.
        facts: What else is not the same.
        notes: Sentences a person should read.
        work: What there is to read, in parts.
        tile_bytes: Bytes of a tile.
        threads: Workers that fit into the memory allowed.
        source_fingerprints: Digests of both as they were when planning began; they must be the same in the end.
    """

    sides: tuple[Side, Side]
    options: DiffOptions
    matching: Matching
    arguments: tuple[Fact, ...]
    facts: Facts
    notes: tuple[str, ...]
    work: Sequence[WorkItem]
    tile_bytes: int
    threads: int
    source_fingerprints: tuple[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that will be read, of both sides."""
        return sum(item.nbytes for item in self.work)

    @property
    def fingerprint(self) -> str:
        """Changes when anything about the work changes."""
        parts = self.source_fingerprints, self.options, self.tile_bytes, len(self.work), self.nbytes
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@with_keywords(keyword(option.name, option.default, option.type) for option in fields(DiffOptions))
def diff(
    a: str | Path,
    b: str | Path,
    *,
    follow_links: bool = False,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    **options: Any,
) -> DiffReport:
    """Compares two checkpoints of any formats and layouts, tensor by tensor in the model's own shapes.

    The process that calls this does all of it, with threads. Under torchrun, too: call it on one rank, or have ranks share
    the work with `torchrun ... -m distckpt_cli diff A B`.

    Args:
        a: The first, as for every command: a training root, an iteration, a file inside, a Hugging Face folder.
        b: The second.
        follow_links: Files of both may be links out of their folders.
        listener: Told about progress; see `converters.events`.
        stop: Polled between tiles; set it to end.
        options: See `DiffOptions`.

    Returns:
        The answer, `identical`; `differing` are the tensors, `plan.matching.only` those that one side lacks,
        `plan.arguments` and `plan.facts.differing` what else is not the same.

    Raises:
        FormatError: One of them cannot be read.
        IntegrityError: A record does not match its checksum, or a checkpoint changed while it was read.
        RequestError: One is a Hugging Face folder of a model that the other cannot be, or nothing matches the patterns.
        Interrupted: Asked to stop.
    """
    reader_a, reader_b = (open_checkpoint(path, follow_links=follow_links) for path in (a, b))
    return run_diff(plan_diff(reader_a, reader_b, DiffOptions(**options)), listener=listener, stop=stop)


def plan_diff(a: Reader, b: Reader, options: DiffOptions | None = None) -> DiffPlan:
    """Decides what belongs together, and compares everything but values.

    Args:
        a: The first checkpoint.
        b: The second.
        options: What is asked.

    Raises:
        RequestError: One is a Hugging Face folder of a model that the other one cannot be, nothing matches the patterns,
            or the memory is too small.
        FormatError: A stored object is unreadable.
    """
    options = options or DiffOptions()
    tile, threads = tile_size(*workers_and_memory(options.threads, options.max_memory, a.catalog.path, b.catalog.path))
    source_fingerprints = fingerprint_of(a), fingerprint_of(b)
    a, b, changes = comparable(a, b)
    sides = Side.both(a, b)
    wanted = any_of(options.tensors)
    unwanted = {pattern: any_of((pattern,)) for pattern in options.ignore}
    idle = set(unwanted)  # patterns that have left nothing out

    def keep(name: str) -> bool:
        matches = {pattern for pattern, matcher in unwanted.items() if matcher(name)}
        idle.difference_update(matches)
        return not matches

    matching = match(
        *sides,
        lambda name: keep(name) and (not options.tensors or wanted(name)),
        vocab_size=options.vocab_size,
        arch=options.arch,
    )
    if (options.tensors or options.ignore) and not (matching.pairs or any(matching.only) or matching.shapes):
        raise RequestError(
            f"no tensor matches {' or '.join(options.tensors)}"
            if options.tensors
            else "--ignore leaves no tensor to compare",
            hint=f"distckpt inspect {quoted(sides[matching.target_side].catalog.root)} --tensors shows their names",
        )
    notes = [*changes, *sides[0].notes, *sides[1].notes, *matching.notes]
    if not options.quick:
        _refuse_damage(sides[0], {name for pair in matching.pairs for name in pair.a})
        _refuse_damage(sides[1], {name for pair in matching.pairs for name in pair.b})
    else:
        bad = [(side, problem) for side in sides for problem in side.catalog.problems if problem.severity == "error"]
        notes += [f"{side.label} is damaged: {problem.message}" for side, problem in bad]
    arguments: list[Fact] = []
    facts = Facts()
    if not options.tensors:
        arguments = [fact for fact in compare_arguments(*sides) if keep(fact.name)]
        facts = compare_facts(*sides, keep)
        notes += facts.notes
    facts.differing += _unread(sides, keep)
    notes += [f"--ignore {pattern} leaves nothing out" for pattern in options.ignore if pattern in idle]
    work = () if options.quick else split_work(matching, sides)
    return DiffPlan(
        sides, options, matching, tuple(arguments), facts, tuple(notes), work, tile, threads, source_fingerprints
    )


def _unread(sides: tuple[Side, Side], keep: Callable[[str], bool]) -> list[Fact]:
    """Tensors that lie in the files of one side and that its index does not name: nothing says that both are the same."""
    a, b = ([(name, reason) for name, reason in side.catalog.unread.items() if keep(name)] for side in sides)
    return [
        *(Fact("object", n, reason, ABSENT) for n, reason in a),
        *(Fact("object", n, ABSENT, reason) for n, reason in b),
    ]


def _refuse_damage(side: Side, names: set[str]) -> None:
    """Refuses tensors that are known to be damaged, or that are larger than all files."""
    with blaming(side):
        refuse_damage(side.catalog, names)
        stored = sum(file.size or 0 for file in side.catalog.files)
        for name in names:
            tensor = side.tensors[name]
            if side.catalog.files and tensor.nbytes > stored:
                raise IntegrityError(
                    f"{name} should have {tensor.nbytes:,} bytes, all files have {stored:,}", tensor=name
                )


def run_diff(plan: DiffPlan, **sharing_options: Unpack[SharingOptions]) -> DiffReport:
    """Compares values.

    Args:
        plan: What to compare; with several ranks, every one of them has made the same plan.
        sharing_options: Who is told about progress, what stops it between tiles, and the ranks that do it together: see
            `WorkSharing`.

    Raises:
        IntegrityError: A record does not match its checksum, or a checkpoint changed while it was read.
        FormatError: A file cannot be read.
        Interrupted: Asked to stop.
    """
    begin = time.monotonic()
    if plan.options.quick:
        tensors = tuple(_report(plan, pair) for pair in plan.matching.pairs)
        return DiffReport(plan, tensors, _same(plan, tensors), seconds=time.monotonic() - begin)
    with WorkSharing("diff", plan.fingerprint, threads=plan.threads, **sharing_options) as sharing:
        memory = plan.threads * 6 * plan.tile_bytes
        sharing.listener(PlanReady("diff", 0, plan.nbytes, plan.nbytes, memory))
        for text in plan.notes:
            sharing.listener(Note(text))
        differences, bytes_read, records_checked = read_values(sharing, plan)
        for side, before in zip(plan.sides, plan.source_fingerprints, strict=True):
            if fingerprint_of(side.reader) != before:
                raise IntegrityError(
                    f"{side.label} changed while it was read", hint="wait until nobody writes to it, then compare again"
                )
        tensors = tuple(
            _report(plan, pair, *results) for pair, results in zip(plan.matching.pairs, differences, strict=True)
        )
        same = bool(sharing.finish(_same(plan, tensors)))
    return DiffReport(plan, tensors, same, bytes_read, records_checked, time.monotonic() - begin)


def _report(
    plan: DiffPlan, pair: Pair, values: Difference | None = None, padding: Difference | None = None
) -> TensorReport:
    a, b = (
        tuple(dict.fromkeys(side.tensors[name].dtype for name in names))
        for side, names in zip(plan.sides, (pair.a, pair.b), strict=True)
    )
    return TensorReport(pair, (a, b), values, padding, plan.options.tolerance is not None)


def _same(plan: DiffPlan, tensors: Sequence[TensorReport]) -> bool:
    matching = plan.matching
    if any(matching.only) or matching.shapes or matching.config:
        return False
    facts = (*plan.arguments, *plan.facts.differing)
    return not any(fact.counts for fact in facts) and not any(tensor.differs for tensor in tensors)
