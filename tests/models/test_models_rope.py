"""Scaled rotary embeddings: transformers computes from our config.json the angles that Megatron-Core computes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converters import models
from converters.megatron.model_args import ModelArgs
from converters.models.export import map_to_hf
from harness import model_cases as cases

# a Bridge configuration: it can set every number, where Megatron-LM's command line ignores some
CONFIG = {
    "num_layers": 3, "hidden_size": 384, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 64,
    "ffn_hidden_size": 40, "vocab_size": 50, "seq_length": 32, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
    "gated_linear_unit": True, "activation_func": "silu", "share_embeddings_and_output_weights": False,
    "add_bias_linear": False, "rotary_base": 150000, "position_embedding_type": "rope",
}  # fmt: skip


def yarn(factor, original, mscale, all_dim, fast=32.0, slow=1.0):
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_beta_fast": fast,
        "yarn_beta_slow": slow,
    }


SCALINGS = {
    "none": {},
    "linear": {"seq_len_interpolation_factor": 2.0},
    "llama3": {"rope_scaling": True, "rope_scaling_factor": 32.0},
    "yarn": yarn(4.0, 16, 1.0, 0.0),
    "yarn-both-mscales": yarn(40.0, 4096, 0.8, 0.5),
    "yarn-mscale-alone": yarn(40.0, 4096, 0.8, 0.0),
    "yarn-no-mscale": yarn(8.0, 32768, None, None),
    "yarn-betas": yarn(32.0, 4096, 1.0, 1.0, 16.0, 2.0),
}
MEGATRON = """
import json, sys
import numpy as np, torch
torch.cuda.current_device = lambda: "cpu"
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

class Alone:
    def size(self):
        return 1

out = {}
for name, c in json.loads(sys.argv[1]).items():
    common = dict(rotary_base=c["rotary_base"], use_cpu_initialization=True, cp_group=Alone())
    if c.get("position_embedding_type") == "yarn":
        names = ("original_max_position_embeddings", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        numbers = {n: c["yarn_" + n] for n in names}
        rope = YarnRotaryEmbedding(c["kv_channels"], scaling_factor=c["yarn_rotary_scaling_factor"], **numbers, **common)
        angles, scale = rope.get_emb(100)
    else:
        names = ("seq_len_interpolation_factor", "rope_scaling", "rope_scaling_factor")
        rope = RotaryEmbedding(c["kv_channels"], 1.0, **{n: c[n] for n in names if n in c}, **common)
        angles, scale = rope.get_emb(100), 1.0
    out[name + ".angles"], out[name + ".scale"] = angles[:, 0, 0, :32].numpy(), np.float64(scale)
np.savez(sys.argv[2], **out)
"""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """The angles and the factor on their cosine, by name of the scaling."""
    path = tmp_path_factory.mktemp("rope") / "angles.npz"
    wanted = json.dumps({name: CONFIG | changes for name, changes in SCALINGS.items()})
    subprocess.run([sys.executable, "-W", "ignore", "-c", MEGATRON, wanted, str(path)], check=True, capture_output=True)
    return np.load(path)


@pytest.mark.megatron
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_megatrons(name, megatron):
    args = cases.case("llama", hidden_size=384, kv_channels=64)
    catalog = cases.make_catalog(cases.megatron_shapes(args), None, CONFIG | SCALINGS[name])
    config = map_to_hf(catalog, ModelArgs.from_catalog(catalog), models.by_name("llama")).config
    hf = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    if name == "none":
        frequencies, scale = 1.0 / 150000 ** (torch.arange(0, 64, 2).float() / 64), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf, "cpu")
    angles = torch.outer(torch.arange(100.0), frequencies).numpy()
    np.testing.assert_allclose(angles, megatron[f"{name}.angles"], rtol=1e-6)  # equal bits here; other CPUs may round
    assert scale == pytest.approx(float(megatron[f"{name}.scale"]), rel=1e-12)
