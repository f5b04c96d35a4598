"""Plans checks of tensors and judges their results: copies are equal, masters round to weights, values are plausible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, IntegrityError, RequestError, UnsupportedError
from converters.names import MASTER, StateName, folded, listed, parameter_of, printable, state_names
from converters.optimizer.state import optimizer_state
from converters.verification.moments import judge_moments, moment_bound, moment_pairs
from converters.verification.structure import is_tied
from converters.verification.values import TensorTask, judge_values, value_tasks
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader
    from converters.verification.report import Check, Report

SAVE = "distckpt reshard CKPT OUT --optimizer none keeps the weights"
_CHECKS = {"equal": "copies", "rounded": "optimizer", "": "values"}


class TensorChecks:
    """Which tensors are compared with which, and what the results mean.

    Args:
        reader: The checkpoint.
        report: Takes the findings, also those that planning makes.

    Attributes:
        tensors: Everything that may be looked at, by name.
        pairs: Tensor -> (kind of `TensorTask.compare`, tensor that it is compared with).
        named: The checkpoint's tensors, flat buckets under the names of their parameters.
        tasks: What `plan` made.
        moment_bound: What limits the moments of Adam; None if nothing is known to.
    """

    def __init__(self, reader: Reader, report: Report) -> None:
        self._reader, self._catalog, self._report = reader, reader.catalog, report
        self.tensors: dict[str, TensorInfo] = {}
        self.pairs: dict[str, tuple[str, str]] = {}
        # what of a flat bucket belongs to no parameter was never written to: nothing looks at a bucket as it is stored
        self.named: Mapping[str, TensorInfo] = {
            name: info for name, info in self._catalog.tensors.items() if not (info.opaque and info.kind == "optimizer")
        }
        self.tasks: list[TensorTask] = []
        self.moment_bound: float | None = None
        self._stored_names: dict[str, str] = {}  # states under the names that they are stored under
        self._remainder_masters: dict[str, TensorInfo] = {}  # master weights that are stored as remainders

    def plan(self, first: int, *, values: bool) -> None:
        """Decides what is compared with what.

        Args:
            first: Number of the first task.
            values: Whether all values are looked at, too.
        """
        self.tensors = dict(self.named)
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
        self.moment_bound = moment_bound(self._catalog) if values else None
        if self.moment_bound is not None:
            states = {n: self.named[n] for n, at in state_names(self.named) if at.state.startswith("exp_avg")}
            self.tensors.update(states)
            self.pairs |= {name: ("possible", second) for name, second in moment_pairs(states).items()}
        masters = self._remainder_masters.items()
        read = {name for name, info in masters if info.remainders and info.remainders.dtype.floating}
        self.tasks = list(value_tasks(self.tensors, self.pairs, values=values, first=first, read=read))

    def _pair_masters(self) -> None:
        check, catalog = self._report.check("optimizer"), self._catalog
        try:
            state = optimizer_state(self._reader)
        except (RequestError, UnsupportedError) as error:  # no known optimizer, or no known order of parameters
            check.skip(f"not understood: {printable(error.message)}")
            check.leave(f"the optimizer state is not understood: {printable(error.message)}")
            return
        except (IntegrityError, FormatError) as error:
            check.error(printable(error.message), tensors=(error.tensor,) if error.tensor else (), hint=SAVE)
            for text in error.details[:12]:
                check.error(printable(text))
            return
        unreplaced = {name: info for name, info in catalog.tensors.items() if name not in state.replaced}
        for older in ("fp32_param", "master_param"):
            for name, parts in state_names(state.tensors):
                stored = str(StateName(older, parts.parameter))
                parts_stored = unreplaced[stored].parts if parts.state == MASTER and stored in unreplaced else None
                if parts_stored == state.tensors[name].parts:
                    self._stored_names[name] = stored
        named = {name: info for name, info in state.tensors.items() if name not in self._stored_names}
        self.named = {**unreplaced, **named}
        self.tensors.update(self.named)
        for name, (kind, parameter) in state_names(state.tensors):
            info, weight = state.tensors[name], catalog.weights.get(parameter) if kind == MASTER else None
            if weight is None or info.parts == weight.parts:
                continue
            if info.remainders is None:
                self.pairs[name] = ("rounded", parameter)
            else:
                self._remainder_masters[name] = info
        self.tensors |= {name: info for name, info in state.tensors.items() if name in self.pairs}
        self._explain_no_masters(check, state.tensors)

    def _explain_no_masters(self, check: Check, states: Mapping[str, TensorInfo]) -> None:
        """Reports why no master weights are compared, if none are."""
        if any(how == "rounded" for how, _ in self.pairs.values()):
            return
        if self._remainder_masters:
            masters = counted(len(self._remainder_masters), "master weight")
            check.skip(f"not checked: {masters} kept as remainders of the weights, any value of which is plausible")
        else:
            why = "no master weights" if states else "no optimizer state"
            check.skip(f"the checkpoint has {why}: nothing to compare the weights with")

    def conclude(self, results: Mapping[int, Any], *, values: bool) -> None:
        """Reports differences and impossible values.

        Args:
            results: What the workers returned, by the numbers of the tasks.
            values: As given to `plan`.
        """
        moment_tasks = [task for task in self.tasks if task.compare == "possible"]
        other_tasks = [task for task in self.tasks if task.compare != "possible"]
        self._conclude_pairs(other_tasks, results)
        if not values:
            return
        stats: dict[str, Any] = {}
        for task in other_tasks:
            stats |= results[task.number]["stats"]
        check = self._report.check("values")
        judge_values(check, stats, self.tensors)
        moments = {parameter_of(task.names[0]): results[task.number] for task in moment_tasks}
        optimizer = self._report.check("optimizer")
        judge_moments(optimizer, moments, self.tensors)
        if moments:
            optimizer.summary += f"; {counted(len(moments), 'first moment', verb='is/are')} possible beside the second"
        numel = sum(s["numel"] for s in stats.values())
        check.summary = f"{counted(numel, 'element')} of {counted(len(stats), 'tensor')}: "
        check.summary += "no NaN, no Inf, none empty or out of proportion"

    def _conclude_pairs(self, tasks: Iterable[TensorTask], results: Mapping[int, Any]) -> None:
        failed: dict[str, list[tuple[str, str]]] = {}
        differing: list[tuple[TensorTask, Mapping[str, Any]]] = []
        copies, masters = 0, dict[str, str]()  # how each parameter's master weight compares: "right", "wrong", "unread"
        wrong = list[str]()
        for task in tasks:
            result, name, parameter = results[task.number], task.names[0], task.names[-1]
            copies += task.compare == "equal"
            if "failed" in result:
                how = "rounded" if name in self._remainder_masters else task.compare
                failed.setdefault(how, []).append((name, result["failed"]))
            elif result["wrong"]:
                differing.append((task, result))
            if task.compare == "rounded":
                masters[parameter] = "unread" if "failed" in result else "wrong" if result["wrong"] else "right"
                wrong += [self._stored_names.get(name, name)] if result["wrong"] else []
        for how, failures in failed.items():
            names = [self._stored_names.get(name, name) for name, _ in failures]
            text = f"{counted(len(failures), 'tensor')} cannot be read: {listed(folded(names), 3)}; "
            text += printable(failures[0][1])
            hint = SAVE if how == "rounded" else None
            self._report.check(_CHECKS[how]).error(text, tensors=tuple(names), hint=hint)
        if copies:
            self._report.check("copies").summary = (
                "1 copy equals its original" if copies == 1 else f"{copies:,} copies equal their originals"
            )
        if masters:
            self._conclude_masters(masters, wrong)
        for task, result in differing:
            self._report_difference(task, result)

    def _report_difference(self, task: TensorTask, result: Mapping[str, Any]) -> None:
        name, reference = task.names
        verb = "differ from" if task.compare == "equal" else "do not round to"
        share = f"{result['wrong']:,} of {math.prod(self.tensors[name].shape):,} elements, first at {result['first']}"
        text = f"{printable(name)}: {share}, {verb} {printable(reference)}"
        concerned = reference if task.compare == "equal" else self._stored_names.get(name, name)
        self._report.check(_CHECKS[task.compare]).error(text, tensors=(concerned,))

    def _conclude_masters(self, masters: Mapping[str, str], wrong: Sequence[str]) -> None:
        check = self._report.check("optimizer")
        right = [name for name, answer in masters.items() if answer == "right"]
        verb = "rounds to the weight beside it" if len(right) == 1 else "round to the weights beside them"
        check.summary = f"{counted(len(right), 'master weight')} {verb}"
        if len(right) == len(masters):
            return
        if wrong:
            text = f"{len(wrong):,} of {counted(len(masters), 'master weight')} "
            text += f"{'does' if len(wrong) == 1 else 'do'} not round to the weights beside them"
            if self._catalog.content.get("distrib_optim_sharding_type") == "fully_reshardable":
                text += "; Megatron-Core 0.15.0 to 0.19.0 saved optimizer state shifted when there were several buckets"
            check.error(text, tensors=tuple(wrong), hint=SAVE)
        touched = self._report.damaged(self._catalog.weights)
        weights = f"all weights but {touched:,}" if touched else "all weights"
        shown = ", ".join(folded(right)[:4])
        state = f"the optimizer state of {len(right):,} of {counted(len(masters), 'parameter')}"
        check.warn(f"what can be saved: {weights}; {state}" + (f": {shown}" if shown else ""), hint=SAVE)


# by the names of Megatron's models and of Hugging Face's: the embedding, and the output layer that may be the same
_TIED = (
    ("embedding.word_embeddings.weight", "output_layer.weight"),
    ("model.embed_tokens.weight", "lm_head.weight"),
    ("transformer.wte.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
)
