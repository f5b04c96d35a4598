"""Who takes part in a run of several processes, and who does which part of the work.

torchrun and srun start the same command many times and tell each process its number through the environment. Here is what
is made of that, without torch and without a network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_TIMEOUT = 60.0


class NumberedTask(Protocol):
    """A task of a list."""

    @property
    def number(self) -> int:
        """Its place in the list."""

    @property
    def nbytes(self) -> int:
        """About how many bytes it reads or writes; what is shared out evenly."""


T = TypeVar("T", bound=NumberedTask)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that were started together.

    Attributes:
        rank: Number of this process; rank 0 leads.
        world: How many there are.
        local: Number of this process on its machine.
        launch: Tells this launch from others, the same text for all its processes.
        timeout: Seconds without a sign of life after which a rank counts as lost.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    launch: str = ""
    timeout: float = _TIMEOUT

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None, *, timeout: float = _TIMEOUT) -> Ranks:
        """What torchrun or srun says about this process; one process alone where neither started it.

        RANK and WORLD_SIZE count only beside LOCAL_RANK: cluster managers set the two for containers, too, where a
        person may type a command. srun's variables count only within a step of several tasks, not in a batch script.
        """
        env = os.environ if env is None else env
        torchrun = [_parse_number(env.get(name, "")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        launch = f"torchrun {env.get('TORCHELASTIC_RUN_ID', '')} {env.get('MASTER_PORT', '')}"
        numbers = torchrun
        if None in torchrun:
            tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
            local = env.get("SLURM_LOCALID", "0")
            numbers = [_parse_number(text) for text in (env.get("SLURM_PROCID", ""), tasks, local)]
            launch = f"srun {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
            if "SLURM_STEP_ID" not in env:
                numbers = [None]
        if None in numbers:
            return cls(timeout=timeout)
        rank, world, local_rank = (int(value or 0) for value in numbers)
        return cls(rank, world, local_rank, launch, timeout) if 0 <= rank < world > 1 else cls(timeout=timeout)


def on_one_machine(env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun or srun says that all processes of this launch are on this machine."""
    env = os.environ if env is None else env
    local = env.get("LOCAL_WORLD_SIZE", "") == env.get("WORLD_SIZE", "-")
    return local or env.get("SLURM_STEP_NUM_NODES", "") == "1"


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def shares(tasks: Sequence[T], world: int) -> list[Sequence[T]]:
    """Cuts a list of tasks into one contiguous range for each rank, about equal in bytes written.

    Ranges of tasks, not whole output files: the tasks follow the order of the source tensors, so that each byte of the
    source is read by one rank only, even where one file takes from many (resharding to a larger tp) or one file holds
    nearly everything. As tasks also follow the order of the output files, ranks meet in few files, and there each has
    its own byte ranges. No rank's share differs from the mean by more than one task.
    """
    if world == 1:  # a hundred thousand tasks need not be made to be counted
        return [tasks]
    total = max(1, sum(task.nbytes for task in tasks))
    bounds = [0] * world
    before = 0
    for task in tasks:
        # by the middle of the task; whole numbers, so that every machine finds the same
        bounds[min(world - 1, (2 * before + task.nbytes) * world // (2 * total))] += 1
        before += task.nbytes
    out, at = [], 0
    for count in bounds:
        out.append(tasks[at : at + count])
        at += count
    return out


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as `(first, one past the last)` of each run of neighbours."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] == number:
            out[-1] = (out[-1][0], number + 1)
        else:
            out.append((number, number + 1))
    return out


def listed(ranks: Iterable[int]) -> str:
    """Rank numbers as a person writes them: "rank 2", "ranks 0..3, 7"."""
    numbers = [f"{first}..{end - 1}" if end - first > 1 else str(first) for first, end in spans(ranks)]
    return f"rank{'s' if len(numbers) > 1 or '..' in numbers[0] else ''} {', '.join(numbers)}"
