"""The order of parameters: that of `named_parameters()` of real models of every kind of layer.

`golden/parameter_orders.json` holds what Megatron-LM's models list, by version and configuration: name and shape on one
rank (tests/golden/README.md says how it was made).
"""

import json
from pathlib import Path

import pytest

from converters.formats.legacy.names import local_experts, module_order, pieces
from converters.param_order import Order

ORDERS = json.loads((Path(__file__).parents[1] / "golden" / "parameter_orders.json").read_text())
CASES = [(version, config) for version, configs in ORDERS.items() for config in configs]


def _apart(name):
    stem, _, leaf = name.rpartition(".")
    if leaf == "layer_norm_weight":
        return [f"{stem.partition('.self_attention')[0]}.input_layernorm.weight"]
    return [stem.replace("_qkv_", f"_{part}_") + f".{leaf}" for part in ("q", "kv")]


@pytest.mark.parametrize(("version", "config"), CASES, ids=lambda value: value)
def test_parameters_are_in_the_order_of_the_real_model(version, config):
    shapes = {name: tuple(shape) for name, shape in ORDERS[version][config]}
    experts = local_experts(shapes, None)
    stored = {}  # canonical name -> parameter of the real model
    for name, shape in shapes.items():
        if ".linear_qkv_down_proj." in name:  # stored as two, the norm apart (multi_latent_attention.py, 2026-08)
            stored |= dict.fromkeys(_apart(name), name)
            continue
        for piece in pieces(name, shape, shapes, offset=0, first_expert=0, experts=experts):
            stored[piece.name] = name
    modules = module_order(shapes) or Order()
    biased = "mlp.experts.linear_fc1.bias0" in "".join(shapes)  # of the stand-in for TransformerEngine
    order = Order(
        modules.fused_norms,
        "weights first" if biased else modules.experts,
        conv_direct=version != "0.16.1",
        fused_down="mlafused" in config,
    )
    shuffled = sorted(stored, reverse=True)
    in_order = list(dict.fromkeys(stored[name] for name in sorted(shuffled, key=order.position)))
    assert in_order == list(shapes)
    for name in stored:  # parts of one parameter are of one parameter
        same = {other for other in stored if order.parameter(other) == order.parameter(name)}
        assert {stored[other] for other in same} == {stored[name]}
