"""No key of a config.json is ignored: changed one at a time, each changes Megatron's arguments, is refused, or is neutral.

That a key is neutral is not believed either: the model's logits are compared, bit for bit, with and without the change.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import Layout
from converters.errors import DistckptError, RequestError
from converters.megatron.bridge_section import beyond_provider, provider_section
from converters.megatron.megatron_flags import VERSIONS, command_line, inexpressible, lost_facts, model_arguments
from converters.models import ARCHITECTURES, by_name
from converters.models.config_check import NEUTRAL, find_departures
from converters.models.stated import stated
from converters.transformers_config import CLASSLESS, completed
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from harness import import_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore")

# keys that a rule reads together with others; what is changed below does not change their meaning
READ_WITH_OTHERS = {
    "max_window_layers": "there is no window",
    "sliding_window": "there is no window",
    "head_dim": "set by the class from others",
    "qk_head_dim": "set by the class from others",
    "chunk_size": "how many steps Mamba's kernel takes at once: the same mathematics, rounded otherwise",
    "mamba_chunk_size": "the same",
    "mamba_norm_before_gate": "there is no norm",
}


def understood(name, config):
    """Megatron's arguments for a configuration.

    Raises:
        DistckptError: It is refused.
    """
    model = by_name(cases.family(name))
    whole = completed(model.name, {"model_type": model.name, **config})
    args = stated(model, whole, biased=False)
    refused = [*find_departures(model, args, whole), *model.unexpressible(args)]
    if model.bridge_only:
        said = provider_section(args)
        refused += [*beyond_provider(args), *lost_facts(args, said, "config")]
    else:
        said = model_arguments(args)
        version = "0.16" if name == "deepseek_v2" else "0.19"  # which one of them cannot build
        refused += [*inexpressible(args, version), *lost_facts(args, said)]
    if refused:
        raise DistckptError(refused[0])
    return said | {"vocab_size": args.vocab_size, "tied": args.tied_embeddings}


def others(value):
    """Values of another meaning, of the same type where there is one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value - 1, 1)]
    if isinstance(value, float):
        return [value + 0.25, value * 2 + 1]
    if isinstance(value, str):
        return ["relu", "something"]
    if isinstance(value, list):
        return [value[:-1], [0], ["sliding_attention"] * 3]
    return [1, 3, True, 0.5, "x", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}]


def changes(name):
    """Every key of a case's whole configuration with every other value that its class takes."""
    own = completed(cases.family(name), {"model_type": cases.family(name), **cases.settings(name)})
    for key, value in own.items():
        if key == "rope_parameters" and "rope_scaling" in cases.settings(name):
            continue  # its older spelling is given, and goes before it
        for other in others(value):
            one_group = key in ("n_group", "topk_group") and (other, value) == (1, None)
            if other != value and not one_group:
                yield key, other


@pytest.mark.parametrize("name", cases.CASES)
def test_no_key_is_ignored(name):
    own = cases.settings(name)
    before = understood(name, own)
    ignored = {}
    for key, value in changes(name):
        try:
            if understood(name, {**own, key: value}) == before:
                ignored.setdefault(key, []).append(value)
        except DistckptError:
            continue
    assert set(ignored) - NEUTRAL - READ_WITH_OTHERS.keys() == set()


def older(name, take, **give):
    """A case as files from before transformers 5 spell it: without some keys, with others."""
    return name, {key: value for key, value in cases.settings(name).items() if key not in take} | give


OLDER = [
    (*older("glm4_moe", (), rope_scaling=None, rope_theta=1000000), {"rotary_percent": 0.4, "rotary_base": 1000000}),
    (*older("glm", ("partial_rotary_factor",)), {"rotary_percent": 0.5, "rotary_interleaved": True}),
    (
        *older("qwen3_next", ("layer_types",), full_attention_interval=3),
        {"linear_attention_freq": [1, 1, 0], "attention_output_gate": True, "apply_layernorm_1p": True},
    ),
    (
        *older("nemotron_h", ("layers_block_type",), hybrid_override_pattern="ME*-E"),
        {"hybrid_override_pattern": "ME*-E", "num_layers": 5, "position_embedding_type": "none"},
    ),
    (
        *older("smollm3", ("no_rope_layers",), no_rope_layer_interval=2),
        {"no_rope_freq": [0, 1, 0]},
    ),
    (
        *older("gpt_oss", ("rope_parameters",), rope_theta=150000, rope_scaling=cases.YARN | {"truncate": False}),
        {"position_embedding_type": "yarn", "yarn_correction_range_round_to_int": False, "quick_geglu": True},
    ),
    (*older("phi3", ("partial_rotary_factor",)), {"rotary_percent": 1.0, "window_size": (6, 0)}),
]


@pytest.mark.parametrize(("name", "own", "wanted"), OLDER, ids=[row[0] for row in OLDER])
def test_older_spellings_are_understood(name, own, wanted):
    found = understood(name, own)
    assert {key: found[key] for key in wanted} == wanted


