"""What the transformers library makes of a config.json: the tensors that its model has, by name and shape.

The model is built on torch's meta device, so it takes seconds and no memory for elements. Nothing is downloaded or run but
transformers itself: what a config.json says of code and kernels is left out.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.models.described import COMPUTED, HEADS
from converters.names import printable
from converters.transformers_config import CODE_KEYS, READ_AS

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = (*CODE_KEYS, "quantization_config", "implementation", "kernel")


def saved_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that `save_pretrained` of a model of this configuration would write, by name.

    Args:
        config: Contents of config.json. The caller has made sure that it describes no more layers than it should.

    Raises:
        RequestError: transformers does not take it.
    """
    import torch
    import transformers

    library: Any = transformers  # its classes are not annotated
    library.logging.set_verbosity_error()
    plain = {key: value for key, value in config.items() if not any(code_key in key for code_key in _CODE)}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            plain["model_type"] = READ_AS.get(plain.get("model_type", ""), plain.get("model_type"))
            model_config = library.AutoConfig.for_model(**plain)
            model = library.AutoModelForCausalLM.from_config(model_config, attn_implementation="eager")
            state = _as_in_files(model)
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        raise RequestError(
            f"transformers {transformers.__version__} does not take this config.json: {printable(cause)}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _as_in_files(model: Any) -> Mapping[str, Any]:
    """A model's tensors under the names of its files; from 5.0 on a model may keep experts fused that files keep apart."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return dict(model.state_dict())
    return dict(revert_weight_conversion(model, model.state_dict()))


def unlike_transformers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What transformers would miss of some tensors, or finds of another shape; one sentence each.

    Args:
        config: Contents of config.json.
        shapes: The tensors.

    Raises:
        RequestError: transformers does not take the configuration.
    """
    out = []
    for name, shape in saved_shapes(config).items():
        if name not in shapes and name not in HEADS and not name.endswith(COMPUTED):
            out.append(f"{printable(name)} of {list(shape)} is missing")
        elif name in shapes and shapes[name] != shape:
            out.append(f"{printable(name)} is {list(shapes[name])}, transformers has {list(shape)}")
    return out
