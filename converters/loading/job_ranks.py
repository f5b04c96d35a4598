"""The processes of a job over torch.distributed: they agree, put small things together, and one failure is everybody's.

with job(timeout=600, stop=stop) as ranks:      # torch.distributed's group, or one made from the environment
    answer = ranks.together(step)               # does something on every rank; raises on all if there was an error on any
    rows = ranks.collected(mine)                # on rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

from converters.errors import DistckptError, Interrupted, RequestError, from_json
from converters.execute.ranks import Ranks, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from converters.events import StopFlag

__all__ = ["Elsewhere", "JobRanks", "job", "lost", "refuse_differences"]

_Any = TypeVar("_Any")
_SHOWN = 8
_PATIENCE = 5.0  # seconds that a stopped rank waits for an answer: others read their part of a round in less


@contextlib.contextmanager
def job(timeout: float, stop: StopFlag | None = None) -> Iterator[JobRanks]:
    """The ranks that were started together. A process group that is made here is destroyed at the end.

    Args:
        timeout: Seconds after which a rank that does not answer counts as lost.
        stop: Polled while waiting for others.

    Raises:
        RequestError: torch.distributed cannot be started from the environment.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    own_group = not dist.is_initialized()
    if own_group:
        started = Ranks.from_environment()
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise RequestError(
                f"{started.world} ranks were started, but {' and '.join(missing)} do not say where they meet",
                hint="start them with torchrun, set the two for srun, or load with broadcast=False, each rank for itself",
            )
        limit = datetime.timedelta(seconds=timeout)
        # a name of its own for each load: a rank may begin the next one while others still leave this one
        store = PrefixStore(f"distckpt/{next(_loads)}", _meeting_point(started.rank, started.world, limit))
        with lost():
            dist.init_process_group("gloo", store=store, rank=started.rank, world_size=started.world, timeout=limit)
    ranks = None
    try:
        ranks = JobRanks(timeout, stop)
        yield ranks
    finally:
        if ranks is not None:
            ranks.close()
        if own_group and (ranks is None or not ranks.left):
            dist.destroy_process_group()


_loads = itertools.count()


