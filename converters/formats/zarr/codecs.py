"""Chunks that are not stored as they are: compressed, checksummed, transposed, sharded. tensorstore decodes them.

Megatron compresses nothing; another program that rewrote its arrays may have. A chunk is decoded whole, by itself: its bytes
and what `.zarray` or `zarr.json` says are all that tensorstore gets to see, in memory, no path and no other file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, UnsupportedError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Codec:
    """How the chunks of an array are encoded.

    Attributes:
        driver: tensorstore's name for the format: "zarr" (version 2) or "zarr3".
        metadata: What the array's own document would be if it consisted of one chunk.
        chunk: Name of that chunk.
        nbytes: Bytes of its elements.
        text: For people: "zarr 2, compressor blosc".
    """

    driver: str
    metadata: Mapping[str, Any]
    chunk: str
    nbytes: int
    text: str

    def check(self, key: str) -> None:
        """Asks tensorstore whether it can decode such chunks.

        Args:
            key: The array, for the error.

        Raises:
            UnsupportedError: It cannot.
        """
        import tensorstore

        spec = {"driver": self.driver, "kvstore": {"driver": "memory"}, "metadata": dict(self.metadata)}
        try:
            tensorstore.open(spec, create=True).result()
        except ValueError as error:
            text = " ".join(str(error).split())
            raise UnsupportedError(
                f"{key} is stored in a way that tensorstore does not decode ({self.text})",
                details=[printable(text)[:300]],
                hint="rewrite this array without compression",
            ) from error

    def decode(self, raw: bytes) -> bytes:
        """The elements of a chunk in C order, little-endian.

        Raises:
            FormatError: They cannot be decoded, or are not as many as there should be.
        """
        import tensorstore

        document = ".zarray" if self.driver == "zarr" else "zarr.json"
        try:
            store = tensorstore.KvStore.open({"driver": "memory"}).result()
            store.write(document, json.dumps(self.metadata).encode()).result()
            store.write(self.chunk, raw).result()
            array = tensorstore.open(
                {"driver": self.driver, "fill_missing_data_reads": False}, kvstore=store, open=True
            )
            elements = bytes(array.result().read(order="C").result().tobytes())
        except ValueError as error:
            text = " ".join(str(error).split())
            raise FormatError(f"a chunk cannot be decoded ({self.text})", details=[printable(text)[:300]]) from error
        if len(elements) != self.nbytes:
            raise FormatError(f"a chunk decodes to {len(elements):,} bytes, not {self.nbytes:,} ({self.text})")
        return elements
