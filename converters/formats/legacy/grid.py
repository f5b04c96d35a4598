"""Which rank of a Megatron-LM job wrote which folder of a legacy checkpoint.

    iter_0000010/
        mp_rank_00/model_optim_rng.pt           tp only
        mp_rank_00_001/model_optim_rng.pt       tp and pp; or tp and ep, when there is one pipeline stage
        mp_rank_00_001_003/model_optim_rng.pt   tp, pp and ep
                          /distrib_optim.pt     the distributed optimizer of that rank

Source: megatron/training/checkpointing.py (`get_checkpoint_name`), Megatron-LM v2.0 to core_v0.16.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, UnsupportedError
from converters.formats.folder import scan
from converters.names import listed, printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_MOST_RANKS = 1_000_000
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True)
class Grid:
    """The ranks that wrote files.

    Attributes:
        folders: Folder of each rank, by (tp, pp, ep).
        notes: How an ambiguous name was understood.
    """

    tp: int
    pp: int
    ep: int
    folders: Mapping[tuple[int, int, int], str]
    notes: tuple[str, ...] = field(default=())


def rank_folders(folder: Path) -> list[str]:
    """Names of the `mp_rank_*` folders, in order."""
    with scan(folder) as entries:
        return sorted(entry.name for entry in entries if entry.name.startswith("mp_rank_") and entry.is_dir())


def find_grid(names: list[str], args: Mapping[str, Any], *, first_has_end: bool, experts: bool) -> Grid:
    """Which rank each folder belongs to.

    Args:
        names: What `rank_folders` found.
        first_has_end: The first folder's model has an output layer or a final norm, so it is not a part of a pipeline.
        experts: It has experts.

    Raises:
        FormatError: Folders are missing, or there are some that the job cannot have written.
    """
    numbers: dict[tuple[int, ...], str] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None:
            raise FormatError(f"{printable(name)} is not a folder that Megatron-LM writes (mp_rank_TT, _PPP, _EEE)")
        numbers[tuple(int(n) for n in match.groups() if n is not None)] = name
    fields = max(len(key) for key in numbers)
    sizes = [max(key[axis] for key in numbers if len(key) == fields) + 1 for axis in range(fields)]
    tp = _size(args, "tensor_model_parallel_size", "model_parallel_size") or sizes[0]
    pp, ep = _size(args, "pipeline_model_parallel_size"), _size(args, "expert_model_parallel_size")
    notes = []
    if fields == 2 and pp is None and ep is None:
        if first_has_end and not experts:
            raise UnsupportedError(
                f"the second number of {names[0]} may count pipeline stages or expert-parallel ranks: its model has both "
                "embedding and output layer, but no experts",
                details=[f"found: {listed(names, 8)}"],
                hint="pipeline_model_parallel_size and expert_model_parallel_size of the saved arguments decide; they are "
                "missing. If the folders are of two saves, move those of the other away",
            )
        axis = "expert" if first_has_end else "pipeline"
        notes.append(
            f"the second number of {names[0]} is read as the {axis}-parallel rank: no argument says what it is"
        )
        pp, ep = (1, sizes[1]) if first_has_end else (sizes[1], 1)
    pp, ep = pp or (sizes[1] if fields == 3 else 1), ep or (sizes[2] if fields == 3 else 1)
    if fields != 1 + (pp > 1) + (ep > 1) or tp * pp * ep > _MOST_RANKS:
        raise _contradiction(names, tp, pp, ep)
    ranks = [(t, p, e) for p in range(pp) for e in range(ep) for t in range(tp)]
    folders = {rank: rank_folder(*rank, pp, ep) for rank in ranks}
    missing = [name for name in folders.values() if name not in names]
    etp = _size(args, "expert_tensor_parallel_size")
    if missing and experts and etp not in (None, tp):
        raise UnsupportedError(
            f"its experts were divided over expert_tensor_parallel_size {etp}, everything else over tp {tp}: legacy "
            "checkpoints of such jobs are not read",
            details=["the folders are numbered by tp and ep, and not every pair of these has a rank"],
            hint="let Megatron-LM load it once and save it with --ckpt-format torch_dist",
        )
    if missing:
        raise FormatError(
            f"the checkpoint lacks {len(missing)} of the {len(ranks)} folders of a job with tp {tp}, pp {pp}, ep {ep}",
            details=[listed(missing, 12)],
            hint="copy them from the machine that wrote them; every one holds a part of the model",
        )
    extra = [name for name in names if name not in folders.values()]
    if extra:
        raise FormatError(
            f"{counted(len(extra), 'folder', verb='belongs/belong')} to no rank of a job with tp {tp}, pp {pp}, ep {ep}: "
            "two saves are mixed",
            details=[listed(extra, 12)],
            hint="move the folders of the other save away",
        )
    return Grid(tp, pp, ep, folders, tuple(notes))


def _contradiction(names: list[str], tp: int, pp: int, ep: int) -> FormatError:
    return FormatError(
        f"the folders are not those of the job in the arguments (tp {tp}, pp {pp}, ep {ep})",
        details=[f"found: {listed(names, 8)}"],
        hint="mp_rank_TT_NNN alone does not say whether NNN counts pipeline stages or expert-parallel ranks; "
        "pipeline_model_parallel_size and expert_model_parallel_size of the saved arguments decide",
    )


def rank_folder(tp: int, pp: int, ep: int, stages: int, experts: int) -> str:
    """Name of the folder of a rank in a job with so many pipeline stages and expert-parallel ranks."""
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if stages > 1 else ""
    return name + (f"_{ep:03d}" if experts > 1 else "")


def _size(args: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if type(value := args.get(name)) is int and value > 0), None)
