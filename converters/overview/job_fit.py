"""Will a job with these flags load this checkpoint? By what is known of Megatron's loader; what is not known is said.

Nothing is read but what `inspect` reads. Each rule is one that distckpt follows when it writes: which layout a model may
have is in `megatron/layout_check.py`, what an optimizer layout permits in `megatron/optimizer_layout.py`, and which flags
a loader needs in `write/target_state.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.folder import exists
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_layout import optimizer_layout, optimizer_resharding
from converters.megatron.optimizer_parts import optimizer_parts
from converters.models import of_config
from converters.overview.job import Finding
from converters.overview.job_vocabulary import vocabulary_findings
from converters.pickles.nodes import Obj

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import Catalog
    from converters.megatron.optimizer_layout import Resharding
    from converters.overview.job import Job

_SINCE = re.compile(r"needs Megatron-Core (\d+)\.(\d+) or later")
# the flags of a job that reads each format (validate_args of megatron/training/arguments.py, core_v0.16.1)
_READERS = {
    "fsdp_dtensor": ("--use-megatron-fsdp", "fsdp_dtensor"),
    "megatron_dcp": ("--use-torch-fsdp2", "torch_dcp"),
}
_COMPARED = ("tp", "pp", "vpp", "ep", "expert_tp", "cp", "dp", "first_layers", "last_layers", "pp_layout")
_AXES = {
    "expert_tp": "etp",
    "first_layers": "pp",
    "last_layers": "pp",
    "pp_layout": "pp",
}  # what `Resharding` calls them


def job_findings(catalog: Catalog, job: Job) -> list[Finding]:
    """The reasons why a job loads a checkpoint or does not, in the order in which its loader meets them."""
    out = [Finding("damage", False, p.message, fixed=False) for p in catalog.problems if p.severity == "error"][:8]
    out += _check_format(catalog, job)
    if not catalog.megatron:
        return out
    out += _check_layout(catalog, job)
    out += _check_latent_queries(catalog, job)
    out += vocabulary_findings(catalog, job)
    if catalog.path.name == "release":  # load_checkpoint (megatron/training/checkpointing.py, core_v0.16.1)
        out.append(Finding("optimizer", True, "a job reads only the weights of a release"))
    elif job.loads_optimizer:
        out += _check_optimizer(catalog, job)
    elif any(t.kind == "optimizer" for t in catalog.tensors.values()):
        out.append(Finding("optimizer", True, "the flags leave it out"))
    wrappers = job.switches & {switch for stored, (switch, _) in _READERS.items() if stored != catalog.format}
    unread = (*job.unread, *sorted(wrappers))
    out += [Finding("flags", None, f"what {word} requires of a checkpoint is not known") for word in unread]
    return out


def _check_format(catalog: Catalog, job: Job) -> Iterator[Finding]:
    stored = catalog.format
    if not catalog.megatron:
        text = f"{stored} without Megatron's names is no checkpoint of Megatron-LM"
        is_known_model = catalog.framework == "Hugging Face" and of_config(catalog.config) is not None
        yield Finding("format", False, text, fixed=is_known_model)
    elif stored == "torch_dist":
        if job.format not in (None, "torch_dist"):
            yield Finding("format", False, f"the checkpoint is torch_dist, the job asks for {job.format}")
        elif exists(catalog.path / "common.pt"):
            yield _check_common_file(job)
        elif job.mcore is None:
            text = "the common state is inside the data files, as Megatron-Core 0.19 or later reads it"
            yield Finding("format", None, text)
        elif job.mcore < (0, 19):
            text = "the common state is inside the data files, which Megatron-Core before 0.19 does not read"
            yield Finding("format", False, text)
        else:
            yield Finding("format", True, "torch_dist of Megatron-Core 0.19")
    elif stored == "legacy":
        fits = None if job.format is None else job.format == "torch"
        yield Finding("format", fits, "a file for each rank, which a job reads with --ckpt-format torch")
    elif stored in _READERS:
        switch, name = _READERS[stored]  # the model of the job must be wrapped as the one that was saved
        fits = switch in job.switches and job.format == name
        yield Finding("format", fits, f"a job reads {stored} with {switch} --ckpt-format {name}")
    elif stored == "zarr":
        yield _check_zarr(job)
    elif stored == "torch":
        yield Finding("format", False, "one file of torch.save: a job reads a folder for each iteration")
    else:
        yield Finding("format", None, f"which jobs read {stored} is not known")
    if catalog.megatron and not isinstance(_common(catalog).get("args"), Obj):
        text = f"of Megatron-LM; {catalog.framework} has a loader of its own"
        if catalog.framework in ("Megatron-LM", "Megatron-Core"):
            text = "as Megatron-LM saves them"
        yield Finding("arguments", None, f"the checkpoint stores no training arguments {text}")


def _check_latent_queries(catalog: Catalog, job: Job) -> Iterator[Finding]:
    """Queries of latent attention without a rank of their own: 0.19 has a norm there (transformer/mla_qk_norm_config.py)."""
    query = ".self_attention.linear_q_proj"
    if job.mcore is None or not any(name.endswith(f"{query}.weight") for name in catalog.weights):
        return
    normed = any(name.endswith(f"{query}.layer_norm_weight") for name in catalog.weights)
    every = any(name.endswith(".linear_kv_up_proj.layer_norm_weight") for name in catalog.weights)
    if every and normed is not (job.mcore >= (0, 19)):
        text = f"the queries of its latent attention have {'a' if normed else 'no'} norm, those of the job's model "
        text += "none" if normed else "have one since Megatron-Core 0.19, which computes something else"
        yield Finding("model", False, text, fixed=False)


def _check_zarr(job: Job) -> Finding:
    """Whether the job has a reader of zarr, which Megatron-Core 0.16 removed (core/dist_checkpointing/strategies)."""
    if job.format not in (None, "zarr", "torch_dist"):
        return Finding("format", False, f"the checkpoint is zarr, the job asks for {job.format}")
    text = "Megatron-Core up to 0.15 reads zarr, with the package zarr installed; later ones cannot"
    return Finding("format", None if job.mcore is None else job.mcore < (0, 16), text)


def _check_layout(catalog: Catalog, job: Job) -> Iterator[Finding]:
    try:
        layout = job.layout()
        shapes = {name: tensor.shape for name, tensor in catalog.weights.items()}
        notes = check_layout(ModelArgs.from_catalog(catalog), layout, shapes)
    except RequestError as error:
        hint = f"; {error.hint}" if error.hint else ""
        yield Finding("layout", False, f"{error.message}{hint}", fixed=False)
        return
    changed = _changed_sizes(catalog, job, layout)
    texts = [f"{name} {old or 'none'} -> {new or 'none'}" for name, (old, new) in changed.items()]
    if catalog.format == "legacy" and changed.keys() - {"dp", "cp"}:
        yield Finding("layout", False, f"the legacy format has a file for each rank: {', '.join(texts)}")
    elif catalog.format in ("torch_dist", "zarr"):
        text = f"{catalog.format} weights load at any layout: {', '.join(texts) or 'it is the same'}"
        yield Finding("layout", True, text)
    else:
        yield Finding("layout", None if changed else True, ", ".join(texts) or "it is the same")
    for note in notes:
        least = _SINCE.search(note)
        if least is None or job.mcore is None:
            yield Finding("layout", None, note)
        elif job.mcore < (int(least[1]), int(least[2])):
            yield Finding("layout", False, note, fixed=False)


def _check_common_file(job: Job) -> Finding:
    """Whether a job opens common.pt: pickled arguments name classes, which older versions do not have."""
    if job.mcore is not None and job.mcore < (0, 15):
        text = f"Megatron-Core {job.mcore[0]}.{job.mcore[1]} may not open the arguments that a newer version pickled"
        return Finding("format", None, f"torch_dist with common.pt; {text}")
    return Finding("format", True, "torch_dist with common.pt, which Megatron-Core 0.15 and later read")


def _changed_sizes(catalog: Catalog, job: Job, layout: Layout) -> dict[str, tuple[Any, Any]]:
    """Sizes that differ from the job that saved; that of data parallelism only if a flag says it."""
    saved = Layout.saved(catalog)
    pairs = {name: (getattr(saved, name), getattr(layout, name)) for name in _COMPARED}
    if ModelArgs.from_catalog(catalog).num_experts is None:
        del pairs["ep"], pairs["expert_tp"]
    if "dp" not in job.sizes:
        del pairs["dp"]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _common(catalog: Catalog) -> Mapping[Any, Any]:
    return catalog.common if isinstance(catalog.common, Mapping) else {}


def _check_optimizer(catalog: Catalog, job: Job) -> Iterator[Finding]:
    stored, parts = optimizer_layout(catalog), optimizer_parts(catalog)
    if stored.name == "none":
        text = "no optimizer state is stored: start the job with --no-load-optim"
        yield Finding("optimizer", False, text, fixed=False)
        return
    if not {"opt_param_scheduler", "lr_scheduler"} & _common(catalog).keys():
        text = "the checkpoint stores no opt_param_scheduler, which Megatron-LM's loader asks for"
        yield Finding("scheduler", False, text)
    rule = optimizer_resharding(catalog)
    if rule is None:
        text = "" if catalog.format in _READERS else "; not known what it means for these flags"
        yield Finding("optimizer", None, f"{stored.name}: {stored.permits}{text}")
        return
    distributed = any(part.distributed for part in parts.parts)
    if distributed and not job.distributed:
        text = "the state is the distributed optimizer's, the job is without --use-distributed-optimizer"
        yield Finding("optimizer", False, text)
    elif job.distributed and not distributed:
        text = "the state is of an optimizer that is not distributed, the job is with --use-distributed-optimizer"
        yield Finding("optimizer", False, text)
    yield from _check_resharding(catalog, job, rule, f"{stored.name}: {stored.permits}")
    yield from _check_precision(catalog, job, stored.masters)
    if any(part.algorithm.startswith("SGD") for part in parts.parts) and job.mcore in (None, (0, 16)):
        text = "Megatron-LM 0.16.1 cannot load an SGD optimizer, not even its own:"
        text += " start such a job with --no-load-optim"
        yield Finding("optimizer", False if job.mcore else None, text, fixed=False)
    if stored.caution:
        yield Finding("optimizer", None, stored.caution)


def _check_resharding(catalog: Catalog, job: Job, rule: Resharding, text: str) -> Iterator[Finding]:
    try:
        changed = _changed_sizes(catalog, job, job.layout())
    except RequestError:  # said of the layout
        return
    axes = {_AXES.get(name, name) for name in changed}
    late = rule.until is not None and job.mcore is not None and job.mcore > rule.until
    early = rule.since is not None and job.mcore is not None and job.mcore < rule.since
    unversioned = job.mcore is None and (rule.since or rule.until) is not None
    if late or early or axes - rule.sizes - {"cp"}:
        yield Finding("optimizer", False, text)
    elif "cp" in axes - rule.sizes or unversioned or rule.condition:
        condition = f"; if {rule.condition}" if rule.condition else ""
        needs = "; which version is not told (--mcore)" if unversioned else condition
        yield Finding("optimizer", None, f"{text}{needs}")
    else:
        yield Finding("optimizer", True, text)


def _check_precision(catalog: Catalog, job: Job, masters: str) -> Iterator[Finding]:
    aware = "--use-precision-aware-optimizer" in job.switches
    if "int16" in masters:
        if not aware:
            yield Finding("masters", False, f"{masters}; the job is without --use-precision-aware-optimizer")
        elif job.mcore is None or job.mcore < (0, 17):
            text = f"{masters}: Megatron-Core 0.17 or later loads these"
            yield Finding("masters", None if job.mcore is None else False, text)
    elif masters or aware:
        text = masters or "no argument says that master weights are a precision-aware optimizer's"
        yield Finding("masters", None, text)
