"""The order in which a Megatron-Core model registers its parameters: that of `named_parameters()`.

The distributed optimizer's flat buffers hold a rank's parameters in the reverse of this order and store no names, so the
order must be known. Facts, tags core_v0.7.0 to core_v0.19.0: models/gpt/gpt_model.py, transformer/transformer_layer.py
(modules in the order of `__init__`), transformer/attention.py and multi_latent_attention.py (`linear_proj` comes before
`linear_qkv`), transformer/moe/moe_layer.py and experts.py, transformer/multi_token_prediction.py, ssm/mamba_mixer.py.
A module's own parameters come before those of the modules in it.

What the checkpoint does not tell is in `Order`: whether TransformerEngine's fused modules were used (their norm is a
parameter of the linear layer behind it), and how the experts of a rank were kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from converters.errors import FormatError

__all__ = ["EXPERTS", "Order", "trainable"]

_LAYER = (
    "input_layernorm",
    "mixer",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_cross_attn_layernorm",
    "cross_attention.core_attention",
    "cross_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "mlp.experts",
    "mlp.shared_experts",  # its own gate_weight
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_LEAVES = ("softmax_offset", "gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias")
_EMBEDDING = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_MIXER = ("dt_bias", "A_log", "D", "in_proj", "conv1d", "norm", "out_proj")
_MIXER_019 = ("conv1d", "dt_bias", "A_log", "D", "in_proj", "norm", "out_proj")  # conv1d became the mixer's own
_MIXER_SECTIONS = ("z", "x", "B", "C", "dt")  # one parameter, stored as several keys (mamba_mixer.py)
_ROOT = re.compile(r"(embedding|decoder|encoder|mtp|output_layer)\.(.*)", re.DOTALL)
_NUMBERED = re.compile(r"layers\.(\d+)\.(.*)", re.DOTALL)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
# registered as buffers, not as parameters (moe/router.py)
_BUFFERS = re.compile(r"\.(?:expert_bias|qb_beta|local_tokens_per_expert|inv_freq)$")

EXPERTS = ("grouped", "sequential", "weights first", "stacked")
"""How the experts of one rank may be registered: `grouped` (TEGroupedMLP: fc1 of every expert, then fc2 of every one, a
bias behind its weight), `sequential` (expert by expert), `weights first` (as grouped, with all biases behind all
weights), `stacked` (GroupedMLP: one parameter for all experts, each of them transposed)."""


def trainable(name: str) -> bool:
    """Whether a weight of this canonical name is a parameter, so that the optimizer has state for it."""
    return _BUFFERS.search(name) is None


@dataclass(frozen=True, slots=True)
class Order:
    """What decides the order of parameters beside their names.

    Attributes:
        fused_norms: The norms before attention and MLP belong to the linear layer behind them (TransformerEngine).
        experts: One of `EXPERTS`.
        conv_direct: A Mamba mixer's convolution is the mixer's own parameter (0.19 and later).
    """

    fused_norms: bool = True
    experts: str = "grouped"
    conv_direct: bool = False

    def parameter(self, name: str) -> str:
        """Name of the parameter that the tensor is, or is a part of: some are stored as several tensors."""
        stem, _, last = name.rpartition(".")
        if ".mixer." in stem and last in _MIXER_SECTIONS and stem.endswith(("weight", "bias")):
            return stem
        if self.experts == "stacked" and (found := _EXPERT.search(name)) is not None:
            return f"{name[: found.start()]}mlp.experts.{found[3]}{found[2]}"
        return name

    def position(self, name: str) -> tuple[int, ...]:
        """A sort key: parameters in this order are in the order of `named_parameters()`.

        Raises:
            FormatError: It is not known where a parameter of this name stands.
        """
        root = _ROOT.fullmatch(name)
        try:
            if root is None:
                raise ValueError(name)
            if root[1] == "embedding":
                module, _, leaf = root[2].rpartition(".")
                return 0, _EMBEDDING.index(module), _LEAVES.index(leaf)
            if root[1] == "output_layer":
                return 4, _LEAVES.index(root[2])
            section = {"encoder": 1, "decoder": 2, "mtp": 3}[root[1]]
            layer = _NUMBERED.fullmatch(root[2])
            if layer is None:  # decoder.final_layernorm.weight
                module, _, leaf = root[2].rpartition(".")
                if module not in ("final_layernorm", "final_norm"):
                    raise ValueError(name)
                return section, 1, 0, _LEAVES.index(leaf)
            inner = self._mtp(layer[2]) if section == 3 else self._layer(layer[2])
        except ValueError:
            raise FormatError(
                f"it is not known where {name} stands in the order of parameters",
                hint="re-save with --dist-ckpt-optim-fully-reshardable, or leave the optimizer out",
                tensor=name,
            ) from None
        return section, 0, int(layer[1]), *inner

    def _mtp(self, suffix: str) -> tuple[int, ...]:
        part, _, rest = suffix.partition(".")
        if part != "transformer_layer":
            return _MTP.index(part), _LEAVES.index(rest)
        nested = _NUMBERED.fullmatch(rest)
        number, rest = (int(nested[1]), nested[2]) if nested else (0, rest)
        return _MTP.index(part), number, *self._layer(rest)

    def _layer(self, suffix: str) -> tuple[int, ...]:
        expert = _EXPERT.fullmatch(suffix)
        if expert is not None:
            return _LAYER.index("mlp.experts"), *self._expert(int(expert[1]), int(expert[2]), expert[3] == "bias")
        if suffix.startswith("mixer."):
            table = _MIXER_019 if self.conv_direct else _MIXER
            module, _, rest = suffix.removeprefix("mixer.").partition(".")
            leaf, _, section = rest.partition(".")
            within = _MIXER_SECTIONS.index(section) if section else 0
            return _LAYER.index("mixer"), table.index(module), _LEAVES.index(leaf) if leaf else 0, within
        module, _, leaf = suffix.rpartition(".")
        # keys of the local spec are renamed to the fused ones when they are saved (gpt_layer_specs.py)
        if leaf.startswith("layer_norm_"):
            if module == "self_attention.linear_qkv" and not self.fused_norms:
                module, leaf = "input_layernorm", leaf.removeprefix("layer_norm_")
            elif module == "mlp.linear_fc1":  # the same place, fused or not; a mixture of experts is never fused
                module, leaf = "pre_mlp_layernorm", leaf.removeprefix("layer_norm_")
        return _LAYER.index(module), _LEAVES.index(leaf)

    def _expert(self, number: int, projection: int, bias: int) -> tuple[int, ...]:
        if self.experts == "sequential":
            return number, projection, bias
        if self.experts == "grouped":
            return projection, number, bias
        return projection, bias, number
