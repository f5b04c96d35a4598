"""Tiny GPT models of the real megatron-core, with values that do not depend on the layout.

A model is described by the argparse Namespace that Megatron-LM would have stored in its checkpoint. The sizes
are those of the golden checkpoints, so `load` also reads what we make from them.
"""

import zlib
from argparse import Namespace

import torch
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYERS = "decoder.layers."
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")

BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "seq_length": 32,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "squared_relu": False,
    "quick_geglu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "softmax_type": "vanilla",
    "openai_gelu": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 120,
    "make_vocab_size_divisible_by": 8,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_dtype": None,
    "moe_grouped_gemm": False,
    "mtp_num_layers": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "hybrid_override_pattern": None,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
    "init_method_std": 0.02,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "transformer_impl": "local",
    "ckpt_format": "torch_dist",
    "use_distributed_optimizer": False,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 8,
}
CONFIGS = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {"qk_layernorm": True},
    "mixtral": {"num_experts": 4, "moe_ffn_hidden_size": 24},
    "gpt2": {
        "ffn_hidden_size": 64,
        "group_query_attention": False,
        "num_query_groups": 1,  # what the Namespace holds without --group-query-attention
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
}


def megatron_args(config, dtype, tp=1, pp=1, ep=1, iteration=10, overrides=None):
    values = BASE | CONFIGS[config] | (overrides or {})
    multiple = values["make_vocab_size_divisible_by"] * tp
    return Namespace(
        **values,
        padded_vocab_size=-(-values["vocab_size"] // multiple) * multiple,
        fp16=dtype == "fp16",
        bf16=dtype == "bf16",
        params_dtype=DTYPES[dtype],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        sequence_parallel=bool(values["num_experts"]) and tp > 1,
        world_size=tp * pp * ep,
        data_parallel_size=ep,
        iteration=iteration,
        consumed_train_samples=iteration * values["global_batch_size"],
    )


def build_model(args):
    """GPTModel of this rank's pipeline stage; the parallel state must be initialised."""
    same = [
        *(
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "kv_channels",
            "normalization",
        ),
        *("layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "moe_ffn_hidden_size"),
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_layer_freq"),
        *("attention_dropout", "hidden_dropout", "params_dtype", "bf16", "fp16"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
        *("expert_tensor_parallel_size", "rotary_interleaved", "window_attn_skip_freq", "no_rope_freq"),
        *("activation_func_clamp_value", "glu_linear_offset", "softmax_type"),
        *("moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
        *("moe_router_group_topk", "moe_router_dtype", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
        *("attention_output_gate", "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    ]
    activation = quick_gelu if args.quick_geglu else squared_relu if args.squared_relu else F.gelu
    activation = F.silu if args.swiglu else activation
    config = TransformerConfig(
        **{name: getattr(args, name) for name in same},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        num_moe_experts=args.num_experts,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        activation_func=activation,
        window_size=args.window_size,
        pipeline_dtype=args.params_dtype,
        autocast_dtype=args.params_dtype,
        moe_token_dispatcher_type="allgather",  # the others want CUDA streams
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    if isinstance(args.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    for layer in getattr(spec, "layer_specs", [spec]):
        if layer.submodules.mlp.module is MoELayer:
            # TransformerEngine's layers, where nearly every real MoE checkpoint comes from, keep this norm apart.
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)  # layers share theirs
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    kind = GPTModel
    if args.experimental_attention_variant or args.hybrid_override_pattern:
        from oracle import mixers  # which needs modules that other models do not
    if args.experimental_attention_variant == "gated_delta_net":
        offset = get_transformer_layer_offset(config)
        pattern = args.linear_attention_freq[offset : offset + len(spec.layer_specs)]
        spec = mixers.with_delta_nets(spec, pattern)
    if args.hybrid_override_pattern is not None:
        spec = mixers.stack_spec(spec.submodules.self_attention)
        kind = mixers.stack(args.hybrid_override_pattern)
    more = {"rope_scaling": args.use_rope_scaling} if kind is GPTModel else {}
    model = kind(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **more,
    )
    model = model.to(args.params_dtype)  # norms too, as Megatron's Float16Module does
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.data = buffer.data.float()  # as its router does with each batch
    return model


def sharded_state(model, per_layer=False):
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": per_layer,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    return model.sharded_state_dict(metadata=metadata)


def shards(sharded_state_dict):
    """Yields every ShardedTensor; its `data` is a view of the model's own parameter."""
    sharded_state_dict = dict(sharded_state_dict)
    apply_factories(sharded_state_dict)
    pending = list(sharded_state_dict.values())
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, ShardedTensor):
            yield item


def names(shard):
    """Per-layer names of what a shard's global tensor holds: one per layer where layers are stacked."""
    tail = shard.key.removeprefix(LAYERS)
    if shard.key.startswith(LAYERS) and not tail[0].isdigit():
        return [f"{LAYERS}{layer}.{tail}" for layer in range(shard.global_shape[0])]
    return [shard.key]


def local_part(shard, full):
    """The region of `full`, of the shard's global shape, that belongs to the shard.

    Args:
        shard: a ShardedTensor.
        full: the global tensor; may lack rows of the padded vocabulary, which then read as zero.
    """
    missing = shard.global_shape[0] - full.shape[0]
    if missing > 0 and shard.key in PADDED:
        full = F.pad(full, (0, 0, 0, missing))
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    region = tuple(slice(start, start + size) for start, size in zip(shard.global_offset, sizes, strict=True))
    return full[region].reshape(shard.data.shape)


def made_value(name, shape, dtype):
    """The value of a whole tensor (unpadded shape): a function of its name alone."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith(("norm.weight", "norm_weight")):
        return (1 + 0.1 * noise).to(dtype)
    return ((0.05 if len(shape) == 1 else 0.08) * noise).to(dtype)


def fill(model, args, dtype, per_layer=False):
    """Gives every parameter its made value, rounded to `dtype`; returns {per-layer name: unpadded shape}."""
    known = {}
    with torch.no_grad():
        for shard in shards(sharded_state(model, per_layer)):
            stacked = names(shard)
            shape = tuple(shard.global_shape)
            if shard.key in PADDED:
                shape = (args.vocab_size, *shape[1:])
            elif stacked != [shard.key]:
                shape = shape[1:]
            values = [made_value(name, shape, dtype) for name in stacked]
            full = values[0] if stacked == [shard.key] else torch.stack(values)
            shard.data.copy_(local_part(shard, full))
            known |= dict.fromkeys(stacked, shape)
    return known


def logits(model, tokens):
    """Forward of a TP1 PP1 model: tokens (batch, length) -> (batch, length, padded vocabulary)."""
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model.eval()(tokens, positions, mask)
