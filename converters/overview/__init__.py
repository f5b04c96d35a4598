"""Looking at checkpoints without converting them: which there are below a folder, and what the values of a tensor are."""
