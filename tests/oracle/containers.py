"""Files of whole tensors by those who usually write them: megatron-core, transformers, huggingface_hub. From `tests/`:

python -m oracle.containers save FILE [--config mixtral]   # what a user of GPTModel saves: state dict, args, iteration
python -m oracle.containers load FILE [--config llama]     # strictly, into GPTModel at TP1 PP1; prints JSON, 1 if it differs
python -m oracle.containers hugging OUT                    # OUT/hf_llama_safetensors, OUT/hf_mixtral_bin, OUT/hf_gpt2_bin
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch


def small(family, **settings):
    """A small transformers model with random bf16 weights."""
    import transformers

    torch.manual_seed(7)
    sizes = {"vocab_size": 120, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "GPT2":
        sizes = {"vocab_size": 120, "n_head": 4, "n_layer": 2, "n_embd": 32, "n_positions": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **settings)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    return model.to(torch.bfloat16).eval()


def hugging(out):
    from huggingface_hub import save_torch_state_dict

    small("Llama").save_pretrained(out / "hf_llama_safetensors", max_shard_size="30KB")
    for name in ("hf_mixtral_bin", "hf_gpt2_bin"):
        (out / name).mkdir(parents=True, exist_ok=True)
    mixtral = small("Mixtral", num_local_experts=4)
    with tempfile.TemporaryDirectory() as folder:  # the names that the library itself gives experts in a file
        mixtral.save_pretrained(folder)
        from safetensors.torch import load_file

        state = load_file(Path(folder) / "model.safetensors")
    save_torch_state_dict(
        state,
        out / "hf_mixtral_bin",
        safe_serialization=False,
        max_shard_size="40KB",
        filename_pattern="pytorch_model{suffix}.bin",
    )
    mixtral.config.save_pretrained(out / "hf_mixtral_bin")
    gpt2 = small("GPT2")
    folder = out / "hf_gpt2_bin"
    gpt2.config.save_pretrained(folder)
    torch.save(gpt2.state_dict(), folder / "pytorch_model.bin")  # with lm_head.weight, tied to the embedding


def megatron(options):
    from oracle import cpu

    cpu.install()
    import megatron.core  # noqa: F401

    cpu.after_import()
    from oracle import models, run

    options.dp, options.timeout = None, 120
    with tempfile.TemporaryDirectory() as folder:
        run.start_parallel(options, 0, f"{folder}/store", 1, 1, 1)
        args = models.megatron_args(options.config, "bf16", overrides={"transformer_impl": "local"})
        model = models.build_model(args)
        models.fill(model, args, torch.bfloat16)
        if options.action == "save":
            state = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": model.state_dict()}
            torch.save(state, options.path)
            return 0
        found = torch.load(options.path, weights_only=True, mmap=True)
        want = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
        for value in model.parameters():
            torch.nn.init.zeros_(value)
        result = model.load_state_dict(found["model"], strict=False)
        missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
        loaded = model.state_dict()
        wrong = [name for name, value in want.items() if not torch.equal(loaded[name], value)]
        print(
            json.dumps({"missing": missing, "unexpected": result.unexpected_keys, "wrong": wrong, "count": len(want)})
        )
        torch.distributed.destroy_process_group()
        return 1 if missing or wrong or result.unexpected_keys else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["save", "load", "hugging"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--config", default="llama")
    options = parser.parse_args()
    options.path = options.path.absolute()
    return hugging(options.path) if options.action == "hugging" else megatron(options)


if __name__ == "__main__":
    sys.exit(main())
