"""The processes of a job over torch.distributed: they exchange small values, and one failure is everybody's.

with join_job(timeout=600, stop=stop) as ranks:     # torch.distributed's group, or one made from the environment
    answer = ranks.run_on_all(step)                 # does something on every rank; raises on all if one of them fails
    rows_by_rank = ranks.gather(rows)               # on rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

from converters.errors import DistckptError, Interrupted, RequestError, from_json
from converters.execute.ranks import Ranks, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from converters.events import StopFlag

_Any = TypeVar("_Any")
_SHOWN = 8
_PATIENCE = 5.0  # seconds that a stopped rank waits for an answer: others read their part of a round in less


@contextlib.contextmanager
def join_job(timeout: float, stop: StopFlag | None = None) -> Iterator[JobRanks]:
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
        with naming_lost_ranks():
            dist.init_process_group("gloo", store=store, rank=started.rank, world_size=started.world, timeout=limit)
    ranks = None
    try:
        ranks = JobRanks(timeout, stop)
        yield ranks
    finally:
        if ranks is not None:
            ranks.close()
        if own_group and (ranks is None or not ranks.has_left):
            dist.destroy_process_group()


_loads = itertools.count()


@functools.lru_cache(maxsize=1)
def _meeting_point(rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """The store at MASTER_ADDR: torchrun's own, or rank 0 opens it; kept, as a port is not opened twice in a hurry."""
    from torch.distributed.rendezvous import rendezvous

    with naming_lost_ranks():
        return next(rendezvous("env://", rank, world, timeout=timeout))[0]


