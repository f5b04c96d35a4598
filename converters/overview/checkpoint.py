"""An open checkpoint, read tensor by tensor: `converters.open`.

with converters.open("ckpt/iter_0050000") as checkpoint:
    checkpoint.keys()
    checkpoint.get_tensor("decoder.layers.0.mlp.linear_fc1.weight")      # a whole tensor
    checkpoint.get_slice("output_layer.weight")[3:7, :]                  # reads only these rows
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.io.arithmetic import UNSIGNED
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.megatron.identity import SavedLayout, identify
from converters.names import StateName, printable
from converters.optimizer.proof import proved_when_read
from converters.optimizer.state import has_optimizer, optimizer_state
from converters.overview.card import card_lines
from converters.overview.notebook import pairs_as_html
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType

_FRAMEWORKS = ("pt", "np")
_TILE_BYTES = 8 << 20


def open(
    path: str | Path, *, framework: str = "pt", format: str | None = None, follow_links: bool = False
) -> Checkpoint:
    """Opens a checkpoint of any format for reading single tensors and slices of them. Reads metadata only.

    Args:
        path: A training root, an iteration, a framework's folder, or a file inside.
        framework: "pt" gives torch tensors on the CPU, "np" numpy arrays (bf16 and fp8 with the types of `ml_dtypes`).
        format: Name of the storage format; None recognises it.
        follow_links: Its files may be links out of its folder.

    Raises:
        FormatError: Nothing there, or not a checkpoint that is read.
        RequestError: No such framework or format.
    """
    return Checkpoint(path, framework=framework, format=format, follow_links=follow_links)


class Checkpoint:
    """An open checkpoint, for reading tensors. Several threads may use it. Close it, or use it as a context manager.

    Args:
        path: What was named.
        framework: "pt" or "np".
        format: Name of the storage format; None recognises it.
        follow_links: Its files may be links out of its folder.

    Attributes:
        path: The folder with the data.
        format: Name of the storage format.
        iteration: Training iteration, None if not recorded.
    """

    def __init__(
        self, path: str | Path, *, framework: str = "pt", format: str | None = None, follow_links: bool = False
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise RequestError(f"there is no framework {framework!r}", hint="framework='pt' or framework='np'")
        self._reader = open_checkpoint(path, format, follow_links=follow_links)
        self._framework = framework
        self._lock = threading.Lock()
        self._tensors = {n: t for n, t in self._reader.catalog.tensors.items() if t.kind != "optimizer"}
        self._optimizer: Mapping[str, TensorInfo] | None = None
        self._sources = Sources(self._reader, self._tensors, drop=False)
        self._gatherer = Gatherer(self._sources)
        self.path, self.format, self.iteration = self.catalog.path, self.catalog.format, self.catalog.iteration

    @property
    def catalog(self) -> Catalog:
        """Everything that the metadata says."""
        return self._reader.catalog

    @property
    def args(self) -> Mapping[str, Any]:
        """The training arguments by name, or the model configuration of a framework that stores one; inert values."""
        return self.catalog.options

    @property
    def layout(self) -> SavedLayout:
        """The parallel layout of the job that saved; None in its fields where nothing says."""
        return identify(self.catalog).layout

    def keys(self, *, optimizer: bool = False) -> list[str]:
        """Canonical names of the tensors, in the order of the model.

        Args:
            optimizer: Also optimizer state, as `optimizer.state.STATE.PARAMETER`; flat buckets are taken apart, for which
                a sample of master weights is read.
        """
        return [*self._tensors, *(self._optimizer_tensors() if optimizer else ())]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Element type, shape and stored pieces of a tensor.

        Raises:
            RequestError: There is no such tensor.
        """
        info = self._tensors.get(name)
        if info is None and StateName.parse(name) is not None:
            info = self._optimizer_tensors().get(name)
        if info is None:
            raise RequestError(
                f"there is no tensor {printable(name)}",
                details=[
                    f"{counted(len(self._tensors), 'tensor')}, for example {printable(next(iter(self._tensors), '-'))}"
                ],
                hint="keys() lists them, keys(optimizer=True) optimizer state, too",
                tensor=name,
            )
        return info

    def get_tensor(self, name: str) -> Any:
        """A whole tensor; each record that is read whole is compared with its checksum.

        Raises:
            RequestError: There is no such tensor.
            IntegrityError: It is incomplete or damaged.
        """
        return self._convert(self.read(name), self.info(name).dtype)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to take slices of: only the bytes of a slice are read.

        Raises:
            RequestError: There is no such tensor.
        """
        return TensorSlice(self, self.info(name))

    def read(self, name: str, box: Box | None = None) -> NDArray[Any]:
        """The elements of a box of a tensor as unsigned integers of their size; None is the whole tensor.

        Reads in tiles, so that memory beyond the result stays small.
        """
        info = self.info(name)
        box = Box.whole(info.shape) if box is None else box
        out = np.empty(box.shape, UNSIGNED[info.dtype.itemsize])
        with self._lock:
            for tile in contiguous_tiles(box, max(1, _TILE_BYTES // info.dtype.itemsize)):
                out[tile.relative_to(box.start).slices] = self._gatherer.gather(name, tile)
        return out

    def close(self) -> None:
        """Closes all files."""
        self._gatherer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """The card of `distckpt inspect`."""
        return "\n".join(f"{label.ljust(10)}{text}" for label, text in self._card())

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        (path, title), *lines = self._card()
        return pairs_as_html(f"{path.strip()}: {title}", lines)

    def _card(self) -> list[tuple[str, str]]:
        return [(printable(label), printable(text)) for label, text in card_lines(self.catalog, identify(self.catalog))]

    def _convert(self, bits: NDArray[Any], dtype: DType) -> Any:
        if self._framework == "np":
            return as_numpy(bits, dtype)
        import torch

        return torch.from_numpy(bits.view(f"i{dtype.itemsize}") if dtype.itemsize < 16 else bits).view(
            getattr(torch, dtype.name)
        )

    def _optimizer_tensors(self) -> Mapping[str, TensorInfo]:
        if self._optimizer is None:
            tensors = optimizer_state(self._reader).tensors if has_optimizer(self.catalog) else {}
            self._optimizer = proved_when_read(self.catalog, tensors)
            self._sources.tensors = {**self._tensors, **self._optimizer}
        return self._optimizer


class TensorSlice:
    """A tensor that is read slice by slice, with numpy's basic indexing: integers and slices.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
    """

    def __init__(self, checkpoint: Checkpoint, info: TensorInfo) -> None:
        self._checkpoint, self._info = checkpoint, info
        self.dtype, self.shape = info.dtype, info.shape

    def get_shape(self) -> list[int]:
        """The shape, as safetensors gives it."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Any:
        words = index if isinstance(index, tuple) else (index,)
        if Ellipsis in words:
            at = words.index(Ellipsis)
            words = (*words[:at], *(slice(None),) * (len(self.shape) - len(words) + 1), *words[at + 1 :])
        if len(words) > len(self.shape):
            raise IndexError(f"{len(words)} indices for a tensor of {len(self.shape)} axes")
        words = (*words, *(slice(None),) * (len(self.shape) - len(words)))
        start: list[int] = []
        shape: list[int] = []
        inner: list[int | slice] = []
        for axis, (word, size) in enumerate(zip(words, self.shape, strict=True)):
            low, length, inner_index = _axis(axis, word, size)
            start.append(low)
            shape.append(length)
            inner.append(inner_index)
        bits = self._checkpoint.read(self._info.name, Box(tuple(start), tuple(shape)))
        return self._checkpoint._convert(np.ascontiguousarray(bits[tuple(inner)]), self.dtype)


def _axis(axis: int, index: Any, size: int) -> tuple[int, int, int | slice]:
    """First element and length of what is read of an axis, and the index into that."""
    if isinstance(index, slice):
        low, high, step = index.indices(size)
        if step < 0:
            raise IndexError("a slice with a negative step is not read: flip the result instead")
        return low, max(0, high - low), slice(None, None, step)
    position = int(index)
    if not -size <= position < size:
        raise IndexError(f"index {position} is outside of axis {axis}, which has {size} elements")
    return position % size, 1, 0


def as_numpy(bits: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Unsigned integers as numpy's array of their element type: bf16 and fp8 as `ml_dtypes` has them."""
    try:
        kind = np.dtype(dtype.name)
    except TypeError:
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, dtype.name))
    return bits.view(kind)
