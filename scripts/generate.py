"""Loads a Hugging Face folder with transformers and generates a few tokens. Usage: generate.py FOLDER"""

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"], f"transformers found no weights for {sorted(info['missing_keys'])}"
assert not info["unexpected_keys"], f"transformers has no place for {sorted(info['unexpected_keys'])}"
prompt = torch.tensor([[1, 2, 3, 4]])
tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
parameters = sum(p.numel() for p in model.parameters())
print(f"{type(model).__name__}, {parameters:,} parameters, {model.dtype}, every weight loaded, none left over")
print("prompt", prompt[0].tolist(), "->", tokens[0, 4:].tolist())
