"""Loads what one rank of a job needs, from any checkpoint that can be read, straight onto its device.

    state = load("ckpt/iter_0050000", Layout(tp=4, pp=2), rank=3, device="cuda:0")
    model.load_state_dict(state)                        # Megatron-Core's GPTModel on that rank, strict

    state = load("ckpt", Layout(tp=4, dp=2), device="cuda")     # under torchrun, every rank for itself and together
    state.report.exchange                               # how replicas were read: "read by every rank", "nccl", "gloo"

    for name, tensor in load("ckpt", Layout(), 0, names="hf", stream=True):
        ...

What is promised:

- Bytes: each rank reads what it needs, 1.0 times, whatever the saved layout was: a half of each row is read as halves of
  rows. With an exchange the ranks of a job read together what is needed once. Beside a master weight the weight that it
  must round to is read, a seventh more with optimizer=True.
- Master weights are those of the weights: every element that is read of one is compared, in every format. Remainders are
  completed by the weights; there it is refused what may have been saved shifted.
- Checksums: each record that a rank reads whole is compared with the CRC-32 that torch stored with it. A record of which a
  rank needs a part (TP grows) cannot be checked by that rank alone without reading the rest. In a job, the ranks put the
  sums of their parts together, so all that was read together whole is checked; `report.records_unchecked` counts the
  others. `verify="all"` reads those once more, in a job each by one rank. Formats without checksums have none to check.
- Memory: on the host `max_memory` of buffers; on the device the result and two tiles for each thread. An exchange adds
  a round, which is 32 MiB, or a tile of each member if that is more, and two members' parts of it. Too little is an error
  before anything is read.
- Nothing from a file is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, overload

from converters.errors import RequestError
from converters.execute.ranks import Ranks
from converters.formats import open_checkpoint
from converters.formats.base import fingerprint_of
from converters.io.platforms import find_device
from converters.keywords import keyword, with_keywords
from converters.loading.plan import LoadOptions
from converters.loading.rank_plan import plan_load
from converters.loading.run import LoadReport, LoadRequest, PreparedLoad
from converters.megatron.layout import Layout
from converters.names import StateName, printable, state_names
from converters.param_order import Order
from converters.words import counted

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.loading.job_ranks import JobRanks

MIB = 1 << 20


class LoadedState(dict[str, Any]):
    """A state dict of torch tensors, with the report of its load.

    With virtual pipeline stages the keys of chunk `v` begin with `model{v}.`; `chunk` has them without. Optimizer state is
    under `optimizer.state.{param,exp_avg,exp_avg_sq}.KEY`, `param` being the fp32 master weight. Keys that end in
    `_extra_state` are there for `load_state_dict(strict=True)`; their values are None, also where the checkpoint has FP8
    scaling factors: those are stored as pickles, which TransformerEngine's `set_extra_state` executes. Delayed scaling
    begins its histories anew, and a note of the report says so; other recipes keep none.

    Attributes:
        report: What the load did.
    """

    def __init__(self, report: LoadReport) -> None:
        super().__init__()
        self.report = report

    def chunk(self, number: int = 0) -> dict[str, Any]:
        """The state dict of one model chunk, without optimizer state."""
        model = {name: value for name, value in self.items() if StateName.parse(name) is None}
        prefix = f"model{number}."
        if any(name.startswith("model0.") for name in model):
            return {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
        return model

    def optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """Key of the parameter -> {"param": ..., "exp_avg": ..., "exp_avg_sq": ...}."""
        out: dict[str, dict[str, torch.Tensor]] = {}
        for name, (state, key) in state_names(self):
            out.setdefault(key, {})[state] = self[name]
        return out


class LoadStream(Iterator[tuple[str, Any]]):
    """Tensors of a load as they are complete. Also a context manager; no thread of it is left when it is closed.

    In a job all ranks take all of their tensors: one that stops early stops all others with a message.

    Attributes:
        report: What the load has done so far; complete at the end.
    """

    def __init__(self, prepared: PreparedLoad) -> None:
        self._prepared, self._tensors, self.report = prepared, prepared.tensors(), prepared.report

    def __next__(self) -> tuple[str, Any]:
        return next(self._tensors)

    def __iter__(self) -> Self:
        return self

    def close(self) -> None:
        """Ends it; what was not given yet is lost."""
        self._tensors.close()
        self._prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Options(TypedDict, total=False):
    device: str | torch.device
    names: Literal["megatron", "hf"]
    optimizer: bool
    broadcast: bool | Literal["auto"]
    verify: Literal["read", "all"]
    dtype: str | torch.dtype | None
    modules: Order | None
    vocab_size: int | None
    arch: str | None
    follow_links: bool
    max_memory: int | None
    threads: int | None
    timeout: float
    listener: Listener | None
    stop: StopFlag | None


@overload
def load(
    path: str | Path,
    layout: Layout,
    rank: int | None = ...,
    *,
    stream: Literal[False] = ...,
    **options: Unpack[_Options],
) -> LoadedState: ...
@overload
def load(
    path: str | Path, layout: Layout, rank: int | None = ..., *, stream: Literal[True], **options: Unpack[_Options]
) -> LoadStream: ...
@with_keywords(keyword(f.name, f.default, f.type) for f in fields(LoadOptions) if f.name != "ahead")
def load(
    path: str | Path, layout: Layout, rank: int | None = None, *, stream: bool = False, **options: Unpack[_Options]
) -> LoadedState | LoadStream:
    """The tensors of one rank of a job, from a checkpoint of any format and layout.

    Args:
        path: The checkpoint, as for every command: a training root, an iteration, a file inside.
        layout: The job that the tensors are for, `Layout(tp=2, dp=4)`. Its `dp` counts: optimizer state is given whole on
            every replica.
        rank: Which of its ranks. None: that of this process, from torch.distributed or from the environment of torchrun or
            srun. Where several processes were started, they load together: all of them call this, for the same checkpoint
            with the same layout and options; where they do not, all get an error that names the ranks. With a rank and
            broadcast=False this process loads alone, whatever else was started.
        device: "cpu", "cuda:N", or "cuda": the GPU that this process took with `torch.cuda.set_device`, else the one of
            its number on its machine.
        names: "megatron": as modules of Megatron-Core's GPTModel call them, on this rank and its pipeline stage. "hf": as in
            a checkpoint on the Hub, for `LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)`; the
            layout may then have replicas only.
        optimizer: Also fp32 master weights and moments; see `LoadedState` for their names.
        broadcast: Whether replicas are read once and exchanged: True, False, or "auto", which measures both with a few MiB.
        stream: Return an iterator of `(key, tensor)` in place of a dictionary; no more than `max_memory` bytes of tensors
            (None: 64 MiB), or one tensor, are made ahead of what was taken. In a job the rounds of an exchange come on top.
        verify: What is compared with its checksum. "read": each record that is read whole, in a job by all ranks together.
            "all": also those of which only a part is needed; the rest of them is read for it, in a job by one rank each.
        dtype: "bf16", "fp16", "fp32" or torch's: type of floating weights. None keeps what is stored. Optimizer state stays.
        modules: How the job's modules are made: TransformerEngine's or Megatron's own, and the kind of experts. None
            infers it from the checkpoint's arguments.
        vocab_size: True rows of the vocabulary, where the checkpoint does not tell.
        arch: Hugging Face architecture for names="hf"; None infers it.
        follow_links: Files of the checkpoint may be links out of its folder.
        max_memory: Bytes of host memory for buffers; None takes 64 MiB, 512 MiB for a GPU.
        threads: Threads that read; None takes one for each core, 8 at most; for a GPU 16, of the cores that a rank has.
        timeout: Seconds after which a rank of the job that does not answer counts as lost.
        listener: Told about progress, from any thread.
        stop: Polled; ends the load.

    Returns:
        A `LoadedState`, or with `stream` a `LoadStream`. What the checkpoint holds beside tensors is not in it: see
        `load_common` (arguments, iteration, scheduler). `load_metadata` tells which tensors there are; `iter_tensors` and
        `load_plain_tensors` read whole ones under the names stored, of models of any kind.

    Raises:
        TypeError: An argument is of another type than it should be.
        RequestError: The layout does not fit the model or the number of processes, there is no such rank or device, too
            little memory, or ranks were asked for different things: all before anything is read.
        FormatError: The checkpoint is missing, unreadable, or of no known format.
        IntegrityError: Something needed is damaged.
        DistckptError: Another rank has failed; with its message.
    """
    if options.get("dtype") is not None:
        options["dtype"] = str(options["dtype"])
    request = LoadOptions(**options)
    if stream:
        request = replace(request, ahead=64 * MIB if request.max_memory is None else request.max_memory)
    _refuse_types(layout, request, rank)
    started = _started()
    own_rank, together = _choose_rank(started, layout, rank, request.broadcast)

    def make(ranks: JobRanks | None) -> LoadRequest:
        if together and started.world != layout.world_size:
            raise RequestError(
                f"{started.world} processes were started, the layout has {counted(layout.world_size, 'rank')} "
                f"(tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp})",
                hint=f"torchrun with {counted(layout.world_size, 'process', 'processes')}, or another dp",
            )
        if rank not in (None, own_rank):  # here, so that all ranks hear of it
            raise RequestError(
                f"process {own_rank} of the job asked for the tensors of rank {rank}",
                hint="leave rank out, or pass broadcast=False to load any rank's tensors, alone",
            )
        local = ranks.local if ranks is not None and not started.launch else started.local  # mpirun does not say it
        target = find_device(str(request.device), local)
        reader = open_checkpoint(path, follow_links=request.follow_links)
        alike = _alike(reader, layout, request) if together else {}
        return LoadRequest(reader, plan_load(reader, layout, own_rank, request, together=together), target, alike)

    prepared = PreparedLoad(make, request, own_rank, in_job=together)
    if stream:
        return LoadStream(prepared)
    state = LoadedState(prepared.report)
    tensors = dict(prepared.tensors())
    for name in prepared.names:
        state[name] = tensors.pop(name)
    return state


def _refuse_types(layout: object, options: LoadOptions, rank: object) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"load needs a Layout, such as Layout(tp=2, dp=4), in place of {layout!r}")
    if not (options.modules is None or isinstance(options.modules, Order)):
        raise TypeError(f"modules is {options.modules!r}, not a converters.param_order.Order")
    for name, value in (("rank", rank), ("max_memory", options.max_memory), ("threads", options.threads)):
        if not (isinstance(value, Integral) or value is None):
            raise TypeError(f"{name} is {value!r}, not a whole number")
    if options.broadcast not in (True, False, "auto") or options.verify not in ("read", "all"):
        raise RequestError(
            f"broadcast is {options.broadcast!r}, verify is {options.verify!r}",
            hint="True, False, 'auto'; 'read', 'all'",
        )


_ALIKE = ("names", "optimizer", "dtype", "vocab_size", "arch", "modules", "broadcast", "verify")


def _alike(reader: Reader, layout: Layout, options: LoadOptions) -> dict[str, tuple[str, str]]:
    """What must be the same on all ranks of a job: see `refuse_differences`. Where a checkpoint lies may differ."""
    digest, catalog = fingerprint_of(reader), reader.catalog
    iteration = "" if catalog.iteration is None else f"iteration {catalog.iteration}, "
    where = f"{printable(str(catalog.path))}, {iteration}fingerprint {digest[:16]}"
    sizes = {f.name: value for f in fields(layout) if (value := getattr(layout, f.name)) != f.default}
    shown = f"Layout({', '.join(f'{name}={value!r}' for name, value in sizes.items())})"
    texts = {name: f"{name}={getattr(options, name)!r}" for name in _ALIKE}
    return {"checkpoint": (digest, where), "layout": (shown, shown)} | {n: (text, text) for n, text in texts.items()}


def _choose_rank(
    started: Ranks, layout: Layout, rank: int | None, broadcast: bool | Literal["auto"]
) -> tuple[int, bool]:
    """The rank whose tensors are wanted, and whether the processes of the job load together."""
    if started.world == 1 or (rank is not None and broadcast is False):
        if rank is None and layout.world_size > 1:
            raise RequestError(
                f"the layout has {layout.world_size} ranks and this process was started alone: whose tensors?",
                hint=f"rank=0 to rank={layout.world_size - 1}, or start {layout.world_size} processes with torchrun",
            )
        layout.coordinates(rank or 0)
        return rank or 0, False
    return started.rank, True


def _started() -> Ranks:
    """This process among those started together: what torch.distributed says, else the environment."""
    import sys

    started = Ranks.from_environment()
    if "torch.distributed" in sys.modules:  # imported by the caller that made a group
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size(), started.local, started.launch)
    return started
