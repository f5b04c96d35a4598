"""What else a checkpoint holds, for programs: its common state, what tensors there are, and whole tensors one by one.

For people who used Megatron-Core's `dist_checkpointing.load_common_state_dict`, `load_tensors_metadata` and
`load_plain_tensors` for this; here they take any format, need no process group, and execute nothing from the files.
"""

from __future__ import annotations

from argparse import Namespace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, RequestError
from converters.execute.ranks import Ranks
from converters.formats import open_checkpoint
from converters.io.platforms import find_device
from converters.loading.plan import TILE, LoadOptions, plan_pieces
from converters.loading.run import LoadRequest, PreparedLoad
from converters.names import printable
from converters.optimizer.proof import proved_when_read
from converters.optimizer.state import optimizer_state
from converters.pickles.describe import describe
from converters.pickles.nodes import Global, Obj, fields
from converters.planning.plan import Piece
from converters.torchzip.tensor_refs import tensor_ref
from converters.write.target_state import open_common

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import torch

    from converters.catalog import TensorInfo
    from converters.events import Listener, StopFlag
    from converters.formats.common_state import Archive

MIB = 1 << 20


def load_common(path: str | Path, *, follow_links: bool = False) -> dict[str, Any]:
    """The common state: arguments, iteration, scheduler, scalars of the optimizer.

    Args:
        path: The checkpoint, of any format.
        follow_links: Its files may be links out of its folder.

    Returns:
        Plain Python: `args` an `argparse.Namespace`, tensors on the CPU, `torch.float32` for a dtype. What would be an
        object of any other class stays text (`"AttnBackend(5)"`): nothing named in a file is ever imported or called.

    Raises:
        FormatError: The checkpoint is unreadable.
        RequestError: It has no common state.
    """
    archive, tree = open_common(open_checkpoint(path, follow_links=follow_links))
    return {name: _plain(value, archive, 0, [_MOST_VALUES]) for name, value in tree.items()}


_MOST_NESTED = 100
_MOST_VALUES = 1_000_000  # a list that holds one list ten times, which holds another ten times, ... is a small file
_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict", "collections.Counter")


def _plain(node: Any, archive: Archive, depth: int, left: list[int]) -> Any:
    """An inert tree as plain Python; `left` counts down the values that it may still have."""
    left[0] -= 1
    if depth > _MOST_NESTED or left[0] < 0:
        raise FormatError(f"the common state is nested too deeply, or holds more than {_MOST_VALUES:,} values")

    def inner(value: Any) -> Any:
        return _plain(value, archive, depth + 1, left)

    if isinstance(node, dict):
        return {_key(key): inner(value) for key, value in node.items()}
    if isinstance(node, list | tuple | set | frozenset):
        return type(node)(inner(value) for value in node)
    if isinstance(node, Global):
        import torch

        kind = getattr(torch, node.name, None) if node.module == "torch" else None
        return kind if isinstance(kind, torch.dtype) else node.path
    if not isinstance(node, Obj):
        return node
    ref = tensor_ref(node, "the common state")
    if ref is not None:
        import torch

        raw = bytearray(archive.elements(ref))
        kind = getattr(torch, ref.dtype.name)
        return torch.frombuffer(raw, dtype=kind).reshape(ref.shape) if raw else torch.empty(ref.shape, dtype=kind)
    if node.func.path == "argparse.Namespace":
        return Namespace(**{name: inner(value) for name, value in fields(node).items()})
    if node.func.path in _MAPPINGS:
        return {_key(key): inner(value) for key, value in node.pairs or ()}
    return describe(node)


def _key(node: Any) -> Any:
    return node if isinstance(node, str | int | float | bool | tuple | bytes | None) else describe(node)


def load_metadata(path: str | Path, *, follow_links: bool = False) -> dict[str, TensorInfo]:
    """Which tensors a checkpoint holds: canonical name -> element type, shape and stored pieces. Reads no tensor data.

    Layers and experts are single tensors, whatever the files stack; optimizer state is under
    `optimizer.state.{param,exp_avg,exp_avg_sq}.NAME`, or under the name that it is stored by.

    Args:
        path: The checkpoint, of any format.
        follow_links: Its files may be links out of its folder.

    Raises:
        FormatError: The checkpoint is unreadable.
    """
    return dict(open_checkpoint(path, follow_links=follow_links).catalog.tensors)


def load_plain_tensors(path: str | Path, names: str | Iterable[str] = "*", **options: Any) -> dict[str, torch.Tensor]:
    """Whole tensors by canonical name; everything fits in memory, or an error says how much is needed.

    Args:
        path: The checkpoint.
        names: Shell patterns: "decoder.layers.0.*".
        options: Those of `iter_tensors`.
    """
    return dict(iter_tensors(path, names, ahead=None, **options))


def iter_tensors(
    path: str | Path,
    names: str | Iterable[str] = "*",
    *,
    device: str = "cpu",
    optimizer: bool = False,
    ahead: int | None = 64 * MIB,
    max_memory: int | None = None,
    threads: int | None = None,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    follow_links: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors one by one, each as soon as it is complete, in about the order of the model.

    Every record is compared with its checksum; a record that holds several tensors when the last of them is read. Memory
    is that of the tensors that the caller keeps, of `ahead` or of one tensor, and of buffers. No thread outlives the
    iterator: exhaust it or call its `close()`.

    Args:
        path: The checkpoint, of any format.
        names: Shell patterns of canonical names, "*.linear_fc1.weight"; a tensor that any of them matches is read.
        device: "cpu", "cuda:N", or "cuda": this process's GPU, as for `load`.
        optimizer: Also optimizer state, by parameter: `optimizer.state.exp_avg.NAME`. Flat buckets are taken apart.
        ahead: Bytes of tensors read ahead of what was taken; None for no limit.
        max_memory: Bytes of host memory for buffers; None takes 64 MiB, 512 MiB for a GPU.
        threads: Threads that read; None takes one for each core, 8 at most.
        listener: Told about progress, from any thread.
        stop: Polled; ends the iteration.
        follow_links: Its files may be links out of its folder.

    Raises:
        FormatError: The checkpoint is unreadable.
        RequestError: No tensor has such a name, no such device, or too little memory.
        IntegrityError: Something that is read is damaged.
    """
    reader = open_checkpoint(path, follow_links=follow_links)
    tensors = {n: t for n, t in reader.catalog.tensors.items() if t.kind != "optimizer"}
    if optimizer:
        tensors |= proved_when_read(reader.catalog, optimizer_state(reader).tensors)
    patterns = [names] if isinstance(names, str) else list(names)
    chosen = {name: info for name, info in tensors.items() if any(fnmatchcase(name, p) for p in patterns)}
    if not chosen:
        raise RequestError(
            f"no tensor is called {', '.join(patterns)}",
            details=[f"there are {len(tensors)}, for example {printable(next(iter(tensors), '-'))}"],
            hint="optimizer=True gives optimizer state, too"
            if not optimizer and any(p.startswith("optimizer") for p in patterns)
            else "load_metadata lists them",
        )
    pieces = {name: Piece.stored(name, info.dtype, info.shape) for name, info in chosen.items()}
    plan, target = (
        plan_pieces(chosen, pieces, TILE, reader.catalog),
        find_device(device, Ranks.from_environment().local),
    )
    options = LoadOptions(max_memory=max_memory, threads=threads, listener=listener, stop=stop, ahead=ahead)
    return PreparedLoad(lambda _: LoadRequest(reader, plan, target), options).tensors()
