"""`python -m sweep.imports`, run in `tests/`: Megatron-LM computes what transformers computes, for every family and version.

For each small model of `harness/import_cases.py` and each version of Megatron-LM: transformers makes it with random fp32
weights and computes logits; `distckpt import-hf --mcore` writes it; Megatron-LM's own parser takes the words of
`megatron_args.txt`, its own builder makes the model, its own loader takes the checkpoint strictly; and the largest
difference of the logits is the entry of the table. README.md says what this needs, and how `--megatron` is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent)]

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from harness import import_cases as cases  # noqa: E402

from .__main__ import command  # noqa: E402
from .server import Megatron  # noqa: E402

CLOSE = 1e-4
"""The largest difference of two logits that counts as none, in fp32."""


def logits_of_transformers(name: str, folder: Path, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Saves a case, and computes its logits, and those of its prediction layers where it has some."""
    model = cases.save(name, folder, dtype=torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = {"logits": model(tokens).logits}
        more = model.predictions(tokens) if hasattr(model, "predictions") else ()
    return out | {f"prediction_{number}": logits for number, logits in enumerate(more)}


def entry(name: str, megatron: Megatron, work: Path) -> str:
    """`exact to X`, `refused` with the reason, `Bridge`, or `RED` with what is wrong."""
    source, job, tokens = work / "hf", work / "job", work / "tokens.safetensors"
    for folder in (source, job):
        shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(3)
    save_file({"tokens": torch.randint(0, 251, (2, 48))}, tokens)
    wanted = logits_of_transformers(name, source, load_file(tokens)["tokens"])
    mcore = "0.16" if megatron.version.startswith("0.16") else "0.19"
    code, text = command("import-hf", source, job, "--mcore", mcore)
    if code:
        return f"refused: {text}" if code == 4 else f"RED import, exit {code}: {text}"
    if not (job / "megatron_args.txt").exists():
        return "Bridge"
    flags = shlex.split((job / "megatron_args.txt").read_text())
    if "--mtp-num-layers" not in flags:  # this version has no place for them
        wanted = {"logits": wanted["logits"]}
    made, difference = work / "logits.safetensors", 0.0
    for tp, pp in [(1, 1), *cases.LAYOUTS.get(name, ())]:
        made.unlink(missing_ok=True)
        words = [*flags, "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
        files = {"folder": job, "tokens": tokens, "logits": made}
        files["extra_states"] = work / f"extra_states_{megatron.version}_{name}_{tp}_{pp}.txt"
        options = {option: str(path) for option, path in files.items()}
        error = megatron.ask("forward", tp * pp, flags=words, **options)
        if error:
            return f"RED tp {tp}, pp {pp}: {error[:300]}"
        computed = load_file(made)
        if computed.keys() != wanted.keys():
            return f"RED Megatron computes {sorted(computed)}, transformers {sorted(wanted)}"
        differences = [float((computed[n][..., :251] - logits).abs().max()) for n, logits in wanted.items()]
        difference = max(difference, *differences)
    return f"exact to {difference:.1e}" if difference <= CLOSE else f"RED the logits differ by {difference:.1e}"


def table(results: dict[str, str]) -> str:
    """Markdown: a row for each case, a column for each version; notes below."""
    versions = sorted({key.split("/")[0] for key in results})
    lines, notes = ["| case | " + " | ".join(versions) + " |", "|---" * (1 + len(versions)) + "|"], []
    for name in cases.CASES:
        row = [results.get(f"{version}/{name}", "") for version in versions]
        if all(text in ("", "Bridge") for text in row):
            continue
        for number, text in enumerate(row):
            if text.startswith("exact to "):
                row[number] = text.removeprefix("exact to ")
            elif text:
                notes += [text] * (text not in notes)
                row[number] = f"{text.split(':')[0].split(' ')[0]} [{notes.index(text) + 1}]"
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def main() -> int:
    parser = argparse.ArgumentParser(prog="sweep.imports", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--python", type=Path, default=os.environ.get("SWEEP_PYTHON"), help="Megatron's environment")
    parser.add_argument("--megatron", action="append", default=[], metavar="VERSION=PATH[:PATH...]")
    parser.add_argument("--work", type=Path, required=True, help="a folder for models and results")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of VERSION/CASE")
    parser.add_argument("--again", default="", metavar="GLOB", help="entries to make again, as 'RED*'")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "imports.json"
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    results = json.loads(kept.read_text()) if kept.exists() else {}
    paths = dict(text.split("=", 1) for text in given.megatron or os.environ.get("SWEEP_MEGATRON", "").split())
    for version, text in {} if given.table else paths.items():
        megatron = Megatron(version, given.python, [Path(p) for p in text.split(":")], given.work)
        for name in cases.CASES:
            key, begin = f"{version}/{name}", time.monotonic()
            if not fnmatch(key, given.only) or (key in results and not fnmatch(results[key], given.again)):
                continue
            results[key] = entry(name, megatron, given.work)
            kept.write_text(json.dumps(results, indent=1))
            print(f"{key}: {results[key]} ({time.monotonic() - begin:.0f} s)", flush=True)
        megatron.close()
    print(table(results))
    return int(any(text.startswith("RED") for text in results.values()))


if __name__ == "__main__":
    sys.exit(main())
