"""`ls`, `show` and `converters.open`: which checkpoints there are, and what is in a tensor."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import converters
from converters.errors import FormatError, IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.overview.checkpoint import as_numpy
from converters.overview.runs import survey
from converters.overview.statistics import tensor_statistics
from distckpt_cli.app import main
from harness.checkpoints import flip, payloads
from harness.support import GOLDEN, read_tensor

FLAT = GOLDEN / "llama_dpreshardable_tp2pp2dp2"
NAME = "decoder.layers.1.mlp.linear_fc1.weight"
OPENED = ["llama_dpreshardable_tp2pp2dp2", "legacy_gpt_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2", "hf_mixtral_bin"]


def told(capsys, *words):
    """Exit code, stdout and stderr of a command."""
    code = main(list(map(str, words)))
    out = capsys.readouterr()
    return code, out.out, out.err


# ---------------------------------------------------------------------- ls


@pytest.fixture
def runs(tmp_path):
    """A folder with a whole run, one that lacks a file, one that has just begun, NeMo's, and things that are none."""
    shutil.copytree(FLAT, tmp_path / "good")
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", tmp_path / "deep" / "er" / "short")
    (tmp_path / "deep" / "er" / "short" / "iter_0000010" / "__0_0.distcp").unlink()
    (tmp_path / "good" / "iter_0000020").mkdir()
    shutil.copytree(GOLDEN / "nemo2_llama4_weights_tp2pp2", tmp_path / "nemo")
    shutil.copytree(GOLDEN / "hf_llama_safetensors", tmp_path / "hub")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text("loss 2.0")
    (tmp_path / "loop").symlink_to(tmp_path)
    return tmp_path


def test_ls_lists_every_checkpoint_and_says_which_are_incomplete(runs, capsys):
    code, out, _ = told(capsys, "ls", runs, "--json")
    assert code == 0
    rows = {
        r["path"].removeprefix(f"{runs}/").split("/")[0] + f"/{r['iteration']}": r
        for r in json.loads(out)["checkpoints"]
    }
    assert {name: row["status"] for name, row in rows.items()} == {
        "good/10": "complete",
        "good/None": "incomplete",
        "deep/10": "incomplete",
        "nemo/10": "complete",
        "hub/None": "complete",
    }
    assert rows["deep/10"]["reason"].startswith("__0_0.distcp is missing")
    assert rows["good/10"]["latest"]
    assert not rows["good/None"]["latest"]
    assert (rows["good/10"]["model"], rows["good/10"]["parameters"]) == ("llama", 23_200)
    assert rows["good/10"]["nbytes"] == sum(f.stat().st_size for f in (runs / "good/iter_0000010").iterdir())
    assert (rows["hub/None"]["format"], rows["nemo/10"]["framework"]) == ("safetensors", "NeMo 2")


def test_ls_sorts_prints_names_and_a_table(runs, capsys):
    code, out, err = told(capsys, "ls", runs, "--sort", "size")
    assert code == 0
    sizes = [s.nbytes or 0 for s in sorted(survey(runs), key=lambda s: -(s.nbytes or 0))]
    lines = out.splitlines()
    assert len(lines) == 1 + len(sizes) + 2 + 1  # header, rows, two reasons, total
    assert str(max(survey(runs), key=lambda s: s.nbytes or 0).path) in lines[1]
    assert "5 checkpoints" in lines[-1]
    assert "next: distckpt verify" in err
    assert told(capsys, "ls", runs / "hub", "--names")[1] == f"{runs / 'hub'}\n"
    assert "no checkpoint below" in told(capsys, "ls", runs / "logs")[1]
    assert told(capsys, "ls", runs, "--sort", "colour")[0] == 2
    assert told(capsys, "ls", runs / "nowhere")[0] == 3


def test_ls_reads_no_tensor_data(runs, monkeypatch):
    monkeypatch.setattr("converters.io.gather.Gatherer.gather", lambda *_: pytest.fail("read tensor data"))
    assert len(list(survey(runs, runs / "good"))) == 5


def test_ls_calls_a_save_that_has_not_ended_incomplete(runs):
    inner = next((runs / "nemo").iterdir())
    inner.with_name(f"{inner.name}-unfinished").touch()
    (summary,) = survey(runs / "nemo")
    assert (summary.status, "unfinished" in summary.reason) == ("incomplete", True)


