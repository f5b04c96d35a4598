"""What tensor shapes say about a model: sizes, which parts exist, and which stated numbers cannot be.

Shapes alone do not separate everything: a fused QKV projection has `(heads + 2 * groups) * head_dim` rows, so two of
the three must be known. What follows from the tensors and from what is already known is a `Measured`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import TensorInfo

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A value that follows from tensors.

    Attributes:
        value: The value; None if no value of the field would fit the tensors.
        tensor: The tensor that shows it.
        evidence: Second half of a sentence: "decoder.layers.0... (6144, 4096) fits 4".
    """

    value: Any
    tensor: str
    evidence: str


# five digits: a stranger's layer 10^12 shall not cost a list of all the layers before it
_LAYER = re.compile(r"(decoder|encoder)\.layers\.(\d{1,5})\.(.*)", re.DOTALL)
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,5})\.")
_MTP = re.compile(r"mtp\.layers\.(\d{1,5})\.")


class _Layers:
    """Layer tensors by what they are: suffix -> first layer's tensor, experts under `mlp.experts.*`."""

    def __init__(self, weights: Mapping[str, TensorInfo]) -> None:
        self.weights = weights
        self.numbers: set[int] = set()
        self.experts: dict[int, set[int]] = defaultdict(set)
        self.mtp: set[int] = set()
        self.tensors: dict[str, TensorInfo] = {}
        self.uneven: dict[str, TensorInfo] = {}
        block = "decoder" if any(name.startswith("decoder.layers.") for name in weights) else "encoder"
        for name, tensor in weights.items():
            found = _LAYER.fullmatch(name)
            if found and found[1] == block:
                self._add(int(found[2]), found[3], tensor)
            elif not found:
                mtp = _MTP.match(name)
                if mtp:
                    self.mtp.add(int(mtp[1]))

    def _add(self, layer: int, suffix: str, tensor: TensorInfo) -> None:
        self.numbers.add(layer)
        expert = _EXPERT.match(suffix)
        if expert:
            self.experts[layer].add(int(expert[1]))
            suffix = "mlp.experts.*." + suffix[expert.end() :]
        first = self.tensors.setdefault(suffix, tensor)
        if first.shape != tensor.shape:
            self.uneven.setdefault(suffix, tensor)

    def first(self, *suffixes: str) -> TensorInfo | None:
        """The first layer's tensor with one of these suffixes."""
        return next((self.tensors[suffix] for suffix in suffixes if suffix in self.tensors), None)


