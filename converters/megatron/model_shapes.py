"""What tensor shapes say about a model: sizes, which parts exist, and which stated numbers cannot be.

Shapes alone do not separate everything: a fused QKV projection has `(heads + 2 * groups) * head_dim` rows, so two of
the three must be known. What follows from the tensors and from what is already known is a `Measured`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.megatron.bridge_families import WIDE_NORMS
from converters.megatron.layer_pattern import symbol_of
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import TensorInfo


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


class LayerTensors:
    """Layer tensors by what they are: suffix -> first layer's tensor, experts under `mlp.experts.*`.

    Attributes:
        weights: All of them, by canonical name.
        suffixes: Layer number -> what its tensors are.
        experts: Layer number -> numbers of its experts.
        mtp: Numbers of the multi-token prediction layers.
        tensors: What a tensor is -> the first layer's.
        uneven: The same for those of another shape than the first layer's.
    """

    def __init__(self, weights: Mapping[str, TensorInfo]) -> None:
        self.weights = weights
        self.suffixes: dict[int, set[str]] = defaultdict(set)
        self.experts: dict[int, set[int]] = defaultdict(set)
        self.mtp: set[int] = set()
        self.tensors: dict[str, TensorInfo] = {}
        self.uneven: dict[str, TensorInfo] = {}
        block = "decoder" if any(name.startswith("decoder.layers.") for name in weights) else "encoder"
        for name, tensor in weights.items():
            match = _LAYER.fullmatch(name)
            if match and match[1] == block:
                self._add(int(match[2]), match[3], tensor)
            elif not match:
                mtp = _MTP.match(name)
                if mtp:
                    self.mtp.add(int(mtp[1]))

    def _add(self, layer: int, suffix: str, tensor: TensorInfo) -> None:
        expert = _EXPERT.match(suffix)
        if expert:
            self.experts[layer].add(int(expert[1]))
            suffix = "mlp.experts.*." + suffix[expert.end() :]
        self.suffixes[layer].add(suffix)
        first = self.tensors.setdefault(suffix, tensor)
        if first.shape != tensor.shape:
            self.uneven.setdefault(suffix, tensor)

    def first(self, *suffixes: str) -> TensorInfo | None:
        """The first layer's tensor with one of these suffixes."""
        return next((self.tensors[suffix] for suffix in suffixes if suffix in self.tensors), None)


