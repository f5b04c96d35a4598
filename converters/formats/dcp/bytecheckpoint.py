"""ByteCheckpoint's checkpoints: DCP's metadata, and the elements of tensors as they are, without a container.

    global_step_2/
        model/.metadata        model/__0_0.distcp          bytes of tensors one after the other, after those of objects
        optimizer/.metadata    optimizer/__0_0.distcp
        extra_state/extra_state_rank_0.pt                  of each rank, anything: not read

    Metadata.all_tensor_metadata   {MetadataIndex: pickle of the tensor, its storage left out; None for an object}
    Metadata.user_defined_dict     FSDP (the first): how many tensors lie in one flat parameter

Records carry no checksum: what can be noticed is a file that is absent or too short.

Source: ByteCheckpoint 0.0.3, bytecheckpoint/checkpointer/meta_type.py, engine/store_engine.py, utilities/serialization.py,
utilities/ckpt_format/fsdp_ckpt_utils.py (`fsdp_split_and_unflat_model_param`).
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from converters.box import Box
from converters.catalog import Problem, TensorInfo
from converters.chunks import FlatPart, Part
from converters.dtypes import dtype
from converters.errors import FormatError
from converters.formats.dcp.torch_dcp import TorchDcpReader
from converters.names import natural_key, parameter_of, printable
from converters.pickles.machine import parse
from converters.pickles.nodes import Obj, fields
from converters.torchzip.records import Payload
from converters.torchzip.tensor_refs import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.formats.base import StoredArchive
    from converters.formats.dcp.names import Named
    from converters.torchzip.records import Read
    from converters.torchzip.tensor_refs import TensorRef

_STEP = re.compile(r"global_step_(\d+)")
_FLAT = "_flat_param"
_COLUMNS = ("flat_param_to_fqns", "is_padding_mask", "numels_with_padding", "shapes")


class ByteCheckpointReader(TorchDcpReader):
    """An open checkpoint of ByteCheckpoint."""

    name: ClassVar[str] = "bytecheckpoint"
    framework: ClassVar[str] = "ByteCheckpoint"
    BESIDE: ClassVar[tuple[str, ...]] = ("extra_state/",)

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a record lie; what the tensor's pickle says is compared with the metadata."""
        if self._inside.find(record):
            return super().locate(record, read)
        tensor, row, label = self._chunk_of(record)
        start, length = int(self._record_start[record]), int(self._record_length[record])
        kind, shape = dtype(tensor.dtype), tuple(tensor.sizes[row].tolist())
        ref = self._described(tensor.key, tuple(tensor.starts[row].tolist()), label)
        if ref.dtype != kind or ref.shape != shape or not ref.contiguous:
            raise FormatError(
                f"{label} holds a {ref.dtype} tensor of {list(ref.shape)}, strides {list(ref.strides)}",
                details=[f"the metadata promises {kind} of {list(shape)}, in C order"],
            )
        if ref.storage_nbytes != length:
            raise FormatError(f"{label} has {length} bytes, its storage {ref.storage_nbytes}")
        return Payload(start + ref.offset * kind.itemsize, math.prod(shape) * kind.itemsize, None, start, length)

    def archives(self, file: int) -> Iterator[StoredArchive]:
        """The objects in a file; tensors are in no archive."""
        return (archive for archive in super().archives(file) if archive.record < 0)

    @cached_property
    def _tensor_pickles(self) -> dict[tuple[str, tuple[int, ...]], bytes]:
        out = {}
        described = self.metadata.attributes.get("all_tensor_metadata")
        for index, raw in described.items() if isinstance(described, dict) else ():
            index_fields = fields(index) if isinstance(index, Obj) else {}
            offset = index_fields.get("offset")
            if isinstance(offset, Obj) and isinstance(raw, bytes):
                out[str(index_fields.get("fqn")), tuple(offset.args[0] if offset.args else ())] = raw
        return out

    def _described(self, key: str, start: tuple[int, ...], label: str) -> TensorRef:
        raw = self._tensor_pickles.get((key, start))
        ref = tensor_ref(parse(raw, label=f"{label}: its pickle"), label) if raw is not None else None
        if ref is None:
            raise FormatError(f"{label} has no description: all_tensor_metadata has no tensor for it")
        return ref

    def _iteration(self) -> int | None:
        match = _STEP.fullmatch(self.folder.name)
        return int(match[1]) if match else super()._iteration()

    def _details(self) -> dict[str, str]:
        version = self.metadata.attributes.get("bytecheckpoint_version")
        return {"version": printable(version)} if isinstance(version, str) else {}

    def _tensors(self, named: Mapping[str, Named], problems: list[Problem]) -> dict[str, TensorInfo]:
        """The tensors; those that FSDP keeps in flat parameters, under their own names."""
        tensors, flat = super()._tensors(named, problems), _flat_parameters(self.metadata.attributes)
        out: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            parameter = parameter_of(name)
            pieces = flat.get(parameter)
            inner = dict(_split(info, *pieces, name.removesuffix(parameter))) if pieces is not None else {}
            out |= inner or {name: info}
        return {name: out[name] for name in sorted(out, key=natural_key)}


def _flat_parameters(attributes: Mapping[str, Any]) -> dict[str, tuple[str, list[tuple[str, tuple[int, ...], int]]]]:
    """For each flat parameter its prefix, and `(name, shape, first element)` of the tensors in it."""
    user_defined = attributes.get("user_defined_dict")
    models = (
        [m for m in (user_defined, *user_defined.values()) if isinstance(m, dict)]
        if isinstance(user_defined, dict)
        else []
    )
    out = {}
    for model in models:
        names, paddings, numels, shapes = (
            column_values if isinstance(column_values := model.get(f"fsdp_{column}"), dict) else {}
            for column in _COLUMNS
        )
        for key in names:
            inner, at, left = [], 0, list(zip(names[key], shapes[key], strict=True))
            for padding, numel in zip(paddings[key], numels[key], strict=True):
                if not padding:
                    name, shape = left.pop(0)
                    inner.append((name, _shape(shape), at))
                at += numel
            out[key] = (key.removesuffix(_FLAT), inner)
    return out


def _shape(node: Any) -> tuple[int, ...]:
    sizes = tuple(node.args[0]) if isinstance(node, Obj) else tuple(node)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise FormatError(f"a flat parameter holds a tensor of impossible shape {sizes}")
    return sizes


def _split(
    info: TensorInfo, prefix: str, inner: list[tuple[str, tuple[int, ...], int]], state: str
) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors in a flat parameter or a state of one; none of a state with another shape, such as a step."""
    (part,) = info.parts
    if len(info.shape) != 1 or not isinstance(part, Part):
        return
    for name, shape, first in inner:
        if first + math.prod(shape) > info.shape[0]:
            raise FormatError(
                f"{printable(info.name)} has {info.shape[0]} elements, {printable(name)} ends beyond them"
            )
        # given with or without the prefix
        overlap = next(k for k in range(len(name), -1, -1) if prefix.endswith(name[:k]))
        full = f"{state}{prefix}{name[overlap:]}"
        yield (
            full,
            TensorInfo(full, info.dtype, shape, info.kind, (FlatPart(part.array, ((Box.whole(shape), first),)),)),
        )
