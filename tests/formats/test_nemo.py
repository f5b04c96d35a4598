"""NeMo 1, NeMo 2 and Megatron-Bridge as sources: what becomes of their configuration, for themselves and for Megatron-LM."""

import dataclasses
import json
import shutil
import tarfile
from collections import OrderedDict

import pytest
import yaml

from converters.catalog import Catalog
from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.megatron.megatron_args import ignored_scaling, megatron_arguments, without_argument
from converters.megatron.model_args import ModelArgs
from converters.megatron.vocabulary import vocabulary_rows
from converters.pickles.nodes import fields
from converters.write.framework_files import companions
from distckpt_cli.app import main
from harness.checkpoints import golden, truth
from harness.exports import TOLERANCE, differing
from harness.model_cases import FAMILIES, case, make_catalog, megatron_shapes
from harness.reshard_cases import read_with_torch
from harness.support import GOLDEN
from oracle.fixtures import run_oracle

NEMO1, NEMO2, BRIDGE = FRAMEWORKS = (
    "nemo1_zarr_llama4_weights_tp2pp2",
    "nemo2_llama4_weights_tp2pp2",
    "bridge_llama4_weights_tp2pp2",
)
SAVED = "nemo2_llama_weights_tp1"  # MegatronCheckpointIO of NeMo wrote it
TRUTH = GOLDEN / "truth" / "llama4-bf16.safetensors"
LLAMA4 = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": 250,
    "make_vocab_size_divisible_by": 8,
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def run(*words):
    assert main([str(word) for word in words]) == 0


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------------- to Megatron-LM


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_say_what_the_model_is(family):
    """Whatever arguments a model came from: those made of its facts give the same facts, and no note."""
    catalog = make_catalog(megatron_shapes(case(family)), case(family))
    model = ModelArgs.from_catalog(catalog)
    values = megatron_arguments(model, catalog.options)
    again = ModelArgs.from_catalog(dataclasses.replace(catalog, args=values))
    ours, theirs = ({**dataclasses.asdict(m), "source": 0, "notes": 0} for m in (model, again))
    assert ours == theirs
    assert without_argument(model) + ignored_scaling(model) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation_func": "gelu", "gated_linear_unit": True}, "no argument for the gated gelu"),
        ({"rope_scaling": True, "rope_scaling_factor": 32.0}, "by 8, this model by 32"),
        ({"seq_len_interpolation_factor": 4.0}, "is scaled by 4"),
    ],
)
def test_what_megatron_lm_has_no_argument_for_is_told(config, words):
    model = ModelArgs.from_catalog(Catalog("x", "torch_dist", "NeMo 2", {}, config={"num_layers": 2, **config}))
    assert [words in note for note in without_argument(model) + ignored_scaling(model)] == [True]


