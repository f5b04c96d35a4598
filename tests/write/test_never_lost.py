"""Nothing is passed over in silence: whatever a checkpoint holds more than the model has, each command carries or names it.

A real checkpoint is given one more weight, state, type or object. Every command is asked; a command, writer or way to load
that is not asked makes `test_all_are_asked` fail.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file, save_file

import converters
from converters.commands import plan_command
from converters.comparison.compare import DiffOptions, plan_diff, run_diff
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.formats.registry import REGISTRY
from converters.loading.loader import load
from converters.megatron.layout import Layout
from converters.names import fold
from converters.verification.run import verify
from converters.write.convert import WRITERS, plan_convert
from converters.write.export import plan_export
from converters.write.import_hf import plan_import
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from distckpt_cli.commands import COMMANDS
from harness.enriched import enrich
from harness.support import GOLDEN

LLAMA = GOLDEN / "llama_adam_tp2pp2" / "iter_0000010"
MIXTRAL = GOLDEN / "mixtral_adam_ep2tp2" / "iter_0000010"
UNITED = Layout()
OTHER = Layout(tp=2)


@dataclass(frozen=True)
class Case:
    """What a checkpoint is given.

    Attributes:
        tensors: Keys and values.
        objects: Keys and values of stored objects.
        names: What they are called in the catalog; by default the tensors' keys.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    base: object = LLAMA
    optimizer: bool = False

    @property
    def called(self):
        return self.names or tuple(self.tensors) or tuple(key.partition("/")[0] for key in self.objects)


def _bf16(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).bfloat16()


CASES = {
    "top level": Case({"value_head.weight": _bf16(1, 32)}),
    "no dot": Case({"temperature": torch.ones(1)}),
    "vision-like": Case({"some_tower.conv1.weight": _bf16(8, 3, 2, 2)}),
    "wrapped": Case({"module.value_head.weight": _bf16(1, 32)}),
    "one layer": Case({"decoder.layers.0.self_attention.sink.weight": _bf16(32)}),
    "all layers": Case(
        {"decoder.layers.self_attention.sink.weight": _bf16(2, 32)},
        names=tuple(f"decoder.layers.{n}.self_attention.sink.weight" for n in range(2)),
    ),
    "experts": Case(
        {"decoder.layers.mlp.experts.experts.linear_more.weight": _bf16(2, 4, 8)},
        names=tuple(f"decoder.layers.{n}.mlp.experts.{e}.linear_more.weight" for n in range(2) for e in range(4)),
        base=MIXTRAL,
    ),
    "int16": Case({"decoder.layers.0.self_attention.table": torch.ones(32, dtype=torch.int16)}),
    "fp8": Case({"scales": torch.ones(32).to(torch.float8_e4m3fn)}),
    "state": Case({"optimizer.state.hessian.decoder.final_layernorm.weight": torch.ones(32)}, optimizer=True),
    "state of nothing": Case(
        {
            f"optimizer.state.{state}.value_head.weight": torch.ones(1, 32)
            for state in ("fp32_param", "exp_avg", "exp_avg_sq")
        },
        optimizer=True,
    ),
    "optimizer": Case({"optimizer.curvature": torch.ones(32)}, optimizer=True),
    "object": Case(objects={"my_state/shard_0_1": {"a": 1}}),
}


def _written(plan, out, names, source=None):
    """What a writer carries or names; what it carries must be equal in the result."""
    carried = {
        name for name in names if name in plan.job.sources or name in plan.copied & plan.reader.catalog.tensors.keys()
    }
    if carried:
        run_conversion(plan)
        options = DiffOptions(tensors=sorted(carried))
        result = open_checkpoint(plan.destination / plan.folder if plan.folder else plan.destination)
        assert carried <= result.catalog.tensors.keys()
        assert run_diff(plan_diff(source or plan.reader, result, options)).identical
    objects = {o.key.partition("/")[0] for o in getattr(plan.job.seals, "_objects", ())}
    objects |= {key.partition("/")[0] for key in plan.copied}
    return carried | objects | {what if what in names else what.partition("/")[0] for what, _ in plan.dropped}


def _convert(to, **given):
    def ask(path, out, case):
        layout = UNITED if WRITERS[to].layout else None
        made = plan_convert(open_checkpoint(path), out / "x", to, layout=layout, options=given)
        return _written(made, out, case.called)

    return ask


def _diff(path, out, case):
    """A checkpoint beside the one without, from both sides; a Hugging Face folder, which holds no optimizer."""
    found = set()
    for a, b in ((path, case.base), (case.base, path)):
        report = run_diff(plan_diff(open_checkpoint(a), open_checkpoint(b)))
        assert not report.identical
        found |= {name for side in report.plan.matching.only for name in side}
        found |= {fact.name.partition("/")[0] for fact in report.plan.facts.differing}
    return found


