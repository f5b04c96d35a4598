"""`distckpt strip`: the weights with their bits, without the state of training."""

import pytest

import converters
from distckpt_cli.app import main
from harness.support import GOLDEN


@pytest.mark.parametrize(
    "name", ["llama_adam_tp2pp2", "mixtral_dpreshardable_ep2pp2", "legacy_llama_distopt_tp2pp2dp2"]
)
def test_weights_stay_and_the_rest_goes(name, tmp_path, capsys):
    assert main(["strip", str(GOLDEN / name), str(tmp_path / "out")]) == 0
    assert "optimizer state is left out by option" in capsys.readouterr().out
    with converters.open(GOLDEN / name) as before, converters.open(tmp_path / "out") as after:
        assert after.format == before.format
        assert list(after.catalog.weights) == list(before.catalog.weights)
        assert not [t for t in after.catalog.tensors.values() if t.kind == "optimizer"]
        assert "rng_state" not in {o.name for o in after.catalog.objects.values()}
        assert str(after.layout) == str(before.layout)
        for tensor in before:
            assert after.get_tensor(tensor).equal(before.get_tensor(tensor))
    assert converters.verify(tmp_path / "out").good


def test_other_formats_are_refused_with_the_way_that_remains(tmp_path, capsys):
    assert main(["strip", str(GOLDEN / "hf_llama_safetensors"), str(tmp_path / "out")]) == 4
    assert "--to safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_library_strips_too(tmp_path):
    report = converters.strip(GOLDEN / "llama_adam_tp2pp2", tmp_path / "out", threads=1)
    with converters.open(report.path) as after:
        assert not [t for t in after.catalog.tensors.values() if t.kind == "optimizer"]
