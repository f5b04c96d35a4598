"""Everything in a checkpoint that is not a tensor, at another layout: carried, rebuilt or dropped by stated rules.

| what | rule |
|---|---|
| training arguments | the fields that describe the layout change; values of classes that 0.16 refuses become None |
| `rng_state` | carried if the (pp, tp) grid, and where saved so dp, is the same; else dropped, and `no_save_rng` set |
| `rerun_state_machine_state` | dropped: it belongs to the ranks of the job that saved |
| `_extra_state` | carried (TransformerEngine asks for it), under the target's keys |
| `common_state`, `common.pt` | becomes `common.pt`, which every Megatron-Core reads, or `common_state` if asked |
| per-group optimizer objects | become part of the common state, or of the target's groups |
| anything else | carried as it is, and named |

Sources: megatron/training/checkpointing.py (load_checkpoint, check_checkpoint_args), tags core_v0.9.0 to core_v0.19.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from converters.archive.records_out import empty_object
from converters.facts.damage import refuse_damaged_object
from converters.formats.base import CommonReader
from converters.formats.common_state import Archive
from converters.formats.torch_dist.parts import ObjectOut
from converters.names import parse_key, stored_key
from converters.optimizer.groups import param_groups, read_param_groups
from converters.pickles import Obj, fields
from converters.targets.target_state import (
    JobOptions,
    as_megatron_lm,
    change_arguments,
    layout_arguments,
    open_common,
    rng_fits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import ObjectInfo
    from converters.formats.base import Reader
    from converters.parallel.layout import Layout
    from converters.parallel.split import Outline

__all__ = ["ReshardOptions", "State", "target_state", "target_wrapper"]


@dataclass(frozen=True, slots=True)
class ReshardOptions(JobOptions):
    """What a person may ask of a reshard.

    Attributes:
        optimizer: "fully_reshardable", "dp_reshardable", "keep" (the source's, as one of these two), or "none".
        layers: "stacked", "per-layer" or "keep".
        fully_parallel: Spread what data-parallel replicas share over their files, by bytes.
        mcore: "0.19" embeds the common state as that version does; else it is `common.pt`, which all versions read.
        framework: "keep", or "megatron-lm": what NeMo or Megatron-Bridge wrote becomes a checkpoint of Megatron-LM.
    """

    OPTIMIZERS: ClassVar[tuple[str, ...]] = ("fully_reshardable", "dp_reshardable", "keep", "none")

    optimizer: str = "fully_reshardable"
    layers: str = "keep"
    fully_parallel: bool = False
    mcore: str | None = None
    framework: str = "keep"


@dataclass(frozen=True)
class State:
    """The target's objects and common state.

    Attributes:
        objects: Stored objects, each with the rank whose file holds it.
        common: Contents of `common.pt`; None if the common state is one of the objects.
        changed: Training arguments that differ from the source: name -> (before, after).
        rng: The random states are among the objects.
        dropped: `(what, reason)` of what is not carried over.
        notes: Sentences a person should read.
    """

    objects: list[ObjectOut]
    common: bytes | None
    changed: dict[str, tuple[Any, Any]]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = field(default=())
    rng: bool = False


def target_state(
    reader: Reader,
    layout: Layout,
    outline: Outline,
    options: ReshardOptions,
    *,
    stacked: bool,
    padded_vocab: int | None,
) -> State:
    """Objects and common state of a checkpoint for a job at `layout`.

    Args:
        stacked: Whether the target's layers share keys.
        padded_vocab: Rows of the target's embedding.

    Raises:
        RequestError: The random state was to be kept and cannot be.
    """
    return _Maker(reader, layout, outline, options, stacked, padded_vocab).make()


_NO_EXTRA_STATE = re.compile(r"embedding\.|output_layer\.|lm_head\.|.*\.(router|gate_weight|core_attention)\b")
_PROJECTION = "self_attention.linear_proj"


class _Maker:
    def __init__(
        self,
        reader: Reader,
        layout: Layout,
        outline: Outline,
        options: ReshardOptions,
        stacked: bool,
        padded_vocab: int | None,
    ) -> None:
        self._reader, self._layout, self._outline, self._options = reader, layout, outline, options
        self._stacked, self._padded_vocab = stacked, padded_vocab
        self._catalog = reader.catalog
        self._pipeline = layout.pipeline(outline.num_layers, outline.mtp_layers)
        self._dropped: list[tuple[str, str]] = []
        self._keep_rng = rng_fits(self._catalog, layout, options.rng, self._dropped)

    def make(self) -> State:
        objects = list(self._carried())
        if self._options.extra_state == "fill":
            objects += self._missing_extra_state({o.key for o in objects})
        archive, tree = open_common(self._reader)
        notes: list[str] = []
        if self._options.framework == "megatron-lm":
            tree, lost, notes = as_megatron_lm(self._catalog, tree)
            self._dropped += lost
        changed = self._adapt(archive, tree)
        common = None
        if self._options.mcore == "0.19":
            # a sharded object like others: a list of one (dist_checkpointing/serialization.py, save, core_v0.19.0)
            objects.append(ObjectOut("common_state/shard_0_1", 0, archive.dump([tree], "archive")))
        else:
            common = archive.dump(tree, "common")
        return State(objects, common, changed, tuple(self._dropped), tuple(notes), self._keep_rng)

    def _carried(self) -> Iterator[ObjectOut]:
        """The source's objects, each by its rule."""
        for info in self._catalog.objects.values():
            base = info.name.rpartition("/")[2]
            if info.name == "common_state" or ".dp_group_idx_" in info.name:
                continue
            if base == "rng_state":
                if self._keep_rng:
                    rank = self._layout.rank(pp=info.offset[0], tp=info.offset[1])
                    yield ObjectOut(info.key, rank, _record(self._reader, info))
            elif base == "rerun_state_machine_state":
                self._dropped.append((info.key, "belongs to one rank of the job that saved"))
            elif base.endswith("._extra_state"):
                if self._options.extra_state == "drop":
                    self._dropped.append((info.key, "extra state is not wanted"))
                else:
                    key, layer = self._extra_state_key(info)
                    yield ObjectOut(key, self._home(layer or "output_layer.weight"), _record(self._reader, info))
            else:
                yield ObjectOut(info.key, 0, _record(self._reader, info))

    def _home(self, name: str) -> int:
        """The rank that saves what belongs to a tensor's module."""
        return self._layout.rank(pp=self._pipeline.homes(name, tied=self._outline.tied)[0].pp)

    def _extra_state_key(self, info: ObjectInfo) -> tuple[str, str | None]:
        """The key of an extra state in the target's style, and a name that says where it lives."""
        parsed = parse_key(info.name)
        if parsed.kind == "other":
            return info.key, None
        name = parsed.template.format(*info.offset[: len(parsed.axes)])
        return target_wrapper(_wrapper(info.name), self._options) + self._object_key(name), name

    def _missing_extra_state(self, have: set[str]) -> Iterator[ObjectOut]:
        """Empty extra states for modules that have none: which modules have one changed with every Megatron-Core.

        A loader asks for those of its own version and ignores the others; without FP8 all of them are empty.
        """
        stored = next((o.name for o in self._catalog.objects.values() if o.name.endswith("._extra_state")), None)
        if stored is None and not self._catalog.masters:  # Megatron-FSDP drops those that there were
            return
        wrapper, empty = target_wrapper(_wrapper(stored or ""), self._options), empty_object()
        weights = (name for name in self._catalog.weights if name.endswith(".weight"))
        modules = dict.fromkeys(n.rpartition(".")[0] for n in weights if not _NO_EXTRA_STATE.match(n))
        attention = [n.replace(".linear_proj", ".core_attention") for n in modules if n.endswith(_PROJECTION)]
        for module in (*modules, *attention):
            key = self._object_key(f"{module}._extra_state")
            wrapped = key if key in have else f"{wrapper}{key}"
            if wrapped not in have:
                yield ObjectOut(wrapped, self._home(f"{module}.weight"), empty)

    def _object_key(self, name: str) -> str:
        """The key of an object of a canonical module, with its place in the grid of layers and experts."""
        stored = stored_key(name, stacked=self._stacked)
        count = {"layer": self._outline.num_layers, "expert": self._outline.num_experts or 1}
        offset = stored.prefix or (0,)
        grid = tuple(count[axis] for axis in stored.axes) or (1,)
        return f"{stored.key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, grid))}"

    def _adapt(self, archive: Archive, tree: dict[Any, Any]) -> dict[str, tuple[Any, Any]]:
        """Changes the common state for the target; returns the training arguments that differ."""
        changed: dict[str, tuple[Any, Any]] = {}
        options, args = self._options, tree.get("args")
        if isinstance(args, Obj):
            known = fields(args)
            values = layout_arguments(known, self._layout, self._padded_vocab) | _own_arguments(known, options)
            if not self._keep_rng:
                # load_checkpoint asks for rng_state unless the checkpoint says that it has none
                values["no_save_rng"] = True
            changed = change_arguments(args, values, newer=options.mcore == "0.19")
        tree.pop("rerun_state_machine", None)
        if options.optimizer == "none":
            tree.pop("optimizer", None)
        elif "optimizer" in tree:
            tree["optimizer"] = param_groups(self._reader, self._layout, options.optimizer)
            archive.add(read_param_groups(self._reader).storages)
            content = tree.setdefault("content_metadata", {})
            content["distrib_optim_sharding_type"] = options.optimizer
            content.setdefault("singleton_local_shards", False)
            content["chained_optim_avoid_prefix"] = True
            if options.optimizer == "fully_reshardable":
                content.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
            else:
                content.pop("distrib_optim_fully_reshardable_mem_efficient", None)
        if isinstance(tree.get("content_metadata"), dict) and "singleton_local_shards" in tree["content_metadata"]:
            tree["content_metadata"]["singleton_local_shards"] = False
        return changed


def _record(reader: Reader, info: ObjectInfo) -> bytes | tuple[Path, int, int]:
    """An object's record as torch_dist has it: a list of one."""
    refuse_damaged_object(reader.catalog, info.key)
    if isinstance(reader, CommonReader):
        return reader.object_record(info.key)
    path = reader.catalog.path / info.file
    if info.wrapped:
        return path, info.start, info.length
    bare = Archive(path, info.start, info.length, info.file)
    return bare.dump([bare.tree], "archive")


def _wrapper(key: str) -> str:
    """What stands before the model's own name in a key."""
    found = re.search(r"(?:embedding|decoder|encoder|mtp|output_layer|lm_head)\..*", key)
    return key[: found.start()] if found else ""


def target_wrapper(wrapper: str, options: ReshardOptions) -> str:
    """What stands before the names in the target's keys, given what does in the source's: Megatron-LM has no `module.`."""
    return re.sub(r"^(?:module|model)\.", "", wrapper) if options.framework == "megatron-lm" else wrapper


def _own_arguments(known: Mapping[str, Any], options: ReshardOptions) -> dict[str, Any]:
    """The arguments that say what this format holds of the optimizer."""
    values: dict[str, Any] = {}
    if known.get("ckpt_format") not in (None, "torch_dist"):
        values |= {name: v for name, v in (("ckpt_format", "torch_dist"), ("use_dist_ckpt", True)) if name in known}
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):  # a job with these loads nothing but fsdp_dtensor
        values |= {name: False} if known.get(name) else {}
    if options.optimizer == "none":
        return values | {"no_save_optim": True}
    if known.get("use_distributed_optimizer") is not None:
        values["use_distributed_optimizer"] = True
    if "dist_ckpt_optim_fully_reshardable" in known:
        values["dist_ckpt_optim_fully_reshardable"] = options.optimizer == "fully_reshardable"
    return values
