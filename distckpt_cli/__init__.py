"""The distckpt command line."""
