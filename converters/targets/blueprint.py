"""What of a reshard does not change from one iteration to the next: worked out once, or taken from the plan cache.

What does change is done every time: reading the common state and objects, looking for damage, proving master weights,
checking the destination. A blueprint follows from nothing but what `blueprint_key` lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from converters import __version__
from converters.errors import DistckptError
from converters.formats.torch_dist.columns import Columns
from converters.optimizer.state import optimizer_state
from converters.parallel.split import Outline
from converters.pickles import Global, Obj, PersId
from converters.planning.tasks import TaskTable
from converters.targets.plan_cache import code_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader
    from converters.formats.torch_dist.output import TorchDistOutput
    from converters.parallel.layout import Layout
    from converters.targets.plan_cache import PlanCache
    from converters.targets.reshard_state import ReshardOptions

__all__ = ["Blueprint", "LazySources", "blueprint_key", "keep", "recall"]

# training arguments that differ between iterations or runs of one job; planning reads none of them
PASSING = frozenset(
    {
        *("iteration", "curr_iteration", "ckpt_step", "train_iters", "train_samples", "exit_interval"),
        *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
        *("num_floating_point_operations_so_far", "do_train", "do_valid", "do_test", "rank", "local_rank"),
        *("load", "save", "tensorboard_dir", "wandb_exp_name", "wandb_save_dir"),
    }
)


@runtime_checkable
class Measured(Protocol):
    """A reader that can tell quickly whether two checkpoints are cut alike."""

    @property
    def geometry(self) -> tuple[str, int]:
        """Digest of keys, types, shapes, chunks and record lengths, and the number of records."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """A reshard but for what belongs to one iteration.

    Attributes:
        columns: The tensors to be written.
        outline: The model.
        optimizer: Optimizer layout, "keep" and "there is none" resolved.
        stacked: The target's layers share keys.
        padded_vocab: Rows of the target's embedding.
        doubt: The master weights of each iteration must be proved.
        notes: Sentences a person should read.
        tasks: The work in units, once it is known.
        files: Names of the files that its numbers stand for; which ranks have one depends on the objects, too.
    """

    columns: Columns
    outline: Outline
    optimizer: str
    stacked: bool
    padded_vocab: int | None
    doubt: bool
    notes: tuple[str, ...]
    tasks: TaskTable | None = None
    files: tuple[str, ...] = ()

    def tasks_for(self, output: TorchDistOutput) -> TaskTable | None:
        """The work, if it is known for these files."""
        return self.tasks if tuple(file.name for file in output.files) == self.files else None


class LazySources(Mapping[str, "TensorInfo"]):
    """The tensors that the columns are filled from, looked up when they are asked for."""

    def __init__(self, reader: Reader, columns: Columns) -> None:
        self._reader, self._columns = reader, columns

    @cached_property
    def optimizer(self) -> dict[str, TensorInfo]:
        """Those of the optimizer."""
        return optimizer_state(self._reader).tensors

    def __getitem__(self, name: str) -> TensorInfo:
        if name.startswith("optimizer.state."):
            return self.optimizer[name]
        return self._reader.catalog.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns)


def blueprint_key(reader: Reader, layout: Layout, options: ReshardOptions) -> dict[str, Any] | None:
    """Everything that a blueprint follows from, as plain data; None if this reader cannot tell.

    All training arguments count but for those known to change from run to run: a plan that is made anew without need
    costs seconds, one that is taken over wrongly costs a checkpoint.
    """
    if not isinstance(reader, Measured):
        return None
    catalog = reader.catalog
    digest, records = reader.geometry
    lasting = {name: value for name, value in catalog.args.items() if name not in PASSING}
    try:
        stated = [hashlib.sha256(_text(v).encode()).hexdigest() for v in (lasting, catalog.config, catalog.content)]
    except RecursionError:
        return None
    return {
        "version": [__version__, code_digest()],
        "source": [reader.name, catalog.flavour, list(catalog.producer or ()), digest, records],
        "stated": stated,
        "layout": asdict(layout),
        "options": asdict(options),
    }


def _text(value: Any, room: Iterator[int] | None = None) -> str:
    """All of an inert value, unlike its abbreviated repr.

    Raises:
        RecursionError: It holds itself, or stands for more than anybody wrote.
    """
    room = iter(range(1 << 20)) if room is None else room
    if next(room, None) is None:
        raise RecursionError
    if isinstance(value, Obj):
        return f"{value.func.path}{_text([value.args, value.kwargs, value.state, value.items, value.pairs], room)}"
    if isinstance(value, Global | PersId):
        return value.path if isinstance(value, Global) else f"<{_text(value.value, room)}>"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_text(k, room)}:{_text(v, room)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{','.join(_text(item, room) for item in value)}]"
    return repr(value)


def recall(cache: PlanCache, key: Mapping[str, Any]) -> Blueprint | None:
    """The blueprint that an earlier run kept, if it is as it should be."""
    stored = cache.load(key)
    if stored is None:
        return None
    facts, arrays = stored
    try:
        columns = Columns.restored(facts["columns"], arrays, str(facts["digest"]))
        tasks = TaskTable(**{name.removeprefix("task_"): a for name, a in arrays.items() if name.startswith("task_")})
        files = tuple(facts["files"])
        tasks.check(len(columns), len(files))
        outline, notes = Outline(**facts["outline"]), tuple(facts["notes"])
        found = Blueprint(columns, outline, notes=notes, tasks=tasks, files=files, **facts["rest"])
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, DistckptError) as error:
        cache.refuse(key, error)
        return None
    cache.taken(key)
    return found


def keep(cache: PlanCache, key: Mapping[str, Any], made: Blueprint, tasks: TaskTable, output: TorchDistOutput) -> None:
    """Keeps a blueprint for later runs."""
    if len(made.columns) != made.columns.text.count(b"\0") + 1:
        return  # names that hold the separator
    facts, arrays = made.columns.stored()
    document = {
        "columns": facts,
        "digest": made.columns.digest,
        "outline": asdict(made.outline),
        "rest": {name: getattr(made, name) for name in ("optimizer", "stacked", "padded_vocab", "doubt")},
        "notes": list(made.notes),
        "files": [file.name for file in output.files],
    }
    cache.store(key, document, arrays | {f"task_{name}": column for name, column in tasks.columns().items()})
