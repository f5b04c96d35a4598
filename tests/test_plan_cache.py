"""Plans kept between runs: a hit is what planning would give, and everything that matters makes a miss."""

import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import copy_golden, golden, tree
from cli_support import child

from converters.errors import DistckptError, RequestError
from converters.formats import open_checkpoint
from converters.formats.dcp.geometry import geometry_digest
from converters.parallel.layout import Layout
from converters.pickles import Global, Obj
from converters.targets import plan_cache
from converters.targets.blueprint import PASSING, blueprint_key
from converters.targets.plan_cache import PlanCache
from converters.targets.reshard import ReshardOptions, plan_reshard, run_reshard

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from bench_plan import ARGS, planned, synthetic

KEPT = ["llama_adam_tp2pp2", "mixtral_adam_ep2tp2", "v014_llama_modelspace_tp2pp2dp2", "llama_singleton_weights_tp2pp2"]
ANEW = ["llama_dpreshardable_tp2pp2dp2", "llama_dpzero_tp2pp2dp2"]


@pytest.fixture
def cache(tmp_path):
    return PlanCache.default(tmp_path / "plans")


def plan(source, out, cache=None, layout=None, **options):
    return plan_reshard(open_checkpoint(source), out, layout or Layout(tp=2), ReshardOptions(**options), cache=cache)


def hit(made):
    return made.job.known_tasks is not None


def described(sources):
    return [(name, t.name, t.dtype, t.shape, t.kind, t.chunks()) for name, t in sources.items()]


def files(cache):
    return sorted(cache.folder.glob("*"))


# ---------------------------------------------------------------------- a hit is what planning gives


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"tp": 4, "dp": 1}, {}),
        ({"pp": 2, "dp": 2}, {"fully_parallel": True, "layers": "per-layer", "optimizer": "keep"}),
    ],
    ids=["tp4", "pp2"],
)
def test_a_hit_equals_a_miss(name, layout, options, tmp_path, cache):
    source, layout = golden(name), Layout(**layout)
    plain = plan(source, tmp_path / "a", None, layout, **options)
    first = plan(source, tmp_path / "a", cache, layout, **options)
    second = plan(source, tmp_path / "b", cache, layout, **options)
    assert [hit(p) for p in (plain, first, second)] == [False, False, True], cache.said
    for made in (first, second):
        assert made.job.fingerprint == plain.job.fingerprint
        assert list(made.job.tasks) == list(plain.job.tasks)
        assert described(made.job.sources) == described(plain.job.sources)
        assert made.job.files == plain.job.files
        assert made.output.digest() == plain.output.digest()
        assert made.output.metadata("x") == plain.output.metadata("x")
        assert list(made.output.fills()) == list(plain.output.fills())
        assert (made.notes, made.dropped, made.options) == (plain.notes, plain.dropped, plain.options)
        assert made.state == plain.state
        assert made.job.peak_memory == plain.job.peak_memory
    run_reshard(plain)
    run_reshard(second)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("name", ANEW)
def test_flat_buckets_are_planned_anew(name, tmp_path, cache):
    """Their order is found out from the values of each iteration."""
    for _ in range(2):
        assert not hit(plan(golden(name), tmp_path / "out", cache))
    assert not files(cache)


def test_flat_targets_are_planned_anew(tmp_path, cache):
    for _ in range(2):
        assert not hit(plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache, optimizer="dp_reshardable"))


def test_the_next_iteration_is_a_hit_with_its_own_state(tmp_path, cache):
    readers = [synthetic(tmp_path / "ckpt", 2, iteration) for iteration in (7, 8)]
    first, second = (planned(reader, cache)[0] for reader in readers)
    assert (hit(first), hit(second)) == (False, True)
    assert (first.folder, second.folder) == ("iter_0000007", "iter_0000008")
    assert first.state.common != second.state.common
    assert first.job.fingerprint != second.job.fingerprint
    assert second.job.fingerprint == planned(readers[1], None)[0].job.fingerprint


