"""Kernels that need a GPU, as plain torch: what Megatron's layers call of mamba_ssm, fla and TransformerEngine's attention.

The layers themselves are Megatron's own. `install` runs once the harness has made them importable and before a model is
built.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F


def install() -> None:
    """Puts them where Megatron's modules have the names of the real ones."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.ssm import mamba_mixer

    mamba_mixer.mamba_split_conv1d_scan_combined = mamba_scan
    mamba_mixer.ExtendedRMSNorm.forward = norm_of_groups
    for name in ("megatron.core.ssm.gated_delta_net", "megatron.core.ssm.gated_delta_net.common"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # one file in 0.16, a package in 0.19
            continue
        if hasattr(module, "l2norm"):
            module.l2norm = unit_length
            module.HAVE_FLA = True
    attention = TEDotProductAttention.__mro__[1]
    if not getattr(attention, "has_windows", False):
        start = attention.__init__

        def begin(self, *args, window_size=None, softmax_type="vanilla", **more):
            start(self, *args, **more)
            self.window = window_size
            if softmax_type == "learnable":
                self.softmax_offset = torch.nn.Parameter(torch.zeros(more["num_attention_heads"]))

        attention.__init__, attention.forward, attention.has_windows = begin, attend, True


def attend(self, query, key, value, attention_mask=None, attn_mask_type=None, **_more):
    """Causal attention of (sequence, batch, heads, channels), with a window, and a logit of each head that is no key."""
    length, groups = query.shape[0], query.shape[2] // key.shape[2]
    key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    query, key, value = (part.permute(1, 2, 0, 3).float() for part in (query, key, value))
    scores = query @ key.transpose(-1, -2) * self.softmax_scale
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = distance < 0
    if self.window is not None and self.window[0] >= 0:
        hidden |= distance > self.window[0]
    scores = scores.masked_fill(hidden, float("-inf"))
    if hasattr(self, "softmax_offset"):
        offset = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:2], length, 1)
        scores = torch.cat([scores, offset], -1)
    weights = torch.softmax(scores, -1)[..., :length]
    return (weights @ value).permute(2, 0, 1, 3).reshape(length, query.shape[0], -1).to(query.dtype)


def mamba_scan(zxbcdt, conv_weight, conv_bias, dt_bias, decay, D, chunk_size, *, headdim, ngroups, **_more):
    """Mamba 2, step by step: convolution, recurrence and gate of (batch, sequence, z x B C dt)."""
    batch, length, width = zxbcdt.shape
    heads = decay.shape[0]
    inner = heads * headdim
    size = (width - 2 * inner - heads) // 2 // ngroups
    gate, mixed, step = torch.split(zxbcdt, [inner, inner + 2 * ngroups * size, heads], -1)
    padded = F.pad(mixed.transpose(1, 2), (conv_weight.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, conv_weight[:, None], conv_bias, groups=mixed.shape[-1])).transpose(1, 2)
    x, b, c = torch.split(mixed, [inner, ngroups * size, ngroups * size], -1)
    x = x.view(batch, length, heads, headdim)
    b, c = (part.view(batch, length, ngroups, size).repeat_interleave(heads // ngroups, 2) for part in (b, c))
    step = F.softplus(step.float() + dt_bias)
    state, out = torch.zeros(batch, heads, headdim, size), []
    for at in range(length):
        fresh = (step[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = state * torch.exp(step[:, at] * decay)[..., None, None] + fresh
        out.append((state * c[:, at, :, None]).sum(-1) + D[:, None] * x[:, at])
    return torch.stack(out, 1).reshape(batch, length, inner) * F.silu(gate)


def norm_of_groups(self, x, z=None):
    """RMSNorm of each group of channels, behind the gate."""
    x = x if z is None else x * F.silu(z)
    grouped = x.float().unflatten(-1, (-1, self.group_size or x.shape[-1]))
    scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
    return (grouped * scale).flatten(-2).to(x.dtype) * self.weight


def unit_length(x, dim=-1, eps=1e-6, **_more):
    return x * torch.rsqrt(x.pow(2).sum(dim, keepdim=True) + eps)
