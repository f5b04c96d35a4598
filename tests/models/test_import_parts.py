"""`import-hf --part text`: the language model of models of text and images, as transformers' own classes save them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from converters import Layout
from converters.errors import RequestError
from converters.models.text_part import _SAME
from converters.transformers_config import class_keys
from harness.cli_support import here
from harness.imports import exported, imported

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
SIGHT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
CLIP = {"model_type": "clip_vision_model", "patch_size": 8} | SIGHT
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 48, "num_heads": 2, "patch_size": 4}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
CASES = {
    "llava": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": CLIP, "image_token_index": 250},
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 10},
        "vision_config": {"model_type": "pixtral", **SIGHT, "patch_size": 8, "head_dim": 8},
        "image_token_index": 250,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 4},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": TOWER | {"fullatt_block_indexes": [0]},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "head_dim": 10,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 1], "mrope_interleaved": True},
        },
        "vision_config": TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": SIGHT | {"image_size": [16, 16], "patch_size": [8, 8]},
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 10, "sliding_window": 8},
        "vision_config": SIGHT | {"model_type": "siglip_vision_model", "patch_size": 8},
        "mm_tokens_per_image": 4,
    },
    "idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGHT | {"patch_size": 8}},
}
FAMILY = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral", "qwen3_vl": "qwen3", "idefics3": "llama"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Function that returns a case's folder and its logits for some tokens; each is made once."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def make(name):
        if name not in made:
            torch.manual_seed(3)
            model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**CASES[name])).eval()
            with torch.no_grad():
                for key, value in model.named_parameters():
                    value.copy_(
                        1.0 + 0.1 * torch.randn(value.shape) if "norm" in key else 0.15 * torch.randn(value.shape)
                    )
                logits = model.tie_weights() or model(input_ids=tokens()).logits
            model.save_pretrained(root / name)
            made[name] = root / name, logits
        return made[name]

    return make


def tokens():
    return torch.arange(3, 3 + 22).reshape(2, 11) * 7 % 240


@pytest.mark.parametrize("name", CASES)
def test_the_language_model_computes_the_same(name, whole, tmp_path):
    folder, logits = whole(name)
    plan = imported(folder, tmp_path / "start", Layout(tp=2), part="text")
    exported(tmp_path / "start", tmp_path / "back")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert model.config.model_type == FAMILY.get(name, "qwen2")
    with torch.no_grad():
        assert (model(input_ids=tokens()).logits - logits).abs().max() < 1e-5
    stored = load_file(folder / "model.safetensors")
    dropped = {drop["tensor"] for drop in plan.facts["dropped"] if "--part text" in drop["reason"]}
    assert dropped == {key for key in stored if "vis" in key or "projector" in key or "connector" in key}
    own = load_file(tmp_path / "back" / "model.safetensors")
    bits = sorted(value.numpy().tobytes() for key, value in stored.items() if key not in dropped)
    assert sorted(value.numpy().tobytes() for value in own.values()) == bits
    done = here("diff", folder, tmp_path / "start")
    assert (done.code, f"A is a {name}: its language model" in done.err) == (0, True), done


def test_language_models_with_a_class_of_their_own_have_no_key_of_their_own():
    """But for positions, which `text_part` looks at: none that would change what the family computes is overlooked."""
    for own, family in _SAME.items():
        assert class_keys(own) <= class_keys(family)


def test_a_flat_config_json_of_an_earlier_version(whole, tmp_path):
    """Qwen2-VL's own files have the text's keys beside `vision_config`."""
    folder, _ = whole("qwen2_vl")
    document = json.loads((folder / "config.json").read_text())
    flat = {**document.pop("text_config"), **document, "model_type": "qwen2_vl"}
    flat["rope_scaling"] = flat.pop("rope_parameters")
    flat["rope_theta"] = flat["rope_scaling"].pop("rope_theta")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(flat))
    (tmp_path / "hf" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    facts = [imported(f, tmp_path / f.parent.name, part="text").facts for f in (folder, tmp_path / "hf")]
    assert facts[0]["arguments"].replace(folder.parent.name, "") == facts[1]["arguments"].replace(tmp_path.name, "")


def test_an_output_layer_that_is_stored_is_not_tied_away(whole, tmp_path):
    """Mistral 3's class ties by default, but where the files hold two matrices it does not."""
    folder, _ = whole("mistral3")
    (tmp_path / "hf").mkdir()
    document = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(document))
    (tmp_path / "hf" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    plan = imported(tmp_path / "hf", tmp_path / "start", part="text")
    assert "output_layer.weight" in plan.facts["targets"]


def test_what_has_no_text_part_or_an_unknown_one_is_refused(whole, tmp_path):
    folder, _ = whole("llava")
    with pytest.raises(RequestError, match="a llava is a model of text and images") as caught:
        imported(folder, tmp_path / "out")
    assert "--part text" in caught.value.hint
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    (spoilt / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors") | {"speech.weight": torch.zeros(2)}, spoilt / "model.safetensors")
    with pytest.raises(RequestError, match="neither of its language model nor of a known part"):
        imported(spoilt, tmp_path / "out", part="text")
    document = json.loads((folder / "config.json").read_text())
    text = document["text_config"] | {"model_type": "olmo2"}
    (spoilt / "config.json").write_text(json.dumps({**document, "text_config": text}))
    with pytest.raises(RequestError, match="a olmo2 is not imported"):
        imported(without_speech(spoilt), tmp_path / "out", part="text")
    (spoilt / "config.json").write_text(json.dumps(document["text_config"]))
    with pytest.raises(RequestError, match="no model of text and images"):
        imported(spoilt, tmp_path / "out", part="text")
    assert here("import-hf", folder, tmp_path / "out", "--part", "vision").code == 2
    assert not (tmp_path / "out").exists()


def without_speech(folder):
    stored = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in stored.items() if "speech" not in key}, folder / "model.safetensors")
    return folder
