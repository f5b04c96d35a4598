"""The facts of a model that its tensors do not show: heads, rotary embedding, activation, routing.

Megatron-LM stores them as a Namespace whose names changed over the years, Megatron-Bridge and NeMo as a configuration
file; `ModelArgs` is one spelling for all. What neither states is read off the tensors' shapes, and every number that
shapes can confirm is compared with them: `ModelArgs.contradictions`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from converters.catalog import model_section
from converters.megatron.heterogeneous import ENCODED, block_departures, read_blocks
from converters.megatron.layer_census import missing_tensors
from converters.megatron.layer_pattern import describe_layers
from converters.megatron.model_fields import DEFAULTS, ModelFields
from converters.megatron.model_options import read_options
from converters.megatron.model_shapes import measure
from converters.megatron.option_values import Facts
from converters.megatron.part_shapes import odd_shapes
from converters.megatron.vocabulary import real_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import Catalog
    from converters.megatron.heterogeneous import Block


@dataclass(frozen=True)
class ModelArgs(ModelFields):
    """What is known of a model; a field is None when nothing says.

    `extras` holds options, under the name they were given, that change the forward pass and have no field here: an
    exporter that does not know one must refuse. `notes` are sentences on options that do not mean what they say,
    `unknown` says which options are not understood: nothing may be concluded from their tensors' places.
    `source` says of every field that is set where it comes from: "args.num_layers", "config.num_layers",
    "shape of TENSOR", or "default".
    """

    extras: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    source: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_catalog(cls, catalog: Catalog) -> ModelArgs:
        """The facts that a checkpoint's arguments, configuration and shapes give; never fails."""
        facts = _Collected()
        for label, values in (("args", catalog.args), ("config", model_section(catalog.config))):
            if values:
                read_options(facts, label, values)
        facts.forget_unused(catalog)
        facts.measure(catalog)
        facts.count_real_rows(catalog)
        if catalog.args or catalog.config:
            facts.add_defaults(catalog)
        values = {name: value for name, value in facts.values.items() if value is not None}
        source = {name: text for name, text in facts.source.items() if name in values}
        notes, unknown = tuple(facts.notes), tuple(facts.unknown)
        return cls(**values, extras=facts.extras, notes=notes, unknown=unknown, source=source)

    def fact(self, name: str) -> Any:
        """A field, or one of the `extras`; None if nothing says."""
        return getattr(self, name) if name in self.__dataclass_fields__ else self.extras.get(name)

    @property
    def layer_kinds(self) -> str:
        """What the layers are: `hybrid M*EM: 2 Mamba, 1 attention, 1 MoE`; "" if they are a transformer's."""
        return describe_layers(self.layer_pattern, self.linear_layers)

    def contradictions(self, catalog: Catalog) -> list[str]:
        """Each number that does not fit the tensors' shapes, as a sentence with both numbers; empty if all fit."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        measurements, out = measure(catalog.language, values)
        for name, measured in measurements.items():
            stated, source = values[name], self.source.get(name, "")
            if measured.value is None or (stated is not None and stated != measured.value):
                label = source.split(".")[0] if source.startswith(("args.", "config.")) else "the rest"
                verb = "say" if label == "args" else "says"
                out.append(f"{label} {verb} {name} {_format_value(stated)}, but {measured.evidence}")
        vocab, padded = self.vocab_size, self.padded_vocab_size
        if vocab is not None and padded is not None and vocab > padded:
            out.append(f"{self.source['vocab_size']} is {vocab}, but the embedding has {padded} rows")
        if not catalog.megatron:
            return out
        options = {**model_section(catalog.config), **catalog.args, **self.extras}
        if self.blocks and self.num_attention_heads and self.head_dim:
            sizes = {"heads": self.num_attention_heads, "dim": self.head_dim, "hidden": self.hidden_size or 0}
            out += list(block_departures(self.blocks, catalog.language, **sizes))[:8]
        return [*out, *missing_tensors(catalog.weights), *odd_shapes(catalog.weights, options)]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What each layer is, where each has its own sizes; empty if they are alike, or if that is not understood."""
        text = self.extras.get(ENCODED)
        if text is None or any(ENCODED in sentence for sentence in self.unknown):
            return ()
        return read_blocks(str(text), self.num_attention_heads or 0, self.hidden_size or 0)


