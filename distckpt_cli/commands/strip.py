"""`distckpt strip`: a checkpoint without the state of training."""

from __future__ import annotations

from distckpt_cli.options import Ckpt, spread
from distckpt_cli.writing import Target, Writing, carry_out


@spread
def strip(src: Ckpt, dst: Target, writing: Writing) -> int:
    """Copy a checkpoint without optimizer, random states and the state of the rerun machine; format and layout stay.

    Every weight and every extra state keeps its bits. The result is a training root for torch_dist and legacy checkpoints;
    start a job from it with the flags that are printed: --no-load-optim, and of a legacy checkpoint --no-load-rng. An
    interrupted run continues when the same command is given again.

        $ distckpt strip ckpt/iter_0050000 small
        $ distckpt strip ckpt small --dry-run
    """
    return carry_out("distckpt.strip/1", src, dst, writing, {})
