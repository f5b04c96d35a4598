"""ByteCheckpoint: elements without a container, found and checked by the pickles that describe them; flat parameters."""

import io
import pickle
import shutil

import numpy as np
import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.pickles.nodes import fields, set_field
from distckpt_cli.app import main
from harness.checkpoints import edit_metadata
from harness.conformance import Conformance, own_case
from harness.support import GOLDEN, load_safetensors, read_tensor

NAME = "bytecheckpoint_llama_dp2"


class TestByteCheckpoint(Conformance):
    FORMAT = "bytecheckpoint"
    CASES = (own_case(NAME),)
    CHECKSUMS = False


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(GOLDEN / NAME, tmp_path / "run")
    return tmp_path / "run"


def read_all(folder):
    reader = open_checkpoint(folder)
    return {name: read_tensor(reader, info) for name, info in reader.catalog.tensors.items()}


def test_what_it_is():
    catalog = open_checkpoint(GOLDEN / NAME).catalog
    assert catalog.framework == "Hugging Face"
    assert catalog.iteration == 2
    assert catalog.details["version"] == "0.0.3"
    assert "param_groups" in catalog.objects
    assert {info.name for info in catalog.files} >= {"model/__0_0.distcp", "extra_state/extra_state_rank_1.pt"}
    assert catalog.path.name == "global_step_2"
    for inner in ("global_step_2", "global_step_2/model", "global_step_2/model/__0_0.distcp"):
        assert open_checkpoint(GOLDEN / NAME / inner).name == "bytecheckpoint"


def test_transformers_loads_it(tmp_path):
    from transformers import LlamaForCausalLM

    from oracle.torch_dcp import llama

    out = tmp_path / "out"
    assert main(["convert", str(GOLDEN / NAME), str(out), "--to", "safetensors", "--progress", "off"]) == 0
    llama().config.save_pretrained(out)
    _, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info


def describe(folder, change):
    """Changes the pickle of one tensor in `all_tensor_metadata`."""

    def edit(state):
        for index, raw in state["all_tensor_metadata"].items():
            if fields(index)["fqn"] == "lm_head.weight":
                state["all_tensor_metadata"][index] = change(raw)
                return

    edit_metadata(folder, edit)


def pickled(value):
    """A tensor as ByteCheckpoint pickles it, its storage left out."""
    import torch

    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=2)

    def persistent_id(item):
        if isinstance(item, torch.storage.TypedStorage):
            return ("storage", getattr(torch, item._pickle_storage_type()), "0", "cpu", item._size())
        return None

    pickler.persistent_id = persistent_id
    pickler.dump(value)
    return out.getvalue()


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [((20, 15), "holds a bfloat16 tensor"), ((16, 20), "holds a bfloat16 tensor"), (None, "has no description")],
)
def test_a_description_that_does_not_fit(shape, complaint, copy):
    import torch

    raw = None if shape is None else pickled(torch.zeros(shape, dtype=torch.bfloat16))
    describe(copy / "global_step_2" / "model", lambda _: raw)
    with pytest.raises(FormatError, match=complaint):
        read_all(copy)


def test_a_view_on_a_larger_storage_is_refused_or_right(copy):
    """The record must be as long as the storage that the pickle speaks of."""
    import torch

    describe(copy / "global_step_2" / "model", lambda _: pickled(torch.zeros(21, 16, dtype=torch.bfloat16)[1:]))
    with pytest.raises(FormatError, match="has 640 bytes, its storage 672"):
        read_all(copy)


def test_a_hostile_description_is_not_executed(copy, tmp_path):
    marker = tmp_path / "executed"
    evil = (
        b"\x80\x02cos\nsystem\nX"
        + len(f"touch {marker}").to_bytes(4, "little")
        + f"touch {marker}".encode()
        + b"\x85R."
    )
    pickle.loads(evil)
    assert marker.exists()
    marker.unlink()
    describe(copy / "global_step_2" / "model", lambda _: evil)
    with pytest.raises(FormatError, match="system"):
        read_all(copy)
    assert not marker.exists()


@pytest.mark.parametrize("relative", [True, False])
def test_flat_parameters(relative, copy):
    """What the first FSDP keeps of a module, others and padding in one tensor: `fsdp_split_and_unflat_model_param`."""
    key, folder = "model.layers.0.input_layernorm.weight", copy / "global_step_2"
    whole = read_all(copy)[key]
    moment = read_all(copy)[f"optimizer.state.exp_avg.{key}"]
    prefix = "model.layers.0."
    inner = [name if relative else prefix + name for name in ("norm.weight", "gate.bias")]

    def rename(state):
        """The norm's 16 elements become a flat parameter of 6 and 8, with 2 of padding between them."""
        for table in ("state_dict_metadata", "planner_data"):
            for name in [name for name in state[table] if name.endswith(key)]:
                state[table][name.replace(key, f"{prefix}_flat_param")] = state[table].pop(name)
        for name, path in list(state["planner_data"].items()):
            state["planner_data"][name] = tuple(f"{prefix}_flat_param" if part == key else part for part in path)
        for table in ("storage_data", "all_tensor_metadata"):
            for index in state[table]:
                full = fields(index)["fqn"]
                if full.endswith((key, f"{key}.exp_avg", f"{key}.exp_avg_sq", f"{key}.step")):
                    set_field(index, "fqn", full.replace(key, f"{prefix}_flat_param"))
        flat = f"{prefix}_flat_param"
        state["user_defined_dict"] = {
            "fsdp_flat_param_to_fqns": {flat: inner},
            "fsdp_is_padding_mask": {flat: [False, True, False]},
            "fsdp_numels_with_padding": {flat: (6, 2, 8)},
            "fsdp_shapes": {flat: ((2, 3), (8,))},
        }

    edit_metadata(folder / "model", rename)

    def optimizer_names(state):
        for table in ("state_dict_metadata", "planner_data"):
            for name in [name for name in state[table] if f".{key}." in name]:
                moved = state[table].pop(name)
                if table == "planner_data":
                    moved = tuple(f"{prefix}_flat_param" if part == key else part for part in moved)
                state[table][name.replace(key, f"{prefix}_flat_param")] = moved
        for table in ("storage_data", "all_tensor_metadata"):
            for index in state[table]:
                full = fields(index)["fqn"]
                if f".{key}." in full:
                    set_field(index, "fqn", full.replace(key, f"{prefix}_flat_param"))

    edit_metadata(folder / "optimizer", optimizer_names)
    got = read_all(copy)
    assert np.array_equal(got[f"{prefix}norm.weight"], whole[:6].reshape(2, 3))
    assert np.array_equal(got[f"{prefix}gate.bias"], whole[8:])
    assert np.array_equal(got[f"optimizer.state.exp_avg.{prefix}gate.bias"], moment[8:])
    assert f"{prefix}_flat_param" not in got
    assert got[f"optimizer.state.step.{prefix}_flat_param"].shape == ()
    assert key not in got


def test_truth_is_of_the_model():
    assert len(load_safetensors(GOLDEN / "truth" / f"{NAME}.safetensors")) == 84
