"""Training arguments and flags of the job that loads a result: its layout, its optimizer, its master weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.layer_pattern import LayerPattern
from converters.megatron.layout import Layout
from converters.megatron.pipeline import parse_pp_layout
from converters.names import quoted
from converters.pickles.nodes import Global, Obj, fields, set_field

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.optimizer.groups import ParamGroups


def job_flags(root: Path, layout: Layout, *further_flags: str) -> str:
    """What Megatron-LM has to be told to load a training root at a layout."""
    words = [f"--load {quoted(root)}", f"--tensor-model-parallel-size {layout.tp}"]
    words.append(f"--pipeline-model-parallel-size {layout.pp}")
    words += [f"--expert-model-parallel-size {layout.ep}"] if layout.ep > 1 else []
    return " ".join([*words, *further_flags])


def optimizer_arguments(args: Mapping[str, Any], groups: ParamGroups, form: str) -> dict[str, Any]:
    """The training arguments that say how the optimizer is kept, with their values; only fields that there are.

    Args:
        form: "plain", "fully_reshardable" or "dp_reshardable".
    """
    distributed = any(part.part.distributed for part in groups.parts)
    mixed = len({part.part.distributed for part in groups.parts}) > 1
    values: dict[str, Any] = {}
    if args.get("use_distributed_optimizer") is not None:
        # where it has only a part of the parameters Megatron-LM replaces it by the other (main, validate_args)
        values["use_distributed_optimizer"] = distributed and not mixed
    if args.get("use_layer_wise_distributed_optimizer") is not None and form != "plain":
        values["use_layer_wise_distributed_optimizer"] = mixed
    elif args.get("use_layer_wise_distributed_optimizer"):
        values["use_layer_wise_distributed_optimizer"] = any(not part.apart for part in groups.parts)
    if "dist_ckpt_optim_fully_reshardable" in args:
        values["dist_ckpt_optim_fully_reshardable"] = form == "fully_reshardable"
    return values


def optimizer_flags(args: Mapping[str, Any], groups: ParamGroups | None, form: str) -> list[str]:
    """What Megatron-LM has to be told of the optimizer to load it; None stands for a result without one."""
    if groups is None:
        return ["--no-load-optim"]
    algorithms = {part.part.algorithm for part in groups.parts}
    named = args.get("optimizer")
    words = [f"--optimizer {named}"] if algorithms != {"Adam"} and isinstance(named, str) else []
    if "SGD with momentum" in algorithms and isinstance(args.get("sgd_momentum"), float):
        words.append(f"--sgd-momentum {args['sgd_momentum']}")
    if args.get("muon_scalar_optimizer") not in (None, "adam") and "Muon" in algorithms:
        words.append(f"--muon-scalar-optimizer {args['muon_scalar_optimizer']}")
    if any(part.part.distributed for part in groups.parts):
        words.append("--use-distributed-optimizer")
    return words + (["--dist-ckpt-optim-fully-reshardable"] if form == "fully_reshardable" else [])


def layout_arguments(args: Mapping[str, Any], layout: Layout, padded_vocab: int | None) -> dict[str, Any]:
    """The training arguments that describe a layout, with their values; fields that the source lacks stay absent.

    Args:
        padded_vocab: Rows of its embedding.
    """
    values = layout_values(layout) | _pattern_arguments(args, layout)
    if padded_vocab is not None:
        values["padded_vocab_size"] = padded_vocab
    return {name: v for name, v in values.items() if name in args and (args[name] is not None or v is not None)}


def layout_values(layout: Layout) -> dict[str, Any]:
    """Every training argument that gives a size of a layout, with its value."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "data_parallel_size": layout.dp,
        "world_size": layout.world_size,
        "transformer_pipeline_model_parallel_size": layout.pp,
        "decoder_first_pipeline_num_layers": layout.first_layers,
        "decoder_last_pipeline_num_layers": layout.last_layers,
        "pipeline_model_parallel_layout": layout.pp_layout,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": layout.vpp,
    }


