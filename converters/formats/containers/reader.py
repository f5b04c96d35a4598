"""Shared base of the readers of whole tensors: one state dict in one file, or in several.

Names are Megatron's (those of a model without tensor and pipeline parallelism), Hugging Face's, or anybody's. Megatron's
become canonical, exactly as those of the only rank of a legacy checkpoint would. All others stay as the file spells them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from converters.box import Box
from converters.catalog import Catalog, FileInfo, Problem, TensorInfo
from converters.chunks import FlatPart
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError, UnsupportedError
from converters.formats.common_state import Archive
from converters.formats.containers.archive import FileTensor, PtFile, StorageReader, Storages
from converters.formats.containers.unread import unread_tensors
from converters.formats.folder import exists, is_folder, listing, status
from converters.formats.legacy.grid import Grid
from converters.formats.legacy.model import WholeModel
from converters.formats.legacy.rank_model import RankModel, flattened
from converters.formats.megatron import common_facts
from converters.formats.plain_json import read_json
from converters.names import StateName, natural_key, parameter_of, printable
from converters.pickles.nodes import Global, Obj
from converters.torchzip.tensor_refs import path_name, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from converters.formats.containers.archive import TensorFile
    from converters.pickles.nodes import Node
    from converters.torchzip.tensor_refs import TensorRef

_V = TypeVar("_V")
_MEGATRON = re.compile(r"(?:decoder|encoder)\.layers\.\d+\..*\blinear_(?:qkv|proj|fc[12]|q_|kv_)")
_BEFORE_CORE = re.compile(
    r"language_model\.(?:encoder|transformer)\.|\.layers\.\d+\..*\.(?:query_key_value|dense_h_to_4h)\."
)
_HUGGING = re.compile(
    r"(?:^|\.)(?:model\.layers\.\d+\.|model\.embed_tokens\.|transformer\.h\.\d+\.|gpt_neox\.|lm_head\.)"
)
_SPLIT = re.compile(r"parallel|pipeline|world_size")
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
_NEMO = "model_config.yaml"
_MOST_RUNS = 1 << 16


def _runs(ref: TensorRef, label: str) -> Iterator[tuple[Box, int]]:
    """Boxes of a tensor whose elements lie one behind the other, and the element of the storage where each begins."""
    if ref.contiguous:
        yield Box.whole(ref.shape), ref.offset
        return
    inner, outer = 1, len(ref.shape)
    while outer and (ref.shape[outer - 1] == 1 or ref.strides[outer - 1] == inner):
        outer -= 1
        inner *= ref.shape[outer]
    if math.prod(ref.shape[:outer]) > _MOST_RUNS:
        raise UnsupportedError(
            f"{label} of shape {list(ref.shape)} has strides {list(ref.strides)}: its elements lie too far apart",
            hint="save it once more as tensor.contiguous()",
            tensor=label,
        )
    for index in itertools.product(*map(range, ref.shape[:outer])):
        start = ref.offset + sum(i * stride for i, stride in zip(index, ref.strides, strict=False))
        yield Box((*index, *(0,) * (len(ref.shape) - outer)), (*(1,) * outer, *ref.shape[outer:])), start


class WholeReader(StorageReader):
    """An open container.

    Args:
        path: The file or the folder.
        files: The files that together hold one state dict.
        label: How to name them in an error.
        tensors: The model's tensors by the names in the file; for Megatron's virtual pipeline, chunk by chunk.
        state: What else the first file holds: plain data and inert nodes.
    """

    name: ClassVar[str] = ""

    def __init__(
        self,
        path: Path,
        files: Sequence[TensorFile],
        label: str,
        tensors: Mapping[str, Mapping[str, FileTensor]],
        state: Mapping[Any, Node],
        problems: Sequence[Problem] = (),
    ) -> None:
        self._path, self._label, self._state = path, label, dict(state)
        self._problems = list(problems)
        self._details: dict[str, str] = {}
        self._folder = path if is_folder(path) else path.parent
        self._storages = Storages(self._folder)
        for file in files:
            self._storages.add(file)
        self.files = [self._folder / file.name for file in files]
        self.catalog = self._catalog(tensors)

    def common_state(self) -> Archive:
        """The common state as a `common.pt` would hold it.

        Raises:
            RequestError: The training arguments are not there, without which no job loads a checkpoint.
        """
        if not self.catalog.args and (self.catalog.framework != "NeMo 1" or not self.catalog.config):
            raise RequestError(
                f"{printable(self._path.name)} holds no training arguments (args), so no job could resume from it",
                hint="a file that `distckpt convert --to torch` wrote holds them; others are inspected, compared, converted",
            )
        tree = dict(self.catalog.common or {})
        if self.catalog.args:  # else they can be made of a configuration
            tree["args"] = Obj(Global("argparse", "Namespace"), kind="newobj", state=dict(self.catalog.args))
        members = {".format_version": b"1", "byteorder": b"little", "version": b"3\n"}
        for _, ref in tensors_in(tree.get("optimizer"), self._label):  # the state of a loss scaler
            file, key = self._storages.files[0], f"data/{ref.storage}"
            members[key] = file.contents(self._folder, key) if isinstance(file, PtFile) else b""
        return Archive(tree, members, self._path.name)

    def _catalog(self, chunks: Mapping[str, Mapping[str, FileTensor]]) -> Catalog:
        names = [name for chunk in chunks.values() for name in chunk]
        # GPT-NeoX has Megatron's old names for its modules, under a name of its own
        config = self._configuration()
        old = not config and any(_BEFORE_CORE.search(n) and not _HUGGING.search(n) for n in names)
        megatron = old or any(_MEGATRON.search(n) for n in names)
        args = _arguments(self._state.get("args"))
        tensors = self._megatron(chunks, args) if megatron else self._as_they_are(chunks)
        tensors |= self._optimizer(args, tensors, megatron=megatron)
        tensors = unique_names((*tensors.items(), *self._others().items()), self._label)
        hugging = bool(config) or any(_HUGGING.search(name) for name in names)
        megatron_framework = "NeMo 1" if config and not args else "Megatron-LM"
        archives = [file for file in self._storages.files if isinstance(file, PtFile)]
        self._problems += unread_tensors(archives, self._storages.arrays)
        framework = megatron_framework if megatron else "Hugging Face" if hugging else "torch"
        iteration = self._state.get("iteration")
        return Catalog(
            path=self._path,
            format=self.name,
            framework=framework,
            tensors={name: tensors[name] for name in sorted(tensors, key=natural_key)},
            args=args,
            config=config,
            common=self._common() if args else None,
            iteration=iteration if type(iteration) is int else None,
            files=self._file_infos(),
            problems=tuple(self._problems),
            details=self._details,
        )

    def _megatron(
        self, chunks: Mapping[str, Mapping[str, FileTensor]], args: Mapping[str, Any], prefix: str = ""
    ) -> dict[str, TensorInfo]:
        """Canonical tensors: those of the only rank of a job."""
        only = RankModel.of(self._label, chunks, self._state.get("checkpoint_version", 3.0))
        args = {name: value for name, value in args.items() if not _SPLIT.search(name)}  # they may be of the job before
        model = WholeModel(Grid(1, 1, 1, {(0, 0, 0): ""}), {(0, 0, 0): only}, args, self._storages)
        self._problems += [Problem("warning", text) for text in model.warnings]
        if model.extra_states and not prefix:
            self._details["extra states"] = f"{len(model.extra_states)}, which are not looked at"
        tensors = model.tensors()
        if not prefix:
            return tensors
        return {prefix + n: replace(t, name=prefix + n, kind="optimizer") for n, t in tensors.items()}

    def _as_they_are(self, chunks: Mapping[str, Mapping[str, FileTensor]]) -> dict[str, TensorInfo]:
        out = {}
        for number, chunk in chunks.items():
            prefix = f"{number}." if len(chunks) > 1 else ""
            wrapper = next((w for w in _WRAPPERS if chunk and all(name.startswith(w) for name in chunk)), "")
            for key, tensor in chunk.items():
                name = prefix + key.removeprefix(wrapper)
                out[name] = self._tensor(name, tensor, "weight")
        return out

    def _tensor(self, name: str, tensor: FileTensor, kind: str, opaque: str | None = None) -> TensorInfo:
        """A tensor by itself, also one whose elements do not lie in C order."""
        ref, label = tensor.ref, f"{self._label}: {printable(name)}"
        part = FlatPart(self._storages.storage(tensor.file, ref), tuple(_runs(ref, label)))
        return TensorInfo(name, ref.dtype, ref.shape, kind, (part,), opaque)

    def _in_state(self, node: Node, name: str) -> Iterator[tuple[str, FileTensor]]:
        """Every tensor in a tree of the state, by the keys on the way to it."""
        for path, ref in tensors_in(node, self._label):
            yield path_name((name, *path)), FileTensor(ref, self._storages.files[0])

    def _others(self) -> dict[str, TensorInfo]:
        """Tensors that are neither the model's nor the optimizer's, under the place where they lie."""
        out: dict[str, TensorInfo] = {}
        for key, value in self._state.items():
            if key == "optimizer" or not isinstance(key, str):
                continue
            tensors = list(self._in_state(value, key))
            if tensors and "rng_" in key:
                self._details["random states"] = "not looked at"
            else:
                out |= {name: self._tensor(name, t, "other") for name, t in unique_names(tensors, self._label).items()}
        return out

    def _optimizer(
        self, args: Mapping[str, Any], weights: Mapping[str, TensorInfo], *, megatron: bool
    ) -> dict[str, TensorInfo]:
        """State by the names of its parameters, as we write it; any other under the place where it lies."""
        optimizer = self._state.get("optimizer")
        states = optimizer.get("state") if isinstance(optimizer, Mapping) else None
        if megatron and isinstance(states, Mapping) and states and all(isinstance(key, str) for key in states):
            out: dict[str, TensorInfo] = {}
            for kind, tensors in states.items():
                if isinstance(tensors, Mapping):
                    named = dict(flattened(tensors, self._storages.files[0]))
                    out |= self._megatron({"model": named}, args, str(StateName(kind, "")))
            for name, info in out.items():
                weight = weights.get(parameter_of(name))
                if weight is None or weight.shape != info.shape:
                    shape = "no such weight" if weight is None else f"the weight is {list(weight.shape)}"
                    raise FormatError(f"{printable(name)} is {list(info.shape)}: {shape}", tensor=name)
            return out
        return {
            name: self._tensor(name, tensor, "optimizer", "state of an unknown parameter")
            for name, tensor in self._in_state(optimizer, "optimizer")
        }

    def _common(self) -> dict[Any, Node]:
        """The common state, without what has tensors of its own."""
        skipped = ("args", "optimizer")
        out = {
            name: v for name, v in self._state.items() if name not in skipped and not any(tensors_in(v, self._label))
        }
        optimizer = self._state.get("optimizer")
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        if isinstance(optimizer, Mapping) and isinstance(groups, list):
            scaler = {"grad_scaler": optimizer["grad_scaler"]} if optimizer.get("grad_scaler") is not None else {}
            chain = [{**entry, **scaler} for entry in _chained(groups, optimizer.get("chain"), self._label)]
            out["optimizer"] = chain[0] if len(chain) == 1 else dict(enumerate(chain))
        return out

    def _configuration(self) -> Mapping[str, Any]:
        """What lies beside the tensors: `config.json` of Hugging Face, `model_config.yaml` of NeMo 1."""
        if self._path != self._folder:
            return {}
        if exists(self._folder / "config.json"):
            document = read_json(self._folder / "config.json")
            return document if isinstance(document, Mapping) else {}
        if exists(self._folder / _NEMO):
            from converters.formats.plain_yaml import read_yaml  # few checkpoints have one: do not import the parser

            return read_yaml(self._folder / _NEMO)
        return {}

    def _file_infos(self) -> tuple[FileInfo, ...]:
        out = self._stored_files()
        listed = {file.name for file in self._storages.files}
        if self._path == self._folder:
            for name in listing(self._folder):
                state = status(self._folder / name)
                if name not in listed and state is not None and state.file:
                    role = "configuration" if name.endswith(".json") else "other"
                    out.append(FileInfo(name, state.size, role=role))
        return tuple(out)


def unique_names(named: Iterable[tuple[str, _V]], label: str) -> dict[str, _V]:
    """A dictionary of names that must be different.

    Raises:
        FormatError: Two of them are the same.
    """
    out: dict[str, _V] = {}
    for name, value in named:
        if name in out:
            raise FormatError(f"{label} holds two tensors that are both {printable(name)}", tensor=name)
        out[name] = value
    return out


def _arguments(node: Node) -> dict[str, Any]:
    """The training arguments: Megatron's Namespace, or the plain dictionary that we write, element types by name."""
    if not isinstance(node, Mapping):
        return dict(common_facts({"args": node}).args)
    return {key: _typed(value) for key, value in node.items() if isinstance(key, str)}


def _typed(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        try:
            return Global("torch", dtype(value).name)
        except FormatError:
            return value
    return value


def _chained(groups: list[Node], chain: Node, label: str) -> Iterator[dict[str, Node]]:
    """What a job's common state would have of each optimizer, `chain` saying how many of the groups it has.

    Args:
        chain: `[{"groups": 1, "distributed": False}, ...]`; None in a file that has but one optimizer.

    Raises:
        FormatError: The groups are not those of the chain.
    """
    stated = [{"groups": len(groups), "distributed": True}] if chain is None else chain
    rest = list(groups)
    for entry in stated if isinstance(stated, list) else []:
        count = entry.get("groups") if isinstance(entry, Mapping) else None
        if not isinstance(count, int) or not 0 <= count <= len(rest):
            break
        form = {"param_state_sharding_type": "fully_reshardable"} if entry.get("distributed") is True else {}
        yield {"optimizer": {"param_groups": rest[:count]}, **form}
        del rest[:count]
    else:
        if not rest:
            return
    raise FormatError(f"{label}: optimizer.chain does not divide its {len(groups)} param groups among optimizers")
