"""A Hugging Face folder seen as a checkpoint of Megatron: the same records, under Megatron's names and with its arguments.

Whatever writes a Megatron checkpoint takes it as its source; nothing is copied in between.

    q_proj  | q0 | q1 | q2 | q3 |                     decoder.layers.0.self_attention.linear_qkv.weight
    k_proj  | k0 | k1 |              seen as          | q0 | q1 | k0 | v0 | q2 | q3 | k1 | v1 |
    v_proj  | v0 | v1 |                               eight pieces of three records
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from converters.box import Box, runs
from converters.catalog import Catalog, TensorInfo
from converters.chunks import Chunk, ViewPart
from converters.dtypes import dtype
from converters.formats.base import ReaderView
from converters.formats.common_state import Archive
from converters.megatron.vocabulary import is_vocabulary
from converters.models.quantized import dequantize
from converters.models.text_part import text_part
from converters.param_order import trainable
from converters.pickles.nodes import Global, Obj
from converters.planning.plan import Op
from converters.planning.routes import target_box_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from converters.chunks import StoredArray
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.models.importing import MegatronMapping
    from converters.models.quantized import Dequantized
    from converters.models.text_part import TextPart
    from converters.planning.plan import Copy, Target


class ImportedReader(ReaderView):
    """An open Hugging Face folder as a checkpoint of Megatron-LM without optimizer.

    Args:
        folder: The folder.
        mapping: Which of its elements Megatron's tensors consist of.
        arguments: Megatron-LM's arguments for the model; empty if a job of Megatron-Bridge shall start.
        section: The model's section of Megatron-Bridge's configuration, if a job of Megatron-Bridge shall start.
        cast: Type of the weights in the job; None leaves each as stored. Router biases are float32 in any case.
        iteration: That the checkpoint shall be of; None for a release.
        rows: Rows of its vocabulary, of which those that the folder lacks are the mean of those that it has; None leaves
            padding to the writer.
    """

    name: ClassVar[str] = "safetensors"

    def __init__(
        self,
        folder: Reader,
        mapping: MegatronMapping,
        arguments: Mapping[str, Any],
        *,
        section: Mapping[str, Any] | None = None,
        cast: DType | None = None,
        iteration: int | None = None,
        rows: int | None = None,
    ) -> None:
        stored = dict(folder.catalog.tensors)
        stored |= {name: stored[name].reshaped(shape) for name, shape in mapping.matrices.items()}
        tensors = {info.name: info for info in imported_tensors(stored, mapping.targets, mapping.copies)}
        for name, info in tensors.items():
            if rows is not None and is_vocabulary(name) and rows > info.shape[0]:
                padding = rows - info.shape[0]
                tensors[name] = replace(info, shape=(rows, *info.shape[1:]), mean_rows=padding)
        fp32 = dtype("float32")
        types = {name: (cast or info.dtype) if trainable(name) else fp32 for name, info in tensors.items()}
        catalog = Catalog(
            path=folder.catalog.path,
            format=folder.catalog.format,
            framework="Megatron-Bridge" if section else folder.catalog.framework,
            tensors=tensors,
            args=dict(arguments),
            config={"model": section} if section else {},
            common={},
            iteration=iteration,
            opened=folder.catalog.opened,
            imported=types,
        )
        super().__init__(folder, catalog)

    def common_state(self) -> Archive:
        """What Megatron saves of a job that has not begun, but for the optimizer; Bridge keeps no arguments there."""
        namespace = Obj(Global("argparse", "Namespace"), kind="newobj", state=dict(self.catalog.args))
        tree = {
            **({"args": namespace} if self.catalog.args else {}),
            "checkpoint_version": 3.0,
            "iteration": self.catalog.iteration or 0,
            "num_floating_point_operations_so_far": 0,
        }
        return Archive(tree, {".format_version": b"1", "byteorder": b"little", "version": b"3\n"}, "common.pt")


def imported_tensors(
    stored: Mapping[str, TensorInfo], targets: Mapping[str, Target], all_copies: Iterable[Copy]
) -> Iterator[TensorInfo]:
    """Tensors that consist of pieces of stored ones, as if they were stored themselves.

    Args:
        stored: What is stored, by name.
        targets: The tensors, by name.
        all_copies: Which elements each consists of.
    """
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in all_copies:
        copies[copy.target].append(copy)
    for name, target in targets.items():
        pieces: dict[int, tuple[StoredArray, list[Chunk]]] = {}
        for copy in copies[name]:
            for part in stored[copy.source].parts:
                array_pieces = pieces.setdefault(id(part.array), (part.array, []))[1]
                scaled = part.array.scales is not None
                array_pieces += [piece for chunk in part.chunks() for piece in _view_chunk(chunk, copy, scaled)]
        parts = tuple(ViewPart(array, tuple(array_pieces)) for array, array_pieces in pieces.values())
        shift = -1 if any(copy.op is Op.SUBTRACT_ONE for copy in copies[name]) else 0
        yield TensorInfo(name, target.dtype, target.laid, "weight", parts, shift=shift)


def _view_chunk(chunk: Chunk, copy: Copy, scaled: bool) -> Iterator[Chunk]:
    """A chunk of a copy's source, as a chunk of its target.

    Args:
        scaled: The chunk keeps its place in the stored array, for its elements have scales there.
    """
    taken: Box | None = chunk.box.intersect(copy.source_box)
    if taken is None:
        return
    inside, shape = chunk.stored(taken)
    box, base = target_box_of(copy, taken), chunk.base
    while len(shape) > len(box.shape) and inside.shape[0] == 1 and not scaled:  # one expert of all
        base += inside.start[0] * math.prod(shape[1:])
        inside, shape = Box(inside.start[1:], inside.shape[1:]), shape[1:]
    chunk = replace(chunk, base=base)
    first, _, outer = runs(inside, shape)
    transposed = chunk.transposed != (copy.op is Op.TRANSPOSE)
    if outer or transposed or scaled:
        yield replace(chunk, box=box, window=(inside.start, shape), transposed=transposed)
    else:
        yield Chunk(box, chunk.record, chunk.base + first)


def dequantized_folder(reader: Reader) -> tuple[Reader, Dequantized | None]:
    """A Hugging Face folder with its quantized weights multiplied out; any other checkpoint as it is.

    Raises:
        RequestError: The weights are quantized by an unknown method.
        IntegrityError: A quantized weight has no scales, or not those of its shape.
    """
    catalog = reader.catalog
    plain = dequantize(catalog.config, catalog.tensors) if catalog.framework == "Hugging Face" else None
    if plain is None:
        return reader, None
    return ReaderView(reader, replace(catalog, tensors=plain.tensors, config=plain.config)), plain


def text_folder(reader: Reader) -> tuple[Reader, TextPart]:
    """The folder of a model of text and images as that of its language model alone.

    Raises:
        FormatError: transformers does not take its config.json.
        RequestError: The parts cannot be told apart.
    """
    part = text_part(reader.catalog.config, reader.catalog.tensors)
    return ReaderView(reader, replace(reader.catalog, tensors=part.tensors, config=part.config)), part
