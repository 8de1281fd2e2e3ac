"""The package itself: names that are imported when they are used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import featlearn as fl


def test_every_public_name_is_there_and_those_for_type_checkers_are_the_same() -> None:
    for name in [*fl.__all__, *fl._PACKAGES]:
        assert getattr(fl, name) is not None
        assert name in dir(fl)
    tree = ast.parse(Path(fl.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    for name, module in told.items():
        assert getattr(fl, name) is getattr(importlib.import_module(module), name)
    errors = {"FeatlearnError", "InputError", "RunStoreError", "UnsupportedModelError"}
    assert set(told) == set(fl.__all__) - errors
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fl.nothing  # noqa: B018


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, featlearn.cli; sys.exit(sum(name in sys.modules for name in ('torch', 'pandas', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
