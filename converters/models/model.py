"""What a table of a Hugging Face architecture consists of, and how it says what it cannot express."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.layer_pattern import SYMBOLS
from converters.names import printable
from converters.pickles.describe import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.megatron.model_args import ModelArgs
    from converters.models.rules import Rule

_UNKNOWN = "is not known"


class _Mark:
    """Stands for any value, or for none, in `Model.needs`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


SET = _Mark("a value")
UNSET = _Mark("none")


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        name: `model_type` of its config.json.
        architecture: Its class in transformers, for `architectures`.
        needs: Field of `ModelArgs`, or name of an option in its `extras` -> the values that the architecture can express
            (or `SET`, `UNSET`). This is both what `requires` checks and how `infer` finds the architecture of a
            checkpoint.
        settings: The architecture's own keys of config.json.
        before: Rules for what precedes the layers.
        layer: Rules for every layer.
        linear: Rules for a layer with linear attention, in place of `layer`.
        hybrid: Rules for each kind of layer of a hybrid, by its symbol (`layer_pattern.SYMBOLS`), in place of all others.
        blocks: Layers of Megatron in one of Hugging Face's; a hybrid's attention and MLP are two.
        dense: Rules for the layers without experts.
        moe: Rules for the layers with experts.
        after: Rules for what follows the layers.
        mtp: Rules for a multi-token prediction layer, beside those of a layer; empty if there is no place for one.
        mtp_last: Of those, the rules for what a hybrid has in the last layer of a depth, not in the first.
        uneven: Rules for each layer one by one, in place of all others for layers, where the layers have different sizes.
        layers: Prefix of a layer's names.
        predictions: Prefixes of what surrounds a prediction layer, and of the layer; None if those follow `layers`. A
            hybrid numbers the layers of all depths one by one.
        misfits: More that it cannot express, as sentences.
        remarks: What a person should know about an export, as sentences.
        zero_centered: Whether its norm weights are stored as gamma - 1, as Megatron may.
        facts: What keys that no other architecture has say, as fields of `ModelArgs` and names of `extras`.
        qkv_bias: The key of config.json that gives q, k and v a bias without giving the other projections one.
        aliases: Other spellings of `model_type` for the same model.
    """

    name: str
    architecture: str
    needs: Mapping[str, tuple[Any, ...]]
    settings: Callable[[ModelArgs], dict[str, Any]]
    before: tuple[Rule, ...] = ()
    layer: tuple[Rule, ...] = ()
    dense: tuple[Rule, ...] = ()
    after: tuple[Rule, ...] = ()
    moe: tuple[Rule, ...] = ()
    mtp: tuple[Rule, ...] = ()
    mtp_last: tuple[Rule, ...] = ()
    linear: tuple[Rule, ...] = ()
    hybrid: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    blocks: int = 1
    uneven: Callable[[ModelArgs], Sequence[tuple[Rule, ...]]] | None = None
    layers: str = "model.layers.{}."
    predictions: tuple[str, str] | None = None
    misfits: Callable[[ModelArgs], list[str]] = field(default=lambda args: [])
    remarks: Callable[[ModelArgs], list[str]] = field(default=lambda args: [])
    zero_centered: bool = False
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda config: {})
    qkv_bias: str = "qkv_bias"
    aliases: tuple[str, ...] = ()

    @property
    def bridge_only(self) -> bool:
        """Whether Megatron-Bridge builds it, and no argument of Megatron-LM's."""
        return "bridge_family" in self.needs

    @property
    def fixed_facts(self) -> dict[str, Any]:
        """The facts for which the architecture leaves no choice."""
        single = {name: allowed[0] for name, allowed in self.needs.items() if len(allowed) == 1}
        return {name: value for name, value in single.items() if value is not SET and value is not UNSET}

    def unexpressible(self, args: ModelArgs) -> list[str]:
        """What of a model this architecture cannot express, as sentences; empty if it fits."""
        out = [text for name, allowed in self.needs.items() if (text := _misfit(name, args.fact(name), allowed))]
        fields = args.__dataclass_fields__
        unknown = {name: value for name, value in args.extras.items() if name not in self.needs or name in fields}
        extras = ((name, describe(value, max_depth=2, max_nodes=16)) for name, value in unknown.items())
        out += [
            f"{name} = {value!r:.200} {'is not understood' if name in fields else 'changes the forward pass'}"
            for name, value in extras
        ]
        if args.rope_scaling == "yarn" and args.rope_original_max_position_embeddings is None:
            out.append("the length that yarn extends (original_max_position_embeddings) is not known")
        if self.hybrid:
            unknown_symbols = sorted({*(args.layer_pattern or "")} - self.hybrid.keys())
            out += [f"it has no layer of the kind {SYMBOLS.get(symbol, symbol)}" for symbol in unknown_symbols]
        return out if out else [*self._dense_misfits(args), *self.misfits(args)]

    def _dense_misfits(self, args: ModelArgs) -> list[str]:
        """A layer without experts in an architecture that has rules for none."""
        if not self.moe or self.dense or args.moe_layers is None or all(args.moe_layers):
            return []
        return [f"layer {args.moe_layers.index(False)} has no experts"]

    def requires(self, args: ModelArgs) -> None:
        """Checks that this architecture computes what the model computes.

        Raises:
            RequestError: It does not, or too little is known to say so.
        """
        reasons = self.unexpressible(args)
        if reasons:
            raise RequestError(
                f"{self.architecture} cannot express this model",
                details=reasons,
                hint=not_stated(reasons)
                or "without --arch and --hf-config, distckpt looks for an architecture that fits",
            )

    def config(self, args: ModelArgs, *, vocab_size: int, dtype: str) -> dict[str, Any]:
        """The whole of config.json.

        Args:
            vocab_size: Rows of the exported embedding.
            dtype: Type of the exported weights, as torch names it.
        """
        # both spellings of the type: transformers 5 writes `dtype`, 4.x and the servers of its time read `torch_dtype`
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            **self.settings(args),
            "vocab_size": vocab_size,
            "tie_word_embeddings": bool(args.tied_embeddings),
            "initializer_range": 0.02 if args.init_method_std is None else args.init_method_std,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "dtype": dtype,
            "torch_dtype": dtype,
        }


def not_stated(reasons: Sequence[str]) -> str | None:
    """What remains if a checkpoint has lost its arguments; None if it states what is needed.

    A config.json in their place would not do: it says nothing of how Megatron stores norms (gamma or gamma - 1).
    """
    if not any(reason.endswith(_UNKNOWN) for reason in reasons):
        return None
    return (
        "the training job's arguments (common.pt) are missing; convert --to safetensors keeps the weights without them"
    )


def _misfit(name: str, value: Any, allowed: tuple[Any, ...]) -> str | None:
    for choice in allowed:
        if choice is SET:
            if value is not None:
                return None
        elif choice is UNSET:
            if value is None:
                return None
        elif value == choice and type(value) is type(choice):
            return None
    if value is None:
        return f"{name} {_UNKNOWN}"
    return f"{name} is {printable(str(value))}, but it takes {' or '.join(map(str, allowed))}"
