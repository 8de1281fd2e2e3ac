"""Hash the source that a measurement depends on, so that numbers of another version are recognized."""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_ROOT = __name__.partition(".")[0]
_FOLDER = Path(__file__).resolve().parents[1]
# Packages that draw or show results and change no number. Experiments are covered by `Experiment.key`,
# which follows the functions that measure, and not those that conclude.
_NOT_HASHED = tuple(f"{_ROOT}.{part}" for part in ("plots", "reports", "dashboard", "cli", "papers"))

Wanted = tuple[str, str | None]
"""Module, and the name that is imported from it; None for the module itself."""


def source_fingerprint(measure: Callable[..., Any]) -> str:
    """Return a hash of the library's source that a function depends on.

    The hash covers the code of all modules of featlearn that the function's module imports, directly or through others,
    also inside functions, without docstrings and comments. A name that a package re-exports counts as the module that
    defines it; where a whole package is imported, all its modules count. Modules that only draw or show results are
    left out. The first call takes half a second, all others together less.

    Args:
        measure: Function of a module, such as `Experiment.measure`.

    Returns:
        Hash of 20 hexadecimal digits.
    """
    return _fingerprint(measure.__module__)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}


def code_without_words(tree: ast.Module) -> str:
    """Return code without comments and docstrings, which do not change a measurement."""
    return ast.unparse(_without_texts(tree))


def _without_texts(tree: ast.Module) -> ast.Module:
    """Remove texts that stand alone, in place: docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and any(map(_is_text, body)):
            node.body = [line for line in body if not _is_text(line)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


@cache
def _fingerprint(module: str) -> str:
    known = _modules()
    if module in known:
        start = {module}
    else:  # an experiment outside of the library: the modules that it imports
        file = inspect.getsourcefile(sys.modules[module]) if module in sys.modules else None
        tree = ast.parse(Path(file).read_text(encoding="utf-8")) if file and Path(file).is_file() else None
        start = set(known) if tree is None else {m for wanted in _imports(tree, module) for m in _resolve(*wanted)}
    reached: set[str] = set()
    waiting = sorted(start)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += _needs(name)
    total = hashlib.sha256()
    for name in sorted(reached):
        if not name.startswith(_NOT_HASHED):
            total.update(f"{name}\0{_code(name)}\0".encode())
    return total.hexdigest()[:20]


@cache
def _modules() -> dict[str, Path]:
    """Return the files of all modules of the package by their names."""
    files = {}
    for file in sorted(_FOLDER.rglob("*.py")):
        parts = (_ROOT, *file.relative_to(_FOLDER).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


@cache
def _tree(module: str) -> ast.Module:
    return _without_texts(ast.parse(_modules()[module].read_text(encoding="utf-8")))


@cache
def _code(module: str) -> str:
    return ast.unparse(_tree(module))


@cache
def _needs(module: str) -> frozenset[str]:
    """Return the modules that one module imports."""
    package = module if _modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(m for wanted in _imports(_tree(module), package) for m in _resolve(*wanted))


def _imports(tree: ast.Module, package: str) -> Iterator[Wanted]:
    """Yield the imports of code from featlearn, also inside functions, except under ``if TYPE_CHECKING``.

    Args:
        tree: Code of a module.
        package: Package of the module, which relative imports start from.
    """
    nodes = list(ast.walk(tree))
    typing = {
        line
        for node in nodes
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        for child in node.body
        for line in ast.walk(child)
    }
    for node in nodes:
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            if _ours(module):
                yield from ((module, None if alias.name == "*" else alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _last_name(node.func) in ("import_module", "__import__"):
            named = node.args[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                if _ours(named.value):
                    yield named.value, None
            elif _ROOT in ast.unparse(named):  # a name made at run time: anything
                yield _ROOT, None


def _last_name(node: ast.AST) -> str:
    """Return ``c`` of ``a.b.c``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _ours(module: str) -> bool:
    return module == _ROOT or module.startswith(f"{_ROOT}.")


@cache
def _resolve(module: str, name: str | None) -> frozenset[str]:
    """Return the modules of an import: the module that defines the name if it is known, a whole package otherwise."""
    known = _modules()
    if name is None:
        inside = {m for m in known if m == module or m.startswith(f"{module}.")}
        return frozenset(inside or known)
    if f"{module}.{name}" in known:
        return _resolve(f"{module}.{name}", None)
    if module not in known:
        return frozenset(known)
    if known[module].name != "__init__.py":
        return frozenset({module})
    tree = _tree(module)
    for node in ast.walk(tree):  # those under TYPE_CHECKING are the root's, which imports its names when they are used
        if isinstance(node, ast.ImportFrom) and _ours(_absolute(node, module)):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (_absolute(node, module), alias.name) != (module, name):
                    return _resolve(_absolute(node, module), alias.name)
    if name in _defined(tree):
        return frozenset({module})
    return _resolve(module, None)


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