class _Found(dict[str, Measured]):
    """The answers so far, beside what was known before."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self.known = known

    def best(self, name: str) -> Any:
        """What was stated, else what was measured, else None."""
        stated = self.known.get(name)
        return stated if stated is not None else self[name].value if name in self else None

    def size(self, name: str, tensor: TensorInfo | None, axis: int, divisor: int = 1, less: int = 0) -> None:
        """`name` is (size of the axis - less) / divisor."""
        if tensor is None or axis >= len(tensor.shape) or divisor <= 0:
            return
        value, rest = divmod(tensor.shape[axis] - less, divisor)
        fits = value > 0 and not rest
        shown = f"{tensor.name} {tensor.shape} fits {value if fits else 'no whole number'}"
        self[name] = Measured(value if fits else None, tensor.name, shown)

    def exists(self, name: str, tensor: TensorInfo | None, missing: str) -> None:
        """`name` says whether the tensor exists."""
        where = tensor.name if tensor else missing
        self[name] = Measured(tensor is not None, where, f"{where} {'exists' if tensor else 'does not exist'}")


def measure(weights: Mapping[str, TensorInfo], known: Mapping[str, Any]) -> tuple[dict[str, Measured], list[str]]:
    """Everything that the shapes show, given what is already known.

    Args:
        known: Field of `ModelArgs` -> value or None.

    Returns:
        Field -> what the tensors say; and sentences on tensors that do not agree with each other.
    """
    found, layers = _Found(known), _Layers(weights)
    if not layers.numbers:
        return {}, []
    count = max(layers.numbers) + 1
    found["num_layers"] = Measured(count, "the layers' names", f"the checkpoint holds {count} layers")
    notes = [f"layer {n} of {count} has no tensors" for n in sorted(set(range(count)) - layers.numbers)[:4]]
    _measure_model(found, layers)
    if layers.first("self_attention.linear_kv_down_proj.weight"):
        _measure_mla(found, layers)
    else:
        notes += _measure_attention(found, layers)
    _measure_mlp(found, layers)
    notes += _measure_experts(found, layers, count)
    for suffix, tensor in layers.uneven.items():
        first = layers.tensors[suffix]
        notes.append(f"{tensor.name} is {tensor.shape}, but {first.name} is {first.shape}")
    return found, notes


def _measure_model(found: _Found, layers: _Layers) -> None:
    weights = layers.weights
    embedding = weights.get("embedding.word_embeddings.weight")
    if embedding is not None:
        found.size("hidden_size", embedding, 1)
        found.size("padded_vocab_size", embedding, 0)
        head = weights.get("output_layer.weight")
        shown = f"output_layer.weight {'does not exist' if head is None else 'exists'}"
        found["tied_embeddings"] = Measured(head is None, "output_layer.weight", shown)
    else:
        found.size("hidden_size", layers.first("self_attention.linear_proj.weight"), 0)
    positions = weights.get("embedding.position_embeddings.weight")
    if positions is not None:
        found.size("max_position_embeddings", positions, 0)
        found["position_embedding_type"] = Measured("learned_absolute", positions.name, f"{positions.name} exists")
    last = weights.get("decoder.final_layernorm.weight")
    if last is not None:
        bias = "decoder.final_layernorm.bias" in weights
        shown = f"decoder.final_layernorm.bias {'exists' if bias else 'does not exist'}"
        found["normalization"] = Measured("LayerNorm" if bias else "RMSNorm", last.name, shown)
    if layers.mtp:
        depth = max(layers.mtp) + 1
        found["mtp_num_layers"] = Measured(depth, "mtp.layers", f"the checkpoint holds {depth} MTP layers")


def _measure_attention(found: _Found, layers: _Layers) -> list[str]:
    found["mla"] = Measured(False, "linear_qkv", "no linear_kv_down_proj exists")
    proj = layers.first("self_attention.linear_proj.weight")
    qkv = layers.first("self_attention.linear_qkv.weight")
    norm = layers.first("self_attention.q_layernorm.weight")
    if proj is None or qkv is None:
        return []
    if found.best("num_attention_heads") is None and norm is not None:
        found.size("head_dim", norm, 0)
    if found.best("num_attention_heads"):
        found.size("head_dim", proj, 1, found.best("num_attention_heads"))
    elif found.best("head_dim"):
        found.size("num_attention_heads", proj, 1, found.best("head_dim"))
    heads, dim = found.best("num_attention_heads"), found.best("head_dim")
    if heads and dim:
        gate = bool(found.known.get("extras", {}).get("attention_output_gate"))
        found.size("num_query_groups", qkv, 0, 2 * dim, heads * dim * (1 + gate))
    found.exists("qk_layernorm", norm, "self_attention.q_layernorm.weight")
    found.exists("add_qkv_bias", layers.first("self_attention.linear_qkv.bias"), "self_attention.linear_qkv.bias")
    linear = layers.first("self_attention.linear_proj.bias")
    found.exists("add_bias_linear", linear, "self_attention.linear_proj.bias")
    if norm is not None and dim and norm.shape != (dim,):
        return [f"{norm.name} is {norm.shape}, not one weight per element of a head of {dim}"]
    return []


def _measure_mla(found: _Found, layers: _Layers) -> None:
    first = layers.first
    down, up = (first(f"self_attention.linear_kv_{way}_proj.weight") for way in ("down", "up"))
    found["mla"] = Measured(True, down.name if down else "", f"{down.name if down else ''} exists")
    found.size("kv_lora_rank", up, 1)
    q_down = first("self_attention.linear_q_down_proj.weight")
    if q_down is not None:
        found.size("q_lora_rank", q_down, 0)
    if found.best("kv_lora_rank"):
        found.size("qk_pos_emb_head_dim", down, 0, 1, found.best("kv_lora_rank"))
    heads, pos = found.best("num_attention_heads"), found.best("qk_pos_emb_head_dim")
    query = first("self_attention.linear_q_up_proj.weight", "self_attention.linear_q_proj.weight")
    if heads and pos:
        found.size("v_head_dim", first("self_attention.linear_proj.weight"), 1, heads)
        found.size("qk_head_dim", query, 0, heads, heads * pos)
    norm = first("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight")
    found.exists("qk_layernorm", norm, "self_attention.linear_kv_up_proj.layer_norm_weight")
    found.exists("add_bias_linear", first("self_attention.linear_proj.bias"), "self_attention.linear_proj.bias")


def _measure_gate(found: _Found, fc1: TensorInfo | None, fc2: TensorInfo | None) -> None:
    if fc1 is None or fc2 is None or len(fc2.shape) != 2 or not fc2.shape[1]:
        return
    ratio = fc1.shape[0] / fc2.shape[1]
    value = {1.0: False, 2.0: True}.get(ratio)
    found["gated"] = Measured(value, fc1.name, f"{fc1.name} {fc1.shape} has {ratio:g} times the {fc2.shape[1]} columns")


def _measure_mlp(found: _Found, layers: _Layers) -> None:
    fc1, fc2 = layers.first("mlp.linear_fc1.weight"), layers.first("mlp.linear_fc2.weight")
    found.size("ffn_hidden_size", fc2, 1)
    _measure_gate(found, fc1, fc2)


def _measure_experts(found: _Found, layers: _Layers, count: int) -> list[str]:
    if not layers.experts:
        if found.known.get("num_experts"):
            found["num_experts"] = Measured(None, "mlp.experts", "the checkpoint holds no experts")
        return []
    number = max(max(numbers) for numbers in layers.experts.values()) + 1
    found["num_experts"] = Measured(number, "mlp.experts", f"the checkpoint holds {number} experts")
    pattern = tuple(layer in layers.experts for layer in range(count))
    shown = f"{sum(pattern)} of {count} layers hold experts: {_digits(pattern)}"
    found["moe_layers"] = Measured(pattern, "mlp.experts", shown)
    fc1, fc2 = (layers.first(f"mlp.experts.*.linear_fc{i}.weight") for i in (1, 2))
    found.size("moe_ffn_hidden_size", fc2, 1)
    _measure_gate(found, fc1, fc2)
    found.size("moe_shared_expert_size", layers.first("mlp.shared_experts.linear_fc2.weight"), 1)
    if found.known.get("moe_shared_expert_size") and "moe_shared_expert_size" not in found:
        found["moe_shared_expert_size"] = Measured(None, "mlp.shared_experts", "the checkpoint holds no shared expert")
    gate = layers.first("mlp.shared_experts.gate_weight")
    found.exists("moe_shared_expert_gate", gate, "mlp.shared_experts.gate_weight")
    found.exists("moe_expert_bias", layers.first("mlp.router.expert_bias"), "mlp.router.expert_bias")
    everyone = set(range(number))
    broken = [(n, sorted(everyone - have)) for n, have in layers.experts.items() if have != everyone]
    return [f"layer {n} has no expert {gone[0]}" for n, gone in broken[:4]]


def _digits(pattern: tuple[bool, ...]) -> str:
    return "".join("01"[value] for value in pattern)
