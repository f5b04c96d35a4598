"""Tensors that are looked at one by one: copies beside their originals, master weights beside weights, all for values."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, IntegrityError, RequestError
from converters.names import fold, printable
from converters.optimizer.state import optimizer_state
from converters.verification.moments import MomentTask, judge_moments, moment_bound, moment_tasks
from converters.verification.structure import is_tied
from converters.verification.values import TensorTask, judge_values, value_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader
    from converters.verification.report import Check, Report

__all__ = ["Lookups"]

SAVE = "distckpt reshard CKPT OUT --optimizer none keeps the weights"
_MASTER = "optimizer.state.param."
_CHECKS = {"equal": "copies", "rounded": "optimizer", "": "values"}


class Lookups:
    """What is to be compared, and what is made of the results.

    Args:
        reader: The checkpoint.
        report: What is found already while this is planned goes there.

    Attributes:
        tensors: Everything that may be looked at, by name.
        pairs: Tensor -> (how, tensor) that it is compared with.
        named: The checkpoint's tensors, flat buckets under the names of their parameters.
        tasks: What `plan` made.
        bound: What limits the moments of Adam; None if nothing is known to.
    """

    def __init__(self, reader: Reader, report: Report) -> None:
        self._reader, self._catalog, self._report = reader, reader.catalog, report
        self.tensors: dict[str, TensorInfo] = dict(self._catalog.tensors)
        self.pairs: dict[str, tuple[str, str]] = {}
        self.named: Mapping[str, TensorInfo] = self._catalog.tensors
        self.tasks: list[TensorTask | MomentTask] = []
        self.bound: float | None = None
        self._shown: dict[str, str] = {}  # states under the names that they are stored under

    def plan(self, first: int, *, values: bool) -> None:
        """Decides what is compared with what.

        Args:
            first: Number of the first task.
            values: Whether all values are looked at, too.
        """
        for label, copy in self._catalog.copies.items():
            if copy.name in self._catalog.tensors:
                self.tensors[label] = replace(copy, name=label, kind="copy")
                self.pairs[label] = ("equal", copy.name)
        weights = self._catalog.weights
        both = [pair for pair in _TIED if set(pair) <= weights.keys()] if is_tied(self._catalog) else []
        for words, output in both:
            if weights[output].parts != weights[words].parts:
                self.pairs[output] = ("equal", words)
        self._pair_masters()
        self.tasks = list(value_tasks(self.tensors, self.pairs, values=values, first=first))
        self.bound = moment_bound(self._catalog) if values else None
        if self.bound is not None:
            states = {name: info for name, info in self.named.items() if name.startswith("optimizer.state.exp_avg")}
            self.tensors.update(states)
            self.tasks += moment_tasks(states, first + len(self.tasks))

    def _pair_masters(self) -> None:
        check, catalog = self._report.check("optimizer"), self._catalog
        try:
            state = optimizer_state(self._reader)
        except (IntegrityError, FormatError) as error:
            check.error(printable(error.message), tensors=(error.tensor,) if error.tensor else (), hint=SAVE)
            for text in error.details[:12]:
                check.error(printable(text))
            return
        except RequestError as error:
            check.skipped, check.summary = True, f"not understood: {printable(error.message)}"
            return
        kept = {name: info for name, info in catalog.tensors.items() if name not in state.replaced}
        for older in ("fp32_param", "master_param"):
            for name, info in state.tensors.items():
                stored = name.replace(_MASTER, f"optimizer.state.{older}.", 1)
                if stored != name and stored in kept and kept[stored].parts == info.parts:
                    self._shown[name] = stored
        self.named = {**kept, **{name: info for name, info in state.tensors.items() if name not in self._shown}}
        for name, info in state.tensors.items():
            parameter = name.removeprefix(_MASTER)
            weight = catalog.weights.get(parameter) if name.startswith(_MASTER) else None
            if weight is not None and info.parts != weight.parts:
                self.tensors[name] = info
                self.pairs[name] = ("rounded", parameter)
        if not any(how == "rounded" for how, _ in self.pairs.values()):
            check.skipped = True
            why = "no master weights" if state.tensors else "no optimizer state"
            check.summary = f"the checkpoint has {why}: nothing to compare the weights with"

    def conclude(self, results: Mapping[int, Any], *, values: bool) -> None:
        """Notes what differs, and what values cannot be.

        Args:
            results: What the workers returned, by the numbers of the tasks.
            values: As given to `plan`.
        """
        looked = [task for task in self.tasks if isinstance(task, TensorTask)]
        self._conclude_pairs(looked, results)
        if not values:
            return
        stats: dict[str, Any] = {}
        for task in looked:
            stats |= results[task.number]["stats"]
        check = self._report.check("values")
        judge_values(check, stats, self.tensors)
        _judge_zeros(check, stats, self.tensors)
        moments = {task.parameter: results[task.number] for task in self.tasks if isinstance(task, MomentTask)}
        optimizer = self._report.check("optimizer")
        judge_moments(optimizer, moments, self.tensors)
        optimizer.summary += f"; {len(moments):,} first moments are possible beside the second" if moments else ""
        numel = sum(found["numel"] for found in stats.values())
        check.summary = f"{numel:,} elements of {len(stats):,} tensors: no NaN, no Inf, none empty or out of proportion"

    def _conclude_pairs(self, tasks: Iterable[TensorTask], results: Mapping[int, Any]) -> None:
        failed: dict[str, list[tuple[str, str]]] = {}
        differing: list[tuple[TensorTask, Mapping[str, Any]]] = []
        copies, masters = 0, list[str]()
        wrong: dict[str, str] = {}  # masters, by their parameter
        for task in tasks:
            result, name, parameter = results[task.number], task.names[0], task.names[-1]
            copies += task.compare == "equal"
            if "failed" in result:
                failed.setdefault(task.compare, []).append((name, result["failed"]))
            elif result["wrong"]:
                differing.append((task, result))
            if task.compare == "rounded":
                masters.append(parameter)
                if "failed" in result or result["wrong"]:
                    wrong[parameter] = self._shown.get(name, name)
        for how, found in failed.items():
            names = [self._shown.get(name, name) for name, _ in found]
            folded = [text for text, _ in fold(names)]
            listed = ", ".join(map(printable, folded[:3])) + (f" and {len(folded) - 3} more" if len(folded) > 3 else "")
            text = f"{len(found):,} tensors cannot be read: {listed}; {printable(found[0][1])}"
            self._report.check(_CHECKS[how]).error(text, tensors=tuple(names))
        if copies:
            self._report.check("copies").summary = f"{copies:,} copies equal their originals"
        if masters:
            self._conclude_masters(masters, wrong)
        for task, result in differing:
            self._differs(task, result)

    def _differs(self, task: TensorTask, result: Mapping[str, Any]) -> None:
        name, other = task.names
        verb = "differ from" if task.compare == "equal" else "do not round to"
        share = f"{result['wrong']:,} of {math.prod(self.tensors[name].shape):,} elements, first at {result['first']}"
        text = f"{printable(name)}: {share}, {verb} {printable(other)}"
        concerned = other if task.compare == "equal" else self._shown.get(name, name)
        self._report.check(_CHECKS[task.compare]).error(text, tensors=(concerned,))

    def _conclude_masters(self, masters: list[str], wrong: Mapping[str, str]) -> None:
        check = self._report.check("optimizer")
        check.summary = f"{len(masters):,} master weights round to the weights beside them"
        right = [name for name in masters if name not in wrong]
        if len(right) == len(masters):
            return
        text = f"{len(wrong):,} of {len(masters):,} master weights do not round to the weights beside them"
        if self._catalog.content.get("distrib_optim_sharding_type") == "fully_reshardable":
            text += "; Megatron-Core 0.15.0 to 0.19.0 saved optimizer state shifted when there were several buckets"
        check.error(text, tensors=tuple(wrong.values()), hint=SAVE)
        touched = self._report.damaged(self._catalog.weights)
        weights = f"all weights but {touched:,}" if touched else "all weights"
        listed = ", ".join(text for text, _ in fold(right)[:4])
        state = f"the optimizer state of {len(right):,} of {len(masters):,} parameters"
        check.warn(f"what can be saved: {weights}; {state}" + (f": {listed}" if listed else ""), hint=SAVE)


def _judge_zeros(check: Check, stats: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo]) -> None:
    """A matrix with as many zeros as a lost page has, where the same matrix of other layers has none at all."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in stats:
        if tensors[name].kind == "weight" and len(tensors[name].shape) > 1 and tensors[name].dtype.floating:
            groups[_NUMBER.sub("*", name)].append(name)
    for names in groups.values():
        zeros = {name: stats[name]["zero"] for name in names if stats[name]["zero"]}
        if len(names) - len(zeros) < _FEWEST:
            continue
        for name, count in zeros.items():
            if _PAGE <= count < stats[name]["numel"]:
                text = f"{printable(name)}: {count:,} of {stats[name]['numel']:,} elements are zero, elsewhere none is"
                check.error(
                    f"{text}: a page that was not written looks so", tensors=(name,), needed="0", found=f"{count}"
                )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PAGE, _FEWEST = 512, 4  # elements; matrices that have no zero
# by the names of Megatron's models and of Hugging Face's: the embedding, and the output layer that may be the same
_TIED = (
    ("embedding.word_embeddings.weight", "output_layer.weight"),
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("transformer.wte.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
)
