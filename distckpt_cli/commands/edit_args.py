"""`distckpt edit-args`: a checkpoint with other training arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from distckpt_cli.console import UsageProblem
from distckpt_cli.options import Ckpt, spread
from distckpt_cli.writing import Target, Writing, carry_out


@spread
def edit_args(
    src: Ckpt,
    dst: Target,
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set an argument: a number, true, false, null, a list, '\"text\"', or a torch type by name.",
        ),
    ] = None,
    unset: Annotated[list[str] | None, typer.Option("--unset", metavar="KEY", help="Remove an argument.")] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Allow --set of arguments that the checkpoint does not have.")
    ] = False,
    writing: Writing,
) -> int:
    """Copy a checkpoint with other training arguments; format, layout and every tensor stay, byte for byte.

    Arguments of the layout are refused: `reshard` changes them and moves the tensors. So are values that the stored
    tensors contradict.

        $ distckpt edit-args ckpt/iter_0050000 out --set lr=1e-5 --set 'tokenizer_model="tok.model"'
        $ distckpt edit-args ckpt out --set params_dtype=bfloat16 --unset wandb_project --dry-run
    """
    from converters.write.argument_values import LiteralText

    values: dict[str, LiteralText] = {}
    for word in settings or ():
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageProblem(f"--set {word} is not KEY=VALUE", hint="--set num_experts=8")
        if key in values:
            raise UsageProblem(f"--set {key} is given twice")
        values[key] = LiteralText(text)
    options = {"values": values, "unset": tuple(unset or ()), "new": new}
    return carry_out("distckpt.edit-args/1", src, dst, writing, options)
