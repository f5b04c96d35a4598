"""`distckpt reshard`: a checkpoint as a job at another layout would have written it, optimizer state included."""

from __future__ import annotations

from distckpt_cli.choices import check_choice
from distckpt_cli.options import Ckpt, options_set, spread
from distckpt_cli.targets import Carried, TargetLayout  # noqa: TC001
from distckpt_cli.writing import Target, Writing, carry_out


@spread
def reshard(src: Ckpt, dst: Target, target: TargetLayout, carried: Carried, writing: Writing) -> int:
    """Write a checkpoint for another layout: weights, optimizer, scheduler, arguments.

    The result is a training root that Megatron-Core loads at the given layout; sizes not given stay the source's. It
    needs no GPU, no Megatron and no launch script. An interrupted run continues when the same command is given again;
    DST appears only when it is complete.

        $ distckpt reshard ckpt/iter_0050000 out --tp 2 --pp 2
        $ distckpt reshard ckpt out --tp 4 --pp 4 --vpp 2 --dp 8 --fully-parallel
        $ distckpt reshard ckpt out --tp 2 --ep 8 --optimizer none --dry-run
    """
    from converters.write.reshard_state import ReshardOptions

    check_choice("--optimizer", carried.optimizer, ReshardOptions.CHOICES["optimizer"])
    return carry_out("distckpt.reshard/1", src, dst, writing, options_set(carried), layout=options_set(target))
