"""The torch_dist reader: every golden checkpoint holds its truth, bit for bit; damage is noticed when it is opened."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.formats.resolve import resolve
from converters.megatron.optimizer_layout import optimizer_layout
from converters.pickles.nodes import fields, set_field
from harness.checkpoints import GOLDENS, copy_golden, edit_metadata, golden
from harness.conformance import Conformance, megatron_case
from harness.support import GOLDEN


class TestTorchDist(Conformance):
    FORMAT = "torch_dist"
    CASES = (
        *(megatron_case(name) for name in GOLDENS if "zarr" not in name),
        replace(  # without its context folder nothing says how many heads the model has
            megatron_case("nemo2_llama_weights_tp1", "llama"), commands=(("reshard", "SRC", "DST", "--tp", "2"),)
        ),
    )


LAYOUTS = {
    "llama_adam_tp2pp2": ("Adam, not distributed", "model"),
    "llama_fullyreshardable_tp2pp2dp2": ("fully_reshardable", "model"),
    "v009_llama_modelspace_tp2pp2dp2": ("fully_sharded_model_space", "model"),
    "llama_dpreshardable_tp2pp2dp2": ("dp_reshardable", "flat"),
    "v009_llama_bucketspace_tp2pp2dp2": ("fully_sharded_bucket_space", "flat"),
    "llama_dpzero_tp2pp2dp2": ("dp_zero_gather_scatter", "objects"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_optimizer_layouts_are_listed(name):
    catalog = open_checkpoint(GOLDEN / name).catalog
    state = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    layout, form = LAYOUTS[name]
    assert optimizer_layout(catalog).name == layout
    assert all(t.dtype.name == "float32" for t in state)
    if form == "objects":
        assert not state
        assert {o.name for o in catalog.objects.values() if o.name.endswith(".param_state")}
        return
    assert sum(t.nbytes for t in state) > 0
    if form == "flat":
        assert all(t.opaque and len(t.shape) == 1 for t in state)
        assert {t.name.rpartition(".")[2] for t in state} == {"param", "exp_avg", "exp_avg_sq"}
        # one bucket of each state for each of the four model-parallel ranks, as large as what the rank trains
        assert len(state) == 12
        assert sum(t.shape[0] for t in state) >= 3 * sum(t.numel for t in catalog.weights.values())
        return
    assert all(t.opaque is None for t in state)
    names = Counter(t.name.split(".")[2] for t in state)
    assert len(names) == 3
    assert set(names.values()) == {len(catalog.weights)}
    for tensor in state:
        weight = catalog.weights[tensor.name.split(".", 3)[3]]
        if not tensor.name.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert tensor.shape == weight.shape


PRODUCERS = {
    "v009_llama_modelspace_tp2pp2dp2": "Megatron-Core 0.8 to 0.10",
    "v009_llama_bucketspace_tp2pp2dp2": "Megatron-Core 0.8 to 0.10",
    "v012_mixtral_modelspace_ep2tp2": "Megatron-Core 0.11 or 0.12",
    "v014_llama_modelspace_tp2pp2dp2": "Megatron-Core 0.13 or 0.14",
    "llama_adam_tp2pp2": "Megatron-Core 0.16 to 0.18",
    "llama_dpzero_tp2pp2dp2": "Megatron-Core 0.16 to 0.18",
    "v019_llama_fullyreshardable_tp2dp2": "Megatron-Core 0.19 or later",
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_producing_version_is_told(name):
    assert open_checkpoint(GOLDEN / name).catalog.producer[0] == PRODUCERS[name]


def test_flavours():
    assert open_checkpoint(GOLDEN / "llama_adam_tp2pp2").catalog.framework == "Megatron-LM"
    bridge = open_checkpoint(GOLDEN / "bridge_llama4_weights_tp2pp2").catalog
    assert bridge.framework == "Megatron-Bridge"
    assert bridge.config["num_layers"] == 4
    nemo = open_checkpoint(GOLDEN / "nemo2_llama4_weights_tp2pp2").catalog
    assert nemo.framework == "NeMo 2"
    assert not any(name.startswith("module.") for name in nemo.tensors)
    assert open_checkpoint(GOLDEN / "v019_llama_fullyreshardable_tp2dp2").catalog.args["num_layers"] == 2


# ---------------------------------------------------------------------- which folder a path means


def test_paths_that_lead_to_a_checkpoint(tmp_path):
    root = GOLDEN / "llama_adam_tp2pp2"
    data = root / "iter_0000010"
    for path in (root, data, data / ".metadata", data / "__1_0.distcp", data / "common.pt", str(root)):
        assert resolve(path) == data
    nemo = golden("nemo2_llama4_weights_tp2pp2")
    for path in (GOLDEN / "nemo2_llama4_weights_tp2pp2", nemo.parent, nemo, nemo.parent / "context"):
        assert resolve(path) == nemo
    shutil.copytree(data, tmp_path / "a" / "release")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("release\n")
    shutil.copytree(data, tmp_path / "a" / "iter_0000020")
    assert resolve(tmp_path / "a").name == "release"
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("20")
    assert resolve(tmp_path / "a").name == "iter_0000020"
    shutil.copytree(data, tmp_path / "b" / "iter_0000030")  # one iteration and no tracker
    assert resolve(tmp_path / "b").name == "iter_0000030"


def refused(path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    return caught.value


def test_paths_that_lead_nowhere(tmp_path):
    data = golden("llama_adam_tp2pp2")
    shutil.copytree(data, tmp_path / "run" / "iter_0000010")
    shutil.copytree(data, tmp_path / "run" / "iter_0000020")
    several = refused(tmp_path / "run")
    assert "2 iterations" in several.message
    assert "iter_0000020" in several.hint
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("30")
    stale = refused(tmp_path / "run")
    assert "no iter_0000030" in stale.message
    assert "iter_0000010, iter_0000020" in stale.details[0]
    assert "iter_0000020" in stale.hint
    for text in ("", "latest", "\x1b[31m10", "-1", "9" * 5000):
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
        assert "\x1b" not in str(refused(tmp_path / "run"))
    typo = refused(tmp_path / "run" / "iter_000010")
    assert "does not exist" in typo.message
    assert "iter_0000010" in typo.hint
    assert "does not exist" in refused(tmp_path / "no" / "such" / "place").message
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path / "empty").message
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert "is not a checkpoint" in refused(tmp_path / "file").message
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    assert "not a checkpoint" in refused(tmp_path / "other").message
    assert "notes.txt" in refused(tmp_path / "other").details[0]


def test_an_unfinished_nemo_save_is_refused(tmp_path):
    outer = golden("nemo2_llama4_weights_tp2pp2").parent
    shutil.copytree(outer, tmp_path / "nemo" / outer.name)
    assert open_checkpoint(tmp_path / "nemo").catalog.weights
    (tmp_path / "nemo" / f"{outer.name}-unfinished").touch()
    for path in (tmp_path / "nemo", tmp_path / "nemo" / outer.name, tmp_path / "nemo" / outer.name / "weights"):
        assert "unfinished" in refused(path).message


def test_other_formats_are_named(tmp_path):
    shutil.copytree(golden("llama_adam_tp2pp2"), tmp_path / "later" / "iter_0000010")
    (tmp_path / "later" / "iter_0000010" / "metadata.json").write_text('{"sharded_backend": "fsdp\\u001b[31m"}')
    assert "the format 'fsdp\\x1b[31m'" in refused(tmp_path / "later").message
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").touch()
    assert "mp_rank_00/model_optim_rng.pt is empty" in refused(tmp_path).message


# ---------------------------------------------------------------------- damage that is noticed at open


@pytest.fixture
def copy(tmp_path):
    return copy_golden("llama_adam_tp2pp2", tmp_path / "iter_0000010")


def errors(folder, severity="error"):
    return [p for p in open_checkpoint(folder).catalog.problems if p.severity == severity]


def test_a_missing_shard(copy):
    held = {p.name for p in copy.glob("*.distcp")}
    (copy / "__2_0.distcp").unlink()
    (problem,) = errors(copy)
    assert problem.file == "__2_0.distcp"
    assert "is missing" in problem.message
    assert problem.tensors
    assert any(name.startswith("decoder.layers.1.") for name in problem.tensors)
    listed = {f.name: f for f in open_checkpoint(copy).catalog.files if f.role == "data"}
    assert listed.keys() == held
    assert listed["__2_0.distcp"].size is None


@pytest.mark.parametrize("cut", [0, 1, 100, 5000])
def test_a_truncated_shard(copy, cut):
    path = copy / "__1_1.distcp"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(cut if cut < 100 else size - cut)
    (problem,) = errors(copy)
    assert problem.file == path.name
    assert f"is {path.stat().st_size:,} bytes" in problem.message
    assert f"{size:,}" in problem.message  # the metadata needs all of it
    assert problem.tensors
    intact = open_checkpoint(GOLDEN / "llama_adam_tp2pp2").catalog.tensors
    assert set(problem.tensors) < intact.keys()


def test_a_stale_shard_is_a_warning(copy):
    shutil.copy(copy / "__0_0.distcp", copy / "__9_0.distcp")
    (problem,) = errors(copy, "warning")
    assert problem.file == "__9_0.distcp"
    assert "belongs to no record" in problem.message
    assert not errors(copy)
    assert {f.name for f in open_checkpoint(copy).catalog.files if f.role == "unreferenced"} == {"__9_0.distcp"}


def test_no_metadata_json_is_a_warning(copy):
    (copy / "metadata.json").unlink()
    (problem,) = errors(copy, "warning")
    assert "unfinished" in problem.message


def test_no_metadata(copy):
    (copy / ".metadata").unlink()
    error = refused(copy)
    assert ".metadata is missing" in error.message
    assert error.hint


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage" * 100, b"\x80\x04N.", b"\x80\x04}."])
def test_garbage_metadata(copy, content):
    (copy / ".metadata").write_bytes(content)
    assert ".metadata" in refused(copy).message


def test_every_truncation_of_metadata_is_refused(copy):
    raw = (copy / ".metadata").read_bytes()
    for length in range(0, len(raw), max(1, len(raw) // 60)):
        (copy / ".metadata").write_bytes(raw[:length])
        refused(copy)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"sharded_backend": 5}', "[" * 100_000])
def test_odd_metadata_json(copy, content):
    (copy / "metadata.json").write_text(content)
    refused(copy)


def test_garbage_common_state(copy):
    (copy / "common.pt").write_bytes(b"PK" * 100)
    assert "common.pt" in refused(copy).message


FC1 = "decoder.layers.mlp.linear_fc1.weight"


def test_a_hole(copy):
    edit_metadata(copy, lambda state: fields(state["state_dict_metadata"][FC1])["chunks"].pop(3))
    problems = errors(copy)
    assert any("no chunk covers" in p.message and FC1 in p.message for p in problems)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in problems[0].tensors


def test_an_overlap(copy):
    def change(state):
        chunks = fields(state["state_dict_metadata"][FC1])["chunks"]
        index = {str(fields(key)["offset"]): key for key in state["storage_data"] if fields(key)["fqn"] == FC1}
        sizes = fields(chunks[0])["sizes"]
        larger = list(sizes.args[0])
        larger[1] += 1
        set_field(chunks[0], "sizes", type(sizes)(sizes.func, (tuple(larger),)))
        assert index

    edit_metadata(copy, change)
    assert any("overlap" in p.message and FC1 in p.message for p in errors(copy))


def test_a_chunk_without_a_record(copy):
    def change(state):
        records = state["storage_data"]
        del records[next(key for key in records if fields(key)["fqn"] == FC1)]

    edit_metadata(copy, change)
    assert any("no record" in p.message for p in errors(copy))


def test_a_record_for_nothing_is_a_warning(copy):
    edit_metadata(copy, lambda state: state["state_dict_metadata"].pop(FC1))
    assert any(FC1 in p.message for p in errors(copy, "warning"))


def test_records_that_overlap(copy):
    def change(state):
        rows = [info for key, info in state["storage_data"].items() if fields(info)["relative_path"] == "__0_0.distcp"]
        rows.sort(key=lambda info: fields(info)["offset"])
        set_field(rows[1], "offset", fields(rows[1])["offset"] - 1)

    edit_metadata(copy, change)
    assert any("overlap" in p.message and p.file == "__0_0.distcp" for p in errors(copy))


def test_a_record_outside_the_folder_is_refused(copy):
    for path in ("../secret", "/etc/passwd", "a/b", "..", ""):

        def change(state, path=path):
            set_field(next(iter(state["storage_data"].values())), "relative_path", path)

        edit_metadata(copy, change)
        assert "outside" in refused(copy).message


def test_two_keys_for_one_tensor_are_refused(copy):
    def change(state):
        tensors = state["state_dict_metadata"]
        tensors["module.decoder.final_layernorm.weight"] = tensors["decoder.final_layernorm.weight"]

    edit_metadata(copy, change)
    assert "same tensor" in refused(copy).message


def test_a_shard_that_is_a_pipe_or_a_folder_does_not_block(copy):
    import os

    (copy / "common.pt").unlink()
    os.mkfifo(copy / "common.pt")
    assert "not a regular file" in refused(copy).message
