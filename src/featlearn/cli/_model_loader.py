"""Models as commands take them: the user's own code by name, a folder of Hugging Face, and weights from files."""

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
    """The model that a source names, in evaluation mode.

    Args:
        source: ``path/to/file.py:factory`` or ``package.module:factory``, where factory is a function without
            arguments, a class or a module; or a folder that a Hugging Face model was saved to.
    """
    if os.path.isdir(source):
        return _hugging_face(Path(source))
    place, _, name = source.rpartition(":")
    if place.endswith(".py") or (place and re.fullmatch(r"\w+(\.\w+)*", place)):
        return _made(source, _imported(source, place), name).eval()
    if source.lower().endswith(_PROGRAMS):
        raise InputError(
            f"{source!r} holds weights, or a program whose layers are no modules: name the code that makes the model, "
            "as model.py:factory, and pass the weights with --checkpoint (featlearn spectra reads weights alone)"
        )
    raise InputError(
        f"a model is named as path/to/file.py:factory, as package.module:factory, or as a folder of Hugging Face, "
        f"got {source!r}"
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model comes from transformers."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a torch checkpoint; nothing in it is executed."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    state: Mapping[str, Any]
    if path.suffix.lower() == ".safetensors":
        import safetensors
        import safetensors.torch

        try:
            state = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise InputError(f"{path.name} is no readable safetensors file: {error}") from error
    else:
        from featlearn.spectra.tensor_readers import CheckpointReader

        state = CheckpointReader().state(path)
    tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    wrapped = all(name.startswith("module.") for name in tensors)
    return {
        (name.removeprefix("module.") if wrapped else name).replace("_orig_mod.", ""): v for name, v in tensors.items()
    }


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """A copy of the model with the weights of a file."""
    state = load_weights(path)
    filled = copy.deepcopy(model)
    try:
        found = filled.load_state_dict(state, strict=False)
    except RuntimeError as error:
        wrong = re.findall(r"size mismatch for (\S+): (.*?)\.?(?:\n|$)", str(error))
        told = f"{wrong[0][0]}: {wrong[0][1]}" if wrong else str(error)
        raise InputError(f"the weights of {path.name} do not fit the model: {told}") from error
    # Of tensors that are tied a file holds one, under one of their names.
    own = filled.state_dict()
    loaded = {own[name].data_ptr() for name in state if name in own}
    missing = [name for name in found.missing_keys if own[name].data_ptr() not in loaded]
    for names, where in ((missing, "the file lacks"), (found.unexpected_keys, "the model lacks")):
        if names:
            raise InputError(f"the weights of {path.name} do not fit the model: {where} {pick_text(names, 3)}")
    return filled


def _hugging_face(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise InputError(f"{str(folder)!r} is no folder of a Hugging Face model: there is no config.json in it")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "a Hugging Face model needs transformers, which is not installed: call pip install 'featlearn[hf]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        named = (config.architectures or ["AutoModel"])[0]
        kind = getattr(transformers, named, transformers.AutoModel)
        model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{str(folder)!r} cannot be read as a Hugging Face model with safetensors: {str(error).splitlines()[0]}"
        ) from error
    found: nn.Module = model.eval()
    return found


def _imported(source: str, place: str) -> Any:
    """The user's module, imported as a script would import it: files beside it can be imported too."""
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        file = Path(place)
        if not file.is_file():
            raise InputError(f"there is no file {place!r}")
        sys.path.insert(0, str(file.resolve().parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)  # dataclasses and others look their module up
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends the program when it is imported
        raise _raised(source, error) from error


def _made(source: str, module: Any, name: str) -> nn.Module:
    if not hasattr(module, name):
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(f"{source!r}: there is no {name!r}; there are {pick_text(callables, 8) or 'no functions'}")
    found = getattr(module, name)
    if not isinstance(found, nn.Module):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # a factory that draws weights gives the same ones each time
                found = found()
        except (Exception, SystemExit) as error:
            raise _raised(source, error) from error
    if not isinstance(found, nn.Module):
        raise InputError(f"{source!r} must give a torch.nn.Module, and gives a {type(found).__name__}")
    return found


def _raised(source: str, error: BaseException) -> InputError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"line {last.lineno} of {Path(last.filename).name}"
    return InputError(f"{source!r} raised {type(error).__name__}: {error} ({where})")