class JobRanks:
    """The ranks of the job, over groups of its own: what the caller does with its groups is not disturbed.

    Attributes:
        rank: Number of this process.
        world: How many there are.
        local: Number of this process on its machine.
        neighbours: How many of them are on its machine.
        has_left: This rank was stopped while it waited for others: it asks them nothing any more.
    """

    def __init__(self, timeout: float, stop: StopFlag | None = None) -> None:
        import torch.distributed as dist

        self.rank, self.world, self._timeout, self._stop = dist.get_rank(), dist.get_world_size(), timeout, stop
        self.has_left = False
        self._groups: list[Any] = []
        with naming_lost_ranks():
            limit = datetime.timedelta(seconds=timeout)
            self._all = dist.new_group(list(range(self.world)), timeout=limit, backend="gloo")
        hosts = self.all_gather(socket.gethostname())
        self.local, self.neighbours = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self._key = self.broadcast(secrets.token_hex(8))

    def group(self, members: Sequence[int], backend: str) -> Any:
        """What collectives of some ranks are asked of, torch's `Backend`; made by its members alone.

        Not by `dist.new_group`: where the caller gave `init_process_group` a `device_id`, ranks that are no members split
        NCCL's communicator, which waits for the members, who do not for a group of gloo (torch 2.13,
        `_new_process_group_helper`); and its groups of NCCL end the process when a rank is lost.

        Args:
            members: Their numbers, in order, this rank's among them.
            backend: "gloo" or "nccl".
        """
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

        name = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()
        store = PrefixStore(f"distckpt/{self._key}/{backend}/{name}", _get_default_store())
        limit = datetime.timedelta(seconds=self._timeout)
        make = _nccl if backend == "nccl" else ProcessGroupGloo
        with naming_lost_ranks():
            group = make(store, list(members).index(self.rank), len(members), limit)
        self._groups.append(group)
        return group

    def wait(self, work: Any, group: Any) -> None:
        """Returns when a collective of a group is done; polls whether to stop, and then waits not much longer.

        Raises:
            DistckptError: A member has ended, or does not answer.
            Interrupted: This rank was stopped, and they do not answer.
        """
        deadline, pause = time.monotonic() + self._timeout + _PATIENCE, 1e-4  # gloo itself should have ended it before
        with naming_lost_ranks():
            while not work.is_completed():
                if self._stop is not None and self._stop.is_set():
                    deadline = min(deadline, time.monotonic() + _PATIENCE)
                if time.monotonic() > deadline:
                    self._give_up(group)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            work.wait()

    def _give_up(self, group: Any) -> None:
        """Leaves a collective that others do not come to, and asks them nothing any more."""
        self.has_left = True
        with contextlib.suppress(RuntimeError):
            group.abort()
        if self._stop is not None and self._stop.is_set():
            raise Interrupted(self._stop.signum or 2, "stopped while other ranks did not answer")
        raise DistckptError(_SILENT, hint=_LOOK)

    def all_true(self, value: bool, group: Any) -> bool:
        """Whether all members of a gloo group give True; waits as `wait` does.

        Raises:
            DistckptError: One of them has ended.
            Interrupted: This rank was stopped, and they do not answer.
        """
        import torch
        import torch.distributed as dist

        if self.has_left:
            return False
        false = torch.tensor([0 if value else 1], dtype=torch.int32)
        with naming_lost_ranks():
            work = group.allreduce([false], dist.ReduceOp.MAX)
        self.wait(work, group)
        return not false.item()

    def all_gather(self, value: _Any) -> list[_Any]:
        """What every rank gives, on every rank; small."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.world
        with naming_lost_ranks():
            dist.all_gather_object(out, value, group=self._all)
        return out

    def gather(self, value: _Any) -> list[_Any]:
        """What every rank gives, on rank 0; an empty list elsewhere."""
        import torch.distributed as dist

        out: list[Any] | None = [None] * self.world if self.rank == 0 else None
        with naming_lost_ranks():
            dist.gather_object(value, out, dst=0, group=self._all)
        return out or []

    def broadcast(self, value: _Any) -> _Any:
        """What rank 0 gives, on every rank."""
        import torch.distributed as dist

        box: list[Any] = [value]
        with naming_lost_ranks():
            dist.broadcast_object_list(box, src=0, group=self._all)
        answer: _Any = box[0]
        return answer

    def run_on_all(self, step: Callable[[], _Any]) -> _Any:
        """Does something that may fail, on all ranks; if one fails, all do: see `raise_any`."""
        error: Exception | None = None
        try:
            answer = step()
        except Exception as failure:  # noqa: BLE001 - raised again below, here and on all ranks
            error = failure
        self.raise_any(error)
        return answer  # where there was a failure, `raise_any` has raised

    def raise_any(self, error: BaseException | None) -> None:
        """Raises on every rank if there was an error on any: the own one where there was one, else that of the first.

        Args:
            error: What went wrong here.

        Raises:
            BaseException: See above; of another rank's the message, and of the library's own errors all of it.
        """
        if self.has_left and error is not None:
            raise error
        packed_error = None
        if error is not None and not isinstance(error, OtherRankFailed):
            ours = error if isinstance(error, DistckptError) else DistckptError(f"{type(error).__name__}: {error}")
            packed_error = ours.to_json()
        documents = self.all_gather(packed_error)
        for rank, document in enumerate(documents):
            if packed_error is None and document is not None:
                raise from_json(document, f"rank {rank} failed: ")
        if error is not None:
            raise error

    def close(self) -> None:
        """Gives up the groups, but for those in which this rank's call was never answered: that would wait for it."""
        import torch.distributed as dist

        if self.has_left:
            _UNANSWERED.append((self._all, *self._groups))
            return
        for group in self._groups:
            with contextlib.suppress(Exception):  # one of its members may be gone
                group.shutdown()
        self._groups.clear()
        with contextlib.suppress(Exception):
            dist.destroy_process_group(self._all)


_UNANSWERED: list[Any] = []
"""Groups that would wait, if they were given up, for ranks that do not answer."""


def _nccl(store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
    """A communicator of its own, whose trouble is an error here and not the end of the process.

    torch reads the two variables when a `ProcessGroupNCCL` is made: its watchdog ends the process by default when a
    collective fails or takes too long, and a second thread when the watchdog hangs.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    quiet = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class OtherRankFailed(DistckptError):
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
def naming_lost_ranks() -> Iterator[None]:
    """What torch.distributed raises, in one sentence: that a rank has gone, where it says so.

    Raises:
        DistckptError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:  # DistBackendError, and gloo's own
        details = [(str(error).splitlines() or [""])[0][:300]]
        if _GONE.search(str(error)):
            raise DistckptError(_SILENT, details=details, hint=_LOOK) from error
        raise DistckptError("torch.distributed failed", details=details) from error


_SILENT, _LOOK = (
    "another rank of the job has ended or does not answer",
    "its own output says why; start all ranks again",
)
_GONE = re.compile(
    r"clos\w+ by (?:peer|remote)|connection|broken pipe|tim(?:ed? ?|e)out|remote process|remote rank|peer",
    re.IGNORECASE,
)
"""In what gloo, NCCL and the store say of a rank that has ended or is silent."""
