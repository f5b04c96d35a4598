"""Compares what is not a tensor: arguments, scheduler, param groups, random states, extra states.

Everything is compared as inert trees, tensors in them by their elements. What a resharded or converted checkpoint cannot
have in common with its source is shown, but does not count: layout, paths, options that one version has and another has not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from converters.comparison.stored_objects import contents, extra_state, is_empty, unwrapped
from converters.comparison.trees import ABSENT, described, differences
from converters.errors import FormatError
from converters.megatron.model_args import ModelArgs
from converters.names import listed, natural_key, parse_key
from converters.optimizer.read_groups import read_param_groups
from converters.pickles.describe import describe
from converters.write.target_state import open_common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from converters.catalog import Catalog, ObjectInfo
    from converters.comparison.pairs import Side
    from converters.comparison.trees import Leaf
    from converters.formats.base import Reader
    from converters.formats.common_state import Archive

_LARGE = 64 << 20


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is not the same on both sides.

    Attributes:
        group: "iteration", "model", "training", "other arguments", "param groups", "common state", "random state",
            "extra state" or "object".
        name: What it is: `args.lr`, `opt_param_scheduler.max_lr`.
        a: Its value in A as plain data, or `ABSENT`.
        b: Its value in B.
        counts: Whether it makes the two different.
        note: Why it does not count, or what kind of difference it is; may be empty.
    """

    group: str
    name: str
    a: Any
    b: Any
    counts: bool = True
    note: str = ""

    @property
    def on_both_sides(self) -> bool:
        """Whether A and B have a value."""
        return self.a is not ABSENT and self.b is not ABSENT


@dataclass
class Facts:
    """Differences of state and objects: everything but tensors and arguments.

    Attributes:
        differing: What is not the same.
        notes: Sentences on what could not be compared.
        compared: Groups that both sides have, the same or not.
    """

    differing: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)

    def add(self, group: str, differences: Iterable[Leaf], *, counts: bool = True, note: str = "") -> None:
        """Adds what `trees.differences` says."""
        self.differing += [Fact(group, path, a, b, counts, note) for path, a, b in differences]