# ---------------------------------------------------------------------- open


@pytest.mark.parametrize("golden", OPENED)
def test_open_gives_tensors_and_slices_of_every_format(golden):
    reader = open_checkpoint(GOLDEN / golden)
    with converters.open(GOLDEN / golden, framework="np") as np_, converters.open(GOLDEN / golden) as torch_:
        assert np_.keys() == [n for n, t in reader.catalog.tensors.items() if t.kind != "optimizer"]
        for name in np_.keys()[:6]:
            wanted = as_numpy(read_tensor(reader, np_.info(name)), np_.info(name).dtype)
            got = np_.get_tensor(name)
            assert got.dtype == wanted.dtype
            assert got.tobytes() == wanted.tobytes()
            tensor = torch_.get_tensor(name)
            assert str(tensor.dtype) == f"torch.{np_.info(name).dtype}"
            assert tensor.contiguous().view(dtype=__import__("torch").uint8).numpy().tobytes() == wanted.tobytes()
            if wanted.ndim == 2:
                part = np_.get_slice(name)
                for index in (np.s_[3:7, :], np.s_[-1], np.s_[..., 2], np.s_[1:9:3, 4:], np.s_[5:5]):
                    assert part[index].tobytes() == np.ascontiguousarray(wanted[index]).tobytes()
                    assert part[index].shape == wanted[index].shape


def test_a_slice_reads_only_its_bytes():
    with converters.open(GOLDEN / "hf_llama_safetensors", framework="np") as checkpoint:
        name = next(n for n in checkpoint if n.endswith("embed_tokens.weight"))
        shape = checkpoint.info(name).shape
        checkpoint.get_slice(name)[3:7]
        assert checkpoint._sources.bytes_read == 4 * shape[1] * 2


def test_open_has_optimizer_state_by_parameter_and_facts():
    with converters.open(FLAT, framework="np") as checkpoint:
        assert f"optimizer.state.param.{NAME}" in checkpoint.keys(optimizer=True)
        master = checkpoint.get_tensor(f"optimizer.state.param.{NAME}")
        weight = checkpoint.get_tensor(NAME)
        assert (master.astype(weight.dtype) == weight).all()
        assert (checkpoint.iteration, checkpoint.format, checkpoint.layout.tp) == (10, "torch_dist", 2)
        assert checkpoint.args["hidden_size"] == 32
        assert "torch_dist, iteration 10" in repr(checkpoint)


def test_open_says_what_is_wrong(tmp_path):
    with converters.open(FLAT) as checkpoint:
        for call in (checkpoint.get_tensor, checkpoint.get_slice, checkpoint.info):
            with pytest.raises(RequestError, match="there is no tensor nothing"):
                call("nothing")
        part = checkpoint.get_slice(NAME)
        for index in (np.s_[200], np.s_[0, 0, 0], np.s_[::-1]):
            with pytest.raises(IndexError):
                part[index]
    with pytest.raises(RequestError, match="no framework"):
        converters.open(FLAT, framework="jax")
    with pytest.raises(FormatError):
        converters.open(tmp_path / "nowhere")
    shutil.copytree(FLAT, tmp_path / "ck")
    tensor, path, at, size = next(p for p in payloads(tmp_path / "ck", "weight") if p[3] > 100)
    flip(path, at + size // 2)
    with converters.open(tmp_path / "ck") as checkpoint, pytest.raises(IntegrityError):
        checkpoint.get_tensor(tensor)


# ---------------------------------------------------------------------- show


@pytest.mark.parametrize(
    ("golden", "name"),
    [
        (FLAT.name, NAME),
        (FLAT.name, f"optimizer.state.exp_avg.{NAME}"),
        ("bridge_llama4_weights_tp2pp2", "decoder.layers.3.input_layernorm.weight"),
        ("dcp_plain", None),
    ],
)
def test_statistics_are_numpys(golden, name):
    with converters.open(GOLDEN / golden, framework="np") as checkpoint:
        names = [name] if name in checkpoint.keys(optimizer=True) else list(checkpoint)
        for each in (n for n in names if not checkpoint.info(n).dtype.name.startswith("complex")):
            values = checkpoint.get_tensor(each).astype(np.float64).reshape(-1)
            stats = tensor_statistics(checkpoint, each, bins=7)
            finite = values[np.isfinite(values)]
            assert (stats.numel, stats.zero) == (values.size, np.count_nonzero(values == 0))
            assert (stats.nan, stats.infinite) == (np.isnan(values).sum(), np.isinf(values).sum())
            if not finite.size:
                assert (stats.minimum, stats.quantiles) == (None, {})
                continue
            assert (stats.minimum, stats.maximum) == (finite.min(), finite.max())
            assert stats.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-300)
            assert stats.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-300)
            assert stats.norm == pytest.approx(np.linalg.norm(finite), rel=1e-12)
            for q, value in stats.quantiles.items():
                assert value == np.quantile(finite, q, method="inverted_cdf")
            assert sum(stats.histogram) == finite.size


