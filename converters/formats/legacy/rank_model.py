"""What one rank's file of a legacy checkpoint holds of the model, under plain names. See `converters.formats.legacy`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.formats.containers.archive import FileTensor
from converters.formats.legacy.names import plain_name
from converters.names import listed, natural_key
from converters.pickles.nodes import PickleFormatError, pairs
from converters.torchzip.tensor_refs import DEEPEST, tensor_ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.formats.containers.archive import PtFile, TensorFile
    from converters.pickles.nodes import Node

CHUNK = re.compile(r"model(\d*)")
EXTRA = "._extra_state"


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank has of the model.

    Attributes:
        name: How to name it in an error: the rank's file.
        chunks: Tensors and extra states under plain names, one dictionary for each model chunk.
        version: `checkpoint_version`.
        before_core: Its names are those of Megatron-LM's own models, before Megatron-Core.
    """

    name: str
    chunks: list[dict[str, FileTensor | Node]]
    version: Node
    before_core: bool

    @classmethod
    def of(cls, name: str, chunks: Mapping[str, Mapping[str, FileTensor | Node]], version: Node) -> RankModel:
        """From the model chunks as they are named: `model`, or `model0` and `model1`.

        Raises:
            FormatError: Two names mean the same parameter.
        """
        order = sorted(chunks, key=natural_key)
        out = []
        for chunk in order:
            old = _before_core(chunks[chunk])
            out.append({plain_name(key, before_core=old): node for key, node in chunks[chunk].items()})
            if len(out[-1]) != len(chunks[chunk]):
                raise FormatError(f"{name}: two entries of {chunk} mean the same parameter")
        return cls(name, out, version, _before_core(chunks[order[0]]))

    @classmethod
    def of_file(cls, file: PtFile) -> RankModel:
        """From a rank's file.

        Raises:
            FormatError: There is no model in it.
        """
        tree = file.tree
        if not isinstance(tree, dict):
            raise FormatError(f"{file.name} does not hold a dictionary")
        names = [k for k in tree if isinstance(k, str) and CHUNK.fullmatch(k)]
        if not names:
            raise FormatError(f"{file.name} has no model: found {listed([str(k) for k in tree], 8)}")
        chunks = {name: dict(flattened(tree[name], file)) for name in names}
        return cls.of(file.name, chunks, tree.get("checkpoint_version", 0))


def _before_core(names: Mapping[str, Any]) -> bool:
    """Whether the names are those of Megatron-LM's own models, before Megatron-Core."""
    return any(".query_key_value." in name or ".dense_h_to_4h." in name for name in names)


def flattened(
    node: Node, file: TensorFile, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, FileTensor | Node]]:
    """Entries of nested dictionaries, their names joined: models before Megatron-Core keep their parts apart.

    Raises:
        FormatError: It is no dictionary of names.
    """
    label = file.name
    if depth > DEEPEST:
        raise FormatError(f"{label}: the model's dictionaries are nested more than {DEEPEST} deep")
    try:
        entries = pairs(node)
    except PickleFormatError as error:
        raise FormatError(f"{label}: the model is not a dictionary of parameters") from error
    for key, value in entries:
        if not isinstance(key, str):
            raise FormatError(f"{label}: the model has a parameter without a name")
        ref = tensor_ref(value, label)
        if isinstance(value, dict) or (ref is None and getattr(value, "pairs", None)):
            yield from flattened(value, file, f"{prefix}{key}.", depth + 1)
        else:
            extra = f".{key}".endswith(EXTRA)  # carried as it is
            yield f"{prefix}{key}", value if ref is None or extra else FileTensor(ref, file)
