"""`distckpt inspect`: what a checkpoint is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import matcher, printable, quoted
from converters.remote.address import named_path
from converters.words import format_size
from distckpt_cli.choices import choice
from distckpt_cli.console import Console, UsageProblem, destination_path
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import FollowLinks, Speaking, flag, panel, spread, value

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.megatron.identity import Identity
    from distckpt_cli.listing import Listing

_view, _choosing = panel("What to show"), panel("How to choose and sort")
_LISTS = ("tensors", "files", "args", "objects", "tree")
_MOST_CARDS = 3

Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CKPT...",
        help="A checkpoint: its folder, the training run's folder, or a file inside. Several are listed as by ls.",
    ),
]


@dataclass(frozen=True)
class View:
    """Which list or card of a checkpoint is shown."""

    tensors: str | None = value(_view, "[GLOB]", "List the tensors that match, layers folded.")
    flat: bool = flag(_view, "One row per tensor, object or module.", "--flat")
    tree: bool = flag(_view, "Show sizes by module, with bars.", "--tree", "--du")
    depth: int = value(_view, "N", "Levels of --tree, 3 by default.", min=1, default=3)
    files: bool = flag(_view, "List the files: which rank wrote what.", "--files")
    args: str | None = value(_view, "[GLOB]", "List the training arguments.")
    objects: str | None = value(_view, "[GLOB]", "List stored objects that are not tensors.")
    names: bool = flag(_view, "Print only names, one per line.", "--names")
    html: str | None = value(_view, "FILE", "Write all of it as one HTML page that needs no network.")
    verification: str | None = value(
        _view, "JSON", "For --html: show this output of `distckpt verify --json` on the page."
    )

    @property
    def lists(self) -> list[str]:
        """The options of the lists that were asked for."""
        return [f"--{name}" for name in _LISTS if getattr(self, name)]


@dataclass(frozen=True)
class Choosing:
    """How rows are chosen and sorted."""

    regex: bool = flag(_choosing, "GLOB is a regular expression, searched in names.", "--regex")
    ignore_case: bool = flag(_choosing, "Ignore case.", "-i", "--ignore-case")
    sort: str = value(_choosing, "KEY", "model (the default) or size.", choice("model", "size"), default="model")

    @property
    def by_size(self) -> bool:
        """The largest rows come first; else the order of the model, weights before optimizer state."""
        return self.sort == "size"

    def matcher(self, pattern: str) -> Callable[[str], bool]:
        """Whether a name matches a pattern; a glob may hold `{0..31}` as the folded tables print it.

        Raises:
            UsageProblem: It is no regular expression.
        """
        if self.regex:
            try:
                compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
            except re.error as error:
                raise UsageProblem(f"{pattern!r} is not a regular expression: {error}") from None
            return lambda name: compiled.search(name) is not None
        if not self.ignore_case:
            return matcher(pattern)
        matches = matcher(pattern.lower())
        return lambda name: matches(name.lower())


@spread
def inspect(
    ckpt: Checkpoints, view: View, choosing: Choosing, speaking: Speaking, *, follow_links: FollowLinks = False
) -> int:
    """Show what a checkpoint is: model, saved layout, optimizer, components; or list what it holds.

    Reads metadata only, never tensor data, and runs nothing that the files contain. Exit code 1 if files are missing or too
    short; of several checkpoints, if one is not complete.

        $ distckpt inspect ckpt/iter_0050000
        $ distckpt inspect ckpt --tensors '*.linear_qkv.weight' --flat
        $ distckpt inspect ckpt --files
        $ distckpt inspect ckpt --args '*lr*'
        $ distckpt inspect ckpt --tree --sort size
        $ distckpt inspect ckpt --tensors --flat --sort size | head
        $ distckpt inspect ckpt --names | grep router
    """
    if len(view.lists) > 1 and not speaking.as_json:
        hint = "ask for one, or for all with --json"
        raise UsageProblem(f"{' and '.join(view.lists)} are different views", hint=hint)
    if view.html is not None and speaking.as_json:
        raise UsageProblem("--html writes a page and --json prints a document", hint="choose one")
    if view.verification is not None and view.html is None:
        raise UsageProblem("--verification is shown on the page of --html", hint="add --html FILE")
    if not view.lists and not view.names and not speaking.as_json:
        options = {"--regex": choosing.regex, "--ignore-case": choosing.ignore_case, "--sort": choosing.sort != "model"}
        unused = [name for name, is_set in {**options, "--flat": view.flat}.items() if is_set]
        if unused:
            raise UsageProblem(f"{unused[0]} is for a list, and none is asked for", hint="add --tensors, for example")
    if view.depth != 3 and not view.tree:
        raise UsageProblem("--depth is for --tree", hint="add --tree")
    if view.names and speaking.as_json:
        raise UsageProblem("--names prints names and --json a document", hint="choose one")
    console = speaking.console
    several = [path for name in ckpt for path in _below(name)]
    if len(several) > _MOST_CARDS or (len(several) > 1 and several != ckpt):
        views = [*view.lists, *(["--html"] if view.html is not None else []), *(["--names"] if view.names else [])]
        if views:
            raise UsageProblem(
                f"{views[0]} shows one checkpoint; these are {len(several)}", hint=f"name one: {several[0]}"
            )
        return _list(console, several, follow_links=follow_links)
    if view.html is not None:
        return _write_page(console, several, view.html, view.verification, follow_links=follow_links)
    return _show_each(console, several, view, choosing, follow_links=follow_links)


def _write_page(console: Console, paths: list[str], file: str, verification: str | None, *, follow_links: bool) -> int:
    from converters.errors import DestinationError, FormatError
    from converters.formats import open_checkpoint
    from converters.overview.page import checkpoint_page

    if len(paths) > 1:
        raise UsageProblem("--html shows one checkpoint", hint=f"name one: {paths[0]}")
    try:
        answer = None if verification is None else json.loads(named_path(verification).read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{verification} is not what `distckpt verify --json` prints: {error}") from None
    target = destination_path(file)
    if target.exists() and not (target.is_file() and b"<title>distckpt" in target.read_bytes()[:1000]):
        raise DestinationError(f"{file} exists and is no page of distckpt", hint="name a new file")
    reader = open_checkpoint(paths[0], follow_links=follow_links)
    if verification is not None:
        _check_verification(verification, answer, reader.catalog.path)
    page = checkpoint_page(reader, answer)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DestinationError(f"writing {file} failed: {error.strerror or error}") from error
    console.fact("wrote", f"{file}  {format_size(len(page.encode()))}")
    return ExitCode.OK


def _check_verification(file: str, answer: Any, path: Path) -> None:
    """Refuses the result of another checkpoint.

    Raises:
        FormatError: It is no result of verify.
        RequestError: It is that of another one.
    """
    from converters.errors import FormatError, RequestError

    verified = answer.get("path") if isinstance(answer, dict) and answer.get("schema") == "distckpt.verify/1" else None
    if not isinstance(verified, str):
        raise FormatError(f"{file} is not what `distckpt verify --json` prints")
    if named_path(verified).resolve() != path.resolve():
        hint = f"distckpt verify {quoted(path)} --json > {quoted(file)}"
        raise RequestError(f"{file} is the verification of {verified}, not of {path}", hint=hint)


def _below(name: str) -> list[str]:
    """The checkpoints that a path means: itself, or those below it where it is a folder of several runs."""
    from converters.errors import DistckptError
    from converters.formats.resolve import TRACKER
    from converters.overview.runs import checkpoints_below

    folder = named_path(name)
    try:
        if not name or not folder.is_dir() or (folder / TRACKER).exists():
            return [name]
        inside = [str(path) for path in checkpoints_below(folder)]
    except (DistckptError, OSError):  # opening it says why
        return [name]
    return inside if len(inside) > 1 else [name]


def _list(console: Console, paths: list[str], *, follow_links: bool) -> int:
    from converters.overview.runs import summarize
    from distckpt_cli.commands.ls import show_summaries

    summaries = [summarize(named_path(path), follow_links=follow_links) for path in paths]
    show_summaries(console, summaries, paths)
    return ExitCode.OK if all(summary.status == "complete" for summary in summaries) else ExitCode.NO


def _show_each(console: Console, paths: list[str], view: View, choosing: Choosing, *, follow_links: bool) -> int:
    from converters.formats import open_checkpoint
    from converters.megatron.identity import identify
    from converters.overview.card import card_document
    from distckpt_cli.listing import LISTINGS

    documents, code = [], ExitCode.OK
    for number, path in enumerate(paths):
        reader = open_checkpoint(path, follow_links=follow_links)
        catalog, identity = reader.catalog, identify(reader.catalog)
        if any(problem.severity == "error" for problem in catalog.problems):
            code = ExitCode.NO
        listings: dict[str, Listing] = {}
        for name, kind in LISTINGS.items():
            if pattern := getattr(view, name) or (name == "tensors" and view.names and not view.lists):
                listings[name] = kind(reader, pattern if isinstance(pattern, str) else "*", view, choosing)
        if console.json_requested:
            lists = {name: listing.document() for name, listing in listings.items()}
            documents.append(card_document(catalog, identity) | lists)
            continue
        if number and not view.names:
            console.out()
        if listings and len(paths) > 1 and not view.names:
            console.fact(f"{catalog.path}  ", "", style="bold")
        for listing in listings.values():
            if view.names:
                console.lines(map(printable, listing.names()))
            else:
                listing.show(console)
        if not listings:
            _print_card(console, catalog, identity)
            _name_other_iterations(console, path)
            console.next_step(_next_command(reader, identity, path))
    if console.json_requested:
        console.document("distckpt.inspect/1", documents[0] if len(documents) == 1 else {"checkpoints": documents})
    return code


def _print_card(console: Console, catalog: Catalog, identity: Identity) -> None:
    """Prints what it is, the model, how it was saved, problems, components."""
    from converters.overview.card import card_lines

    for number, (label, text) in enumerate(card_lines(catalog, identity)):
        style = label if label in ("error", "warning") else None if number else "bold"
        console.fact(label, text, style=style)
    console.out()
    rows = [(c.name, f"{c.tensors:,}", ", ".join(c.dtypes) or "-", format_size(c.nbytes)) for c in identity.components]
    # sizes stand under each other at the end of the line, so the last column is padded here
    width = max((len(row[3]) for row in rows), default=0)
    columns = ["COMPONENT", ">TENSORS", "DTYPE", "SIZE".rjust(width)]
    console.table(columns, [(*row[:3], row[3].rjust(width)) for row in rows])


def _name_other_iterations(console: Console, path: str) -> None:
    """Where a run's folder was named: which of its iterations is shown."""
    from converters.formats.resolve import TRACKER, iterations

    folder = named_path(path)
    if (folder / TRACKER).is_file() and len(names := iterations(folder)) > 1:
        which = f"the run has {len(names):,} iterations; its tracker file names this one"
        console.note(f"{which}. All: distckpt ls {quoted(path)}")


def _next_command(reader: Reader, identity: Identity, path: str) -> str:
    """A command that works and tells more."""
    catalog, name = reader.catalog, quoted(path)
    doubtful = identity.optimizer.caution or identity.contradictions
    if doubtful or not catalog.tensors or any(problem.severity == "error" for problem in catalog.problems):
        return f"distckpt verify {name}"
    first = next(iter(catalog.weights), next(iter(catalog.tensors)))
    head, dot, _ = first.partition(".")
    return f"distckpt inspect {name} --tensors {quoted(f'{head}.*' if dot else first)}"
