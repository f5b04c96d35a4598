"""Megatron-Core's `torch_dist`: torch DCP files with Megatron's own keys, common state and conventions.

    iter_0000010/
        .metadata            a pickle: every key, its shape, its chunks, and where each record lies
        metadata.json        which backend wrote it; written last, so its absence means an unfinished save
        common.pt            training args and the rest of the state (Megatron-Core <= 0.18; later inside the data files)
        __{rank}_{n}.distcp  records, one torch.save archive each, one after the other: file n of that rank

Sources: megatron/core/dist_checkpointing (tags core_v0.6.0 to core_v0.19.0), torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from converters.catalog import Catalog, Problem
from converters.formats.base import COMMON_OBJECT
from converters.formats.broken import damage_in
from converters.formats.canonical import canonical_tensors
from converters.formats.common_state import read_object
from converters.formats.dcp.reader import DcpReader
from converters.formats.folder import exists
from converters.formats.megatron import common_facts, megatron_catalog
from converters.pickles.nodes import Obj, fields

if TYPE_CHECKING:
    from converters.formats.dcp.stored import DcpMetadata
    from converters.formats.megatron import CommonFacts


class TorchDistReader(DcpReader):
    """An open torch_dist checkpoint."""

    name: ClassVar[str] = "torch_dist"

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none; Megatron's list of one around it is taken off."""
        value = super().object_value(key)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _catalog(self) -> Catalog:
        folder, metadata = self.folder, self.metadata
        problems: list[Problem] = [Problem("warning", text) for text in metadata.stray]
        tensors = canonical_tensors((self._keyed(tensor) for tensor in metadata.tensors.values()), problems)
        files = self._check_files(tensors, problems)
        common = self._common()
        if common is None:
            text = "common.pt is missing: arguments, scheduler and parts of the optimizer are not known"
            problems.append(Problem("warning", text))
        return megatron_catalog(
            self.name,
            folder,
            common,
            [*metadata.tensors],
            problems,
            tensors=tensors,
            objects=self._object_infos(wrapped=True),
            producer=_producer(common_facts(common), metadata),
            files=files,
            details={"metadata class": metadata.top_class},
        )

    def _common(self) -> Any:
        path = self.folder / "common.pt"
        if not exists(path):
            return self.object_value(COMMON_OBJECT)
        with damage_in(self.folder, path.name):
            return read_object(path, path.name)


def _producer(facts: CommonFacts, metadata: DcpMetadata) -> tuple[str, str] | None:
    """The Megatron-Core versions that write such files, and what says so; None if nothing does."""
    storage = metadata.attributes.get("storage_meta")
    save_id = fields(storage).get("save_id") if isinstance(storage, Obj) else None
    if isinstance(save_id, str) and re.fullmatch(r"distckpt [\w.+]{1,40}", save_id):
        return save_id, "it says so"
    if COMMON_OBJECT in metadata.objects:
        return "Megatron-Core 0.19 or later", "common state inside the data files"
    if metadata.top_class.endswith("MCoreMetadata"):
        return "Megatron-Core 0.15", "class MCoreMetadata"
    if metadata.has_mcore_data:
        if metadata.plans is None:
            return "Megatron-Core 0.8 to 0.10", "mcore_data without save plans"
        if facts.content or not facts.args:
            return "Megatron-Core 0.13 or 0.14", "mcore_data, save plans and content_metadata"
        return "Megatron-Core 0.11 or 0.12", "mcore_data and save plans, no content_metadata"
    if metadata.planner_data is not None and facts.args:
        return "Megatron-Core 0.6 or 0.7", "planner data, no mcore_data"
    if metadata.plans is not None and (facts.content or facts.args):
        return "Megatron-Core 0.16 to 0.18", "save plans, no mcore_data, common.pt"
    return None
