"""Whether a checkpoint is right: structure, records, checksums, optimizer against weights, values, file lists."""
