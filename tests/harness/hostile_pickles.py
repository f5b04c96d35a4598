"""Pickles that attack their reader. Every one is made here; none is kept as a file.

Code-executing payloads make a harmless marker (a directory or a file). They are written with our own
emitter, which writes any call without making it. Run as a script, this file is the child process of
`test_pickles_hostile.py`: `live` unpickles payloads for real, `inert` reads them with ours, `bombs` measures.
"""

from __future__ import annotations

import io
import json
import marshal
import os
import pickle
import signal
import struct
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.nodes import Global, Obj

PATIENCE = 400.0  # seconds until a child is taken for one that hangs; what counts is its processor time

_WIDE = b"\xef\xbd\x8f\xef\xbd\x93"
"""`os` in full-width letters, which Python source would fold to `os`."""


@dataclass(frozen=True)
class Case:
    """One hostile pickle.

    Args:
        name: For the report.
        data: The bytes.
        needs: A module that the positive control must be able to import.
        fires: Whether plain pickle runs it here; False for what needs a registry or a terminal.
    """

    name: str
    data: bytes
    needs: str = ""
    fires: bool = True


def call(target: str, *args, **kwargs) -> Obj:
    """`module:name` called with args; nothing is called."""
    module, _, name = target.partition(":")
    return Obj(Global(module, name), args, kwargs or None, "newobj_ex" if kwargs else "reduce")


def then(func, *args) -> Obj:
    """A call of the result of a call."""
    return Obj(func, args)


def ref(target: str) -> Global:
    module, _, name = target.partition(":")
    return Global(module, name)


