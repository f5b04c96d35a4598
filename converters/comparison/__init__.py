"""Two checkpoints side by side, in any two formats and layouts."""
