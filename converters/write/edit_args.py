"""A copy of a checkpoint whose training arguments are changed; every other byte is that of the source.

The arguments are an inert Namespace in `common.pt`, in the object `common_state` (Megatron-Core 0.19), or in each rank's
`model_optim_rng.pt` (legacy). Only the file that holds them is written anew, the others are copied:

    common.pt                a new archive with the same storages
    __0_0.distcp of 0.19     ... | common_state, of another length | later records, moved; `.metadata` says where they lie
    model_optim_rng.pt       a new data.pkl, the storages copied behind it
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, IntegrityError, RequestError, UsageError
from converters.execute.destination import check_destination
from converters.formats.base import COMMON_OBJECT
from converters.formats.dcp.moved_records import with_longer_record
from converters.formats.file_bytes import byte_copies
from converters.formats.folder import exists, open_source, read_small, walk
from converters.formats.legacy.grid import MODEL
from converters.formats.resolve import TRACKER
from converters.formats.side_files import side_files
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.vocabulary import embedding_name
from converters.names import printable, quoted
from converters.pickles.emit import dumps
from converters.pickles.nodes import Obj, fields, set_field
from converters.planning.job import OutputFile, Slice
from converters.torchzip.records import read_directory, read_pickle
from converters.torchzip.records_out import with_pickle
from converters.write.argument_values import argument_value
from converters.write.job_arguments import LAYOUT_ARGUMENTS, shown_argument
from converters.write.side_files import LEFT_OUT, copied_file, files_beside
from converters.write.target_state import iteration_folder, open_common, tracker
from converters.write.write_plan import Conversion, WriteOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import Catalog
    from converters.formats.base import Reader

_METADATA = ".metadata"
_METADATA_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class EditOptions(WriteOptions):
    """What is changed.

    Attributes:
        values: Argument -> its value: plain data, the name of a torch type for an argument that is one, or `LiteralText`.
        unset: Arguments that are removed.
        new: Arguments that the checkpoint does not have may be set.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    new: bool = False


def plan_edit(reader: Reader, destination: Any, options: EditOptions) -> Conversion:
    """Decides everything about a copy with other arguments; writes nothing.

    Raises:
        RequestError: Nothing would change, an argument is unknown, or a value contradicts what is stored.
        IntegrityError: The source is damaged.
        DestinationError: The destination cannot be written.
    """
    catalog = reader.catalog
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    errors = [problem.message for problem in catalog.problems if problem.severity == "error"]
    if errors:
        raise IntegrityError(
            errors[0], details=errors[1:8], hint=f"distckpt verify {quoted(catalog.root)} says what else is damaged"
        )
    changed = _Changes(options)
    folder = iteration_folder(catalog)
    rewritten = _rewrite_arguments(reader, changed)
    _refuse_contradictions(catalog, changed)
    files, dropped = [], []
    reasons = {file.name: LEFT_OUT[file.kind] for file in side_files(catalog) if file.kind in LEFT_OUT}
    for name, state in walk(catalog.path):
        if name in reasons or not state.file:
            dropped.append((name, reasons.get(name, LEFT_OUT["special"])))
        elif name in rewritten:
            files.append(replace(rewritten[name], name=f"{folder}/{name}"))
        else:
            files.append(copied_file(f"{folder}/{name}", catalog.path / name, state.size, state.mtime_ns))
    decided = {*(file.name for file in files), *(f"{folder}/{name}" for name, _ in dropped)}
    beside = files_beside(catalog, "torch_dist", folder, written=decided)
    files += beside.files
    lines = [f"{name} {old} -> {new}" for name, (old, new) in changed.shown.items()]
    copies = byte_copies(reader, files, "what the new arguments take the place of")
    return Conversion(
        command="edit-args",
        reader=copies.reader,
        destination=destination,
        job=options.job(copies.reader, copies.sources, copies.routes, copies.files, drops=copies.drops),
        folder=folder,
        extra_files={TRACKER: tracker(folder)},
        copied=frozenset(catalog.tensors) | catalog.objects.keys(),
        dropped=(*dropped, *beside.dropped),
        summary=tuple(("" if number else "args", line) for number, line in enumerate(lines)),
        facts={"tensors": len(catalog.tensors)}
        | {"changed_args": {name: {"from": old, "to": new} for name, (old, new) in changed.shown.items()}},
        advice=("files are copied byte for byte, their checksums are not compared: distckpt verify does",),
        next_step=f"distckpt verify {quoted(destination)}",
        options=options,
    )


