"""Multi-token prediction layers beside a model that transformers saves without them, and the logits that they give.

What predicts is a small model of the same class: it takes, in place of embeddings, the projection of the normed embedding
of the next token and of the normed hidden state, and its last norm is that of the prediction. So transformers' own layers
compute what Megatron's are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Predicting:
    """Where a family's files keep one depth.

    Attributes:
        layers: What makes a case's settings those of the small model.
        first: Prefix of its first layer in its own file, up to the number.
        place: The same in the file of the whole model, and the number there.
        norm: Its last norm, in its own file and in the other.
        around: Names of the norm of embeddings, the norm of hidden states and the projection.
        whole: What makes a case's settings those of the whole model.
    """

    layers: dict
    first: str
    place: tuple[str, int]
    norm: tuple[str, str]
    around: tuple[str, str, str]
    whole: dict = field(default_factory=dict)


def _numbered(layer, **settings):
    """Behind the other layers, as DeepSeek and GLM have them."""
    around = tuple(f"model.layers.{layer}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj"))
    norm = ("model.norm.weight", f"model.layers.{layer}.shared_head.norm.weight")
    return Predicting(
        settings, "model.layers.", ("model.layers.", layer), norm, around, {"num_nextn_predict_layers": 1}
    )


_QWEN = Predicting(
    {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []},
    "model.layers.",
    ("mtp.layers.", 0),
    ("model.norm.weight", "mtp.norm.weight"),
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight"),
    {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "mlp_only_layers": []},
)
_WITHOUT_DENSE = replace(
    _QWEN,
    layers={key: value for key, value in _QWEN.layers.items() if key != "mlp_only_layers"},
    whole={"layer_types": _QWEN.whole["layer_types"]},
)
CASES = {
    "deepseek_v3_mtp": _numbered(3, num_hidden_layers=1, first_k_dense_replace=0),
    "bailing_moe_v2_mtp": replace(
        _numbered(3, num_hidden_layers=1, first_k_dense_replace=0),
        norm=("model.norm.weight", "model.layers.3.final_layernorm.weight"),
    ),
    "glm4_moe_mtp": _numbered(3, num_hidden_layers=1, first_k_dense_replace=0),
    "glm4_moe_lite_mtp": _numbered(3, num_hidden_layers=1, mlp_layer_types=["sparse"]),
    "qwen3_next_mtp": _QWEN,
    "qwen3_5_text_mtp": _WITHOUT_DENSE,
    "qwen3_5_moe_text_mtp": _WITHOUT_DENSE,
    "nemotron_h_mtp": Predicting(
        {"layers_block_type": ["full_attention", "moe"]},
        "backbone.layers.",
        ("mtp.layers.", 0),
        ("backbone.norm_f.weight", "mtp.layers.1.final_layernorm.weight"),
        tuple(f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")),
        {"num_nextn_predict_layers": 1},
    ),
}


def add_predictions(name, folder, model, make):
    """Adds one depth to the folder of a case, and `predictions`, which computes its logits, to its model.

    Args:
        make: Saves a model of the case with other settings into a folder, and returns it.
    """
    about = CASES[name]
    small = make(folder / "small", **about.layers)
    own, path = load_file(folder / "small" / "model.safetensors"), folder / "model.safetensors"
    for file in (folder / "small").iterdir():
        file.unlink()
    (folder / "small").rmdir()
    random, size = torch.Generator().manual_seed(9), model.config.hidden_size
    shapes = ((size,), (size,), (size, 2 * size))
    kind = next(iter(own.values())).dtype
    around = [(0.15 * torch.randn(shape, generator=random)).to(kind) for shape in shapes]
    centred = any(word in name for word in ("qwen3_next", "qwen3_5"))
    around[:2] = [value if centred else 1 + value for value in around[:2]]
    placed = {about.norm[1]: own[about.norm[0]], **dict(zip(about.around, around, strict=True))}
    for key, value in own.items():
        if key.startswith(about.first):
            number, _, rest = key.removeprefix(about.first).partition(".")
            placed[f"{about.place[0]}{int(number) + about.place[1]}.{rest}"] = value
    save_file({**load_file(path), **placed}, path, {"format": "pt"})
    model.predictions = partial(
        _predict, model, small, [1.0 * centred + around[0], 1.0 * centred + around[1], around[2]]
    )


def _predict(model, small, around, tokens):
    def normed(x, weight):
        epsilon = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight

    hidden = model.model(tokens).last_hidden_state
    behind = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    embedded = model.get_input_embeddings()(behind)
    joined = torch.cat([normed(embedded, around[0]), normed(hidden, around[1])], -1) @ around[2].T
    return [model.lm_head(small.model(inputs_embeds=joined).last_hidden_state)]