REFUSED = [
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}}, "longrope"),
    ("granite", {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
    ("nemotron_h", {"layer_norm_epsilon": 1e-6}, "epsilon"),
    ("nemotron_h", {"time_step_min": 0.01}, "time_step_min is 0.01"),
    ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias is False"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias"),
    ("falcon_h1_norm", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate is True"),
    ("falcon_h1", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ("falcon_h1", {"mamba_d_conv": 3}, "mamba_d_conv is 3"),
    ("falcon_h1_norm", {"rms_norm_eps": 1e-6}, "epsilon of Megatron's Mamba norms"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_a_variant_that_cannot_be_built_is_refused_by_its_key(name, change, said):
    own = {key: value for key, value in cases.settings(name).items() if key != "partial_rotary_factor"}
    with pytest.raises(DistckptError, match=said):
        understood(name, {**own, **change})


ROPE = [
    ("llama", {"rope_theta": 20000.0}),
    ("llama31", {"factor": 4.0}),
    ("llama31", {"low_freq_factor": 2.0}),
    ("llama31", {"original_max_position_embeddings": 4096}),
    ("llama31", {"rope_type": "default"}),
    ("deepseek_v3_yarn", {"factor": 2.0}),
    ("deepseek_v3_yarn", {"beta_fast": 16.0}),
    ("deepseek_v3_yarn", {"beta_slow": 2.0}),
    ("deepseek_v3_yarn", {"mscale": 0.5}),
    ("deepseek_v3_yarn", {"mscale_all_dim": 0.5}),
    ("deepseek_v3_yarn", {"attention_factor": 1.5}),
    ("deepseek_v3_yarn", {"truncate": False}),
    ("nemotron", {"partial_rotary_factor": 0.25}),
    ("gpt_neox", {"partial_rotary_factor": 1.0}),
]


@pytest.mark.parametrize(("name", "change"), ROPE, ids=str)
def test_no_part_of_a_rotary_embedding_is_ignored(name, change):
    own = cases.settings(name)
    before = understood(name, own)
    kind = cases.family(name)
    parameters = completed(kind, {"model_type": kind, **own})["rope_parameters"]
    kept = {
        k: v for k, v in own.items() if k not in ("rope_scaling", "rope_theta", "rotary_pct", "partial_rotary_factor")
    }
    assert understood(name, {**kept, "rope_parameters": parameters}) == before
    try:
        after = understood(name, {**kept, "rope_parameters": {**parameters, **change}})
    except DistckptError:
        return
    assert after != before


def logits(name, **more):
    model = cases.model(name, dtype=torch.float32, **more)
    tokens = torch.randint(0, 251, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, return_dict=True).logits


# these change what from_config builds, or are of the class and not of a model
UNTRIED = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "return_dict", "is_decoder"}
UNTRIED |= {"rescale_prenorm_residual"}  # of a new model's weights: it draws other random numbers


# their neutral keys are those of llama, mixtral and nemotron_h
ALIKE = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granite", "granitemoe", "glm4_moe_lite", "dots1"}
ALIKE |= {"falcon_h1", "exaone4", "gemma", "gemma3_text", "olmoe", "minimax_m2"}
ALIKE |= {"ernie4_5", "arcee", "glm", "ministral", "qwen3", "qwen3_moe", "deepseek_v2"}
CLASSES = [model.name for model in ARCHITECTURES if model.name not in CLASSLESS]
TRIED = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in CLASSES]


@pytest.mark.parametrize("name", TRIED)
def test_neutral_keys_do_not_change_the_logits(name):
    before = logits(name)
    own = completed(name, {"model_type": name, **cases.settings(name)})
    tried = 0
    for key in sorted(NEUTRAL & own.keys() - UNTRIED):
        for other in others(own[key])[:1]:
            try:
                after = logits(name, **{key: other})
            except Exception:  # the class does not take it
                continue
            tried += 1
            assert torch.equal(before, after), key
    assert tried > 8


def test_every_architecture_has_a_case():
    assert {cases.family(name) for name in cases.CASES} == {model.name for model in ARCHITECTURES}


def test_what_a_version_cannot_build_is_refused_for_it():
    """A norm that Megatron-Core 0.19 has before queries without a rank; experts with biases, which need a flag."""
    latent = by_name("deepseek_v2")
    args = [
        stated(latent, completed("deepseek_v2", {"model_type": "deepseek_v2", **cases.settings(name)}), biased=False)
        for name in ("deepseek_v2", "deepseek_v2_q_lora")
    ]
    assert [[bool(inexpressible(one, version)) for version in VERSIONS] for one in args] == [
        [False, True],
        [False, False],
    ]
    own = completed("gpt_oss", {"model_type": "gpt_oss", **cases.settings("gpt_oss")})
    words = command_line(model_arguments(stated(by_name("gpt_oss"), own, biased=False)))
    assert "--no-bias-dropout-fusion" in words


@pytest.mark.parametrize(
    ("name", "base", "options"),
    [
        ("llama", {}, {"rope_parameters": {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000.0}}),
        ("falcon_h1", {"mamba_norm_before_gate": False}, {"mamba_norm_before_gate": True}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}, {"n_group": 3, "topk_group": 3}),
        (
            "deepseek_v2",
            {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 3},
        ),
    ],
)
def test_options_that_change_nothing_are_not_refused(name, base, options):
    own = cases.settings(name)
    assert torch.equal(logits(name, **base), logits(name, **options))
    assert understood(name, own | base) == understood(name, own | options)


REFUSED_BEFORE_TENSORS = [
    ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias is False"),
    ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias is False"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "no layer has experts"),
    ("deepseek_v3", {"n_shared_experts": 0}, "there is no shared expert"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        "Megatron-Bridge only",
    ),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED_BEFORE_TENSORS)
def test_what_megatron_lacks_is_named_before_tensors_are_missed(name, change, said, tmp_path):
    cases.save(name, tmp_path / "src", **change)
    with pytest.raises(RequestError, match=said):
        plan_import(tmp_path / "src", tmp_path / "out", Layout(), ImportOptions(mcore="0.19"))


def test_an_embedding_that_only_its_output_layer_stores_is_named(tmp_path):
    cases.save("llama", tmp_path / "src", tie_word_embeddings=True)
    weights = load_file(tmp_path / "src" / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "src" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"ties lm_head.weight to model.embed_tokens.weight"):
        plan_import(tmp_path / "src", tmp_path / "out", Layout())
