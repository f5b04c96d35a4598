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

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from converters.events import Listener, StopFlag
    from converters.verification.report import Report

__all__ = ["verify"]


def verify(
    path: str | Path,
    *,
    quick: bool = False,
    values: bool = False,
    write_manifest: bool = False,
    format: str | None = None,
    follow_links: bool = False,
    threads: int | None = None,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
) -> Report:
    """Checks a checkpoint of any format, and reports errors and warnings; executes nothing in it.

    The process that calls this does all of it, with threads. Under torchrun, too: call it on one rank, or have ranks share
    the work with `torchrun ... -m distckpt_cli verify CKPT`.

    Args:
        path: The checkpoint, as for every command: a training root, an iteration, a file inside.
        quick: Structure only; no payload is read.
        values: Look at all values, too: NaN, Inf, zeros, denormals, constants, layers unlike the others.
        write_manifest: List the files with their SHA-256, if nothing is wrong: `integrity.json`, as Megatron writes it, or
            `distckpt-manifest.json` for formats that Megatron does not know.
        format: Name of the format to read it as; None finds out.
        follow_links: Files of it may be links out of its folder.
        threads: Workers; None takes one for each core, 8 at most.
        listener: Told about progress; see `converters.events`.
        stop: Polled between blocks; set it to end.

    Returns:
        What was found; `good` is the answer. Also of a checkpoint so damaged that it cannot be opened.

    Raises:
        FormatError: Nothing there, or no checkpoint of a known format, or a file that may not be read.
        RequestError: A manifest was asked for that there is no place for.
        DestinationError: The manifest cannot be written.
        Interrupted: Asked to stop.
    """
    from converters.errors import DamagedFileError
    from converters.formats import open_checkpoint
    from converters.verification import run

    options = run.VerifyOptions(quick=quick, values=values, write_manifest=write_manifest, threads=threads)
    try:
        reader = open_checkpoint(path, format, follow_links=follow_links)
    except DamagedFileError as error:
        return run.unopened(error)
    return run.verify(reader, options, listener=listener, stop=stop)
