"""Plain files of torch.save: a state dict, alone or in a dictionary with other things; or Hugging Face's shards of one.

    model.pt                      {"model": {...}, "optimizer": ..., "iteration": 10}, or the state dict itself
    pytorch_model.bin             a state dict
    pytorch_model-00001-of-00002.bin ... + pytorch_model.bin.index.json
    model_weights.ckpt            the same of NeMo 1 without model parallelism, beside model_config.yaml, often in a .nemo

Tensors are found in the zip archive by its pickle, which is read without executing anything, and streamed from there.
Files from before torch 1.6 are no archives: they are refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from converters.archive.records import tensor_ref
from converters.errors import FormatError
from converters.formats.broken import read_part
from converters.formats.containers.archive import PtFile
from converters.formats.containers.index import promised, read_index
from converters.formats.containers.reader import Shards, WholeReader, distinct, entries
from converters.formats.folder import exists, is_folder
from converters.names import printable
from converters.pickles import Obj, PickleFormatError, pairs, references

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.catalog import Problem
    from converters.pickles import Node

__all__ = ["TorchFileReader"]

SINGLE, NEMO, INDEX = "pytorch_model.bin", "model_weights.ckpt", "pytorch_model.bin.index.json"
_MODEL = ("model", "state_dict", "model_state_dict", "module")
_CHUNK = re.compile(r"model\d+")  # Megatron-LM's virtual pipeline
_DEEPEST = 64


class TorchFileReader(WholeReader):
    """An open torch file, or a folder of shards."""

    name: ClassVar[str] = "torch"

    @classmethod
    def open(cls, place: Path) -> TorchFileReader:
        """Reads directory and pickle of every file; no tensor data.

        Raises:
            FormatError: Not an archive of torch.save, unsafe, without tensors, or shards that do not fit their index.
        """
        if not is_folder(place) or not exists(place / INDEX):
            folder, name = (
                (place, SINGLE if exists(place / SINGLE) else NEMO) if is_folder(place) else (place.parent, place.name)
            )
            file = PtFile.read(folder, name)
            storages = Shards(folder, [file], file.name)
            _number(file)
            return cls(place, storages, *_split(file.tree, file.name))
        wanted = read_index(place, INDEX, ".bin")
        files = [read_part(PtFile.read, place, name) for name in wanted]
        storages = Shards(place, files, INDEX)
        tensors: dict[str, Node] = {}
        problems: list[Problem] = []
        for file in files:
            _number(file)
            held = distinct(_flattened(file.tree, file.name), file.name)
            tensors |= promised(held, wanted[file.name], place / file.name, INDEX, problems)
        return cls(place, storages, {"model": tensors}, {}, problems)


def _number(file: PtFile) -> None:
    """Gives the storages that a file's tree refers to the names that they have among all files."""
    for reference in references(file.tree):
        value = reference.value
        if isinstance(value, tuple) and len(value) == 5 and isinstance(value[2], str):
            reference.value = (*value[:2], f"{file.position}:{value[2]}", *value[3:])


def _split(tree: Node, what: str) -> tuple[dict[str, dict[str, Node]], dict[Any, Node]]:
    """The model's tensors, chunk by chunk, and everything else in a file."""
    try:
        top = dict(pairs(tree))
    except (PickleFormatError, TypeError):
        ref = tensor_ref(tree, what)
        found = "one tensor" if ref is not None else f"a {type(tree).__name__}"
        raise FormatError(f"{what} holds {found}, not a dictionary of tensors") from None
    chunks = {key: value for key, value in top.items() if isinstance(key, str) and _CHUNK.fullmatch(key)}
    key = next((key for key in _MODEL if key in top and tensor_ref(top[key], what) is None), None)
    if key is not None or chunks:
        held = chunks or {"model": top[key]}
        model = {name: distinct(_flattened(value, what), what) for name, value in held.items()}
        state = {name: value for name, value in top.items() if name not in (chunks or {key})}
    else:
        flat = distinct(_flattened(tree, what), what)
        model = {"model": flat}
        tops = {name.partition(".")[0] for name in flat} | flat.keys()
        state = {name: value for name, value in top.items() if name not in tops}
    if not any(model.values()):
        raise FormatError(
            f"{what} holds no tensors under names",
            details=[f"found: {', '.join(printable(str(key)) for key in list(top)[:6])}"],
        )
    return model, state


def _flattened(node: Node, what: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Node]]:
    """The tensors in dictionaries and lists in one another, names joined by dots; everything else is passed over.

    Raises:
        FormatError: A tensor has no name.
    """
    if depth > _DEEPEST:
        raise FormatError(f"{what}: its dictionaries lie in one another more than {_DEEPEST} deep")
    for key, value in entries(node):
        if not isinstance(key, str | int):
            if tensor_ref(value, what) is not None:
                raise FormatError(f"{what} holds a tensor under {printable(repr(key))[:80]}, which is no name")
            continue
        if tensor_ref(value, f"{what}: {printable(str(key))}") is not None:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict | list | tuple | Obj):
            yield from _flattened(value, what, f"{prefix}{key}.", depth + 1)
