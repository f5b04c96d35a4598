"""Imports of Hugging Face folders for tests: run, exported again, and every element where the reference keeps it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from converters import Layout
from converters.box import Box
from converters.formats import open_checkpoint
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.write.export import ExportOptions, plan_export
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from converters.write.write_plan import run_conversion
from harness import hf_reference
from harness import import_cases as cases


def imported(source, out, layout=None, **options):
    plan = plan_import(source, out, layout or Layout(), ImportOptions(**options))
    run_conversion(plan)
    return plan


def exported(source, out, **options):
    run_conversion(plan_export(open_checkpoint(source), out, ExportOptions(**options)))
    return tensors(out)


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return [n for n in one if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])]


def bits(tensor):
    return tensor.contiguous().view({2: torch.uint16, 4: torch.uint32}[tensor.element_size()]).numpy()


def megatron_bits(root):
    """Every weight of a checkpoint as bits, by canonical name."""
    reader = open_checkpoint(root)
    weights = reader.catalog.weights
    gatherer = Gatherer(Sources(reader, weights))
    found = {name: gatherer.gather(name, Box.whole(info.shape)).copy() for name, info in weights.items()}
    gatherer.close()
    return found


def wrong_places(name, folder, root):
    """The tensors of a case that are not where the reference, written from the two models' code, says."""
    made = megatron_bits(root)
    own = load_file(folder / "model.safetensors")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in made:
            assert not made[key][251:].any()
            made[key] = made[key][:251]
    groups = cases.settings(name).get("num_key_value_heads", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hf_reference.SHAPES, "case", (8, groups))
        wanted = hf_reference.expected("case", cases.family(name), {f"model/{k}": v for k, v in made.items()})
    assert wanted.keys() == own.keys()
    return [key for key in own if not np.array_equal(wanted[key], bits(own[key]))]
