"""Models and layouts of jobs whose ranks are compared with those of the real megatron-core."""

from __future__ import annotations

from converters.megatron.layout import Layout

BASE = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "add_bias_linear": True,
    "tied": False,
    "vocab": 128,
}
PLAIN = BASE | {"gated_linear_unit": False, "tied": True, "softmax_type": "learnable"}
MOE = BASE | {
    "normalization": "RMSNorm",
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "add_bias_linear": False,
}
MLA = BASE | {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "num_query_groups": 8,
    "add_bias_linear": False,
}
MTP = BASE | {"mtp_num_layers": 2, "add_bias_linear": False}
JOBS = {
    "tp2 pp2 vpp2 cp2 dp2": (Layout(tp=2, pp=2, vpp=2, cp=2, dp=2), BASE),
    "more ranks than groups": (Layout(tp=8), BASE),
    "one rank": (Layout(), PLAIN),
    "tied": (Layout(tp=2, pp=4), PLAIN),
    "tied, mapped": (Layout(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp"), PLAIN),
    "uneven": (Layout(tp=2, pp=4, first_layers=3, last_layers=1), BASE),
    "uneven vpp": (Layout(pp=3, vpp=2, first_layers=4), BASE),
    "ends counted": (Layout(pp=5, account_for_embedding=True, account_for_loss=True), BASE),
    "experts": (Layout(tp=2, ep=2, dp=2), MOE),
    "experts whole": (Layout(tp=2, ep=2, etp=1, dp=2, pp=2), MOE),
    "experts cut more": (Layout(tp=1, ep=2, etp=2, dp=4), MOE),
    "experts vpp cp": (Layout(pp=2, vpp=2, cp=2, ep=4, dp=2), MOE),
    "mla": (Layout(tp=4, pp=2), MLA),
    "mtp": (Layout(tp=2, pp=2, dp=2), MTP),
    "mtp one stage": (Layout(tp=2), MTP),
    "mtp apart": (Layout(pp=4, vpp=None, pp_layout="Et*5|t*3|mm|L"), MTP),
    "letters": (Layout(pp=2, vpp=2, tp=2, pp_layout="Et*3|tt|tt|tL"), BASE),
}
