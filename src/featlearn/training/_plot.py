"""The picture of a training: what became of every layer, step by step."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure

from featlearn.errors import InputError
from featlearn.plots import step_curves
from featlearn.runs import Run

_TITLES = {
    "loss": "loss",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "nfc": "NFC",
    "centered_nfc": "centered NFC",
    "centered_ratio": "share of the change in NFC",
    "weight_change": "moved, |W - W0| / |W0|",
    "fact": "FACT (cosine)",
    "relgrad": "relative gradient",
    "ck.kta": "inputs aligned with labels",
    "ntk.kta": "NTK aligned with labels",
    "w.effective_rank": "effective rank of W",
    "w.alpha": "exponent of W's tail",
    "alignment": "alignment with directions",
}
_USUAL = ("loss", "nfc", "centered_ratio", "weight_change", "fact", "ck.kta", "w.effective_rank")
_PANELS = 6
_BOUNDED = {"nfc", "centered_nfc", "centered_ratio", "fact", "ck.kta", "ntk.kta", "alignment"}
_LOGARITHMIC = {"loss", "train_loss", "test_loss", "relgrad"}


def evolution(source: Run | pd.DataFrame, names: Iterable[str] | None = None, title: str | None = None) -> Figure:
    """Draw numbers of a run over its steps: a panel a number, a curve a layer.

    Args:
        source: A run, or a frame with columns step, layer, name, value, as `featlearn.Monitor.metrics` gives it.
        names: Numbers to draw; None takes the first six that are there of the loss, NFC, C/UC ratio, change of
            weights, FACT, alignment of the layers' inputs with the labels, and effective rank.
        title: Of the figure; the name of the run by default.
    """
    frame = source.metrics() if isinstance(source, Run) else source
    there = list(dict.fromkeys(frame["name"]))
    usual = [name for name in _USUAL if name in there][:_PANELS]
    wanted = usual if names is None else [names] if isinstance(names, str) else list(names)
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise InputError(f"not recorded: {', '.join(missing) or 'anything'}; there are {', '.join(there) or 'none'}")
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name in wanted:
        own = frame[frame["name"] == name]
        panels[_TITLES.get(name, name)] = {
            str(layer) if isinstance(layer, str) else "": (rows["step"].tolist(), rows["value"].tolist())
            for layer, rows in own.groupby("layer", sort=False, dropna=False)
        }
    return step_curves(
        panels,
        log_scale=tuple(_TITLES[name] for name in wanted if name in _LOGARITHMIC),
        bounded=tuple(_TITLES[name] for name in wanted if name in _BOUNDED),
        title=title if title is not None or not isinstance(source, Run) else source.name,
    )
