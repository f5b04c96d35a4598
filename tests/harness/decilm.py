"""Llama-Nemotron for transformers, which has no class for it: Llama's layers, each of its own size or without a part.

Written from what its servers compute (TensorRT-LLM, modeling_nemotron_nas.py; vLLM, nemotron_nas.py): a layer without
attention or without an MLP has no norm before it either; one matrix in its place follows the norm.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def block(attention, ffn):
    """An entry of `block_configs`: heads in a group and the MLP's multiplier, or "linear", or None for none."""
    return {
        "attention": {
            "n_heads_in_group": attention if isinstance(attention, int) else None,
            "no_op": attention is None,
            "num_sink_tokens": None,
            "replace_with_linear": attention == "linear",
            "sparsify": None,
            "unshifted_sink": False,
            "window_length": None,
        },
        "ffn": {
            "ffn_mult": ffn if isinstance(ffn, int | float) else None,
            "no_op": ffn is None,
            "replace_with_linear": ffn == "linear",
            "sparsify": None,
        },
    }


class DeciConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **more):
        super().__init__(**more)
        self.block_configs = list(block_configs)


class OneMatrix(nn.Module):
    def __init__(self, name, size):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, hidden_states, **_ignored):
        return (getattr(self, self.name)(hidden_states),)


class DeciLayer(LlamaDecoderLayer):
    def __init__(self, config, number):
        attention, ffn = (config.block_configs[number][part] for part in ("attention", "ffn"))
        sizes = copy.deepcopy(config)
        sizes.num_key_value_heads = config.num_attention_heads // (attention["n_heads_in_group"] or 1)
        units = int(2 * (ffn["ffn_mult"] or 1) * config.hidden_size / 3)
        sizes.intermediate_size = (units + 255) // 256 * 256
        super().__init__(sizes, number)
        if attention["no_op"]:
            self.self_attn = self.input_layernorm = None
        elif attention["replace_with_linear"]:
            self.self_attn = OneMatrix("linear_attn", config.hidden_size)
        if ffn["no_op"]:
            self.mlp = self.post_attention_layernorm = None
        elif ffn["replace_with_linear"]:
            self.mlp = OneMatrix("linear_mlp", config.hidden_size)

    def forward(self, hidden_states, **more):
        if self.self_attn is not None:
            hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        if self.mlp is None:
            return hidden_states
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + (out[0] if isinstance(out, tuple) else out)


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(DeciLayer(config, number) for number in range(config.num_hidden_layers))


AutoConfig.register("nemotron-nas", DeciConfig)
AutoModelForCausalLM.register(DeciConfig, DeciLMForCausalLM)
