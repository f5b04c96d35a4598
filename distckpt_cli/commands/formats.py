"""`distckpt formats`: the storage formats that are read and written."""

from __future__ import annotations

from distckpt_cli.options import Speaking, spread


@spread
def formats(speaking: Speaking) -> None:
    """List the storage formats: what is read and written, and with which versions that is proven.

    $ distckpt formats
    """
    from converters.formats import REGISTRY

    console = speaking.console
    if speaking.as_json:
        keys = ("name", "summary", "read", "written")
        console.document("distckpt.formats/1", {"formats": [{k: getattr(f, k) for k in keys} for f in REGISTRY]})
    else:
        rows = [(f.name, f.read or "-", f.written or "-", f.summary) for f in REGISTRY]
        console.table(["FORMAT", "READ, MADE BY", "WRITTEN", "WHAT IT IS"], rows)
