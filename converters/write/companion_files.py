"""The small files beside a Hugging Face model's weights: tokenizer, templates, code; which of them go along."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.formats.folder import read_small
from converters.formats.links import enclose, escape
from converters.names import printable
from converters.transformers_config import CODE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.write.write_plan import ExtraFile


def read_reference(folder: Path | None) -> Mapping[str, Any]:
    """Contents of the config.json of a Hugging Face folder; empty without a folder.

    Raises:
        FormatError: There is none, or it is not one.
    """
    if folder is None:
        return {}
    try:
        enclose(folder)
        present = (folder / "config.json").is_file()
    except OSError as error:
        raise FormatError(f"reading {printable(str(folder))} failed: {error.strerror}") from error
    if not present:
        raise FormatError(
            f"--hf-config {printable(str(folder))} has no config.json", hint="give a Hugging Face model folder"
        )
    try:
        document = json.loads(read_small(folder / "config.json", 16 << 20))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{printable(str(folder / 'config.json'))} is not JSON: {printable(str(error))}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{printable(str(folder / 'config.json'))} is not a JSON object")
    if type(document.get("vocab_size", 0)) is not int:
        raise FormatError(f"vocab_size in {printable(str(folder / 'config.json'))} is no whole number")
    return document


# weights in any form, and what describes their files: never taken over from the reference folder
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".index.json")
# what Python could run, by itself or with trust_remote_code
_CODE = (".py", ".pyc", ".so", ".pkl", ".pickle")


def own_tokenizer(catalog: Catalog, notes: list[str]) -> dict[str, ExtraFile]:
    """The files of a tokenizer that lies in the checkpoint, as `transformers` looks for them."""
    folder = catalog.path / "tokenizer"
    if not folder.is_dir() or escape(folder) is not None:
        return {}
    return hf_companions(folder, False, {}, notes, of="the checkpoint's tokenizer/")


def hf_companions(
    folder: Path, copy_code: bool, config: dict[str, Any], notes: list[str], *, of: str = "--hf-config"
) -> dict[str, ExtraFile]:
    """Tokenizer and other small files beside `config.json`. Code, and what names it, only if it is asked for.

    Args:
        copy_code: Code is taken, too.
        config: Contents of `config.json`; what names code is taken out of it.
        notes: What was left out is added to these.
        of: What the folder is called in notes.
    """
    files: dict[str, ExtraFile] = {}
    code, foreign = [], []
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.name.endswith(_NOT_COPIED) or not path.is_file():
            continue
        if escape(path) is not None:
            foreign.append(path.name)
            continue
        if path.name.endswith(_CODE):
            code.append(path.name)
            if not copy_code:
                continue
        files[path.name] = path
        if path.suffix == ".json" and not copy_code and (plain := _without_code(path)) is not None:
            files[path.name] = plain
            code.append(f"auto_map in {path.name}")
    if any(key in config for key in CODE_KEYS):
        code.append("auto_map in config.json")
        for key in () if copy_code else CODE_KEYS:
            config.pop(key, None)
    named = printable(", ".join(code))
    if code and copy_code:
        notes.append(f"code was copied along and runs only with trust_remote_code: {named}")
    elif code:
        notes.append(f"code of {of} was left out: {named}" + ("; --copy-code copies it" if of == "--hf-config" else ""))
    if foreign:
        notes.append(f"links to outside of {of} were left out: {printable(', '.join(foreign))}")
    return files


def _without_code(path: Path) -> bytes | None:
    """A JSON file without what names code; None if it names none."""
    if path.stat().st_size > 64 << 20:  # a tokenizer; what names code is small
        return None
    raw = read_small(path)
    try:
        document = json.loads(raw) if any(key.encode() in raw for key in CODE_KEYS) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not any(key in document for key in CODE_KEYS):
        return None
    return json_bytes({key: value for key, value in document.items() if key not in CODE_KEYS})


def json_bytes(document: Any) -> bytes:
    """A document as a JSON file for people."""
    return json.dumps(document, indent=2).encode() + b"\n"
