"""Parameters by layer, and their selection by glob patterns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from featlearn._utils.formatting import pick_text
from featlearn.errors import InputError
from featlearn.layers import Layer, find_layers, unwrap


@dataclass(frozen=True, eq=False)
class LayerParameter:
    """Parameter of a model with its names.

    Attributes:
        parameter: Parameter of the model.
        name: First path of the parameter in the model, such as ``"net.0.weight"``.
        layers: Names of the layers that it belongs to: several for a tied weight, or for query, key and value packed
            into one tensor; none for norms and embeddings.
        aliases: All names that a pattern can match: its layers, the modules that own it and all its paths.
    """

    parameter: nn.Parameter
    name: str
    layers: tuple[str, ...]
    aliases: tuple[str, ...]


def parameters_of_layers(model: nn.Module) -> list[LayerParameter]:
    """Return every trainable parameter of a model once, in the order of the model.

    A parameter belongs to the layer of its module: a bias belongs to the layer of its weight, and so do the factors of
        a
    parametrized weight.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    model = unwrap(model)
    owners: dict[str, list[Layer]] = {}
    paths = {id(module): path for path, module in model.named_modules()}
    for layer in find_layers(model):
        part = layer.parameter.rpartition(".")[0]
        owners.setdefault(paths[id(layer.module.get_submodule(part))], []).append(layer)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():  # integers of quantized models have no gradient
            names.setdefault(parameter, []).append(name)
    return [_describe(parameter, paths_of, owners) for parameter, paths_of in names.items()]


def _describe(parameter: nn.Parameter, names: Sequence[str], owners: Mapping[str, Sequence[Layer]]) -> LayerParameter:
    layers: list[str] = []
    modules: list[str] = []
    for name in names:
        # Factors of a parametrized weight lie below its module, as "net.0.parametrizations.weight.original0".
        path, factors, local = f".{name}".partition(".parametrizations.")
        if factors:
            path, local = path[1:], local.partition(".")[0]
        else:
            path, _, local = name.rpartition(".")
        modules.append(path)
        here = owners.get(path, ())
        # In a module with several layers, a weight belongs to its layer, and other parameters (biases) to all.
        exact = [layer for layer in here if layer.parameter.rpartition(".")[2] == local]
        layers += [layer.name for layer in exact or here]
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in [*modules, *names]]
    aliases = tuple(dict.fromkeys(alias for alias in [*layers, *plain] if alias))
    return LayerParameter(parameter, plain[len(modules)], tuple(dict.fromkeys(layers)), aliases)


def choose(globs: Sequence[str], parameters: Sequence[LayerParameter], argument: str) -> dict[str, list[nn.Parameter]]:
    """Assign each parameter to the first glob pattern that matches any of its names.

    Args:
        globs: Patterns in the order of their priority.
        parameters: Parameters to assign.
        argument: Name of the argument, for messages.

    Returns:
        The parameters of each pattern.

    Raises:
        InputError: If a pattern matches nothing, or only parameters of earlier patterns, or a parameter is left over.
    """
    names = list(dict.fromkeys(alias for parameter in parameters for alias in parameter.aliases))
    chosen: dict[str, list[nn.Parameter]] = {glob: [] for glob in globs}
    left_over = []
    for parameter in parameters:
        matching = (g for g in globs if any(fnmatchcase(alias, g) for alias in parameter.aliases))
        first = next(matching, None)
        if first is None:
            left_over.append(parameter.name)
        else:
            chosen[first].append(parameter.parameter)
    for glob, members in chosen.items():
        if members:
            continue
        if any(fnmatchcase(name, glob) for name in names):
            raise InputError(
                f"{argument} must have no unused pattern: {glob!r} matches only parameters of earlier patterns. "
                "The first matching pattern counts, so put the more specific one first."
            )
        near = difflib.get_close_matches(glob, names, n=3)
        hint = f"Did you mean {', '.join(near)}? " if near else ""
        raise InputError(
            f"{argument}={glob!r} matches no layer and no parameter. {hint}Names are {pick_text(names, 20)}."
        )
    if left_over:
        raise InputError(
            f"{argument} must cover all parameters, but {pick_text(left_over, 20)} match no pattern. Add a pattern for "
            "them, or '*' as the last one."
        )
    return chosen
