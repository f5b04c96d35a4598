"""Will a job with these flags load this checkpoint? By what is known of Megatron's loader; what is not known is said.

Nothing is read but what `inspect` reads. Each rule is one that distckpt follows when it writes: which layout a model may
have is in `megatron/layout_check.py`, what an optimizer layout permits in `megatron/optimizer_layout.py`, and which flags
a loader needs in `write/target_state.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
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
from converters.overview.job_vocabulary import FLAGS, NUMBERS, vocabulary_answers
from converters.pickles import Obj

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import Catalog

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
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
    ),
}
# the flags of a job that reads each format (validate_args of megatron/training/arguments.py, core_v0.16.1)
_READERS = {
    "fsdp_dtensor": ("--use-megatron-fsdp", "fsdp_dtensor"),
    "megatron_dcp": ("--use-torch-fsdp2", "torch_dcp"),
}
# where no flag says a size, a job has 1 (the same file)
DEFAULTS = ("tp", "pp", "cp", "ep")
"""Sizes of a layout that are 1 where no flag says them."""
STAGES = ("vpp", "first_layers", "last_layers", "pp_layout")
"""Sizes that divide the layers among pipeline stages; None where no flag says them."""
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
        sizes = {**dict.fromkeys(DEFAULTS, 1), **self.sizes}
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
    out += _latent_queries(catalog, job)
    out += _vocabulary(catalog, job)
    if catalog.path.name == "release":  # load_checkpoint (megatron/training/checkpointing.py, core_v0.16.1)
        out.append(Finding("optimizer", True, "a job reads only the weights of a release"))
    elif job.loads_optimizer:
        out += _optimizer(catalog, job)
    elif any(t.kind == "optimizer" for t in catalog.tensors.values()):
        out.append(Finding("optimizer", True, "the flags leave it out"))
    wrappers = job.switches & {switch for stored, (switch, _) in _READERS.items() if stored != catalog.format}
    unread = (*job.unread, *sorted(wrappers))
    out += [Finding("flags", None, f"what {word} requires of a checkpoint is not known") for word in unread]
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
    elif stored in _READERS:
        yield _fsdp(stored, job)
    elif stored == "zarr":
        yield _zarr(job)
    elif stored == "torch":
        yield Finding("format", False, "one file of torch.save: a job reads a folder for each iteration")
    else:
        yield Finding("format", None, f"which jobs read {stored} is not known")
    if catalog.megatron and not isinstance(_common(catalog).get("args"), Obj):
        own = catalog.framework in ("Megatron-LM", "Megatron-Core")
        text = "as Megatron-LM saves them" if own else f"of Megatron-LM; {catalog.framework} has a loader of its own"
        yield Finding("arguments", None, f"the checkpoint stores no training arguments {text}")


def _latent_queries(catalog: Catalog, job: Job) -> Iterator[Finding]:
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


def _fsdp(stored: str, job: Job) -> Finding:
    """Whether the model of the job is wrapped as the one that was saved."""
    switch, name = _READERS[stored]
    fits = switch in job.switches and job.format == name
    return Finding("format", fits, f"a job reads {stored} with {switch} --ckpt-format {name}")


def _zarr(job: Job) -> Finding:
    """Whether the job has a reader of zarr, which Megatron-Core 0.16 removed (core/dist_checkpointing/strategies)."""
    if job.format not in (None, "zarr", "torch_dist"):
        return Finding("format", False, f"the checkpoint is zarr, the job asks for {job.format}")
    text = "Megatron-Core up to 0.15 reads zarr, with the package zarr installed; later ones cannot"
    return Finding("format", None if job.mcore is None else job.mcore < (0, 16), text)


def _is_model(catalog: Catalog) -> bool:
    """Whether it is a Hugging Face folder of a known architecture."""
    kind = catalog.config.get("model_type")
    return catalog.framework == "Hugging Face" and isinstance(kind, str) and of_type(kind) is not None


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
    texts = [f"{name} {old or 'none'} -> {new or 'none'}" for name, (old, new) in changed.items()]
    if catalog.format == "legacy" and changed.keys() - {"dp", "cp"}:
        yield Finding("layout", False, f"the legacy format has a file for each rank: {', '.join(texts)}")
    elif catalog.format in ("torch_dist", "zarr"):
        yield Finding(
            "layout", True, f"{catalog.format} weights load at any layout: {', '.join(texts) or 'it is the same'}"
        )
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
    return catalog.common if isinstance(catalog.common, Mapping) else {}


def _optimizer(catalog: Catalog, job: Job) -> Iterator[Finding]:
    stored, parts = optimizer_layout(catalog), optimizer_parts(catalog)
    if stored.name == "none":
        yield Finding(
            "optimizer", False, "no optimizer state is stored: start the job with --no-load-optim", fixed=False
        )
        return
    if not {"opt_param_scheduler", "lr_scheduler"} & _common(catalog).keys():
        text = "the checkpoint stores no opt_param_scheduler, which Megatron-LM's loader asks for"
        yield Finding("scheduler", False, text)
    rule = optimizer_resharding(catalog)
    if rule is None:
        text = "" if catalog.format in _READERS else "; not known what it means for these flags"
        yield Finding("optimizer", None, f"{stored.name}: {stored.permits}{text}")
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
