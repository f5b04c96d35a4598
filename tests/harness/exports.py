"""Exports of checkpoints for tests: run, read back, compared with the reference mapping and with Megatron's logits."""

from __future__ import annotations

import json

import numpy as np

from converters.formats import open_checkpoint
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness import hf_reference
from harness.checkpoints import truth
from harness.support import GOLDEN, load_safetensors

TOLERANCE = 1e-5
LN1P = {"llama_ln1p_weights_tp2pp2"}  # gamma - 1 is stored; gamma itself needs the width of fp32


def export(source, into, **options):
    plan = plan_export(open_checkpoint(source), into, ExportOptions(**options))
    run_conversion(plan)
    return plan


def exported(folder):
    """Every tensor of the safetensors files, as unsigned integers; each in exactly one file."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_safetensors(path)
        assert not out.keys() & part.keys()
        out |= part
    return out


def logit_difference(folder, config):
    """Largest difference between transformers' fp32 logits and Megatron's; the loading report is checked too."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    want = load_file(GOLDEN / "truth" / f"{config}-bf16.logits.safetensors")
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    depth = json.loads((folder / "config.json").read_text()).get("num_hidden_layers")
    assert all(key.startswith(f"model.layers.{depth}.") for key in loading["unexpected_keys"])  # the MTP layer
    with torch.no_grad():
        got = model.eval()(want["tokens"]).logits
    assert got.shape[:-1] == want["logits"].shape[:-1]
    return float((got - want["logits"][..., : got.shape[-1]]).abs().max())


def differing(folder, config, family):
    """Names of tensors that are not, bit for bit, what the reference mapping makes of the truth."""
    got, want = exported(folder), hf_reference.expected(config, family, truth(config))
    wrong = [n for n in want if n not in got or got[n].dtype != want[n].dtype or not np.array_equal(got[n], want[n])]
    return wrong + [n for n in got if n not in want]
