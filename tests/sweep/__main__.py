"""`python -m sweep`, run in `tests/`; its README.md says how and shows the last table.

For each cell: Megatron-LM trains two steps and saves; `distckpt verify --values` looks at the result; `distckpt reshard`
rewrites it for another layout, which is verified too; Megatron-LM of the same version loads it there; and every weight,
master weight and state of the optimizer, its groups and the scheduler are compared, bit for bit, with what the job
must have at that layout. That is what the source gives when Megatron itself loads it there, if it can; else what training
gives there. Results are kept in `WORK/results.json`; cells that are there are not run again unless `--again` says so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent)]

from distckpt_cli.app import main as distckpt  # noqa: E402

from .cells import MODELS, OPTIMIZERS, Cell, cells  # noqa: E402
from .server import Megatron, differences, names  # noqa: E402


def command(*arguments: object) -> tuple[int, str]:
    """The exit code of `distckpt`, and what it said of an error, on one line."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = distckpt([str(argument) for argument in arguments] + ["--progress", "off"])
    except SystemExit as error:
        code = int(error.code or 0)
    lines = err.getvalue().strip().splitlines() or out.getvalue().strip().splitlines()
    return code, " ".join(" ".join(lines).split())[:400]


def verify(folder: Path) -> str | None:
    """None if `verify --values` answers yes and raises no doubt; else what it says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = distckpt(["verify", str(folder), "--values", "--json", "--progress", "off"])
    said = [f["message"] for check in json.loads(out.getvalue())["checks"] for f in check.get("findings", [])]
    return None if code == 0 and not said else f"verify, exit {code}: {'; '.join(said)[:300]}"


class Group:
    """The cells of one model, optimizer and version: one run of Megatron saves them all."""

    def __init__(self, megatron: Megatron, loader: Megatron, first: Cell, work: Path) -> None:
        self.loader = loader
        self.megatron, self.model, self.optimizer = megatron, MODELS[first.model], OPTIMIZERS[first.optimizer]
        self.folder = work / "-".join(first[:3])
        self.target = dict(self.model.target)
        if not self.optimizer.elementwise:
            self.target["ep"] = self.model.source["ep"]
        cfg = self.model.cfg
        if first.version == "main" and cfg.startswith("hybrid"):
            cfg = cfg.replace("hybrid", "hybridn")
        self.job = {"cfg": cfg, "seed": str(work / "seeds" / f"{cfg}-{first.version}")}
        self.flags = self.model.flags.split()

    def ask(
        self,
        job: str,
        layout: dict[str, int],
        flags: str,
        *,
        ranks: int = 0,
        by: Megatron | None = None,
        **rest: object,
    ) -> str | None:
        ranks = ranks or layout["tp"] * layout["pp"] * layout["ep"]
        options = self.job | {"flags": self.flags + flags.split(), "dist_opt": self.optimizer.distributed, **rest}
        return (by or self.megatron).ask(job, ranks, layout=layout, **options)

    def save(self, forms: list[str]) -> str | None:
        """Saves each form, and `whole`: what the real loader takes at any layout, where there is such a form."""
        if not Path(self.job["seed"], "grad1", "metadata.json").exists():
            error = self.megatron.ask("seed", 1, flags=self.flags, **self.job)
            if error:
                return error
        names = dict.fromkeys([*forms, *(["fully_reshardable"] if "dp_reshardable" in forms else [])])
        sharding = {name: name if name.endswith("reshardable") else None for name in names}
        saves = [{"folder": str(self.folder / name), "sharding": sharding[name]} for name in names]
        ranks = 4 if self.optimizer.distributed or self.model.source["ep"] > 1 else 2
        ranks = 4 if "dist_" in self.optimizer.flags else ranks
        return self.ask("save", self.model.source, self.optimizer.flags, ranks=ranks, saves=saves)

    def wanted(self, forms: list[str]) -> str | None:
        """Writes the state that every result must give, or says why neither Megatron's loader nor its training does."""
        whole = self.folder / ("fully_reshardable" if "dp_reshardable" in forms else forms[0])
        at, state = self.target, str(self.folder / "wanted")
        error = self.ask("load", at, self.optimizer.flags, folder=str(whole), state=state)
        if error and self.optimizer.elementwise:
            shutil.rmtree(state, ignore_errors=True)
            return self.ask("recompute", at, self.optimizer.flags, state=state)
        return error

    def run(self, form: str) -> str:
        """The cell's entry in the table: it begins with `exact`, `refused`, `Megatron` or `RED`."""
        source, result, at = self.folder / form, self.folder / f"{form}.result", self.target
        doubt, missing = verify(source), dict(self.optimizer.lossy).get(form)
        layout = [word for axis, size in at.items() for word in (f"--{axis}", size)]
        if missing:
            code, said = command("reshard", source, result, *layout)
            right = missing in (doubt or "") and code == 1 and missing in said
            return f"Megatron does not save its state: {said}" if right else f"RED not said: {doubt}; {code}: {said}"
        if doubt:
            return f"RED source: {doubt}"
        shutil.rmtree(result, ignore_errors=True)
        code, said = command("reshard", source, result, *layout)
        if code:
            return f"refused: {said}" if code == 4 else f"RED reshard, exit {code}: {said}"
        doubt = verify(result)
        if doubt:
            return f"RED result: {doubt}"
        flags = self.optimizer.flags if self.optimizer.result is None else self.optimizer.result
        state = self.folder / "state"
        shutil.rmtree(state, ignore_errors=True)
        error = self.ask("load", at, flags, by=self.loader, folder=str(result), state=str(state))
        if error:
            own = self.own(source, flags)
            return f"Megatron cannot load its own: {own}" if own and own == error else f"RED load: {error[:300]}"
        found = differences(self.folder / "wanted", state, versions_differ=self.loader is not self.megatron)
        if found:
            kinds = Counter(re.sub(r"^\d+\.pt: (\w+)/.*", r"\1", line) for line in found)
            if all(line.endswith("only in the wanted state") for line in found) and not self.own(source, flags):
                restored = {name.partition("/")[0] for name in names(self.folder / "own")}
                if not restored & kinds.keys():
                    return f"Megatron does not restore its own: {', '.join(kinds)}"
            return f"RED {len(found)} differ {dict(kinds)}: {found[0][:200]}"
        return "exact"

    def own(self, source: Path, flags: str) -> str | None:
        """Has Megatron load what it saved, where it saved it, into `own`."""
        ranks = 4 if self.optimizer.distributed or self.model.source["ep"] > 1 else 2
        return self.ask(
            "load", self.model.source, flags, ranks=ranks, folder=str(source), state=str(self.folder / "own")
        )


