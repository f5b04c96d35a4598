"""What an import costs, beside the cheapest thing that moves the same bytes and beside loading the model and saving it.

    python scripts/bench_import.py FOLDER [--make GIB] [--runs 5] [--dir TMP] [--route ours --route cp] [-- --tp 2]

Per round, each from a cold page cache, in an order that turns with the rounds:

  cp     `cp -r` of the Hugging Face folder, then fsync of every file: a floor for moving its bytes
  ours   `distckpt import-hf`, a process from start to end, the import of transformers' configuration classes included
  empty  a process that imports those classes and completes the folder's config.json: what of the above is not ours
  load   a process that loads the model in transformers and saves it again

`--make` writes a Llama of that size, in shards of 2 GiB, if there is no FOLDER. How memory and bytes are measured:
bench_export.py.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench_export import GIB, digest, forget, interleaved, machine, parsed, sync, table

EMPTY = """
import json, sys
from converters.transformers_config import completed
config = json.load(open(sys.argv[1] + "/config.json"))
completed(config["model_type"], config)
open(sys.argv[2], "w").close()
"""
LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


def make(folder, gib):
    """A Llama of about so many GiB in bf16: random numbers, a layer at a time."""
    import torch
    from safetensors.torch import save_file

    hidden, ffn, heads, groups, vocab = 2048, 5632, 32, 8, 32000
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {f"self_attn.{n}_proj": (hidden * groups // heads, hidden) for n in "kv"}
    shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layer = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    layers = max(1, int((gib * GIB - 4 * vocab * hidden) // layer))
    each = max(1, 2 * GIB // layer)
    folder.mkdir(parents=True)
    parts = [range(first, min(first + each, layers)) for first in range(0, layers, each)]
    named, total = {}, 0
    for number, part in enumerate(parts):
        held = {f"model.layers.{n}.{key}.weight": shape for n in part for key, shape in shapes.items()}
        if not number:
            held |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
            held["model.norm.weight"] = (hidden,)
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_() for name, shape in held.items()}
        total += sum(t.nbytes for t in tensors.values())
        save_file(tensors, folder / file, {"format": "pt"})
        named |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def routes(source, work, extra):
    copy, out, saved, empty = work / "copy", work / "out", work / "saved", work / "empty"
    ours = [sys.executable, "-m", "distckpt_cli", "import-hf", str(source), str(out), "--progress", "off", *extra]
    return {
        "cp": (["cp", "-rL", str(source), str(copy)], lambda: sync(copy), copy),
        "ours": (ours, None, out),
        "empty": ([sys.executable, "-c", EMPTY, str(source), str(empty)], None, empty),
        "load": ([sys.executable, "-c", LOAD, str(source), str(saved)], None, saved),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=float, metavar="GIB", help="write the folder, of this size, if it is not there")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; by default beside the folder")
    parser.add_argument("--route", action="append", choices=["cp", "ours", "empty", "load"], help="only these")
    parser.add_argument("--json", type=Path, help="also write every run here")
    parser.epilog = "What follows -- are options for import-hf."
    asked, extra = parsed(parser)
    source = asked.folder.resolve()
    if asked.make and not source.exists():
        make(source, asked.make)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    print(f"{source.name}: {size / GIB:.2f} GiB\n{machine()}; n = {asked.runs}, interleaved, cold cache")
    digests = set()
    if asked.dir:
        Path(asked.dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.dir or source.parent, prefix="bench-") as name:
        todo = routes(source, Path(name), extra)
        chosen = {route: it for route, it in todo.items() if not asked.route or route in asked.route}
        results = interleaved(
            chosen,
            asked.runs,
            lambda: forget(source),
            lambda name, made: digests.add(digest(made)) if name == "ours" else None,
        )
    table(results, size, size)
    if "ours" in results:
        print(f"results of ours byte-identical in all {asked.runs} runs: {'yes' if len(digests) == 1 else 'NO'}")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "size": size, "runs": results}))
    return 0 if len(digests) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
