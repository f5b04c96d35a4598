"""`distckpt inspect`: what a checkpoint is."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from distckpt_cli.console import Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Ckpt, Json, Verbose, output, panel, spread

if TYPE_CHECKING:
    from converters.formats.base import Reader

_shown = panel("What to show")


@dataclass(frozen=True)
class View:
    """What is shown of a checkpoint."""

    tensors: Annotated[str | None, _shown(metavar="[GLOB]", help="List the tensors that match, layers folded.")] = None
    flat: Annotated[bool, _shown("--flat", help="One row for each tensor or object.")] = False
    files: Annotated[bool, _shown("--files", help="List the files: which rank wrote what.")] = False
    args: Annotated[str | None, _shown(metavar="[GLOB]", help="List the training arguments.")] = None
    objects: Annotated[str | None, _shown(metavar="[GLOB]", help="List what is stored besides tensors.")] = None


@spread
def inspect(
    ckpt: Ckpt,
    view: View,
    *,
    quiet: Annotated[bool, output("-q", "--quiet", help="Names only, one on each line.")] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> int:
    """Show what a checkpoint is: model, saved layout, optimizer, components; or list what it holds.

    Reads metadata only, never tensor data, and runs nothing that the files contain.
    """
    views = [f"--{name}" for name in ("tensors", "files", "args", "objects") if getattr(view, name)]
    if len(views) > 1 and not as_json:
        raise UsageProblem(f"{' and '.join(views)} are different views", hint="ask for one, or for all with --json")
    if quiet and as_json:
        raise UsageProblem("-q prints names and --json a document", hint="choose one")
    from converters.formats import open_checkpoint

    console = Console(json_asked=as_json, quiet=quiet, verbose=verbose)
    reader = open_checkpoint(ckpt)
    if as_json:
        console.document("distckpt.inspect/1", _document(reader, view))
    elif quiet:
        console.lines(_names(reader, view))
    else:
        _show(console, reader, ckpt, view)
    return ExitCode.OK


def _show(console: Console, reader: Reader, ckpt: str, view: View) -> None:
    from distckpt_cli import listing

    catalog = reader.catalog
    if view.tensors:
        listing.print_tensors(console, listing.chosen_tensors(catalog, view.tensors), flat=view.flat)
    elif view.args:
        listing.print_args(console, listing.chosen_args(catalog, view.args))
    elif view.objects:
        listing.print_objects(console, listing.chosen_objects(catalog, view.objects), flat=view.flat)
    else:
        from converters.facts.identity import identify
        from distckpt_cli.card import print_card

        identity = identify(catalog)
        if view.files:
            listing.print_files(console, reader, identity.layout)
            return
        print_card(console, catalog, identity)
        me = f"distckpt inspect {shlex.quote(ckpt)}"
        doubtful = identity.optimizer.caution or identity.contradictions
        if doubtful or any(problem.severity == "error" for problem in identity.problems):
            console.next_step(f"distckpt verify {shlex.quote(ckpt)}")
        elif catalog.tensors:
            first = next(iter(catalog.weights), next(iter(catalog.tensors))).partition(".")[0]
            console.next_step(f"{me} --tensors {shlex.quote(first + '.*')}")


def _names(reader: Reader, view: View) -> list[str]:
    from converters.names import printable
    from distckpt_cli import listing

    catalog = reader.catalog
    if view.files:
        names = [info.name for info in catalog.files]
    elif view.args:
        names = list(listing.chosen_args(catalog, view.args))
    elif view.objects:
        names = [item.key for item in listing.chosen_objects(catalog, view.objects)]
    else:
        names = [tensor.name for tensor in listing.chosen_tensors(catalog, view.tensors or "*")]
    return [printable(name) for name in names]


def _document(reader: Reader, view: View) -> dict[str, Any]:
    from converters.facts.identity import identify
    from distckpt_cli import listing
    from distckpt_cli.card import card_document

    catalog = reader.catalog
    document = card_document(catalog, identify(catalog))
    if view.tensors:
        chosen = listing.chosen_tensors(catalog, view.tensors)
        document["tensors"] = [listing.tensor_document(reader, tensor, chunks=view.flat) for tensor in chosen]
    if view.args:
        document["args"] = listing.chosen_args(catalog, view.args)
    if view.objects:
        document["objects"] = [asdict(item) for item in listing.chosen_objects(catalog, view.objects)]
    return document
