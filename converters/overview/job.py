"""The flags of a training job, as far as they decide whether it loads a checkpoint; what is found about that."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--decoder-first-pipeline-num-layers": "first_layers",
    "--decoder-last-pipeline-num-layers": "last_layers",
    **{f"--{name}": name for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")},
}
_ROWS = {
    "--vocab-size": "vocab_size",
    "--padded-vocab-size": "padded",
    "--make-vocab-size-divisible-by": "divisible",
}
_TOKENIZER = {"--tokenizer-type": "tokenizer_type", "--tokenizer-model": "tokenizer_model"}
_NUMBERS = {**_SIZES, **_ROWS}
_WORDS = {
    "--pipeline-model-parallel-layout": "pp_layout",
    "--ckpt-format": "format",
    "--mcore": "mcore",
    **_TOKENIZER,
}
_SWITCHES = (
    "--use-distributed-optimizer",
    "--use-precision-aware-optimizer",
    "--no-load-optim",
    "--no-load-rng",
    "--finetune",
    "--use-checkpoint-args",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
)
# where no flag says a size, a job has 1 (validate_args of megatron/training/arguments.py, core_v0.16.1)
DEFAULTS = ("tp", "pp", "cp", "ep")
"""Sizes of a layout that are 1 where no flag says them."""
STAGES = ("vpp", "first_layers", "last_layers", "pp_layout")
"""Sizes that divide the layers among pipeline stages; None where no flag says them."""


@dataclass(frozen=True)
class Job:
    """The flags of a job, as far as they matter.

    Attributes:
        sizes: Sizes of the layout that the flags give, by the names of `Layout`.
        switches: Flags without a value.
        mcore: Version of Megatron-Core, as (0, 16); None if no flag says.
        format: `--ckpt-format`; None if no flag says.
        unread: Words that mean nothing here.
        vocabulary: Flags of the vocabulary: `vocab_size`, `padded`, `divisible` (rows), `tokenizer_type`, `tokenizer_model`.
    """

    sizes: Mapping[str, Any]
    switches: frozenset[str]
    mcore: tuple[int, int] | None = None
    format: str | None = None
    unread: tuple[str, ...] = ()
    vocabulary: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Job:
        """Reads flags as they stand on a command line.

        Raises:
            RequestError: A flag lacks its value, or the value is none.
        """
        try:
            words = [
                part for word in shlex.split(text) for part in (word.split("=", 1) if word[:2] == "--" else [word])
            ]
        except ValueError as error:
            raise RequestError(f"--for is no command line: {error}") from error
        values: dict[str, Any] = {}
        unread: list[str] = []
        switches, following = set(), iter(words)
        for word in following:
            if word in _SWITCHES:
                switches.add(word)
            elif word in _WORDS:
                value = next(following, "")
                if not value:
                    raise RequestError(f"{word} in --for takes a word, not 'nothing'")
                values[_WORDS[word]] = value
            elif word in _NUMBERS:
                value = next(following, "")
                if not (value.isascii() and value.isdigit() and int(value)):
                    raise RequestError(f"{word} in --for takes a whole number of 1 or more, not {value or 'nothing'!r}")
                values[_NUMBERS[word]] = int(value)
            elif unread and not word.startswith("--"):
                unread[-1] += f" {word}"
            else:
                unread.append(word)
        sizes = {name: size for name, size in values.items() if name in _SIZES.values()}
        sizes |= {"pp_layout": values["pp_layout"]} if "pp_layout" in values else {}
        vocabulary = {name: v for name, v in values.items() if name in (*_ROWS.values(), *_TOKENIZER.values())}
        mcore = _version(values["mcore"]) if "mcore" in values else None
        return cls(sizes, frozenset(switches), mcore, values.get("format"), tuple(unread), vocabulary)

    @property
    def loads_optimizer(self) -> bool:
        """Whether the job asks for optimizer state."""
        return self.switches.isdisjoint(("--no-load-optim", "--finetune"))

    @property
    def distributed(self) -> bool:
        """Whether it has the distributed optimizer."""
        return "--use-distributed-optimizer" in self.switches

    def layout(self) -> Layout:
        """The layout; `dp` is the least one where no flag says it.

        Raises:
            RequestError: The sizes make no grid.
        """
        sizes = {**dict.fromkeys(DEFAULTS, 1), **self.sizes}
        sizes.setdefault("dp", Layout.least_dp(sizes["tp"], sizes["cp"], sizes["ep"], sizes.get("etp")))
        return Layout(**sizes)


def _version(text: str) -> tuple[int, int]:
    numbers = text.split(".")[:2]
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise RequestError(f"--mcore {text} is no version", hint="--mcore 0.16")
    return int(numbers[0]), int(numbers[1])


@dataclass(frozen=True)
class Finding:
    """One thing that decides whether a job loads a checkpoint.

    Attributes:
        subject: "layout", "optimizer", "format", ...
        fits: None if it cannot be decided.
        reason: A sentence.
        fixed: Writing the checkpoint anew for the job (`job_remedy`) puts it right.
    """

    subject: str
    fits: bool | None
    reason: str
    fixed: bool = True
