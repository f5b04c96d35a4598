"""Changes to the state of a training job for another layout, shared by the formats that store it.

Sources: megatron/training/checkpointing.py (load_checkpoint, check_checkpoint_args), tags core_v0.9.0 to core_v0.19.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from converters.errors import RequestError
from converters.execute.destination import check_destination
from converters.megatron.damage import refuse_contradictions, refuse_damaged, refuse_foreign_names
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check_layout
from converters.megatron.megatron_args import ignored_scaling, megatron_arguments, without_argument
from converters.megatron.model_args import ModelArgs
from converters.names import quoted
from converters.optimizer.state import OptimizerState, has_optimizer, optimizer_state
from converters.pickles.nodes import Global, Obj
from converters.write.scheduler import build_scheduler
from converters.write.write_plan import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.formats.common_state import Archive

_Options = TypeVar("_Options", bound="JobOptions")


@dataclass(frozen=True, slots=True)
class JobOptions(WriteOptions):
    """What a person may ask of a checkpoint that a training job loads.

    Attributes:
        optimizer: Form of the optimizer's state; "keep" is what comes nearest to the source's.
        rng: "keep", "drop", or "auto": keep where the grid of ranks allows it.
        extra_state: "keep", "drop", or "fill": keep, and make the missing ones.
        vocab_size: True rows of the vocabulary; None takes the checkpoint's word.
        weights_only: Leave out optimizer and random states.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rng": ("keep", "drop", "auto"),
        "extra_state": ("keep", "drop", "fill"),
    }

    optimizer: str = "keep"
    rng: str = "auto"
    extra_state: str = "fill"
    vocab_size: int | None = None
    weights_only: bool = False

    def resolved(self) -> Self:
        """The same without `weights_only`, in the words of the other options."""
        return replace(self, optimizer="none", rng="drop") if self.weights_only else self


def check_request(
    catalog: Catalog, destination: Path, layout: Layout, options: JobOptions
) -> tuple[ModelArgs, list[str]]:
    """Checks that a checkpoint can be written for a job, before its tensors are looked at.

    Returns:
        Facts of the model, and sentences about the layout that a person should read.

    Raises:
        RequestError: Names are not Megatron's, arguments contradict the tensors, or the model cannot be laid out so.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    refuse_damaged(catalog, "weight", *(["optimizer"] if options.optimizer != "none" else []))
    args = ModelArgs.from_catalog(catalog)
    refuse_foreign_names(catalog)
    refuse_contradictions(args, catalog)
    return args, check_layout(args, layout, {name: info.shape for name, info in catalog.weights.items()})


def chosen_optimizer(
    reader: Reader, options: _Options, choose_form: Callable[[OptimizerState, str], str]
) -> tuple[OptimizerState, _Options]:
    """The optimizer's tensors, and the options with "keep" and "there is none" resolved.

    Args:
        choose_form: The form that "keep", or "auto", means for what was found.
    """
    if options.optimizer == "none" or not has_optimizer(reader.catalog):
        named = options.optimizer not in ("none", "keep", "auto")
        notes = (f"the source holds no optimizer state: there is none to be written as {options.optimizer}",)
        return OptimizerState({}, notes=notes if named else ()), replace(options, optimizer="none")
    state = optimizer_state(reader)
    open_choice = options.optimizer in ("keep", "auto")
    return state, replace(options, optimizer=choose_form(state, options.optimizer)) if open_choice else options


def unwanted_state(catalog: Catalog) -> list[tuple[str, str]]:
    """The optimizer's tensors, left out as requested: names and the reason."""
    return [
        (name, "optimizer state is left out by option") for name, t in catalog.tensors.items() if t.kind == "optimizer"
    ]


def open_common(reader: Reader) -> tuple[Archive, dict[Any, Any]]:
    """The common state of a checkpoint, wherever it keeps it: the archive and the dictionary in it, both anew.

    Raises:
        RequestError: It has none.
    """
    archive = reader.common_state()
    if archive is None:
        raise RequestError(
            "the checkpoint has no common state (neither common.pt nor common_state), so no job could resume from it",
            hint=f"distckpt convert {quoted(reader.catalog.root)} OUT --to safetensors keeps the weights",
        )
    tree = archive.tree[0] if isinstance(archive.tree, list) and len(archive.tree) == 1 else archive.tree
    if not isinstance(tree, dict):
        raise RequestError("the common state is not a dictionary")
    return archive, tree


