"""From any readable checkpoint to any format that is written: the table of writers.

A writer is a function `plan_<format>(reader, destination, [layout,] options) -> Conversion` and the class of its options.
An option that a writer's format does not have is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, RequestError
from converters.megatron.layout import Layout
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.write.write_plan import Conversion


@dataclass(frozen=True, slots=True)
class Writer:
    """A format that is written.

    Attributes:
        plan: `module:function` of this package.
        options: `module:class` of its options.
        layout: Files belong to ranks of a job, whose layout is asked for.
    """

    plan: str
    options: str
    layout: bool = False

    def takes(self) -> frozenset[str]:
        """What may be asked: names of the options, and of the layout's fields."""
        own = {f.name for f in fields(_named(self.options))}
        return frozenset(own | ({f.name for f in fields(Layout)} if self.layout else set()))

    def optimizers(self) -> tuple[str, ...]:
        """Forms of the optimizer's state that may be asked for."""
        return tuple(getattr(_named(self.options), "OPTIMIZERS", ()))


WRITERS: dict[str, Writer] = {
    "torch_dist": Writer("reshard:plan_reshard", "reshard:TorchDistOptions", layout=True),
    "legacy": Writer("legacy:plan_legacy", "legacy:LegacyOptions", layout=True),
    "torch": Writer("container:plan_torch", "container:TorchOptions"),
    "safetensors": Writer("container:plan_safetensors", "container:SafetensorsOptions"),
}
"""By the name that `--to` takes."""


def plan_convert(
    reader: Reader,
    destination: Path,
    to: str,
    *,
    layout: Layout | None = None,
    options: Mapping[str, Any],
) -> Conversion:
    """Decides everything about a conversion and proves it complete; writes nothing.

    Args:
        layout: The layout of the job that will load the result; None where the format has none.
        options: What else was asked for, by the names of the writer's options.

    Raises:
        RequestError: The format is not written, or does not take what is asked.
        DistckptError: See the writer.
    """
    writer = WRITERS.get(to)
    if writer is None:
        raise RequestError(f"the format {printable(to)!r} is not written", hint=f"known: {', '.join(WRITERS)}")
    strange = sorted(options.keys() - writer.takes())
    if strange or (layout is not None and not writer.layout):
        raise RequestError(f"the format {to} does not take {', '.join(strange) or 'a layout'}")
    if not reader.catalog.tensors:
        raise FormatError(f"{printable(str(reader.catalog.path))} holds no tensors in the format {reader.name}")
    plan: Callable[..., Conversion] = _named(writer.plan)
    layouts: list[Any] = [layout or Layout()] if writer.layout else []
    conversion = plan(reader, destination, *layouts, _named(writer.options)(**options))
    formats = ("format", f"{reader.name} -> {to}")
    return replace(
        conversion, command="convert", summary=(formats, *conversion.summary), facts={"to": to, **conversion.facts}
    )


def _named(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)
