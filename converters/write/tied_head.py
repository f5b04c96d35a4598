"""An output layer that a Hugging Face folder stores beside the embedding to which its config.json ties it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.megatron.vocabulary import EMBEDDING
from converters.models.described import HEADS
from converters.names import printable
from converters.optimizer.proof import RoundingProof

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.formats.base import Reader
    from converters.models.importing import MegatronMapping


class TiedHead(RoundingProof):
    """The proof that the stored output layer is the embedding, so that it can be left out.

    Where they differ, transformers 5 computes with both (`PreTrainedModel.tie_weights`), while its earlier versions and
    vLLM compute with the embedding alone.

    Args:
        reader: The folder.
        head: Name of the output layer.
        embedding: Name of the embedding.
    """

    def __init__(self, reader: Reader, head: str, embedding: str) -> None:
        weights = reader.catalog.weights
        super().__init__(
            reader,
            {name: weights[name] for name in (head, embedding)},
            [(head, embedding)],
            f"that {head} is the embedding",
        )
        if (weights[head].shape, weights[head].dtype) != (weights[embedding].shape, weights[embedding].dtype):
            raise self._refusal()

    @classmethod
    def needed(cls, reader: Reader, mapping: MegatronMapping) -> TiedHead | None:
        """The proof, or None if no output layer is left out."""
        head = next((drop.source for drop in mapping.drops if drop.source in HEADS), None)
        embedding = next((copy.source for copy in mapping.copies if copy.target == EMBEDDING), None)
        return cls(reader, head, embedding) if head is not None and embedding is not None else None

    def judge(self, results: Mapping[int, bool]) -> None:
        """Draws the conclusion.

        Args:
            results: Whether they agree, by the numbers of the tasks.

        Raises:
            RequestError: They differ.
        """
        if not all(results.values()):
            raise self._refusal()

    def _refusal(self) -> RequestError:
        (task,) = self.tasks
        return RequestError(
            f"config.json ties {printable(task.tested)} to {printable(task.expected)}, but the two differ",
            hint='set "tie_word_embeddings": false in config.json to import both, or remove the output layer',
            tensor=task.tested,
        )
