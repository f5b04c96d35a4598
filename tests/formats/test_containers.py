"""Containers of whole tensors: what we write, the real loaders take, and it is the same there and back."""

from __future__ import annotations

import argparse
import filecmp
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.errors import Interrupted
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.optimizer.read_groups import read_param_groups
from converters.write.container import TorchOptions, plan_torch
from converters.write.write_plan import run_conversion
from distckpt_cli.app import main
from harness import hf_reference
from harness.checkpoints import GOLDENS, copy_golden, golden, truth
from harness.container_cases import bits, convert, loaded
from harness.exports import LN1P, TOLERANCE, logit_difference
from harness.legacy_cases import LEGACY
from harness.reshard_cases import by_parameter, compare, expected, folder_of, read_with_torch
from harness.support import GOLDEN
from oracle.fixtures import run_module

# ---------------------------------------------------------------------- there and back

THERE = [
    "llama_adam_tp2pp2",
    "llama_dpreshardable_buckets_tp2dp2",
    "mixtral_adam_ep2tp2",
    "mixtral_dpreshardable_ep2pp2",
]
THERE += ["v009_llama_bucketspace_tp2pp2dp2", "v009_zarr_llama_adam_tp2pp2", "v009_zarr_llama_distopt_tp2pp2dp2"]
THERE += ["v012_mixtral_modelspace_ep2tp2", "v019_llama_fullyreshardable_tp2dp2", "deepseek_mtp_adam_ep2pp2"]
THERE += ["llama_dpzero_tp2pp2dp2", "gpt_adam_tp2pp2", "llama4_dpreshardable_pp4dp2", "qwen3_adam_tp2"]
WEIGHTS = [
    "moe_shared_weights_ep2pp2",
    "qwen2_moe_weights_pp2ep2",
    "bridge_llama4_weights_tp2pp2",
    "gptneox_weights_tp2",
]


def canonical(name):
    """Names of grouped experts with the expert's number where the catalog has it."""
    return re.sub(r"experts\.(linear_fc\d)\.(weight|bias)(\d+)$", r"experts.\3.\1.\2", name)


def unpadded(found, wanted):
    return {n: v[: wanted[n].shape[0]] if n in wanted and wanted[n].ndim else v for n, v in found.items()}


def by_name(document):
    """What a torch file of ours holds, as `expected` names it."""
    out = {f"model/{canonical(name)}": bits(value) for name, value in document["model"].items()}
    for kind, values in document.get("optimizer", {}).get("state", {}).items():
        out |= {f"{kind}/{canonical(name)}": bits(value) for name, value in values.items()}
    return out


@pytest.mark.parametrize("name", [*THERE, *LEGACY, *WEIGHTS])
def test_dist_to_torch_to_dist(name, tmp_path):
    source = golden(name) if name not in LEGACY else GOLDEN / name
    config = (GOLDENS.get(name) or LEGACY[name])[0]
    wanted = expected(config, optimizer="weights" not in name)
    path = convert(source, tmp_path / "model.pt", "torch")
    document = loaded(path)
    compare(unpadded(by_name(document), wanted), wanted)
    assert document["iteration"] == 10
    back = open_checkpoint(path)
    assert not back.catalog.problems
    original = open_checkpoint(source)
    if "optimizer" in document:
        before, after = (read_param_groups(reader) for reader in (original, back))
        assert [(p.dense, p.experts, p.apart) for p in before.parts] == [
            (p.dense, p.experts, p.apart) for p in after.parts
        ]
        assert document["optimizer"]["param_groups"][0]["step"] == before.parts[0].dense[0]["step"]
    if not back.catalog.args:
        return  # Bridge keeps none; then the way back is closed, see below
    dist = folder_of(convert(path, tmp_path / "dist", "torch_dist"))
    compare(unpadded(by_parameter(read_with_torch(dist)), wanted), wanted)


def test_the_comparison_sees_one_bit(tmp_path):
    path = convert(golden("llama_adam_tp2pp2"), tmp_path / "model.pt", "torch")
    wanted = expected("llama", optimizer=True)
    found = unpadded(by_name(loaded(path)), wanted)
    found["exp_avg/decoder.layers.1.mlp.linear_fc2.weight"] = (
        found["exp_avg/decoder.layers.1.mlp.linear_fc2.weight"] ^ 1
    )
    with pytest.raises(AssertionError, match="exp_avg/decoder"):
        compare(found, wanted)


