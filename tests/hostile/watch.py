"""What a process may do while it reads a file of a stranger; everything else is noted and refused.

An audit hook cannot be taken off again, so a process that is watched has to end after its work.
"""

# ruff: noqa: PTH118, PTH119

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Violation", "watch"]

# opened by others than Python files: listed so that a new event of a new Python is not silently allowed
_NEVER = (
    *("os.system", "os.fork", "os.forkpty", "os.exec", "os.spawn", "os.posix_spawn", "os.startfile", "os.kill", "os.killpg"),
    *("os.putenv", "os.unsetenv", "os.chdir", "os.fwalk", "os.setxattr", "os.removexattr", "pty.", "subprocess."),
    *("socket.__new__", "socket.bind", "socket.connect", "socket.send", "socket.getaddrinfo", "socket.gethostby"),
    *("urllib.", "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "nntplib.", "telnetlib.", "webbrowser."),
    *("exec", "compile", "marshal.", "pickle.find_class", "code.__new__", "function.__new__", "cpython.run_"),
    *("ctypes.dlopen", "sqlite3.", "shutil.unpack", "shutil.chown", "dbm.", "tempfile.mkdtemp", "signal.pthread_kill"),
    *("builtins.input", "builtins.breakpoint", "sys.settrace", "sys.setprofile", "gc.get_objects", "resource.setrlimit"),
)  # fmt: skip
_CHANGES = (
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.utime", "os.mkfifo", "os.mknod", "shutil.copyfile", "shutil.move", "shutil.rmtree", "shutil.copytree"),
)
_IN_FOLDERS = ("os.remove", "os.rmdir")  # their last argument may be an open folder
# who may compile what is in the program itself: annotations and the methods of dataclasses
_COMPILERS = {("inspect.py", "get_annotations"), ("inspect.py", "<dictcomp>"), ("typing.py", "__init__")}
_COMPILERS |= {("dataclasses.py", "_create_fn"), ("typing.py", "_evaluate"), ("__init__.py", "namedtuple")}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Violation(BaseException):
    """Raised where something forbidden happens; no `except Exception` of the product can hide it."""


def watch(writable: list[Path], forbidden: list[Path]) -> tuple[list[str], Callable[[], None]]:
    """Starts watching this process.

    Args:
        writable: Folders below which files may be made and changed, and single files.
        forbidden: Folders of which nothing may be opened, not even to read it.

    Returns:
        What was done that may not be, a list that grows, and what ends the watch.
    """
    allowed = [os.path.realpath(path) for path in writable]
    secret = [os.path.realpath(path) for path in forbidden]
    seen: list[str] = []
    judging: set[int] = set()  # threads: what judging itself does is not judged, what others do meanwhile is
    stopped = False

    def below(path: object, folders: list[str]) -> bool:
        if isinstance(path, int):
            return folders is allowed
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return any(real == folder or real.startswith(folder + "/") for folder in folders)

    def judge(event: str, args: tuple[object, ...]) -> str:
        if event == "import":
            return "" if args[0] in sys.modules else f"import of {args[0]}"
        if event == "open":
            path, _, flags = args
            if path is None:
                return ""
            if not isinstance(path, int) and below(path, secret):
                return f"opened {path!r}"
            if isinstance(flags, int) and flags & _WRITES and not below(path, allowed) and path != os.devnull:
                return f"opened {path!r} to write"
            return ""
        if event.startswith(_CHANGES):
            paths = [a for a in args if isinstance(a, (str, bytes, os.PathLike))]
            if event in ("os.symlink", "shutil.copyfile", "shutil.copytree"):
                paths = paths[-1:]
            folders = [a for a in args if isinstance(a, int) and a >= 0] if event in _IN_FOLDERS else []
            paths = [os.path.join(f"/proc/self/fd/{folders[0]}", path) if folders else path for path in paths]
            outside = [path for path in paths if not below(path, allowed)]
            return f"{event} of {outside[0]!r}" if outside else ""
        if event in ("compile", "exec", "code.__new__"):
            caller = sys._getframe(2).f_code
            if (os.path.basename(caller.co_filename), caller.co_name) in _COMPILERS:
                return ""
        if event in ("os.putenv", "os.unsetenv") and str(args[0]).startswith("b'PYDANTIC_"):
            return ""  # Typer, around a number on the command line
        if event == "ctypes.dlopen" and args == (None,):  # the C library, for fallocate and renameat2
            back = sys._getframe(3)
            if back.f_code.co_filename.endswith(os.path.join("converters", "execute", "disk.py")):
                return ""
        return f"{event} {args!r:.120}" if event.startswith(_NEVER) else ""

    def hook(event: str, args: tuple[object, ...]) -> None:
        thread = threading.get_ident()
        if stopped or thread in judging:
            return
        judging.add(thread)
        try:
            wrong = judge(event, args)
        finally:
            judging.discard(thread)
        if wrong:
            seen.append(wrong)
            raise Violation(wrong)

    def stop() -> None:
        nonlocal stopped
        stopped = True

    sys.addaudithook(hook)
    return seen, stop
