"""`distckpt formats` and `distckpt models`: what this installation can do."""

from __future__ import annotations

from distckpt_cli.options import Speaking, spread


@spread
def formats(speaking: Speaking) -> None:
    """List the storage formats: what is read and written, and with which versions that is proven."""
    from converters.formats import REGISTRY

    console = speaking.console
    if speaking.as_json:
        keys = ("name", "summary", "read", "written")
        console.document("distckpt.formats/1", {"formats": [{k: getattr(f, k) for k in keys} for f in REGISTRY]})
    else:
        rows = [(f.name, f.read or "-", f.written or "-", f.summary) for f in REGISTRY]
        console.table(["FORMAT", "READ, MADE BY", "WRITTEN", "WHAT IT IS"], rows)


@spread
def models(speaking: Speaking) -> None:
    """List the Hugging Face architectures that are exported and imported."""
    from converters.models import ARCHITECTURES

    rows = [(model.name, model.architecture) for model in ARCHITECTURES]
    console = speaking.console
    if speaking.as_json:
        console.document("distckpt.models/1", {"models": [{"name": n, "architecture": a} for n, a in rows]})
    else:
        console.table(["MODEL", "ARCHITECTURE"], rows)
