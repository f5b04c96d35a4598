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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from converters.formats.torch_dist.parts import ObjectOut
from converters.megatron.damage import refuse_damaged_object
from converters.megatron.pipeline import Pipeline
from converters.model_parts import split_part
from converters.names import parse_key, split_wrapper, stored_key
from converters.optimizer.groups import common_optimizer
from converters.pickles.nodes import Obj, fields
from converters.torchzip.records_out import empty_object
from converters.write.job_arguments import (
    change_arguments,
    layout_arguments,
    optimizer_arguments,
    plain_master_arguments,
)
from converters.write.reshard_targets import target_wrapper
from converters.write.target_state import JobOptions, as_megatron_lm, open_common, rng_fits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import ObjectInfo
    from converters.formats.base import Reader
    from converters.formats.common_state import Archive
    from converters.optimizer.groups import ParamGroups
    from converters.write.reshard_targets import Targets


@dataclass(frozen=True, slots=True)
class ReshardOptions(JobOptions):
    """What a person may ask of a reshard.

    Attributes:
        optimizer: "plain" (whole tensors, for a job without the distributed optimizer), "fully_reshardable",
            "dp_reshardable"; "keep" (the source's, as one of these); "none"; "auto": "plain" if the source has no
            distributed optimizer, else "fully_reshardable".
        layers: "stacked", "per-layer" or "keep".
        fully_parallel: Spread what data-parallel replicas share over their files, by bytes.
        mcore: "0.19" embeds the common state as that version does; else it is `common.pt`, which all versions read.
        masters: Master weights that are stored as remainders of the weights: "fp32", for a job that keeps them so, or
            "remainders", for a job with a precision-aware optimizer.
        framework: "keep", or "megatron-lm": what NeMo or Megatron-Bridge wrote becomes a checkpoint of Megatron-LM.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **JobOptions.CHOICES,
        "optimizer": ("auto", "plain", "fully_reshardable", "dp_reshardable", "keep", "none"),
        "layers": ("stacked", "per-layer", "keep"),
        "masters": ("fp32", "remainders"),
    }

    optimizer: str = "auto"
    layers: str = "keep"
    fully_parallel: bool = False
    mcore: str | None = None
    masters: str = "fp32"
    framework: str = "keep"


_NO_EXTRA_STATE = re.compile(r"embedding\.|output_layer\.|lm_head\.|.*\.(router|gate_weight|core_attention)\b")
_NO_EXTRA_STATE_SINCE_0_16 = re.compile(rf"{_NO_EXTRA_STATE.pattern}|.*\.mixer\.norm\.")  # no norm of TransformerEngine
_PROJECTION = "self_attention.linear_proj"


class TargetState:
    """Objects and common state of a checkpoint for a job.

    Args:
        targets: The tensors of the job.
        completed: Master weights are fp32 that were remainders.

    Attributes:
        objects: Stored objects, each with the rank whose file holds it.
        common: Contents of `common.pt`; None if the common state is one of the objects.
        changed: Training arguments that differ from the source: name -> (before, after).
        keep_rng: The random states are among the objects.
        dropped: `(name, reason)` of what is not carried over.
        notes: Sentences a person should read.

    Raises:
        RequestError: The random state was to be kept and cannot be.
    """

    def __init__(self, reader: Reader, targets: Targets, *, completed: bool) -> None:
        self._reader, self._targets, self._completed = reader, targets, completed
        self._catalog, self._layout, self._options = reader.catalog, targets.layout, targets.options
        self.dropped: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.keep_rng = rng_fits(self._catalog, self._layout, self._options.rng, self.dropped)
        self.objects = list(self._carried_objects())
        if self._options.extra_state == "fill":
            self.objects += self._missing_extra_state({o.key for o in self.objects})
        archive, tree = open_common(reader)
        if self._options.framework == "megatron-lm":
            with_optimizer = self._options.optimizer != "none"
            tree, lost, self.notes = as_megatron_lm(self._catalog, tree, optimizer=with_optimizer)
            self.dropped += lost
        self.changed = self._adapt_common(archive, tree)
        self.common: bytes | None = None
        if self._options.mcore == "0.19":
            # a sharded object like others: a list of one (dist_checkpointing/serialization.py, save, core_v0.19.0)
            self.objects.append(ObjectOut("common_state/shard_0_1", 0, archive.dump([tree], "archive")))
        else:
            self.common = archive.dump(tree, "common")

    def _carried_objects(self) -> Iterator[ObjectOut]:
        """The source's objects, each by its rule."""
        for info in self._catalog.objects.values():
            base = info.name.rpartition("/")[2]
            if info.name == "common_state" or info.of_optimizer:
                continue
            if base == "rng_state":
                if self.keep_rng:
                    rank = self._layout.rank(pp=info.offset[0], tp=info.offset[1])
                    yield ObjectOut(info.key, rank, _object_record(self._reader, info))
            elif base == "rerun_state_machine_state":
                self.dropped.append((info.key, "belongs to one rank of the job that saved"))
            elif base.endswith("._extra_state"):
                if self._options.extra_state == "drop":
                    self.dropped.append((info.key, "extra state is left out by option"))
                else:
                    key, layer = self._extra_state_key(info)
                    yield ObjectOut(
                        key, self._saving_rank(layer or "output_layer.weight"), _object_record(self._reader, info)
                    )
            else:
                yield ObjectOut(info.key, 0, _object_record(self._reader, info))

    def _saving_rank(self, name: str) -> int:
        """The rank that saves what belongs to a tensor's module."""
        return self._layout.rank(pp=self._targets.stage(name))

    def _extra_state_key(self, info: ObjectInfo) -> tuple[str, str | None]:
        """The key of an extra state in the target's style, and a name that says where it lives."""
        parsed = parse_key(info.name)
        name = parsed.template.format(*info.offset[: len(parsed.axes)])
        if not Pipeline.recognises(name):  # a module that no rule knows
            return info.key, None
        return target_wrapper(split_wrapper(info.name)[0], self._options) + self._object_key(name), name

    def _missing_extra_state(self, have: set[str]) -> Iterator[ObjectOut]:
        """Empty extra states for modules that have none: which modules have one changed with every Megatron-Core.

        A loader asks for those of its own version and ignores the others; without FP8 all of them are empty.
        """
        stored = next((o.name for o in self._catalog.objects.values() if o.name.endswith("._extra_state")), None)
        imported = self._catalog.imported is not None  # for 0.16 and later: exactly what these ask for
        if stored is None and not (self._catalog.masters or imported):  # Megatron-FSDP drops those that there were
            return
        wrapper, empty = target_wrapper(split_wrapper(stored or "")[0], self._options), empty_object()
        # the projection of a mixer is stored part by part
        weights = (n for n in self._catalog.weights if n.endswith(".weight") or ".in_proj.weight." in n)
        without = _NO_EXTRA_STATE_SINCE_0_16 if imported else _NO_EXTRA_STATE
        with_state = (n for n in weights if not without.match(n))
        modules = dict.fromkeys(n.rpartition(".")[0].removesuffix(".weight") for n in with_state)
        attention = [n.replace(".linear_proj", ".core_attention") for n in modules if n.endswith(_PROJECTION)]
        if imported:
            attention = [n for n in attention if self._attention_has_state(n)]
        # a GPTModel leaves its own out, a MambaModel does not (sharded_state_dict, core_v0.16.1)
        output = ["output_layer"] if "decoder.final_norm.weight" in self._catalog.weights else []
        for module in (*modules, *attention, *output):
            key = self._object_key(f"{module}._extra_state")
            wrapped = key if key in have else f"{wrapper}{key}"
            if wrapped not in have:
                yield ObjectOut(wrapped, self._saving_rank(f"{module}.weight"), empty)

    def _attention_has_state(self, module: str) -> bool:
        """Whether Megatron-Core 0.16, or 0.19, asks for an extra state of this attention.

        TEDotProductAttention (extensions/transformer_engine.py, sharded_state_dict) has one only beside learnable offsets
        of its softmax. 0.16 asks for all that a prediction layer has, too (transformer/multi_token_prediction.py: its
        MultiTokenPredictionBlock begins with the plain state dict of its layers; that of 0.19 does not).
        """
        learnable = f"{module}.softmax_offset" in self._catalog.weights
        return learnable or (module.startswith("mtp.") and self._options.mcore != "0.19")

    def _object_key(self, name: str) -> str:
        """The key of an object of a canonical module, with its place in the grid of layers and experts."""
        stored = stored_key(name, stacked=split_part(name)[0] in self._targets.stacked)
        count = {"layer": self._targets.outline.layers(name), "expert": self._targets.outline.num_experts or 1}
        offset = stored.prefix or (0,)
        grid = tuple(count[axis] for axis in stored.axes) or (1,)
        return f"{stored.key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, grid))}"

    def _adapt_common(self, archive: Archive, tree: dict[Any, Any]) -> dict[str, tuple[Any, Any]]:
        """Changes the common state for the target; returns the training arguments that differ."""
        changed: dict[str, tuple[Any, Any]] = {}
        options, groups, args = self._options, self._targets.groups, tree.get("args")
        if isinstance(args, Obj):
            stored = fields(args)
            values = layout_arguments(stored, self._layout, self._targets.padded_vocab()) | _format_arguments(
                stored, options, groups
            )
            values |= plain_master_arguments(stored) if self._completed else {}
            if not self.keep_rng:
                # load_checkpoint asks for rng_state unless the checkpoint says that it has none
                values["no_save_rng"] = True
            changed = change_arguments(args, values, newer=options.mcore == "0.19")
        tree.pop("rerun_state_machine", None)
        if tree.pop("modelopt_state", None) is not None:  # post_training/checkpointing.py, has_modelopt_state (0.16.1)
            text = "jobs look for ModelOpt's state in a folder of that name, which only ModelOpt can write"
            self.dropped.append(("modelopt_state", text))
        if groups is None:
            tree.pop("optimizer", None)
        else:
            tree["optimizer"] = common_optimizer(groups, groups.chain(self._layout.ep), options.optimizer)
            archive.members.update(groups.storages)
            _describe_optimizer(tree.setdefault("content_metadata", {}), options.optimizer)
        if isinstance(tree.get("content_metadata"), dict) and "singleton_local_shards" in tree["content_metadata"]:
            tree["content_metadata"]["singleton_local_shards"] = False
        return changed


