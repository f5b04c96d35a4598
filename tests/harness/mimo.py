"""MiMo-7B for transformers, which has no class for it: Qwen2 with prediction layers, as its config.json means them.

Written from what its servers compute (vLLM and SGLang, mimo_mtp.py): `input_proj` joins the norm of the hidden states with
the norm of the embeddings of the tokens behind them, in this order; a layer of Qwen2 and a norm follow.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers=0, **more):
        super().__init__(**more)
        self.num_nextn_predict_layers = num_nextn_predict_layers


class MiMoLayer(Qwen2DecoderLayer):
    """A prediction layer."""

    def __init__(self, config):
        super().__init__(config, 0)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self, name, Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def predict(self, hidden, embeddings, positions):
        """Hidden states of the tokens that follow, each of a hidden state and the embedding of the token behind it."""
        joined = self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeddings)], -1))
        length = joined.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = super().forward(joined, attention_mask=mask, position_embeddings=positions)
        return self.final_layernorm(out if torch.is_tensor(out) else out[0])


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config):
        super().__init__(config)
        count = config.num_nextn_predict_layers
        self.model.mtp_layers = torch.nn.ModuleList(MiMoLayer(config) for _ in range(count))

    def predictions(self, tokens):
        """Logits of each prediction layer, which begins as Megatron has it: behind the final norm."""
        hidden, out = self.model(tokens).last_hidden_state, []
        positions = self.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])
        for layer in self.model.mtp_layers:
            tokens = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
            hidden = layer.predict(hidden, self.model.embed_tokens(tokens), positions)
            out.append(self.lm_head(hidden))
        return out


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
