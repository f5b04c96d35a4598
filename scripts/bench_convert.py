"""What a conversion costs for each pair of formats, beside the cheapest thing that moves the same bytes.

    python scripts/make_big.py /tmp/big --optimizer --layers 12 --hidden 1024 --ffn 2816 --vocab 32768 --tp 4   # 3 GB
    python scripts/bench_convert.py /tmp/big --tp 8 [--from legacy] [--to torch] [--runs 3] [--dir TMP]

The checkpoint is first brought into every format: by distckpt, and zarr by hand, as distckpt does not write it. Then, per
pair and round, each from a cold page cache, in an order that turns:

  cp     `cp -r` of what the conversion wrote, then fsync of every file: the same bytes, read and written once
  ours   `distckpt convert`, a process from start to end

`read x` is bytes read per byte written; memory, bytes and seconds are measured as in bench_export.py. Needs Linux.
"""

import argparse
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_export import GIB, MIB, REPOSITORY, digest, forget, interleaved, machine, sync

sys.path.insert(0, str(REPOSITORY))

LAYOUT = {"torch_dist", "legacy"}  # formats whose files belong to ranks
SPELT = {"torch.bfloat16": "bfloat16", "torch.float32": "<f4", "torch.int64": "<i8", "torch.uint8": "|u1"}


def convert(source, target, to, tp):
    words = ["--tp", str(tp)] if to in LAYOUT else []
    return [sys.executable, "-m", "distckpt_cli", "convert", str(source), str(target), "--to", to, "-q", *words]


def write_zarr(source, root):
    """A zarr checkpoint with the chunks of a torch_dist one, as Megatron-Core 0.9 lays them out."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    folder = root / source.name
    metadata = FileSystemReader(source).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            (folder / key).mkdir(parents=True)
            spec = {"zarr_format": 2, "shape": list(entry.size), "chunks": list(entry.chunks[0].sizes), "order": "C"}
            spec |= {
                "dtype": SPELT[str(entry.properties.dtype)],
                "compressor": None,
                "fill_value": None,
                "filters": None,
            }
            (folder / key / ".zarray").write_text(json.dumps(spec))
    for index, where in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if not hasattr(entry, "chunks"):
            continue
        with (source / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            value = torch.load(io.BytesIO(file.read(where.length)), weights_only=True)
        numbers = (at // size for at, size in zip(index.offset, entry.chunks[0].sizes, strict=True))
        name = ".".join(map(str, numbers)) or "0"
        (folder / index.fqn / name).write_bytes(value.contiguous().view(torch.uint8).numpy().tobytes())
    shutil.copy(source / "common.pt", folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text(source.name.removeprefix("iter_").lstrip("0"))
    return root


def in_format(source, name, work, tp):
    """The checkpoint in a format, made once."""
    if name == "torch_dist":
        return source
    made = work / f"source-{name}{'.pt' if name == 'torch' else ''}"
    if name == "zarr":
        return write_zarr(source, made)
    subprocess.run(convert(source, made, name, tp), check=True, stdout=subprocess.DEVNULL)
    return made


def everything(path):
    return [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(source, to, work, tp, rounds):
    out, kept, copy = work / "out.pt", work / "kept.pt", work / "copy.pt"
    command = convert(source, out, to, tp)
    subprocess.run([*command[:4], str(source), str(kept), *command[6:]], check=True, stdout=subprocess.DEVNULL)
    size, digests = sum(path.stat().st_size for path in everything(kept)), set()
    whole = kept if kept.is_dir() else kept.parent

    def landed():
        sync(copy if copy.is_dir() else copy.parent)

    def prepare():
        for path in (source if source.is_dir() else source.parent, whole):
            forget(path)

    todo = {"cp": (["cp", "-r", str(kept), str(copy)], landed, copy), "ours": (command, None, out)}
    results = interleaved(
        todo, rounds, prepare, lambda name, made: digests.add(digest(made)) if name == "ours" else None
    )
    remove(kept)
    return results, size, len(digests) == 1


def row(pair, results, size, same):
    ours, cp = results["ours"], results["cp"]
    ratios = [mine["wall"] / base["wall"] for mine, base in zip(ours, cp, strict=True)]
    wall, base = (statistics.median(run["wall"] for run in runs) for runs in (ours, cp))
    read, cpu = (statistics.median(run[key] for run in ours) for key in ("rchar", "cpu"))
    anonymous = max(run["anonymous"] for run in ours) / MIB
    print(
        f"{' -> '.join(pair):26} {size / GIB:7.2f} {base:7.2f} {wall:7.2f} {statistics.median(ratios):7.2f}"
        f" {min(ratios):6.2f} {cpu:7.2f} {anonymous:9.0f} {read / size:7.3f} {'yes' if same else 'NO':>5}",
        flush=True,
    )


def main():
    from converters.write.convert import WRITERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a torch_dist checkpoint")
    parser.add_argument("--tp", type=int, default=8, help="of targets whose files belong to ranks")
    parser.add_argument("--from", dest="sources", action="append", help="a source format; may be repeated")
    parser.add_argument("--to", action="append", choices=list(WRITERS), help="a target format; may be repeated")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; by default beside the checkpoint")
    asked = parser.parse_args()
    from converters.formats import open_checkpoint

    catalog = open_checkpoint(asked.checkpoint).catalog
    size = sum(path.stat().st_size for path in everything(catalog.path))
    print(f"{catalog.path.name}: {size / GIB:.2f} GiB in torch_dist")
    print(f"{machine()}; n = {asked.runs}, interleaved, cold cache")
    columns = ("GiB", "cp s", "ours s", "ratio", "least", "cpu s", "anon MiB", "read x", "same")
    print(f"{'pair':26} " + " ".join(f"{c:>{w}}" for c, w in zip(columns, (7, 7, 7, 7, 6, 7, 9, 7, 5), strict=True)))
    failed = False
    with tempfile.TemporaryDirectory(dir=asked.dir or catalog.path.parent.parent, prefix="bench-") as name:
        work = Path(name)
        for form in asked.sources or ["torch_dist", "zarr", *(to for to in WRITERS if to != "torch_dist")]:
            (work / form).mkdir()
            source = in_format(catalog.path, form, work / form, max(1, asked.tp // 2))
            for to in asked.to or WRITERS:
                results, written, same = run(source, to, work / form, asked.tp, asked.runs)
                row((form, to), results, written, same)
                failed = failed or not same
            shutil.rmtree(work / form)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