@pytest.mark.parametrize(
    "name", ["llama_dpreshardable_tp2pp2dp2", "mixtral_adam_ep2tp2", "v009_zarr_llama_adam_tp2pp2"]
)
def test_dist_to_safetensors_to_dist(name, tmp_path):
    wanted = expected(GOLDENS[name][0], optimizer=False)
    folder = convert(golden(name), tmp_path / "st", "safetensors")
    held_there = {f"model/{canonical(n)}": bits(v) for n, v in load_file(folder / "model.safetensors").items()}
    compare(unpadded(held_there, wanted), wanted)
    assert json.loads((folder / "distckpt.json").read_text())["args"]["tensor_model_parallel_size"] == 1
    dist = folder_of(convert(folder, tmp_path / "dist", "torch_dist", "--tp", "2"))
    compare(unpadded(by_parameter(read_with_torch(dist)), wanted), wanted)
    file = convert(folder, tmp_path / "model.pt", "torch")
    compare(unpadded(by_name(loaded(file)), wanted), wanted)


@pytest.mark.parametrize("options", [["torch"], ["torch", "--names", "hf"], ["safetensors"]])
def test_diff_and_verify_agree(options, tmp_path, capsys):
    source, target = golden("mixtral_adam_ep2tp2"), convert(golden("mixtral_adam_ep2tp2"), tmp_path / "m", *options)
    command = ["diff", str(source), str(target), *([] if options == ["torch"] else ["--ignore", "optimizer.*"])]
    assert main(command) == 0
    assert main(["verify", str(target)]) == 0
    path = target if target.is_file() else target / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert main(command) == 1
    capsys.readouterr()
    assert main(["verify", str(target)]) == (0 if options == ["safetensors"] else 1)  # which has no checksums
    assert ("checksums BAD" in capsys.readouterr().out) == (options != ["safetensors"])


@pytest.mark.parametrize("options", [["torch"], ["torch", "--weights-only"], ["safetensors"]])
def test_nothing_is_rounded(options, tmp_path):
    """Megatron-FSDP keeps the weights of a bf16 model in fp32."""
    target = convert(GOLDEN / "fsdp_llama_dp2", tmp_path / "m", *options)
    command = ["diff", str(GOLDEN / "fsdp_llama_dp2"), str(target)]
    assert main([*command, *([] if options == ["torch"] else ["--ignore", "optimizer.*"])]) == 0


def test_the_output_does_not_depend_on_threads_and_memory(tmp_path):
    source = golden("mixtral_dpreshardable_ep2pp2")
    one, two = (tmp_path / n / "model.pt" for n in ("a", "b"))
    convert(source, one, "torch", "--threads", "1")
    convert(source, two, "torch", "--threads", "4", "--max-memory", "1MiB")
    assert one.read_bytes() == two.read_bytes()


def test_weights_only_and_the_training_state(tmp_path):
    source = golden("llama_adam_tp2pp2")
    whole = loaded(convert(source, tmp_path / "a.pt", "torch"))
    weights = loaded(convert(source, tmp_path / "b.pt", "torch", "--weights-only"))
    assert set(whole) - set(weights) == {"optimizer"}
    assert whole["optimizer"]["state"].keys() == {"param", "exp_avg", "exp_avg_sq"}
    assert whole["args"]["num_layers"] == 2
    assert whole["args"]["params_dtype"] == "torch.bfloat16"
    assert whole["args"]["tensor_model_parallel_size"] == whole["args"]["pipeline_model_parallel_size"] == 1
    assert whole["opt_param_scheduler"]["max_lr"] == 0.01


def test_a_loss_scaler_goes_along(tmp_path):
    folder = copy_golden("llama_adam_tp2pp2", tmp_path / "iter_0000010")
    common = Archive.read(folder / "common.pt")
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3}
    torch.save(scaler, tmp_path / "scaler.pt")
    held = Archive.read(tmp_path / "scaler.pt")
    common.members["data/0"] = held.members["data/0"]
    common.tree["optimizer"]["grad_scaler"] = held.tree
    (folder / "common.pt").write_bytes(common.dump(common.tree, "common"))
    path = convert(folder, tmp_path / "model.pt", "torch")
    assert loaded(path)["optimizer"]["grad_scaler"] == scaler
    dist = folder_of(convert(path, tmp_path / "dist", "torch_dist"))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(dist / "common.pt")["optimizer"]["grad_scaler"] == scaler


