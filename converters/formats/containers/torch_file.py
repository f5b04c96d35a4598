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

from converters.errors import FormatError, UnsupportedError
from converters.formats.containers.archive import FileTensor, PtFile
from converters.formats.containers.index import indexed_tensors, read_index
from converters.formats.containers.reader import WholeReader, unique_names
from converters.formats.folder import exists, is_folder
from converters.names import printable
from converters.pickles.describe import describe
from converters.pickles.nodes import PickleFormatError, pairs
from converters.torchzip.tensor_refs import path_name, tensor_ref, tensors_in

if TYPE_CHECKING:
    from pathlib import Path

    from converters.catalog import Problem
    from converters.pickles.nodes import Node

SINGLE, NEMO, INDEX = "pytorch_model.bin", "model_weights.ckpt", "pytorch_model.bin.index.json"
_MODEL = ("model", "state_dict", "model_state_dict", "module")
_CHUNK = re.compile(r"model\d+")  # Megatron-LM's virtual pipeline


class TorchFileReader(WholeReader):
    """An open torch file, or a folder of shards."""

    name: ClassVar[str] = "torch"

    @classmethod
    def open(cls, path: Path) -> TorchFileReader:
        """Reads directory and pickle of every file; no tensor data.

        Raises:
            FormatError: Not an archive of torch.save, unsafe, without tensors, or shards that do not fit their index.
        """
        if not is_folder(path) or not exists(path / INDEX):
            folder, name = (
                (path, SINGLE if exists(path / SINGLE) else NEMO) if is_folder(path) else (path.parent, path.name)
            )
            file = PtFile.read(folder, name)
            return cls(path, [file], file.name, *_split(file))
        wanted = read_index(path, INDEX, ".bin")
        files = [PtFile.read(path, name) for name in wanted]
        tensors: dict[str, FileTensor] = {}
        problems: list[Problem] = []
        for file in files:
            stored = _tensors(file.tree, file)
            tensors |= indexed_tensors(stored, wanted[file.name], path / file.name, INDEX, problems)
        return cls(path, files, INDEX, {"model": tensors}, {}, problems)


def _tensors(node: Node, file: PtFile) -> dict[str, FileTensor]:
    """Every tensor in a tree, by its name."""
    tensors = []
    for path, ref in tensors_in(node, file.name):
        strange = next((key for key in path if not isinstance(key, str | int)), None)
        if strange is not None:
            shown = printable(repr(describe(strange, 2, 8)))[:80]
            raise UnsupportedError(f"{file.name} holds a tensor under {shown}, which is not a name")
        tensors.append((path_name(path), FileTensor(ref, file)))
    return unique_names(tensors, file.name)


def _split(file: PtFile) -> tuple[dict[str, dict[str, FileTensor]], dict[Any, Node]]:
    """The model's tensors, chunk by chunk, and everything else in a file."""
    tree, label = file.tree, file.name
    try:
        top = dict(pairs(tree))
    except (PickleFormatError, TypeError):
        ref = tensor_ref(tree, label)
        content = "one tensor" if ref is not None else f"a {type(tree).__name__}"
        raise FormatError(f"{label} holds {content}, not a dictionary of tensors") from None
    chunks = {key: value for key, value in top.items() if isinstance(key, str) and _CHUNK.fullmatch(key)}
    key = next((key for key in _MODEL if key in top and tensor_ref(top[key], label) is None), None)
    if key is not None or chunks:
        parts = chunks or {"model": top[key]}
        model = {name: _tensors(value, file) for name, value in parts.items()}
        state = {name: value for name, value in top.items() if name not in (chunks or {key})}
    else:
        flat = _tensors(tree, file)
        model = {"model": flat}
        tops = {name.partition(".")[0] for name in flat} | flat.keys()
        state = {name: value for name, value in top.items() if name not in tops}
    if not any(model.values()):
        raise FormatError(
            f"{label} holds no tensors under names",
            details=[f"found: {', '.join(printable(str(key)) for key in list(top)[:6])}"],
        )
    return model, state
