"""Hugging Face's index of a model in several files, of safetensors or of torch.save: which tensor is in which."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from converters.catalog import Problem
from converters.errors import FormatError
from converters.formats.broken import damaged_file
from converters.formats.folder import exists
from converters.formats.plain_json import read_json
from converters.names import listed, printable, quoted
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_V = TypeVar("_V")


def read_index(folder: Path, name: str, ending: str) -> dict[str, list[str]]:
    """The tensors of each shard, as an index of Hugging Face says.

    Args:
        name: The index: `model.safetensors.index.json`.
        ending: How the names of shards end.

    Raises:
        FormatError: It is not an index, names a file outside the folder, or files are missing.
    """
    document = read_json(folder / name)
    entries = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise FormatError(f"{name} has no weight_map: it is not an index of shards")
    shards: dict[str, list[str]] = {}
    for tensor, shard in entries.items():
        if not isinstance(shard, str) or not shard.endswith(ending) or re.search(r"[/\\\0]|^\.", shard):
            raise FormatError(
                f"{name} says that {printable(tensor)} is in {printable(str(shard))!r}, which is no {ending} file beside it",
                tensor=tensor,
            )
        shards.setdefault(shard, []).append(tensor)
    single = name.removesuffix(".index.json")
    if single not in shards and exists(folder / single):
        raise FormatError(
            f"{printable(str(folder))} holds {single} and {name}, whose shards are other files: "
            "transformers takes the first, other programs the second",
            hint=f"remove the one that is not the model, or name a file: {quoted(folder / single)}",
        )
    missing = [shard for shard in shards if not exists(folder / shard)]
    if missing:
        count = sum(len(shards[shard]) for shard in missing)
        text = f"no file for {len(missing)} of {len(shards)} shards: {listed(sorted(missing), 8)}"
        raise damaged_file(folder, {missing[0]: text}, counted(count, "tensor", verb="is/are") + " in them")
    return dict(sorted(shards.items()))


def indexed_tensors(
    tensors: Mapping[str, _V], wanted: Sequence[str], file: Path, index: str, problems: list[Problem]
) -> dict[str, _V]:
    """Those tensors of a shard that the index names.

    Args:
        problems: That the shard holds more is noted here, with the names.

    Raises:
        FormatError: It holds less.
    """
    lacking = [name for name in wanted if name not in tensors]
    if lacking:
        text = f"lacks {counted(len(lacking), 'tensor')} that {index} promises, for example {printable(lacking[0])}"
        raise damaged_file(file.parent, {file.name: f"{printable(file.name)} {text}"})
    if len(tensors) > len(wanted):
        unread = tuple(sorted(tensors.keys() - set(wanted)))
        text = f"holds {counted(len(unread), 'tensor', verb='that is/that are')} not in {index} and not read: "
        text += listed(unread, 8)
        problems.append(Problem("warning", f"{printable(file.name)} {text}", file=file.name, tensors=unread))
    return {name: tensors[name] for name in wanted}