def code_cases(marker: str) -> list[Case]:
    """Payloads that make `marker` when really unpickled."""
    shell = f"mkdir {marker}"
    argv = ["mkdir", marker]
    source = f"__import__('os').mkdir({marker!r})"
    compiled = marshal.dumps(compile(source, "x", "exec"))
    nested = dumps(call("os:mkdir", marker), 4)
    os_module = call("builtins:__import__", "os")
    trees: dict[str, object] = {
        "os.mkdir": call("os:mkdir", marker),
        "os.makedirs": call("os:makedirs", marker),
        "os.system": call("os:system", shell),
        "os.popen": call("os:popen", shell),
        "os.mkfifo": call("os:mkfifo", marker),
        "os.spawnlp": call("os:spawnlp", 0, "mkdir", "mkdir", marker),
        "os.posix_spawnp": call("os:posix_spawnp", "mkdir", argv, {}),
        "posix.mkdir": call("posix:mkdir", marker),
        "posix.system": call("posix:system", shell),
        "subprocess.call": call("subprocess:call", argv),
        "subprocess.check_call": call("subprocess:check_call", argv),
        "subprocess.check_output": call("subprocess:check_output", argv),
        "subprocess.run": call("subprocess:run", argv),
        "subprocess.Popen": call("subprocess:Popen", argv),
        "subprocess.getoutput": call("subprocess:getoutput", shell),
        "subprocess.getstatusoutput": call("subprocess:getstatusoutput", shell),
        "eval": call("builtins:eval", source),
        "exec": call("builtins:exec", source),
        "compile then exec": call("builtins:exec", call("builtins:compile", source, "x", "exec")),
        "import then getattr": then(call("builtins:getattr", os_module, "mkdir"), marker),
        "import_module then getattr": then(
            call("builtins:getattr", call("importlib:import_module", "os"), "mkdir"), marker
        ),
        "operator.attrgetter": then(then(call("operator:attrgetter", "mkdir"), os_module), marker),
        "operator.methodcaller": then(call("operator:methodcaller", "mkdir", marker), os_module),
        "_operator.methodcaller": then(call("_operator:methodcaller", "mkdir", marker), os_module),
        "pkgutil.resolve_name": then(call("pkgutil:resolve_name", "os:mkdir"), marker),
        "runpy._run_code": call("runpy:_run_code", source, {}),
        "code.InteractiveInterpreter.runcode": call(
            "code:InteractiveInterpreter.runcode", call("code:InteractiveInterpreter"), source
        ),
        "timeit.timeit": call("timeit:timeit", source, "pass", ref("time:perf_counter"), 1),
        "timeit.main": call("timeit:main", ["-n1", "-r1", source]),
        "cProfile.runctx": call("cProfile:runctx", source, {}, {}, os.devnull),
        "profile.runctx": call("profile:runctx", source, {}, {}, os.devnull),
        "bdb.Bdb.run": call("bdb:Bdb.run", call("bdb:Bdb"), source),
        "trace.Trace.run": call("trace:Trace.run", call("trace:Trace", 0, 0), source),
        "asyncio shell": call("asyncio:run", call("asyncio.subprocess:create_subprocess_shell", shell)),
        "multiprocessing.util": call(
            "multiprocessing.util:spawnv_passfds", b"/bin/mkdir", [b"mkdir", marker.encode()], []
        ),
        "types.FunctionType": then(call("types:FunctionType", call("marshal:loads", compiled), {})),
        "marshal.loads then exec": call("builtins:exec", call("marshal:loads", compiled)),
        "pickle.loads": call("pickle:loads", nested),
        "_pickle.loads": call("_pickle:loads", nested),
        "pickle.Unpickler.load": call("pickle:_Unpickler.load", call("pickle:_Unpickler", call("io:BytesIO", nested))),
        "pathlib os.mkdir": call("pathlib:os.mkdir", marker),
        "pathlib.Path.mkdir": call("pathlib:Path.mkdir", call("pathlib:PosixPath", marker)),
        "pathlib.Path.touch": call("pathlib:Path.touch", call("pathlib:PosixPath", marker)),
        "argparse _os.mkdir": call("argparse:_os.mkdir", marker),
        "logging os.mkdir": call("logging:os.mkdir", marker),
        "random _os.mkdir": call("random:_os.mkdir", marker),
        "uuid os.mkdir": call("uuid:os.mkdir", marker),
        "dataclasses builtins.eval": call("dataclasses:builtins.eval", source),
        "enum bltns.eval": call("enum:bltns.eval", source),
        "collections _sys.modules": then(
            call("builtins:getattr", call("collections:_sys.modules.get", "os"), "mkdir"), marker
        ),
        "sys.modules": then(call("builtins:getattr", call("sys:modules.get", "os"), "mkdir"), marker),
        "shutil os.mkdir": call("shutil:os.mkdir", marker),
        "shutil.copytree": call("shutil:copytree", str(Path(marker).parent / "empty"), marker),
        "open": call("builtins:open", marker, "w"),
        "io.open": call("io:open", marker, "w"),
        "_io.FileIO": call("_io:FileIO", marker, "w"),
        "codecs.open": call("codecs:open", marker, "w"),
        "tarfile.open": call("tarfile:open", marker, "w"),
        "gzip.open": call("gzip:open", marker, "w"),
        "zipfile.ZipFile": call("zipfile:ZipFile", marker, "w"),
        "dbm.dumb.open": call("dbm.dumb:open", marker[: -len(".dat")] if marker.endswith(".dat") else marker, "n"),
        "logging.FileHandler": call("logging:FileHandler", marker),
        "logging.config": call(
            "logging.config:dictConfig",
            {"version": 1, "handlers": {"h": {"()": "logging.FileHandler", "filename": marker}}},
        ),
        "argparse.FileType": then(call("argparse:FileType", "w"), marker),
        "functools.partial": then(call("functools:partial", ref("os:mkdir"), marker)),
        "map": call("builtins:list", call("builtins:map", ref("os:mkdir"), [marker])),
        "functools.reduce": call("functools:reduce", ref("os:mkdir"), [marker, 0o755]),
        "itertools.starmap": call("builtins:list", call("itertools:starmap", ref("os:mkdir"), [(marker,)])),
        "sqlite3.connect": call("sqlite3:connect", marker),
        "ctypes": then(call("builtins:getattr", call("ctypes:CDLL", None), "mkdir"), marker.encode(), 0o755),
        "uuid._get_command_stdout": call("uuid:_get_command_stdout", "mkdir", marker),
        "pydoc.pipepager": call("pydoc:pipepager", "text", shell),
        "pty.spawn": call("pty:spawn", argv),
        "py_compile.compile": call("py_compile:compile", __file__, marker),
        "distutils.dir_util.mkpath": call("distutils.dir_util:mkpath", marker),
        "distutils.spawn": call("distutils.spawn:spawn", argv),
        "webbrowser": call(
            "webbrowser:GenericBrowser.open", call("webbrowser:GenericBrowser", ["mkdir", "%s"]), marker
        ),
        "hidden in a key": {call("os:mkdir", marker): 1},
        "hidden in state": Obj(Global("argparse", "Namespace"), (), None, "newobj", {"a": [call("os:mkdir", marker)]}),
        "hidden in kwargs": Obj(Global("types", "SimpleNamespace"), (), {"a": call("os:mkdir", marker)}, "newobj_ex"),
        "hidden beside data": {"args": None, "iteration": 3, "model": [1.0, call("posix:mkdir", marker)]},
    }
    numpy_trees = {
        "numpy.save": call("numpy:save", marker, 1),
        "numpy.memmap": call("numpy:memmap", marker, "u1", "w+", 0, (1,)),
        "numpy.savetxt": call("numpy:savetxt", marker, [1]),
        "numpy.ndarray.tofile": call("numpy:ndarray.tofile", call("numpy:array", [1]), marker),
        "numpy.testing runstring": call("numpy.testing._private.utils:runstring", source, {}),
    }
    torch_trees = {
        "torch.save": call("torch:save", 1, marker),
        "torch.storage._load_from_bytes": call("torch.storage:_load_from_bytes", _torch_zip(nested)),
        "torch.serialization os.mkdir": call("torch.serialization:os.mkdir", marker),
        "torch.utils.collect_env.run": call("torch.utils.collect_env:run", shell),
        "torch.jit execWrapper": call("torch.jit.unsupported_tensor_ops:execWrapper", source, {}, {}),
        "torch.hub": call("torch.hub:os.mkdir", marker),
    }
    cases = [Case(name, dumps(tree, 4)) for name, tree in trees.items()]
    cases += [Case(name, dumps(tree, 4), "numpy") for name, tree in numpy_trees.items()]
    cases += [Case(name, dumps(tree, 4), "torch") for name, tree in torch_trees.items()]
    return cases + _opcode_cases(marker, nested) + _two_cases(marker, source)