@pytest.mark.megatron
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_megatron_loads_it_and_computes_what_transformers_does(name, tmp_path):
    """The tensors, bit for bit; then Megatron's forward on what it loaded beside transformers' on the export."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run("convert", GOLDEN / name, tmp_path / "out", "--to", "torch_dist")
    settings = [word for key, value in LLAMA4.items() for word in ("--set", f"{key}={value!r}")]
    logits = tmp_path / "logits.safetensors"
    code, answer = run_oracle("load", tmp_path / "out", "--expected", TRUTH, "--logits", logits, *settings)
    assert code == 0, answer
    args = json.loads(answer)["args"]
    assert {key: args[key] for key in LLAMA4} == {key: repr(value) for key, value in LLAMA4.items()}
    run("export-hf", GOLDEN / name, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    wanted = load_file(logits)
    with torch.no_grad():
        found = model.eval()(wanted["tokens"]).logits
    assert wanted["logits"].abs().max() > 0.1
    assert (found - wanted["logits"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nothing_of_the_model_is_lost(name, to, tmp_path):
    """The result alone exports to the same model; no configuration file is needed any more."""
    run("convert", GOLDEN / name, tmp_path / "out", "--to", to, "--tp", "4")
    catalog = open_checkpoint(tmp_path / "out").catalog
    kept = to == "torch_dist" and name == BRIDGE  # its configuration lies beside what is Megatron-LM's otherwise
    assert (catalog.framework, catalog.iteration) == ("Megatron-Bridge" if kept else "Megatron-LM", 10)
    assert {"args", "checkpoint_version", "iteration"} <= catalog.common.keys()
    assert catalog.common["checkpoint_version"] == 3.0
    assert not {"pytorch-lightning_version", "loops", "callbacks", "hyper_parameters"} & catalog.common.keys()
    assert not any(key.startswith(("module.", "model.")) for t in catalog.weights.values() for key in t.keys)
    assert not any(key.startswith(("module.", "model.")) for key in catalog.objects)
    assert fields(catalog.common["args"])["tensor_model_parallel_size"] == 4
    source = ModelArgs.from_catalog(open_checkpoint(GOLDEN / name).catalog)
    result = ModelArgs.from_catalog(catalog)
    same = (
        "num_attention_heads",
        "num_query_groups",
        "activation",
        "gated",
        "rotary_base",
        "norm_epsilon",
        "vocab_size",
    )
    assert [getattr(result, field) for field in same] == [getattr(source, field) for field in same]
    run("export-hf", tmp_path / "out", tmp_path / "hf")
    assert not differing(tmp_path / "hf", "llama4", "llama")
    run("export-hf", GOLDEN / name, tmp_path / "other")
    assert (tmp_path / "hf" / "config.json").read_bytes() == (tmp_path / "other" / "config.json").read_bytes()


def test_samples_that_nemo_2_saw_are_carried(tmp_path):
    run("convert", GOLDEN / NEMO2, tmp_path / "out", "--to", "torch_dist")
    assert open_checkpoint(tmp_path / "out").catalog.args["consumed_train_samples"] == 80


def test_torch_reads_the_common_state_of_a_converted_one(tmp_path):
    """With `weights_only` and Megatron's own list of classes: nothing of Lightning is in it."""
    import argparse

    import torch

    run("convert", GOLDEN / NEMO2, tmp_path / "out", "--to", "torch_dist")
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(tmp_path / "out" / "iter_0000010" / "common.pt", weights_only=True)
    assert state["args"].num_attention_heads == 8
    assert state["iteration"] == 10


def test_padding_follows_the_configuration(tmp_path):
    """make_vocab_size_divisible_by is 8 in NeMo's configuration: at tp 4 there are 256 rows, not the 512 of 128 * 4."""
    run("reshard", GOLDEN / NEMO2, tmp_path / "out", "--tp", "4")
    assert open_checkpoint(tmp_path / "out").catalog.weights["output_layer.weight"].shape[0] == 256
    source = open_checkpoint(GOLDEN / BRIDGE).catalog
    for pads, rows in ((False, 250), (True, 280)):
        catalog = dataclasses.replace(source, config={**source.config, "should_pad_vocab": pads})
        assert vocabulary_rows("output_layer.weight", 250, 5, catalog, 250) == rows


# ---------------------------------------------------------------------- for themselves


