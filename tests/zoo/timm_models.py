"""Import of timm without torchvision, which its models do not need."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

AVAILABLE = find_spec("timm") is not None

_MODULES = (
    "torchvision", "torchvision.datasets", "torchvision.models", "torchvision.models.feature_extraction",
    "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms", "torchvision.transforms.functional",
    "torchvision.utils",
)  # fmt: skip
_SIZES = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class _Stub(ModuleType):
    """Module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {size: size.lower() for size in _SIZES})


def import_timm() -> Any:
    """Import timm, with empty modules in place of those of torchvision if it is missing."""
    if "timm" in sys.modules or find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    for name in _MODULES:
        module = sys.modules[name] = _Stub(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        return importlib.import_module("timm")
    finally:
        for name in _MODULES:  # other packages must not take them for torchvision
            del sys.modules[name]
