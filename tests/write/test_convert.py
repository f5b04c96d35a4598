"""Every source to every target: what a job or a library loads holds the same bits; what makes no sense is refused."""

import dataclasses
import json
import re
import shutil
import threading

import pytest
import yaml

from converters.errors import DistckptError, FormatError, Interrupted, RequestError
from converters.events import Moved, PlanReady, StopFlag
from converters.execute.ranks import Ranks
from converters.formats import REGISTRY, open_checkpoint
from converters.formats.common_state import Archive
from converters.formats.registry import detect
from converters.formats.resolve import resolve
from converters.megatron.layout import Layout
from converters.megatron.vocabulary import vocabulary_rows
from converters.pickles.emit import dumps
from converters.pickles.nodes import fields, set_field
from converters.write.convert import WRITERS, plan_convert
from converters.write.write_plan import run_conversion
from distckpt_cli.app import main
from distckpt_cli.commands.convert import Format
from distckpt_cli.targets import Carried, TargetLayout
from harness import hf_reference
from harness.checkpoints import copy_golden, golden, tree, truth
from harness.exports import exported, logit_difference
from harness.legacy_cases import MODEL, copy_legacy, edit
from harness.reshard_cases import by_parameter, compare, expected, read_with_torch
from harness.support import GOLDEN

LLAMA = GOLDEN / "truth" / "llama-bf16.safetensors"


def source_of(name):
    """The folder of a golden checkpoint of any format."""
    return GOLDEN / name if "legacy" in name else golden(name)


def convert(source, target, *options, to="torch_dist"):
    """Runs the command as a person would."""
    assert main(["convert", str(source), str(target), "--to", to, "-q", *options]) == 0
    return target


def refused(capsys, code, *words):
    """The error text of a command that must end with `code`."""
    assert main(["convert", *map(str, words)]) == code
    return capsys.readouterr().err


