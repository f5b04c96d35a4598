"""What the sweep goes through: models, optimizers with the forms that their state is saved in, and versions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

_SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48 --vocab-size 120"
)
_EXPERTS = " --moe-ffn-hidden-size 24"
_MAMBA = " --num-layers 4 --mamba-num-heads 8"
_MLA = _SMALL.replace("--num-layers 2 ", "").replace("--num-query-groups 2 ", "")
_BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 20.0}},
    {
        "attention": {"n_heads_in_group": None, "replace_with_linear": True},
        "ffn": {"ffn_mult": None, "replace_with_linear": True},
    },
    {"attention": {"n_heads_in_group": None, "num_query_groups": 4}, "ffn": {"ffn_mult": None, "no_op": True}},
]
_UNEVEN = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
    "tie_word_embeddings": False,
    "block_configs": _BLOCKS,
}
_COMPACT = json.dumps(_UNEVEN, separators=(",", ":"))  # one word of a command line
_BIASED = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 128"


@dataclass(frozen=True)
class Model:
    """A model of the harness.

    Attributes:
        cfg: its name there; in Megatron-LM main the hybrids have another.
        flags: Megatron's flags that make it small.
        source: the layout it is saved at.
        target: the layout it is resharded to.
        versions: those that have the model.
    """

    cfg: str
    flags: str
    source: dict[str, int]
    target: dict[str, int]
    versions: tuple[str, ...] = ("0.14.0", "0.16.1", "main")


_TP2, _TP2EP2 = {"tp": 2, "pp": 1, "ep": 1}, {"tp": 2, "pp": 1, "ep": 2}
_PP2, _TP1 = {"tp": 1, "pp": 2, "ep": 1}, {"tp": 1, "pp": 1, "ep": 1}
_NEW = ("0.16.1", "main")

MODELS = {
    "llama": Model("llama", _SMALL, _TP2, _PP2),
    "moe": Model("moe", _SMALL + _EXPERTS, _TP2EP2, _PP2),
    "hybrid": Model("hybrid", _SMALL + _MAMBA, _TP2, _PP2, _NEW),
    "hybrid_moe": Model("hybrid_moe", _SMALL + _MAMBA + _EXPERTS, _TP2EP2, _PP2, _NEW),
    "gdn": Model("gdn", _SMALL + " --kv-channels 8", _TP2, _PP2, _NEW),
    "gdn_moe": Model("gdn_moe", _SMALL + " --kv-channels 8" + _EXPERTS, _TP2EP2, _PP2, _NEW),
    "latent": Model("latent", _SMALL + _EXPERTS, _TP2EP2, _PP2, _NEW),
    "uneven": Model(
        "llama",
        f"{_SMALL} --num-layers 4 --use-rotary-position-embeddings --use-rope-scaling "
        f"--heterogeneous-layers-config-path none --heterogeneous-layers-config-encoded-json {_COMPACT}",
        _TP2,
        _PP2,
        _NEW,
    ),
    "gateattn": Model("gateattn", _SMALL, _TP2, _PP2, _NEW),
    "mla": Model("deepseek", _MLA, _TP2EP2, _PP2),
    "mla_mtp": Model("deepseek_mtp", _MLA, _TP2EP2, _PP2),
    "llava": Model("llava", _SMALL, _TP2, _TP1, ("0.16.1",)),
    "t5": Model("t5", _BIASED, _TP2, _TP1, ("0.14.0", "0.16.1")),
    "bert": Model("bert", _BIASED, _TP2, _PP2, ("0.14.0", "0.16.1")),
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and the forms of its state.

    Attributes:
        flags: Megatron's flags for it.
        distributed: whether the job has `--use-distributed-optimizer`.
        forms: of each version, the forms of the state that are saved.
        result: the flags of the job that takes the result; by default the same.
        elementwise: whether a step gives every element the same value at every layout. What then is wanted of a result
            is always taken from Megatron's loader, which needs the same expert parallel size: at another one its
            chain has other param groups.
        lossy: forms that Megatron does not save whole, with what `verify` must say is missing.
    """

    flags: str
    distributed: bool
    forms: dict[str, tuple[str, ...]]
    result: str | None = None
    elementwise: bool = True
    lossy: tuple[tuple[str, str], ...] = ()


_BOTH = ("dp_reshardable", "fully_reshardable")
_DISTRIBUTED = {"0.14.0": ("fully_sharded_model_space",), "0.16.1": _BOTH, "main": _BOTH}
_PLAIN = {"0.14.0": ("plain",), "0.16.1": ("plain",), "main": ("plain",)}

OPTIMIZERS = {
    "adam": Optimizer("", False, _PLAIN),
    "dist_adam": Optimizer("", True, _DISTRIBUTED),
    "pao": Optimizer(
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", True, _DISTRIBUTED, result=""
    ),
    "muon": Optimizer("--optimizer muon", False, {"0.16.1": ("plain",)}, elementwise=False),
    "muon_distributed": Optimizer("--optimizer muon", True, {"main": _BOTH}, elementwise=False),
    "dist_muon": Optimizer("--optimizer dist_muon", False, {"0.16.1": ("plain",), "main": _BOTH}, elementwise=False),
    "lion": Optimizer(
        "--optimizer lion", True, {"main": _BOTH}, lossy=(("fully_reshardable", "exp_avg_sq of Adam is missing"),)
    ),
    "sgd": Optimizer("--optimizer sgd --sgd-momentum 0.9", False, _PLAIN),
}


class Cell(NamedTuple):
    """One row of the table: what was saved, and by which version."""

    version: str
    model: str
    optimizer: str
    form: str


def cells() -> list[Cell]:
    """All of them; those that one run of Megatron saves together are neighbours."""
    return [
        Cell(version, model, optimizer, form)
        for version in ("0.16.1", "main", "0.14.0")
        for optimizer, kind in OPTIMIZERS.items()
        for model, about in MODELS.items()
        if version in about.versions
        for form in kind.forms.get(version, ())
    ]
