"""From any readable checkpoint to any format that is written: the table of writers.

A writer is a function `plan_<format>(reader, destination, [layout,] options) -> Conversion` and the class of its options.
An option that a writer's format does not have is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, RequestError
from converters.megatron.layout import Layout
from converters.names import printable
from converters.write.container import SafetensorsOptions, TorchOptions, plan_safetensors, plan_torch
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.reshard import TorchDistOptions, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.write.write_plan import Conversion, WriteOptions


@dataclass(frozen=True, slots=True)
class Writer:
    """A format that is written.

    Attributes:
        plan: Decides everything, and writes nothing.
        options: The class of its options.
        layout: Files belong to ranks of a job, whose layout is asked for.
    """

    plan: Callable[..., Conversion]
    options: type[WriteOptions]
    layout: bool = False

    def takes(self) -> frozenset[str]:
        """What may be asked: names of the options, and of the layout's fields."""
        classes: list[Any] = [self.options, Layout] if self.layout else [self.options]
        return frozenset(option.name for options in classes for option in fields(options))

    def optimizers(self) -> tuple[str, ...]:
        """Forms of the optimizer's state that may be asked for."""
        return self.options.CHOICES.get("optimizer", ())


WRITERS: dict[str, Writer] = {
    "torch_dist": Writer(plan_reshard, TorchDistOptions, layout=True),
    "legacy": Writer(plan_legacy, LegacyOptions, layout=True),
    "torch": Writer(plan_torch, TorchOptions),
    "safetensors": Writer(plan_safetensors, SafetensorsOptions),
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
    layouts: list[Any] = [layout or Layout()] if writer.layout else []
    conversion = writer.plan(reader, destination, *layouts, writer.options(**options))
    formats = ("format", f"{reader.name} -> {to}")
    return replace(
        conversion, command="convert", summary=(formats, *conversion.summary), facts={"to": to, **conversion.facts}
    )
