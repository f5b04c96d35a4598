"""How a training job is laid out: which rank is where in the grid, and which pipeline stage holds which layer.

No I/O. Facts: Megatron-Core 0.16.1, parallel_state.py (RankGenerator, initialize_model_parallel),
transformer/transformer_block.py (get_num_layers_to_build), transformer/transformer_layer.py
(get_transformer_layer_offset), transformer/pipeline_parallel_layer_layout.py, multi_token_prediction.py. They hold for
0.12 and later; before 0.12 experts had no tensor-parallel size of their own.

The world is one grid for the dense part of a model and another for its experts; both have the same pipeline axis.
With the default order `tp-cp-ep-dp-pp`, tp varies fastest from rank to rank:

    tp 2, dp 4, pp 1, ep 2, etp 1           rank     0  1  2  3  4  5  6  7
                                    dense   tp       0  1  0  1  0  1  0  1
                                            dp       0  0  1  1  2  2  3  3
                                    experts ep       0  1  0  1  0  1  0  1
                                            edp      0  0  1  1  2  2  3  3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.model_fields import OPTIONS
from converters.megatron.pipeline import Pipeline, hybrid_stages, parse_pp_layout
from converters.words import counted

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.megatron.model_args import ModelArgs

# Megatron's names of each field, newest first: arguments, then configuration
_NAMES: dict[str, tuple[str, ...]] = {
    **{name: OPTIONS[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")},
    "first_layers": ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    "last_layers": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    "account_for_embedding": ("account_for_embedding_in_pipeline_split",),
    "account_for_loss": ("account_for_loss_in_pipeline_split",),
    "pp_layout": ("pipeline_model_parallel_layout",),
}
_TYPES: dict[str, type] = {"account_for_embedding": bool, "account_for_loss": bool, "pp_layout": str}


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank is: `tp, cp, dp, pp` in the dense grid, `etp, ep, edp, pp` in that of the experts.

    `dp_cp` is its number in the data-parallel group that includes context parallelism, over which weights are
    replicated and the distributed optimizer shards; for experts that is `edp`.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    dp_cp: int


@dataclass(frozen=True, slots=True)
class DataParallelGroup:
    """The ranks that hold the same part of a model.

    Attributes:
        pp: Pipeline rank.
        tp: Tensor-parallel rank; that of the experts' grid for experts.
        ep: Expert-parallel rank, for the experts' part; None for the dense part.
    """

    pp: int
    tp: int
    ep: int | None = None


@dataclass(frozen=True)
class Layout:
    """Sizes of a job's parallel groups and how its layers are spread over pipeline stages: all known, and possible.

    What a checkpoint tells of the job that saved it may lack sizes and contradict itself: `identity.SavedLayout`, from which
    `inspect` speaks. `saved` fills the gaps with Megatron's defaults.

    Attributes:
        tp: Tensor-parallel size of the dense part.
        pp: Pipeline stages.
        vpp: Model chunks of each pipeline rank; None without interleaving.
        cp: Context-parallel size.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts; None is `tp`, Megatron's default.
        dp: Data-parallel size without `cp`: Megatron's world_size / (tp * pp * cp).
        order: Which axis varies fastest with the rank; `--use-tp-pp-dp-mapping` is "tp-cp-ep-pp-dp".
        first_layers: Layers of the first pipeline rank (`--decoder-first-pipeline-num-layers`).
        last_layers: Layers of the last one.
        account_for_embedding: The embedding counts as a layer when layers are divided among stages.
        account_for_loss: So does the output layer.
        pp_layout: `--pipeline-model-parallel-layout`: "Ettt|(tt|)*3,m|L".

    Raises:
        RequestError: The sizes do not make a grid.
        TypeError: A size is no whole number.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    first_layers: int | None = None
    last_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    pp_layout: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "first_layers", "last_layers"):
            value = getattr(self, name)
            if not isinstance(value, Integral) and (value is not None or name in ("tp", "pp", "cp", "ep", "dp")):
                raise TypeError(f"{name} of a Layout is {value!r}, not a whole number")
            if value is not None and value < 1:
                raise RequestError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
        if sorted(self.order.split("-")) != ["cp", "dp", "ep", "pp", "tp"]:
            raise RequestError(
                f"{self.order!r} is not an order of the five axes", hint="Megatron's are tp-cp-ep-dp-pp, tp-cp-ep-pp-dp"
            )
        if self.world_size % (self.expert_tp * self.ep * self.pp):
            raise self._uneven_experts()

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}"]
        parts += [f"{name} {value}" for name in ("vpp", "cp", "ep") if (value := getattr(self, name) or 1) > 1]
        parts += [f"etp {self.expert_tp}"] if self.ep > 1 or self.expert_tp != self.tp else []
        return "  ".join([*parts, f"dp {self.dp}", f"({counted(self.world_size, 'rank')})"])

    def _uneven_experts(self) -> RequestError:
        need, ranks = self.expert_tp * self.ep, self.tp * self.cp * self.dp
        least = self.least_dp(self.tp, self.cp, self.ep, self.etp)
        return RequestError(
            f"{counted(ranks, 'rank')} a pipeline stage (tp {self.tp} x cp {self.cp} x dp {self.dp}) cannot be divided "
            f"among --ep {self.ep} x --etp {self.expert_tp} = {need}",
            hint=f"--dp must be a multiple of {least}",
        )

    @classmethod
    def from_args(cls, args: ModelArgs | Mapping[str, Any], **changes: Any) -> Layout:
        """The layout of the job that the arguments describe; `changes` are fields that replace what they say.

        Args:
            args: Megatron-LM's arguments by name, a NeMo or Bridge model configuration, or a `ModelArgs`.
            changes: Fields of `Layout`.

        Returns:
            What is not stated has its default; `dp` the least size that the experts allow.
        """
        values: dict[str, Any] = {}
        if isinstance(args, Mapping):
            for name, spellings in _NAMES.items():
                value = next((v for v in map(args.get, spellings) if isinstance(v, _TYPES.get(name, int))), None)
                if value is not None:
                    values[name] = value
            if (stages := hybrid_stages(args)) is not None:
                values["pp_layout"] = stages
            if args.get("use_tp_pp_dp_mapping") is True:
                values["order"] = "tp-cp-ep-pp-dp"
            world = args.get("world_size")
        else:
            values = {f.name: v for f in fields(cls) if (v := getattr(args, f.name, None)) is not None}
            world = args.world_size
        values |= changes
        tp, pp, cp = (values.get(name) or 1 for name in ("tp", "pp", "cp"))
        if "dp" not in values and isinstance(world, int) and world >= tp * pp * cp:
            values["dp"] = world // (tp * pp * cp)
        if "dp" not in values:
            values["dp"] = cls.least_dp(tp, cp, values.get("ep") or 1, values.get("etp"))
        return cls(**values)

    @classmethod
    def saved(cls, catalog: Catalog) -> Layout:
        """The layout of the job that saved a checkpoint, from its arguments, configuration and tensors."""
        from converters.megatron.model_args import (
            ModelArgs,  # a layout that is given needs nothing of what that imports
        )

        facts, stated = cls.from_args(ModelArgs.from_catalog(catalog)), cls.from_args(catalog.options)
        keep = ("first_layers", "last_layers", "account_for_embedding", "account_for_loss", "pp_layout", "order")
        return cls(**{f.name: getattr(stated if f.name in keep else facts, f.name) for f in fields(cls)})

    def changed(self, **sizes: Any) -> Layout:
        """This layout with other values for some fields.

        Args:
            sizes: Fields of `Layout`; None leaves a field as it is.

        Returns:
            `etp` follows `tp` if it was the same, `dp` stays if the experts' grid allows it, and what describes pipeline
            stages one by one is kept only if `pp` stays and nothing else is said about stages.
        """
        sizes = {name: value for name, value in sizes.items() if value is not None}
        values = {f.name: getattr(self, f.name) for f in fields(self)} | sizes
        if "etp" not in sizes and self.expert_tp == self.tp:
            values["etp"] = None
        stages = ("vpp", "first_layers", "last_layers", "account_for_embedding", "account_for_loss", "pp_layout")
        if values["pp"] != self.pp or any(name in sizes for name in stages):
            defaults = {f.name: f.default for f in fields(self)}
            values |= {name: sizes.get(name, defaults[name]) for name in stages}
        least = self.least_dp(values["tp"], values["cp"], values["ep"], values["etp"])
        if "dp" not in sizes and values["dp"] % least:
            values["dp"] = least
        return type(self)(**values)

    @staticmethod
    def least_dp(tp: int, cp: int, ep: int, etp: int | None) -> int:
        """The smallest data-parallel size with which the expert grid fits."""
        need = ep * (etp or tp)
        return need // math.gcd(need, tp * cp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def edp(self) -> int:
        """How many ranks hold the same part of an expert."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def dp_cp(self) -> int:
        """How many ranks hold the same part of a dense tensor."""
        return self.dp * self.cp

    @property
    def chunks(self) -> int:
        """Model chunks of each pipeline rank."""
        if self.pp_layout is not None:
            return max(1, len(parse_pp_layout(self.pp_layout)) // self.pp)
        return self.vpp or 1

    @cached_property
    def _dense(self) -> dict[str, tuple[int, int]]:
        return self._strides({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    @cached_property
    def _experts(self) -> dict[str, tuple[int, int]]:
        return self._strides({"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp})

    def _strides(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        out, stride = {}, 1
        for axis in self.order.split("-"):
            out[axis] = stride, sizes[axis]
            stride *= sizes[axis]
        return out

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates of the dense grid."""
        grid = self._dense
        return tp * grid["tp"][0] + cp * grid["cp"][0] + dp * grid["dp"][0] + pp * grid["pp"][0]

    def expert_rank(self, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates of the experts' grid."""
        grid = self._experts
        return etp * grid["tp"][0] + ep * grid["ep"][0] + edp * grid["dp"][0] + pp * grid["pp"][0]

    def data_parallel_groups(self, *, experts: bool) -> list[DataParallelGroup]:
        """The groups of the experts' grid or of the dense one, in Megatron's order: `dp_group_idx` counts them."""
        eps, tps = (range(self.ep), range(self.expert_tp)) if experts else ((None,), range(self.tp))
        return [DataParallelGroup(pp, tp, ep) for pp in range(self.pp) for ep in eps for tp in tps]

    def group_ranks(self, group: DataParallelGroup) -> list[int]:
        """The ranks of a data-parallel group, ascending."""
        pp, tp, ep = group.pp, group.tp, group.ep
        if ep is not None:
            return sorted(self.expert_rank(tp, ep, edp, pp) for edp in range(self.edp))
        return sorted(self.rank(tp, cp, dp, pp) for cp in range(self.cp) for dp in range(self.dp))

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is in both grids."""
        if not 0 <= rank < self.world_size:
            raise RequestError(f"there is no rank {rank}: the job has {self.world_size}")
        dense = {axis: rank // stride % size for axis, (stride, size) in self._dense.items()}
        expert = {axis: rank // stride % size for axis, (stride, size) in self._experts.items()}
        cp_first = self.order.index("cp") < self.order.index("dp")
        dp_cp = dense["cp"] + self.cp * dense["dp"] if cp_first else dense["dp"] + self.dp * dense["cp"]
        return Coordinates(
            dense["tp"], dense["cp"], dense["dp"], dense["pp"], expert["tp"], expert["ep"], expert["dp"], dp_cp
        )

    def pipeline(self, num_layers: int, mtp_layers: int = 0) -> Pipeline:
        """Which stage holds which layer of a model.

        Raises:
            RequestError: The layers cannot be spread so.
        """
        return Pipeline.of(self, num_layers, mtp_layers)
