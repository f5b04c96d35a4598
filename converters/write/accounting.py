"""The report of what became of every tensor, shared by export and import."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from converters.megatron.identity import is_buffer
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from converters.planning.plan import Copy, Drop, Target


class Accounting:
    """Origins of target tensors, and the fate of source tensors.

    Args:
        targets: Target tensors by name.
        copies: Which elements of which source tensor each consists of.
        drops: What is left out of the source, and why.
        changes: What a copy changes beside its place, in words.

    Attributes:
        used: Source tensors that are used.
        parameters: Elements of the targets that are parameters, no buffers.
        dropped: For the report: tensor, elements and reason of each drop.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        copies: Iterable[Copy],
        drops: Iterable[Drop],
        changes: Callable[[Copy], Iterable[str]],
    ) -> None:
        self._sources: dict[str, dict[str, None]] = defaultdict(dict)
        self._changes: dict[str, set[str]] = defaultdict(set)
        self.used: set[str] = set()
        for copy in copies:
            self.used.add(copy.source)
            self._sources[copy.target][copy.source] = None
            self._changes[copy.target].update(() if copy.op is Op.COPY else (copy.op.value,), changes(copy))
        self.parameters = sum(t.nbytes // t.dtype.itemsize for name, t in targets.items() if not is_buffer(name))
        self.dropped = [{"tensor": d.source, "elements": str(d.box or "all"), "reason": d.reason} for d in drops]

    def origin(self, name: str) -> dict[str, Any]:
        """Where a target tensor comes from, and what happens to its elements on the way."""
        changes = self._changes[name]
        return {"from": list(self._sources[name]), **({"ops": sorted(changes)} if changes else {})}
