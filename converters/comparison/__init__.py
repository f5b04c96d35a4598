"""Comparison of two checkpoints of any formats and layouts: tensors, arguments, state, every value.

from converters import diff
report = diff("ckpt/iter_0050000", "exported-hf", rtol=1e-2)
apart = {tensor.name: tensor.values.max_abs for tensor in report.differing}  # empty if report.identical
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from converters.comparison.report import DiffReport
    from converters.events import Listener, StopFlag

__all__ = ["diff"]


def diff(
    a: str | Path,
    b: str | Path,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    tensors: Iterable[str] = (),
    ignore: Iterable[str] = (),
    quick: bool = False,
    vocab_size: int | None = None,
    arch: str | None = None,
    follow_links: bool = False,
    max_memory: int | None = None,
    threads: int | None = None,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
) -> DiffReport:
    """Compares two checkpoints of any formats and layouts, tensor by tensor in the model's own shapes.

    The process that calls this does all of it, with threads. Under torchrun, too: call it on one rank, or have ranks share
    the work with `torchrun ... -m distckpt_cli diff A B`.

    Args:
        a: The first, as for every command: a training root, an iteration, a file inside, a Hugging Face folder.
        b: The second.
        rtol: Values may be apart by `atol + rtol * max(|a|, |b|)`, and of different types, if one of the two is given; else
            bits and types must be equal.
        atol: See `rtol`.
        tensors: Patterns of the tensors to be compared, and nothing else; empty for everything.
        ignore: Patterns of what is left out: tensors, `args.*`, `iteration`, `rng_state.*`, `opt_param_scheduler.*`.
        quick: Names, shapes, types and what is said about them; no values.
        vocab_size: True rows of the vocabulary; None takes the checkpoints' word.
        arch: Hugging Face architecture, where one is such a folder and the inferred one is wrong.
        follow_links: Files of both may be links out of their folders.
        max_memory: Bytes of buffers; None takes 64 MiB, 512 MiB where an object store is read.
        threads: Workers; None takes one for each core, 4 to 8; 32 where an object store is read.
        listener: Told about progress; see `converters.events`.
        stop: Polled between tiles; set it to end.

    Returns:
        The answer, `identical`; `differing` are the tensors, `plan.matching.only` those that one side lacks,
        `plan.arguments` and `plan.facts.differing` what else is not the same.

    Raises:
        FormatError: One of them cannot be read.
        IntegrityError: A record does not match its checksum, or a checkpoint changed while it was read.
        RequestError: One is a Hugging Face folder of a model that the other cannot be, or nothing matches the patterns.
        Interrupted: Asked to stop.
    """
    from converters.comparison.compare import DiffOptions, plan_diff, run_diff
    from converters.comparison.values import Tolerance
    from converters.formats import open_checkpoint

    options = DiffOptions(
        tolerance=Tolerance.of(rtol, atol),
        tensors=tuple(tensors),
        ignore=tuple(ignore),
        quick=quick,
        vocab_size=vocab_size,
        arch=arch,
        max_memory=max_memory,
        threads=threads,
    )
    plan = plan_diff(
        open_checkpoint(a, follow_links=follow_links), open_checkpoint(b, follow_links=follow_links), options
    )
    return run_diff(plan, listener=listener, stop=stop)