@functools.lru_cache(maxsize=1)
def _meeting_point(rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """The store at MASTER_ADDR: torchrun's own, or rank 0 opens it; kept, as a port is not opened twice in a hurry."""
    from torch.distributed.rendezvous import rendezvous

    with lost():
        return next(rendezvous("env://", rank, world, timeout=timeout))[0]


class JobRanks:
    """The ranks of the job, over groups of its own: what the caller does with its groups is not disturbed.

    Attributes:
        rank: Number of this process.
        world: How many there are.
        local: Number of this process on its machine.
        left: This rank was stopped while it waited for others: it asks them nothing any more.
    """

    def __init__(self, timeout: float, stop: StopFlag | None = None) -> None:
        import torch.distributed as dist

        self.rank, self.world, self._timeout, self._stop = dist.get_rank(), dist.get_world_size(), timeout, stop
        self.left = False
        self._groups: list[Any] = []
        self._all = self.group(range(self.world), "gloo")
        hosts = self.gathered(socket.gethostname())
        self.local = hosts[: self.rank].count(hosts[self.rank])

    def group(self, members: Sequence[int], backend: str) -> Any:
        """A process group; every rank calls this, member or not, for the same groups in the same order."""
        import torch.distributed as dist

        # not use_local_synchronization: the name it makes (torch 2.13) differs on ranks that are in more groups than others
        limit = datetime.timedelta(seconds=self._timeout)
        with lost():
            group = dist.new_group(list(members), timeout=limit, backend=backend)
        if self.rank in members:
            self._groups.append(group)
        return group

    def all_true(self, value: bool, group: Any) -> bool:
        """Whether all members of a gloo group give True; waits for them, and not much longer once it is to stop.

        Raises:
            DistckptError: One of them has ended.
            Interrupted: This rank was stopped, and they do not answer.
        """
        import torch
        import torch.distributed as dist

        if self.left:
            return False
        false = torch.tensor([0 if value else 1], dtype=torch.int32)
        deadline, pause = None, 1e-4
        with lost():
            work = dist.all_reduce(false, dist.ReduceOp.MAX, group=group, async_op=True)
            while not work.is_completed():
                if self._stop is not None and self._stop.is_set():
                    deadline = deadline or time.monotonic() + _PATIENCE
                    if time.monotonic() > deadline:
                        self.left = True
                        raise Interrupted(self._stop.signum or 2, "stopped while other ranks did not answer")
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            work.wait()
        return not false.item()

    def gathered(self, value: _Any) -> list[_Any]:
        """What every rank gives, on every rank; small."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.world
        with lost():
            dist.all_gather_object(out, value, group=self._all)
        return out

    def collected(self, value: _Any) -> list[_Any]:
        """What every rank gives, on rank 0; an empty list elsewhere."""
        import torch.distributed as dist

        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        with lost():
            dist.gather_object(value, out, dst=0, group=self._all)
        return out or []

    def told(self, value: _Any) -> _Any:
        """What rank 0 gives, on every rank."""
        import torch.distributed as dist

        box: list[Any] = [value]
        with lost():
            dist.broadcast_object_list(box, src=0, group=self._all)
        heard: _Any = box[0]
        return heard

    def together(self, step: Callable[[], _Any]) -> _Any:
        """Does something that may fail, on all ranks; if one fails, all do: see `agree`."""
        error: Exception | None = None
        try:
            answer = step()
        except Exception as failure:  # noqa: BLE001 - raised again below, here and on all ranks
            error = failure
        self.agree(error)
        return answer  # where there was a failure, `agree` has raised

    def agree(self, error: BaseException | None) -> None:
        """Raises on every rank if there was an error on any: the own one where there was one, else that of the first.

        Args:
            error: What went wrong here.

        Raises:
            BaseException: See above; of another rank's the message, and of the library's own errors all of it.
        """
        if self.left and error is not None:
            raise error
        own = None
        if error is not None and not isinstance(error, Elsewhere):
            ours = error if isinstance(error, DistckptError) else DistckptError(f"{type(error).__name__}: {error}")
            own = ours.to_json()
        documents = self.gathered(own)
        for rank, document in enumerate(documents):
            if own is None and document is not None:
                raise from_json(document, f"rank {rank} failed: ")
        if error is not None:
            raise error

    def close(self) -> None:
        """Destroys the groups, but for those in which this rank's call was never answered: that would wait for it."""
        import torch.distributed as dist

        for group in [] if self.left else self._groups:
            with contextlib.suppress(Exception):  # one of its members may be gone
                dist.destroy_process_group(group)


class Elsewhere(DistckptError):
    """Another rank has failed, and will say why."""


def refuse_differences(requests: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Compares what each rank was asked for.

    Args:
        requests: For each rank, by name: what is compared, and how it is shown.

    Raises:
        RequestError: Not all of it is the same; in a few lines, however many ranks there are.
    """
    details, differing = [], []
    for name in requests[0]:
        ranks_by_answer: dict[str, list[int]] = {}
        for rank, answers in enumerate(requests):
            ranks_by_answer.setdefault(answers[name][0], []).append(rank)
        if len(ranks_by_answer) > 1:
            differing.append(name)
            for ranks in list(ranks_by_answer.values())[:_SHOWN]:
                scattered = len(ranks) > _SHOWN and ranks[-1] - ranks[0] >= len(ranks)
                who = f"{len(ranks)} ranks, the first of them {ranks[0]}" if scattered else listed(ranks)
                details.append(f"{who}: {requests[ranks[0]][name][1]}")
            if len(ranks_by_answer) > _SHOWN:
                details.append(f"and {len(ranks_by_answer) - _SHOWN} more")
    if differing:
        raise RequestError(
            f"the ranks of this job do not load the same: {', '.join(differing)} differ{'s' * (len(differing) == 1)}",
            details=details,
            hint="copies of a checkpoint count as the same if their files have the same times (cp -p, rsync -t)"
            if differing == ["checkpoint"]
            else "call load with the same arguments on all ranks",
        )


@contextlib.contextmanager
def lost() -> Iterator[None]:
    """What torch.distributed raises, in one sentence: that a rank has gone, where it says so.

    Raises:
        DistckptError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:  # DistBackendError, and gloo's own
        details = [(str(error).splitlines() or [""])[0][:300]]
        if _GONE.search(str(error)):
            text, hint = (
                "another rank of the job has ended or does not answer",
                "its own output says why; start all ranks again",
            )
            raise DistckptError(text, details=details, hint=hint) from error
        raise DistckptError("torch.distributed failed", details=details) from error


_GONE = re.compile(
    r"clos\w+ by (?:peer|remote)|connection|broken pipe|tim(?:ed? ?|e)out|remote process|remote rank|peer",
    re.IGNORECASE,
)
"""In what gloo, NCCL and the store say of a rank that has ended or is silent."""
