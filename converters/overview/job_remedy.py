"""Which command writes a checkpoint anew, so that a job with some flags loads it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.megatron.layout import Layout
from converters.names import quoted
from converters.overview.job_fit import DEFAULTS, STAGES, job_findings

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.overview.job_fit import Job

_NOT_WRITTEN = {"--use-precision-aware-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"}


def job_remedy(catalog: Catalog, job: Job) -> str:
    """The command that writes the checkpoint so that the job loads it; empty if none is known to do so."""
    findings = job_findings(catalog, job)
    wrong = [finding for finding in findings if finding.fits is False]
    if not wrong or any(not finding.fixed for finding in wrong):
        return ""
    if job.format not in (None, "torch_dist", "torch") or job.switches & _NOT_WRITTEN:
        return ""
    if not catalog.megatron:
        return _import(job)
    layout, legacy, saved = job.layout(), job.format == "torch", Layout.saved(catalog)
    sizes = {name: getattr(layout, name) for name in (*DEFAULTS, *STAGES)}
    sizes |= {"dp": job.sizes.get("dp"), "etp": layout.etp if saved.etp is None else layout.expert_tp}
    stated = any(sizes[name] is not None for name in STAGES)
    if layout.pp == saved.pp and not stated and any(getattr(saved, name) is not None for name in STAGES):
        if legacy:
            return ""  # what is not given stays that of the source, and `--vpp 1` is not none to a legacy job
        sizes["vpp"] = 1
    words = ["distckpt", *(("convert", "CKPT", "DST", "--to", "legacy") if legacy else ("reshard", "CKPT", "DST"))]
    if catalog.framework != "Megatron-LM" and not legacy:
        words = ["distckpt", "convert", "CKPT", "DST", "--to", "torch_dist"]
    for name, size in sizes.items():
        if size is not None:
            words += [f"--{name.replace('_', '-')}", quoted(str(size)) if name == "pp_layout" else str(size)]
    if not job.loads_optimizer:
        return " ".join([*words, "--optimizer none"])
    early = job.mcore is not None and job.mcore < (0, 15)
    if job.distributed and early and not legacy:
        return ""  # it reads no form that is written for every layout
    form = (
        ("distributed" if job.distributed else "plain")
        if legacy
        else "fully_reshardable"
        if job.distributed
        else "plain"
    )
    return " ".join([*words, "--optimizer", form])


def _import(job: Job) -> str:
    """The command that makes a checkpoint for the job of a Hugging Face folder."""
    words = ["distckpt", "import-hf", "CKPT", "DST"]
    for name, size in job.sizes.items():
        words += [f"--{name.replace('_', '-')}", quoted(str(size)) if name == "pp_layout" else str(size)]
    words += ["--to", "legacy"] if job.format == "torch" else []
    return " ".join([*words, *(["--mcore", "0.19"] if job.mcore is not None and job.mcore >= (0, 19) else [])])
