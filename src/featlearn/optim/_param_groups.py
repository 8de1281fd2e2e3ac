"""Which parameters belong to which layer, and which a glob means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from featlearn.errors import InputError
from featlearn.layers import Layer, find_layers, unwrap


@dataclass(frozen=True, eq=False)
class LayerParameter:
    """A parameter of a model, with the names it goes by.

    Attributes:
        parameter: The parameter itself.
        name: Its first path in the model, as ``"net.0.weight"``.
        layers: The layers it belongs to: the one whose weight, bias or factor it is; query, key and value of an
            attention that packs them in one tensor; several for a tied weight; none for norms and embeddings.
        aliases: Everything a glob may call it: its layers, the modules that own it and all its paths.
    """

    parameter: nn.Parameter
    name: str
    layers: tuple[str, ...]
    aliases: tuple[str, ...]


def parameters_of_layers(model: nn.Module) -> list[LayerParameter]:
    """Every parameter of a model that can be trained, each once, in the order of the model.

    A parameter belongs to the layer in whose module it lies: a bias goes with its weight, and so do the factors of
    a parametrized weight.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
    return [_described(parameter, found, owners) for parameter, found in names.items()]


def _described(parameter: nn.Parameter, names: Sequence[str], owners: Mapping[str, Sequence[Layer]]) -> LayerParameter:
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
        # Where a module has several layers, a weight of one is its own; what is left (biases) is of all.
        own = [layer for layer in here if layer.parameter.rpartition(".")[2] == local]
        layers += [layer.name for layer in own or here]
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in [*modules, *names]]
    aliases = tuple(dict.fromkeys(alias for alias in [*layers, *plain] if alias))
    return LayerParameter(parameter, plain[len(modules)], tuple(dict.fromkeys(layers)), aliases)


def choose(globs: Sequence[str], parameters: Sequence[LayerParameter], argument: str) -> dict[str, list[nn.Parameter]]:
    """The parameters of each glob: the first glob, in the order given, that matches any of a parameter's names.

    Raises:
        InputError: A glob matches nothing, or nothing that an earlier one has left; or a parameter is left over.
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
    for glob, found in chosen.items():
        if found:
            continue
        if any(fnmatchcase(name, glob) for name in names):
            raise InputError(
                f"{argument}: all that {glob!r} matches is taken by globs before it; the first that matches counts, "
                "so put the more special one first"
            )
        near = difflib.get_close_matches(glob, names, n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(f"{argument}={glob!r} matches no layer and no parameter; {hint}there are {_listed(names)}")
    if left_over:
        raise InputError(
            f"{argument} gives no value for {_listed(left_over)}: add a glob for them, or '*' as the last for the rest"
        )
    return chosen


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
