"""`distckpt inspect`: what a checkpoint is."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Ckpt, Json, Verbose  # noqa: TC001 - Typer reads the annotations at run time

if TYPE_CHECKING:
    from converters.formats.base import Reader

_PANEL = "What to show"


def inspect(
    ckpt: Ckpt,
    tensors: Annotated[
        str | None,
        typer.Option(metavar="[GLOB]", help="List the tensors that match, layers folded.", rich_help_panel=_PANEL),
    ] = None,
    flat: Annotated[
        bool, typer.Option("--flat", help="One row for each tensor or object.", rich_help_panel=_PANEL)
    ] = False,
    files: Annotated[
        bool, typer.Option("--files", help="List the files: which rank wrote what.", rich_help_panel=_PANEL)
    ] = False,
    args: Annotated[
        str | None,
        typer.Option(metavar="[GLOB]", help="List the training arguments.", rich_help_panel=_PANEL),
    ] = None,
    objects: Annotated[
        str | None,
        typer.Option(metavar="[GLOB]", help="List what is stored besides tensors.", rich_help_panel=_PANEL),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Names only, one on each line.", rich_help_panel="Output")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> int:
    """Show what a checkpoint is: model, saved layout, optimizer, components; or list what it holds.

    Reads metadata only, never tensor data, and runs nothing that the files contain.
    """
    views = [name for name, asked in [("--tensors", tensors), ("--files", files), ("--args", args)] if asked]
    views += ["--objects"] if objects else []
    if len(views) > 1 and not as_json:
        raise UsageProblem(f"{' and '.join(views)} are different views", hint="ask for one, or for all with --json")
    if quiet and as_json:
        raise UsageProblem("-q prints names and --json a document", hint="choose one")
    from converters.formats import open_checkpoint

    console = Console(json_asked=as_json, quiet=quiet, verbose=verbose)
    reader = open_checkpoint(ckpt)
    if as_json:
        console.document("distckpt.inspect/1", _document(reader, tensors, args, objects, flat))
    elif quiet:
        console.lines(_names(reader, tensors, files, args, objects))
    else:
        _show(console, reader, ckpt, tensors, files, args, objects, flat)
    return ExitCode.OK


def _show(
    console: Console,
    reader: Reader,
    ckpt: str,
    tensors: str | None,
    files: bool,
    args: str | None,
    objects: str | None,
    flat: bool,
) -> None:
    from distckpt_cli import listing

    catalog = reader.catalog
    if tensors:
        listing.print_tensors(console, listing.chosen_tensors(catalog, tensors), flat=flat)
    elif args:
        listing.print_args(console, listing.chosen_args(catalog, args))
    elif objects:
        listing.print_objects(console, listing.chosen_objects(catalog, objects), flat=flat)
    else:
        from converters.facts.identity import identify
        from distckpt_cli.card import print_card

        identity = identify(catalog)
        if files:
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


def _names(reader: Reader, tensors: str | None, files: bool, args: str | None, objects: str | None) -> list[str]:
    from converters.names import printable
    from distckpt_cli import listing

    catalog = reader.catalog
    if files:
        names = [info.name for info in catalog.files]
    elif args:
        names = list(listing.chosen_args(catalog, args))
    elif objects:
        names = [item.key for item in listing.chosen_objects(catalog, objects)]
    else:
        names = [tensor.name for tensor in listing.chosen_tensors(catalog, tensors or "*")]
    return [printable(name) for name in names]


def _document(reader: Reader, tensors: str | None, args: str | None, objects: str | None, flat: bool) -> dict[str, Any]:
    from converters.facts.identity import identify
    from distckpt_cli import listing
    from distckpt_cli.card import card_document

    catalog = reader.catalog
    document = card_document(catalog, identify(catalog))
    if tensors:
        chosen = listing.chosen_tensors(catalog, tensors)
        document["tensors"] = [listing.tensor_document(reader, tensor, chunks=flat) for tensor in chosen]
    if args:
        document["args"] = listing.chosen_args(catalog, args)
    if objects:
        document["objects"] = [asdict(item) for item in listing.chosen_objects(catalog, objects)]
    return document
