"""Folders that `torch.distributed.checkpoint.save` writes of any state dictionary: FSDP2, HSDP, DTensors, plain tensors.

    checkpoint/
        .metadata
        __{rank}_{n}.distcp

A tensor is what its chunks make together, however many mesh axes it was divided over. Names: see `names`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from converters.catalog import Catalog, Problem, TensorInfo
from converters.chunks import Part
from converters.formats.canonical import iteration_of
from converters.formats.dcp.names import hugging_face, name_keys, paths
from converters.formats.dcp.reader import DcpReader
from converters.names import listed, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.formats.dcp.names import Named, Path


class TorchDcpReader(DcpReader):
    """An open folder of torch DCP."""

    name: ClassVar[str] = "torch_dcp"
    framework: ClassVar[str] = "torch DCP"

    def _catalog(self) -> Catalog:
        key_paths = paths([*self.metadata.tensors, *self.metadata.objects], self.metadata.planner_data)
        named = self._named({key: key_paths[key] for key in self.metadata.tensors})
        problems: list[Problem] = [Problem("warning", text) for text in self.metadata.stray]
        tensors = self._tensors(named, problems)
        top = dict.fromkeys(path[0] for path in key_paths.values() if len(path) > 1)
        hf = hugging_face(name for name, t in tensors.items() if t.kind == "weight")
        details = {"metadata class": self.metadata.top_class}
        if top:
            details["state dictionary"] = listed(list(top), 12)
        return Catalog(
            path=self.folder,
            format=self.name,
            framework="Hugging Face" if hf else self.framework,
            tensors=tensors,
            objects=self._object_infos(wrapped=False),
            iteration=self._iteration(),
            files=self._check_files(tensors, problems),
            problems=tuple(problems),
            details=details | self._details(),
        )

    def _named(self, key_paths: Mapping[str, Path]) -> dict[str, Named]:
        return name_keys(key_paths)

    def _iteration(self) -> int | None:
        return iteration_of(self.folder)

    def _details(self) -> dict[str, str]:
        return {}

    def _tensors(self, named: Mapping[str, Named], problems: list[Problem]) -> dict[str, TensorInfo]:
        out = {}
        for key, stored in self.metadata.tensors.items():
            keyed, (name, kind) = self._keyed(stored), (named[key].name, named[key].kind)
            if keyed.fault:
                problems.append(Problem("error", f"{printable(key)}: {keyed.fault}", tensors=(name,)))
            out[name] = TensorInfo(name, keyed.dtype, stored.shape, kind, (Part(keyed.array),))
        return {name: out[name] for name in sorted(out, key=natural_key)}
