"""Models of commands: from Python code by name, from a Hugging Face folder, with weights from files."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.formatting import pick_text
from featlearn.errors import InputError

_PROGRAMS = (".pt2", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx")


def load_model(source: str) -> nn.Module:
    """Load a model, in evaluation mode.

    Args:
        source: ``path/to/file.py:factory`` or ``package.module:factory``, where factory is a function without
            arguments, a class or a module; or the folder of a saved Hugging Face model.

    Raises:
        InputError: If the source cannot be loaded, or is not a torch.nn.Module.
    """
    if os.path.isdir(source):
        return _hugging_face(Path(source))
    place, _, name = source.rpartition(":")
    if place.endswith(".py") or (place and re.fullmatch(r"\w+(\.\w+)*", place)):
        return _made(source, _imported(source, place), name).eval()
    if source.lower().endswith(_PROGRAMS):
        raise InputError(
            f"{source!r} contains weights, or a program without modules. Pass the code of the model as "
            "model.py:factory, and the weights with --checkpoint (featlearn spectra reads weights without a model)."
        )
    raise InputError(
        f"SOURCE must be path/to/file.py:factory, package.module:factory or a Hugging Face folder, got {source!r}."
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model comes from transformers."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def check_file(path: Path) -> None:
    """Raise InputError unless a path is a file."""
    if not path.is_file():
        raise InputError(f"The file {str(path)!r} does not exist.")


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or a torch checkpoint, without executing code."""
    check_file(path)
    state: Mapping[str, Any]
    if path.suffix.lower() == ".safetensors":
        import safetensors
        import safetensors.torch

        try:
            state = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise InputError(f"{path.name} cannot be read as a safetensors file: {error}.") from error
    else:
        from featlearn.spectra.tensor_readers import CheckpointReader

        state = CheckpointReader().state(path)
    tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    prefix = "module." if all(name.startswith("module.") for name in tensors) else ""
    return {name.removeprefix(prefix).replace("_orig_mod.", ""): value for name, value in tensors.items()}


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """Return a copy of the model with the weights of a file."""
    state = load_weights(path)
    filled = copy.deepcopy(model)
    mismatch = f"The weights of {path.name} do not match the model"
    try:
        keys = filled.load_state_dict(state, strict=False)
    except RuntimeError as error:
        wrong = re.findall(r"size mismatch for (\S+): (.*?)\.?(?:\n|$)", str(error))
        raise InputError(f"{mismatch}: {': '.join(wrong[0]) if wrong else error}") from error
    # A file contains tied tensors once, under one of their names.
    tensors = filled.state_dict()
    loaded = {tensors[name].data_ptr() for name in state if name in tensors}
    missing = [name for name in keys.missing_keys if tensors[name].data_ptr() not in loaded]
    for names, where in ((missing, "the file lacks"), (keys.unexpected_keys, "the model lacks")):
        if names:
            raise InputError(f"{mismatch}: {where} {pick_text(names, 3)}.")
    return filled


def _hugging_face(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise InputError(f"{str(folder)!r} must be the folder of a Hugging Face model, but has no config.json.")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "A Hugging Face model requires transformers, which is not installed. Run pip install 'featlearn[hf]'."
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{str(folder)!r} cannot be read as a Hugging Face model with safetensors: {str(error).splitlines()[0]}"
        ) from error
    return model


def _imported(source: str, place: str) -> Any:
    """Return the user's module, imported like a script, so that it can import files beside it."""
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        check_file(file := Path(place))
        sys.path.insert(0, str(file.resolve().parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)  # dataclasses and others look their module up
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a script may exit when it is imported
        raise _raised(source, error) from error


def _made(source: str, module: Any, name: str) -> nn.Module:
    if not hasattr(module, name):
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(f"{source!r}: there is no {name!r}; the file has {pick_text(callables, 8) or 'no functions'}.")
    model = getattr(module, name)
    if not isinstance(model, nn.Module):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # a factory that draws weights returns the same ones each time
                model = model()
        except (Exception, SystemExit) as error:
            raise _raised(source, error) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{source!r} must return a torch.nn.Module, got {type(model).__name__}.")
    return model


def _raised(source: str, error: BaseException) -> InputError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"line {last.lineno} of {Path(last.filename).name}"
    return InputError(f"{source!r} raised {type(error).__name__}: {error} ({where})")
