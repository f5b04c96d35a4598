"""Configuration files of NeMo and Megatron-Bridge, as plain data: a tag that names a class is not followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from converters.errors import FormatError
from converters.formats.folder import read_small
from converters.names import printable

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT, _MOST_NODES = 8 << 20, 50_000


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping that a YAML file holds; empty if it holds something else.

    Raises:
        FormatError: Not YAML, too large, or more aliases than a configuration has.
    """
    raw = read_small(path, _LIMIT)
    try:
        document = yaml.load(raw, Loader=PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FormatError(f"{path.name} is not plain YAML", details=[printable(str(error))[:300]]) from error
    return document if isinstance(document, Mapping) else {}


class PlainLoader(yaml.SafeLoader):
    """Plain data only. Python object tags become None: a config may name classes (`!!python/...`), we never build them."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node of the document; counts values as often as aliases repeat them, and refuses an alias in what it names."""
        sizes: dict[str, int] = self.__dict__.setdefault("_sizes", {})  # of what has a name; 0 while it is being read
        before = self.__dict__.setdefault("_nodes", 0)
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = str(getattr(event, "anchor", None) or "")
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and sizes.get(anchor) == 0:
            raise yaml.YAMLError(f"{anchor} contains itself")
        self._nodes = before + (sizes.get(anchor, 1) if is_alias else 1)
        if self._nodes > _MOST_NODES:  # "billion laughs": a small file that prints as gigabytes
            raise yaml.YAMLError("too many values for a configuration")
        if anchor and not is_alias:
            sizes[anchor] = 0
        node = super().compose_node(parent, index)
        if anchor and not is_alias:
            sizes[anchor] = self._nodes - before
        return node


def _ignore_tag(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return suffix or node.value


def _short_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """A number; text if it is longer than any. `1:59:59...` is one to the base 60, at a cost that is quadratic."""
    if len(node.value) > 400:
        return node.value
    integer = node.tag == "tag:yaml.org,2002:int"
    return loader.construct_yaml_int(node) if integer else loader.construct_yaml_float(node)


for _tag in ("int", "float"):
    PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _short_number)
PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _ignore_tag)
PlainLoader.add_multi_constructor("!", _ignore_tag)