def test_bridge_keeps_its_files(tmp_path):
    source = GOLDEN / BRIDGE / "iter_0000010"
    copy = tmp_path / "in" / "iter_0000010"
    shutil.copytree(source, copy)
    (copy / "tokenizer" / "deep").mkdir(parents=True)
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    (copy / "tokenizer" / "deep" / "merges.txt").write_text("a b")
    (copy / "tokenizer" / "link").symlink_to("/etc/passwd")
    (copy / "modelopt_state").mkdir()
    run("reshard", copy.parent, tmp_path / "out", "--tp", "4", "--pp", "1")
    out = tmp_path / "out" / "iter_0000010"
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "10"
    for path in (out / "train_state.pt", tmp_path / "out" / "latest_train_state.pt"):
        assert path.read_bytes() == (source / "train_state.pt").read_bytes()
    assert sorted(files(out / "tokenizer")) == ["deep/merges.txt", "tokenizer.json"]
    assert not (out / "modelopt_state").exists()
    before, after = (yaml.safe_load((folder / "run_config.yaml").read_text()) for folder in (source, out))
    before["model"] |= {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}
    before["checkpoint"] |= {"save_optim": False, "save_rng": False}  # Bridge asks for what these say is there
    assert after == before
    catalog = open_checkpoint(tmp_path / "out").catalog
    assert (catalog.framework, Layout.saved(catalog).tp) == ("Megatron-Bridge", 4)


def test_bridge_says_what_it_has(tmp_path):
    """The same grid of ranks keeps the random states."""
    run("reshard", GOLDEN / BRIDGE, tmp_path / "out", "--tp", "2", "--pp", "2")
    said = yaml.safe_load((tmp_path / "out" / "iter_0000010" / "run_config.yaml").read_text())["checkpoint"]
    assert (said.get("save_rng", True), said["save_optim"]) == (True, False)
    assert sum(o.name == "rng_state" for o in open_checkpoint(tmp_path / "out").catalog.objects.values()) == 4


FIDDLE = {  # as fiddle 0.3.0 prints it, without what is of no concern here
    "root": {"type": "ref", "key": "trainer_context_1"},
    "objects": {
        "dict_1": {"type": {"type": "pyref", "module": "builtins", "name": "dict"}, "items": [], "metadata": None},
        "tuple_1": {
            "type": {"type": "pyref", "module": "builtins", "name": "tuple"},
            "items": [["Index(index=0)", "tensor_model_parallel_size"]],
            "metadata": None,
        },
        "llama_config_1": {
            "type": {"type": "pyref", "module": "fiddle._src.config", "name": "Config"},
            "items": [
                ["Attr(name='num_layers')", {"type": "leaf", "value": 4, "paths": ["<root>.model.config.num_layers"]}],
                ["Attr(name='num_attention_heads')", {"type": "leaf", "value": 8, "paths": []}],
                ["Attr(name='hidden_size')", {"type": "leaf", "value": 64, "paths": []}],
                ["Attr(name='num_query_groups')", {"type": "leaf", "value": 4, "paths": []}],
                ["Attr(name='gated_linear_unit')", {"type": "leaf", "value": True, "paths": []}],
                ["Attr(name='normalization')", {"type": "leaf", "value": "RMSNorm", "paths": []}],
                [
                    "Attr(name='activation_func')",
                    {"type": "pyref", "module": "torch.nn.functional", "name": "silu"},
                ],
                ["Attr(name='tensor_model_parallel_size')", {"type": "leaf", "value": 2, "paths": []}],
                ["Attr(name='virtual_pipeline_model_parallel_size')", {"type": "leaf", "value": None, "paths": []}],
            ],
            "metadata": {"type": "ref", "key": "buildable_traverser_metadata_1"},
        },
        "megatron_strategy_1": {
            "type": {"type": "pyref", "module": "fiddle._src.config", "name": "Config"},
            "items": [
                ["Attr(name='tensor_model_parallel_size')", {"type": "leaf", "value": 2, "paths": []}],
                ["Attr(name='ddp')", {"type": "ref", "key": "ddp_1"}],
            ],
        },
    },
}


@pytest.fixture
def nemo2(tmp_path):
    """A copy of the NeMo 2 checkpoint with a fiddle graph and a tokenizer in its context."""
    outer = tmp_path / "nemo2"
    shutil.copytree(golden(NEMO2).parent, outer)
    (outer / "context" / "io.json").write_text(json.dumps(FIDDLE))
    (outer / "context" / "nemo_tokenizer").mkdir()
    (outer / "context" / "nemo_tokenizer" / "vocab.json").write_text("{}")
    return outer


