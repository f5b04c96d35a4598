"""Verification of a checkpoint: structure, records, checksums, optimizer against weights, values, file lists.

    from converters import verify
    report = verify("ckpt/iter_0050000", values=True)
    report.good, report.affected      # whether all is well; the tensors concerned
    messages = [finding.message for check in report.checks for finding in check.findings]

tests/verify/test_verify_swaps.py and tests/verify/test_verify_hf.py have what production systems do to checkpoints, damage
by damage, and the check that finds it. Without a list of the files (`write_manifest=True`, or Megatron's own
`integrity.json`), made when the checkpoint was right, these are not found, as nothing else depends on them:

- where no master weights are stored beside weights: values of another run or iteration, or exchanged between places of one
  shape (two layers, two experts, k and v), with their checksums;
- both moments of a parameter in place of both of another one of its shape; one of them is found by `values`;
- weights, masters and moments exchanged all together: two experts, or the files of two tensor-parallel ranks of torch_dist,
  if their shapes allow it (legacy files say whose they are);
- a flipped bit where the format has no checksums (zarr, safetensors, ByteCheckpoint) and no master weight tells;
- arguments that no tensor shows: learning rate, seed, rotary base, number of heads where the width of all is the same.
"""
