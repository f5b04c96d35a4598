"""Plans: copies of boxes, output files, tasks. No I/O."""
