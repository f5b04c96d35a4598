"""The facts of a model, and the options that state them.

Sources: Megatron-LM core_v0.4 to 0.20 arguments.py, TransformerConfig (Bridge and NeMo 2 dump its fields), NeMo 1
megatron_gpt_config.yaml; last, transformers' config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _fact(*options: str, absent: Any = None) -> Any:
    """A field that options state.

    Args:
        options: Their names, newest first.
        absent: What it amounts to where a version did not have the option yet; None where that is not known.
    """
    return field(default=None, metadata={"options": options, "absent": absent})


@dataclass(frozen=True)
class ModelFields:
    """Facts of a model and of the job that saved it; a field is None when nothing says.

    Sizes are in elements. `vocab_size` is the number of real rows, `padded_vocab_size` the stored one. `window_size` is
    how many positions a query sees, its own included. `activation` is "silu", "gelu" (exact), "gelu_tanh",
    "quick_gelu", "relu2", "relu" or the name that the configuration gave; `gated` says whether it multiplies a second
    projection. `moe_layers` and `linear_layers` (those with linear attention) have one entry per decoder layer,
    `layer_pattern` of a hybrid model has one symbol (`layer_pattern.SYMBOLS`), and `prediction_pattern` one for each layer
    of a depth of its multi-token prediction. `rope_scaling` is None, "linear", "llama3"
    or "yarn"; the `rope_*` numbers belong to it. `tp` to `world_size` describe the job that saved.
    """

    num_layers: int | None = _fact("num_layers", "encoder_num_layers", "num_hidden_layers", "n_layer")
    layer_pattern: str | None = None
    prediction_pattern: str | None = None
    hidden_size: int | None = _fact("hidden_size", "n_embd")
    num_attention_heads: int | None = _fact("num_attention_heads", "n_head")
    num_query_groups: int | None = _fact("num_query_groups", "num_key_value_heads")
    head_dim: int | None = _fact("kv_channels", "head_dim")
    ffn_hidden_size: int | None = _fact("ffn_hidden_size", "intermediate_size", "n_inner")
    vocab_size: int | None = _fact("vocab_size")
    padded_vocab_size: int | None = None
    max_position_embeddings: int | None = _fact("max_position_embeddings", "seq_length", "encoder_seq_length")
    normalization: str | None = None
    norm_epsilon: float | None = _fact("layernorm_epsilon", "norm_epsilon", absent=1e-5)
    zero_centered_norm: bool | None = _fact("layernorm_zero_centered_gamma", "apply_layernorm_1p", absent=False)
    tied_embeddings: bool | None = _fact("share_embeddings_and_output_weights")
    gated: bool | None = None
    activation: str | None = None
    add_bias_linear: bool | None = _fact("add_bias_linear", "bias")
    add_qkv_bias: bool | None = _fact("add_qkv_bias", "qkv_bias", absent=False)
    qk_layernorm: bool | None = _fact("qk_layernorm", absent=False)
    window_size: int | None = None
    position_embedding_type: str | None = _fact("position_embedding_type")
    rotary_base: float | None = _fact("rotary_base", absent=10000.0)
    rotary_percent: float | None = _fact("rotary_percent", "rotary_percentage", absent=1.0)
    rotary_interleaved: bool | None = _fact("rotary_interleaved", absent=False)
    rope_scaling: str | None = None
    rope_factor: float | None = None
    rope_low_freq_factor: float | None = None
    rope_high_freq_factor: float | None = None
    rope_original_max_position_embeddings: int | None = None
    rope_beta_fast: float | None = None
    rope_beta_slow: float | None = None
    rope_mscale: float | None = None
    rope_mscale_all_dim: float | None = None
    num_experts: int | None = _fact("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
    moe_topk: int | None = _fact("moe_router_topk", "num_experts_per_tok")
    moe_ffn_hidden_size: int | None = _fact("moe_ffn_hidden_size", "ffn_hidden_size")
    moe_layers: tuple[bool, ...] | None = None
    moe_shared_expert_size: int | None = _fact("moe_shared_expert_intermediate_size")
    moe_shared_expert_gate: bool | None = _fact("moe_shared_expert_gate", absent=False)
    moe_score_function: str | None = _fact("moe_router_score_function", absent="softmax")
    moe_pre_softmax: bool | None = _fact("moe_router_pre_softmax", absent=False)
    moe_num_groups: int | None = _fact("moe_router_num_groups")
    moe_group_topk: int | None = _fact("moe_router_group_topk")
    moe_scaling_factor: float | None = _fact("moe_router_topk_scaling_factor")
    moe_expert_bias: bool | None = _fact("moe_router_enable_expert_bias", absent=False)
    moe_aux_loss: float | None = _fact("moe_aux_loss_coeff")
    mla: bool | None = _fact("multi_latent_attention", absent=False)
    q_lora_rank: int | None = _fact("q_lora_rank")
    kv_lora_rank: int | None = _fact("kv_lora_rank")
    qk_head_dim: int | None = _fact("qk_head_dim")
    qk_pos_emb_head_dim: int | None = _fact("qk_pos_emb_head_dim")
    v_head_dim: int | None = _fact("v_head_dim")
    mla_down_fused: bool | None = _fact("mla_down_proj_fusion")
    mtp_num_layers: int | None = _fact("mtp_num_layers")
    linear_layers: tuple[bool, ...] | None = None
    linear_num_key_heads: int | None = _fact("linear_num_key_heads")
    linear_num_value_heads: int | None = _fact("linear_num_value_heads")
    linear_key_head_dim: int | None = _fact("linear_key_head_dim")
    linear_value_head_dim: int | None = _fact("linear_value_head_dim")
    linear_conv_kernel_dim: int | None = _fact("linear_conv_kernel_dim")
    mamba_num_heads: int | None = _fact("mamba_num_heads")
    mamba_head_dim: int | None = _fact("mamba_head_dim")
    mamba_num_groups: int | None = _fact("mamba_num_groups")
    mamba_state_dim: int | None = _fact("mamba_state_dim")
    dtype: str | None = None
    init_method_std: float | None = _fact("init_method_std")
    attention_dropout: float | None = _fact("attention_dropout")
    hidden_dropout: float | None = _fact("hidden_dropout")
    tp: int | None = _fact("tensor_model_parallel_size", "model_parallel_size")
    pp: int | None = _fact("pipeline_model_parallel_size")
    vpp: int | None = _fact("virtual_pipeline_model_parallel_size")
    ep: int | None = _fact("expert_model_parallel_size")
    etp: int | None = _fact("expert_tensor_parallel_size", "expert_tensor_model_parallel_size")
    cp: int | None = _fact("context_parallel_size")
    dp: int | None = _fact("data_parallel_size")
    world_size: int | None = _fact("world_size")
    consumed_train_samples: int | None = _fact("consumed_train_samples")


_FIELDS = [f for f in fields(ModelFields) if f.metadata]
OPTIONS: dict[str, tuple[str, ...]] = {f.name: f.metadata["options"] for f in _FIELDS}
"""Field -> names of the options that state it, newest first; fields that a rule reads are not among them."""
FIELD_TYPES: dict[str, str] = {f.name: str(f.type).removesuffix(" | None") for f in _FIELDS}
"""Field -> "int", "float", "bool" or "str"."""
DEFAULTS: dict[str, Any] = {f.name: f.metadata["absent"] for f in _FIELDS if f.metadata["absent"] is not None}
"""Field -> what an option that a version did not have yet amounts to."""
