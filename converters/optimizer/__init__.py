"""Optimizer state under canonical names, whatever layout it was saved in, and back into buckets."""
