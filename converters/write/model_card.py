"""The model card of an export: README.md with the YAML header that the hub reads, made from the export's report.

Source: Hugging Face hub documentation, "Model Cards" (metadata).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from converters.remote.address import repository_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CARD = "README.md"
"""Its name."""


def loading_line(destination: Path, *, peft: bool) -> str:
    """A line of Python that loads what was exported."""
    model = json.dumps(repository_of(destination) or str(destination))
    if peft:
        return f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({model})"
    return f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({model})"


def model_card(report: Mapping[str, Any], config: Mapping[str, Any], destination: Path, *, peft: bool = False) -> bytes:
    """What a person should know of an exported model; nothing that the export does not know is claimed, such as a license.

    Args:
        report: See `export_report`.
        config: What config.json, or adapter_config.json, says.
        destination: The repository on the hub.
        peft: Adapters were written, not the model.
    """
    source, types = report["source"], sorted({target["dtype"] for target in report["targets"].values()})
    header: dict[str, Any] = {"library_name": "peft" if peft else "transformers", "tags": ["distckpt", "megatron"]}
    if not peft:
        header["pipeline_tag"] = "text-generation"
    elif config.get("base_model_name_or_path"):
        header["base_model"] = config["base_model_name_or_path"]
    rows = (
        ("architecture", report["architecture"]),
        ("parameters", f"{report['parameters']:,}"),
        ("element types", ", ".join(types)),
        ("tensors", f"{report['target_tensors']:,}"),
        ("training iteration", source["iteration"]),
        ("saved by", source["written_by"]),
        ("saved as", source["format"]),
        ("exported by", f"distckpt {report['distckpt']}"),
    )
    lines = ["---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", "", f"# {repository_of(destination)}", ""]
    content = "LoRA adapters" if peft else "weights"
    lines.append(f"The {content} of a training checkpoint. `distckpt-report.json` accounts for every tensor of it.")
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {label} | {_plain(value)} |" for label, value in rows if value not in (None, "")]
    lines += ["", "```python", *loading_line(destination, peft=peft).replace("M.", "model = M.").split("; "), "```"]
    if report["dropped"]:
        lines += ["", "Not exported:", "", *(f"- {text}" for text in _left_out(report["dropped"]))]
    if report["notes"]:
        lines += ["", "Notes of the export:", "", *(f"- {_plain(note)}" for note in report["notes"])]
    return "\n".join([*lines, ""]).encode()


def _left_out(dropped: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reasons, once each, with an example."""
    examples = {item["reason"]: item["tensor"] for item in reversed(dropped)}
    return [f"{_plain(reason)}, such as `{_plain(examples[reason])}`" for reason in sorted(examples)]


def _plain(value: Any) -> str:
    """A value of a checkpoint as text that Markdown and HTML leave as it is."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("|", "\\|").replace("`", "'").replace("[", "\\[")