def test_nemo_2_keeps_its_files(nemo2, tmp_path):
    run("reshard", nemo2, tmp_path / "out", "--tp", "4", "--pp", "2", "--vpp", "2")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["context", "weights"]
    assert (out / "context" / "nemo_tokenizer" / "vocab.json").read_text() == "{}"
    before, after = (yaml.safe_load((root / "context" / "model.yaml").read_text()) for root in (nemo2, out))
    sizes = {"tensor_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    before["config"] |= sizes
    assert after == before
    objects = json.loads((out / "context" / "io.json").read_text())["objects"]
    for name in ("llama_config_1", "megatron_strategy_1"):
        assert ["Attr(name='tensor_model_parallel_size')", {"type": "leaf", "value": 4, "paths": []}] in objects[name][
            "items"
        ]
    config = {item[0]: item[1].get("value") for item in objects["llama_config_1"]["items"]}
    assert (config["Attr(name='virtual_pipeline_model_parallel_size')"], config["Attr(name='num_layers')"]) == (2, 4)
    # what NeMo 2 asks for: its own names, and its own common state
    assert all(key.startswith("module.") for key in read_with_torch(out / "weights"))
    catalog = open_checkpoint(out).catalog
    assert (catalog.framework, catalog.common["global_step"]) == ("NeMo 2", 10)
    run("export-hf", out, tmp_path / "hf")
    assert not differing(tmp_path / "hf", "llama4", "llama")


def test_nemo_2_of_the_first_versions_has_io_json_alone(nemo2, tmp_path):
    (nemo2 / "context" / "model.yaml").unlink()
    model = ModelArgs.from_catalog(open_checkpoint(nemo2).catalog)
    assert (model.num_attention_heads, model.num_query_groups, model.activation, model.gated) == (8, 4, "silu", True)
    assert model.source["num_query_groups"] == "config.num_query_groups"
    (nemo2 / "context" / "io.json").write_text('{"objects": {}, "root": {"type": "ref", "key": "x"}}')
    assert ModelArgs.from_catalog(open_checkpoint(nemo2).catalog).num_query_groups is None


@pytest.mark.parametrize("name", [NEMO2, BRIDGE])
def test_there_and_back_gives_the_same_files(name, tmp_path):
    run("reshard", GOLDEN / name, tmp_path / "first", "--tp", "2", "--pp", "2", "--rng", "drop")
    run("reshard", tmp_path / "first", tmp_path / "second", "--tp", "4", "--pp", "1")
    run("reshard", tmp_path / "second", tmp_path / "third", "--tp", "2", "--pp", "2")
    first, third = files(tmp_path / "first"), files(tmp_path / "third")
    settings = [name for name in first if name.endswith((".yaml", ".json"))]
    assert settings
    assert all(first[name] == third[name] for name in settings)


def test_a_nemo_file_becomes_a_folder_that_packs_again(tmp_path):
    outer = tmp_path / "unpacked"
    shutil.copytree(GOLDEN / NEMO1, outer)
    (outer / "b5e5_tokenizer.model").write_bytes(b"\0\1sentencepiece")
    with tarfile.open(tmp_path / "model.nemo", "w:") as tar:
        tar.add(outer, arcname=".")
    run("reshard", tmp_path / "model.nemo", tmp_path / "out", "--tp", "4")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["b5e5_tokenizer.model", "model_config.yaml", "model_weights"]
    assert (out / "b5e5_tokenizer.model").read_bytes() == b"\0\1sentencepiece"
    assert yaml.safe_load((out / "model_config.yaml").read_text())["tensor_model_parallel_size"] == 4
    with tarfile.open(tmp_path / "again.nemo", "w:") as tar:
        tar.add(out, arcname=".")
    run("export-hf", tmp_path / "again.nemo", tmp_path / "hf")
    assert not differing(tmp_path / "hf", "llama4", "llama")
    assert all(key.startswith("model.") for key in read_with_torch(out / "model_weights"))


# ---------------------------------------------------------------------- settings are changed where they stand

YAML = """\
# a comment that stays
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  save_optim: true   # and this one
  save_rng: true
data_parallel_size: 1
model:
  _target_: megatron.bridge.models.llama.LlamaModelProvider
  activation_func:
    _target_: torch.nn.functional.silu
    _call_: false
  generation_config: !!python/object:transformers.GenerationConfig {eos: [1, 2]}
  init_method: &init
    _partial_: true
  output_layer_init_method: *init
  context_parallel_size:
  pipeline_model_parallel_layout:
  - [embedding, decoder]
  - [decoder, loss]
  pipeline_model_parallel_size: 2
  tensor_model_parallel_size: "2"
  virtual_pipeline_model_parallel_size: null
  rotary_base: 1.0e+06
optimizer:
  tensor_model_parallel_size: 99
"""


@pytest.fixture
def bridge(tmp_path):
    shutil.copytree(GOLDEN / BRIDGE, tmp_path / "bridge")
    return tmp_path / "bridge" / "iter_0000010"


def made(folder, layout, *, optimizer=False, rng=False):
    catalog = open_checkpoint(folder).catalog
    around = companions(catalog, layout, framework="keep", optimizer=optimizer, rng=rng)
    return around.files["iter_0000010/run_config.yaml"].decode()


def test_every_other_byte_stays(bridge):
    (bridge / "run_config.yaml").write_text(YAML)
    changes = OrderedDict(
        {
            "save_optim: true ": "save_optim: false ",
            "save_rng: true": "save_rng: false",
            "context_parallel_size:\n": "context_parallel_size: 1\n",
            "layout:\n  - [embedding, decoder]\n  - [decoder, loss]\n": "layout: null\n",
            "  pipeline_model_parallel_size: 2": "  pipeline_model_parallel_size: 1",
            'tensor_model_parallel_size: "2"': "tensor_model_parallel_size: 4",
        }
    )
    wanted = YAML
    for old, new in changes.items():
        assert wanted.count(old) == 1
        wanted = wanted.replace(old, new)
    found = made(bridge, Layout(tp=4))
    assert found == wanted
    assert yaml.load(found.replace("!!python/object:transformers.GenerationConfig", ""), yaml.SafeLoader)
    assert made(bridge, Layout(tp=4), optimizer=True, rng=True).count("true") == YAML.count("true")


def test_what_a_loader_asks_for_is_added(bridge):
    (bridge / "run_config.yaml").write_text("checkpoint:\n    fully_parallel_save: true\nmodel:\n  vocab_size: 250\n")
    document = yaml.safe_load(made(bridge, Layout(tp=4)))
    assert document == {
        "checkpoint": {"fully_parallel_save": True, "save_optim": False, "save_rng": False},
        "model": {"vocab_size": 250, "tensor_model_parallel_size": 4},
    }


@pytest.mark.parametrize(
    "text",
    [
        "model: [unclosed",
        "model: " + "[" * 5000,
        "\0",
        "model: !!python/object/apply:os.system ['touch /tmp/owned']\n  x: y",
    ],
)
def test_a_broken_configuration_is_an_error(text, bridge):
    (bridge / "run_config.yaml").write_text(text)
    with pytest.raises(FormatError):
        made(bridge, Layout())


@pytest.mark.parametrize(
    "content", ["[]", '{"objects": []}', '{"objects": {"a": {"items": [[1]]}}}', "{", "[" * 100_000]
)
def test_a_broken_graph_is_an_error(content, nemo2, tmp_path):
    (nemo2 / "context" / "io.json").write_text(content)
    assert main(["reshard", str(nemo2), str(tmp_path / "out"), "--tp", "4"]) == 3
    assert not (tmp_path / "out").exists()


def test_a_folder_full_of_other_things_is_not_carried(nemo2, tmp_path):
    with (nemo2 / "context" / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert main(["reshard", str(nemo2), str(tmp_path / "out"), "--tp", "4"]) == 3
    assert truth("llama4")  # the source was fine


# ---------------------------------------------------------------------- NeMo 1 before its distributed checkpoints


@pytest.mark.parametrize(
    "names", [["mp_rank_00", "mp_rank_01"], ["tp_rank_00_pp_rank_000"], ["tp_rank_00_pp_rank_001"] * 2]
)
def test_parts_of_single_ranks_are_refused(names, tmp_path):
    """Read as torch files, each of them would be a small model that lacks nothing."""
    import torch

    for name in set(names):
        (tmp_path / "model" / name).mkdir(parents=True)
        torch.save(
            {"model.decoder.final_layernorm.weight": torch.ones(2)}, tmp_path / "model" / name / "model_weights.ckpt"
        )
    first = tmp_path / "model" / names[0]
    with tarfile.open(tmp_path / "model.nemo", "w:") as tar:
        tar.add(tmp_path / "model", arcname=".")
    for path in (tmp_path / "model", first, first / "model_weights.ckpt", tmp_path / "model.nemo"):
        with pytest.raises(FormatError, match="part of one rank of a NeMo 1 model"):
            open_checkpoint(path)


def test_an_undivided_one_is_exported(tmp_path):
    """The negative control: the file of a whole model, where NeMo 1 puts it, beside its configuration."""
    import torch
    from safetensors.torch import load_file

    weights = {
        key.removeprefix("model/0/"): value for key, value in load_file(TRUTH).items() if key.startswith("model/")
    }
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(GOLDEN / NEMO1 / "model_config.yaml", folder)
    torch.save({f"model.{name}": value for name, value in weights.items()}, folder / "model_weights.ckpt")
    with tarfile.open(tmp_path / "model.nemo", "w:") as tar:
        tar.add(folder, arcname=".")
    for number, path in enumerate((folder, tmp_path / "model.nemo")):
        run("export-hf", path, tmp_path / f"hf{number}")
        assert not differing(tmp_path / f"hf{number}", "llama4", "llama")
    for number, (verb, *to) in enumerate(
        (["convert", "--to", "torch_dist"], ["convert", "--to", "legacy"], ["reshard"])
    ):
        run(verb, tmp_path / "model.nemo", tmp_path / f"out{number}", *to, "--tp", "4")
        assert fields(open_checkpoint(tmp_path / f"out{number}").catalog.common["args"])["num_query_groups"] == 4
        run("export-hf", tmp_path / f"out{number}", tmp_path / f"again{number}")
        assert not differing(tmp_path / f"again{number}", "llama4", "llama")


def test_what_nemo_wrote_is_resharded_without_its_context_and_says_so(tmp_path, capsys):
    """`ModelCheckpoint(always_save_context=False)` leaves it out, and so does its writer when it is used alone."""
    source = GOLDEN / SAVED
    run("reshard", source, tmp_path / "out", "--tp", 2, "--progress", "off")
    assert "no context folder" in "".join(capsys.readouterr())
    run("diff", source, tmp_path / "out", "--progress", "off")
    run("reshard", tmp_path / "out", tmp_path / "back", "--tp", 1, "--progress", "off")
    before, after = read_with_torch(source / "weights"), read_with_torch(tmp_path / "back" / "weights")
    assert all(key.startswith("module.") for key in before)
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    assert open_checkpoint(tmp_path / "out").catalog.common == open_checkpoint(source).catalog.common
    by_hand, saved = (open_checkpoint(GOLDEN / name).catalog for name in (NEMO2, SAVED))
    assert by_hand.framework == saved.framework == "NeMo 2"
    assert by_hand.common.keys() >= saved.common.keys()