# arguments of Megatron-LM (core_v0.6 to 0.20, arguments.py) that decide what is learnt, besides those of the model
_LEARNING = """
    adam_beta1 adam_beta2 adam_eps attention_softmax_in_fp32 bf16 clip_grad consumed_train_samples decoupled_lr
    decoupled_min_lr decoupled_weight_decay end_weight_decay eod_mask_loss fp16 fp8 global_batch_size hysteresis
    initial_loss_scale loss_scale loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction
    lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style
    min_loss_scale min_lr moe_router_bias_update_rate moe_router_load_balancing_type moe_z_loss_coeff
    mtp_loss_scaling_factor muon_momentum optimizer params_dtype rampup_batch_size reset_attention_mask
    reset_position_ids seed seq_length sgd_momentum split start_weight_decay tokenizer_type train_iters train_samples
    weight_decay weight_decay_incr_style
"""
_TRAINING = frozenset(_LEARNING.split())
_LAYOUT_FIELDS = frozenset(("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "world_size"))
_NOT_FACTS = _LAYOUT_FIELDS | {
    "padded_vocab_size",
    "source",
    "notes",
    "unknown",
    "mla_down_fused",
    "extras",
    "consumed_train_samples",
    "dtype",
}
_MAY_BE_NONE = frozenset(("window_size", "rope_scaling", "num_experts", "mtp_num_layers", "q_lora_rank"))
# what frameworks note about themselves in the common state
_NOTES = ("pytorch-lightning_version", "loops", "callbacks", "datamodule_", "hparams_", "hyper_parameters")
# parts of the common state that are looked at elsewhere, or that describe how it was saved
_NOT_COMMON = frozenset(
    ("args", "checkpoint_version", "content_metadata", "iteration", "optimizer", "rerun_state_machine", "state_dict")
)


def compare_facts(a: Side, b: Side, keep: Callable[[str], bool]) -> Facts:
    """Everything but tensors and arguments.

    Args:
        a: The first.
        b: The second.
        keep: Whether something of this name is wanted: `opt_param_scheduler.max_lr`, `rng_state`.
    """
    out = Facts()
    if a.is_hf != b.is_hf:
        megatron = b if a.is_hf else a
        objects = sorted({i.name for i in _objects_by_kind(megatron.catalog, keep)["object"].values()})
        if objects:
            text = f"{megatron.label} has objects that a Hugging Face folder cannot hold: {listed(objects, 8)}"
            out.notes.append(text)
        return out
    x, y = a.catalog.iteration, b.catalog.iteration
    if x is not None and y is not None:
        out.compared.append("iteration")
        out.differing += [Fact("iteration", "iteration", x, y)] if x != y else []
    if not a.is_hf:
        _compare_param_groups(a, b, out)
        _compare_common_state(a, b, out)
    _compare_objects(a, b, out, keep)
    out.differing = [fact for fact in out.differing if keep(fact.name)]
    return out


# ---------------------------------------------------------------------- arguments


def compare_arguments(a: Side, b: Side) -> list[Fact]:
    """Arguments that are not the same, those of the model first.

    The model is compared in the words of `ModelArgs`, which are the same for every framework; only if both sides have
    Megatron's arguments, these are compared one by one. A Hugging Face folder's config.json is compared with Megatron's
    through the model's table (`Matching.config`).
    """
    if a.is_hf or b.is_hf:
        return _configurations(a, b) if a.is_hf and b.is_hf else []
    out = []
    stated = all(side.catalog.args or side.catalog.config for side in (a, b))
    for name in (f.name for f in fields(ModelArgs) if f.name not in _NOT_FACTS):
        x, y = getattr(a.args, name), getattr(b.args, name)
        comparable = (x is not None and y is not None) or (stated and name in _MAY_BE_NONE)
        # the training length stands in for the longest position where nothing says more
        guessed = any(side.args.source.get(name, "").endswith("seq_length") for side in (a, b))
        if x != y and comparable and not guessed:
            out.append(Fact("model", f"model.{name}", _plain(x), _plain(y)))
    for name in sorted({*a.args.extras, *b.args.extras}):
        x, y = (_without_stages(side.args.extras.get(name)) for side in (a, b))
        if x != y:
            out.append(Fact("model", f"model.{name}", _plain(x), _plain(y)))
    if not a.catalog.args or not b.catalog.args:
        return out
    for name, x, y in sorted(_side_by_side(a.catalog.args, b.catalog.args)):
        if x is ABSENT or y is ABSENT:
            note = "one side does not have it"
            out.append(Fact("other arguments", f"args.{name}", described(x), described(y), False, note))
        elif difference := next(differences(x, y, f"args.{name}", None, None), None):
            if name in _TRAINING:
                out.append(Fact("training", f"args.{name}", *difference[1:]))
            else:
                out.append(Fact("other arguments", f"args.{name}", *difference[1:], False, "says how the job ran"))
    order = ("model", "training", "other arguments")
    return sorted(out, key=lambda fact: (order.index(fact.group), fact.a is ABSENT or fact.b is ABSENT))


def _without_stages(value: Any) -> Any:
    """The pattern of a hybrid's layers says with `|` where pipeline stages begin; that is layout."""
    return value.replace("|", "") if isinstance(value, str) else value


def argument_names(a: Side, b: Side) -> list[str]:
    """Names of the arguments that `compare_arguments` compares, without their groups: `lr`, `window_size`."""
    if a.is_hf or b.is_hf:
        return sorted({*a.catalog.config, *b.catalog.config} - {*_NOT_CONFIG})
    model = {f.name for f in fields(ModelArgs)} - _NOT_FACTS
    stated = {name for side in (a, b) for name in model if getattr(side.args, name) is not None}
    return sorted({*stated, *a.args.extras, *b.args.extras, *a.catalog.args, *b.catalog.args})


_NOT_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


def _configurations(a: Side, b: Side) -> list[Fact]:
    """Keys of two config.json that are not the same; what one does not state may be a default."""
    x, y = a.catalog.config, b.catalog.config
    differing = [name for name in x if name in y and name not in _NOT_CONFIG and x[name] != y[name]]
    return [Fact("model", f"config.{name}", _plain(x[name]), _plain(y[name])) for name in differing]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else describe(value)


# ---------------------------------------------------------------------- optimizer and common state


def _compare_param_groups(a: Side, b: Side, out: Facts) -> None:
    """Param groups, matched by what Megatron matches them by."""
    sides = []
    for side in (a, b):
        try:
            has = any(name.startswith("optimizer.") for name in side.tensors)
            param_groups = read_param_groups(side.reader) if has else None
        except FormatError as error:
            out.notes.append(f"{side.label}: param groups are not compared: {error.message}")
            return
        sides.append({} if param_groups is None else {_group_name(g): g for g in param_groups.merged()})
    if not all(sides):
        return
    out.compared.append("param groups")
    for name, x, y in sorted(_side_by_side(*sides)):
        path = f"optimizer.param_groups.{name}"
        if x is ABSENT or y is ABSENT:
            out.differing.append(Fact("param groups", path, described(x), described(y)))
            continue
        for key in x:
            if key in y and key != "is_expert_parallel":
                out.add("param groups", differences(x[key], y[key], f"{path}.{key}", None, None))


def _group_name(group: Mapping[str, Any]) -> str:
    """A word that tells one param group from another."""
    decay = group.get("wd_mult", group.get("pre_wd_mult"))
    scale = group.get("lr_mult", group.get("pre_lr_mult"))
    words = ["no_decay" if decay == 0 else "decay" if decay in (1, None) else f"wd_mult={describe(decay)}"]
    words += [f"lr_mult={describe(scale)}"] if scale not in (1, None) else []
    return "+".join([*words, *(["decoupled_lr"] if group.get("is_decoupled_lr") is True else [])])


def _compare_common_state(a: Side, b: Side, out: Facts) -> None:
    if a.catalog.common is None or b.catalog.common is None:
        return
    in_a, in_b = (open_common(side.reader)[0] for side in (a, b))
    tree_a, tree_b = unwrapped(in_a.tree), unwrapped(in_b.tree)
    if not isinstance(tree_a, Mapping) or not isinstance(tree_b, Mapping):
        return
    for name, x, y in _side_by_side(tree_a, tree_b):
        if not isinstance(name, str) or name in _NOT_COMMON or name.startswith(("model", "rng_")) or "rng_" in name:
            continue
        if x is ABSENT or y is ABSENT:
            # versions and frameworks keep different things there, but a job resumes with another rate without its scheduler
            counts = name == "opt_param_scheduler" and a.catalog.framework == b.catalog.framework
            note = "" if counts else "one side does not have it"
            out.differing.append(Fact("common state", name, described(x), described(y), counts, note))
            continue
        out.compared += ["scheduler"] if name == "opt_param_scheduler" else []
        note = "a framework's own notes" if name.startswith(_NOTES) else ""
        out.add("common state", differences(x, y, name, in_a, in_b), counts=not note, note=note)


def _compare_objects(a: Side, b: Side, out: Facts, keep: Callable[[str], bool]) -> None:
    objects_a, objects_b = (_objects_by_kind(side.catalog, keep) for side in (a, b))
    _compare_random_states(a, b, objects_a["random state"], objects_b["random state"], out)
    for group in ("extra state", "object"):
        out.compared += [f"{group}s"] if objects_a[group].keys() & objects_b[group].keys() else []
        pairs = _side_by_side(objects_a[group], objects_b[group])
        for name, x, y in sorted(pairs, key=lambda pair: natural_key(pair[0])):
            if x is not ABSENT and y is not ABSENT:
                _compare_object(group, name, (a.reader, x), (b.reader, y), out)
                continue
            # which modules have an extra state changed with every version; without FP8 all of them are empty
            empty = group == "extra state" and (is_empty(a.reader, x) if y is ABSENT else is_empty(b.reader, y))
            x, y = (info if info is ABSENT else f"{info.length:,} bytes" for info in (x, y))
            out.differing.append(Fact(group, name, x, y, not empty, "empty" if empty else ""))


def _objects_by_kind(catalog: Catalog, keep: Callable[[str], bool]) -> dict[str, dict[str, ObjectInfo]]:
    """Objects by kind and canonical name; what belongs to the optimizer or to single ranks of the job is left out."""
    out: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for key, info in catalog.objects.items():
        base = info.name.rpartition("/")[2]
        if info.name in ("common_state", "rerun_state_machine_state") or info.of_optimizer:
            continue
        if base == "rng_state":
            if keep("rng_state"):
                out["random state"][".".join(map(str, info.offset))] = info
        elif base.endswith("._extra_state"):
            parsed, indices = parse_key(info.name), iter(info.offset)
            out["extra state"][parsed.template.format(*(next(indices) for _ in parsed.axes))] = info
        else:
            out["object"][key] = info
    return out


def _compare_random_states(
    a: Side, b: Side, states_a: Mapping[str, ObjectInfo], states_b: Mapping[str, ObjectInfo], out: Facts
) -> None:
    if not states_a or not states_b:
        out.notes += [f"only {'A' if states_a else 'B'} has random states"] if states_a or states_b else []
        return
    grids = [next(iter(states.values())).grid for states in (states_a, states_b)]
    if grids[0] != grids[1]:
        shown = [" x ".join(f"{axis} {n}" for axis, n in zip(("pp", "tp", "dp"), g, strict=False)) for g in grids]
        out.notes.append(f"random states are not compared: A was saved on {shown[0]}, B on {shown[1]}")
        return
    out.compared.append("random states")
    for coordinates, x, y in sorted(_side_by_side(states_a, states_b)):
        name = f"rng_state.{coordinates}"
        if x is not ABSENT and y is not ABSENT:
            _compare_object("random state", name, (a.reader, x), (b.reader, y), out)
        else:
            x, y = (state if state is ABSENT else "present" for state in (x, y))
            out.differing.append(Fact("random state", name, x, y))


def _compare_object(
    group: str, name: str, stored_a: tuple[Reader, ObjectInfo], stored_b: tuple[Reader, ObjectInfo], out: Facts
) -> None:
    lengths = stored_a[1].length, stored_b[1].length
    if max(lengths) > _LARGE:
        sizes = f"{lengths[0]:,} bytes in A, {lengths[1]:,} in B"
        out.notes.append(f"{name} is not compared: it is an object of {sizes}")
        return
    sides: list[tuple[Any, Archive | None]] = []
    shown: list[str] = []
    for reader, info in (stored_a, stored_b):
        try:
            sides.append(extra_state(reader, info) if group == "extra state" else contents(reader, info))
            shown.append("readable")
        except FormatError as error:
            shown.append(f"unreadable: {error.message}")
    if len(sides) < 2:
        out.differing.append(Fact(group, name, shown[0], shown[1]))
        return
    (a, in_a), (b, in_b) = sides
    out.add(group, differences(a, b, name, in_a, in_b))


def _side_by_side(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """`(key, value in A, value in B)` of every key that A or B has; a value may be `ABSENT`."""
    return ((key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in dict.fromkeys((*a, *b)))
