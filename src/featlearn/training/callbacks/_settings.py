"""Settings that callbacks collect for the config of a run."""

from __future__ import annotations

import enum
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from featlearn._utils.validation import flat_settings
from featlearn.runs import Run
from featlearn.runs.launch import run_to_continue

_SECRET_NAME = re.compile(r"token$|secret|passw|api_?key|credential|private_key", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_)[A-Za-z0-9]{16,}")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_GROUP = ("lr", "initial_lr", "weight_decay", "betas", "momentum", "eps", "nesterov")
_SCHEDULE = (
    "gamma", "step_size", "milestones", "power", "eta_min", "T_0", "T_mult", "factor", "patience", "start_factor",
    "end_factor",
)  # fmt: skip
_DEEPEST = 20


def with_config(
    options: Mapping[str, Any], collected: Mapping[str, Any], free: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the options of a monitor with the collected settings in its config.

    Args:
        options: Options of the monitor. Its own config takes precedence. Without the folder of a run there is no
            config, and nothing is added.
        collected: Settings by section and name.
        free: Function that returns whether a setting, by its dotted name, may change when a run is continued. The run
            keeps its own value then. Versions may always change; another learning rate of the optimizer gives a
            warning, as the training may have changed it itself.

    Returns:
        The options.
    """
    folder = options.get("run")
    if folder is None or isinstance(folder, Run):
        return dict(options)
    given = options.get("config")
    config = _plain(collected, 0)
    old = run_to_continue(folder) if options.get("resume") is True else None
    if old is not None:
        for section in [name for name in config if name not in old.config]:
            del config[section]  # the run was made without it
        before = {name: old.config[name] for name in (config if given is not None else old.config)}
        kept = {name for name in {**flat_settings(config), **flat_settings(before)} if _may_change(name) or free(name)}
        if given is None:  # settings of the user are compared only if they are passed again
            kept |= flat_settings(before).keys() - flat_settings(config).keys()
        rates = {
            name: tuple(flat_settings(part).get(name) for part in (before, config)) for name in kept if _is_rate(name)
        }
        told = [f"{name} was {was} and is {now}" for name, (was, now) in rates.items() if was != now and not free(name)]
        if told:
            warnings.warn(f"This training continues the run in {str(old.path)!r}, but {'; '.join(told)}.", stacklevel=3)
        for name in kept:
            _keep(config, before, name.split("."))
    return {**options, "config": _merged(config, given) if given is None or isinstance(given, Mapping) else given}


def describe_optimizers(optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return the class and the groups of one or several optimizers; the learning rate is that before any schedule."""
    described = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # inside a wrapper of Accelerate
        groups = []
        for group in inner.param_groups:
            values = {name: group[name] for name in _GROUP if name in group}
            groups.append(values | {"lr": values.pop("initial_lr")} if "initial_lr" in values else values)
        distinct = groups[:1] if all(group == groups[0] for group in groups) else groups
        several = {f"group_{number}": group for number, group in enumerate(distinct)}
        described.append({"class": type(inner).__name__} | (distinct[0] if len(distinct) == 1 else several))
    return described[0] if len(described) == 1 else {f"optimizer_{n}": one for n, one in enumerate(described)}


def describe_schedules(schedules: Iterable[Any]) -> dict[str, Any]:
    """Return the class and the settings of schedules, without those that depend on the number of steps."""
    described = [
        {"class": type(schedule).__name__}
        | {name: getattr(schedule, name) for name in _SCHEDULE if hasattr(schedule, name)}
        for schedule in schedules
    ]
    return described[0] if len(described) == 1 else {f"schedule_{n}": one for n, one in enumerate(described)}


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    result = {}
    for package in packages:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def _plain(value: Any, depth: int) -> Any:
    """Return a value as JSON types, other values as text; secrets are omitted."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth)
    if isinstance(value, Mapping) and depth < _DEEPEST:
        named = {str(name): inner for name, inner in value.items() if str(name)}
        return {name: _plain(inner, depth + 1) for name, inner in named.items() if not _SECRET_NAME.search(name)}
    if isinstance(value, list | tuple | set) and depth < _DEEPEST:
        return [_plain(inner, depth + 1) for inner in value]
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return _plain(value.item(), depth)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        text = f"{value.__module__}.{value.__qualname__}"
    else:
        text = _ADDRESS.sub("", os.fspath(value) if isinstance(value, os.PathLike) else str(value))
    home = str(Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    return _SECRET_VALUE.sub("...", text).encode("utf-8", "replace").decode()[:1000]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    result = dict(base)
    for name, value in (over or {}).items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both else value
    return result


def _may_change(name: str) -> bool:
    return name.startswith("versions.") or _is_rate(name)


def _is_rate(name: str) -> bool:
    return name.startswith("optimizer.") and name.endswith(".lr")


def _keep(config: dict[str, Any], old: Mapping[str, Any], path: list[str]) -> None:
    """Set a setting to that of the run, or remove it if the run does not have it."""
    inner: Any = config
    before: Any = old
    for name in path[:-1]:
        before = before.get(name) if isinstance(before, Mapping) else None
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            return
    if isinstance(before, Mapping) and path[-1] in before:
        inner[path[-1]] = before[path[-1]]
    else:
        inner.pop(path[-1], None)
