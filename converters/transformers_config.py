"""config.json as transformers' own class reads it: what a file leaves out is what the class says, old spellings are new.

Nothing of a model's own code is looked at: `auto_map` is left out before. With torch, transformers' configurations take
three seconds of a processor and 330 MiB; without it one second and 65 MiB, which is all that they need. As transformers
finds out once in a process whether torch is there, they are asked for in a process of their own, unless this one has
imported transformers already.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

CODE_KEYS = ("auto_map", "trust_remote_code")
"""What makes transformers look for code beside a model."""

READ_AS = {"mimo": "qwen2"}
"""`model_type`s without a class in transformers -> one whose class reads their keys; MiMo's trunk is a Qwen2."""

CLASSLESS: dict[str, dict[str, Any]] = {
    "bailing_moe_v2": {
        "vocab_size": 157184,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "use_qkv_bias": False,
        "use_bias": False,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "output_dropout": 0.0,
        "use_cache": True,
        "rope_theta": 600000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
    },
    "nemotron-nas": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "block_configs": [],
    },
}
"""`model_type`s without a class in transformers -> what a key that the file leaves out stands for.

Source: configuration_bailing_moe_v2.py beside inclusionAI/Ling-mini-2.0, and what modeling_bailing_moe_v2.py computes for
keys that it does not look at; configuration_decilm.py beside nvidia/Llama-3_3-Nemotron-Super-49B-v1, a Llama's.
"""

_FLOATS = ("Infinity", "-Infinity", "NaN")
_SERVER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[1:]
sys.modules["torch"] = None
answers, sys.stdout = sys.stdout, sys.stderr  # whatever an import prints is no answer
from converters.transformers_config import from_transformers
for line in sys.stdin:
    answers.write(json.dumps(from_transformers(*json.loads(line)), default=str) + chr(10))
    answers.flush()
"""


def completed(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration that a config.json stands for.

    Args:
        name: A `model_type` that transformers has a class for, or of `READ_AS` or `CLASSLESS`.
        config: Content of config.json.

    Raises:
        FormatError: transformers does not take it.
    """
    plain = {key: _number(value) for key, value in config.items() if key not in CODE_KEYS}
    answer = _answer(name, {**plain, "model_type": name})
    if "error" in answer:
        raise FormatError(
            f"transformers does not take this config.json as a {printable(name)}",
            details=[printable(" ".join(answer["error"].split()))[:400]],
        )
    return dict(answer["config"])


def _number(value: Any) -> Any:
    """What transformers 5 writes as `{"__float__": "Infinity"}`, which JSON has no number for."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in _FLOATS:
        return float(value["__float__"])
    return value


def class_keys(name: str) -> frozenset[str]:
    """The keys that a `model_type`'s class has."""
    return frozenset(_answer(name, None)["config"])


def _answer(name: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `from_transformers` returns, of the process that has it."""
    if "transformers" in sys.modules or not sys.executable:
        return from_transformers(name, config)
    process = _server(os.getpid())
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([name, config]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise FormatError(
            "transformers cannot be imported", hint="python -c 'from transformers import CONFIG_MAPPING' says why"
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


def start() -> None:
    """Starts the process that imports transformers, which it does while this process does other things."""
    if "transformers" not in sys.modules and sys.executable:
        _server(os.getpid())


@functools.cache
def _server(_process: int) -> subprocess.Popen[str]:
    """The process that imports transformers without torch, for one process; it has no state to lose."""
    # -P: nothing comes from the current folder, which may be the one that is imported
    command = [sys.executable, "-P", "-c", _SERVER, *filter(None, sys.path)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()  # it may still be importing
    server.communicate()


def _without_class(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What `from_transformers` returns for a `model_type` of `CLASSLESS`."""
    for key, value in config.items():
        default = defaults.get(key, value)
        kinds = dict if default is None else (int, float) if isinstance(default, float) else type(default)
        if value is not None and not isinstance(value, kinds):
            return {"error": f"{key} is {value!r}"}
    return {"config": {**defaults, **config}}


def from_transformers(name: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Asks transformers, in this process.

    Args:
        name: A `model_type`.
        config: Content of config.json; None asks for the defaults of the class.

    Returns:
        {"config": ...}, or {"error": text} where transformers does not take it.
    """
    if name in CLASSLESS:
        return _without_class(CLASSLESS[name], config or {})
    import logging

    from transformers import CONFIG_MAPPING
    from transformers.utils.logging import get_verbosity, set_verbosity

    before = get_verbosity()
    set_verbosity(logging.ERROR)  # the warnings about a configuration are for the one who loads the model
    try:
        kind = CONFIG_MAPPING[READ_AS.get(name, name)]
        return {"config": dict((kind() if config is None else kind.from_dict(dict(config))).to_dict())}
    except Exception as error:  # noqa: BLE001  # whatever a class raises about what it does not take
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        set_verbosity(before)
