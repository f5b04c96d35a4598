"""The command line: one entry point, one error boundary."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.main import get_command

from converters import __version__
from converters.errors import DestinationError, DistckptError, Interrupted
from converters.execute.error_json import AGAIN, disk_trouble
from converters.execute.ranks import Ranks
from converters.names import printable
from distckpt_cli.choices import nearest
from distckpt_cli.commands import WRITERS
from distckpt_cli.console import COMMAND_LINE, Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.help import CONTEXT, LazyGroup
from distckpt_cli.signals import STOPS, Signalled, raise_on_signals
from distckpt_cli.streams import careful_streams

if TYPE_CHECKING:
    from collections.abc import Sequence

# what Typer raises for a wrong command line; it has no public name for the class itself
_Misuse = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=CONTEXT)


def _version(show: bool) -> None:
    if show:
        print(f"distckpt {__version__}")
        raise typer.Exit(ExitCode.OK)


@app.callback()
def root(
    context: typer.Context,
    workers: Annotated[  # a word: reading a number would load pydantic, a quarter of the time of `inspect`
        str, typer.Option(metavar="N", help="Run the command as N processes that share the work.")
    ] = "1",
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Look at and convert the checkpoints of large training jobs, without Megatron and without a GPU.

    $ distckpt inspect ckpt/iter_0050000
    $ distckpt inspect ckpt/iter_0050000 --tensors 'decoder.layers.0.*'
    $ distckpt inspect ckpt/iter_0050000 --json | jq .model
    $ distckpt export-hf ckpt/iter_0050000 llama-hf
    """
    if not (workers.isascii() and workers.isdigit() and int(workers)):
        raise UsageProblem(f"--workers {printable(workers)} is not a number of processes", hint="give 1 or more")
    if int(workers) > 1:
        from distckpt_cli.launch import launch

        words: list[str] = context.obj
        if Ranks.from_environment().world > 1:
            raise UsageProblem("--workers inside torchrun or srun: the ranks are there already", hint="leave it out")
        name = context.invoked_subcommand or ""
        command = context.command.get_command(context, name)  # type: ignore[attr-defined]
        if command is not None and all(param.name != "rank_timeout" for param in command.params):
            hint = "--run-as 'distckpt --workers N' starts its commands so" if name == "watch" else "leave it out"
            raise UsageProblem(f"--workers: {name} is the work of one process", hint=hint)
        raise typer.Exit(launch(int(workers), words[words.index(context.invoked_subcommand or "") :]))


