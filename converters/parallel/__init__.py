"""How a training job divides a model: ranks, pipeline stages, shards, padding, and what one rank holds. No I/O."""
