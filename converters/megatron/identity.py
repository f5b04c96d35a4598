"""What a checkpoint is, in the words of the people who train models: everything the identity card of `inspect` says.

Each statement carries where it comes from, since people often inspect a checkpoint because they remember it wrongly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.megatron.layout import Coordinates, Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.model_kind import ModelKind, model_kind
from converters.megatron.optimizer_layout import OptimizerLayout, optimizer_layout
from converters.megatron.vocabulary import is_vocabulary
from converters.model_parts import second_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.catalog import Catalog, TensorInfo

_DISTCP = re.compile(r"(?:.*/)?(?P<prefix>.*?)__(?P<rank>\d+)_(?P<writer>\d+)\.distcp")
_RNG = re.compile(r"rng_state/shard_[\d.]+_(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """How the job that saved was split, as far as the checkpoint tells; None where nothing says.

    A `Layout` has all sizes and is checked; this may lack some, and may contradict itself. `dense` is a `Layout`, where
    the sizes are known.

    Attributes:
        dp: Data-parallel size, context parallelism not counted.
        source: What says so: "training arguments", "shape of the random states' grid", ...
        pp_before_dp: Whether data parallelism is the outermost axis (`--use-tp-pp-dp-mapping`).
    """

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ranks: int | None = None
    source: str = "nothing says"
    pp_before_dp: bool = False

    @property
    def dense(self) -> Layout | None:
        """The grid of the model without its experts; None if its sizes are not all known."""
        if not (self.tp and self.pp and self.dp and min(self.tp, self.pp, self.dp, self.cp or 1) > 0):
            return None
        order = "tp-cp-ep-pp-dp" if self.pp_before_dp else "tp-cp-ep-dp-pp"
        return Layout(tp=self.tp, pp=self.pp, cp=self.cp or 1, dp=self.dp, order=order)

    def coordinates(self, rank: int) -> Coordinates | None:
        """Where a rank is in the dense grid; None if that is not known, or has no such rank."""
        dense = self.dense
        return dense.coordinates(rank) if dense is not None and rank < dense.world_size else None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether data-parallel replicas shared the writing ("fully parallel save").

    Attributes:
        parallel: None if it cannot be told.
        reason: What says so.
    """

    parallel: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the checkpoint, as people name it.

    Attributes:
        name: "attention", "optimizer", "other state".
        tensors: Number of tensors (of objects, for what is not a tensor).
        dtypes: Short names of the element types, most bytes first.
        nbytes: Size.
    """

    name: str
    tensors: int
    dtypes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Identity:
    """Everything the card says.

    Attributes:
        kind: What the model is, if it is no single decoder.
        features: What the tensors show of the architecture: "experts", "query and key norms".
        model: Facts of the model; fields are None where nothing says.
        contradictions: Statements of the arguments that the tensors' shapes refute.
        optimizer: Layout of the optimizer state and what it permits.
        components: Parts with sizes, in the order of the model.
        parameters: Elements of all weights without vocabulary padding and buffers.
        padding: Elements of vocabulary padding left out of `parameters`; None if unknown.
        dtypes: Weights by element type: (tensors, bytes).
        disk_bytes: Bytes of all files.
        writers: Global ranks that wrote data.
    """

    kind: ModelKind
    features: tuple[str, ...]
    model: ModelArgs
    contradictions: tuple[str, ...]
    layout: SavedLayout
    sharing: Sharing
    optimizer: OptimizerLayout
    components: tuple[Component, ...]
    parameters: int
    padding: int | None
    dtypes: Mapping[str, tuple[int, int]]
    nbytes: int
    disk_bytes: int
    files: int
    writers: tuple[int, ...]


def identify(catalog: Catalog) -> Identity:
    """Works out what a checkpoint is; never fails, says None where nothing is known."""
    model = ModelArgs.from_catalog(catalog)
    layout = _layout(catalog, model)
    components = _components(catalog)
    parameters, padding = _parameters(catalog, model)
    data = [f for f in catalog.files if f.role == "data"]
    writers = sorted({writer[0] for f in data if (writer := writer_of(f.name)) is not None})
    return Identity(
        kind=model_kind(catalog),
        features=_features(catalog.weights, model),
        model=model,
        contradictions=tuple(model.contradictions(catalog)),
        layout=layout,
        sharing=_sharing(catalog, layout, writers),
        optimizer=optimizer_layout(catalog),
        components=components,
        parameters=parameters,
        padding=padding,
        dtypes=_dtypes(catalog.weights.values()),
        nbytes=sum(c.nbytes for c in components),
        disk_bytes=sum(f.size or 0 for f in catalog.files),
        files=sum(f.size is not None for f in catalog.files),
        writers=tuple(writers),
    )


def writer_of(name: str) -> tuple[int, int] | None:
    """The (rank, file number of that rank) that `__R_W.distcp` states; None for another name.

    Megatron-Core, dist_checkpointing/strategies/filesystem_async.py: `{prefix}__{rank}_{n}.distcp`.
    """
    match = _DISTCP.fullmatch(name)
    return (int(match["rank"]), int(match["writer"])) if match else None


def _layout(catalog: Catalog, model: ModelArgs) -> SavedLayout:
    mapping = catalog.args.get("use_tp_pp_dp_mapping") is True
    if model.tp is not None and model.pp is not None:
        source = model.source.get("tp", "")
        where = "training arguments" if source.startswith("args") else "model configuration"
        sizes = (model.tp, model.pp, model.vpp, model.ep, model.etp, model.cp, model.dp, model.world_size)
        return SavedLayout(*sizes, source=where, pp_before_dp=mapping)
    for key in catalog.objects:
        match = _RNG.fullmatch(key)
        if match:
            dp = int(match[3]) if match[3] else None  # the third axis is only there with expert parallelism
            return SavedLayout(tp=int(match[2]), pp=int(match[1]), dp=dp, source="grid of the random states")
    tp = _tp_from_chunks(catalog.weights)
    return SavedLayout(tp=tp, source="chunks of the attention projections") if tp else SavedLayout()


def _tp_from_chunks(weights: Mapping[str, TensorInfo]) -> int | None:
    """A row-parallel weight is cut along its second axis into exactly TP chunks, whatever else the job did."""
    for name, tensor in weights.items():
        if name.endswith(".self_attention.linear_proj.weight") and len(tensor.shape) == 2:
            return len({chunk.box.start[1] for chunk in tensor.chunks()})
    return None


def _sharing(catalog: Catalog, layout: SavedLayout, writers: list[int]) -> Sharing:
    replicas = layout.dp * (layout.cp or 1) if layout.dp is not None else None
    if replicas == 1:
        return Sharing(None, "one data-parallel rank has no other rank to share with")
    stated = catalog.args.get("ckpt_fully_parallel_save")
    if isinstance(stated, bool):
        return Sharing(stated, "ckpt_fully_parallel_save in the training arguments")
    coordinates = [layout.coordinates(rank) for rank in writers]
    if not coordinates or any(writer is None for writer in coordinates):
        return Sharing(None, "the layout is not fully known")
    spread = any(writer is not None and (writer.dp > 0 or writer.cp > 0) for writer in coordinates)
    if not spread:
        return Sharing(False, "only the first data-parallel rank wrote")
    if (layout.ep or 1) > 1 or any(t.kind == "optimizer" for t in catalog.tensors.values()):
        return Sharing(None, "experts or a sharded optimizer are spread over data-parallel ranks anyway")
    return Sharing(True, "several data-parallel ranks wrote weights")


# first match wins; the names are Megatron's own, canonical, or Hugging Face's
_PARTS: list[tuple[str, re.Pattern[str]]] = [
    (name, re.compile(pattern))
    for name, pattern in [
        ("multi-token prediction", r"mtp\."),
        ("vision", r"(vision_\w+|visual|multi_modal_projector|mm_projector|embed_vision)\."),
        ("audio", r"(audio_tower|embed_audio)\."),
        ("adapters", r".*\.adapter\."),
        (
            "embedding",
            r"(language_model\.)?(embedding|position_embeddings)\.|(model|transformer|gpt_neox)\.(embed_tokens|wte|wpe|embed_in)\.",
        ),
        ("output layer", r"(language_model\.)?(output_layer|lm_head|embed_out|binary_head|pooler)\."),
        ("router", r".*\.router\.|.*\.(mlp|block_sparse_moe)\.gate\."),
        ("shared experts", r".*\.shared_experts?\."),
        ("experts", r".*\.experts\."),
        ("attention", r".*\.(self_attention|cross_attention|inter_attention|self_attn|attn|attention)\."),
        ("mamba mixer", r".*\.(mamba_)?mixer\."),
        ("mlp", r".*\.mlp\."),
        ("norms", r".*(norm|\.ln_)"),
        ("other weights", r""),
    ]
]
_ORDER = (
    *("embedding", "attention", "mamba mixer", "mlp", "router", "experts", "shared experts", "norms"),
    *("multi-token prediction", "output layer", "vision", "audio", "adapters", "other weights"),
    *("optimizer", "other state"),
)


def _part_of(tensor: TensorInfo) -> str:
    if tensor.kind != "weight":
        return "optimizer" if tensor.kind == "optimizer" else "other state"
    return next(name for name, pattern in _PARTS if pattern.match(tensor.name))


def _components(catalog: Catalog) -> tuple[Component, ...]:
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for tensor in catalog.tensors.values():
        part = _part_of(tensor)
        counts[part] += 1
        sizes[part][tensor.dtype.short] += tensor.nbytes
    for item in catalog.objects.values():
        part = "optimizer" if item.of_optimizer else "other state"
        counts[part] += 1
        sizes[part][""] += item.length  # an object has no element type
    out = []
    for name in _ORDER:
        if counts[name]:
            by_size = sorted(sizes[name], key=lambda short: -sizes[name][short])
            out.append(Component(name, counts[name], tuple(s for s in by_size if s), sum(sizes[name].values())))
    return tuple(out)


def _dtypes(tensors: Iterable[TensorInfo]) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, size = out.get(tensor.dtype.short, (0, 0))
        out[tensor.dtype.short] = (count + 1, size + tensor.nbytes)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))


def _parameters(catalog: Catalog, model: ModelArgs) -> tuple[int, int | None]:
    total, padding = 0, 0
    second = second_names(catalog.weights)
    for name, tensor in catalog.weights.items():
        if is_buffer(name) or name in second:
            continue
        total += tensor.numel
        if model.vocab_size is not None and is_vocabulary(name) and len(tensor.shape) == 2:
            padding += max(0, tensor.shape[0] - model.vocab_size) * tensor.shape[1]
    return total - padding, None if model.vocab_size is None else padding


def is_buffer(name: str) -> bool:
    """Whether a weight is no parameter: a rule updates it, not gradients, under Megatron's name or Hugging Face's."""
    return name.endswith((".expert_bias", ".e_score_correction_bias"))


def _features(weights: Mapping[str, TensorInfo], model: ModelArgs) -> tuple[str, ...]:
    def has(*endings: str) -> bool:
        return any(name.endswith(endings) for name in weights)

    fc1 = next((t for n, t in weights.items() if n.endswith(".linear_fc1.weight") and len(t.shape) == 2), None)
    fc2 = weights.get(fc1.name.replace("linear_fc1", "linear_fc2")) if fc1 is not None else None
    features = {
        "state-space layers": model.layer_pattern is None and any(".mixer." in name for name in weights),
        "multi-head latent attention": has(".linear_kv_down_proj.weight", ".linear_kv_up_proj.weight"),
        "experts": any(".experts." in name and "shared" not in name for name in weights),
        "shared experts": any(".shared_experts." in name for name in weights),
        "gated shared experts": has(".shared_experts.gate_weight"),
        "expert bias": has(".router.expert_bias"),
        "router bias": has(".router.bias"),
        "latent experts": has(".mlp.fc1_latent_proj.weight"),
        "gated attention": "attention_output_gate" in model.extras and has(".linear_qkv.weight"),
        "softmax offset": has(".core_attention.softmax_offset"),
        "sparse attention": any(".core_attention.indexer." in name for name in weights),
        "query and key norms": has(".q_layernorm.weight"),
        "biased qkv": has(".linear_qkv.bias"),
        "biased layers": has(".linear_fc1.bias", ".linear_proj.bias"),
        "biased norms": has("final_layernorm.bias", "final_norm.bias"),
        "learned positions": has("embedding.position_embeddings.weight"),
        "gated mlp": fc1 is not None and fc2 is not None and fc1.shape[0] == 2 * fc2.shape[1],
    }
    return tuple(name for name, present in features.items() if present)
