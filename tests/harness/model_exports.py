"""Exports of models without a checkpoint: planned from shapes alone, filled, and computed by transformers."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from converters import models
from converters.megatron.model_args import ModelArgs
from converters.models.export import map_to_hf
from converters.planning.plan import prove
from harness import model_cases as cases


def export(family, **changes):
    options = {k: changes.pop(k) for k in ("dtype", "vocab_size", "mtp") if k in changes}
    args = cases.case(family, **changes)
    shapes = cases.megatron_shapes(args)
    catalog = cases.make_catalog(shapes, args)
    facts = ModelArgs.from_catalog(catalog)
    mapping = map_to_hf(catalog, facts, models.by_name(family), **options)
    prove(mapping.pieces.values(), shapes, mapping.drops)
    return catalog, facts, mapping, shapes


def write_config(folder, mapping):
    (folder / "config.json").write_text(json.dumps(mapping.config))
    (folder / "generation_config.json").write_text(json.dumps(mapping.generation_config))


def logits_of(folder, mapping, arrays, tokens):
    """What transformers computes in float32 from an export of these values."""
    filled = cases.run_copies(mapping.copies, {n: t.shape for n, t in mapping.targets.items()}, arrays)
    save_file({n: torch.from_numpy(v) for n, v in filled.items()}, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, mapping)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    extra = len(model.model.layers) if hasattr(model, "model") else -1
    assert all(key.startswith(f"model.layers.{extra}.") for key in loading["unexpected_keys"])  # the MTP layer
    with torch.no_grad():
        return model.eval()(tokens).logits
