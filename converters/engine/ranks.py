"""Who takes part in a run of several processes, and who does which part of the work.

torchrun and srun start the same command many times and tell each process its number through the environment. Here is what
is made of that, without torch and without a network: locks on files say which processes live.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import DestinationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from converters.planning.job import Task

__all__ = ["Ranks", "claim", "dismiss_earlier", "is_held", "listed", "shares", "spans"]

_TIMEOUT = 60.0
_PATIENCE = 10.0  # seconds that ranks of an earlier run get to notice that it is over


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
        torchrun = [_whole(env.get(name, "")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        launch = f"torchrun {env.get('TORCHELASTIC_RUN_ID', '')} {env.get('MASTER_PORT', '')}"
        found = torchrun
        if None in torchrun:
            tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
            local = env.get("SLURM_LOCALID", "0")
            found = [_whole(text) for text in (env.get("SLURM_PROCID", ""), tasks, local)]
            launch = f"srun {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
            if "SLURM_STEP_ID" not in env:
                found = [None]
        if None in found:
            return cls(timeout=timeout)
        rank, world, local_rank = (int(value or 0) for value in found)
        return cls(rank, world, local_rank, launch, timeout) if 0 <= rank < world > 1 else cls(timeout=timeout)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def shares(tasks: Sequence[Task], world: int) -> list[Sequence[Task]]:
    """Cuts a list of tasks into one contiguous range for each rank, about equal in bytes written.

    Ranges of tasks, not whole output files: the tasks follow the order of the source tensors, so that each byte of the
    source is read by one rank only, even where one file takes from many (resharding to a larger tp) or one file holds
    nearly everything. As tasks also follow the order of the output files, ranks meet in few files, and there each has
    its own byte ranges. No rank's share differs from the mean by more than one task.
    """
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


def claim(path: Path) -> tuple[int, bool] | None:
    """Locks a file until it is closed or the process ends.

    Returns:
        The open file and whether the file system has locks at all; None while another process holds it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # some NFS and Lustre mounts
        locked = False
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd, locked
    os.close(fd)  # it was tidied away before we had the lock
    return None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock that `claim` gives."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # passing trouble with a disk is not a death; a rank that is really gone falls silent
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):  # nothing was written
            os.close(fd)
    return False


def dismiss_earlier(folders: Iterable[Path]) -> None:
    """Ends what is left of earlier runs: ranks whose rank 0 is gone must not write into files that are begun anew.

    Args:
        folders: Where the ranks of earlier runs met.

    Raises:
        DestinationError: Such a rank does not end.
    """
    for folder in folders:
        for name in ("rank-0", "round"):
            (folder / name).unlink(missing_ok=True)  # whoever misses it stops
        deadline = time.monotonic() + _PATIENCE
        while living := next(_held(folder), None):
            if time.monotonic() > deadline:
                raise DestinationError(
                    f"{living.name.replace('lock-', 'rank ')} of an earlier run has not ended",
                    hint="end that process (it may be on another machine), then run the same command again",
                )
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _held(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("lock-*")) if is_held(path))
