"""Mamba and gated delta nets of the real megatron-core without their kernels, which a CPU cannot run.

The modules are those of a training job, so are the names, shapes and shards of their parameters; layers and norms are
megatron-core's own, which the spec of such models takes from TransformerEngine. Nothing of it computes.
"""

import sys
from copy import copy
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch


class GatedNorm(torch.nn.Module):
    """Has the parameter of mamba_ssm's RMSNorm."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))


def stand_in(module, **content):
    """Puts a module in the place of one that is not installed, with the packages that it lies in."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if name not in sys.modules and not (count < len(parts) and name.startswith("megatron")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
    vars(sys.modules[module]).update(content)


# kernels of training and, written in triton, of inference
stand_in("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
stand_in("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=None)
stand_in(
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    **dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")),
)

# ruff: noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm import gated_delta_net, mamba_block, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def without_kernels():
    """Lets the modules be built where nothing of mamba_ssm and fla is installed."""
    mamba_mixer.HAVE_EINOPS = gated_delta_net.HAVE_FLA = True
    mamba_block.TENorm = WrappedTorchNorm


def with_delta_nets(spec, pattern):
    """The spec of a decoder with gated delta nets in the layers that the pattern marks with 1."""
    without_kernels()
    net = ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    layers = []
    for linear, layer in zip(pattern, spec.layer_specs, strict=True):
        parts = layer.submodules
        if linear:
            keys = parts.sharded_state_dict_keys_map | {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
            layer = copy(layer)
            layer.submodules = replace(parts, self_attention=net, sharded_state_dict_keys_map=keys)
        layers.append(layer)
    return replace(spec, layer_specs=layers)


def stack(pattern):
    """The class of a stack of Mamba, attention and MLP layers."""
    return partial(MambaModel, hybrid_override_pattern=pattern)


def stack_spec(attention):
    """Its spec; `attention` is the self-attention of a layer of GPT."""
    without_kernels()
    mixer = ModuleSpec(
        module=mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    bda, norm = get_bias_dropout_add, WrappedTorchNorm
    layers = {
        "mamba_layer": (
            MambaLayer,
            MambaLayerSubmodules(norm, mixer, bda, sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"}),
        ),
        "attention_layer": (
            TransformerLayer,
            TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=attention,
                self_attn_bda=bda,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
            ),
        ),
        "mlp_layer": (
            MLPLayer,
            TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=mlp,
                mlp_bda=bda,
                sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
            ),
        ),
    }
    parts = {name: ModuleSpec(module=module, submodules=submodules) for name, (module, submodules) in layers.items()}
    return ModuleSpec(module=mamba_block.MambaStack, submodules=mamba_block.MambaStackSubmodules(**parts))
