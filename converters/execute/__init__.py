"""Moving the bytes of a job on threads and ranks, and publishing the result whole or not at all."""