def _describe_optimizer(content: dict[str, Any], form: str) -> None:
    """What a loader takes from `content_metadata` to know the keys of the optimizer's tensors."""
    content.pop("distrib_optim_fully_reshardable_mem_efficient", None)
    content.pop("distrib_optim_sharding_type", None)
    if form != "plain":
        content["distrib_optim_sharding_type"] = form
    content.setdefault("singleton_local_shards", False)
    content["chained_optim_avoid_prefix"] = True
    if form == "fully_reshardable":
        content["distrib_optim_fully_reshardable_mem_efficient"] = False


def _object_record(reader: Reader, info: ObjectInfo) -> bytes | tuple[Path, int, int]:
    """An object's record as torch_dist has it: a list of one."""
    refuse_damaged_object(reader.catalog, info.key)
    if info.wrapped:
        return reader.catalog.path / info.file, info.start, info.length
    return reader.stored_object(info.key).record()


def _format_arguments(args: Mapping[str, Any], options: ReshardOptions, groups: ParamGroups | None) -> dict[str, Any]:
    """The arguments that say what this format holds of the optimizer."""
    values: dict[str, Any] = {}
    if args.get("ckpt_format") not in (None, "torch_dist"):
        values |= {name: v for name, v in (("ckpt_format", "torch_dist"), ("use_dist_ckpt", True)) if name in args}
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):  # a job with these loads nothing but fsdp_dtensor
        values |= {name: False} if args.get(name) else {}
    if groups is None:
        return values | {"no_save_optim": True}
    return values | optimizer_arguments(args, groups, options.optimizer)