def _diff_hf(path, out, case):
    run_conversion(plan_export(open_checkpoint(case.base), out / "hf"))
    for a, b in ((path, out / "hf"), (out / "hf", path)):
        report = run_diff(plan_diff(open_checkpoint(a), open_checkpoint(b)))
        named = {n for side in report.plan.matching.only for n in side}
        assert report.identical == (not named)
        told = " ".join(report.plan.notes)
        told = " ".join(report.plan.notes)
        found = named | report.plan.matching.skipped.keys() | {name for name in case.called if name in told}
        assert named or case.optimizer or case.objects
    return found


def _verify(path, out, case):
    report = verify(path)
    assert report.good, str(report)
    text = " ".join(report.unchecked)
    return {name for name in case.called if name in text or fold(case.called)[0][0] in text}


def _load(**options):
    def ask(path, out, case):
        if case.optimizer and not options.get("optimizer"):
            return set(case.called)  # optimizer state was not asked for
        state = load(path, UNITED, 0, **options)
        notes = " ".join(state.report.notes)
        return set(state) | {name for name in case.called if name in notes}

    return ask


def _import(path, out, case):
    """A Hugging Face folder with one more weight, of each case's name and type; it can hold neither state nor objects."""
    folder = out / "hf"
    shutil.copytree(GOLDEN / "hf_llama_safetensors", folder)
    if case.optimizer or case.objects:
        return set(case.called)
    shard = min(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    more = {f"model.{name}": torch.ones(1, 32) for name in case.called}
    save_file(load_file(shard) | more, shard, {"format": "pt"})
    document["weight_map"] |= dict.fromkeys(more, shard.name)
    index.write_text(json.dumps(document))
    made = plan_import(folder, out / "x", UNITED)
    return {what for what, _ in made.dropped}


ASKED = {
    "import-hf": _import,
    "export-hf": lambda path, out, case: _written(plan_export(open_checkpoint(path), out / "x"), out, case.called),
    "reshard": lambda path, out, case: _written(
        plan_reshard(open_checkpoint(path), out / "x", OTHER), out, case.called
    ),
    "strip": lambda path, out, case: _written(plan_command("strip", path, out / "x", {}), out, case.called),
    "edit-args": lambda path, out, case: _written(
        plan_command("edit-args", path, out / "x", {"values": {"lr": 0.5}, "new": True}),
        out,
        case.called,
        open_checkpoint(path),  # the plan's own reader has whole files for records
    ),
    "reshard united": lambda path, out, case: _written(
        plan_reshard(open_checkpoint(path), out / "x", UNITED), out, case.called
    ),
    "convert torch_dist": _convert("torch_dist"),
    "convert legacy": _convert("legacy"),
    "convert torch": _convert("torch"),
    "convert torch hf": _convert("torch", names="hf"),
    "convert safetensors": _convert("safetensors"),
    "convert safetensors hf": _convert("safetensors", names="hf"),
    "diff": _diff,
    "diff hf": _diff_hf,
    "verify": _verify,
    "load megatron": _load(names="megatron"),
    "load megatron optimizer": _load(names="megatron", optimizer=True),
    "load hf": _load(names="hf"),
}
MOVE_NOTHING = {"ls", "inspect", "show", "doctor", "cache", "formats", "models", "watch"}
"""Commands that list what there is, whatever it is called, or start others."""


def test_all_are_asked():
    words = {tuple(name.split()) for name in ASKED}
    assert COMMANDS.keys() - MOVE_NOTHING <= {first for first, *_ in words}
    assert {("convert", to) for to in WRITERS} <= words
    assert {("convert", found.name) for found in REGISTRY if found.written} <= words
    names = re.findall(r"'(\w+)'", str(inspect.signature(load).parameters["names"].annotation).replace('"', "'"))
    assert len(names) > 1
    assert {("load", name) for name in names} <= words
    assert {"load", "verify", "diff"} <= set(dir(converters))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return {
        name: enrich(case.base, folder / name.replace(" ", "_") / "iter_0000010", case.tensors, case.objects)
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("command", ASKED)
@pytest.mark.parametrize("name", CASES)
def test_carried_or_named(given, tmp_path, name, command):
    case = CASES[name]
    try:
        said = ASKED[command](given[name], tmp_path, case)
    except RequestError as error:
        text = "\n".join([error.message, *error.details, error.tensor or ""])
        folded = fold(case.called)[0][0]
        parameters = [name.split(".", 3)[-1] for name in case.called if name.startswith("optimizer.state.")]
        assert any(word in text for word in (folded, *case.called, *parameters)), text
        assert not (tmp_path / "x").exists()
        return
    lost = {word for word in case.called if not {word, word.replace(".fp32_param.", ".param.")} & said}
    assert not lost, f"{lost} of {name} got lost"
