"""Names what no rule covers in a checkpoint; it counts as neither right nor wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.formats.side_files import side_files
from converters.megatron.optimizer_parts import MASTERS
from converters.megatron.pipeline import Pipeline
from converters.megatron.split import split_rule
from converters.names import MASTER, StateName, folded, listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.catalog import Catalog
    from converters.verification.report import Check

# param, fp32_param and master_param are masters; Adam has two moments, Lion one, SGD and Muon a momentum, AdaptiveMuon
# one more (training-run facts: core_v0.16.1 optimizer.py, Emerging-Optimizers v0.3.1 orthogonalized_optimizer.py)
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "moment2_buffer", "step")
_STATES = frozenset((MASTER, *MASTERS, *_MOMENTS))
_OBJECTS = ("rng_state", "rerun_state_machine_state", "common_state")


def report_unknown(check: Check, catalog: Catalog) -> None:
    """Reports tensors, objects and files that no rule knows. Their records and checksums are checked, their meaning is not.

    Args:
        check: Where it is noted.
        catalog: What the checkpoint holds.
    """
    if not catalog.megatron:
        return
    files = [file.name for file in side_files(catalog) if file.kind in ("unknown", "special")]
    _report(check, files, "distckpt does not know this file", "distckpt does not know these files")
    weights = [name for name in catalog.weights if not _has_rule(name)]
    _report(check, weights, "no rule knows this weight", "no rule knows these weights")
    strange, homeless = list[str](), list[str]()
    for name, tensor in catalog.tensors.items():
        if tensor.kind != "optimizer" or tensor.opaque:
            continue
        parts = StateName.parse(name)
        if parts is None or parts.state not in _STATES:
            strange.append(name)
        elif parts.parameter not in catalog.weights:
            homeless.append(name)
    _report(check, strange, "no optimizer is known to have this state", "no optimizer is known to have these states")
    _report(check, homeless, "state of no weight of the model", "states of no weight of the model")
    names = (o.name for o in catalog.objects.values() if not o.name.endswith("._extra_state"))
    objects = (n for n in names if n.rpartition("/")[2] not in _OBJECTS and ".dp_group_idx_" not in n)
    _report(check, dict.fromkeys(objects), "no rule knows this object", "no rule knows these objects")


def _has_rule(name: str) -> bool:
    try:
        split_rule(name)
    except RequestError:
        return False
    return Pipeline.recognises(name)


def _report(check: Check, names: Iterable[str], singular: str, plural: str) -> None:
    unknown = tuple(names)  # tensors, or keys and files, which are shown alike
    if not unknown:
        return
    shown = listed(folded(unknown), 8)
    check.leave(f"{singular if len(unknown) == 1 else plural}: {shown}", tensors=unknown)
