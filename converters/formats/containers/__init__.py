"""Containers of whole tensors, safetensors and torch.save: read, and written."""
