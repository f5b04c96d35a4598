"""The mapping from Megatron's parameters to transformers' a second time: plain numpy, written from the two models' code.

Nothing of `converters` is used here. It is slow and repeats itself on purpose; the tests compare its arrays, bit for bit,
with what an export wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

# heads, query groups; the models whose heads are not hidden / heads wide say so by the size of their projections
SHAPES = {"llama4": (8, 4), "gpt": (4, 4), "gpt_untied": (4, 4), "gpt_tanh": (4, 4), "gptneox": (4, 4)}


def expected(config: str, family: str, truth: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of the Hugging Face model, from the ground truth of a config (`model/NAME`, `buffer/NAME`)."""
    t = {key.partition("/")[2]: value for key, value in truth.items() if key.startswith(("model/", "buffer/"))}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if config == "llama4":  # whose truth holds six padding rows
            t[name] = t[name][:250]
    layers = 1 + max(int(m[1]) for name in t if (m := re.match(r"decoder\.layers\.(\d+)\.", name)))
    heads, groups = SHAPES.get(config, (4, 2))
    if family == "bailing_moe_v2":
        from harness.bailing import as_in_files

        out = as_in_files(expected(config, "glm4_moe", truth), np.concatenate)
        return {name.replace("shared_head.norm.", "final_layernorm."): value for name, value in out.items()}
    if family == "gpt2":
        return _gpt2(t, layers, heads)
    if family == "falcon_h1":
        return _falcon_h1(t, layers, heads, groups)
    if family in ("nemotron_h", "bamba"):
        return _hybrid(t, layers, family, heads, groups)
    if family == "gpt_neox":
        return _gpt_neox(t, layers)
    if family == "nemotron-nas":
        return _uneven(t, layers, heads)
    out = {"model.embed_tokens.weight": t["embedding.word_embeddings.weight"]}
    for i in range(layers):
        _layer(out, t, f"decoder.layers.{i}.", f"model.layers.{i}.", family, heads, groups)
    out["model.norm.weight"] = t["decoder.final_layernorm.weight"]
    if "decoder.final_layernorm.bias" in t:
        out["model.norm.bias"] = t["decoder.final_layernorm.bias"]
    if "output_layer.weight" in t:
        out["lm_head.weight"] = t["output_layer.weight"]
    if family == "mimo":
        for depth in range(sum(name.endswith("eh_proj.weight") for name in t)):
            p, q = f"mtp.layers.{depth}.", f"model.mtp_layers.{depth}."
            out[q + "token_layernorm.weight"] = t[p + "enorm.weight"]
            out[q + "hidden_layernorm.weight"] = t[p + "hnorm.weight"]
            out[q + "input_proj.weight"] = np.concatenate(np.split(t[p + "eh_proj.weight"], 2, axis=1)[::-1], axis=1)
            out[q + "final_layernorm.weight"] = t[p + "final_layernorm.weight"]
            _layer(out, t, p + "transformer_layer.", q, family, heads, groups)
    elif "mtp.layers.0.eh_proj.weight" in t and family.startswith(("qwen3_next", "qwen3_5")):
        p = "mtp.layers.0."
        names = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "final_layernorm": "norm",
        }
        out |= {f"mtp.{name}.weight": t[f"{p}{one}.weight"] for one, name in names.items()}
        _layer(out, t, p + "transformer_layer.", "mtp.layers.0.", family, heads, groups)
    elif "mtp.layers.0.eh_proj.weight" in t:
        p, q = "mtp.layers.0.", f"model.layers.{layers}."
        out[q + "enorm.weight"] = t[p + "enorm.weight"]
        out[q + "hnorm.weight"] = t[p + "hnorm.weight"]
        out[q + "eh_proj.weight"] = t[p + "eh_proj.weight"]
        out[q + "shared_head.norm.weight"] = t[p + "final_layernorm.weight"]
        _layer(out, t, p + "transformer_layer.", q, family, heads, groups)
    return out


