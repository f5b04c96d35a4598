"""The order in which a Megatron-Core model registers its parameters: that of `named_parameters()`.

The distributed optimizer's flat buffers hold a rank's parameters in the reverse of this order and store no names, so the
order must be known. Facts, tags core_v0.7.0 to core_v0.19.0: models/gpt/gpt_model.py, transformer/transformer_layer.py
(modules in the order of `__init__`), transformer/attention.py and multi_latent_attention.py (`linear_proj` comes before
`linear_qkv`), transformer/moe/moe_layer.py and experts.py, transformer/multi_token_prediction.py, ssm/mamba_mixer.py,
ssm/gated_delta_net.py, models/T5/t5_model.py, models/bert/bert_model.py, models/multimodal/llava_model.py,
models/vision/clip_vit_model.py; tests/golden/parameter_orders.json holds what real models of each kind list. A module's
own parameters come before those of the modules in it.

What the checkpoint does not tell is in `Order`: whether TransformerEngine's fused modules were used (their norm is a
parameter of the linear layer behind it), and how the experts of a rank were kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from converters.errors import RequestError
from converters.model_parts import LANGUAGE, split_part

_LAYER = (
    "input_layernorm",
    "norm",  # of Falcon-H1: before Mamba and attention
    "mamba_mixer",
    "mixer",  # Mamba
    "self_attention",  # gated delta net
    "self_attention.core_attention",
    *(
        f"self_attention.core_attention.indexer.{n}"
        for n in ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
    ),
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_qkv_down_proj",
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
    "mlp",  # one matrix in the place of all, as `self_attention` may be
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_LEAVES = ("softmax_offset", "gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias")
_EMBEDDING = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_MIXER = ("dt_bias", "A_log", "D", "in_proj", "conv1d", "norm", "out_norm", "out_proj")
_MIXER_019 = ("conv1d", *(module for module in _MIXER if module != "conv1d"))  # conv1d became the Mamba mixer's own
_MIXING = re.compile(
    r"(mamba_mixer|mixer|self_attention)\.(dt_bias|A_log|D|in_proj|conv1d|norm|out_norm|out_proj)"
    r"(?:\.(weight|bias|layer_norm_weight|layer_norm_bias)(?:\.(\w+))?)?"
)
# parts of one parameter that are stored under keys of their own, in the order of their rows: query, key, value, z, beta and
# alpha (f, b and w) of a gated delta net; z, x, B, C and dt of a Mamba mixer
_SECTIONS = ("query", "key", "value", "z", "x", "B", "C", "dt", "beta", "alpha", "f", "b", "w")
# GPTModel, BertModel and T5Model: what they consist of, and the modules of what is no stack of layers
_ROOTS = (
    *("embedding", "encoder_relative_pos_emb", "decoder_relative_pos_emb", "encoder", "decoder", "mtp"),
    *("lm_head", "output_layer", "binary_head", "pooler", "position_embeddings"),
)
_MODULES = {
    "embedding": _EMBEDDING,
    "encoder_relative_pos_emb": ("relative_attention_bias",),
    "decoder_relative_pos_emb": ("relative_attention_bias",),
    "lm_head": ("dense", "layer_norm", "output_layer"),
    "output_layer": ("",),
    "binary_head": ("",),
    "pooler": ("dense",),
}
_PARTS = ("", LANGUAGE, "vision_model.", "vision_projection.")  # LLaVAModel
_TOWER = ("class_token", "ln_pre", "ln_post", "conv1", "position_embeddings", "decoder")  # CLIPViTModel
_PROJECTION = ("encoder.linear_fc1", "encoder.linear_fc2")
_ROOT = re.compile(rf"({'|'.join(_ROOTS)})\.(.*)", re.DOTALL)
_ADAPTER = ("linear_in", "linear_out")
_DOWN = (".linear_q_down_proj", ".linear_kv_down_proj")
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
        fused_down: Multi-latent attention projects queries, keys and values down with one parameter, whose layer the norm
            before it belongs to (`--mla-down-proj-fusion`, 2026-08; stored as two, the norm apart).
    """

    fused_norms: bool = True
    experts: str = "grouped"
    conv_direct: bool = False
    fused_down: bool = False

    def parameter(self, name: str) -> str:
        """Name of the parameter that the tensor is, or is a part of: some are stored as several tensors."""
        stem, _, last = name.rpartition(".")
        if last in _SECTIONS and stem.endswith((".in_proj.weight", ".conv1d.weight", ".conv1d.bias")):
            return stem
        if self.fused_down and stem.endswith(_DOWN):
            return f"{stem.rpartition('.')[0]}.linear_qkv_down_proj.{last}"
        if self.experts == "stacked" and (match := _EXPERT.search(name)) is not None:
            return f"{name[: match.start()]}mlp.experts.{match[3]}{match[2]}"
        return name

    def position(self, name: str) -> tuple[int, ...]:
        """A sort key: parameters in this order are in the order of `named_parameters()`.

        Raises:
            RequestError: It is not known where a parameter of this name stands.
        """
        part, inner = split_part(name)
        try:
            number = _PARTS.index(part)
            if part == "vision_projection.":
                module, _, leaf = inner.rpartition(".")
                return number, _PROJECTION.index(module), _LEAVES.index(leaf)
            return number, *(self._tower(inner) if part == "vision_model." else self._model(inner))
        except ValueError:
            raise RequestError(
                f"distckpt does not know the position of {name} among the parameters",
                hint="re-save with --dist-ckpt-optim-fully-reshardable, or leave the optimizer out",
                tensor=name,
            ) from None

    def _model(self, name: str) -> tuple[int, ...]:
        """Of a GPTModel, BertModel or T5Model."""
        root = _ROOT.fullmatch(name)
        if root is None:
            raise ValueError(name)
        if root[1] == "position_embeddings":  # the embedding's own, under T5's second name for it
            return 0, _EMBEDDING.index(root[1]), _LEAVES.index(root[2])
        section, (module, _, leaf) = _ROOTS.index(root[1]), root[2].rpartition(".")
        if root[1] in ("encoder", "decoder", "mtp"):
            return section, *self._stack(root[2], mtp=root[1] == "mtp")
        return section, _MODULES[root[1]].index(module), _LEAVES.index(leaf)

    def _tower(self, name: str) -> tuple[int, ...]:
        """Of a CLIPViTModel, whose class token is its own parameter."""
        module, _, inner = name.partition(".")
        if module == "decoder":
            return _TOWER.index(module), *self._stack(inner)
        return _TOWER.index(module), _LEAVES.index(inner) if inner else 0

    def _stack(self, name: str, *, mtp: bool = False) -> tuple[int, ...]:
        """Of a TransformerBlock: layers, then the final norm."""
        layer = _NUMBERED.fullmatch(name)
        if layer is None:
            module, _, leaf = name.rpartition(".")
            if module not in ("final_layernorm", "final_norm"):
                raise ValueError(name)
            return 1, 0, _LEAVES.index(leaf)
        return 0, int(layer[1]), *(self._mtp(layer[2]) if mtp else self._layer(layer[2]))

    def _mtp(self, suffix: str) -> tuple[int, ...]:
        part, _, inner = suffix.partition(".")
        part = "transformer_layer" if part == "mtp_model_layer" else part  # its name in hybrid models
        if part != "transformer_layer":
            return _MTP.index(part), _LEAVES.index(inner)
        nested = _NUMBERED.fullmatch(inner)
        number, inner = (int(nested[1]), nested[2]) if nested else (0, inner)
        return _MTP.index(part), number, *self._layer(inner)

    def _layer(self, suffix: str) -> tuple[int, ...]:
        expert = _EXPERT.fullmatch(suffix)
        if expert is not None:
            return _LAYER.index("mlp.experts"), *self._expert(int(expert[1]), int(expert[2]), expert[3] == "bias")
        mixing = _MIXING.fullmatch(suffix)
        if mixing is not None:
            kind, module, leaf, section = mixing.groups()
            table = _MIXER_019 if self.conv_direct and kind.endswith("mixer") else _MIXER
            within = _SECTIONS.index(section) if section else 0
            return _LAYER.index(kind), table.index(module), _LEAVES.index(leaf) if leaf else 0, within
        module, _, leaf = suffix.rpartition(".")
        base, _, side = module.partition(".adapter.")
        if side:  # AdapterWrapper of Megatron-Bridge: the linear layer, then its adapter
            return _LAYER.index(base), len(_LEAVES), _ADAPTER.index(side), _LEAVES.index(leaf)
        if self.fused_down and module == "input_layernorm":
            module, leaf = "self_attention.linear_qkv_down_proj", f"layer_norm_{leaf}"
        if self.fused_down and module.endswith(_DOWN):
            within = _DOWN.index(module.removeprefix("self_attention"))
            return _LAYER.index("self_attention.linear_qkv_down_proj"), _LEAVES.index(leaf), within
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