def _two_cases(marker: str, source: str) -> list[Case]:
    """The same in the spellings of protocol 2, which is what torch's files use."""
    return [
        Case("protocol 2 os.mkdir", dumps(call("os:mkdir", marker), 2)),
        Case("protocol 2 posix.mkdir", dumps(call("posix:mkdir", marker), 2)),
        Case("protocol 2 __builtin__.eval", dumps(call("__builtin__:eval", source), 2)),
        Case("protocol 2 commands.getoutput", dumps(call("commands:getoutput", f"mkdir {marker}"), 2)),
        Case("protocol 3 builtins.exec", dumps(call("builtins:exec", source), 3)),
        Case("protocol 5 os.mkdir", dumps(call("os:mkdir", marker), 5)),
    ]


def _opcode_cases(marker: str, nested: bytes) -> list[Case]:
    text = marker.encode()
    quoted = b"X" + struct.pack("<I", len(text)) + text
    body = b"cos\nmkdir\n" + quoted + b"\x85R"
    return [
        Case("protocol 0", b"cos\nmkdir\n(V" + text + b"\ntR."),
        Case("no PROTO", body + b"."),
        Case("INST", b"(" + quoted + b"ios\nmkdir\n."),
        Case("INST after PROTO", b"\x80\x02(" + quoted + b"ios\nmkdir\n."),
        Case("OBJ", b"\x80\x02(cos\nmkdir\n" + quoted + b"o."),
        Case("dropped by POP", b"\x80\x02" + body + b"0]."),
        Case("dropped by POP_MARK", b"\x80\x02(" + body + b"1]."),
        Case("left on the stack", b"\x80\x02" + body + b"]."),
        Case("only in the memo", b"\x80\x02" + body + b"q\x000]."),
        Case("overwritten in a dict", b"\x80\x02}(K\x01" + body + b"K\x01Nu."),
        Case("second pickle", b"\x80\x02N." + nested, fires=False),
        Case("DUP", b"\x80\x02" + body + b"20."),
        Case("names from the memo",
             b"\x80\x04\x8c\x02os\x94\x8c\x05mkdir\x9400h\x00h\x01\x93" + quoted + b"\x85R."),
        Case("protocol byte lies", b"\x80\x02\x8c\x02os\x8c\x05mkdir\x93" + quoted + b"\x85R."),
        Case("NEWOBJ", b"\x80\x02c_io\nFileIO\n" + quoted + b"X\x01\x00\x00\x00w\x86\x81.", fires=False),
        Case("EXT1", b"\x80\x02\x82\x01" + quoted + b"\x85R.", fires=False),
        Case("EXT4", b"\x80\x02\x84\x01\x00\x00\x00" + quoted + b"\x85R.", fires=False),
        Case("name with a newline in it", b"\x80\x04\x8c\x03os\n\x8c\x05mkdir\x93" + quoted + b"\x85R.", fires=False),
        Case("full-width name", b"\x80\x04\x8c\x06" + _WIDE + b"\x8c\x05mkdir\x93" + quoted + b"\x85R.", fires=False),
    ]  # fmt: skip


