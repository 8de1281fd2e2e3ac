"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import matplotlib.pyplot as plt
import pytest

import featlearn

# Modules that start something when they are imported, or need a package that only some users have.
_LEFT_OUT = ("featlearn.__main__",)


def modules() -> list[str]:
    names = [m.name for m in pkgutil.walk_packages(featlearn.__path__, "featlearn.")]
    return [name for name in names if not name.startswith((*_LEFT_OUT, "featlearn.cli"))]


@pytest.mark.parametrize("name", modules())
def test_examples_of_a_module_run(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    with plt.rc_context():
        failed, _ = doctest.testmod(module)
    plt.close("all")
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    count = sum(bool(test.examples) for name in modules() for test in finder.find(importlib.import_module(name)))
    assert count > 150
