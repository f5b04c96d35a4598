"""`diff` as a library: goldens of one training against each other, changed elements, what counts and what does not."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest

from converters.comparison.compare import DiffOptions, plan_diff, run_diff
from converters.comparison.pairs import Side
from converters.errors import IntegrityError, Interrupted, RequestError
from converters.events import Moved, PlanReady, StopFlag
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.megatron.layout import Layout
from converters.pickles.nodes import fields, set_field
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from harness.checkpoints import GOLDENS, edit_metadata, flip, payloads, write_llama
from harness.diff_cases import set_element, values
from harness.support import GOLDEN

LEGACY = {
    "legacy_llama_adam_tp2pp2": "llama",
    "legacy_llama_distopt_tp2pp2dp2": "llama",
    "v012_legacy_llama_distopt_tp2pp2dp2": "llama",
    "legacy_mixtral_distopt_ep2pp2": "mixtral",
    "legacy_gpt_adam_tp2pp2": "gpt",
    "legacy_llama4_vpp2_tp2pp2": "llama4",
}
TRAININGS = {name: config for name, (config, _) in GOLDENS.items()} | LEGACY
LLAMA = "llama_adam_tp2pp2"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
MOMENT = "optimizer.state.exp_avg_sq.decoder.layers.1.mlp.linear_fc1.weight"
NO_OPTIMIZER = ("optimizer", "opt_param_scheduler")


def diff(a, b, **options):
    """The report; a name means a golden checkpoint."""
    paths = (GOLDEN / x if isinstance(x, str) else x for x in (a, b))
    return run_diff(plan_diff(*map(open_checkpoint, paths), DiffOptions(**options)))


def differing(report):
    return {t.name: t.values for t in report.tensors if t.differs}


def counted(report):
    return [fact.name for fact in (*report.plan.arguments, *report.plan.facts.differing) if fact.counts]


def copy_of(name, into):
    shutil.copytree(GOLDEN / name, into / name)
    return into / name


# ---------------------------------------------------------------------- the same training, stored otherwise


def _pairs(*, every):
    by_config = {}
    for name, config in TRAININGS.items():
        by_config.setdefault(config, []).append(name)
    for names in by_config.values():
        yield from itertools.combinations(names, 2) if every else itertools.pairwise(names)


def _compare_pair(a, b):
    # Megatron-Core 0.9 drew other random numbers on the way; one of the two may hold weights only
    versions = {name[:4] for name in (a, b) if name.startswith("v009")}
    optimizer = [any(n.startswith("optimizer") for n in open_checkpoint(GOLDEN / x).catalog.tensors) for x in (a, b)]
    optimizer = [
        o or "reshardable" in x or "distopt" in x or "dpzero" in x for o, x in zip(optimizer, (a, b), strict=True)
    ]
    ignore = ("rng_state",) if versions else ()
    report = diff(a, b, ignore=(*ignore, *(NO_OPTIMIZER if optimizer[0] != optimizer[1] else ())))
    assert counted(report) == []
    assert differing(report) == {}
    assert report.identical
    assert len(report.tensors) > 10
    assert any(t.name.startswith("optimizer.state.exp_avg.") for t in report.tensors) == all(optimizer)


@pytest.mark.parametrize(("a", "b"), _pairs(every=False))
def test_goldens_of_one_training_are_identical(a, b):
    _compare_pair(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), _pairs(every=True))
def test_every_pair_of_goldens_of_one_training_is_identical(a, b):
    _compare_pair(a, b)


CHANGED = {QKV: (37, 5), MOMENT: (50, 3), "embedding.word_embeddings.weight": (119, 31)}


@pytest.mark.parametrize("name", [n for n, config in TRAININGS.items() if config == "llama" and "weights" not in n])
def test_changed_elements_are_found_at_their_places(name, tmp_path):
    changed = copy_of(name, tmp_path)
    for tensor, index in CHANGED.items():
        set_element(changed, tensor, index, lambda bits: bits ^ 1)
    report = diff(LLAMA, changed, ignore=("rng_state",))
    assert not report.identical
    assert counted(report) == []
    assert differing(report).keys() == CHANGED.keys()
    sides = [Side.both(r, r)[0] for r in map(open_checkpoint, (GOLDEN / LLAMA, changed))]
    for tensor, found in differing(report).items():
        before, after = (values(side, tensor) for side in sides)
        index, rows = CHANGED[tensor], 120 if tensor.startswith("embedding") else len(before)
        a, b = before[:rows].reshape(-1), after[:rows].reshape(-1)
        assert (found.differing, found.unequal) == (1, 1)
        assert found.first == found.worst == (index, before[index], after[index])
        assert found.max_abs == abs(before[index] - after[index]) > 0
        assert found.max_rel == found.max_abs / max(abs(before[index]), abs(after[index]))
        assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)


# ---------------------------------------------------------------------- what counts


def test_rows_beyond_the_vocabulary_do_not_count(tmp_path):
    changed = copy_of(LLAMA, tmp_path)
    set_element(changed, "embedding.word_embeddings.weight", (125, 3), lambda bits: bits ^ 0x4000)
    report = diff(LLAMA, changed)
    assert report.identical
    (padding,) = (t.padding for t in report.tensors if t.padding is not None and t.padding.differing)
    assert padding.first[0] == (125, 3)
    # the last trained row does
    set_element(changed, "embedding.word_embeddings.weight", (119, 3), lambda bits: bits ^ 0x4000)
    assert [v.first[0] for v in differing(diff(LLAMA, changed)).values()] == [(119, 3)]
    # and if somebody says that all rows are trained, so do they
    assert [v.differing for v in differing(diff(LLAMA, changed, vocab_size=128)).values()] == [2]


def test_a_resharded_checkpoint_is_identical(tmp_path):
    plan = plan_reshard(open_checkpoint(GOLDEN / LLAMA), tmp_path / "out", Layout(tp=4, pp=1))
    run_conversion(plan)
    report = diff(LLAMA, tmp_path / "out")
    assert report.identical
    sizes = {f.name: (f.a, f.b) for f in report.plan.arguments if f.name.endswith("model_parallel_size")}
    assert sizes["args.tensor_model_parallel_size"] == (2, 4)
    assert report.plan.facts.compared == ["iteration", "param groups", "scheduler", "extra states"]
    assert report.plan.notes == ("only A has random states",)


def test_other_models_differ_in_names_shapes_and_arguments():
    report = diff("llama_localspec_weights_tp2pp2", "bridge_llama4_weights_tp2pp2")
    matching = report.plan.matching
    assert not report.identical
    assert matching.shapes["decoder.final_layernorm.weight"] == ((32,), (64,))
    assert {n.split(".")[2] for n in matching.only[1]} == {"2", "3"}
    assert {"model.num_layers", "model.hidden_size"} <= set(counted(report))


def test_an_argument_that_changes_the_model_counts():
    report = diff("mistral_weights_tp2pp2", "llama_singleton_weights_tp2pp2")
    assert (differing(report), counted(report)) == ({}, ["model.window_size"])
    assert not report.identical
    assert diff("mistral_weights_tp2pp2", "llama_singleton_weights_tp2pp2", ignore=("model.window_size",)).identical


def _change_common(folder, change):
    path = next(folder.glob("**/common.pt"))
    archive = Archive.read(path)
    change(archive.tree)
    path.write_bytes(archive.dump(archive.tree, "common"))


@pytest.mark.parametrize(
    ("change", "name", "ignore"),
    [
        (lambda c: c["opt_param_scheduler"].update(max_lr=0.5), "opt_param_scheduler.max_lr", "opt_param_scheduler"),
        (
            lambda c: c["optimizer"]["optimizer"]["param_groups"][1].update(betas=(0.9, 0.99)),
            "optimizer.param_groups.no_decay.betas.1",
            "optimizer.param_groups",
        ),
        (lambda c: c.pop("opt_param_scheduler"), "opt_param_scheduler", "opt_param_scheduler"),
        (lambda c: c.update(iteration=11), "iteration", "iteration"),
        (lambda c: set_field(c["args"], "seed", 4321), "args.seed", "args.*"),
        (lambda c: set_field(c["args"], "rotary_base", 500000), "model.rotary_base", "model.*"),
    ],
)
def test_a_changed_state_counts(change, name, ignore, tmp_path):
    changed = copy_of(LLAMA, tmp_path)
    _change_common(changed, change)
    report = diff(LLAMA, changed)
    assert counted(report) == [name]
    assert not report.identical
    assert diff(LLAMA, changed, ignore=(ignore,)).identical


@pytest.mark.parametrize("name", ["save", "exit_interval", "ckpt_format", "wandb_project"])
def test_how_a_job_ran_does_not_count(name, tmp_path):
    changed = copy_of(LLAMA, tmp_path)
    _change_common(changed, lambda c: set_field(c["args"], name, "another"))
    report = diff(LLAMA, changed)
    assert report.identical
    assert [(f.name, f.b, f.counts) for f in report.plan.arguments] == [(f"args.{name}", "another", False)]


def test_random_states_of_the_same_ranks_are_compared_by_their_elements(tmp_path):
    changed = copy_of(LLAMA, tmp_path) / "iter_0000010"
    reader = open_checkpoint(changed)
    info = next(o for o in reader.catalog.objects.values() if o.name == "rng_state" and o.offset == (1, 0))
    import torch

    path = changed / info.file
    raw = path.read_bytes()
    state = torch.load(io.BytesIO(raw[info.start : info.start + info.length]), weights_only=False)
    state[0][0]["torch_rng_state"][17] ^= 1
    made = io.BytesIO()
    torch.save(state, made)
    (changed / "rng.distcp").write_bytes(made.getvalue())

    def elsewhere(metadata):
        for index, where in metadata["storage_data"].items():
            if fields(index)["fqn"] == info.key:
                set_field(where, "relative_path", "rng.distcp")
                set_field(where, "offset", 0)
                set_field(where, "length", len(made.getvalue()))

    edit_metadata(changed, elsewhere)
    assert counted(diff(LLAMA, changed)) == ["rng_state.1.0.torch_rng_state"]


def test_a_missing_optimizer_counts_and_can_be_left_out():
    weights, whole = "llama_localspec_weights_tp2pp2", "legacy_llama_distopt_tp2pp2dp2"
    report = diff(weights, whole)
    assert not report.identical
    assert len(report.plan.matching.only[1]) == 45
    assert counted(report) == ["opt_param_scheduler"]
    assert diff(weights, whole, ignore=NO_OPTIMIZER).identical


# ---------------------------------------------------------------------- what is asked for


def test_patterns_choose_tensors(tmp_path):
    changed = copy_of(LLAMA, tmp_path)
    set_element(changed, QKV, (3, 3), lambda bits: bits ^ 0x100)
    report = diff(LLAMA, changed, tensors=("decoder.layers.{0..1}.self_attention.linear_qkv.weight",))
    assert [t.name for t in report.tensors] == [QKV.replace("1", "0", 1), QKV]
    assert report.plan.facts.compared == []
    assert not report.identical
    assert diff(LLAMA, changed, tensors=("decoder.layers.0",)).identical
    assert diff(LLAMA, changed, ignore=("*.linear_qkv.*",)).identical
    with pytest.raises(RequestError, match="no tensor matches nothing"):
        diff(LLAMA, changed, tensors=("nothing",))


def test_quick_reads_no_values(tmp_path):
    changed = copy_of(LLAMA, tmp_path)
    set_element(changed, QKV, (3, 3), lambda bits: bits ^ 0x100)
    report = diff(LLAMA, changed, quick=True)
    assert report.identical
    assert report.bytes_read == (0, 0)
    assert {t.status for t in report.tensors} == {"unread"}
    assert not diff("llama_localspec_weights_tp2pp2", "bridge_llama4_weights_tp2pp2", quick=True).identical


def test_tolerances_and_types(tmp_path):
    for name, kind in (("half", "bfloat16"), ("single", "float32")):
        write_llama(tmp_path / name, layers=1, hidden=64, ffn=96, vocab=256, tp=2, pp=1, dtype=kind)
    half, single = tmp_path / "half", tmp_path / "single"
    report = diff(half, single)
    assert not report.identical
    assert {t.status for t in report.tensors} == {"different"}
    assert all(t.values.rounds_b and not t.values.rounds_a for t in report.tensors)
    furthest = max(t.values.max_rel for t in report.tensors)
    assert 2**-10 < furthest <= 2**-8
    assert diff(half, single, rtol=furthest).identical
    assert not diff(half, single, rtol=furthest * 0.99).identical
    apart = max(t.values.max_abs for t in report.tensors)
    assert diff(half, single, atol=apart).identical
    assert not diff(half, single, atol=apart * 0.99).identical
    assert not diff(half, single, quick=True).identical
    assert diff(half, half, rtol=0).identical


# ---------------------------------------------------------------------- reading


def test_damage_is_told_of_the_side_that_has_it(tmp_path):
    damaged = copy_of(LLAMA, tmp_path)
    name, path, offset, _ = payloads(damaged, "weight")[3]
    flip(path, offset)
    with pytest.raises(IntegrityError, match=r"^B is damaged: .*do not match their checksum") as caught:
        diff(LLAMA, damaged)
    assert caught.value.tensor == name
    with pytest.raises(IntegrityError, match=r"^A is damaged"):
        diff(damaged, LLAMA)


def test_padding_rows_are_checked_too(tmp_path):
    # 120 rows mean something, the record holds 64 of 128: its rest is read for the checksum
    damaged = copy_of(LLAMA, tmp_path)
    last = [p for p in payloads(damaged) if p[0] == "embedding.word_embeddings.weight"][-1]
    flip(last[1], last[2] + last[3] - 1)
    with pytest.raises(IntegrityError, match="B is damaged"):
        diff("v009_zarr_llama_adam_tp2pp2", damaged, ignore=("rng_state",))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_llama(folder / "a", layers=2, hidden=256, ffn=704, vocab=2048, tp=2, pp=2)
    run_conversion(plan_reshard(open_checkpoint(folder / "a"), folder / "b", Layout(tp=4, pp=1)))
    return folder / "a", folder / "b"


def test_every_byte_is_read_once(pair):
    report = diff(*pair, ignore=("args.*",))
    assert report.identical
    needed = [sum(t.nbytes for t in open_checkpoint(p).catalog.tensors.values()) for p in pair]
    for read, need in zip(report.bytes_read, needed, strict=True):
        assert need <= read <= need * 1.02
    records = sum(t.chunk_count for p in pair for t in open_checkpoint(p).catalog.tensors.values())
    assert report.records_checked == records


def test_numbers_do_not_depend_on_threads_or_memory(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "a")
    generator = np.random.default_rng(5)
    for name in ("decoder.layers.1.mlp.linear_fc2.weight", "output_layer.weight"):
        for index in generator.integers(0, 250, (20, 2)).tolist():
            set_element(tmp_path / "a", name, tuple(index), lambda bits: bits ^ 0x8080)
    reports = [
        diff(tmp_path / "a", pair[1], threads=threads, max_memory=memory)
        for threads, memory in ((1, 64 << 20), (4, 64 << 20), (3, 4 << 20))
    ]
    for report in reports:
        found = differing(report)
        assert list(found) == ["decoder.layers.1.mlp.linear_fc2.weight", "output_layer.weight"]
        for name, one in found.items():
            first = differing(reports[0])[name]
            assert (one.differing, one.first, one.worst) == (first.differing, first.first, first.worst)
            assert one.cosine == pytest.approx(first.cosine, rel=1e-12)
    assert differing(reports[0]) == differing(reports[1])
    assert reports[2].plan.tile_bytes < reports[0].plan.tile_bytes


def test_progress_adds_up_and_a_stop_ends_it(pair):
    events = []
    plan = plan_diff(*map(open_checkpoint, pair))
    run_diff(plan, listener=events.append)
    (ready,) = (e for e in events if isinstance(e, PlanReady))
    assert ready.bytes_written == plan.nbytes == sum(e.nbytes for e in events if isinstance(e, Moved))
    stop = StopFlag()
    stop.set(2)
    with pytest.raises(Interrupted):
        run_diff(plan, stop=stop)


def test_a_checkpoint_that_changes_meanwhile_is_no_answer(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "a")
    plan = plan_diff(open_checkpoint(tmp_path / "a"), open_checkpoint(pair[1]))

    def touch(event):
        if isinstance(event, Moved):
            next((tmp_path / "a").glob("*.distcp")).touch()

    with pytest.raises(IntegrityError, match="A changed while it was read"):
        run_diff(plan, listener=touch)


def test_a_checkpoint_that_changes_after_planning_is_no_answer(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "a")
    plan = plan_diff(open_checkpoint(tmp_path / "a"), open_checkpoint(pair[1]))
    next((tmp_path / "a").glob("*.distcp")).touch()
    with pytest.raises(IntegrityError, match="A changed while it was read"):
        run_diff(plan)


def test_too_little_memory_is_refused(pair):
    with pytest.raises(RequestError, match="too small"):
        diff(*pair, max_memory=1 << 20)


def test_nothing_of_a_changed_state_is_executed(tmp_path):
    changed = copy_of(LLAMA, tmp_path)

    class Trap:
        def __reduce__(self):
            return (print, ("executed",))

    next(changed.glob("**/common.pt")).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(Exception, match=r"common\.pt"):
        diff(LLAMA, changed)


# ---------------------------------------------------------------------- hostile and broken sources


def test_a_missing_file_is_told_before_anything_is_read(tmp_path):
    damaged = copy_of(LLAMA, tmp_path)
    next(damaged.glob("**/__1_0.distcp")).unlink()
    with pytest.raises(IntegrityError, match=r"^B is damaged: .*__1_0.distcp is missing"):
        plan_diff(open_checkpoint(GOLDEN / LLAMA), open_checkpoint(damaged))
    report = diff(LLAMA, damaged, quick=True)
    assert "rng_state.0.1" in counted(report)
    assert not report.identical


def test_an_impossible_shape_is_refused_at_once(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "a.safetensors")
    reader = open_checkpoint(tmp_path / "a.safetensors")
    huge = replace(reader.catalog.tensors["x"], shape=(1 << 50,))
    reader.catalog = replace(reader.catalog, tensors={"x": huge})
    begin = time.process_time()
    with pytest.raises(IntegrityError, match="A is damaged: x should have"):
        run_diff(plan_diff(reader, reader))
    assert time.process_time() - begin < 5


def test_shared_parts_of_a_state_are_compared_once(tmp_path):
    # 2^60 paths lead to the leaf
    sides = [copy_of(LLAMA, tmp_path / side) for side in "ab"]
    for side, leaf in zip(sides, (1, 2), strict=True):
        tree = [leaf]
        for _ in range(60):
            tree = [tree, tree]
        _change_common(side, lambda c, tree=tree: c.update(deep=tree))
    begin = time.process_time()
    report = diff(*sides)
    assert time.process_time() - begin < 10
    assert [name.count(".") for name in counted(report)] == [61]


def test_many_differences_of_one_object_are_not_all_listed(tmp_path):
    changed = [copy_of(LLAMA, tmp_path / side) for side in "ab"]
    for number, side in enumerate(changed):
        _change_common(side, lambda c, number=number: c.update(long=list(range(number, 5000 + number))))
    assert 0 < len(counted(diff(*changed))) < 1000