def test_quantiles_of_every_type_are_elements(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(3)
    arrays = {
        "f64": rng.standard_normal(1000) * 1e-200,
        "f32": rng.standard_normal(1000).astype(np.float32),
        "f16": np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1, -1, 6e-8], np.float16),
        "i64": rng.integers(-(2**50), 2**50, 999),
        "i16": rng.integers(-(2**15), 2**15, 999).astype(np.int16),
        "u8": rng.integers(0, 256, 99).astype(np.uint8),
        "flag": rng.integers(0, 2, 99).astype(bool),
    }
    safetensors.save_file(arrays, tmp_path / "model.safetensors")
    with converters.open(tmp_path / "model.safetensors", framework="np") as checkpoint:
        for name, array in arrays.items():
            finite = array.astype(np.float64)[np.isfinite(array.astype(np.float64))]
            for q, value in tensor_statistics(checkpoint, name, quantiles=(0.0, 0.1, 0.5, 1.0)).quantiles.items():
                assert value == np.quantile(finite, q, method="inverted_cdf"), (name, q)


def test_show_prints_values_of_a_part(capsys):
    code, out, _ = told(capsys, "show", FLAT, NAME, "--slice", "2:4,-3:", "--json")
    document = json.loads(out)
    with converters.open(FLAT, framework="np") as checkpoint:
        wanted = checkpoint.get_slice(NAME)[2:4, -3:].astype(np.float64)
    assert code == 0
    assert document["values"] == wanted.tolist()
    assert document["statistics"]["numel"] == 6
    assert document["statistics"]["maximum"] == wanted.max()
    code, out, _ = told(capsys, "show", FLAT, NAME, "--slice", "2:4,-3:", "--values")
    assert [[float(cell) for cell in line.split()] for line in out.splitlines()] == pytest.approx(wanted, rel=1e-5)


def test_show_lists_what_a_glob_matches_and_draws_a_histogram(capsys):
    code, out, _ = told(capsys, "show", FLAT, "decoder.layers.*.linear_qkv.weight")
    assert (code, len(out.splitlines())) == (0, 3)
    code, out, _ = told(capsys, "show", FLAT, f"optimizer.state.exp_avg_sq.{NAME}", "--histogram")
    assert code == 0
    assert sum(int(line.split()[-1].replace(",", "")) for line in out.splitlines() if "#" in line) > 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("output_layer.weigth",), 4, "did you mean 'output_layer.weight'"),
        ((NAME, "--slice", "0:4000"), 2, "outside of axis 0"),
        ((NAME, "--slice", "1,2,3"), 2, "3 ranges, the tensor 2 axes"),
        ((NAME, "--slice", "a"), 2, "is not a range"),
        ((NAME, "--slice", "4:4"), 2, "4:4 is empty"),
        ((NAME, "--slice", "5:2"), 2, "5:2 is empty: it ends before it begins"),
        (("decoder.*", "--slice", "0"), 2, "tensors match"),
    ],
)
def test_show_says_what_is_wrong(capsys, words, code, text):
    got, out, err = told(capsys, "show", FLAT, *words)
    assert (got, out) == (code, "")
    assert text in err


def test_a_backend_that_is_not_read(tmp_path, capsys):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "other", "sharded_backend_version": 1}')
    _, out, _ = told(capsys, "ls", tmp_path)
    assert f"{folder}  unreadable: {folder} is in the format 'other', which this version does not read" in out
    assert told(capsys, "verify", folder)[0] == told(capsys, "inspect", folder)[0] == 4