def split_qkv(x: np.ndarray, heads: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v: within each group its queries, one key, one value."""
    grouped = x.reshape(groups, heads // groups + 2, -1, *x.shape[1:])
    rest = (-1, *x.shape[1:])
    return grouped[:, :-2].reshape(rest), grouped[:, -2].reshape(rest), grouped[:, -1].reshape(rest)


def split_gated(x: np.ndarray, heads: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q with the gate of each head behind it, k and v: within each group its queries, their gates, a key, a value."""
    ratio = heads // groups
    grouped = x.reshape(groups, 2 * ratio + 2, -1, *x.shape[1:])
    rest = (-1, *x.shape[1:])
    pairs = np.stack([grouped[:, :ratio], grouped[:, ratio : 2 * ratio]], 2)
    return pairs.reshape(rest), grouped[:, -2].reshape(rest), grouped[:, -1].reshape(rest)


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """gate and up."""
    return x[: len(x) // 2], x[len(x) // 2 :]


def _layer(out, t, p, q, family, heads, groups):
    a = p + "self_attention."
    if a + "A_log" in t:
        _delta_net(out, t, a, q, family)
    elif family.startswith("deepseek") or family == "glm4_moe_lite":
        out[q + "input_layernorm.weight"] = t[p + "input_layernorm.weight"]
        if a + "linear_q_down_proj.weight" in t:
            out[q + "self_attn.q_a_proj.weight"] = t[a + "linear_q_down_proj.weight"]
            out[q + "self_attn.q_a_layernorm.weight"] = t[a + "linear_q_up_proj.layer_norm_weight"]
            out[q + "self_attn.q_b_proj.weight"] = t[a + "linear_q_up_proj.weight"]
        else:
            out[q + "self_attn.q_proj.weight"] = t[a + "linear_q_proj.weight"]
        out[q + "self_attn.kv_a_proj_with_mqa.weight"] = t[a + "linear_kv_down_proj.weight"]
        out[q + "self_attn.kv_a_layernorm.weight"] = t[a + "linear_kv_up_proj.layer_norm_weight"]
        out[q + "self_attn.kv_b_proj.weight"] = t[a + "linear_kv_up_proj.weight"]
    else:
        if family != "exaone4":
            out[q + "input_layernorm.weight"] = t[a + "linear_qkv.layer_norm_weight"]
        if a + "linear_qkv.layer_norm_bias" in t:
            out[q + "input_layernorm.bias"] = t[a + "linear_qkv.layer_norm_bias"]
        for leaf in ("weight", "bias"):
            if a + f"linear_qkv.{leaf}" in t:
                fused = t[a + f"linear_qkv.{leaf}"]
                gated = family.startswith(("qwen3_next", "qwen3_5"))
                parts = (split_gated if gated else split_qkv)(fused, heads, groups)
                if family == "phi3":
                    out[q + f"self_attn.qkv_proj.{leaf}"] = np.concatenate(parts)
                    continue
                for letter, part in zip("qkv", parts, strict=True):
                    out[q + f"self_attn.{letter}_proj.{leaf}"] = part
        for letter in "qk":
            if a + f"{letter}_layernorm.weight" in t:
                out[q + f"self_attn.{letter}_norm.weight"] = t[a + f"{letter}_layernorm.weight"]
    if a + "linear_proj.weight" in t:
        out[q + "self_attn.o_proj.weight"] = t[a + "linear_proj.weight"]
    if a + "linear_proj.bias" in t:
        out[q + "self_attn.o_proj.bias"] = t[a + "linear_proj.bias"]
    m = p + "mlp."
    norm = "pre_mlp_layernorm.weight" if p + "pre_mlp_layernorm.weight" in t else "mlp.linear_fc1.layer_norm_weight"
    if a + "linear_proj.post_layernorm.weight" in t:
        out[q + "post_attention_layernorm.weight"] = t[a + "linear_proj.post_layernorm.weight"]
        if family != "exaone4":
            out[q + "pre_feedforward_layernorm.weight"] = t[p + norm]
        out[q + "post_feedforward_layernorm.weight"] = t[m + "linear_fc2.post_layernorm.weight"]
    else:
        out[q + "post_attention_layernorm.weight"] = t[p + norm]
    if m + "linear_fc1.layer_norm_bias" in t:
        out[q + "post_attention_layernorm.bias"] = t[m + "linear_fc1.layer_norm_bias"]
    if m + "router.weight" not in t:
        _dense(out, t, m, q + "mlp.", family)
    elif family in ("mixtral", "minimax_m2"):
        if family == "minimax_m2":
            out[q + "block_sparse_moe.e_score_correction_bias"] = t[m + "router.expert_bias"]
        out[q + "block_sparse_moe.gate.weight"] = t[m + "router.weight"]
        for e in range(len(t[m + "router.weight"])):
            to = q + f"block_sparse_moe.experts.{e}."
            out[to + "w1.weight"], out[to + "w3.weight"] = halves(t[m + f"experts.{e}.linear_fc1.weight"])
            out[to + "w2.weight"] = t[m + f"experts.{e}.linear_fc2.weight"]
    elif family == "gpt_oss":
        out[q + "self_attn.sinks"] = t[a + "core_attention.softmax_offset"]
        to, count = q + "mlp.experts.", len(t[m + "router.weight"])
        out |= {q + f"mlp.router.{leaf}": t[m + f"router.{leaf}"] for leaf in ("weight", "bias")}
        for leaf, suffix in (("weight", ""), ("bias", "_bias")):
            first, second = ([t[m + f"experts.{e}.linear_fc{n}.{leaf}"] for e in range(count)] for n in (1, 2))
            in_turn = [np.stack(halves(x), 1).reshape(x.shape) for x in first]
            out[to + f"gate_up_proj{suffix}"] = np.stack([x.T for x in in_turn])
            out[to + f"down_proj{suffix}"] = np.stack([x.T for x in second])
    elif family in ("granitemoe", "granitemoeshared"):
        to, count = q + "block_sparse_moe.", len(t[m + "router.weight"])
        out[to + "router.layer.weight"] = t[m + "router.weight"]
        out[to + "input_linear.weight"] = np.stack([t[m + f"experts.{e}.linear_fc1.weight"] for e in range(count)])
        out[to + "output_linear.weight"] = np.stack([t[m + f"experts.{e}.linear_fc2.weight"] for e in range(count)])
        if family == "granitemoeshared":
            out[q + "shared_mlp.input_linear.weight"] = t[m + "shared_experts.linear_fc1.weight"]
            out[q + "shared_mlp.output_linear.weight"] = t[m + "shared_experts.linear_fc2.weight"]
    else:
        out[q + "mlp.gate.weight"] = t[m + "router.weight"]
        if m + "router.expert_bias" in t:
            out[q + "mlp.gate.e_score_correction_bias"] = t[m + "router.expert_bias"]
        for e in range(len(t[m + "router.weight"])):
            _gated(out, t, m + f"experts.{e}.", q + f"mlp.experts.{e}.")
        if m + "shared_experts.linear_fc1.weight" in t:
            name = "shared_expert" if family.startswith("qwen") else "shared_experts"
            _gated(out, t, m + "shared_experts.", q + f"mlp.{name}.")
        if m + "shared_experts.gate_weight" in t:
            out[q + "mlp.shared_expert_gate.weight"] = t[m + "shared_experts.gate_weight"]


def _delta_net(out, t, a, q, family):
    parts = {n: t[a + f"in_proj.weight.{n}"] for n in ("query", "key", "value", "z", "beta", "alpha")}
    to = q + "linear_attn."
    out[q + "input_layernorm.weight"] = t[a + "in_proj.layer_norm_weight"]
    if family == "qwen3_next":
        by_head = {n: x.reshape(2, -1, x.shape[1]) for n, x in parts.items()}  # two key heads
        for name, inside in (("qkvz", ("query", "key", "value", "z")), ("ba", ("beta", "alpha"))):
            whole = np.concatenate([by_head[n] for n in inside], 1)
            out[to + f"in_proj_{name}.weight"] = whole.reshape(-1, whole.shape[2])
    else:
        out[to + "in_proj_qkv.weight"] = np.concatenate([parts[n] for n in ("query", "key", "value")])
        for letter, n in (("z", "z"), ("b", "beta"), ("a", "alpha")):
            out[to + f"in_proj_{letter}.weight"] = parts[n]
    out[to + "conv1d.weight"] = np.concatenate([t[a + f"conv1d.weight.{n}"] for n in ("query", "key", "value")])
    out |= {to + n: t[a + n] for n in ("A_log", "dt_bias", "out_proj.weight")}
    out[to + "norm.weight"] = plus_one(t[a + "out_norm.weight"])


def plus_one(x):
    """bf16 as uint16, one added: exact for what is tried here."""
    import torch

    return (torch.from_numpy(x.copy()).view(torch.bfloat16) + 1).view(torch.uint16).numpy()


def _gated(out, t, m, to):
    out[to + "gate_proj.weight"], out[to + "up_proj.weight"] = halves(t[m + "linear_fc1.weight"])
    out[to + "down_proj.weight"] = t[m + "linear_fc2.weight"]


def _dense(out, t, m, to, family):
    names = {
        "starcoder2": ("c_fc", "c_proj"),
        "phi3": ("gate_up_proj", "down_proj"),
        "glm": ("gate_up_proj", "down_proj"),
    }
    names |= {"nemotron": ("up_proj", "down_proj"), "arcee": ("up_proj", "down_proj")}
    if family not in names:
        _gated(out, t, m, to)
        return
    first, second = names[family]
    for leaf in ("weight", "bias"):
        if m + f"linear_fc1.{leaf}" in t:
            out[to + f"{first}.{leaf}"] = t[m + f"linear_fc1.{leaf}"]
            out[to + f"{second}.{leaf}"] = t[m + f"linear_fc2.{leaf}"]


def _uneven(t, layers, heads):
    """Each layer by the tensors that it has; the number of its query groups by the rows of its projection."""
    out = {
        "model.embed_tokens.weight": t["embedding.word_embeddings.weight"],
        "model.norm.weight": t["decoder.final_layernorm.weight"],
    }
    if "output_layer.weight" in t:
        out["lm_head.weight"] = t["output_layer.weight"]
    for i in range(layers):
        a, m, q = f"decoder.layers.{i}.self_attention.", f"decoder.layers.{i}.mlp.", f"model.layers.{i}."
        if a + "linear_qkv.weight" in t:
            fused, proj = t[a + "linear_qkv.weight"], t[a + "linear_proj.weight"]
            groups = (len(fused) * heads // proj.shape[1] - heads) // 2
            for letter, part in zip("qkv", split_qkv(fused, heads, groups), strict=True):
                out[q + f"self_attn.{letter}_proj.weight"] = part
            out[q + "self_attn.o_proj.weight"] = proj
            out[q + "input_layernorm.weight"] = t[a + "linear_qkv.layer_norm_weight"]
        elif a + "weight" in t:
            out[q + "self_attn.linear_attn.weight"] = t[a + "weight"]
            out[q + "input_layernorm.weight"] = t[a + "layer_norm_weight"]
        if m + "linear_fc1.weight" in t:
            _gated(out, t, m, q + "mlp.")
            out[q + "post_attention_layernorm.weight"] = t[m + "linear_fc1.layer_norm_weight"]
        elif m + "weight" in t:
            out[q + "mlp.linear_mlp.weight"] = t[m + "weight"]
            out[q + "post_attention_layernorm.weight"] = t[m + "layer_norm_weight"]
    return out


def _gpt2(t, layers, heads):
    out = {
        "transformer.wte.weight": t["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": t["embedding.position_embeddings.weight"],
    }
    for i in range(layers):
        p, q = f"decoder.layers.{i}.", f"transformer.h.{i}."
        for leaf in ("weight", "bias"):
            out[q + f"ln_1.{leaf}"] = t[p + f"self_attention.linear_qkv.layer_norm_{leaf}"]
            qkv = np.concatenate(split_qkv(t[p + f"self_attention.linear_qkv.{leaf}"], heads, heads))
            out[q + f"attn.c_attn.{leaf}"] = qkv.T
            out[q + f"attn.c_proj.{leaf}"] = t[p + f"self_attention.linear_proj.{leaf}"].T
            out[q + f"ln_2.{leaf}"] = t[p + f"mlp.linear_fc1.layer_norm_{leaf}"]
            out[q + f"mlp.c_fc.{leaf}"] = t[p + f"mlp.linear_fc1.{leaf}"].T
            out[q + f"mlp.c_proj.{leaf}"] = t[p + f"mlp.linear_fc2.{leaf}"].T
    for leaf in ("weight", "bias"):
        out[f"transformer.ln_f.{leaf}"] = t[f"decoder.final_layernorm.{leaf}"]
    if "output_layer.weight" in t:
        out["lm_head.weight"] = t["output_layer.weight"]
    return out


def _hybrid(t, layers, family, heads, groups):
    """A stack of single layers; Bamba's MLPs belong to the layer before."""
    bamba = family == "bamba"
    prefix = "model." if bamba else "backbone."
    out = {f"{prefix}{'embed_tokens' if bamba else 'embeddings'}.weight": t["embedding.word_embeddings.weight"]}
    out[f"{prefix}{'final_layernorm' if bamba else 'norm_f'}.weight"] = t["decoder.final_norm.weight"]
    out["lm_head.weight"] = t["output_layer.weight"]
    places = [(f"decoder.layers.{i}.", f"{prefix}layers.{i // 2 if bamba else i}.") for i in range(layers)]
    if "mtp.layers.0.eh_proj.weight" in t:  # one depth of attention and experts
        places += [(f"mtp.layers.0.mtp_model_layer.layers.{i}.", f"mtp.layers.{i}.") for i in range(2)]
        out |= {f"mtp.layers.0.{n}.weight": t[f"mtp.layers.0.{n}.weight"] for n in ("enorm", "hnorm", "eh_proj")}
        out["mtp.layers.1.final_layernorm.weight"] = t["mtp.layers.0.final_layernorm.weight"]
    for p, q in places:
        first = q + ("input_layernorm.weight" if bamba else "norm.weight")
        if p + "mixer.A_log" in t:
            m, to = p + "mixer.", q + ("mamba." if bamba else "mixer.")
            out[first] = t[m + "in_proj.layer_norm_weight"]
            out[to + "in_proj.weight"] = np.concatenate(
                [t[m + f"in_proj.weight.{n}"] for n in ("z", "x", "B", "C", "dt")]
            )
            for leaf in ("weight", "bias"):
                out[to + f"conv1d.{leaf}"] = np.concatenate([t[m + f"conv1d.{leaf}.{n}"] for n in "xBC"])
            out |= {to + n: t[m + n] for n in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")}
        elif p + "self_attention.linear_proj.weight" in t:
            a, to = p + "self_attention.", q + ("self_attn." if bamba else "mixer.")
            out[first] = t[a + "linear_qkv.layer_norm_weight"]
            parts = split_qkv(t[a + "linear_qkv.weight"], heads, groups)
            out |= {to + f"{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)}
            out[to + "o_proj.weight"] = t[a + "linear_proj.weight"]
        elif bamba:
            out[q + "pre_ff_layernorm.weight"] = t[p + "mlp.linear_fc1.layer_norm_weight"]
            _gated(out, t, p + "mlp.", q + "feed_forward.")
        elif p + "mlp.router.weight" not in t:
            out[first] = t[p + "mlp.linear_fc1.layer_norm_weight"]
            _plain(out, t, p + "mlp.", q + "mixer.")
        else:
            out[first] = t[p + "pre_mlp_layernorm.weight"]
            out[q + "mixer.gate.weight"] = t[p + "mlp.router.weight"]
            out[q + "mixer.gate.e_score_correction_bias"] = t[p + "mlp.router.expert_bias"]
            out |= {q + f"mixer.fc{n}_latent_proj.weight": t[p + f"mlp.fc{n}_latent_proj.weight"] for n in (1, 2)}
            for e in range(len(t[p + "mlp.router.weight"])):
                _plain(out, t, p + f"mlp.experts.{e}.", q + f"mixer.experts.{e}.")
            _plain(out, t, p + "mlp.shared_experts.", q + "mixer.shared_experts.")
    return out


def _falcon_h1(t, layers, heads, groups):
    """Mamba and attention behind one norm, then an MLP."""
    out = {"model.embed_tokens.weight": t["embedding.word_embeddings.weight"]}
    out["model.final_layernorm.weight"] = t["decoder.final_norm.weight"]
    if "output_layer.weight" in t:
        out["lm_head.weight"] = t["output_layer.weight"]
    for i in range(layers):
        p, q = f"decoder.layers.{i}.", f"model.layers.{i}."
        m, to = p + "mamba_mixer.", q + "mamba."
        out[q + "input_layernorm.weight"] = t[p + "norm.weight"]
        out[to + "in_proj.weight"] = np.concatenate([t[m + f"in_proj.weight.{n}"] for n in ("z", "x", "B", "C", "dt")])
        for leaf in ("weight", "bias"):
            out[to + f"conv1d.{leaf}"] = np.concatenate([t[m + f"conv1d.{leaf}.{n}"] for n in "xBC"])
        out |= {to + n: t[m + n] for n in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight") if m + n in t}
        a, to = p + "self_attention.", q + "self_attn."
        parts = split_qkv(t[a + "linear_qkv.weight"], heads, groups)
        out |= {to + f"{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)}
        out[to + "o_proj.weight"] = t[a + "linear_proj.weight"]
        out[q + "pre_ff_layernorm.weight"] = t[p + "mlp.linear_fc1.layer_norm_weight"]
        _gated(out, t, p + "mlp.", q + "feed_forward.")
    return out


def _plain(out, t, m, to):
    out[to + "up_proj.weight"], out[to + "down_proj.weight"] = t[m + "linear_fc1.weight"], t[m + "linear_fc2.weight"]


def _gpt_neox(t, layers):
    out = {"gpt_neox.embed_in.weight": t["embedding.word_embeddings.weight"]}
    for i in range(layers):
        p, q = f"decoder.layers.{i}.", f"gpt_neox.layers.{i}."
        for leaf in ("weight", "bias"):
            out[q + f"input_layernorm.{leaf}"] = t[p + f"self_attention.linear_qkv.layer_norm_{leaf}"]
            out[q + f"attention.query_key_value.{leaf}"] = t[p + f"self_attention.linear_qkv.{leaf}"]
            out[q + f"attention.dense.{leaf}"] = t[p + f"self_attention.linear_proj.{leaf}"]
            out[q + f"post_attention_layernorm.{leaf}"] = t[p + f"mlp.linear_fc1.layer_norm_{leaf}"]
            out[q + f"mlp.dense_h_to_4h.{leaf}"] = t[p + f"mlp.linear_fc1.{leaf}"]
            out[q + f"mlp.dense_4h_to_h.{leaf}"] = t[p + f"mlp.linear_fc2.{leaf}"]
    for leaf in ("weight", "bias"):
        out[f"gpt_neox.final_layer_norm.{leaf}"] = t[f"decoder.final_layernorm.{leaf}"]
    out["embed_out.weight"] = t["output_layer.weight"]
    return out