def _torch_zip(inner: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", inner)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return buffer.getvalue()


def trick_cases() -> list[Case]:
    """Changing a class for the rest of the process, and other ways to have a say without a call."""
    ns = b"cargparse\nNamespace\n"
    key = b"X\x09\x00\x00\x00__class__"
    return [
        Case("state on a class", b"\x80\x02" + ns + b"}X\x01\x00\x00\x00aK\x01sb."),
        Case("state on a list", b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb."),
        Case("state twice", b"\x80\x02" + ns + b")\x81}K\x01K\x02sb}K\x01K\x02sb."),
        Case("entries on a class", b"\x80\x02" + ns + b"K\x01K\x02s."),
        Case("elements on a class", b"\x80\x02" + ns + b"K\x01a."),
        Case("elements after state", b"\x80\x02" + ns + b")\x81}bK\x01a."),
        Case("entries after state", b"\x80\x02" + ns + b")\x81}bK\x01K\x02s."),
        Case("__class__ in state", b"\x80\x02" + ns + b")\x81}" + key + ns + b"sb."),
        Case("__class__ in slots", b"\x80\x02" + ns + b")\x81N}" + key + ns + b"s\x86b."),
        Case("elements on a dict", b"\x80\x02}K\x01a."),
        Case("entries on a list", b"\x80\x02]K\x01K\x02s."),
        Case("memo written twice", b"\x80\x02Nq\x00Nq\x00."),
        Case("call of a string", b"\x80\x02X\x02\x00\x00\x00os)R."),
        Case("call of a result", b"\x80\x02" + ns + b")R)R."),
        Case("construction of a result", b"\x80\x02" + ns + b")R)\x81."),
    ]


def bomb_cases() -> list[Case]:
    """Small pickles that cost a naive reader minutes or gigabytes."""
    mersenne = (1 << 61) - 1
    long_key = b"".join(b"\x8a\x0b" + (n * mersenne).to_bytes(11, "little") + b"N" for n in range(200_000))
    big = 1 << 60
    # Each level holds the one before it twice (ten times): 2^60 (10^60) paths in a few hundred bytes.
    chain = b"K\x01\x85\x940" + b"".join(b"h%ch%c\x86\x940" % (n, n) for n in range(60)) + b"h\x3c"
    lists = b"]\x940" + b"".join(b"]\x94(" + b"h%c" % n * 10 + b"e0" for n in range(60)) + b"h\x3c"
    pad = 1 << 20
    return [
        Case("long text", b"\x80\x04X\xff\xff\xff\xffab."),
        Case("longer text", b"\x80\x04\x8d" + struct.pack("<Q", big) + b"ab."),
        Case("long bytes", b"\x80\x04\x8e" + struct.pack("<Q", big) + b"ab."),
        Case("long bytearray", b"\x80\x05\x96" + struct.pack("<Q", big) + b"ab."),
        Case("long integer", b"\x80\x04\x8b\xff\xff\xff\x7f."),
        Case("wide integer", b"\x80\x04\x8b" + struct.pack("<i", pad) + b"\x7f" * pad + b"."),
        Case("negative integer size", b"\x80\x04\x8b\xff\xff\xff\xff."),
        Case("long frame", b"\x80\x04\x95" + struct.pack("<Q", big) + b"N."),
        Case("high memo index", b"\x80\x02Nr\xff\xff\xff\x7f."),
        Case("deep marks", b"\x80\x04" + b"(" * 5_000_000),
        Case("deep tuple", b"\x80\x04)" + b"\x85" * 4_000_000 + b"."),
        Case("deep call", b"\x80\x02" + b"cx\ny\n" * 900_000 + b")" + b"R\x85" * 899_999 + b"R."),
        Case("deep list", b"\x80\x04" + b"]" * 2_000_000 + b"a" * 1_999_999 + b"."),
        Case("deep dict", b"\x80\x04" + b"}N" * 1_500_000 + b"N" + b"s" * 1_500_000 + b"."),
        Case("tuple graph", b"\x80\x04" + chain + b"."),
        Case("tuple graph as key", b"\x80\x04}" + chain + b"Ns."),
        Case("tuple graph in a set", b"\x80\x04\x8f(" + chain + b"\x90."),
        Case("list graph", b"\x80\x04" + lists + b"."),
        Case("many lists", b"\x80\x04(" + b"]" * 5_000_000 + b"t."),
        Case("many dicts", b"\x80\x04(" + b"}" * 5_000_000 + b"t."),
        Case("many sets", b"\x80\x04(" + b"\x8f" * 5_000_000 + b"t."),
        Case("many memo entries", b"\x80\x04N" + b"\x94" * 12_000_000 + b"."),
        Case("many globals", b"\x80\x02(" + b"cx\ny\n" * 2_000_000 + b"t."),
        Case("many opcodes", b"\x80\x04N" + b"0N" * 15_000_000 + b"."),
        Case("many floats", b"\x80\x04(" + b"G01234567" * 1_500_000 + b"t."),
        Case("number keys that collide", b"\x80\x04}(" + long_key + b"u."),
        Case("tuple keys", b"\x80\x04}(" + b"".join(
            b"J" + struct.pack("<i", n) + b"\x85N" for n in range(100_000)) + b"u."),
        Case("long tuple as key", b"\x80\x04(" + b"K\x01" * 100_000 + b"t\x94}(" + b"h\x00N" * 100_000 + b"u."),
        Case("nested frozensets", b"\x80\x04" + b"(" * 400 + b"K\x01" + b"\x91" * 400 + b"."),
        Case("list in itself", b"\x80\x04]\x94h\x00a."),
        Case("tuple in itself", pickle.dumps(_knot())),
        Case("bytearray of 10^11", dumps(call("builtins:bytearray", 10**11), 2)),
        Case("many one-character strings", b"\x80\x04(" + b"\x8c\x01a" * 2_000_000 + b"t."),
        Case("nothing but PROTO", b"\x80\x04" * 1000),
        Case("empty", b""),
        Case("no STOP", b"\x80\x04N"),
    ]  # fmt: skip


def _knot():
    inner: list = []
    knot = (inner, 1, 2, 3)
    inner.append(knot)
    return knot


# -- child processes -------------------------------------------------------------------------------------


def _forked(action, seconds: float) -> dict:
    """Run `action` in a fork; what it returns, its peak memory and time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        result = action()
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + seconds
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return {
        "status": status,
        "rss": usage.ru_maxrss,
        "cpu": usage.ru_utime + usage.ru_stime,
        "result": text and json.loads(text),
    }


def live(folder: str) -> dict[str, bool]:
    """The positive control: which payloads leave a marker when they are really unpickled."""
    root = Path(folder)
    (root / "empty").mkdir()
    for name in ("numpy", "torch", "torch.jit.unsupported_tensor_ops", "torch.utils.collect_env"):
        __import__(name)
    fired = {}
    for number, template in enumerate(code_cases(str(root / "x"))):
        marker = root / f"m{number}"
        case = code_cases(str(marker))[number]

        def run(data=case.data):
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            try:
                pickle.loads(data)
            except BaseException as error:
                return repr(error)[:200]
            return ""

        _forked(run, PATIENCE)
        # numpy.save and dbm add a suffix; a child that was started may need a moment.
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not template.fires or any(root.glob(f"m{number}*")):
                break
            time.sleep(0.01)
        fired[template.name] = any(path.name.split(".")[0] == marker.name for path in root.glob(f"m{number}*"))
    return fired


def inert(folder: str) -> dict[str, list[str]]:
    """Our reader, under an audit hook that refuses everything: error kind and text per payload."""
    marker = str(Path(folder) / "marker")
    cases = code_cases(marker) + trick_cases()
    before = set(sys.modules)
    forbidden = ("import", "exec", "compile", "open", "marshal.", "pickle.", "code.", "os.", "subprocess.", "socket.",
                 "ctypes.", "shutil.", "sqlite3.", "glob.", "tempfile.", "function.", "object.__", "builtins.")  # fmt: skip
    watching = True
    events = []

    def watch(event, args):
        if watching and event.startswith(forbidden):
            events.append(event)
            raise RuntimeError(f"the reader did {event} {args!r:.100}")

    sys.addaudithook(watch)
    results = {}
    for case in cases:
        try:
            found = parse(case.data, label="hostile")
            results[case.name] = ["accepted", type(found).__name__]
        except BaseException as error:
            results[case.name] = [type(error).__name__, error.args[0] if error.args else ""]
    watching = False
    results["new modules"] = sorted(set(sys.modules) - before)
    results["events"] = events
    results["files"] = sorted(path.name for path in Path(folder).iterdir())
    return results


def bombs(_: str) -> dict[str, dict]:
    """Time and memory of each bomb: read, and if it is read, described and written back."""
    results = {}
    for case in bomb_cases():

        def run(data=case.data):
            from converters.errors import DistckptError
            from converters.pickles.describe import describe

            try:
                tree = parse(data, label="bomb")
            except DistckptError as error:
                return error.message
            json.dumps(describe(tree))
            repr(tree) if isinstance(tree, Obj) else None
            if len(data) > 1 << 16:
                return "read"
            try:
                dumps(tree, 4)
            except DistckptError as error:
                return f"read, not written: {error.message}"
            return "read"

        base = _forked(lambda: "", PATIENCE)["rss"]
        outcome = _forked(run, PATIENCE)
        outcome["rss"] -= base
        outcome["size"] = len(case.data)
        results[case.name] = outcome
    return results


if __name__ == "__main__":
    json.dump({"live": live, "inert": inert, "bombs": bombs}[sys.argv[1]](sys.argv[2]), sys.stdout)
