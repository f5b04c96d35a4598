"""veScale: the union of all stages' optimizers, masters and moments under the parameters' names; what is missing."""

import shutil

import numpy as np
import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.pickles.machine import parse
from converters.pickles.nodes import Global, Obj, fields
from distckpt_cli.app import main
from harness.conformance import Conformance, own_case
from harness.support import GOLDEN, load_safetensors

NAME = "vescale_llama_tp2pp2dp2"
SAVED = "vescale_linear_tp2"  # veScale itself wrote it: two linear layers, no optimizer


class TestVeScale(Conformance):
    FORMAT = "vescale"
    CASES = (own_case(SAVED), own_case(NAME))
    DEEP = 2


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(GOLDEN / NAME, tmp_path / "run")
    return tmp_path / "run"


def refused(path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    return caught.value


def test_what_vescale_wrote_is_like_what_was_made_after_its_source():
    """Files, and the classes in `.metadata` with their fields, but for two that torch 2.13 adds to its outermost one."""

    def classes(name):
        root = parse((GOLDEN / name / "model" / ".metadata").read_bytes())
        out, todo, seen = {}, [root], set()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, Obj):
                state = fields(node)
                out.setdefault(node.func.path if isinstance(node.func, Global) else str(node.func), set()).update(state)
                todo += [*state.values(), *node.args]
            elif isinstance(node, dict):
                todo += [*node, *node.values()]
            elif isinstance(node, (list, tuple)):
                todo += node
        return out

    saved, by_hand = classes(SAVED), classes(NAME)
    by_hand["torch.distributed.checkpoint.metadata.Metadata"] |= {"storage_meta", "version"}
    assert saved == by_hand
    names = {path.name for path in (GOLDEN / SAVED / "model").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_what_it_is():
    catalog = open_checkpoint(GOLDEN / NAME).catalog
    assert catalog.framework == "Hugging Face"
    assert len(catalog.weights) == 21
    states = {name.split(".")[2] for name, t in catalog.tensors.items() if t.kind == "optimizer"}
    assert states == {"param", "exp_avg", "exp_avg_sq", "step"}
    assert "param_group_meta.0.lr" in catalog.objects
    state = catalog.tensors["optimizer.state.param.model.layers.1.mlp.up_proj.weight"]
    assert state.shape == (24, 16)
    assert state.chunk_count == 4
    assert {info.name.rpartition("/")[0] for info in catalog.files} == {"model", "optimizer/pp_0", "optimizer/pp_1"}


def test_masters_round_to_the_weights():
    """The two halves of the truth belong together: a mistake in a box would show here, too."""
    truth = load_safetensors(GOLDEN / "truth" / f"{NAME}.safetensors")
    for name in open_checkpoint(GOLDEN / NAME).catalog.weights:
        master = truth[f"optimizer.state.param.{name}"]
        assert np.array_equal(((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16), truth[name]), name


def test_safetensors(tmp_path):
    assert main(["convert", str(GOLDEN / NAME), str(tmp_path / "out"), "--to", "safetensors", "--progress", "off"]) == 0
    truth = load_safetensors(GOLDEN / "truth" / f"{NAME}.safetensors")
    got = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert len(got) == 21
    assert all(np.array_equal(value, truth[name]) for name, value in got.items())


def test_a_stage_between_others_is_missing(copy):
    shutil.move(copy / "optimizer" / "pp_1", copy / "optimizer" / "pp_2")
    error = refused(copy)
    assert "the optimizer lacks 1 of 3 stages: optimizer/pp_1" in error.message


def test_the_last_stage_is_missing(copy):
    """Nothing numbers it; the weights that no optimizer state belongs to tell."""
    shutil.rmtree(copy / "optimizer" / "pp_1")
    (problem,) = open_checkpoint(copy).catalog.problems
    assert problem.severity == "warning"
    assert "no optimizer state" in problem.message
    assert "lm_head.weight" in problem.tensors


def test_no_optimizer_at_all(copy):
    shutil.rmtree(copy / "optimizer")
    catalog = open_checkpoint(copy).catalog
    assert not catalog.problems
    assert len(catalog.tensors) == 21
    assert open_checkpoint(copy / "model").catalog.tensors.keys() == catalog.tensors.keys()


def test_no_model(copy):
    shutil.rmtree(copy / "model")
    assert "no model/.metadata" in refused(copy).message


def test_stages_that_contradict_each_other(copy):
    shutil.copy(copy / "model" / ".metadata", copy / "optimizer" / "pp_1" / ".metadata")
    shutil.copytree(copy / "optimizer" / "pp_0", copy / "optimizer" / "pp_2")
    catalog = open_checkpoint(copy).catalog  # the same tensors in two folders are replicas
    assert any("no optimizer state" in problem.message for problem in catalog.problems)
