"""Runs a few commands with colours and writes what a terminal shows as an SVG file; times and rates are left out."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

CHECKPOINT = "llama_dpreshardable_tp2pp2dp2"
COMMANDS = (
    f"distckpt inspect {CHECKPOINT}",
    f"distckpt reshard {CHECKPOINT} out --tp 4 --pp 1",
    f"distckpt diff {CHECKPOINT} out --quick",
    "distckpt export-hf out llama-hf",
)
WIDTH = 118


def main() -> None:
    """Writes the file that the first argument names."""
    golden = Path(__file__).parent.parent / "tests" / "golden"
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="standard")
    env = os.environ | {"FORCE_COLOR": "1", "DISTCKPT_PROGRESS": "off"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CHECKPOINT).symlink_to(golden / CHECKPOINT)
        for command in COMMANDS:
            console.print(Text(f"$ {command}", style="bold green"))
            words = [sys.executable, "-m", "distckpt_cli", *command.split()[1:], "--follow-links"]
            done = subprocess.run(
                words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            text = re.sub(r", \d+\.\d s, [\d.]+ [KMGT]?i?B/s", "", done.stdout)
            for line in text.splitlines():
                shown = Text.from_ansi(line)
                shown.truncate(WIDTH, overflow="ellipsis")
                console.print(shown)
            console.print()
    picture = console.export_svg(title="distckpt", unique_id="distckpt")
    # a font of the reader's own machine: a picture asks no server for anything
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    Path(sys.argv[1]).write_text(re.sub(r"<!--.*?-->\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