@dataclass(frozen=True)
class _ErrorForm:
    """How an error is shown: read from the raw words, because parsing them may be what failed."""

    json: bool
    debug: bool

    @classmethod
    def of(cls, args: Sequence[str]) -> _ErrorForm:
        words = list(args[: args.index("--")] if "--" in args else args)
        loud = sum(len(word) - 1 for word in words if word.strip("v") == "-" and word != "-")
        loud += words.count("--verbose")
        return cls("--json" in words, loud >= 2 or os.environ.get("DISTCKPT_DEBUG", "0") not in ("", "0"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments without the program's name; by default those of the process.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    with careful_streams():
        return _main(args)


def _main(args: list[str]) -> int:
    try:
        with contextlib.ExitStack() as stack:
            if Ranks.from_environment().rank:  # the answer is rank 0's to give
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
            stack.enter_context(raise_on_signals())
            code = _run(args)
        sys.stdout.flush()
        stdout_failure: DestinationError | None = getattr(sys.stdout, "failure", None)
        if code == ExitCode.OK and stdout_failure is not None:
            return _report_error(stdout_failure, _ErrorForm.of(args))
    except BrokenPipeError:
        return ExitCode.BROKEN_PIPE
    except DistckptError as error:  # the last of the answer
        return _report_error(error, _ErrorForm.of(args))
    return code


def _run(args: list[str]) -> int:
    form = _ErrorForm.of(args)
    COMMAND_LINE.set(tuple(args))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # see `__main__`, and `launch`
        result = get_command(app).main(args=args or ["--help"], prog_name="distckpt", standalone_mode=False, obj=args)
        if not args:
            return ExitCode.USAGE  # help was shown, but nothing was asked
        return result if isinstance(result, int) else ExitCode.OK
    except SystemExit as error:  # Typer leaves this way when stdout's reader is gone, and after completion
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        return error.code if isinstance(error.code, int) else ExitCode.OK
    except DistckptError as error:
        return _report_error(error, form)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Signalled as error:
        hint = AGAIN.partition(";")[0] if any(word in WRITERS for word in args) else None
        return _report_error(Interrupted(error.signum, f"by {signal.Signals(error.signum).name}", hint=hint), form)
    except _Misuse as error:
        return _report_error(_as_usage(error), form)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: Python's own exit code would mean "a problem was found"
        if form.debug:
            traceback.print_exc()
        return _report_error(disk_trouble(error) or _as_bug(error), form, error)


def _report_error(error: DistckptError, form: _ErrorForm, cause: BaseException | None = None) -> int:
    code = 128 + error.signum if isinstance(error, Interrupted) else int(error.exit_code)
    _write_torchrun_error(error)
    if not _shows_errors(cause or error):
        return code
    console = Console()
    if form.json:
        body = {
            "kind": error.kind,
            "message": error.message,
            "details": error.details,
            "hint": error.hint,
            "tensor": error.tensor,
            "exit_code": code,
        }
        with contextlib.suppress(DestinationError):  # stdout itself may be what failed
            console.document("distckpt.error/1", {"error": body})
    console.error(error, word="stopped" if isinstance(error, Interrupted) else "error:", who=_rank_prefix())
    if form.debug and error.__traceback__ is not None and error.exit_code != ExitCode.BUG:
        traceback.print_exception(error)
    return code


def _rank_prefix() -> str:
    """The process that an error is of, for its first line; empty for the leading one."""
    rank = Ranks.from_environment().rank
    return f"rank {rank} on {socket.gethostname()}: " if rank else ""


def _shows_errors(error: BaseException) -> bool:
    """Whether this process shows an error, of all that were started together: each error is shown once.

    Before the ranks have met, none knows of the others; so one process of each machine shows what is wrong there.
    """
    ranks = Ranks.from_environment()
    shown_here = getattr(error, "shown_here", None)
    return ranks.rank == 0 or (ranks.local == 0 if shown_here is None else bool(shown_here))


def _write_torchrun_error(error: DistckptError) -> None:
    """Leaves the message where torchrun looks for it, so that its own report names the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"timestamp": str(int(time.time())), "py_callstack": str(error)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": error.message, "extraInfo": about}}))


def _plain_value(text: str) -> str:
    """Typer's message about an option's value, reworded: which option or variable, and which values it takes."""
    match = re.match(r"Invalid value for '(?:-\w / )?(--[\w-]+)'(?: \(env var: '(\w+)'\))?: Input should be (.*)", text)
    if match is None:
        return text
    typed = any(word.partition("=")[0] == match[1] for word in COMMAND_LINE.get())
    name = match[1] if typed else match[2] or match[1]
    bound = re.match(r"(greater|less) than (or equal to )?(\S+)", match[3])
    if bound is None:
        return f"{name} takes {'a whole number' if 'valid integer' in text else 'a number'}"
    side = "more" if bound[1] == "greater" else "less"
    return f"{name} must be {f'{bound[3]} or {side}' if bound[2] else f'{side} than {bound[3]}'}"


def _as_usage(error: Exception) -> UsageProblem:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    text = _plain_value(text)
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text, re.DOTALL):
        text = f"too many arguments: {printable(extra[1])}"
    near = re.search(r"\s*\(Possible options: (--[\w-]+).*\)|\s*Did you mean (--[\w-]+)\?", text)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "distckpt"
    hint = f"see {command} --help"
    if "--workers" in text and context is not None and context.parent is not None:
        hint = f"it goes before the command: distckpt --workers N {context.info_name} ..."
    if near:
        text, option = text[: near.start()], near[1] or near[2]
        if nearest(text.rpartition(" ")[2].strip("-."), [option.strip("-")]):  # Typer counts the dashes as alike
            hint = f"did you mean {option}? All options: {command} --help"
    small = text[:1].lower() if text[1:2].islower() else text[:1]  # the name of a variable stays as it is
    return UsageProblem(small + text[1:].rstrip("."), hint=hint)


def _as_bug(error: Exception) -> DistckptError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    cause = " ".join(str(error).split())
    return DistckptError(
        f"internal error: {type(error).__name__}: {cause[:300]}{where}",
        hint="this is a bug in distckpt; DISTCKPT_DEBUG=1 shows where it happened",
    )


if __name__ == "__main__":
    sys.exit(main())