def as_megatron_lm(
    catalog: Catalog, tree: Mapping[Any, Any], *, optimizer: bool
) -> tuple[dict[Any, Any], list[tuple[str, str]], list[str]]:
    """The common state of NeMo or Megatron-Bridge as Megatron-LM has it.

    Args:
        optimizer: The optimizer goes along, so that its loader asks for the state of a scheduler, too.

    Returns:
        The common state with training arguments made of the configuration, what of it is not carried, with the reason, and
        sentences a person should read. One that has arguments is Megatron-LM's own and stays as it is.
    """
    if isinstance(tree.get("args"), Obj):
        return dict(tree), [], []
    model = ModelArgs.from_catalog(catalog)
    values, notes = megatron_arguments(model, catalog.options), [*without_argument(model), *ignored_scaling(model)]
    if samples := _samples_seen(tree):
        values.setdefault("consumed_train_samples", samples)
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= values.keys():  # what a loader compares at least
        return dict(tree), [], []
    trained = "optimizer" in tree or "optimizer_states" in tree
    if optimizer and trained and "opt_param_scheduler" not in tree:
        scheduler = build_scheduler(tree, values, samples, catalog.iteration)
        tree = {**tree, "opt_param_scheduler": scheduler}
        notes = [*notes, _SCHEDULER_NOTE.format(**scheduler)]
    # Lightning's part of it holds classes that Megatron-LM does not let a common state hold
    carried = {key: value for key, value in tree.items() if key in _CARRIED}
    dropped = [
        (str(key), f"of {catalog.framework}; Megatron-LM cannot hold it")
        for key in tree
        if key not in (*carried, *_OWN_ENTRIES)
    ]
    items = (Obj(Global("argparse", "Namespace"), kind="newobj", state=values), 3.0, catalog.iteration or 0)
    return (
        {"num_floating_point_operations_so_far": 0, **carried, **dict(zip(_OWN_ENTRIES, items, strict=True))},
        dropped,
        notes,
    )


_SCHEDULER_NOTE = (
    "Megatron-LM's loader asks for the state of a scheduler of its own: it was made of the framework's scheduler, the param "
    "groups and the samples seen. Assumed: decay style {lr_decay_style}, which no state tells, over {lr_decay_steps} "
    "samples, warmup over {lr_warmup_steps}, constant weight decay. Start the job with --override-opt_param-scheduler to "
    "use what its own arguments say"
)


_OWN_ENTRIES = ("args", "checkpoint_version", "iteration")
_CARRIED = ("optimizer", "opt_param_scheduler", "content_metadata", "num_floating_point_operations_so_far")


def _samples_seen(tree: Mapping[Any, Any]) -> int | None:
    """NeMo's data modules keep what they call consumed_samples under their own name (nemo/lightning/pytorch/plugins)."""
    samples = [v.get("consumed_samples") for v in tree.values() if isinstance(v, dict)]
    return next((n for n in samples if type(n) is int), None)


def iteration_folder(catalog: Catalog) -> str:
    """Where in a training root the checkpoint lies."""
    released = catalog.imported is not None and catalog.iteration is None
    return "release" if released or catalog.path.name == "release" else f"iter_{catalog.iteration or 0:07d}"


def tracker(folder: str) -> bytes:
    """What the tracker file says of an iteration's folder."""
    return folder.removeprefix("iter_").lstrip("0").encode() or b"0"


def describe(
    catalog: Catalog, layout: Layout, optimizer: str, changed: Mapping[str, tuple[Any, Any]]
) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
    """What a person and a program are told of a checkpoint for another job: `summary` and `facts` of a conversion.

    Args:
        changed: Training arguments that differ: name -> (before, after).
    """
    lines = [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]
    summary = (
        ("from", str(Layout.saved(catalog))),
        ("to", f"{layout}, optimizer: {optimizer}"),
        *(("" if number else "args", line) for number, line in enumerate(lines)),
    )
    sizes = ("tp", "pp", "vpp", "cp", "ep", "expert_tp", "dp", "world_size")
    return summary, {
        "layout": {name: getattr(layout, name) for name in sizes},
        "optimizer": optimizer,
        "changed_args": {name: {"from": old, "to": new} for name, (old, new) in changed.items()},
    }


def rng_fits(catalog: Catalog, layout: Layout, rng: str, dropped: list[tuple[str, str]]) -> bool:
    """Whether the random states of a checkpoint are carried to a job; if not, notes each with the reason.

    Args:
        rng: "keep", "drop", or "auto": keep where the grid of ranks is the same.
        dropped: Where to note what is not carried, as `(what, reason)`.

    Raises:
        RequestError: They were to be kept and cannot be.
    """
    stored = [o for o in catalog.objects.values() if o.name == "rng_state"]
    if not stored:
        return False
    grid, target = stored[0].grid, (layout.pp, layout.tp, layout.dp)
    same = grid == target[: len(grid)]
    if rng == "keep" and not same:
        have = " x ".join(map(str, grid))
        need = " x ".join(map(str, target[: len(grid)]))
        raise RequestError(
            f"the random state was saved for a grid of {have} ranks (pp x tp{' x dp' if len(grid) > 2 else ''}), "
            f"the target has {need}",
            hint="--rng drop: the job starts with fresh random numbers, as Megatron does after every such change",
        )
    if rng == "drop" or not same:
        reason = "not wanted" if rng == "drop" else "the target has another grid of ranks"
        dropped.extend((o.key, f"random state: {reason}") for o in stored)
        return False
    return True
