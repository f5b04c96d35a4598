"""Which command writes a checkpoint anew, so that a job with some flags loads it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.megatron.layout import Layout
from converters.names import quoted
from converters.overview.job import DEFAULTS, STAGES
from converters.overview.job_fit import job_findings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from converters.catalog import Catalog
    from converters.overview.job import Job

_NOT_WRITTEN = {"--use-precision-aware-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"}


def job_remedy(catalog: Catalog, job: Job) -> str:
    """The command that writes the checkpoint so that the job loads it; empty if none is known to do so."""
    findings = job_findings(catalog, job)
    wrong = [finding for finding in findings if finding.fits is False]
    if not wrong or any(not finding.fixed for finding in wrong):
        return ""
    if job.format not in (None, "torch_dist", "torch") or job.switches & _NOT_WRITTEN:
        return ""
    legacy = job.format == "torch"
    if not catalog.megatron:
        command = f"distckpt import-hf CKPT DST{_options(job.sizes)}"
        command += " --to legacy" if legacy else ""
        return command + (" --mcore 0.19" if job.mcore is not None and job.mcore >= (0, 19) else "")
    layout, saved = job.layout(), Layout.saved(catalog)
    sizes = {name: getattr(layout, name) for name in (*DEFAULTS, *STAGES)}
    sizes |= {"dp": job.sizes.get("dp"), "etp": layout.etp if saved.etp is None else layout.expert_tp}
    stated = any(sizes[name] is not None for name in STAGES)
    if layout.pp == saved.pp and not stated and any(getattr(saved, name) is not None for name in STAGES):
        if legacy:
            return ""  # what is not given stays that of the source, and `--vpp 1` is not none to a legacy job
        sizes["vpp"] = 1
    command = "distckpt reshard CKPT DST"
    if legacy or catalog.framework != "Megatron-LM":
        command = f"distckpt convert CKPT DST --to {'legacy' if legacy else 'torch_dist'}"
    command += _options(sizes)
    if not job.loads_optimizer:
        return f"{command} --optimizer none"
    early = job.mcore is not None and job.mcore < (0, 15)
    if job.distributed and early and not legacy:
        return ""  # it reads no form that is written for every layout
    form = "distributed" if legacy else "fully_reshardable"
    return f"{command} --optimizer {form if job.distributed else 'plain'}"


def _options(sizes: Mapping[str, Any]) -> str:
    """The options of a layout, each behind a space; a size that is None has none."""
    return "".join(f" --{name.replace('_', '-')} {quoted(str(n))}" for name, n in sizes.items() if n is not None)
