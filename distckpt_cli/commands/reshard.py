"""`distckpt reshard`: a checkpoint as a job at another layout would have written it, optimizer state included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distckpt_cli.console import named
from distckpt_cli.options import Ckpt, check_choice, given, spread
from distckpt_cli.targets import Carried, PlanCaching, TargetLayout  # noqa: TC001
from distckpt_cli.writing import Target, Writing, carry_out

if TYPE_CHECKING:
    from converters.targets.conversion import Conversion
    from distckpt_cli.console import Console


@spread
def reshard(
    src: Ckpt, dst: Target, target: TargetLayout, carried: Carried, writing: Writing, caching: PlanCaching
) -> int:
    """Write a checkpoint for another layout: weights, optimizer, scheduler, arguments.

    The result is a training root that Megatron-Core loads at the given layout: no GPU, no Megatron and no launch script
    needed. An interrupted run continues when the same command is given again; DST appears only when it is complete.
    """
    from converters.formats import open_checkpoint
    from converters.targets.reshard import ReshardOptions, plan_reshard

    check_choice("--optimizer", carried.optimizer, ReshardOptions.OPTIMIZERS)
    layout, options = target.layout(), ReshardOptions(**given(carried), **writing.options)

    def plan(console: Console) -> Conversion:
        with caching.cache(console, keeps=not writing.dry_run) as cache:
            return plan_reshard(open_checkpoint(src), named(dst), layout, options, cache=cache)

    return carry_out("distckpt.reshard/1", writing, plan)
