"""The processes of a job over torch.distributed: they agree, put small things together, and one failure is everybody's.

with job(timeout=600) as ranks:                 # torch.distributed's group, or one made from the environment
    ranks.agree(error)                          # raises on every rank if there was an error on any
    rows = ranks.collected(mine)                # on rank 0
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any, TypeVar

from converters import errors
from converters.engine.ranks import Ranks, listed
from converters.errors import DistckptError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Elsewhere", "JobRanks", "job", "lost", "refuse_differences"]

_Any = TypeVar("_Any")
_SHOWN = 8


@contextlib.contextmanager
def job(timeout: float) -> Iterator[JobRanks]:
    """The ranks that were started together. A process group that is made here is destroyed at the end.

    Args:
        timeout: Seconds after which a rank that does not answer counts as lost.

    Raises:
        RequestError: torch.distributed cannot be started from the environment.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    made = not dist.is_initialized()
    if made:
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
        ranks = JobRanks(timeout)
        yield ranks
    finally:
        if ranks is not None:
            ranks.close()
        if made:
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
    """

    def __init__(self, timeout: float) -> None:
        import torch.distributed as dist

        self.rank, self.world, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._groups: list[Any] = []
        self._all = self.group(range(self.world), "gloo")

    def group(self, members: Sequence[int], backend: str) -> Any:
        """A process group; every rank calls this, member or not, for the same groups in the same order."""
        import torch.distributed as dist

        # not use_local_synchronization: the name it makes (torch 2.13) differs on ranks that are in more groups than others
        limit = datetime.timedelta(seconds=self._timeout)
        with lost():
            made = dist.new_group(list(members), timeout=limit, backend=backend)
        if self.rank in members:
            self._groups.append(made)
        return made

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

    def agree(self, error: BaseException | None, asked: Mapping[str, tuple[str, str]] | None = None) -> None:
        """Raises on every rank if there was an error on any: the own one where there was one, else that of the first.

        Args:
            error: What went wrong here.
            asked: What must be the same on all ranks, by name: what is compared, and how it is shown.

        Raises:
            RequestError: On all ranks: something in `asked` is not the same.
            BaseException: See above; of another rank's the message, and of the library's own errors all of it.
        """
        said = None
        if isinstance(error, DistckptError) and not isinstance(error, Elsewhere):
            said = type(error).__name__, error.message, error.details, error.hint, error.tensor
        elif error is not None and not isinstance(error, Elsewhere):
            said = type(error).__name__, str(error), [], None, None
        heard = self.gathered((said, asked))
        if said is not None and error is not None:
            raise error
        for rank, (message, _) in enumerate(heard):
            if message is not None:
                raise _retold(rank, *message)
        if error is not None:
            raise error
        if asked is not None:
            refuse_differences([other for _, other in heard if other is not None])

    def close(self) -> None:
        """Destroys the groups."""
        import torch.distributed as dist

        for group in self._groups:
            with contextlib.suppress(Exception):  # one of its members may be gone
                dist.destroy_process_group(group)


class Elsewhere(DistckptError):
    """Another rank has failed, and will say why."""


def _retold(rank: int, kind: str, message: str, details: list[str], hint: str | None, tensor: str | None) -> Exception:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, DistckptError) and found is not errors.Interrupted:
        return found(f"rank {rank} failed: {message}", details=details, hint=hint, tensor=tensor)
    return DistckptError(f"rank {rank} failed: {kind}: {message}" if message else f"rank {rank} failed: {kind}")


def refuse_differences(asked: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Compares what each rank was asked for: see `JobRanks.agree`.

    Raises:
        RequestError: Not all of it is the same; in a few lines, however many ranks there are.
    """
    details, differing = [], []
    for name in asked[0]:
        said: dict[str, list[int]] = {}
        for rank, answers in enumerate(asked):
            said.setdefault(answers[name][0], []).append(rank)
        if len(said) > 1:
            differing.append(name)
            for ranks in list(said.values())[:_SHOWN]:
                scattered = len(ranks) > _SHOWN and ranks[-1] - ranks[0] >= len(ranks)
                who = f"{len(ranks)} ranks, the first of them {ranks[0]}" if scattered else listed(ranks)
                details.append(f"{who}: {asked[ranks[0]][name][1]}")
            if len(said) > _SHOWN:
                details.append(f"and {len(said) - _SHOWN} more")
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
    """What torch raises when a rank has gone, in one sentence.

    Raises:
        DistckptError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:  # DistBackendError, and gloo's own
        raise DistckptError(
            "another rank of the job has ended or does not answer",
            details=[str(error).splitlines()[0][:300]],
            hint="its own output says why; start all ranks again",
        ) from error
