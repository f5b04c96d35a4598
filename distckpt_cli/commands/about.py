"""`distckpt formats` and `distckpt models`: what this installation can do."""

from __future__ import annotations

from distckpt_cli.console import Console
from distckpt_cli.options import Json  # noqa: TC001 - Typer reads the annotations at run time


def formats(as_json: Json = False) -> None:
    """List the storage formats: what is read and written, and with which versions that is proven."""
    from converters.formats import REGISTRY

    console = Console(json_asked=as_json)
    if as_json:
        keys = ("name", "summary", "read", "written")
        console.document("distckpt.formats/1", {"formats": [{k: getattr(f, k) for k in keys} for f in REGISTRY]})
    else:
        rows = [(f.name, f.read or "-", f.written or "-", f.summary) for f in REGISTRY]
        console.table(["FORMAT", "READ, MADE BY", "WRITTEN", "WHAT IT IS"], rows)


def models(as_json: Json = False) -> None:
    """List the Hugging Face architectures that can be exported."""
    from converters.models import KNOWN

    rows = [(model.name, model.architecture) for model in KNOWN]
    console = Console(json_asked=as_json)
    if as_json:
        console.document("distckpt.models/1", {"models": [{"name": n, "architecture": a} for n, a in rows]})
    else:
        console.table(["MODEL", "ARCHITECTURE"], rows)