_NONE_IF_ZERO = ("num_experts", "mtp_num_layers", "vpp", "consumed_train_samples")


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "".join("01"[int(v)] for v in value)
    return str(value)


class _Collected(Facts):
    """The facts of one checkpoint while they are put together."""

    def forget_unused(self, catalog: Catalog) -> None:
        """Drops the options of features that the model does not use; Megatron-LM stores defaults for all of them."""
        values = self.values
        unused: list[str] = []
        for prefix, marker in (("mamba_", "mixer."), ("linear_", ".self_attention.in_proj.")):
            if not any(marker in name for name in catalog.weights) and prefix + "layers" not in values:
                unused += [name for name in values if name.startswith(prefix)]
        if "E" not in values.get("layer_pattern", "E"):
            unused.append("num_experts")
        if values.get("mla"):
            unused += ["num_query_groups", "head_dim"]
        else:
            unused += ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
            unused.append("mla_down_fused")
        if not values.get("num_experts") or "num_experts" in unused:
            unused += [name for name in values if name.startswith("moe_")]
        if not values.get("moe_scaling_factor"):
            unused.append("moe_scaling_factor")
        for name in (*unused, *(n for n in _NONE_IF_ZERO if not values.get(n))):
            values.pop(name, None)
        if values.get("add_bias_linear") and not values.get("mla"):
            values["add_qkv_bias"] = True
        tp, pp, cp, world = (values.get(n) for n in ("tp", "pp", "cp", "world_size"))
        if world and tp and pp:
            self.put("dp", world // (tp * pp * (cp or 1)), "args.world_size")

    def count_real_rows(self, catalog: Catalog) -> None:
        """Puts the tokenizer's size in place of --vocab-size, or nothing if that is not known."""
        stated, stored = self.values.get("vocab_size"), self.values.get("padded_vocab_size")
        if stated is None or stored is None or self.source["vocab_size"] != "args.vocab_size":
            return
        self.values["vocab_size"], note = real_rows(stated, stored, self.values.get("tp") or 1, catalog.args)
        self.notes += [note] if note else []

    def add_defaults(self, catalog: Catalog) -> None:
        """What an option amounts to that the writing version did not have or did not write out."""
        stated = not self.source.get("num_experts", "shape").startswith("shape")
        for name, value in DEFAULTS.items():
            if stated or not name.startswith("moe_"):
                self.put(name, value, "default")
        if self.values.get("rope_scaling") == "yarn" and self.values.get("mla"):
            # core 0.14 named the option and fixed it at 4096; 0.12 and 0.13 took max_position_embeddings for it; where
            # only "0.13 or 0.14" is known, it stays open
            written_by = catalog.producer[0] if catalog.producer else ""
            longest = self.values.get("max_position_embeddings")
            if longest == 4096 or not re.search(r"0\.1[1-3]\b", written_by):
                self.put("rope_original_max_position_embeddings", 4096, "default")
            elif not re.search(r"0\.14", written_by):
                self.put("rope_original_max_position_embeddings", longest, "args.max_position_embeddings")

    def measure(self, catalog: Catalog) -> None:
        """Fills what nothing stated from the tensors."""
        values = {f.name: self.values.get(f.name) for f in fields(ModelArgs)} | {"extras": self.extras}
        for name, measured in measure(catalog.language, values)[0].items():
            self.put(name, measured.value, f"shape of {measured.tensor}")
        sizes: Counter[str] = Counter()
        for tensor in catalog.weights.values():
            if tensor.dtype.floating:
                sizes[tensor.dtype.name] += tensor.numel
        if sizes:
            self.put("dtype", sizes.most_common(1)[0][0], "stored tensors")
