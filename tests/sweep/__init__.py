"""The sweep: distckpt against the real loader, over optimizers, forms of their state, models and versions of Megatron-LM."""
