"""The state of Megatron-LM's learning rate scheduler, for checkpoints of frameworks that have another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.optimizer_parts import chained_entries, entry_groups

if TYPE_CHECKING:
    from collections.abc import Mapping


def build_scheduler(
    tree: Mapping[Any, Any], values: Mapping[str, Any], samples: int | None, iteration: int | None
) -> dict[str, Any]:
    """The state of Megatron's scheduler (`OptimizerParamScheduler.state_dict`, core_v0.16.1) of a job of NeMo.

    Megatron counts samples, NeMo's schedulers count steps (nemo/core/optim/lr_scheduler.py).
    """
    groups = [group for entry in chained_entries(tree).values() for group in entry_groups(entry)]
    first = next((g for g in groups if g.get("wd_mult", g.get("pre_wd_mult")) != 0.0), groups[0] if groups else {})
    schedulers = tree.get("lr_schedulers")
    scheduler = schedulers[0] if isinstance(schedulers, list) and schedulers and isinstance(schedulers[0], dict) else {}
    steps = iteration or 0
    batch = samples // steps if samples and steps else 1

    def counted(name: str) -> int:
        value = scheduler.get(name)
        return value * batch if type(value) is int else 0

    def number(*candidates: Any) -> float:
        return next((float(c) for c in candidates if isinstance(c, int | float) and not isinstance(c, bool)), 0.0)

    rates = scheduler.get("base_lrs")
    decay = counted("max_steps") or counted("decay_steps") or max(samples or 0, steps * batch, 1)
    weight_decay = number(first.get("weight_decay"), values.get("weight_decay"))
    return {
        "max_lr": number(*(rates if isinstance(rates, list) else ()), first.get("max_lr"), first.get("lr")),
        "lr_warmup_steps": min(counted("warmup_steps"), decay - 1),
        "num_steps": samples or steps * batch,
        "lr_decay_style": "cosine",
        "lr_decay_steps": decay,
        "min_lr": number(scheduler.get("min_lr"), first.get("min_lr")),
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": decay,
    }