def go_through(wanted: list[Cell], servers: dict[str, Megatron], work: Path, results: dict[str, str]) -> None:
    for _, together in groupby(wanted, key=lambda cell: cell[:3]):
        group = list(together)
        megatron = servers[group[0].version]
        begin, forms = time.monotonic(), [cell.form for cell in group]
        # the form that results have is new in 0.15: those of older checkpoints are for a job that has moved on
        newer = group[0].version.startswith("0.14") and OPTIMIZERS[group[0].optimizer].distributed
        runs = Group(megatron, servers["0.16.1"] if newer else megatron, group[0], work)
        error = runs.save(forms)
        state = "Megatron cannot save: " if error else "Megatron cannot make the state: "
        error = error or runs.wanted(forms)
        for cell in group:
            entry = f"{state}{error[:300]}" if error else runs.run(cell.form)
            results["/".join(cell)] = entry
            (work / "results.json").write_text(json.dumps(results, indent=1))
            print(f"{'/'.join(cell)}: {entry} ({time.monotonic() - begin:.0f} s)", flush=True)
        if not any(results["/".join(cell)].startswith("RED") for cell in group):
            shutil.rmtree(runs.folder, ignore_errors=True)


def table(results: dict[str, str]) -> str:
    """Markdown: a row for each version, optimizer and form, a column for each model; notes below."""
    notes: list[str] = []
    rows = dict.fromkeys((cell.version, cell.optimizer, cell.form) for cell in cells() if "/".join(cell) in results)
    lines = ["| version | optimizer | form | " + " | ".join(MODELS) + " |", "|---" * (3 + len(MODELS)) + "|"]
    for version, optimizer, form in rows:
        entries = []
        for model in MODELS:
            entry = results.get(f"{version}/{model}/{optimizer}/{form}", "")
            if entry and entry != "exact":
                if entry not in notes:
                    notes.append(entry)
                entry = f"{entry.split(':')[0].split(' ')[0]} [{notes.index(entry) + 1}]"
            entries.append(entry)
        lines.append(f"| {version} | {optimizer} | {form} | " + " | ".join(entries) + " |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def main() -> int:
    parser = argparse.ArgumentParser(prog="sweep", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--python", type=Path, default=os.environ.get("SWEEP_PYTHON"), help="Megatron's environment")
    parser.add_argument("--megatron", action="append", default=[], metavar="VERSION=PATH[:PATH...]")
    parser.add_argument("--work", type=Path, required=True, help="a folder for checkpoints and results")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="of VERSION/MODEL/OPTIMIZER/FORM")
    parser.add_argument("--again", action="append", default=[], metavar="GLOB", help="entries to make again, as 'RED*'")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    if not given.table:
        paths = dict(text.split("=", 1) for text in given.megatron or os.environ.get("SWEEP_MEGATRON", "").split())
        servers = {
            v: Megatron(v, given.python, [Path(p) for p in text.split(":")], given.work) for v, text in paths.items()
        }
        for globs in given.only or ["*"]:
            todo = [cell for cell in cells() if cell.version in servers and fnmatch("/".join(cell), globs)]
            entry = {cell: results.get("/".join(cell)) for cell in todo}
            todo = [c for c in todo if entry[c] is None or any(fnmatch(entry[c] or "", again) for again in given.again)]
            go_through(todo, servers, given.work, results)
        for server in servers.values():
            server.close()
    print(table(results))
    return int(any(entry.startswith("RED") for entry in results.values()))


if __name__ == "__main__":
    sys.exit(main())