def test_other_objects_before_the_tensors_move_them(tmp_path, cache):
    """Objects differ in length from one iteration to the next."""
    source = golden("llama_adam_tp2pp2")
    plan(source, tmp_path / "out", cache)
    longer = open_checkpoint(source)
    for key, info in longer.catalog.objects.items():
        longer.catalog.objects[key] = dataclasses.replace(info, length=info.length + 640)
    plain = plan_reshard(longer, tmp_path / "out", Layout(tp=2))
    known = plan_reshard(longer, tmp_path / "out", Layout(tp=2), cache=cache)
    assert hit(known)
    assert known.job.files == plain.job.files
    assert known.output.metadata("x") == plain.output.metadata("x")
    assert known.job.fingerprint == plain.job.fingerprint
    assert known.job.fingerprint != plan(source, tmp_path / "out").job.fingerprint


def test_objects_on_another_rank_make_other_tasks(tmp_path, cache, monkeypatch):
    """A file that holds objects only moves the numbers of the files after it."""
    source = golden("llama_singleton_weights_tp2pp2")
    plan(source, tmp_path / "out", cache, Layout(tp=2, dp=2))
    real = sys.modules["converters.targets.reshard"].target_state

    def moved(*args, **options):
        state = real(*args, **options)
        return dataclasses.replace(state, objects=[dataclasses.replace(o, rank=-1) for o in state.objects])

    monkeypatch.setattr("converters.targets.reshard.target_state", moved)
    known = plan(source, tmp_path / "out", cache, Layout(tp=2, dp=2))
    plain = plan(source, tmp_path / "out", None, Layout(tp=2, dp=2))
    assert any("serves this one" in text for text in cache.said)
    assert not hit(known)
    assert list(known.job.tasks) == list(plain.job.tasks)
    assert known.job.fingerprint == plain.job.fingerprint


# ---------------------------------------------------------------------- what must not be skipped


def test_master_weights_are_proved_on_every_iteration(tmp_path, cache):
    """The proof reads data, which no earlier iteration has shown."""
    args = ARGS | {"overlap_grad_reduce": True}
    made = [planned(synthetic(tmp_path / "ckpt", 1, n, args), cache)[0] for n in (1, 2)]
    assert hit(made[1])
    assert made[0].proof.tasks == made[1].proof.tasks != []


def test_damage_is_refused_on_a_hit(tmp_path, cache):
    source = copy_golden("llama_adam_tp2pp2", tmp_path / "ckpt" / "iter_0000010")
    plan(source, tmp_path / "out", cache)
    victim = next(source.glob("*.distcp"))
    whole = victim.read_bytes()
    os.truncate(victim, victim.stat().st_size - 5000)
    with pytest.raises(DistckptError, match=r"damaged|needs"):
        plan(source, tmp_path / "out", cache)
    victim.write_bytes(whole)
    plan(source, tmp_path / "out", cache)
    assert any("serves this one" in text for text in cache.said)  # the plan that was kept all the time


def test_a_destination_is_checked_on_a_hit(tmp_path, cache):
    plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(Exception, match="not empty"):
        plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)


def test_a_refused_layout_keeps_nothing(tmp_path, cache):
    for _ in range(2):
        with pytest.raises(RequestError):
            plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache, Layout(tp=3))
    assert not files(cache)


# ---------------------------------------------------------------------- the key


def change(**fields):
    def apply(tensor):
        return dataclasses.replace(tensor, **{name: f(getattr(tensor, name)) for name, f in fields.items()})

    return apply


def nudge(column, row=1, by=1):
    out = column.copy()
    out[row] += by
    return out


