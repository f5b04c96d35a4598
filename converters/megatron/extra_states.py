"""The extra states of a model chunk's modules, in their places in its state dict.

Facts: Megatron-Core 0.16.1, extensions/transformer_engine.py, tensor_parallel/layers.py, models/T5/t5_model.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converters.model_parts import LANGUAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.megatron.rank_state_dict import LocalTensor
    from converters.param_order import Order

_LINEAR = re.compile(r"(?:.*\.)?(?:linear_\w+|eh_proj|in_proj|out_proj|fc[12]_latent_proj)")
_ONE_MATRIX = re.compile(r".*\.layers\.\d+\.(?:self_attention|mlp)\.weight")  # in the place of attention or MLP
_TE_NORM = re.compile(r".*\.(?:\w+_layernorm|final_norm|[eh]norm|core_attention|out_norm|k_norm|ln_pre|ln_post)")


def with_extra_states(
    tensors: Sequence[LocalTensor], order: Order, *, output: bool
) -> Iterator[tuple[str, LocalTensor | str | None]]:
    """All entries of a model chunk's state dict, in order: tensors, and the extra states of modules.

    TransformerEngine's modules have one each, behind their parameters; Megatron's own linear layers keep an entry without
    a value for them.

    Args:
        tensors: Of the chunk, from `LocalModel.chunk`.
        output: The chunk has an output layer, whose weight may be the embedding's.

    Yields:
        Name, and a tensor, the canonical name of an extra state, or None for an entry without a value.
    """
    core = ""
    for number, tensor in enumerate(tensors):
        module = tensor.name.rpartition(".")[0]
        source = tensor.copies[0].source.rpartition(".")[0] if tensor.copies else ""  # rows of padding alone
        if order.fused_norms and module.endswith("_attention.linear_proj"):
            before = module.removesuffix("linear_proj") + "core_attention"
            if core != before:
                core = before
                yield f"{core}._extra_state", source.removesuffix("linear_proj") + "core_attention._extra_state"
        yield tensor.name, tensor
        if number + 1 < len(tensors) and tensors[number + 1].name.rpartition(".")[0] == module:
            continue
        linear = _LINEAR.fullmatch(module) or _ONE_MATRIX.fullmatch(tensor.name)
        if order.fused_norms and (linear or _TE_NORM.fullmatch(module)):
            core = module if module.endswith("core_attention") else core
            yield f"{module}._extra_state", f"{source}._extra_state"
        elif linear:
            yield f"{module}._extra_state", None
    if output:
        part = LANGUAGE if any(tensor.name.startswith(LANGUAGE) for tensor in tensors) else ""
        yield f"{part}output_layer._extra_state", None
        if any(tensor.name.startswith("lm_head.output_layer.") for tensor in tensors):  # T5's, under both names
            yield "lm_head.output_layer._extra_state", None