class _Changes:
    """The changes, made to one Namespace after the other.

    Attributes:
        shown: Arguments that differ: name -> (before, after), as JSON has them.
        values: Their new values.
    """

    def __init__(self, options: EditOptions) -> None:
        self._options = options
        self.shown: dict[str, tuple[Any, Any]] = {}
        self.values: dict[str, Any] = {}
        if not options.values and not options.unset:
            raise UsageError("edit-args needs at least one change", hint="--set KEY=VALUE, --unset KEY")
        both = sorted(options.values.keys() & set(options.unset))
        if both:
            raise UsageError(f"{printable(both[0])} is both set and unset")

    def apply(self, args: Any, file: str) -> None:
        """Changes the Namespace of a file.

        Raises:
            RequestError: There is none, or an argument is unknown.
        """
        if not isinstance(args, Obj) or not isinstance(args.state, dict):
            raise RequestError(
                f"{printable(file)} holds no Namespace of training arguments",
                hint="NeMo and Megatron-Bridge keep a configuration as text beside the tensors: edit that file",
            )
        stored, options = fields(args), self._options
        unknown = [n for n in options.values if n not in stored and not options.new]
        unknown += [n for n in options.unset if n not in stored]
        if unknown:
            hint = "distckpt inspect CKPT --args shows all"
            if unknown[0] in options.values:
                hint += f"; --new adds one: --set {quoted(unknown[0])}=... --new"
            raise RequestError(f"the checkpoint has no argument {printable(unknown[0])}", hint=hint)
        for name, text in options.values.items():
            before, value = stored.get(name), argument_value(name, text, stored.get(name))
            if name in stored and type(before) is type(value) and shown_argument(before) == shown_argument(value):
                continue
            self.shown.setdefault(name, (shown_argument(before), shown_argument(value)))
            self.values[name] = value
            set_field(args, name, value)
        for name in options.unset:
            self.shown.setdefault(name, (shown_argument(stored[name]), None))
            self.values.pop(name, None)
            del args.state[name]


def _rewrite_arguments(reader: Reader, changes: _Changes) -> dict[str, OutputFile]:
    """The files that hold arguments, by name, with others in them.

    Raises:
        RequestError: The format keeps none that could be changed, or nothing would change.
    """
    catalog = reader.catalog
    if catalog.format == "legacy":
        out = _rewrite_rank_files(catalog, changes)
    elif catalog.format not in ("torch_dist", "zarr"):
        raise RequestError(
            f"edit-args keeps the format, and the arguments of {catalog.format} are not changed in place",
            hint=f"distckpt convert {quoted(catalog.root)} DST --to torch_dist first"
            if catalog.megatron
            else "its settings are in config.json: copy the folder and edit that file"
            if catalog.config
            else "it has none of Megatron's arguments",
        )
    else:
        archive, tree = open_common(reader)
        embedded = not exists(catalog.path / "common.pt")
        changes.apply(tree.get("args"), COMMON_OBJECT if embedded else "common.pt")
        if embedded:
            out = _rewrite_data_file(catalog, archive.record())
        else:
            content = archive.dump(archive.tree, "common")
            out = {"common.pt": OutputFile("common.pt", len(content), content)}
    if not changes.shown:
        raise RequestError("nothing would change: the checkpoint has these values")
    return out


def _rewrite_data_file(catalog: Catalog, record: bytes) -> dict[str, OutputFile]:
    """The data file with the common state, and the metadata that says where the records behind it lie."""
    info = catalog.objects[COMMON_OBJECT]
    path = catalog.path / info.file
    size = next(file.size or 0 for file in catalog.files if file.name == info.file)
    raw = read_small(catalog.path / _METADATA, limit=_METADATA_LIMIT)
    metadata = with_longer_record(raw, info, len(record))
    end, behind = info.start + info.length, info.start + len(record)
    slices = [Slice(info.start, record)]
    slices += [Slice(0, (path, 0, info.start), plain=0)] if info.start else []
    slices += [Slice(behind, (path, end, size - end), plain=0)] if size > end else []
    return {
        info.file: OutputFile(info.file, behind + size - end, slices=tuple(slices)),
        _METADATA: OutputFile(_METADATA, len(metadata), metadata),
    }


