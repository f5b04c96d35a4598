"""Imports only point down: parsed from the source, so that lazy and type-only imports count too."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from harness.layers import LEVELS, ROOT

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY_NEVER = {"distckpt_cli", "typer", "click", "rich"}  # the library is used without a shell
# seconds to import, and not needed by most commands
LAZY = {"torch", "transformers", "tensorstore", "safetensors", "obstore", "huggingface_hub"}


def imports(tree: ast.Module, package: str) -> list[tuple[str, int, bool]]:
    """(module, line, whether it runs when the file is imported) of every import."""
    lazy: set[int] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            lazy |= {id(inner) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            # `from converters import plan` imports the module converters.planning.plan
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "converters" else [base]
        found += [(name, node.lineno, id(node) not in lazy) for name in names]
    return found


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module of `converters`, one sentence each."""
    package = module if is_package else module.rpartition(".")[0]
    parts = module.split(".")
    own = parts[1] if len(parts) > 1 else ""
    out = []
    for name, line, eager in imports(ast.parse(source), package):
        top, *rest = name.split(".")
        where = f"{module}:{line}"
        if top in LIBRARY_NEVER:
            out.append(f"{where}: the library imports {name}")
        if top in LAZY and eager:
            out.append(f"{where}: {name} is imported with the module; import it in the function that needs it")
        if top != "converters" or not rest or not own or rest[0] == "__version__":
            continue
        other = rest[0]
        if {own, other} == {"formats", "models"}:
            out.append(f"{where}: formats and models meet only in the catalog and the plan")
        elif LEVELS.get(other, 99) > LEVELS.get(own, 99):
            out.append(f"{where}: {own} (level {LEVELS[own]}) imports {other} above it")
    return out


def library() -> list[tuple[str, Path]]:
    out = []
    for path in sorted((ROOT / "converters").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        out.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return out


def test_every_module_has_a_level():
    known = {module.split(".")[1] for module, _ in library() if "." in module}
    assert known <= set(LEVELS), "give the new module a place in LEVELS, as low as it can be"


def test_every_module_is_on_the_floor_plan():
    plan = (ROOT / "converters" / "README.md").read_text()
    absent = [name for name in LEVELS if f"| `{name}` | " not in plan]
    assert not absent, "name them in both tables of converters/README.md; test_floor_plan.py compares all of it"


@pytest.mark.parametrize(("module", "path"), library(), ids=[name for name, _ in library()])
def test_imports_point_down(module, path):
    assert violations(path.read_text(), module, is_package=path.name == "__init__.py") == []


def test_the_shell_keeps_heavy_imports_lazy():
    found = []
    for path in sorted((ROOT / "distckpt_cli").rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        for name, line, eager in imports(ast.parse(path.read_text()), package):
            if eager and name.split(".")[0] in LAZY | {"rich"}:
                found.append(f"{path.name}:{line} imports {name}")
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("converters.planning.plan", "import distckpt_cli.console", "the library imports"),
        ("converters.planning.plan", "def f():\n    from rich.text import Text", "the library imports"),
        ("converters.box", "from converters.planning.plan import Copy", "imports planning above it"),
        ("converters.box", "from converters import planning", "imports planning above it"),
        ("converters.box", "from . import planning", "imports planning above it"),
        ("converters.names", "def f():\n    import converters.execute.run", "imports execute above it"),
        (
            "converters.names",
            "if TYPE_CHECKING:\n    from converters.formats import Reader",
            "imports formats above it",
        ),
        ("converters.formats.zarr", "from converters.models import llama", "meet only in"),
        ("converters.models.llama", "from converters.formats.folder import read_small", "meet only in"),
        ("converters.models.llama", "from ..formats import folder", "meet only in"),
        ("converters.execute.run", "import torch", "imported with the module"),
        (
            "converters.execute.run",
            "try:\n    import torch.cuda\nexcept ImportError:\n    pass",
            "imported with the module",
        ),
        ("converters.execute.run", "class A:\n    import transformers", "imported with the module"),
    ],
)
def test_violations_are_found(module, source, complaint):
    assert any(complaint in text for text in violations(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("converters.execute.run", "def f():\n    import torch"),
        ("converters.execute.run", "if TYPE_CHECKING:\n    import torch"),
        ("converters.execute.run", "from converters.formats.base import Reader\nfrom converters import __version__"),
        ("converters.models.llama", "from converters.models.rules import Rule"),
        ("converters.planning.plan", "import numpy as np\nimport typing"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert violations(source, module) == []


def test_tests_share_nothing_but_the_harness():
    """What a test imports from another one runs with it, and is lost with it.

    Not so the classes of conformance, which test_remote.py runs on a store as they are.
    """
    module = re.compile(r"^ *(?:from|import) (?:\w+\.)*test_\w+|^ *from \w+ import \(?\s*test_\w+", re.MULTILINE)
    files = (path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_remote.py")
    assert [(path.name, line[0]) for path in files for line in module.finditer(path.read_text())] == []
