"""Megatron-LM's legacy checkpoints, one file for each rank: read, and written."""
