"""The real megatron-core on a CPU, in child processes: writes checkpoints, and loads ours back."""
