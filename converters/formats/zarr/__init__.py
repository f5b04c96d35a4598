"""Megatron-Core's zarr checkpoints: read."""
