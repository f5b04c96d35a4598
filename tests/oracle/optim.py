"""The distributed optimizer of the real megatron-core over a loaded checkpoint, compared with the truth bit for bit.

Only the wheel is needed. Each rank writes its shards of the master weights (then of each moment) into an fp32 twin of its
model, and the twin's own `sharded_state_dict` says which part of which tensor they are.
"""

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

from oracle import models

STATES = ("master", "exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Stands for Apex's, whose steps are counted by group; torch's keeps a count beside every moment, which Megatron
    cannot load from a fully reshardable checkpoint. It allocates its state and never trains."""

    def __init__(self, params, **options):
        super().__init__(params, {"bias_correction": True} | options)

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = -1
            for parameter in group["params"]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in STATES[1:]}


def use_fused_adam():
    """As if Apex were installed."""
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def build_optimizer(model, distributed=True):
    """The optimizer with its state allocated, and every number in it made one that no checkpoint holds."""
    use_fused_adam()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.01,
        clip_grad=0.0,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    optimizer.step()  # allocates the state
    for part in parts(optimizer):
        for _, _, values in shards(part):
            for value in values.values():
                value.fill_(float("nan"))
    return optimizer


def parts(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])


def shards(optimizer):
    """(parameter, range of its local elements, {state: this rank's elements}) of an optimizer."""
    if not hasattr(optimizer, "model_param_group_index_map"):  # it is not distributed
        for models_of, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(models_of, mains, strict=True):
                state = {k: optimizer.optimizer.state[main][k] for k in STATES[1:]}
                yield parameter, slice(0, parameter.numel()), {"master": main.data} | state
        return
    for parameter, (group, position) in optimizer.model_param_group_index_map.items():
        main = optimizer.optimizer.param_groups[group]["params"][position]
        span = optimizer._get_model_param_range_map(parameter)["param"]
        state = optimizer.optimizer.state[main]
        yield parameter, slice(span.start, span.end), {"master": main.data} | {k: state[k] for k in STATES[1:]}


def load(folder, model, optimizer, per_layer):
    """Loads weights and optimizer as megatron.training does, with the sharding type that the checkpoint names."""
    content = dist_checkpointing.load_content_metadata(str(folder))
    metadata = {
        **content,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": per_layer,
    }
    state = {"model": models.sharded_state(model, per_layer)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded


def load_legacy(folder, model, optimizer):
    """Loads a rank's files as megatron.training does with `--ckpt-format torch`."""
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    loaded = torch.load(folder / name / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    model.load_state_dict(loaded["model"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        if (folder / name / "distrib_optim.pt").exists():
            optimizer.load_parameter_state(str(folder / name / "distrib_optim.pt"))
    return loaded


def compare(args, model, optimizer, expected, per_layer):
    """On this rank: `{state: {key: what differs}}`, `{state: elements compared}`, elements of its model, param groups."""
    twin = models.build_model(args).float()
    named = dict(model.named_parameters())
    targets = {id(named[name]): parameter for name, parameter in twin.named_parameters()}
    wrong, compared, local = {}, {}, 0
    for kind in STATES:
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(float("inf"))  # what this rank does not hold
            for part in parts(optimizer):
                for parameter, span, values in shards(part):
                    targets[id(parameter)].view(-1)[span] = values[kind].view(-1)
        wrong[kind], compared[kind] = {}, 0
        for shard in models.shards(models.sharded_state(twin, per_layer)):
            stacked = models.names(shard)
            full = [expected[kind][name] for name in stacked]
            wanted = models.local_part(shard, full[0] if stacked == [shard.key] else torch.stack(full))
            held = ~torch.isinf(shard.data)
            compared[kind] += int(held.sum())
            local += shard.data.numel() if kind == STATES[0] else 0
            if not torch.equal(shard.data[held], wanted[held]):
                wrong[kind][shard.key] = "values differ"
    groups = [
        {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str))}
        for part in parts(optimizer)
        for group in part.optimizer.param_groups
    ]
    return {"wrong": wrong, "compared": compared, "local": local, "groups": groups}
