"""Will a job with these flags load this checkpoint? By what is known of Megatron's loader; what is not known is said.

Nothing is read but what `inspect` reads. Each rule is one that distckpt follows when it writes: which layout a model may
have is in `megatron/layout_check.py`, what an optimizer layout permits in `megatron/optimizer_layout.py`, and which flags
a loader needs in `write/target_state.py`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.folder import exists
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check as check_layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_layout import optimizer_layout, optimizer_resharding
from converters.megatron.optimizer_parts import optimizer_parts
from converters.models import of_type
from converters.names import quoted
from converters.overview.job_vocabulary import FLAGS, NUMBERS, vocabulary_answers
from converters.pickles import Obj

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog

__all__ = ["Finding", "Job", "job_findings", "job_remedy"]

_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--decoder-first-pipeline-num-layers": "first_layers",
    "--decoder-last-pipeline-num-layers": "last_layers",
    **{f"--{name}": name for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")},
}
_SINCE = re.compile(r"needs Megatron-Core (\d+)\.(\d+) or later")
_TEXTS = {"--pipeline-model-parallel-layout": "pp_layout", "--ckpt-format": "format", "--mcore": "mcore"}
_VALUED = {*_SIZES, *_TEXTS, *NUMBERS, *FLAGS}
_SWITCHES = {
    *(
        "--use-distributed-optimizer",
        "--use-precision-aware-optimizer",
        "--no-load-optim",
        "--no-load-rng",
        "--finetune",
        "--use-checkpoint-args",
    ),
}
# where no flag says a size, a job has this one (megatron/training/arguments.py, core_v0.16.1)
_DEFAULTS = ("tp", "pp", "cp", "ep")
_STAGES = ("vpp", "first_layers", "last_layers", "pp_layout")
_COMPARED = ("tp", "pp", "vpp", "ep", "expert_tp", "cp", "dp", "first_layers", "last_layers", "pp_layout")


@dataclass(frozen=True)
class Job:
    """The flags of a job, as far as they matter.

    Attributes:
        sizes: Sizes of the layout that the flags give, by the names of `Layout`.
        switches: Flags without a value.
        mcore: Version of Megatron-Core, as (0, 16); None if no flag says.
        format: `--ckpt-format`; None if no flag says.
        unread: Words that mean nothing here.
        vocabulary: Flags of the vocabulary, by the names of `job_vocabulary`.
    """

    sizes: Mapping[str, Any]
    switches: frozenset[str]
    mcore: tuple[int, int] | None = None
    format: str | None = None
    unread: tuple[str, ...] = ()
    vocabulary: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Job:
        """Reads flags as they stand on a command line.

        Raises:
            RequestError: A flag lacks its value, or the value is none.
        """
        try:
            words = [
                part for word in shlex.split(text) for part in (word.split("=", 1) if word[:2] == "--" else [word])
            ]
        except ValueError as error:
            raise RequestError(f"--for is no command line: {error}") from error
        sizes: dict[str, Any] = {}
        texts: dict[str, str] = {}
        vocabulary: dict[str, str] = {}
        unread: list[str] = []
        switches, rest = set(), iter(words)
        for word in rest:
            if word in _SWITCHES:
                switches.add(word)
            elif word in _VALUED:
                value = next(rest, "")
                number = value.isascii() and value.isdigit() and int(value) > 0
                if word in _TEXTS and value:
                    texts[_TEXTS[word]] = value
                elif (word in FLAGS and value) or (word in NUMBERS and number):
                    vocabulary[(FLAGS | NUMBERS)[word]] = value
                elif word in _SIZES and number:
                    sizes[_SIZES[word]] = int(value)
                else:
                    what = "a word" if word in _TEXTS or word in FLAGS else "a whole number of 1 or more"
                    raise RequestError(f"{word} in --for takes {what}, not {value or 'nothing'!r}")
            elif unread and not word.startswith("--"):
                unread[-1] += f" {word}"
            else:
                unread.append(word)
        if "pp_layout" in texts:
            sizes["pp_layout"] = texts["pp_layout"]
        version = texts.get("mcore")
        numbers = version.split(".")[:2] if version else []
        if version and not (len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers)):
            raise RequestError(f"--mcore {version} is no version", hint="--mcore 0.16")
        mcore = (int(numbers[0]), int(numbers[1])) if version else None
        return cls(sizes, frozenset(switches), mcore, texts.get("format"), tuple(unread), vocabulary)

    @property
    def loads_optimizer(self) -> bool:
        """Whether the job asks for optimizer state."""
        return self.switches.isdisjoint(("--no-load-optim", "--finetune"))

    @property
    def distributed(self) -> bool:
        """Whether it has the distributed optimizer."""
        return "--use-distributed-optimizer" in self.switches

    def layout(self) -> Layout:
        """The layout; `dp` is the least one where no flag says it.

        Raises:
            RequestError: The sizes make no grid.
        """
        sizes = {**dict.fromkeys(_DEFAULTS, 1), **self.sizes}
        sizes.setdefault("dp", Layout.least_dp(sizes["tp"], sizes["cp"], sizes["ep"], sizes.get("etp")))
        return Layout(**sizes)


@dataclass(frozen=True)
class Finding:
    """One thing that decides whether a job loads a checkpoint.

    Attributes:
        subject: "layout", "optimizer", "format", ...
        fits: None if it cannot be decided.
        reason: A sentence.
        fixed: Writing the checkpoint anew for the job (`job_remedy`) puts it right.
    """

    subject: str
    fits: bool | None
    reason: str
    fixed: bool = True


def job_findings(catalog: Catalog, job: Job) -> list[Finding]:
    """What speaks for and against a job loading a checkpoint, in the order in which its loader meets it."""
    out = [Finding("damage", False, p.message, fixed=False) for p in catalog.problems if p.severity == "error"][:8]
    out += _format(catalog, job)
    if not catalog.megatron:
        return out
    out += _layout(catalog, job)
    out += _vocabulary(catalog, job)
    if catalog.path.name == "release":  # load_checkpoint (megatron/training/checkpointing.py, core_v0.16.1)
        out.append(Finding("optimizer", True, "a job reads only the weights of a release"))
    elif job.loads_optimizer:
        out += _optimizer(catalog, job)
    elif any(t.kind == "optimizer" for t in catalog.tensors.values()):
        out.append(Finding("optimizer", True, "the flags leave it out"))
    out += [Finding("flags", None, f"what {word} requires of a checkpoint is not known") for word in job.unread]
    return out


def _format(catalog: Catalog, job: Job) -> Iterator[Finding]:
    stored = catalog.format
    if not catalog.megatron:
        text = f"{stored} without Megatron's names is no checkpoint of Megatron-LM"
        yield Finding("format", False, text, fixed=_is_model(catalog))
    elif stored == "torch_dist":
        if job.format not in (None, "torch_dist"):
            yield Finding("format", False, f"the checkpoint is torch_dist, the job asks for {job.format}")
        elif exists(catalog.path / "common.pt"):
            yield _common_file(job)
        elif job.mcore is None:
            yield Finding(
                "format", None, "the common state is inside the data files, as Megatron-Core 0.19 or later reads it"
            )
        else:
            text = "the common state is inside the data files, which Megatron-Core before 0.19 does not read"
            yield Finding(
                "format", job.mcore >= (0, 19), text if job.mcore < (0, 19) else "torch_dist of Megatron-Core 0.19"
            )
    elif stored == "legacy":
        fits = True if job.format == "torch" else None if job.format is None else False
        yield Finding("format", fits, "a file for each rank, which a job reads with --ckpt-format torch")
    else:
        yield Finding("format", None, f"which jobs read {stored} is not known")
    if catalog.megatron and not isinstance(_common(catalog).get("args"), Obj):
        yield Finding(
            "arguments", None, f"{catalog.framework} keeps no arguments of Megatron-LM; it has a loader of its own"
        )


def _is_model(catalog: Catalog) -> bool:
    """Whether it is a Hugging Face folder of a known architecture."""
    kind = catalog.config.get("model_type")
    return catalog.framework == "Hugging Face" and isinstance(kind, str) and of_type(kind) is not None


def _import(job: Job) -> str:
    """The command that makes a checkpoint for the job of a Hugging Face folder."""
    words = ["distckpt", "import-hf", "CKPT", "DST"]
    for name, size in job.sizes.items():
        words += [f"--{name.replace('_', '-')}", quoted(str(size)) if name == "pp_layout" else str(size)]
    words += ["--to", "legacy"] if job.format == "torch" else []
    return " ".join([*words, *(["--mcore", "0.19"] if job.mcore is not None and job.mcore >= (0, 19) else [])])


def _layout(catalog: Catalog, job: Job) -> Iterator[Finding]:
    try:
        layout = job.layout()
        shapes = {name: tensor.shape for name, tensor in catalog.weights.items()}
        notes = check_layout(ModelArgs.from_catalog(catalog), layout, shapes)
    except RequestError as error:
        hint = f"; {error.hint}" if error.hint else ""
        yield Finding("layout", False, f"{error.message}{hint}", fixed=False)
        return
    changed = _changed(catalog, job, layout)
    texts = [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]
    if catalog.format == "legacy" and changed.keys() - {"dp", "cp"}:
        yield Finding("layout", False, f"the legacy format has a file for each rank: {', '.join(texts)}")
    elif catalog.format == "torch_dist":
        yield Finding("layout", True, f"torch_dist weights load at any layout: {', '.join(texts) or 'it is the same'}")
    else:
        yield Finding("layout", None if changed else True, ", ".join(texts) or "it is the same")
    for note in notes:
        least = _SINCE.search(note)
        if least is None or job.mcore is None:
            yield Finding("layout", None, note)
        elif job.mcore < (int(least[1]), int(least[2])):
            yield Finding("layout", False, note, fixed=False)


def _vocabulary(catalog: Catalog, job: Job) -> list[Finding]:
    answers = vocabulary_answers(
        catalog,
        job.vocabulary,
        int(job.sizes.get("tp", 1)),
        loads_optimizer=job.loads_optimizer and catalog.path.name != "release",
        from_checkpoint="--use-checkpoint-args" in job.switches,
    )
    return [Finding("vocab", *answer) for answer in answers]


def _common_file(job: Job) -> Finding:
    """Whether a job opens common.pt: pickled arguments name classes, which older versions do not have."""
    if job.mcore is not None and job.mcore < (0, 15):
        text = f"Megatron-Core {job.mcore[0]}.{job.mcore[1]} may not open the arguments that a newer version pickled"
        return Finding("format", None, f"torch_dist with common.pt; {text}")
    return Finding("format", True, "torch_dist with common.pt, which Megatron-Core 0.15 and later read")


def _changed(catalog: Catalog, job: Job, layout: Layout) -> dict[str, tuple[Any, Any]]:
    """Sizes that differ from the job that saved; that of data parallelism only if a flag says it."""
    saved = Layout.saved(catalog)
    pairs = {name: (getattr(saved, name), getattr(layout, name)) for name in _COMPARED}
    if ModelArgs.from_catalog(catalog).num_experts is None:
        del pairs["ep"], pairs["expert_tp"]
    if "dp" not in job.sizes:
        del pairs["dp"]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _common(catalog: Catalog) -> Mapping[Any, Any]:
    return catalog.common if isinstance(catalog.common, dict) else {}


def _optimizer(catalog: Catalog, job: Job) -> Iterator[Finding]:
    stored, parts = optimizer_layout(catalog), optimizer_parts(catalog)
    if stored.name == "none":
        yield Finding(
            "optimizer", False, "no optimizer state is stored: start the job with --no-load-optim", fixed=False
        )
        return
    if not {"opt_param_scheduler", "lr_scheduler"} & _common(catalog).keys():
        text = f"{catalog.framework} stores no opt_param_scheduler, which Megatron-LM's loader asks for"
        yield Finding("scheduler", False, text)
    rule = optimizer_resharding(catalog)
    if rule is None:
        yield Finding("optimizer", None, f"{stored.name}: {stored.permits}; not known what it means for these flags")
        return
    kept = any(part.distributed for part in parts.parts)
    if kept != job.distributed:
        words = (
            ("the distributed optimizer's", "without") if kept else ("of an optimizer that is not distributed", "with")
        )
        yield Finding("optimizer", False, f"the state is {words[0]}, the job is {words[1]} --use-distributed-optimizer")
    yield from _resharding(catalog, job, f"{stored.name}: {stored.permits}")
    yield from _precision(catalog, job, stored.masters)
    if any(part.algorithm.startswith("SGD") for part in parts.parts) and job.mcore in (None, (0, 16)):
        text = (
            "Megatron-LM 0.16.1 cannot load an SGD optimizer, not even its own: start such a job with --no-load-optim"
        )
        yield Finding("optimizer", False if job.mcore else None, text, fixed=False)
    if stored.caution:
        yield Finding("optimizer", None, stored.caution)


def _resharding(catalog: Catalog, job: Job, text: str) -> Iterator[Finding]:
    rule = optimizer_resharding(catalog)
    try:
        changed = _changed(catalog, job, job.layout())
    except RequestError:  # said of the layout
        return
    if rule is None:
        return
    axes = {
        {"expert_tp": "etp", "first_layers": "pp", "last_layers": "pp", "pp_layout": "pp"}.get(n, n) for n in changed
    }
    late = rule.until is not None and job.mcore is not None and job.mcore > rule.until
    early = rule.since is not None and job.mcore is not None and job.mcore < rule.since
    unversioned = job.mcore is None and (rule.since or rule.until) is not None
    if late or early or axes - rule.sizes - {"cp"}:
        yield Finding("optimizer", False, text)
    elif "cp" in axes - rule.sizes or unversioned or rule.condition:
        needs = (
            "; which version is not told (--mcore)"
            if unversioned
            else f"; if {rule.condition}"
            if rule.condition
            else ""
        )
        yield Finding("optimizer", None, f"{text}{needs}")
    else:
        yield Finding("optimizer", True, text)


def _precision(catalog: Catalog, job: Job, masters: str) -> Iterator[Finding]:
    aware = "--use-precision-aware-optimizer" in job.switches
    if "int16" in masters:
        if not aware:
            yield Finding("masters", False, f"{masters}; the job is without --use-precision-aware-optimizer")
        elif job.mcore is None or job.mcore < (0, 17):
            text = f"{masters}: Megatron-Core 0.17 or later loads these"
            yield Finding("masters", None if job.mcore is None else False, text)
    elif masters or aware:
        yield Finding(
            "masters", None, masters or "no argument says that master weights are a precision-aware optimizer's"
        )


def job_remedy(catalog: Catalog, job: Job) -> str:
    """The command that writes the checkpoint so that the job loads it; empty if none is known to do so."""
    findings = job_findings(catalog, job)
    wrong = [finding for finding in findings if finding.fits is False]
    if not wrong or any(not finding.fixed for finding in wrong):
        return ""
    if job.format not in (None, "torch_dist", "torch") or "--use-precision-aware-optimizer" in job.switches:
        return ""
    if not catalog.megatron:
        return _import(job)
    layout, legacy, saved = job.layout(), job.format == "torch", Layout.saved(catalog)
    sizes = {name: getattr(layout, name) for name in (*_DEFAULTS, *_STAGES)}
    sizes |= {"dp": job.sizes.get("dp"), "etp": layout.etp if saved.etp is None else layout.expert_tp}
    if any(getattr(saved, name) is not None and getattr(layout, name) is None for name in _STAGES):
        return ""  # a size that is not given stays that of the source
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
