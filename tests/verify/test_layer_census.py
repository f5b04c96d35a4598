"""A model that lacks one tensor, or has one of another shape, is named by verify and refused by what writes."""

from dataclasses import replace

import pytest

from converters.errors import DistckptError, FormatError
from converters.formats import open_checkpoint
from converters.megatron.layer_census import missing_tensors
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.write.container import plan_safetensors
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.reshard import ReshardOptions, plan_reshard
from harness.checkpoints import golden
from harness.support import GOLDEN

HYBRID, LATENT, T5, BERT, LLAVA = (
    *("hymoe16_full_tp2ep2", "deepseek_mtp_adam_ep2pp2", "t5_adam_tp2", "bert_adam_tp2", "llava16_full_tp2dp2"),
)


def changed(name, tensor, shape=None):
    """A golden checkpoint whose catalog lacks a tensor, or says that it has another shape."""
    reader = open_checkpoint(golden(name))
    tensors = dict(reader.catalog.tensors)
    info = tensors.pop(tensor)
    if shape is not None:
        tensors[tensor] = replace(info, shape=shape)
    reader.catalog = replace(reader.catalog, tensors=tensors)
    return reader


def refused(reader, out):
    """Neither writer makes anything of it, with the optimizer or without."""
    plans = (
        lambda: plan_reshard(reader, out, Layout(), ReshardOptions(optimizer="none")),
        lambda: plan_reshard(reader, out, Layout()),
        lambda: plan_legacy(reader, out, Layout(), LegacyOptions()),
        lambda: plan_safetensors(reader, out),
    )
    for plan in plans:
        with pytest.raises(DistckptError) as caught:
            plan()
        assert caught.value.exit_code in (1, 4), caught.value
    assert not out.exists()


def test_no_real_checkpoint_lacks_anything():
    seen = 0
    for folder in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        try:
            catalog = open_checkpoint(folder).catalog
        except FormatError:
            continue
        seen += 1
        assert not (catalog.megatron and missing_tensors(catalog.weights)), folder.name
    assert seen > 60


@pytest.mark.parametrize(
    "name", [HYBRID, "gdn16_dpr_tp2dp2", LATENT, T5, BERT, LLAVA, "mb_lora", "mixtral_adam_ep2tp2"]
)
def test_each_tensor_that_is_missing_is_named(name):
    catalog = open_checkpoint(golden(name)).catalog
    weights = list(catalog.weights)
    unseen = []
    for lost in weights:
        tensors = {n: t for n, t in catalog.tensors.items() if n != lost}
        if not findings(catalog, tensors):
            unseen.append(lost)
    assert unseen == []


def findings(catalog, tensors):
    smaller = replace(catalog, tensors=tensors)
    return ModelArgs.from_catalog(smaller).contradictions(smaller)


@pytest.mark.parametrize("name", [T5, BERT, LLAVA, "mb_lora", HYBRID])
def test_each_tensor_of_another_shape_is_refused(name, tmp_path):
    catalog = open_checkpoint(golden(name)).catalog
    unseen = []
    for odd in catalog.weights:
        info = catalog.tensors[odd]
        for axis in range(len(info.shape)):
            shape = tuple(n + 2 * (i == axis) for i, n in enumerate(info.shape))
            if not findings(catalog, dict(catalog.tensors) | {odd: replace(info, shape=shape)}):
                unseen.append((odd, shape))
    assert unseen == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (HYBRID, "decoder.layers.2.mlp.router.weight"),
        (HYBRID, "decoder.layers.2.mlp.experts.3.linear_fc2.weight"),
        (HYBRID, "decoder.layers.1.self_attention.linear_proj.weight"),
        (T5, "encoder.layers.0.mlp.linear_fc2.weight"),
        (BERT, "pooler.dense.weight"),
        (LLAVA, "vision_projection.encoder.linear_fc2.weight"),
        ("mb_lora", "decoder.layers.0.self_attention.linear_qkv.adapter.linear_out.weight"),
    ],
)
def test_neither_is_written(name, tensor, tmp_path):
    refused(changed(name, tensor), tmp_path / "out")
    rows, *rest = open_checkpoint(golden(name)).catalog.tensors[tensor].shape
    refused(changed(name, tensor, (rows + 2, *rest)), tmp_path / "out")
