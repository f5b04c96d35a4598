"""Checkpoints of modern training configurations: every command answers right, or refuses by name.

The truth of their states is what Megatron wrote from the same memory in whole tensors (see golden/README.md), read by
torch's own reader. That `verify` finds nothing in them stands in test_verify_damage.py, with all others.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from distckpt_cli.app import main
from harness.checkpoints import golden, tree, truth
from harness.reshard_cases import STATES, by_parameter, folder_of, read_with_torch
from harness.support import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Modern:
    """A golden checkpoint.

    Attributes:
        truth: a config of golden/truth, or the golden checkpoint that holds the same state in whole tensors.
        said: what `inspect` must say of it: of the model, of the optimizer.
        layout: another layout, of more or fewer ranks.
    """

    truth: str
    said: tuple[str, ...]
    layout: str = "--pp 2"


MUON = "muonM_full_tp2dp2"
PAO = "precision-aware Adam: master weights as (fp32, or as )?remainders of the weights"
CASES = {
    "dropM_dpr_tp2dp2": Modern("drop", ("llama", "dp_reshardable")),
    "gdn16_dpr_tp2dp2": Modern("gdn", ("gated delta net in 1 of 2", "dp_reshardable")),
    "hy16_dpr_tp2dp2": Modern("hybrid", (r"hybrid M\*-M: 2 Mamba, 1 attention, 1 MLP", "dp_reshardable")),
    "hymoe16_full_tp2ep2": Modern("", (r"hybrid M\*EM: 2 Mamba, 1 attention, 1 MoE",), "--tp 2"),
    "hymoeM_full_tp2ep2": Modern("", (r"hybrid M\*EM: 2 Mamba, 1 attention, 1 MoE",)),
    "lionM_dpr_tp2dp2": Modern("lion", ("llama", "Lion")),
    "llava16_full_tp2dp2": Modern("", ("LLaVA: llama language model", "vision tower"), "--tp 1"),
    "mb_lora": Modern("", ("qwen3", "LoRA of rank 4 on linear_proj, linear_qkv"), "--tp 2"),
    "mb_qwen3": Modern("", ("qwen3", "Megatron-Bridge"), "--tp 2"),
    "muon16_tp2dp2": Modern("", ("llama", "Muon")),
    "muon16p_tp2": Modern("", ("llama", "Muon")),
    "muonM_full_tp2dp2": Modern("", ("llama", "Muon"), "--tp 4"),
    "muonM_tp2dp2": Modern(MUON, ("llama", "Muon")),
    "muonleg16_tp2dp2": Modern("muon16_tp2dp2", ("llama", "legacy", "Muon")),
    "muonmoeM_tp2ep2": Modern("muon_moe", ("4 experts", "Muon")),
    "pao14_fsm_dp2": Modern("pao", ("llama", PAO)),
    "pao16_dpr_tp2dp2": Modern("pao", ("llama", PAO)),
    "pao16_full_tp2dp2": Modern("pao", ("llama", PAO)),
    "paoM_dpr_dp2": Modern("pao", ("llama", PAO), "--tp 2"),
    "sgd16_tp2": Modern("", ("llama", "SGD")),
    "tied16_dpr_pp2dp2": Modern("tied", ("qwen2", "dp_reshardable"), "--tp 2 --pp 1"),
}


def cli(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def states(folder: Path) -> dict[str, np.ndarray]:
    """Weights and states by parameter, as torch reads them; both names of a master weight are one."""
    return by_parameter({key: value for key, value in read_with_torch(folder).items() if "rng_state" not in key})


def expected(name: str) -> dict[str, np.ndarray]:
    """`model/NAME` and `STATE/NAME` of a golden checkpoint, the vocabulary without padding."""
    config = CASES[name].truth
    if config == "" or config in CASES:
        values = states(golden(config or name))
    else:
        kinds = {wanted: state for state, wanted in STATES.items()}
        values = {}
        for key, value in truth(config).items():
            kind, parameter = key.split("/", 1)
            if ".rotary_pos_emb." not in parameter:
                values[f"{kinds.get(kind, kind)}/{parameter}"] = value
    if CASES[name].truth == "" and "pao" in name:
        raise AssertionError("remainders are no truth")
    return unpadded(values)


def unpadded(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value[:120] if key.endswith(VOCABULARY) else value for key, value in values.items()}


@pytest.mark.parametrize("name", CASES)
def test_inspect_says_what_it_is(name):
    code, out, _ = cli("inspect", GOLDEN / name)
    assert code == 0
    head = out.partition("COMPONENT")[0]
    for text in CASES[name].said:
        assert re.search(text, head), head
    assert not re.search(r"^(error|warning) ", out, re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_reshard_keeps_every_bit(name, tmp_path):
    source, into = GOLDEN / name, tmp_path / "out"
    code, _, err = cli("reshard", source, into, *CASES[name].layout.split(), "--progress", "off")
    assert code == 0, err
    result, wanted = unpadded(states(folder_of(into))), expected(name)
    assert result.keys() == wanted.keys()
    different = [key for key, value in wanted.items() if not np.array_equal(result[key], value)]
    assert different == []
    code, out, err = cli("verify", into, "--values", "-q", "--progress", "off")
    assert code == 0, out + err
    code, out, err = cli("diff", source, into, "--progress", "off")
    assert code == 0, out + err


# torch_dist is what reshard writes, too
@pytest.mark.parametrize(
    "target", ["legacy", "torch", "safetensors", pytest.param("torch_dist", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_convert_carries_all_or_refuses_by_name(name, target, tmp_path):
    source, into = GOLDEN / name, tmp_path / ("out.pt" if target == "torch" else "out")
    code, _, err = cli("convert", source, into, "--to", target, "--progress", "off")
    if code:
        assert code == 4, err
        assert re.match(r"error: .*\w{4,}", err)
        assert list(tmp_path.iterdir()) == []
        return
    if target in ("legacy", "torch_dist"):
        code, out, err = cli("verify", into, "--values", "-q", "--progress", "off")
        assert code == 0, out + err
    weights_only = ["--ignore", "optimizer"] if target == "safetensors" else []
    code, out, err = cli("diff", source, into, *weights_only, "--progress", "off")
    assert code == 0, out + err


def test_the_source_is_left_as_it_was(tmp_path):
    before = tree(GOLDEN / "muon16p_tp2")
    assert cli("reshard", GOLDEN / "muon16p_tp2", tmp_path / "out", "--tp", "1", "--progress", "off")[0] == 0
    assert tree(GOLDEN / "muon16p_tp2") == before
