"""Qwen3.5, the text model with experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.mixtral import every_layer_mixed
from converters.models.model import SET
from converters.models.qwen2_moe import QWEN_EXPERTS, SHARED_EXPERT
from converters.models.qwen3 import QWEN3_ATTENTION
from converters.models.qwen3_5_text import FLAT_DELTA_NET
from converters.models.qwen3_next import (
    DELTA_NET_NEEDS,
    PREDICTION,
    PREDICTIONS,
    delta_net_facts,
    delta_net_settings,
    shared_expert_settings,
)

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    own = {**delta_net_settings(args), **shared_expert_settings(args)}
    del own["intermediate_size"]  # of layers without experts, which there are none of
    return own


MODEL = LlamaModel(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    needs={
        **DELTA_NET_NEEDS,
        **config.PLAIN_ROUTER,
        "moe_pre_softmax": (False,),
        "moe_shared_expert_size": (SET,),
        "moe_shared_expert_gate": (True,),
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
    linear=FLAT_DELTA_NET,
    dense=(),
    moe=(*QWEN_EXPERTS, *SHARED_EXPERT),
    misfits=every_layer_mixed,
    zero_centered=True,
    facts=delta_net_facts,
    mtp=PREDICTION,
    predictions=PREDICTIONS,
)
