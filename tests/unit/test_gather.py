"""Whatever is read of a record, and however often, all of it is compared with its checksum in the end."""

import pytest

from converters.box import Box
from converters.errors import IntegrityError
from converters.formats import open_checkpoint
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from harness.checkpoints import copy_golden, flip, payloads

NAME = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("rows", [[(0, 16), (16, 16)], [(0, 16), (16, 16), (0, 16), (16, 16)], [(0, 16), (8, 16)]])
def test_records_read_in_part_or_in_part_twice_are_checked(rows, damaged, tmp_path):
    folder = copy_golden("llama_dpreshardable_tp2pp2dp2", tmp_path / "src")
    if damaged:
        _, path, offset, nbytes = next(
            found for found in payloads(folder) if NAME in found[0] and "optim" not in found[0]
        )
        flip(path, offset + nbytes - 2)  # behind the rows that are read
    reader = open_checkpoint(folder)
    sources = Sources(reader, reader.catalog.tensors)
    gatherer = Gatherer(sources)
    width = reader.catalog.tensors[NAME].shape[1]
    for first, count in rows:
        gatherer.gather(NAME, Box((first, 0), (count, width)))
    if damaged:
        with pytest.raises(IntegrityError, match="do not match their checksum"):
            sources.complete(gatherer)
    else:
        sources.complete(gatherer)
        assert sources.records_checked == 1
    assert not sources.sums.pieces
    gatherer.close()