def _rewrite_rank_files(catalog: Catalog, changes: _Changes) -> dict[str, OutputFile]:
    """Every rank's file with its Namespace."""
    out = {}
    for file in catalog.files:
        if PurePath(file.name).name != MODEL or file.size is None:
            continue
        path = catalog.path / file.name
        with open_source(path) as source:
            members = read_directory(source.read, 0, file.size, file.name)
            tree = read_pickle(source.read, 0, file.size, file.name, members=members)
            if not isinstance(tree, dict):
                raise FormatError(f"{printable(file.name)} is not a dictionary")
            changes.apply(tree.get("args"), file.name)
            pieces, size = with_pickle(source.read, members, dumps(tree, 2), PurePath(MODEL).stem, file.name)
        slices = [
            Slice(
                at,
                content if isinstance(content, bytes) else (path, *content),
                plain=-1 if isinstance(content, bytes) else 0,
            )
            for at, content in pieces
        ]
        out[file.name] = OutputFile(file.name, size, slices=tuple(slices))
    if not out:
        raise RequestError(f"there is no {MODEL} with training arguments")
    return out


def _refuse_contradictions(catalog: Catalog, changes: _Changes) -> None:
    """Refuses values that what is stored contradicts.

    A layout argument may only become what the shards show: the grid of the random states, the rows of the embedding.
    """
    stored = _stored_sizes(catalog)
    for name, (before, after) in changes.shown.items():
        if name in LAYOUT_ARGUMENTS and not (name in stored and stored[name] == after and after is not None):
            raise RequestError(
                f"{name} describes the layout that is stored: {before}, not {after}",
                details=[f"the stored shards show {name} {stored[name]}"] if name in stored else [],
                hint="distckpt reshard CKPT DST writes another layout, and its arguments with it",
            )
    _refuse_other_iteration(catalog, changes)
    _refuse_other_types(catalog, changes)
    before, after = changes.shown.get("vocab_size", (None, None))
    if isinstance(before, int) and (not isinstance(after, int) or after < before):
        raise RequestError(
            f"vocab_size {after} of {before} would make trained rows padding, which other commands leave out",
            hint="distckpt export-hf --vocab-size writes fewer rows, and says what it cuts",
        )
    args = {name: value for name, value in catalog.args.items() if name not in changes.shown} | changes.values
    edited = replace(catalog, args=args)
    before_edit = set(ModelArgs.from_catalog(catalog).contradictions(catalog))
    texts = [t for t in ModelArgs.from_catalog(edited).contradictions(edited) if t not in before_edit]
    if texts:
        raise RequestError(
            f"the stored tensors contradict {', '.join(changes.shown)}", details=[printable(text) for text in texts[:8]]
        )
    try:
        Layout.saved(edited)
    except TypeError as error:
        raise RequestError(str(error)) from error


def _refuse_other_iteration(catalog: Catalog, changes: _Changes) -> None:
    """The iteration is also in the folder's name, the tracker file and the schedulers' state."""
    before, after = changes.shown.get("iteration", (None, None))
    if "iteration" in changes.shown and after != catalog.iteration:
        raise RequestError(
            f"iteration {printable(str(after))} contradicts the checkpoint, which is of iteration {catalog.iteration}",
            details=[f"its argument iteration is {before}, its folder {printable(catalog.path.name)}"],
            hint="a job that starts with --finetune begins at iteration 0",
        )


def _refuse_other_types(catalog: Catalog, changes: _Changes) -> None:
    """The element types that arguments state must be those of stored weights."""
    stored = {tensor.dtype.name for tensor in catalog.weights.values()}
    stated = {"bf16": "bfloat16", "fp16": "float16"}
    for name, (_, after) in changes.shown.items():
        kind = stated[name] if name in stated and after is True else None
        if name == "params_dtype":
            kind = str(after).removeprefix("torch.")
        if kind is not None and stored and kind not in stored:
            raise RequestError(
                f"the stored tensors contradict {name} {after}: no weight is {kind}, they are {', '.join(sorted(stored))}",
                hint="distckpt export-hf --dtype writes weights of another type",
            )


def _stored_sizes(catalog: Catalog) -> dict[str, int]:
    """Layout arguments that the stored shards show themselves."""
    grid = next((o.grid for o in catalog.objects.values() if o.name == "rng_state"), ())
    names = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "data_parallel_size")
    sizes = dict(zip(names, grid, strict=False)) if len(grid) >= 2 else {}
    words = embedding_name(catalog.weights)
    return sizes | ({"padded_vocab_size": catalog.weights[words].shape[0]} if words else {})