LAYOUT_ARGUMENTS = frozenset(
    (*layout_values(Layout()), "hybrid_layer_pattern", "padded_vocab_size", "use_tp_pp_dp_mapping")
)
"""Training arguments that describe how a checkpoint is divided; `layout_arguments` gives their values."""

_PROVIDER_NAMES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_ONLY_ARGUMENTS = (
    *("data_parallel_size", "world_size", "transformer_pipeline_model_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
)


def provider_values(layout: Layout) -> dict[str, Any]:
    """The same as settings of a `TransformerConfig`, which NeMo and Megatron-Bridge keep."""
    values = layout_values(layout)
    return {_PROVIDER_NAMES.get(name, name): v for name, v in values.items() if name not in _ONLY_ARGUMENTS}


def _pattern_arguments(args: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Since core 0.19 a hybrid's pattern bounds its pipeline stages, and no other argument may (training/arguments.py)."""
    text = args.get("hybrid_layer_pattern")
    if not isinstance(text, str) or not text:
        return {}
    pattern = LayerPattern.parse(text)
    stages: tuple[int, ...] = ()
    if layout.pp > 1:
        predicted = "".join(parse_pp_layout(layout.pp_layout)).count("m") if layout.pp_layout else pattern.depths
        pipeline = layout.pipeline(len(pattern.layers), predicted)
        stages = tuple(len(stage.layers) for stage in pipeline.stages)
    others = (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
        "num_virtual_stages_per_pipeline_rank",
    )
    return {"hybrid_layer_pattern": pattern.written(stages), **dict.fromkeys(others)}


def plain_master_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """The training arguments of a job that loads fp32 master weights where the one that saved kept remainders.

    A precision-aware optimizer takes nothing but remainders (TransformerEngine, `FusedAdam.set_scaled_state`), so the result
    is for one that is not; the moments in a checkpoint are fp32 in any case.
    """
    fp32 = Global("torch", "float32")
    values = {"use_precision_aware_optimizer": False} | dict.fromkeys(_NARROWED, fp32)
    return {name: value for name, value in values.items() if name in args}


_NARROWED = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def change_arguments(args: Obj, values: Mapping[str, Any], *, newer: bool = False) -> dict[str, tuple[Any, Any]]:
    """Sets fields of the inert Namespace of training arguments.

    Args:
        newer: Keep values of classes that only Megatron-Core 0.19 and later know; otherwise they become None.

    Returns:
        The fields that differ now: name -> (before, after).
    """
    stored, changed = fields(args), {}
    for name, value in values.items():
        if name not in stored or shown_argument(stored[name]) != shown_argument(value):
            changed[name] = (shown_argument(stored.get(name)), shown_argument(value))
            set_field(args, name, value)
    for name, value in stored.items() if not newer else ():
        if (unknown := _only_newer(value)) is not None:
            changed[name] = (repr(unknown), None)
            set_field(args, name, None)
    return changed


def shown_argument(value: Any) -> Any:
    """A value of an argument as a person reads it, and JSON has it."""
    return value.path if isinstance(value, Global) else value


_LOADABLE_CLASSES = ("AttnBackend", "ModelType", "OptimizerConfig", "RerunDiagnostic", "RerunMode", "RerunState")


def _only_newer(value: Any) -> Obj | None:
    """The first instance in an argument's value of a class that Megatron-Core 0.14 and 0.16 do not let a common state hold.

    They read it with `weights_only` and their own list of classes (megatron/core/safe_globals.py), and refuse all of it for
    one argument that no program reads, `inference_cuda_graph_scope` of 0.19 for example. A job takes None for "not told".
    """
    for item in value if isinstance(value, list) else [value]:
        if (
            isinstance(item, Obj)
            and item.func.module.startswith("megatron.")
            and item.func.name not in _LOADABLE_CLASSES
        ):
            return item
    return None