def test_what_is_no_plain_data_is_told(tmp_path, capsys):
    """`weights_only` takes no Namespace and no enumerations."""
    convert(golden("llama_adam_tp2pp2"), tmp_path / "m.pt", "torch", "--json")
    dropped = {item["what"]: item["reason"] for item in json.loads(capsys.readouterr().out)["dropped"]}
    assert dropped["args.attention_backend"] == "no plain data"
    assert "args.num_layers" not in dropped


def test_tied_models_have_no_second_copy(tmp_path):
    model = loaded(convert(golden("gpt_adam_tp2pp2"), tmp_path / "a.pt", "torch"))["model"]
    assert "output_layer.weight" not in model
    assert "embedding.word_embeddings.weight" in model


# ---------------------------------------------------------------------- the real loaders

FAMILIES = ["llama31_weights_tp2pp2", "mixtral_adam_ep2tp2", "gpt_adam_tp2pp2", "gptneox_weights_tp2"]
FAMILIES += [
    "deepseek_v3_weights_pp2ep2",
    "qwen2_moe_weights_pp2ep2",
    "v009_zarr_llama_adam_tp2pp2",
    "nemotron_weights_tp2",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_a_torch_file(name, tmp_path):
    config, family = GOLDENS[name]
    folder = convert(golden(name), tmp_path / "hf", "safetensors", "--names", "hf")
    (folder / "model.safetensors").unlink()
    path = convert(golden(name), folder / "pytorch_model.bin", "torch", "--names", "hf")
    found = {key: bits(value) for key, value in loaded(path).items()}
    wanted = hf_reference.expected(config, family, truth(config))
    compare(found, wanted)
    assert name not in LN1P
    assert logit_difference(folder, config) <= TOLERANCE


@pytest.mark.parametrize(
    ("config", "layout"),
    [("mixtral", {"tp": 2, "ep": 2}), pytest.param("llama", {"tp": 2, "pp": 2}, marks=pytest.mark.slow)],
)
def test_megatron_loads_a_torch_file(config, layout, megatron_checkpoint, tmp_path):
    """Strictly, into a GPTModel without parallelism."""
    saved = megatron_checkpoint(config, **layout, transformer_impl="local")
    path = convert(saved.folder, tmp_path / "model.pt", "torch")
    code, answer, errors = run_module("oracle.containers", "load", path, "--config", config)
    assert code == 0, answer + errors[-2000:]
    assert json.loads(answer)["count"] > 10


def test_ranks_write_the_same_file(tmp_path):
    """Its directory needs the checksums of all ranks."""
    source = golden("gpt_adam_tp2pp2")  # with transposed tensors, whose sums are taken at the end
    for options in ([], ["--names", "hf"]):
        one = convert(source, tmp_path / f"one{len(options)}.pt", "torch", *options)
        two = tmp_path / f"one{len(options)}" / one.name
        command = [
            sys.executable,
            "-m",
            "distckpt_cli",
            "--workers",
            "2",
            "convert",
            str(source),
            str(two),
            "--to",
            "torch",
        ]
        root = Path(__file__).parents[2]
        done = subprocess.run([*command, *options], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert one.read_bytes() == two.read_bytes()


# ---------------------------------------------------------------------- the destination is one file


def test_a_file_in_the_way(tmp_path, capsys):
    source, path = str(golden("qwen2_weights_tp2pp2")), tmp_path / "model.pt"
    command = ["convert", source, str(path), "--to", "torch", "--progress", "off"]
    path.write_text("my notes")
    assert main(command) == 5
    assert re.search("already exists\\nhint:  choose another name\\n", capsys.readouterr().err)
    assert main([*command, "--overwrite"]) == 5
    assert "not a file that torch.save wrote" in capsys.readouterr().err
    assert path.read_text() == "my notes"
    torch.save({"old": torch.zeros(3)}, path)
    assert main(command) == 5
    assert "or add --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert "model" in loaded(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    (tmp_path / "folder").mkdir()
    assert main(["convert", source, str(tmp_path / "folder"), "--to", "torch"]) == 5
    assert "is a directory, and the result is one file" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(tmp_path):
    assert main(["convert", str(golden("qwen2_weights_tp2pp2")), str(tmp_path / "m.pt"), "--to", "torch", "-n"]) == 0
    assert not list(tmp_path.iterdir())


def test_someone_else_makes_the_file_meanwhile(tmp_path, monkeypatch, capsys):
    from converters.execute.publish import Staging

    path, publish_file = tmp_path / "model.pt", Staging._publish_file

    def late(self, file):
        path.write_text("theirs")
        publish_file(self, file)

    monkeypatch.setattr(Staging, "_publish_file", late)
    command = ["convert", str(golden("qwen2_weights_tp2pp2")), str(path), "--to", "torch", "--progress", "off"]
    assert main(command) == 5
    assert "changed by another program" in capsys.readouterr().err
    assert path.read_text() == "theirs"


class StopAfter:
    """A flag that is set once it has been asked a number of times."""

    signum = 2

    def __init__(self, count):
        self.left = count

    def is_set(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("names", ["megatron", "hf"])
def test_an_interrupted_file_is_continued(names, tmp_path):
    """The second run takes over what the first has done; nothing is published before, and the bytes are the same."""
    source, path = golden("gpt_adam_tp2pp2"), tmp_path / "b" / "model.pt"
    options = TorchOptions(names=names, max_memory=1 << 20, threads=1)
    once = convert(source, tmp_path / "a" / "model.pt", "torch", "--names", names, "--max-memory", "1MiB")

    def plan():
        made = plan_torch(open_checkpoint(source), path, options)
        # several tasks, and the first to be stopped is one of them
        return replace(made, job=replace(made.job, tile_bytes=4096), proof=None)

    assert len(plan().job.tasks) > 3
    with pytest.raises(Interrupted):
        run_conversion(plan(), stop=StopAfter(8))
    assert not path.exists()
    stats = run_conversion(plan())
    assert stats.bytes_kept > 0
    assert path.read_bytes() == once.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["model.pt"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Peak resident memory of the whole process, interpreter and libraries included."""
    from harness.checkpoints import write_llama

    write_llama(tmp_path / "src" / "iter_0000007", layers=24, hidden=2048, ffn=5632, vocab=32000)
    code = (
        "import re, sys; from pathlib import Path; from distckpt_cli.app import main; code = main(sys.argv[1:]);"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]; print(code, peak, file=sys.stderr)"
    )
    root = Path(__file__).parents[2]
    for source, target, options in (
        ("src", "model.pt", ["torch"]),
        ("src", "hf.bin", ["torch", "--names", "hf"]),
        ("model.pt", "st", ["safetensors"]),
        ("st", "again/model.pt", ["torch"]),
    ):
        command = [
            sys.executable,
            "-c",
            code,
            "convert",
            str(tmp_path / source),
            str(tmp_path / target),
            "--to",
            *options,
        ]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        status, kib = done.stderr.split()[-2:]
        assert status == "0", done.stderr
        assert int(kib) < 256 << 10, target
    assert (tmp_path / "model.pt").stat().st_size > 2 << 30
    assert filecmp.cmp(tmp_path / "model.pt", tmp_path / "again" / "model.pt", shallow=False)


def test_what_lies_beside_the_weights_of_a_hugging_face_folder_comes_along(tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(GOLDEN / "hf_llama_safetensors", folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_x.py").write_text("raise SystemExit(1)")
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out), "--to", "safetensors", "--progress", "off"]) == 0
    assert "code of the source was left out: modeling_x.py" in "".join(capsys.readouterr())
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "modeling_x.py").exists()


@pytest.mark.parametrize("command", [("export-hf",), ("convert", "--to", "safetensors")])
def test_what_the_safetensors_library_does_not_open_is_not_published(command, tmp_path, monkeypatch, capsys):
    from converters.write import write_plan

    real = write_plan.Run.run

    def spoiled(run):
        stats = real(run)
        with (run.folder / run.job.files[0].name).open("r+b") as file:
            file.seek(8)
            file.write(b"[")
        return stats

    monkeypatch.setattr(write_plan.Run, "run", spoiled)
    source, out = str(golden("llama_adam_tp2pp2")), tmp_path / "out"
    assert main([command[0], source, str(out), *command[1:]]) == 1
    assert "model.safetensors was written, but the safetensors library does not open it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