@pytest.mark.parametrize(
    "changed",
    [
        change(key=lambda key: key + "x"),
        change(dtype=lambda _: "float16"),
        change(shape=lambda shape: (shape[0] + 1, *shape[1:])),
        change(starts=nudge),
        change(starts=lambda s: nudge(s, row=len(s) - 1)),
        change(sizes=lambda s: nudge(s, row=len(s) // 2)),
        change(length=lambda n: nudge(n, by=64)),
        change(length=lambda n: nudge(n, row=len(n) // 2, by=-64)),
        change(file=lambda f: nudge(f, by=-1)),
        change(original_shape=lambda _: (1, 2)),
        lambda t: dataclasses.replace(
            t, **{n: getattr(t, n)[:-1] for n in ("starts", "sizes", "file", "offset", "length")}
        ),
    ],
)
@pytest.mark.parametrize("which", [0, -1], ids=["large", "small"])
def test_geometry_tells_everything_apart(changed, which, tmp_path):
    tensors = list(synthetic(tmp_path, 8, 1).metadata.tensors.values())
    assert len(tensors[0].file) > 4096 > len(tensors[-1].starts)
    before = geometry_digest(tensors, ["a"])
    assert geometry_digest([*tensors], ["a"]) == before
    assert geometry_digest(tensors, ["b"]) != before
    tensors[which] = changed(tensors[which])
    assert geometry_digest(tensors, ["a"]) != before


def test_geometry_does_not_depend_on_where_records_lie(tmp_path):
    tensors = list(synthetic(tmp_path, 8, 1).metadata.tensors.values())
    before = geometry_digest(tensors, [])
    moved = change(offset=lambda at: at + 64, file=lambda f: f + 1)
    assert geometry_digest([moved(t) for t in tensors], []) == before


def test_geometry_sees_swapped_numbers(tmp_path):
    tensor = next(iter(synthetic(tmp_path, 8, 1).metadata.tensors.values()))
    for first, second in ((0, 1), (5, 4096), (100, len(tensor.length) - 1)):
        length = np.arange(len(tensor.length), dtype=np.int64)
        one = geometry_digest([dataclasses.replace(tensor, length=length.copy())], [])
        length[[first, second]] = length[[second, first]]
        assert geometry_digest([dataclasses.replace(tensor, length=length)], []) != one


OPTIONS = {
    "optimizer": "keep",
    "layers": "per-layer",
    "rng": "drop",
    "extra_state": "drop",
    "vocab_size": 96,
    "fully_parallel": True,
    "weights_only": True,
    "mcore": "0.19",
    "framework": "megatron-lm",
    "max_memory": 32 << 20,
    "threads": 3,
    "overwrite": True,
    "device": "cuda:1",
}
LAYOUT = {
    "tp": 4,
    "pp": 2,
    "vpp": 2,
    "cp": 2,
    "ep": 2,
    "etp": 1,
    "dp": 8,
    "order": "tp-cp-ep-pp-dp",
    "first_layers": 1,
    "last_layers": 1,
    "account_for_embedding": True,
    "account_for_loss": True,
    "pp_layout": "EtL",
}


def test_every_option_and_layout_field_is_tried():
    assert OPTIONS.keys() == {f.name for f in dataclasses.fields(ReshardOptions)}
    assert LAYOUT.keys() == {f.name for f in dataclasses.fields(Layout)}


@pytest.fixture(scope="module")
def reader():
    return open_checkpoint(golden("llama_adam_tp2pp2"))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_in_the_key(name, reader):
    options = dataclasses.replace(ReshardOptions(), **{name: OPTIONS[name]})
    assert blueprint_key(reader, Layout(), options) != blueprint_key(reader, Layout(), ReshardOptions())


@pytest.mark.parametrize("name", LAYOUT)
def test_every_layout_field_is_in_the_key(name, reader):
    base = Layout(dp=4)
    assert blueprint_key(reader, dataclasses.replace(base, **{name: LAYOUT[name]}), ReshardOptions()) != blueprint_key(
        reader, base, ReshardOptions()
    )


def altered(reader, **fields):
    out = open_checkpoint(reader.catalog.path)
    out.catalog = dataclasses.replace(out.catalog, **fields)
    return out


@pytest.mark.parametrize(
    "fields",
    [
        {"args": {"num_attention_heads": 8}},
        {"args": {"something": Obj(Global("a", "B"), (1, [2, {"c": Obj(Global("d", "E"), state={"f": 1})}]))}},
        {"config": {"model": {"num_layers": 3}}},
        {"content": {"distrib_optim_sharding_type": "dp_reshardable"}},
        {"flavour": "NeMo 2"},
        {"producer": ("Megatron-Core 0.99", "")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_the_checkpoint_states_is_in_the_key(fields, reader):
    changed = {n: {**getattr(reader.catalog, n), **v} if isinstance(v, dict) else v for n, v in fields.items()}
    assert blueprint_key(altered(reader, **changed), Layout(), ReshardOptions()) != blueprint_key(
        reader, Layout(), ReshardOptions()
    )


def test_deep_differences_of_inert_values_are_in_the_key(reader):
    keys = []
    for number in (1, 2):
        value = [[[[[[Obj(Global("a", "B"), state={"x": [0] * 50 + [number]})]]]]]]
        args = {**reader.catalog.args, "something": value}
        keys.append(blueprint_key(altered(reader, args=args), Layout(), ReshardOptions()))
    assert keys[0] != keys[1]


def test_a_value_that_holds_itself_has_no_key(reader, tmp_path, cache):
    value = []
    value.append(value)
    odd = altered(reader, args={**reader.catalog.args, "something": value})
    assert blueprint_key(odd, Layout(), ReshardOptions()) is None
    assert not hit(plan_reshard(odd, tmp_path / "out", Layout(tp=2), cache=cache))


def test_the_version_is_in_the_key(reader, monkeypatch):
    before = blueprint_key(reader, Layout(), ReshardOptions())
    monkeypatch.setattr("converters.targets.blueprint.code_digest", lambda: "another")
    code = blueprint_key(reader, Layout(), ReshardOptions())
    monkeypatch.setattr("converters.targets.blueprint.__version__", "99")
    assert before != code != blueprint_key(reader, Layout(), ReshardOptions()) != before


def test_the_code_is_all_of_the_library(monkeypatch):
    """Also what lies in other packages than the cache: an edit anywhere may change a plan."""
    seen = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path) or b"")
    plan_cache.code_digest.__wrapped__()
    assert {Path(sys.modules[name].__file__) for name in ("converters.box", "converters.parallel.split")} <= set(seen)


@pytest.mark.parametrize("name", sorted(PASSING))
def test_arguments_that_pass_do_not_change_the_plan(name, reader, tmp_path):
    """They are left out of the key, so nothing that is kept may follow from them."""
    before = plan_reshard(reader, tmp_path / "out", Layout(tp=2))
    for value in (None, 3, "text"):
        other = altered(reader, args={**reader.catalog.args, name: value})
        assert blueprint_key(other, Layout(), ReshardOptions()) == blueprint_key(reader, Layout(), ReshardOptions())
        made = plan_reshard(other, tmp_path / "out", Layout(tp=2))
        assert made.output.columns.digest == before.output.columns.digest
        assert made.notes == before.notes


# ---------------------------------------------------------------------- files that are not what they should be


def spoil(path, how):
    raw = bytearray(path.read_bytes())
    if how == "empty":
        raw.clear()
    elif how == "truncated":
        del raw[len(raw) // 2 :]
    elif how == "header only":
        del raw[50:]
    elif how == "longer":
        raw += b"x"
    elif how == "another file":
        raw[:] = Path(__file__).read_bytes()
    elif how == "npz":
        np.savez(path.with_suffix(".npz"), a=np.zeros(3))
        raw[:] = path.with_suffix(".npz").read_bytes()
        path.with_suffix(".npz").unlink()
    else:
        at = {"magic": 3, "digest": 20, "header": 100, "array": len(raw) - 100}[how]
        raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "how", ["empty", "truncated", "header only", "longer", "another file", "npz", "magic", "digest", "header", "array"]
)
def test_a_damaged_file_is_ignored_and_replaced(how, tmp_path, cache):
    source = golden("llama_adam_tp2pp2")
    plain = plan(source, tmp_path / "out", cache)
    (path,) = files(cache)
    spoil(path, how)
    again = plan(source, tmp_path / "out", cache)
    assert not hit(again)
    assert again.job.fingerprint == plain.job.fingerprint
    assert "is not used" in cache.said[-1]
    assert hit(plan(source, tmp_path / "out", cache))


def rewritten(cache, key, alter):
    """A file whose checksum is right and whose contents are not."""
    facts, arrays = cache.load(key)
    arrays = {name: array.copy() for name, array in arrays.items()}
    alter(facts, arrays)
    cache.store(key, facts, arrays)


@pytest.mark.parametrize(
    "alter",
    [
        lambda f, a: f.clear(),
        lambda f, a: a.clear(),
        lambda f, a: f.pop("outline"),
        lambda f, a: f["rest"].update(other=1),
        lambda f, a: f.update(columns=[]),
        lambda f, a: f["columns"]["cuts"][0].__setitem__(0, "float99"),
        lambda f, a: f["columns"]["cuts"][0].__setitem__(1, 7),
        lambda f, a: f["columns"].update(ranks=[0]),
        lambda f, a: f["columns"]["arrays"].pop(),
        lambda f, a: a.update(array=a["array"][:-1]),
        lambda f, a: a["array"].__setitem__(0, 10_000),
        lambda f, a: a["array"].__setitem__(0, -1),
        lambda f, a: a["file"].__setitem__(0, 60_000),
        lambda f, a: a.update(start=a["start"][:-1]),
        lambda f, a: a.update(start=a["start"].astype(np.int32)),
        lambda f, a: a.pop("task_files"),
        lambda f, a: a.update(task_more=a["task_files"]),
        lambda f, a: a["task_source"].__setitem__(0, 10_000),
        lambda f, a: a["task_piece"].__setitem__(0, -1),
        lambda f, a: a["task_files"].__setitem__(0, 99),
        lambda f, a: a["task_ends"].__setitem__(-1, 10_000),
        lambda f, a: a["task_file_ends"].__setitem__(0, -5),
        lambda f, a: a.update(task_nbytes=a["task_nbytes"][:-1]),
        lambda f, a: a.update(array=a["array"].reshape(1, -1)),
    ],
)
def test_contents_that_do_not_fit_are_ignored(alter, tmp_path, cache, reader):
    plain = plan_reshard(reader, tmp_path / "out", Layout(tp=2), cache=cache)
    rewritten(cache, blueprint_key(reader, Layout(tp=2), ReshardOptions()), alter)
    again = plan_reshard(reader, tmp_path / "out", Layout(tp=2), cache=cache)
    assert not hit(again)
    assert again.job.fingerprint == plain.job.fingerprint
    assert "is not used" in cache.said[-1]


def test_a_file_under_another_key_is_ignored(tmp_path, cache):
    """Somebody renamed it, or two keys have the same name."""
    plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)
    (path,) = files(cache)
    plan(golden("mixtral_adam_ep2tp2"), tmp_path / "out", cache)
    (other,) = set(files(cache)) - {path}
    shutil.copy(path, other)
    assert not hit(plan(golden("mixtral_adam_ep2tp2"), tmp_path / "out", cache))
    assert "made from something else" in cache.said[-1]


def test_links_and_strangers_files_are_not_read(tmp_path, cache, monkeypatch):
    source = golden("llama_adam_tp2pp2")
    plan(source, tmp_path / "out", cache)
    (path,) = files(cache)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    assert not hit(plan(source, tmp_path / "out", cache))
    assert not path.is_symlink()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert not hit(plan(source, tmp_path / "out", cache))
    assert "not this user's" in cache.said[-1]


def test_a_fifo_does_not_block(tmp_path, cache):
    plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)
    (path,) = files(cache)
    path.unlink()
    os.mkfifo(path)
    assert not hit(plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache))


# ---------------------------------------------------------------------- the folder


def test_where_plans_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert PlanCache.default().folder == tmp_path / "home/.cache/distckpt/plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert PlanCache.default().folder == tmp_path / "home/.cache/distckpt/plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert PlanCache.default().folder == tmp_path / "xdg/distckpt/plans"
    monkeypatch.setenv("DISTCKPT_PLAN_CACHE", str(tmp_path / "env"))
    assert PlanCache.default().folder == tmp_path / "env"
    assert PlanCache.default(tmp_path / "given").folder == tmp_path / "given"
    assert PlanCache.default("~/tilde").folder == tmp_path / "home/tilde"
    (tmp_path / "file").touch()
    assert PlanCache.default(tmp_path / "file") is None
    assert PlanCache.default(tmp_path / "file" / "below") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert PlanCache.default(tmp_path / "read-only") is None
    shutil.rmtree(cache.folder)
    cache.folder.touch()  # what root, too, cannot write into
    assert not hit(plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache))
    assert "was not kept" in cache.said[-1]


def test_a_full_disk_leaves_nothing(tmp_path, cache, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not hit(plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache))
    assert "No space left" in cache.said[-1]
    assert not files(cache)


def test_the_oldest_go_first(cache):
    cache.most_files = 3
    for number in range(6):
        cache.store({"n": number}, {}, {})
        os.utime(cache._path({"n": number}), ns=(number, number))
        if number == 4:
            assert cache.load({"n": 2}) is not None  # used again: younger than the others
    cache.store({"n": 6}, {}, {})
    left = [number for number in range(7) if cache._path({"n": number}).exists()]
    assert len(left) == 3
    assert {2, 6} <= set(left)


def test_all_together_are_not_too_large(cache):
    cache.most_bytes = 25_000
    for number in range(5):
        cache.store({"n": number}, {}, {"a": np.zeros(10_000, np.uint8)})
        os.utime(cache._path({"n": number}), ns=(number, number))
    assert len(files(cache)) == 2
    cache.store({"large": 1}, {}, {"a": np.zeros(100_000, np.uint8)})
    assert len(files(cache)) == 1


def test_leftovers_of_killed_writers_go(cache):
    for name, age in ((".x.plan.00", 7200), (".y.plan.00", 60)):
        path = cache.folder / name
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    (cache.folder / "notes.txt").touch()
    cache.store({}, {}, {})
    assert {p.name for p in files(cache)} == {".y.plan.00", "notes.txt", cache._path({}).name}


def _write(folder, seed):
    cache = PlanCache(folder, most_files=4)
    wrong = 0
    for number in range(40):
        key = {"n": (number + seed) % 6}
        cache.store(key, {"v": key["n"]}, {"a": np.full(20_000, key["n"], np.int64)})
        found = cache.load({"n": number % 6})
        if found is not None:
            wrong += not (found[1]["a"] == found[0]["v"]).all() or found[0]["v"] != number % 6
    return wrong, [text for text in cache.said if "is not used" in text or "was not kept" in text]


def test_writers_do_not_disturb_each_other(cache):
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        found = pool.starmap(_write, [(cache.folder, seed) for seed in range(4)])
    assert found == [(0, [])] * 4
    assert 1 <= len(files(cache)) <= 4
    assert all(path.suffix == ".plan" for path in files(cache))


def test_nothing_is_pickled(tmp_path, cache):
    plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)
    (path,) = files(cache)
    assert path.stat().st_mode & 0o777 == 0o600
    stored = np.load(io.BytesIO(path.read_bytes()[48:]), allow_pickle=False)
    assert json.loads(stored["header"].tobytes()).keys() == {"facts", "key"}
    assert {stored[name].dtype.kind for name in stored.files} <= {"i", "u"}


