"""Megatron-Core's torch_dist: read, and written."""
