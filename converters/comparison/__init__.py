"""Comparison of two checkpoints of any formats and layouts: tensors, arguments, state, every value.

from converters import diff
report = diff("ckpt/iter_0050000", "exported-hf", rtol=1e-2)
apart = {tensor.name: tensor.values.max_abs for tensor in report.differing}  # empty if report.identical
"""
