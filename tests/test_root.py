"""The package itself: names that are imported when they are used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import featlearn as fl

_LAZY = ("featlearn", "featlearn.datasets", "featlearn.kernels", "featlearn.training")


@pytest.mark.parametrize("package", _LAZY)
def test_every_public_name_is_there_and_those_for_type_checkers_are_the_same(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    reported = {alias.name: node.module for node in block.body for alias in node.names}
    for name, home in reported.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert home == (package if module._HOMES[name] is None else f"{package}.{module._HOMES[name]}")
    imported = {n.name for node in tree.body if isinstance(node, ast.ImportFrom) for n in node.names}  # errors
    assert set(reported) == set(module.__all__) - imported
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_every_package_with_a_table_is_compared() -> None:
    files = Path(fl.__file__).parent.rglob("__init__.py")
    lazy = {
        str(file.parent.relative_to(Path(fl.__file__).parents[1])) for file in files if "_HOMES" in file.read_text()
    }
    assert {name.replace("/", ".") for name in lazy} == set(_LAZY)


def _loaded_by(code: str) -> list[str]:
    """Run code in a process of its own and return the modules that it has loaded."""
    code += "\nimport sys; print(*sorted(sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_a_function_of_matrices_loads_little() -> None:
    loaded = _loaded_by("import featlearn as fl\nfl.cosine")
    assert sum(name.partition(".")[0] == "featlearn" for name in loaded) <= 12
    assert "sklearn" not in loaded


def test_a_fit_loads_neither_papers_nor_the_monitor(tmp_path: Path) -> None:
    rows = [f"{i % 7},{i % 5},{(i % 7) * (i % 5)}" for i in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,y", *rows]))
    reported = ["fit", str(tmp_path / "table.csv"), "--target", "y", "--out", str(tmp_path / "out"), "--json"]
    loaded = _loaded_by(f"from featlearn.cli import app\napp({reported}, standalone_mode=False)")
    ours = [name for name in loaded if name.partition(".")[0] == "featlearn"]
    assert len(ours) <= 80
    unneeded = ("papers", "kernels", "spectra", "capture", "layers", "training._monitor")
    assert not [name for name in ours if name.startswith(tuple(f"featlearn.{part}" for part in unneeded))]


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, featlearn.cli; sys.exit(sum(name in sys.modules for name in ('torch', 'pandas', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