def test_an_object_in_it_is_not_made(tmp_path, cache):
    """A pickle under a right checksum, as only somebody who wants to do harm would leave it."""
    plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache)
    (path,) = files(cache)
    body = io.BytesIO()
    np.savez(body, header=np.array([Path(tmp_path / "made")], object))
    path.write_bytes(path.read_bytes()[:16] + hashlib.sha256(body.getvalue()).digest() + body.getvalue())
    assert not hit(plan(golden("llama_adam_tp2pp2"), tmp_path / "out", cache))
    assert "allow_pickle" in cache.said[-1]


# ---------------------------------------------------------------------- the command


def test_the_command_says_so_only_when_asked(tmp_path):
    source, plans = str(golden("llama_adam_tp2pp2")), str(tmp_path / "plans")
    dry = ["reshard", source, str(tmp_path / "out"), "--tp", "2", "-n"]
    before = child(*dry, "--plan-cache", plans, "-v")
    assert "no plan is kept" in before.err
    assert "one will be" not in before.err
    assert not (tmp_path / "plans").exists()
    first = child(*dry[:-1], "--plan-cache", plans, "-v")
    shutil.rmtree(tmp_path / "out")
    second = child(*dry, DISTCKPT_PLAN_CACHE=plans)
    third = child(*dry, "-v", DISTCKPT_PLAN_CACHE=plans)
    off = child(*dry, "-v", "--no-plan-cache", DISTCKPT_PLAN_CACHE=plans)
    assert [p.code for p in (first, second, third, off)] == [0] * 4
    assert len({re.sub(r"free: .*", "", p.out) for p in (before, second, third, off)}) == 1
    assert "one will be" in first.err
    assert "earlier run" in third.err
    for quiet in (second, off):
        assert "plan" not in quiet.err
    assert len(list((tmp_path / "plans").iterdir())) == 1


# ---------------------------------------------------------------------- what it is for


@pytest.mark.slow  # speed is measured by scripts/; a loaded machine must not turn the suite red
def test_the_second_run_plans_in_no_time(tmp_path, cache):
    """CPU time, the best of three; scripts/bench_plan.py measures it precisely."""
    first, second = [], []
    for number in range(3):
        plans = PlanCache(cache.folder / str(number))
        plans.folder.mkdir()
        made, seconds = planned(synthetic(tmp_path / "ckpt", 8, 2 * number), plans)
        first.append(seconds)
        assert made.output.columns.records > 190_000
        made, seconds = planned(synthetic(tmp_path / "ckpt", 8, 2 * number + 1), plans)
        assert hit(made)
        second.append(seconds)
    assert min(second) <= 0.15 * min(first)