# ---------------------------------------------------------------------- the crosses, loaded by Megatron-Core itself


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("v009_zarr_llama_distopt_tp2pp2dp2", {"tp": 4}),
        ("legacy_llama_distopt_tp2pp2dp2", {"pp": 2, "dp": 2}),
        ("v019_llama_fullyreshardable_tp2dp2", {"tp": 2, "pp": 2}),
        pytest.param("legacy_llama_adam_tp2pp2", {"tp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param("v009_zarr_llama_adam_tp2pp2", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_megatron_loads_torch_dist_of_any_source(source, layout, megatron_load, tmp_path):
    """zarr, legacy and 0.19 checkpoints, weights and optimizer, in Megatron-Core 0.16.1."""
    words = [f"--{axis}={size}" for axis, size in layout.items()]
    convert(source_of(source), tmp_path / "out", *words)
    answer = megatron_load(tmp_path / "out", LLAMA, optimizer=True, **layout)
    assert answer["ok"], answer
    assert all(rank["compared"]["master"] for rank in answer["optimizer"])


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_megatron_refuses_without_a_conversion(ours, megatron_load, tmp_path):
    """0.16.1 reads neither a checkpoint of 0.19 nor its form of ours: the default is the form that all versions read."""
    folder = source_of("v019_llama_fullyreshardable_tp2dp2")
    if ours:
        folder = convert(source_of("llama_fullyreshardable_tp2pp2dp2"), tmp_path / "out", "--mcore", "0.19")
    with pytest.raises(pytest.fail.Exception, match=r"common\.pt|common_backend"):
        megatron_load(folder, LLAMA)


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
def test_megatron_loads_layers_under_keys_of_their_own(megatron_load, tmp_path):
    convert(source_of("legacy_llama_distopt_tp2pp2dp2"), tmp_path / "out", "--layers", "per-layer", "--weights-only")
    keys = read_with_torch(tmp_path / "out" / "iter_0000010")
    assert "decoder.layers.1.mlp.linear_fc2.weight" in keys
    assert not any(key.startswith("optimizer.") for key in keys)
    assert megatron_load(tmp_path / "out", LLAMA)["ok"]


# ---------------------------------------------------------------------- torch_dist and its generations


@pytest.mark.parametrize(
    "source", ["v009_zarr_llama_adam_tp2pp2", "legacy_gpt_adam_tp2pp2", "legacy_mixtral_distopt_ep2pp2"]
)
def test_torch_dist_holds_the_truth(source, tmp_path):
    config = re.search(r"llama|gpt|mixtral", source)[0]
    convert(source_of(source), tmp_path / "out", "--pp", "2")
    got = by_parameter(read_with_torch(tmp_path / "out" / "iter_0000010"))
    compare(got, expected(config, optimizer=True))


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("source", ["llama_dpreshardable_tp2pp2dp2", "v009_zarr_llama_distopt_tp2pp2dp2"])
def test_through_every_format(source, to, tmp_path):
    """X -> every format that is written -> torch_dist: the same bits, those of the optimizer included."""
    layout = ["--tp", "4"] if WRITERS[to].layout else []
    between = convert(source_of(source), tmp_path / "between", *layout, to=to)
    convert(between, tmp_path / "out", "--pp", "2")
    got = by_parameter(read_with_torch(tmp_path / "out" / "iter_0000010"))
    compare(got, expected("llama", optimizer=to != "safetensors"))


def test_it_is_what_reshard_writes(tmp_path):
    source = source_of("llama_dpreshardable_tp2pp2dp2")
    convert(source, tmp_path / "a", "--tp", "4", "--fully-parallel")
    assert main(["reshard", str(source), str(tmp_path / "b"), "--tp", "4", "--fully-parallel", "-q"]) == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_the_form_of_0_19_is_that_of_a_real_checkpoint(tmp_path):
    source = source_of("v019_llama_fullyreshardable_tp2dp2")
    real, made = source, convert(source, tmp_path / "new", "--tp=2", "--dp=2", "--mcore=0.19") / source.name
    plain = convert(source, tmp_path / "plain", "--tp=2", "--dp=2") / source.name
    assert (made / "metadata.json").read_bytes() == (real / "metadata.json").read_bytes()
    assert not (made / "common.pt").exists()
    assert len(json.loads((plain / "metadata.json").read_text())) == 4
    embedded = common_state(made)
    assert common_state(real).keys() == embedded.keys() | {"rerun_state_machine"}
    args = fields(embedded["args"])
    assert "megatron" in args["inference_cuda_graph_scope"].func.module  # 0.19 knows its own classes
    older = Archive.read(plain / "common.pt").tree
    assert older.keys() == embedded.keys()
    set_field(embedded["args"], "inference_cuda_graph_scope", None)
    assert dumps(older, 2) == dumps(embedded, 2)


def common_state(folder):
    """The inert common state that is embedded in a checkpoint."""
    info = open_checkpoint(folder).catalog.objects["common_state/shard_0_1"]
    tree = Archive.read(folder / info.file, info.start, info.length).tree
    assert isinstance(tree, list)
    return tree[0]


def test_forms_and_keys_there_and_back(tmp_path):
    """0.16 and 0.19, stacked and per-layer keys: whatever is between, the same files come back."""
    first = convert(source_of("llama_fullyreshardable_tp2pp2dp2"), tmp_path / "0", "--tp=2", "--extra-state=keep")
    other = convert(first, tmp_path / "1", "--tp=2", "--mcore=0.19", "--layers=per-layer", "--extra-state=keep")
    again = convert(other, tmp_path / "2", "--tp=2", "--mcore=0.16", "--layers=stacked", "--extra-state=keep")
    assert tree(first) != tree(other)
    assert tree(again) == tree(first)


# ---------------------------------------------------------------------- what Megatron-Bridge and NeMo keep beside it

BRIDGE = "bridge_llama4_weights_tp2pp2"
STAGES = """
  pipeline_model_parallel_layout:
    _target_: megatron.core.PipelineParallelLayerLayout
    layout:
    - - embedding
    - - loss
  should_pad_vocab: true
  virtual_pipeline_model_parallel_size: 2
optimizer: {}
"""


def configuration(folder):
    return yaml.safe_load((folder / "run_config.yaml").read_text())


def test_a_bridge_checkpoint_stays_one(tmp_path):
    """The sizes in its configuration are those of the target, all else is as it was; so are the rows of the vocabulary."""
    source = source_of(BRIDGE)
    out = convert(source, tmp_path / "out", "--tp", "4", "--pp", "1") / source.name
    was, now = configuration(source), configuration(out)
    assert was["model"] | {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1} == now["model"]
    assert was["checkpoint"] | {"save_rng": False, "save_optim": False} == now["checkpoint"]
    assert was.keys() == now.keys()
    for made in (out / "train_state.pt", out.parent / "latest_train_state.pt"):
        assert made.read_bytes() == (source / "train_state.pt").read_bytes()
    assert read_with_torch(out)["embedding.word_embeddings.weight"].shape[0] == 256  # 250, padded for 8 x tp 4
    assert main(["export-hf", str(out), str(tmp_path / "hf"), "-q"]) == 0
    compare(exported(tmp_path / "hf"), hf_reference.expected("llama4", "llama", truth("llama4")))


def test_a_bridge_configuration_that_needs_no_change_but_one(tmp_path):
    source = source_of(BRIDGE)
    out = convert(source, tmp_path / "out", "--tp", "2", "--pp", "2") / source.name
    text = (source / "run_config.yaml").read_text()
    assert (out / "run_config.yaml").read_text() == text.replace(
        "checkpoint:\n", "checkpoint:\n  save_optim: false\n", 1
    )


def test_a_bridge_configuration_with_more_in_it(tmp_path):
    """A value of several lines, an unpadded vocabulary of its own, and one that is shared, which is not guessed at."""
    source = copy_golden(BRIDGE, tmp_path / "iter_0000010")
    path = source / "run_config.yaml"
    text = path.read_text().rstrip("\n")
    path.write_text(text + STAGES)
    out = convert(source, tmp_path / "out", "--tp", "1", "--pp", "2", "--vpp", "2") / source.name
    model = configuration(out)["model"]
    assert model == configuration(source)["model"] | {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_layout": None,
    }
    path.write_text(text.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: &two 2\n  other: *two"))
    assert main(["reshard", str(source), str(tmp_path / "odd"), "--tp", "1", "-q"]) == 0
    assert not (tmp_path / "odd" / source.name / "run_config.yaml").exists()


@pytest.mark.parametrize(("pads", "tp", "rows"), [(True, 2, 512), (False, 2, 256), (False, 3, 258), (None, 2, 512)])
def test_the_vocabulary_of_a_bridge_job(pads, tp, rows):
    """It pads what it is told to pad, and nothing else (GPTModelProvider); more rows only if the ranks ask for it."""
    config = {"vocab_size": 256, "make_vocab_size_divisible_by": 256, "should_pad_vocab": pads}
    catalog = open_checkpoint(source_of(BRIDGE)).catalog
    catalog = dataclasses.replace(catalog, config={n: v for n, v in config.items() if v is not None})
    assert vocabulary_rows("embedding.word_embeddings.weight", 256, tp, catalog, 256) == rows


# ---------------------------------------------------------------------- whole tensors, under Hugging Face's names


def test_logits_of_a_legacy_checkpoint(tmp_path):
    """legacy at TP 2 PP 2 -> safetensors that transformers loads: Megatron's logits."""
    out = convert(source_of("legacy_llama_distopt_tp2pp2dp2"), tmp_path / "out", "--names", "hf", to="safetensors")
    compare(exported(out), hf_reference.expected("llama", "llama", truth("llama")))
    assert logit_difference(out, "llama") <= 1e-5


# ---------------------------------------------------------------------- options

VALUES = {
    **dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "first_layers", "last_layers"), "2"),
    "pp_layout": "Et|tL",
    "optimizer": "keep",
    "masters": "fp32",
    "layers": "stacked",
    "rng": "drop",
    "extra_state": "drop",
    "vocab_size": "120",
    "fully_parallel": None,
    "spec": "local",
    "experts": "grouped",
    "mcore": "0.19",
    "weights_only": None,
    "names": "hf",
    "max_shard_bytes": "1GB",
}


def words_of(name):
    option = "--max-shard-size" if name == "max_shard_bytes" else f"--{name.replace('_', '-')}"
    return [option] if VALUES[name] is None else [option, VALUES[name]]


def test_every_option_is_tried():
    groups = (TargetLayout, Carried, Format)
    known = {f.name for group in groups for f in dataclasses.fields(group)} - {"to", "source", "max_shard_size"}
    assert VALUES.keys() == known | {"max_shard_bytes"}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("to", WRITERS)
def test_an_option_is_taken_or_refused_by_name(to, name, tmp_path, capsys):
    """Never ignored: what the writer's options do not have is a usage error that names the option."""
    writer = WRITERS[to]
    taken = name in writer.takes()
    code = main(["convert", str(tmp_path / "absent"), str(tmp_path / "out"), "--to", to, *words_of(name)])
    text = capsys.readouterr().err
    if taken:
        assert (code, "does not exist" in text) == (3, True), text
    else:
        assert code == 2
        assert f"{words_of(name)[0]} has no effect with --to {to}" in text
        assert "hint:" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "zarr"], "--to 'zarr' is not a choice"),
        (["--to", "torch_dist", "--from", "zrr"], "--from 'zrr' is not a choice"),
        (["--to", "torch_dist", "--weights-only", "--optimizer", "keep"], "contradict each other"),
        (["--to", "torch_dist", "--mcore", "0.17"], "--mcore '0.17' is not a choice"),
        (["--to", "torch_dist", "--optimizer", "distributed"], "--optimizer 'distributed' is not a choice"),
        (["--to", "legacy", "--optimizer", "fully_reshardable"], "choose distributed, plain, keep or none"),
        (["--to", "torch", "--names", "llama"], "--names 'llama' is not a choice"),
        (["--to", "safetensors", "--max-shard-size", "0"], "leaves no room for a tensor"),
        ([], "missing option '--to'"),
    ],
)
def test_misuse(words, message, tmp_path, capsys):
    assert message in refused(capsys, 2, source_of("llama_adam_tp2pp2"), tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


def test_the_library_refuses_what_a_format_does_not_take(tmp_path):
    reader = open_checkpoint(source_of("llama_adam_tp2pp2"))
    with pytest.raises(RequestError, match="does not take tp"):
        plan_convert(reader, tmp_path / "out", "torch", options={"tp": 2})
    with pytest.raises(RequestError, match="does not take a layout"):
        plan_convert(reader, tmp_path / "out", "torch", layout=Layout(), options={})
    with pytest.raises(RequestError, match="is not written"):
        plan_convert(reader, tmp_path / "out", "zarr", options={})


def test_a_forced_format(tmp_path, capsys):
    source = tmp_path / "ckpt"
    shutil.copytree(source_of("v009_zarr_llama_adam_tp2pp2"), source)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    refused(capsys, 3, source, tmp_path / "a", "--to", "torch_dist")
    convert(source, tmp_path / "b", "--from", "zarr")
    assert "b" in {path.name for path in tmp_path.iterdir()}
    text = refused(capsys, 3, source_of("llama_adam_tp2pp2"), tmp_path / "c", "--to", "torch_dist", "--from", "zarr")
    assert "holds no tensors in the format zarr" in text


@pytest.mark.parametrize("to", WRITERS)
def test_a_dry_run_and_the_document(to, tmp_path, capsys):
    source = source_of("legacy_llama_adam_tp2pp2")
    common = ["convert", str(source), str(tmp_path / "out"), "--to", to, "--json", "--progress", "off"]
    assert main([*common, "-n"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    proved = any("not checked with --dry-run: that master weights round" in text for text in planned["notes"])
    assert proved is (to != "safetensors")  # which holds no optimizer
    assert main(common) == 0
    done = json.loads(capsys.readouterr().out)
    for document, dry in ((planned, True), (done, False)):
        assert document["schema"] == "distckpt.convert/1"
        assert (document["dry_run"], document["to"], document["source"]["format"]) == (dry, to, "legacy")
    assert planned["files"] == done["files"]
    assert done["records_checked"] > 0


# ---------------------------------------------------------------------- bad input


def test_bad_sources(tmp_path, capsys):
    """What is wrong is said by name, with code 3 or 1, and nothing appears."""
    incomplete = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path / "a")
    shutil.rmtree(incomplete / "mp_rank_01_000")
    assert "mp_rank_01_000" in refused(capsys, 3, incomplete, tmp_path / "out", "--to", "torch_dist")
    mixed = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path / "b")
    edit(mixed / "mp_rank_01_000" / MODEL, lambda saved: saved.update(iteration=20))
    assert "20" in refused(capsys, 3, mixed, tmp_path / "out", "--to", "torch_dist")
    zarr = tmp_path / "c"
    shutil.copytree(source_of("v009_zarr_llama_adam_tp2pp2"), zarr)
    chunk = next(zarr.glob("*linear_fc1.weight/0.0.0"))
    chunk.unlink()
    assert "linear_fc1.weight" in refused(capsys, 1, zarr, tmp_path / "out", "--to", "torch_dist")
    not_a_zip = tmp_path / "model.pt"
    not_a_zip.write_bytes(b"\x80\x02}q\x00." * 100)
    refused(capsys, 3, not_a_zip, tmp_path / "out", "--to", "torch_dist")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- what is said of formats


def test_formats_that_are_read_are_proven_with_the_versions_of_the_golden_checkpoints():
    versions, seen = {}, set()
    for path in GOLDEN.iterdir():
        if not path.is_dir() or path.name in {"pickles", "truth"}:
            continue
        form = detect(resolve(path / "model.pt" if (path / "model.pt").exists() else path))
        seen.add(form.name)
        if (path / "facts.json").exists():
            written_by = json.loads((path / "facts.json").read_text())["megatron_core"].partition("+")[0]
            versions.setdefault(form.name, set()).add(written_by)
    assert seen == {found.name for found in REGISTRY}
    for found in REGISTRY:
        if found.name in versions:
            assert set(re.findall(r"\d+\.\d+\.\d+", found.read)) == versions[found.name], found.name


def test_formats_that_are_written_are_those_with_a_writer():
    assert {found.name for found in REGISTRY if found.written} == WRITERS.keys()


def test_the_table_of_formats(capsys):
    assert main(["formats"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    for row, found in zip(rows, REGISTRY, strict=True):
        assert row.startswith(found.name)
        assert (found.read or "-") in row
        assert (found.written or "-") in row
    assert main(["formats", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(f["name"], f["written"]) for f in document["formats"]] == [(f.name, f.written) for f in REGISTRY]


def test_an_empty_source_is_refused(tmp_path):
    reader = open_checkpoint(source_of("v009_zarr_llama_adam_tp2pp2"))
    reader.catalog = dataclasses.replace(reader.catalog, tensors={})
    with pytest.raises(FormatError, match="holds no tensors"):
        plan_convert(reader, tmp_path / "out", "torch_dist", options={})


# ---------------------------------------------------------------------- what is proved before anything is written


def exchanged(tmp_path):
    """A checkpoint whose master weights belong to other parameters: sizes and checksums are right."""
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path / "src")

    def change(saved):
        masters = saved["optimizer"]["fp32_from_fp16_params"][1]
        masters[0], masters[1] = masters[1], masters[0]

    edit(folder / "mp_rank_00_001" / MODEL, change)
    return folder


@pytest.mark.parametrize("to", ["torch_dist", "legacy", "torch"])
def test_master_weights_of_others_are_refused_before_anything_is_written(to, tmp_path, capsys):
    text = refused(capsys, 1, exchanged(tmp_path), tmp_path / "out", "--to", to, "--progress", "off")
    assert "master weights of the optimizer do not round to the weights: 2 do not match" in text
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_proof_tells_how_far_it_is(tmp_path):
    events = []
    plan = plan_convert(
        open_checkpoint(source_of("llama_dpzero_tp2pp2dp2")), tmp_path / "out", "torch_dist", options={}
    )
    run_conversion(plan, listener=events.append)
    starts = [n for n, event in enumerate(events) if isinstance(event, PlanReady)]
    assert [events[n].command for n in starts] == ["check", "convert"]
    first = [event.nbytes for event in events[: starts[1]] if isinstance(event, Moved)]
    assert len(first) == len(plan.proof.tasks)
    assert sum(first) == events[starts[0]].bytes_written == plan.proof.nbytes


def test_a_proof_can_be_stopped(tmp_path):
    stop = StopFlag()
    plan = plan_convert(
        open_checkpoint(source_of("llama_dpzero_tp2pp2dp2")), tmp_path / "out", "torch_dist", options={}
    )
    with pytest.raises(Interrupted):
        run_conversion(plan, listener=lambda event: isinstance(event, Moved) and stop.set(15), stop=stop)
    assert not list(tmp_path.iterdir())


def test_ranks_share_a_proof_and_fail_together(tmp_path):
    source, raised = exchanged(tmp_path), {}

    def run(rank):
        plan = plan_convert(open_checkpoint(source), tmp_path / "out", "torch_dist", options={})
        try:
            run_conversion(plan, ranks=Ranks(rank, 2, launch="a test"))
        except DistckptError as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {rank: error.exit_code for rank, error in raised.items()} == {0: 1, 1: 1}
    assert "do not round" in raised[0].message
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
