"""The real megatron-core loads reshards at their layout, plain and distributed optimizers included, bit for bit."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from converters.formats.common_state import Archive
from converters.pickles.nodes import set_field
from harness.checkpoints import copy_golden, golden
from harness.reshard_cases import folder_of, param_groups, reshard, truth_of

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


def for_local_layers(name, into):
    """A copy whose arguments say that the job's layers are Megatron's own, as those of the oracle are.

    They keep their norms apart from the linear layers that follow, so the order of parameters in a bucket is another.
    """
    folder = copy_golden(name, into / "iter_0000010")
    archive = Archive.read(folder / "common.pt")
    set_field(archive.tree["args"], "transformer_impl", "local")
    content = archive.dump(archive.tree, "common")
    (folder / "common.pt").write_bytes(content)
    return folder


CASES = [
    ("llama_dpreshardable_tp2pp2dp2", "llama", {"tp": 4}, {}),
    ("v009_llama_bucketspace_tp2pp2dp2", "llama", {"pp": 2, "dp": 2}, {"fully_parallel": True}),
    ("mixtral_dpreshardable_ep2pp2", "mixtral", {"tp": 2}, {}),
    ("llama_fullyreshardable_tp2pp2dp2", "llama", {"pp": 2, "dp": 2}, {"optimizer": "dp_reshardable"}),
    ("llama_adam_tp2pp2", "llama", {"tp": 4}, {}),
]
MORE = [
    ("llama_adam_tp2pp2", "llama", {"tp": 2, "dp": 2}, {"optimizer": "fully_reshardable"}),
    ("llama_fullyreshardable_tp2pp2dp2", "llama", {"pp": 2}, {"optimizer": "plain"}),
    ("llama_dpzero_tp2pp2dp2", "llama", {"tp": 2, "pp": 2}, {"vocab_size": 120}),
    ("v014_llama_modelspace_tp2pp2dp2", "llama", {"tp": 4, "pp": 2}, {"optimizer": "dp_reshardable"}),
    ("v019_llama_fullyreshardable_tp2dp2", "llama", {"dp": 4}, {}),
    ("mixtral_adam_ep2tp2", "mixtral", {"ep": 4, "dp": 4}, {}),
    ("v012_mixtral_modelspace_ep2tp2", "mixtral", {"tp": 2, "pp": 2}, {}),
]


@pytest.mark.parametrize(
    ("name", "config", "layout", "options"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)]
)
def test_weights_masters_moments_and_groups(name, config, layout, options, megatron_load, tmp_path):
    source = for_local_layers(name, tmp_path) if options.get("optimizer") == "dp_reshardable" else name
    reshard(source, tmp_path / "out", layout, **options)
    answer = megatron_load(tmp_path / "out", truth_of(config), config, optimizer=True, **layout)
    assert answer["ok"], answer
    ranks = answer["optimizer"]
    for state in ("master", "exp_avg", "exp_avg_sq"):
        if config == "llama":  # every element of the model is in the state of one data-parallel rank
            copies = layout.get("dp", 1)
            assert sum(rank["compared"][state] for rank in ranks) * copies == sum(rank["local"] for rank in ranks)
        assert all(rank["compared"][state] for rank in ranks)
    wanted = [values for _, values in param_groups(config)]
    for group in (group for rank in ranks for group in rank["groups"]):
        assert {"step", "lr", "weight_decay", "wd_mult"} <= group.keys()
        same = group.keys() - {"is_expert_parallel"}  # true for experts where ep > 1; 0.9 has fewer fields
        assert any(all(group[key] == other[key] for key in same & other.keys()) for other in wanted), group


@pytest.mark.parametrize(
    ("name", "config", "layout"),
    [
        ("gpt_adam_tp2pp2", "gpt2", {"tp": 4}),
        pytest.param("qwen2_weights_tp2pp2", "qwen2", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_adam_tp2", "qwen3", {"tp": 4, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("llama_singleton_weights_tp2pp2", "llama", {"tp": 4}, marks=pytest.mark.slow),
    ],
)
def test_weights_of_other_models(name, config, layout, megatron_load, tmp_path):
    """Tied embeddings on two pipeline stages, learned positions, q and k norms."""
    reshard(name, tmp_path / "out", layout)
    answer = megatron_load(tmp_path / "out", truth_of({"gpt2": "gpt"}.get(config, config)), config, **layout)
    assert answer["ok"], answer


def test_one_wrong_moment_is_seen(megatron_load, tmp_path):
    expected = load_file(truth_of("llama"))
    name = "exp_avg/0/decoder.layers.1.mlp.linear_fc2.weight"
    expected[name][-1, -1] *= 2
    save_file(expected, tmp_path / "other.safetensors")
    reshard("llama_fullyreshardable_tp2pp2dp2", tmp_path / "out", {"tp": 2})
    answer = megatron_load(tmp_path / "out", tmp_path / "other.safetensors", tp=2, optimizer=True)
    assert not answer["ok"]
    wrong = [rank["wrong"] for rank in answer["optimizer"]]
    assert [list(rank["exp_avg"]) for rank in wrong] == [[], ["decoder.layers.mlp.linear_fc2.weight"]]
    assert not any(rank["master"] or rank["exp_avg_sq"] for rank in wrong)


def test_what_megatron_refuses_without_a_reshard(megatron_load):
    """Another number of pipeline stages and a dp_reshardable optimizer: the complaint that this command answers."""
    with pytest.raises(pytest.fail.Exception, match=r"dp_group_idx|mismatch|not supported|KeyError"):
        megatron_load(golden("llama_dpreshardable_tp2pp2dp2"), truth_of("llama"), tp=4, optimizer=True)


def test_a_copy_of_the_result_is_loaded_by_its_folder(megatron_load, tmp_path):
    """An iteration's folder alone is enough: nothing points outside it."""
    reshard("llama_adam_tp2pp2", tmp_path / "out", {"tp": 2})
    shutil.copytree(folder_of(tmp_path / "out"), tmp_path / "moved" / "iter_0000010")
    shutil.rmtree(tmp_path / "out")
    answer = megatron_load(tmp_path / "moved" / "iter_0000010", truth_of("llama"), tp=2)
    assert answer["ok"], answer
