"""What of a model decides where its tensors live: layers, experts, gates, ties. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.megatron.bridge_families import DIVIDED_NORMS
from converters.megatron.part_shapes import gated_by_shape
from converters.model_parts import language_name, split_part
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.megatron.model_args import ModelArgs

_LAYER = re.compile(r"((?:decoder|encoder)\.layers)\.(\d+)\.")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Outline:
    """What of a model decides where its tensors live.

    Attributes:
        num_layers: Decoder layers.
        mtp_layers: Multi-token-prediction layers that exist; a repeated one counts once.
        num_experts: Routed experts of a layer; None for a dense model.
        gated: MLPs have a gate; None if nothing shows it: adapters of first projections alone, without arguments.
        tied: The output layer uses the embedding's weight.
        mla_down_split: The down projections of multi-latent attention are divided over tp: if they are one parameter
            (`--mla-down-proj-fusion`), with Megatron's own layers, and with TransformerEngine's before core 0.14.
        divided_norms: The norms of queries and keys have a weight for each element of all heads, divided over tp.
        stacks: Layers of each stack that has another number of them: "vision_model.decoder.layers" -> 24.
        gated_parts: Whether the MLPs of each part beside the language model have a gate: "vision_model." -> False.
    """

    num_layers: int
    mtp_layers: int = 0
    num_experts: int | None = None
    gated: bool | None = False
    tied: bool = False
    mla_down_split: bool = False
    divided_norms: bool = False
    stacks: Mapping[str, int] = field(default_factory=dict)
    gated_parts: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, args: ModelArgs, shapes: Mapping[str, Sequence[int]]) -> Outline:
        """The outline of a checkpoint, from its tensors (canonical names without optimizer) and what they leave open.

        Where the down projections are no single parameter `mla_down_split` is left False: it depends on the version and
        the layers that the job uses.
        """
        stacks, counts = Counter[str](), {_MTP: 0, _EXPERT: 0}
        parts: dict[str, dict[str, Sequence[int]]] = {}
        for name, shape in shapes.items():
            part, inner = split_part(name)
            parts.setdefault(part, {})[inner] = shape
            if (layer := _LAYER.match(inner)) is not None:
                stacks[part + layer[1]] = max(stacks[part + layer[1]], int(layer[2]) + 1)
            for pattern in counts if language_name(name) is not None else ():
                if (match := pattern.search(name)) is not None:
                    counts[pattern] = max(counts[pattern], int(match[1]) + 1)
        language = {language_name(name) for name in shapes}
        layers = max((n for name, n in stacks.items() if language_name(name) is not None), default=0)
        layers = layers or args.num_layers or 0
        return cls(
            num_layers=layers,
            mtp_layers=counts[_MTP],
            num_experts=counts[_EXPERT] or None,
            gated=gated_by_shape(shapes) if args.gated is None else args.gated,
            tied="output_layer.weight" not in language,
            mla_down_split=args.mla_down_fused is True,
            divided_norms=args.extras.get("bridge_family") in DIVIDED_NORMS,
            stacks={name: n for name, n in stacks.items() if n != layers},
            gated_parts={
                part: gated_by_shape(inner) is True for part, inner in parts.items() if language_name(part) is None
            },
        )

    def layers(self, name: str) -> int:
        """How many layers the stack has that a tensor of this canonical name is in."""
        part, inner = split_part(name)
        match = _LAYER.match(inner)
        return self.num_layers if match is None else self.stacks.get(part + match[1], self.num_layers)

    def gates(self, name: str) -> bool:
        """Whether an MLP that a tensor of this canonical name is in has a gate.

        Raises:
            RequestError: Nothing shows it.
        """
        gated = self.gated_parts.get(split_part(name)[0], self.gated)
        if gated is None:
            raise RequestError(
                f"whether the rows of {printable(name)} are gate and up is not known: no arguments say so, and there is no "
                "second projection to compare it with",
                hint="only --tp 1 is safe; or keep the run_config.yaml of the job beside the checkpoint",
                tensor=name,
            )
        return gated
