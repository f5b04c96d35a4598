"""Files of a web server. It has no listings: what there is beside a file is known only if the file says so.

An index of safetensors names its shards; beside one of them, `config.json` and a tokenizer are asked for by name.
"""

from __future__ import annotations

import json
import posixpath
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from converters.remote.address import NO_LISTING
from converters.remote.failures import StatedError
from converters.remote.store import ObjectStore, properties_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.remote.address import Root
    from converters.remote.store import Properties

_INDEX = ".safetensors.index.json"
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_LARGEST_INDEX = 256 << 20


class WebStore(ObjectStore):
    """A web server: a store without listings."""

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._files: dict[str, Properties] = {}

    def list(self, prefix: str, *, deep: bool) -> Iterator[tuple[str, Properties | None]]:
        """Files that were requested by name, and those that an index named."""
        within = f"{prefix}/" if prefix else ""
        yield from ((key, self._files[key]) for key in sorted(self._files) if key.startswith(within))

    def head(self, key: str) -> Properties:
        """See `Store`; a page of text that a server makes up for a folder is no file."""
        properties = self._files[key] = self._head(key)
        if key.endswith(_INDEX) and properties.size <= _LARGEST_INDEX:
            self._find_shards(key, properties)
        return properties

    def _head(self, key: str) -> Properties:
        answer = self.obstore.get(self.handle, key, options={"head": True})
        if "text/html" in str(answer.attributes.get("Content-Type", "")):
            raise StatedError(21, NO_LISTING, f"{self.root}/{key}")
        return properties_of(answer.meta)

    def _find_shards(self, key: str, properties: Properties) -> None:
        try:
            weights: Any = json.loads(bytes(self.get(key, 0, properties.size)[0]))["weight_map"]
            names = {name for name in weights.values() if isinstance(name, str) and "/" not in name and name}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # reading it says what is wrong
        paths = [posixpath.join(posixpath.dirname(key), name) for name in sorted(names | set(_BESIDE))]
        with ThreadPoolExecutor(8) as pool:
            for path, shard in zip(paths, pool.map(self._look_for, paths), strict=True):
                if shard is not None:
                    self._files[path] = shard

    def _look_for(self, key: str) -> Properties | None:
        try:
            return self.retried(key, lambda: self._head(key))
        except FileNotFoundError:
            return None
