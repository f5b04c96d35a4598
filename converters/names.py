"""Canonical tensor names: what every format's reader translates its own spelling into, and how names are shown.

A canonical name counts layers and experts through the whole model and contains them as numbers:

    decoder.layers.7.self_attention.linear_qkv.weight
    decoder.layers.7.mlp.experts.3.linear_fc1.weight
    mtp.layers.0.transformer_layer.mlp.router.weight
    vision_model.decoder.layers.1.mlp.linear_fc1.weight
    optimizer.state.exp_avg.decoder.layers.7.mlp.linear_fc2.weight
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from typing import TYPE_CHECKING, NamedTuple

from converters.model_parts import split_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Megatron-Core 0.6 to 0.20, megatron/core/optimizer: `chained_{i}.` marks the dense and the expert optimizer of a MoE
_OPTIMIZER = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.(\w+?)\.(?=[a-z])(.*)", re.DOTALL)
_BUCKET = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.*)", re.DOTALL)
# what wrappers put before the model's own names (NeMo: `module.`, NeMo 1: `model.`)
_WRAPPERS = re.compile(r"(?:(?:module|model\d*)\.)+")
_MODEL = re.compile(
    r"(?:embedding|decoder|encoder|mtp|output_layer|lm_head|pooler|binary_head"
    r"|position_embeddings|(?:encoder|decoder)_relative_pos_emb)\."  # of T5
)
_STACKED = re.compile(r"^((?:language_model\.|vision_model\.)?(?:decoder|encoder)\.layers)\.(?!\d+\.)")
_EXPERTS = re.compile(r"\.experts\.experts\.(\d+\.)?")
# multi_token_prediction.py renamed its inner module in 0.17; the saved keys of GPT models kept the old name
_MTP_INNER = re.compile(r"^(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.)")


MASTER = "param"
"""The state of an optimizer that is the master weight of its parameter."""
_STATE = "optimizer.state."


class StateName(NamedTuple):
    """The canonical name of what an optimizer keeps for a parameter: `optimizer.state.STATE.PARAMETER`.

    Attributes:
        state: `param` for the master weight, `exp_avg`, `exp_avg_sq`, `momentum_buffer`.
        parameter: Canonical name of the parameter.
    """

    state: str
    parameter: str

    @classmethod
    def parse(cls, name: str) -> StateName | None:
        """The parts of a canonical name; None if it is no state of a parameter."""
        state, dot, parameter = name[len(_STATE) :].partition(".") if name.startswith(_STATE) else ("", "", "")
        return cls(state, parameter) if dot else None

    def __str__(self) -> str:
        return f"{_STATE}{self.state}.{self.parameter}"


def state_names(names: Iterable[str]) -> Iterator[tuple[str, StateName]]:
    """Those canonical names that are states of parameters, each with its parts."""
    return ((name, parts) for name in names if (parts := StateName.parse(name)) is not None)


def parameter_of(name: str) -> str:
    """The parameter that a canonical name is a state of, or the name itself."""
    parts = StateName.parse(name)
    return name if parts is None else parts.parameter


def master_name(parameter: str) -> str:
    """The canonical name of a parameter's master weight."""
    return str(StateName(MASTER, parameter))


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A stored key, understood.

    Attributes:
        template: Canonical name with one `{}` for each leading axis that counts layers or experts.
        axes: Which those are, in order: "layer", "expert".
        kind: "weight" or "optimizer": what Megatron stores beside the two are objects, no tensors.
        half: "w" (gate) or "v" (up) when the key holds one half of a gated projection, else "".
    """

    template: str
    axes: tuple[str, ...]
    kind: str
    half: str = ""


def parse_key(key: str) -> ParsedKey:
    """The canonical meaning of a tensor key as Megatron-Core's distributed checkpoints spell it."""
    if _BUCKET.fullmatch(key):
        return ParsedKey(_escape(key), (), "optimizer")
    match = _OPTIMIZER.fullmatch(key)
    if match:
        of = parse_key(match[3])
        return ParsedKey(str(StateName(match[2], of.template)), of.axes, "optimizer", of.half)
    if key.startswith(("optimizer.", "chained_")):
        return ParsedKey(_escape(key), (), "optimizer")
    _, name = split_wrapper(key)
    part, inner = split_part(name)
    if not part and not _MODEL.match(inner):
        return ParsedKey(_escape(key), (), "weight")  # what no rule knows is a part of the model all the same
    name = _escape(part + _MTP_INNER.sub(r"\1.transformer_layer.", inner))
    axes: tuple[str, ...] = ()
    if _STACKED.search(name):
        name = _STACKED.sub(r"\1.{}.", name, count=1)
        axes = ("layer",)
    experts = _EXPERTS.search(name)
    if experts:
        number = experts[1] or "{}."
        name = name[: experts.start()] + ".experts." + number + name[experts.end() :]
        axes = axes if experts[1] else (*axes, "expert")
    half = ""
    if name.endswith((".weight_w", ".weight_v", ".bias_w", ".bias_v")):
        name, half = name[:-2], name[-1]
    return ParsedKey(name, axes, "weight", half)


def split_wrapper(key: str) -> tuple[str, str]:
    """What a framework puts before the model's own names, and the rest: `("module.", "decoder.layers...")`."""
    wrapper = _WRAPPERS.match(key)
    if wrapper is None or not (split_part(name := key[wrapper.end() :])[0] or _MODEL.match(name)):
        return "", key
    return wrapper[0], name


@dataclass(frozen=True, slots=True)
class StoredKey:
    """Where Megatron-Core's distributed checkpoints keep a canonical tensor.

    Attributes:
        key: The key, without a wrapper's prefix.
        prefix: Indices into its leading axes.
        axes: What those axes count: "layer", "expert".
    """

    key: str
    prefix: tuple[int, ...]
    axes: tuple[str, ...]


_ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ONE_LAYER = re.compile(r"^((?:language_model\.|vision_model\.)?(?:decoder|encoder)\.layers)\.(\d+)\.")


def stored_key(name: str, *, stacked: bool) -> StoredKey:
    """The inverse of `parse_key`, for a name without `optimizer.state.*`.

    Args:
        name: Canonical name.
        stacked: Layers share a key with a leading layer axis (transformer_block.py, sharded_state_dict: homogeneous
            models); multi-token-prediction layers never do. Experts always share one.
    """
    prefix: list[int] = []
    axes: list[str] = []
    if stacked and (layer := _ONE_LAYER.match(name)):
        name = f"{layer[1]}.{name[layer.end() :]}"
        prefix.append(int(layer[2]))
        axes.append("layer")
    if expert := _ONE_EXPERT.search(name):
        name = f"{name[: expert.start()]}.experts.experts.{name[expert.end() :]}"
        prefix.append(int(expert[1]))
        axes.append("expert")
    return StoredKey(name, tuple(prefix), tuple(axes))


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}") if "{" in text or "}" in text else text


_NUMBER = re.compile(r"\d+")


def natural_key(name: str) -> str:
    """A sort key that puts layer 10 after layer 9: every number by its length, then its digits."""
    return _NUMBER.sub(_by_length, name)


def _by_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"\0{len(digits):04d}{digits}"


_FOLDED = re.compile(r"\{(\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)*)\}")


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name matches a shell pattern, which may hold `{0..31}` as the folded tables print it; `*` crosses dots."""
    if not _FOLDED.search(pattern):
        return lambda name: fnmatchcase(name, pattern)
    sets: list[set[int]] = []
    expression = ""
    for index, piece in enumerate(_FOLDED.split(pattern)):
        if index % 2 == 0:
            expression += translate(piece).removeprefix("(?s:").removesuffix(r")\Z")
        else:
            ranges = [[int(n) for n in part.split("..")] for part in piece.split(",")]
            sets.append({n for span in ranges for n in range(span[0], min(span[-1], span[0] + 10**6) + 1)})
            expression += r"(\d+)"
    compiled = re.compile(rf"(?s:{expression})\Z")

    def matches(name: str) -> bool:
        hit = compiled.match(name)
        return hit is not None and all(int(n) in s for n, s in zip(hit.groups()[-len(sets) :], sets, strict=True))

    return matches


def any_of(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of several patterns; one without `*`, `?` or `[` means all below that name, too."""
    matchers = [
        matcher(p) for pattern in patterns for p in (pattern, *(() if set("*?[") & set(pattern) else (f"{pattern}.*",)))
    ]
    return lambda name: any(matches(name) for matches in matchers)


def printable(text: str) -> str:
    """The text with control, bidirectional and unpaired characters shown as escapes, safe on any terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def listed_lines(texts: Sequence[str], most: int) -> list[str]:
    """The first of many texts, printable, and how many more there are: `["a", "b", "and 3 more"]`."""
    left = len(texts) - most
    return [*map(printable, texts[:most]), *([f"and {left} more"] if left > 0 else [])]


def listed(texts: Sequence[str], most: int) -> str:
    """The same in one line: `a, b and 3 more`."""
    left = len(texts) - most
    return ", ".join(map(printable, texts[:most])) + (f" and {left} more" if left > 0 else "")


def quoted(path: object) -> str:
    """A word as it is typed in a shell, in commands that are suggested: a path, a name, a pattern.

    Bytes that are no text and characters that a terminal would obey are escaped as bash and zsh read them: `$'a\\377b'`.
    """
    text = str(path)
    return shlex.quote(text) if text.isprintable() else "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    """A character inside of `$'...'`."""
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    encoded = character.encode("utf-8", "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in encoded)


_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def numberless(name: str) -> str:
    """The name with `*` for the numbers of layers and experts: what tensors of one kind have in common."""
    return _INDEX.sub("*", name)


def folded(names: Iterable[str]) -> list[str]:
    """Only the folded names of `fold`, without their members."""
    return [text for text, _ in fold(names)]


def fold(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names that differ only in layer or expert numbers, as one: `decoder.layers.{0..31}.mlp.linear_fc1.weight`.

    Returns:
        `(folded, members)` pairs in the order of their first members. Numbers that do not form a full grid are folded
        along their first index, the layers.
    """
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        groups[tuple(_INDEX.split(name))].append(name)
    return [folded for members in groups.values() for folded in _fold_group(members)]


def _fold_group(members: list[str]) -> list[tuple[str, list[str]]]:
    if len(members) == 1:
        return [(members[0], members)]
    indices = [tuple(int(n) for n in _INDEX.findall(name)) for name in members]
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    if math.prod(map(len, columns)) == len(set(indices)):
        return [(_with_ranges(members[0], columns), members)]
    by_tail: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    rests: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for index in indices:
        rests[index[0]].add(index[1:])
    for head, rest in rests.items():
        by_tail[frozenset(rest)].append(head)
    named = dict(zip(indices, members, strict=True))
    out = []
    for tail, heads in by_tail.items():
        chosen = [named[h, *t] for h in sorted(heads) for t in sorted(tail)]
        inner = [sorted(set(column)) for column in zip(*tail, strict=True)]
        out.append((_with_ranges(members[0], [sorted(heads), *inner]), chosen))
    return out


def _with_ranges(name: str, columns: Sequence[Sequence[int]]) -> str:
    """The name with all numbers that stand in its place instead of each number."""
    ranges = map(_ranges, columns)
    return _INDEX.sub(lambda _: next(ranges), name)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return "{" + ",".join(f"{a}..{b}" if b > a else str(a) for a, b in spans) + "}"
