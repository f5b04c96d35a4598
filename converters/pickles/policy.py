"""The policy for names in pickles: which of them may occur.

Nothing named in a file is ever imported here, so a name cannot hurt this reader. It hurts the next program
that opens the file, or the copy that we write, with `pickle.load`. Three classes:

- hostile: running code, starting processes, touching files or the network, or unpickling again. Refused.
- anything else from the standard library that has no business in a checkpoint. Refused too: gadget lists
  are never complete, while the standard-library names that trainers really pickle are few.
- the rest (`torch.`, `megatron.`, a user's own classes): inert nodes, shown and copied through.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Final

_STDLIB_OPEN: Final = frozenset({
    "__main__", "abc", "array", "bisect", "collections", "dataclasses", "datetime", "_datetime", "decimal",
    "_decimal", "_pydecimal", "enum", "fractions", "hashlib", "heapq", "ipaddress", "itertools", "_collections",
    "_collections_abc", "math", "numbers", "queue", "random", "_random", "re", "_sre", "sre_compile", "statistics",
    "string", "textwrap", "time", "typing", "uuid", "weakref", "zoneinfo",
})  # fmt: skip
"""Standard modules whose names are passive."""

_STDLIB_NAMES: Final = {
    "argparse": {"Namespace"},
    "builtins": {
        "NotImplemented", "Ellipsis", "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int",
        "list", "object", "range", "set", "slice", "str", "tuple", "type", "xrange", "unicode", "long", "basestring",
    },
    "_codecs": {"encode"},
    "codecs": {"encode"},
    "contextvars": {"Context", "ContextVar"},
    "copyreg": {"_reconstructor", "__newobj__", "__newobj_ex__"},
    "functools": {"partial", "partialmethod"},
    "_functools": {"partial"},
    "io": {"BytesIO", "StringIO"},
    "_io": {"BytesIO", "StringIO"},
    "logging": {"Logger", "getLogger", "RootLogger"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "signal": {"Handlers", "Sigmasks", "Signals"},
    "types": {"GenericAlias", "MappingProxyType", "NoneType", "SimpleNamespace", "UnionType"},
}  # fmt: skip
"""Standard modules of which only these names are passive."""

_OLD_NAMES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg", "__builtins__": "builtins"}

_PY2_STDLIB: Final = frozenset({
    "cPickle", "cStringIO", "StringIO", "commands", "dummy_thread", "exceptions", "httplib", "imputil", "new",
    "os2", "popen2", "thread", "urllib2", "urlparse", "UserDict", "xmlrpclib", "SocketServer", "SimpleHTTPServer",
    "BaseHTTPServer", "Queue", "Tkinter", "imp", "distutils", "asyncore", "asynchat", "smtpd", "nt", "ntpath",
    "java", "org", "_winapi", "winreg", "_winreg", "msvcrt", "telnetlib", "cgi", "pipes", "crypt", "nntplib", "test",
    "_testcapi", "_xxsubinterpreters", "_ctypes_test", "idlelib", "lib2to3", "turtledemo",
})  # fmt: skip
"""Standard modules of other versions and systems than the one we run on, so that the answer never depends on it."""

_PACKAGES: Final = frozenset({
    "IPython", "aiohttp", "bdb", "boto3", "botocore", "cffi", "cloudpickle", "dill", "docker", "execnet", "fabric",
    "fickling", "flask", "gevent", "git", "httpx", "invoke", "ipykernel", "jinja2", "joblib", "jsonpickle", "keras",
    "mlflow", "nose", "numba", "pandas.io", "paramiko", "pexpect", "pip", "pkg_resources", "plumbum", "psutil", "ptyprocess",
    "py", "pyarrow.fs", "pytest", "requests", "scapy", "setuptools", "sh", "subprocess32", "tornado", "twisted",
    "urllib3", "virtualenv", "wheel", "zmq",
})  # fmt: skip

_PREFIXES: Final = (
    "numpy.ctypeslib", "numpy.distutils", "numpy.f2py", "numpy.testing", "numpy.lib.npyio", "numpy.lib._npyio_impl",
    "scipy.io", "torch._C._jit", "torch._dynamo", "torch._inductor", "torch._lazy", "torch._export", "torch.classes",
    "torch.distributed.elastic", "torch.distributed.launch", "torch.distributed.launcher", "torch.distributed.rpc",
    "torch.distributed.run", "torch.export", "torch.fx", "torch.hub", "torch.jit", "torch.multiprocessing", "torch.ops",
    "torch.onnx", "torch.package", "torch.serialization.load", "torch.testing", "torch.utils._config_module",
    "torch.utils.benchmark", "torch.utils.bottleneck", "torch.utils.collect_env", "torch.utils.cpp_extension",
    "torch.utils.data.datapipes", "torch.utils.file_baton", "torch.utils.hipify", "torch.utils.model_zoo",
    "torch.utils.serialization", "torch.utils.tensorboard", "torch.utils.viz", "torchvision.datasets",
    "torchgen", "transformers.utils.hub", "transformers.dynamic_module_utils", "transformers.testing_utils",
    "huggingface_hub", "megatron.core.datasets.utils", "triton",
)  # fmt: skip
"""Parts of otherwise passive packages that compile, download, start processes or load."""

_CALLS: Final = frozenset({
    "__import__", "__getattribute__", "__globals__", "__builtins__", "__subclasses__", "__reduce__", "__reduce_ex__",
    "__init__", "__class__", "__dict__", "__code__", "__setstate__", "__call__", "__loader__", "_load_from_bytes",
    "call", "check_call", "check_output", "compile", "delattr", "eval", "exec", "exec_module", "execfile", "execv",
    "execve", "execl", "execlp", "execvp", "fdopen", "fork", "forkpty", "from_pretrained", "fromfile", "getattr",
    "getoutput", "getstatusoutput", "globals", "hub_load", "import_module", "import_string", "input", "interact",
    "load_dynamic", "load_library", "load_module", "load_source", "loads", "load_state_dict_from_url", "load_url",
    "locals", "make_function", "memmap", "open", "popen", "Popen", "posix_spawn", "resolve_name", "rmtree",
    "run_code", "run_module", "run_path", "runcode", "runctx", "runsource", "runstring", "setattr", "spawn", "spawnl",
    "spawnv", "startfile", "system", "tofile", "unlink", "unsafe_load", "urlopen", "urlretrieve", "vars",
})  # fmt: skip
"""Last parts of a name that mean the same wherever they are re-exported from."""

_FUNCTIONS: Final = frozenset({
    "torch.load", "torch.save", "torch.compile", "torch.from_file", "torch.import_ir_module", "torch.storage.load",
    "torch._utils._import_dotted_name", "torch.serialization._load", "torch.serialization._legacy_load",
    "torch.UntypedStorage.from_file", "torch.storage._StorageBase.from_file", "torch.nn.Module.load_state_dict",
    "numpy.load", "numpy.save", "numpy.loadtxt", "numpy.genfromtxt", "numpy.savetxt", "numpy.DataSource",
    "pandas.read_pickle", "pandas.eval", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "six.exec_",
})  # fmt: skip

_REEXPORTED: Final = frozenset({
    "_io_open", "builtins", "commands", "ctypes", "importlib", "marshal", "multiprocessing", "nt", "os", "pickle", "posix",
    "pty", "runpy", "shutil", "socket", "subprocess", "sys",
})  # fmt: skip
"""Modules reached through another one: `pathlib` imports `os`, so `pathlib` + `os.mkdir` is `os.mkdir`."""


@lru_cache(maxsize=4096)
def hostile(module: str, name: str) -> bool:
    """Whether a global is one that no checkpoint has a reason to mention: a file that names it must be refused.

    Args:
        module: As the pickle has it.
        name: May be dotted.
    """
    parts = module.split(".")
    parts[0] = _OLD_NAMES.get(parts[0], parts[0])
    module = ".".join(parts)
    names = name.split(".")
    if any(part in _REEXPORTED or part.lstrip("_") in _REEXPORTED for part in (*parts[1:], *names[:-1])):
        return True
    if any(part in _CALLS for part in names):
        return True
    top = parts[0]
    if top in sys.stdlib_module_names or top in _PY2_STDLIB or top in _STDLIB_NAMES:
        return not _passive_stdlib(module, top, names)
    path = f"{module}.{name}"
    return (
        top in _PACKAGES
        or path in _FUNCTIONS
        or any(path == prefix or path.startswith(f"{prefix}.") for prefix in _PREFIXES)
    )


def _passive_stdlib(module: str, top: str, names: list[str]) -> bool:
    # A lower-case step on the way is an attribute or a module behind the module, not a nested class.
    if any(not part[0].isupper() for part in names[:-1]):
        return False
    if module == "builtins" and names[0].endswith(("Error", "Exception", "Warning")):
        return len(names) == 1
    if module == "signal" and names[0].startswith("SIG"):
        return len(names) == 1
    if module in _STDLIB_NAMES:
        return len(names) == 1 and names[0] in _STDLIB_NAMES[module]
    # Private names of open modules are helpers (`uuid._get_command_stdout`), except what pickles rely on.
    private = names[-1].startswith("_") and not (top == "re" and names == ["_compile"])
    return top in _STDLIB_OPEN and (not private or top in {"__main__", "_sre", "collections"})


_TAIL_MODULES: Final = (
    "os", "posix", "nt", "sys", "subprocess", "builtins", "__builtin__", "importlib", "runpy", "pkgutil", "operator",
    "_operator", "socket", "shutil", "ctypes", "pickle", "_pickle", "marshal", "code", "pdb", "timeit", "cProfile",
    "profile", "asyncio", "multiprocessing", "pty", "bdb", "torch.hub", "webbrowser",
)  # fmt: skip


def _tail_pattern() -> re.Pattern[bytes]:
    forms = []
    for module in sorted(_TAIL_MODULES, key=len, reverse=True):
        raw = re.escape(module.encode())
        size = len(module)
        head = b"\\x8c" + re.escape(bytes([size])), b"X" + re.escape(size.to_bytes(4, "little"))
        # A module name is followed by MEMOIZE, another string, or a GET; then STACK_GLOBAL.
        forms += [part + raw + rb"(?=[\x94\x8cXhj])" for part in head]
        forms.append(b"c" + raw + rb"\n(?=[A-Za-z_.]{1,64}\n)")
    return re.compile(b"|".join(forms))


_TAIL: Final = _tail_pattern()


def hostile_tail(data: bytes, start: int) -> int | None:
    """Look for hostile module names in the part of a pickle that is not interpreted.

    A scan of bytes, not of opcodes: it finds the plain spellings, at hundreds of MB/s. What it misses stays
    uninterpreted, so nothing can come of it here.

    Args:
        data: The pickle.
        start: Where the skipped part begins.

    Returns:
        The offset of the first one, or None.
    """
    match = _TAIL.search(data, start)
    return match.start() if match else None
