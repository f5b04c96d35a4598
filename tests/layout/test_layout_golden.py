"""The split rules against real checkpoints: what each job stored is what `shards` says its ranks hold."""

import json
from pathlib import Path

import pytest

from converters.formats import open_checkpoint
from converters.megatron.identity import writer_of
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.outline import Outline
from converters.megatron.split import Shard, holders, shards

GOLDEN = Path(__file__).parents[1] / "golden"
FACTS = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/facts.json"))}
OTHERS = {name: GOLDEN / name for name in ("bridge_llama4_weights_tp2pp2", "nemo2_llama4_weights_tp2pp2")}


def opened(path):
    reader = open_checkpoint(path)
    shapes = {n: t.shape for n, t in reader.catalog.weights.items()}
    model = ModelArgs.from_catalog(reader.catalog)
    return reader, Layout.saved(reader.catalog), Outline.of(model, shapes)


def inner(name):
    """The parameter's name in that of its optimizer state."""
    return name.split(".", 3)[3] if name.startswith("optimizer.state.") else name


def plain(tensor):
    """Not a flat buffer, and not cut into flattened blocks."""
    return not tensor.opaque and all(part.block is None for part in tensor.parts)


@pytest.mark.parametrize("name", FACTS)
def test_the_saved_layout_is_found(name):
    facts, (_, layout, _) = FACTS[name], opened(GOLDEN / name)
    assert (layout.tp, layout.pp, layout.vpp, layout.ep) == (facts["tp"], facts["pp"], facts["vpp"], facts["ep"])
    assert layout.world_size == facts["world_size"]


@pytest.mark.parametrize("name", [*FACTS, *OTHERS])
def test_stored_chunks_are_the_shards(name):
    reader, layout, outline = opened(GOLDEN / name)
    if name in OTHERS:
        assert (layout.tp, layout.pp) == (2, 2)
    weights = reader.catalog.weights
    assert weights
    compared = 0
    for tensor in reader.catalog.tensors.values():
        if inner(tensor.name) not in weights or not plain(tensor):
            continue
        expected = {shard.box for shard in shards(inner(tensor.name), tensor.shape, layout, outline)}
        assert {chunk.box for chunk in tensor.chunks()} == expected, tensor.name
        compared += 1
    assert compared >= len(weights)


@pytest.mark.parametrize("name", [name for name in FACTS if FACTS[name]["format"] == "torch_dist"])
def test_every_chunk_was_written_by_a_rank_that_holds_it(name):
    reader, layout, outline = opened(GOLDEN / name)
    pipeline = layout.pipeline(outline.num_layers, outline.mtp_layers)
    checked = 0
    for tensor in reader.catalog.weights.values():
        by_box: dict[object, Shard] = {s.box: s for s in shards(tensor.name, tensor.shape, layout, outline)}
        for chunk in tensor.chunks():
            writer = writer_of(Path(reader.files[reader.file_of(chunk.record)]).name)
            assert writer is not None
            assert writer[0] in holders(tensor.name, by_box[chunk.box], layout, outline, pipeline), tensor.name
            checked += 1
    assert checked


def test_the_goldens_cover_what_they_should():
    layouts = [opened(GOLDEN / name)[1] for name in FACTS]
    assert any(layout.ep > 1 and layout.tp > 1 for layout in layouts)
    assert any(layout.pp > 1 and layout.dp > 1 and layout.tp > 1 for layout in layouts)
