"""The result of `diff`: for each pair of tensors, and for the whole checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.names import listed_lines, printable
from converters.words import counted

if TYPE_CHECKING:
    from converters.comparison.compare import DiffPlan
    from converters.comparison.pairs import Pair
    from converters.comparison.values import Difference
    from converters.dtypes import DType

_SHOWN = 4


@dataclass(frozen=True)
class TensorReport:
    """One pair of tensors.

    Attributes:
        pair: The two sides, matched by name.
        types: Element types in A; those in B.
        values: What was found; None if values were not looked at.
        padding: The same for rows beyond the vocabulary; never counts.
        tolerant: Values count, not bits and types.
    """

    pair: Pair
    types: tuple[tuple[DType, ...], tuple[DType, ...]]
    values: Difference | None
    padding: Difference | None
    tolerant: bool

    @property
    def name(self) -> str:
        """As it is shown."""
        return self.pair.name

    @property
    def same_type(self) -> bool:
        """Whether the elements are of one type on both sides."""
        return len({*self.types[0], *self.types[1]}) == 1

    @property
    def differs(self) -> bool:
        """Whether it makes the two checkpoints different."""
        return (self.values is not None and self.values.differing > 0) or (not self.same_type and not self.tolerant)

    @property
    def status(self) -> str:
        """One word: "identical", "tolerated", "type", "different", or "unread"."""
        if self.values is not None and self.values.differing:
            return "different"
        if self.differs:
            return "type"
        return "unread" if self.values is None else "tolerated" if self.values.unequal else "identical"


@dataclass(frozen=True)
class DiffReport:
    """The result of `diff`; its repr has a summary line and the first tensors that differ.

    Attributes:
        plan: What was compared.
        tensors: Every pair, in order; on ranks other than the leading one with what this rank has seen.
        identical: Whether nothing that counts differs; the same on all ranks.
        bytes_read: Bytes read of A, and of B.
        records_checked: Records whose checksum was compared.
        seconds: Wall time.
    """

    plan: DiffPlan
    tensors: tuple[TensorReport, ...]
    identical: bool
    bytes_read: tuple[int, int] = (0, 0)
    records_checked: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        differing = self.differing
        a, b = (printable(str(side.catalog.path)) for side in self.plan.sides)
        outcome = (
            f"differ: {self.verdict}"
            if not self.identical
            else f"are identical: {counted(len(self.tensors), 'tensor')}"
        )
        lines = [f"A {a} and B {b} {outcome}{'; values were not compared' * self.plan.options.quick}"]
        shown = listed_lines([f"{tensor.name}: {tensor.status}" for tensor in differing], _SHOWN)
        return "\n".join([*lines, *shown])

    __repr__ = __str__

    def document(self, *, every: bool = False) -> dict[str, Any]:
        """Everything as plain data, as `--json` prints it.

        Args:
            every: List identical tensors, too.
        """
        from converters.comparison.document import document

        return document(self, every=every)

    def to_json(self) -> str:
        """`document` as JSON."""
        return json.dumps(self.document(), indent=2, default=str)

    def _repr_html_(self) -> str:
        """The answer in a notebook."""
        from converters.overview.notebook import lines_as_html

        return lines_as_html(str(self).splitlines(), good=self.identical)

    @property
    def verdict(self) -> str:
        """How much differs, in one line; empty if nothing does."""
        matching, plan = self.plan.matching, self.plan
        typed = sum(tensor.status == "type" for tensor in self.tensors)
        only = sum(map(len, matching.only))
        facts = sum(fact.counts for fact in plan.facts.differing)
        arguments = sum(fact.counts for fact in plan.arguments) + len(matching.config)
        parts = [
            _several(len(self.differing) - typed, "tensor"),
            f"the type of {_several(typed, 'tensor')}" if typed else "",
            _several(len(matching.shapes), "shape"),
            f"{only:,} only on one side" if only else "",
            _several(arguments, "argument"),
            _several(facts, "entry", "entries") + " of the state" if facts else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def differing(self) -> tuple[TensorReport, ...]:
        """The tensors of both that make them different."""
        return tuple(tensor for tensor in self.tensors if tensor.differs)


def _several(number: int, noun: str, plural: str = "") -> str:
    return counted(number, noun, plural) if number else ""
