"""Moves the bytes of a job with threads and ranks, and publishes the result completely or not at all."""
