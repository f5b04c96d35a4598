"""`distckpt models`: the Hugging Face architectures that are known."""

from __future__ import annotations

from distckpt_cli.options import Speaking, spread


@spread
def models(speaking: Speaking) -> None:
    """List the Hugging Face architectures that are exported and imported.

    $ distckpt models --json
    """
    from converters.models import ARCHITECTURES

    rows = [(model.name, model.architecture) for model in ARCHITECTURES]
    console = speaking.console
    if speaking.as_json:
        console.document("distckpt.models/1", {"models": [{"name": n, "architecture": a} for n, a in rows]})
    else:
        console.table(["MODEL", "ARCHITECTURE"], rows)