class Findings(dict[str, Measured]):
    """Facts that tensors show, by field, beside what options state of them."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        super().__init__()
        self.stated = stated

    def best(self, name: str) -> Any:
        """What was stated, else what was measured, else None."""
        stated = self.stated.get(name)
        return stated if stated is not None else self[name].value if name in self else None

    def size(self, name: str, tensor: TensorInfo | None, axis: int, divisor: int = 1, less: int = 0) -> None:
        """`name` is (size of the axis - less) / divisor."""
        if tensor is None or axis >= len(tensor.shape) or divisor <= 0:
            return
        value, remainder = divmod(tensor.shape[axis] - less, divisor)
        fits = value > 0 and not remainder
        evidence = f"{tensor.name} {tensor.shape} fits {value if fits else 'no whole number'}"
        self[name] = Measured(value if fits else None, tensor.name, evidence)

    def exists(self, name: str, tensor: TensorInfo | None, missing: str) -> None:
        """`name` says whether the tensor exists."""
        where = tensor.name if tensor else missing
        self[name] = Measured(tensor is not None, where, f"{where} {'exists' if tensor else 'does not exist'}")


def measure(weights: Mapping[str, TensorInfo], stated: Mapping[str, Any]) -> tuple[dict[str, Measured], list[str]]:
    """Everything that the shapes show, given what is already known.

    Args:
        stated: Field of `ModelArgs` -> value or None.

    Returns:
        Field -> what the tensors say; and sentences on tensors that do not agree with each other.
    """
    findings, layers = Findings(stated), LayerTensors(weights)
    if not layers.suffixes:
        return {}, []
    count = max(layers.suffixes) + 1
    findings["num_layers"] = Measured(count, "the layers' names", f"the checkpoint holds {counted(count, 'layer')}")
    notes = [f"layer {n} of {count} has no tensors" for n in sorted(set(range(count)) - layers.suffixes.keys())[:4]]
    _measure_model(findings, layers)
    notes += _measure_kinds(findings, layers, count)
    _measure_mixers(findings, layers)
    if layers.first("self_attention.linear_kv_down_proj.weight"):
        _measure_mla(findings, layers)
    else:
        notes += _measure_attention(findings, layers)
    fc1, fc2 = layers.first("mlp.linear_fc1.weight"), layers.first("mlp.linear_fc2.weight")
    findings.size("ffn_hidden_size", fc2, 1)
    _measure_gate(findings, fc1, fc2)
    notes += _measure_experts(findings, layers, count)
    extras = stated.get("extras") or {}
    sized_one_by_one = any(name.startswith("heterogeneous_") for name in extras)
    for suffix, tensor in layers.uneven.items() if not sized_one_by_one else ():
        first = layers.tensors[suffix]
        notes.append(f"{tensor.name} is {tensor.shape}, but {first.name} is {first.shape}")
    return findings, notes


def _measure_model(findings: Findings, layers: LayerTensors) -> None:
    weights = layers.weights
    embedding = weights.get("embedding.word_embeddings.weight")
    if embedding is not None:
        findings.size("hidden_size", embedding, 1)
        findings.size("padded_vocab_size", embedding, 0)
        head = weights.get("output_layer.weight")
        evidence = f"output_layer.weight {'does not exist' if head is None else 'exists'}"
        findings["tied_embeddings"] = Measured(head is None, "output_layer.weight", evidence)
    else:
        findings.size("hidden_size", layers.first("self_attention.linear_proj.weight"), 0)
    positions = weights.get("embedding.position_embeddings.weight")
    if positions is not None:
        findings.size("max_position_embeddings", positions, 0)
        findings["position_embedding_type"] = Measured("learned_absolute", positions.name, f"{positions.name} exists")
    elif (
        embedding is not None
        and findings.stated.get("position_embedding_type") == "learned_absolute"
        and not findings.stated.get("layer_pattern")  # a hybrid has none, whatever the arguments' default says
    ):
        missing = "embedding.position_embeddings.weight does not exist"
        findings["position_embedding_type"] = Measured(None, embedding.name, missing)
    last = weights.get("decoder.final_layernorm.weight") or weights.get(_HYBRID_NORM)
    if last is not None:
        name = f"{last.name.removesuffix('.weight')}.bias"
        bias = name in weights
        evidence = f"{name} {'exists' if bias else 'does not exist'}"
        findings["normalization"] = Measured("LayerNorm" if bias else "RMSNorm", last.name, evidence)
    if layers.mtp:
        depth = max(layers.mtp) + 1
        findings["mtp_num_layers"] = Measured(
            depth, "mtp.layers", f"the checkpoint holds {counted(depth, 'MTP layer')}"
        )


_HYBRID_NORM = "decoder.final_norm.weight"  # of a stack of single layers; transformers have a final_layernorm


def _measure_kinds(findings: Findings, layers: LayerTensors, count: int) -> list[str]:
    """Which layers are what: the pattern of a hybrid, or which layers of a transformer have linear attention."""
    stated = findings.stated.get("layer_pattern")
    mixers = any(suffix.startswith("mixer.") for suffix in layers.tensors)
    if not (stated or mixers or _HYBRID_NORM in layers.weights):
        linear = tuple(any(_LINEAR in suffix for suffix in layers.suffixes.get(n, ())) for n in range(count))
        if any(linear) or findings.stated.get("linear_layers"):
            evidence = f"{sum(linear)} of {count} layers have linear attention: {_digits(linear)}"
            findings["linear_layers"] = Measured(linear, _LINEAR, evidence)
        return []
    kinds = [symbol_of(layers.suffixes.get(n, ())) or "?" for n in range(count)]
    for number, symbol in enumerate((stated or "")[:count]):
        if (symbol, kinds[number]) == ("D", "+"):  # sparse attention may use the indices of a layer before it
            kinds[number] = symbol
    evidence = f"the tensors of its layers are {''.join(kinds)}"
    findings["layer_pattern"] = Measured("".join(kinds), "the layers' tensors", evidence)
    return _incomplete(layers, kinds)


_LINEAR = "self_attention.in_proj."


def _incomplete(layers: LayerTensors, kinds: list[str]) -> list[str]:
    """Layers of a hybrid that lack what another layer of their kind has."""
    suffixes_by_kind: dict[str, set[str]] = defaultdict(set)
    for number, kind in enumerate(kinds):
        suffixes_by_kind[kind] |= layers.suffixes.get(number, set())
    out = []
    for number, kind in enumerate(kinds):
        missing = sorted(s for s in suffixes_by_kind[kind] - layers.suffixes.get(number, set()) if ".indexer." not in s)
        if missing and kind not in "MG?":  # those are looked at one by one
            out.append(f"layer {number} has no {missing[0]}, other layers of its kind have")
    return out[:8]


def _measure_mixers(findings: Findings, layers: LayerTensors) -> None:
    """The sizes of Mamba mixers, also of those beside attention, and of gated delta nets."""
    for mixer in ("mixer.", "mamba_mixer."):
        projection = f"{mixer}in_proj.weight."
        findings.size("mamba_num_heads", layers.first(f"{mixer}A_log"), 0)
        findings.size("mamba_head_dim", layers.first(f"{projection}x"), 0, findings.best("mamba_num_heads") or 0)
        findings.size("mamba_state_dim", layers.first(f"{projection}B"), 0, findings.best("mamba_num_groups") or 0)
    net, projection = "self_attention.", "self_attention.in_proj.weight."
    findings.size("linear_conv_kernel_dim", layers.first(f"{net}conv1d.weight.query"), 2)
    findings.size("linear_value_head_dim", layers.first(f"{net}out_norm.weight"), 0)
    value_head = findings.best("linear_value_head_dim") or 0
    findings.size("linear_num_value_heads", layers.first(f"{projection}value"), 0, value_head)
    if layers.first(f"{projection}f"):  # gdn2: decay for each key head
        findings.size("linear_num_key_heads", layers.first(f"{net}A_log"), 0)
    findings.size(
        "linear_key_head_dim", layers.first(f"{projection}query"), 0, findings.best("linear_num_key_heads") or 0
    )


def _measure_attention(findings: Findings, layers: LayerTensors) -> list[str]:
    findings["mla"] = Measured(False, "linear_qkv", "no linear_kv_down_proj exists")
    proj = layers.first("self_attention.linear_proj.weight")
    qkv = layers.first("self_attention.linear_qkv.weight")
    norm = layers.first("self_attention.q_layernorm.weight")
    if proj is None or qkv is None:
        return []
    if findings.best("num_attention_heads") is None and norm is not None:
        findings.size("head_dim", norm, 0)
    if findings.best("num_attention_heads"):
        findings.size("head_dim", proj, 1, findings.best("num_attention_heads"))
    elif findings.best("head_dim"):
        findings.size("num_attention_heads", proj, 1, findings.best("head_dim"))
    heads, dim = findings.best("num_attention_heads"), findings.best("head_dim")
    if heads and dim:
        gate = bool(findings.stated.get("extras", {}).get("attention_output_gate"))
        findings.size("num_query_groups", qkv, 0, 2 * dim, heads * dim * (1 + gate))
    findings.exists("qk_layernorm", norm, "self_attention.q_layernorm.weight")
    findings.exists("add_qkv_bias", layers.first("self_attention.linear_qkv.bias"), "self_attention.linear_qkv.bias")
    linear = layers.first("self_attention.linear_proj.bias")
    findings.exists("add_bias_linear", linear, "self_attention.linear_proj.bias")
    wide = (findings.stated.get("extras") or {}).get("bridge_family") in WIDE_NORMS
    elements = heads * dim if wide and heads and dim else dim
    if norm is not None and elements and norm.shape != (elements,):
        of_what = f"{heads} heads of {dim}" if wide else f"a head of {dim}"
        return [f"{norm.name} is {norm.shape}, not one weight per element of {of_what}"]
    return []


def _measure_mla(findings: Findings, layers: LayerTensors) -> None:
    first = layers.first
    down, up = (first(f"self_attention.linear_kv_{way}_proj.weight") for way in ("down", "up"))
    findings["mla"] = Measured(True, down.name if down else "", f"{down.name if down else ''} exists")
    findings.size("kv_lora_rank", up, 1)
    q_down = first("self_attention.linear_q_down_proj.weight")
    if q_down is not None:
        findings.size("q_lora_rank", q_down, 0)
    if findings.best("kv_lora_rank"):
        findings.size("qk_pos_emb_head_dim", down, 0, 1, findings.best("kv_lora_rank"))
    heads, pos = findings.best("num_attention_heads"), findings.best("qk_pos_emb_head_dim")
    query = first("self_attention.linear_q_up_proj.weight", "self_attention.linear_q_proj.weight")
    if heads and pos:
        findings.size("v_head_dim", first("self_attention.linear_proj.weight"), 1, heads)
        findings.size("qk_head_dim", query, 0, heads, heads * pos)
    norm = first("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight")
    findings.exists("qk_layernorm", norm, "self_attention.linear_kv_up_proj.layer_norm_weight")
    findings.exists("add_bias_linear", first("self_attention.linear_proj.bias"), "self_attention.linear_proj.bias")


def _measure_gate(findings: Findings, fc1: TensorInfo | None, fc2: TensorInfo | None) -> None:
    if fc1 is None or fc2 is None or len(fc2.shape) != 2 or not fc2.shape[1]:
        return
    ratio = fc1.shape[0] / fc2.shape[1]
    value = {1.0: False, 2.0: True}.get(ratio)
    findings["gated"] = Measured(
        value, fc1.name, f"{fc1.name} {fc1.shape} has {ratio:g} times the {fc2.shape[1]} columns"
    )


def _measure_experts(findings: Findings, layers: LayerTensors, count: int) -> list[str]:
    pattern = findings.stated.get("layer_pattern")
    if not layers.experts:
        if pattern and "E" not in pattern:
            return []  # the argument is there, and nothing uses it
        if findings.stated.get("num_experts"):
            findings["num_experts"] = Measured(None, "mlp.experts", "the checkpoint holds no experts")
        return []
    number = max(max(numbers) for numbers in layers.experts.values()) + 1
    findings["num_experts"] = Measured(number, "mlp.experts", f"the checkpoint holds {counted(number, 'expert')}")
    flags = tuple(layer in layers.experts for layer in range(count))
    evidence = f"{sum(flags)} of {count} layers hold experts: {_digits(flags)}"
    findings["moe_layers"] = Measured(flags, "mlp.experts", evidence)
    fc1, fc2 = (layers.first(f"mlp.experts.*.linear_fc{i}.weight") for i in (1, 2))
    findings.size("moe_ffn_hidden_size", fc2, 1)
    _measure_gate(findings, fc1, fc2)
    findings.size("moe_shared_expert_size", layers.first("mlp.shared_experts.linear_fc2.weight"), 1)
    if findings.stated.get("moe_shared_expert_size") and "moe_shared_expert_size" not in findings:
        findings["moe_shared_expert_size"] = Measured(
            None, "mlp.shared_experts", "the checkpoint holds no shared expert"
        )
    gate = layers.first("mlp.shared_experts.gate_weight")
    findings.exists("moe_shared_expert_gate", gate, "mlp.shared_experts.gate_weight")
    findings.exists("moe_expert_bias", layers.first("mlp.router.expert_bias"), "mlp.router.expert_bias")
    all_experts = set(range(number))
    incomplete = [(n, sorted(all_experts - numbers)) for n, numbers in layers.experts.items() if numbers != all_experts]
    notes = [f"layer {n} has no expert {missing[0]}" for n, missing in incomplete[:4]]
    router = layers.first("mlp.router.weight")
    if router is not None and router.shape[:1] != (number,):
        notes.append(f"{router.name} is {router.shape}, the layer has {counted(number, 'expert')}")
    return notes


def _digits(pattern: tuple[bool, ...]) -> str:
    return "".join("01"[value] for value in pattern)
