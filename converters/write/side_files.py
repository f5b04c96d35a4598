"""Files beside the tensors, in the result: carried to where the loader looks for them, or left out with the reason.

| kind of file | torch_dist, legacy | safetensors with Megatron's names | export-hf |
|---|---|---|---|
| tokenizer | `tokenizer/` | `tokenizer/` | beside `config.json` |
| ModelOpt's state | `modelopt_state/`; legacy jobs look for it in `model_optim_rng.pt` | left out | left out |
| exported weights | `hf/` | left out | left out |
| data loaders | if the number of data-parallel ranks is the same | left out | left out |
| small files of unknown kinds | as they are | left out | left out |

Nothing of these files is looked into; the engine copies them as the bytes they are, a mebibyte at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.formats.folder import scan
from converters.formats.resolve import TRACKER, iterations
from converters.formats.side_files import side_files
from converters.megatron.layout import Layout
from converters.planning.job import OutputFile, Slice
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.formats.side_files import SideFile

_SMALL = 1 << 20
_JOBS = ("torch_dist", "legacy")
_RUNS = ("progress.txt", "latest_wandb_artifact_path.txt")
LEFT_OUT = {
    "local": "local checkpoints of single ranks of the job that saved",
    "manifest": "lists the files of the source",
    "report": "facts of the source that distckpt wrote",
    "temporary": "left by a save that was interrupted",
    "unreferenced": "belongs to no record",
    "special": "a link, or no regular file",
}
"""Kinds of files that no writer carries, and why."""


@dataclass(frozen=True)
class Beside:
    """What becomes of the files beside the tensors.

    Attributes:
        files: To be written, behind the job's own.
        dropped: `(what, reason)` of what is left out; a folder stands for all that is in it.
    """

    files: tuple[OutputFile, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        """A line for a person."""
        if not self.files:
            return ()
        nbytes = sum(file.size for file in self.files)
        verb = "is" if len(self.files) == 1 else "are"
        text = f"{counted(len(self.files), 'file')} beside the tensors {verb} copied, {counted(nbytes, 'byte')}"
        return (("beside", text),)


def files_beside(
    catalog: Catalog, target: str, folder: str = "", layout: Layout | None = None, *, written: Collection[str] = ()
) -> Beside:
    """Decides what becomes of each file beside the tensors.

    Args:
        target: Name of the format that is written; "hf" for a Hugging Face folder.
        folder: Where in the destination the checkpoint lies.
        layout: The job that loads the result, if the format is for one.
        written: Names within the destination that are written already: other code carries these files.

    Raises:
        FormatError: There are too many, or a folder cannot be listed.
    """
    if catalog.imported:  # the files of a Hugging Face folder are not a checkpoint's: `import_hf` accounts for them
        return Beside()
    files: list[OutputFile] = []
    dropped: dict[tuple[str, str], None] = {}
    prefix = f"{folder}/" if folder else ""
    for file in side_files(catalog):
        name = prefix + file.name
        if name in written:
            continue
        reason = _why_left_out(file, catalog, target, layout)
        if reason:
            top, inner, _ = file.name.partition("/")
            dropped[top + inner, reason] = None
        else:
            files.append(copied_file(name, catalog.path / file.name, file.size, file.mtime_ns))
    for file_name, path, size, mtime in _files_of_run(catalog):
        if target in _JOBS and file_name in _RUNS:
            files.append(copied_file(file_name, path, size, mtime))
        elif file_name not in written:
            dropped[file_name, "of the run, beside its iterations"] = None
    return Beside(tuple(files), tuple(dropped))


def copied_file(name: str, path: Path, size: int, mtime_ns: int) -> OutputFile:
    """A file of the result with the bytes of one of the source."""
    return OutputFile(name, size, slices=(Slice(0, (path, 0, size), plain=mtime_ns),) if size else ())


def _files_of_run(catalog: Catalog) -> Iterator[tuple[str, Path, int, int]]:
    """Files of a training root that was named, beside its iterations: name, path, size, time."""
    root = catalog.path.parent
    if catalog.opened != root or not iterations(root):
        return
    with scan(root) as entries:
        files = sorted((e for e in entries if e.is_file(follow_symlinks=False)), key=lambda entry: entry.name)
        for entry in files:
            if entry.name != TRACKER:
                status = entry.stat(follow_symlinks=False)
                yield entry.name, root / entry.name, status.st_size, status.st_mtime_ns


def _why_left_out(file: SideFile, catalog: Catalog, target: str, layout: Layout | None) -> str:
    """Why a file is left out; empty if it is carried."""
    kind, nowhere = file.kind, "the target's format cannot hold it"
    if kind in LEFT_OUT:
        return LEFT_OUT[kind]
    if kind == "tokenizer":
        return "" if target in (*_JOBS, "safetensors") else nowhere
    if kind == "modelopt":
        legacy = "Megatron's legacy format keeps ModelOpt's state in model_optim_rng.pt"
        return "" if target == "torch_dist" else legacy if target == "legacy" else nowhere
    if kind == "dataloader":
        return _why_loaders_left_out(catalog, target, layout)
    if kind == "configuration":
        return f"configuration of {catalog.framework}, which the target cannot hold"
    if target not in _JOBS:
        return nowhere
    if kind == "unknown" and file.size > _SMALL:
        return f"{file.size:,} bytes that distckpt does not recognise"
    return ""


def _why_loaders_left_out(catalog: Catalog, target: str, layout: Layout | None) -> str:
    if target not in _JOBS or layout is None:
        return "the state of a job's data loaders, which the target's format cannot hold"
    try:
        saved = Layout.saved(catalog).dp
    except RequestError:
        return "data loaders are one for each data-parallel rank, and nothing says how many ranks saved them"
    if saved != layout.dp:
        return f"data loaders are one for each data-parallel rank: {saved} saved them, the target has {layout.dp}"
    return ""
