# ruff: noqa: E501 - texts as programs print them
"""`distckpt doctor`: errors as programs raise them are recognised, and what is advised exists."""

from __future__ import annotations

import io
import json
import re

import pytest

from converters.overview.symptoms import SYMPTOMS, diagnose
from distckpt_cli.app import main
from distckpt_cli.commands import COMMANDS

TEXTS = {
    "weights-only": "WeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.",
    "extra-state-missing": "RuntimeError: Missing key in checkpoint state_dict: a.core_attention._extra_state/shard_0_32.",
    "extra-state-count": "Invalid access pattern: 60 ShardedObject are missing. Existing shards: ['decoder._extra_state/shard_0_80']",
    "rerun-state": "RuntimeError: Missing key in checkpoint state_dict: rerun_state_machine_state/shard_3_8",
    "global-shape": "CheckpointingException: Global shape mismatch for loaded (torch.Size([1152, 1536])) and expected ((4608, 1536))",
    "key-not-stored": "KeyError: \"decoder.layers.0.mlp.linear_fc1.weight from model not in state dict: ['a']\"",
    "rng-ignored": "(TP, PP) mismatch after resume ((1, 4) vs (2, 2) from checkpoint): RNG state will be ignored",
    "optimizer-not-reshardable": "(TP, PP) mismatch after resume ((1, 4) vs (2, 2) from checkpoint): not supported for "
    "DistributedOptimizer with sharding type fully_sharded_bucket_space. Please use --ckpt-fully-parallel-save flag",
    "flattened-range": "ShardedTensor.flattened_range is not supported.",
    "merge-lists": "ValueError: Cannot merge two lists with different lengths (81 and 52, encountered at level ('optimizer',))",
    "not-distributed": "CheckpointingException: /data/ckpt is not a distributed checkpoint",
    "common-missing": "Common file /data/iter_0000010/common.pt does not exist",
    "format-flags": "Detected load from a distributed checkpoint, but neither --use-dist-ckpt nor --auto-detect-ckpt-format is set.",
    "run-config": "FileNotFoundError: Could not find run_config.yaml in /data. Ensure this is a valid Megatron checkpoint.",
    "bridge-incomplete": "Error: 91991 tensors from the original checkpoint were not written. See warnings above for details.",
    "no-mapping": "WARNING: No mapping found for megatron_param: mtp.layers.0.enorm.weight",
    "no-architecture": "Model architecture not supported by AutoBridge",
    "dtype-mismatch": "AssertionError: dtype mismatch between source and target state dicts",
    "converter-shape": "RuntimeError: shape '[2, -1, 7168]' is invalid for input of size 7168",
    "fp8-view": "RuntimeError: 2D scaled Float8BlockwiseQTensor does not support view the last 2 dimensions",
    "meta-tensor": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "needs-gpu": "RuntimeError: 0 active drivers ([]). There should only be one.",
    "version-skew": "TypeError: load() got an unexpected keyword argument 'no_dist'",
    "save-failed": "Failed to validate global plan",
    "truncated": "metadata is None; global metadata read failed: [Errno 2] No such file or directory: '/a/.metadata'",
    "access-pattern": "Invalid access pattern for ShardedTensor(key='embedding.word_embeddings.weight')",
    "zarr-path": 'ValueError: Error opening "zarr" driver: ... Invalid key: "../exp/a"',
    "no-checkpoint": ">> '--exit-on-missing-checkpoint' set ... exiting. <<",
    "old-tool": "TypeError: cannot unpack non-iterable Namespace object",
    "factory-merges": "Different dict keys encountered in apply_factory_merges",
    "no-manifest": "Integrity manifest not found at /a/integrity.json. The checkpoint must be saved with integrity verification",
    "manifest-differs": "Checkpoint integrity verification failed for 3 file(s)",
    "forensic": "rerun_state_machine.py line 9: TypeError: 'NoneType' object is not subscriptable",
    "optimizer-absent": "Unable to load optimizer from checkpoint /a. Specify --no-load-optim or --finetune",
    "rng-absent": "Unable to load rng state from checkpoint /a",
    "argument-differs": "tensor_model_parallel_size value from checkpoint (2) is not equal to the input argument value (4).",
    "torch-shape": "size mismatch for decoder.layers.0.mlp.linear_fc1.weight: copying a param with shape torch.Size([2]) from",
    "torch-keys": 'Missing key(s) in state_dict: "decoder.x".',
    "torch-archive": "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    "remainders": "AttributeError: 'bool' object has no attribute 'dtype'",
}


def test_every_symptom_has_a_text_and_is_recognised_by_it():
    assert list(TEXTS) == [symptom.name for symptom in SYMPTOMS]
    for name, text in TEXTS.items():
        assert [one.symptom.name for one in diagnose([text])] == [name]


def test_what_is_advised_exists():
    commands = set(COMMANDS)
    for symptom in SYMPTOMS:
        for remedy in symptom.remedies:
            assert set(re.findall(r"distckpt ([a-z][\w-]*)", remedy)) <= commands | {"needs"}, remedy
        assert symptom.remedies or symptom.harmless


def test_a_log_is_read_line_by_line(tmp_path, capsys, monkeypatch):
    log = tmp_path / "train.log"
    lines = ["iteration 1", TEXTS["flattened-range"], TEXTS["rng-ignored"], TEXTS["flattened-range"], "x" * 10**6]
    log.write_text("\n".join(lines))
    (tmp_path / "my ckpt").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", str(log), "my ckpt", "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [(e["name"], e["line"], e["count"]) for e in errors] == [("flattened-range", 2, 2), ("rng-ignored", 3, 1)]
    assert errors[0]["remedies"] == ["distckpt reshard 'my ckpt' DST --tp T --pp P"]
    assert main(["doctor", str(log)]) == 0
    assert "(2 lines)" in capsys.readouterr().out


def test_text_standard_input_and_nothing(monkeypatch, capsys, tmp_path):
    assert main(["doctor", TEXTS["no-manifest"], "--names"]) == 0
    assert capsys.readouterr().out == "no-manifest\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXTS["truncated"]))
    assert main(["doctor", "-"]) == 0
    assert "verify CKPT" in capsys.readouterr().out
    assert main(["doctor", "all is well"]) == 1
    assert main(["doctor", str(tmp_path)]) == 2
    assert main(["doctor", str(tmp_path / "train.log")]) == 3


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00broken", b""])
def test_bytes_that_are_no_text_do_no_harm(tmp_path, raw):
    (tmp_path / "log").write_bytes(raw)
    assert main(["doctor", str(tmp_path / "log")]) == 1
