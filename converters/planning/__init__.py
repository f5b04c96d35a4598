"""What is to be moved where: region copies, the output files, and the work in units. No I/O."""
