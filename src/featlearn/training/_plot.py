"""Figure of the metrics of each layer over the steps of a training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from featlearn.errors import InputError
from featlearn.runs import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TITLES = {
    "loss": "loss",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "nfc": "NFC",
    "centered_nfc": "centered NFC",
    "centered_ratio": "share of the change in NFC",
    "weight_change": "weight change, |W - W0| / |W0|",
    "fact": "FACT (cosine)",
    "relgrad": "relative gradient",
    "ck.kta": "alignment of inputs and labels",
    "ntk.kta": "alignment of NTK and labels",
    "w.effective_rank": "effective rank of W",
    "w.alpha": "power-law exponent of W",
    "alignment": "alignment with directions",
}
_USUAL = ("loss", "nfc", "centered_ratio", "weight_change", "fact", "ck.kta", "w.effective_rank")
_PANELS = 6
_BOUNDED = {"nfc", "centered_nfc", "centered_ratio", "fact", "ck.kta", "ntk.kta", "alignment"}
_LOGARITHMIC = {"loss", "train_loss", "test_loss", "relgrad"}


def evolution(source: Run | pd.DataFrame, names: Iterable[str] | None = None, title: str | None = None) -> Figure:
    """Plot metrics of a run over its steps, one panel per metric and one curve per layer.

    Args:
        source: A run, or a table with the columns step, layer, name, value, as returned by `featlearn.Monitor.metrics`.
        names: Names of the metrics. None selects the first six that were recorded out of loss, NFC, C/UC ratio, change
            of weights, FACT, alignment of the layers' inputs with the labels, and effective rank.
        title: Title of the figure. None uses the name of the run, if ``source`` is one.

    Returns:
        The figure.

    Raises:
        InputError: If a metric was not recorded, or none was.

    Example:
        >>> import pandas as pd
        >>> from featlearn.training import evolution
        >>> rows = [(0, None, "loss", 1.0), (9, None, "loss", 0.2), (0, "net.0", "nfc", 0.3), (9, "net.0", "nfc", 0.9)]
        >>> figure = evolution(pd.DataFrame(rows, columns=["step", "layer", "name", "value"]))
        >>> [axes.get_title() for axes in figure.axes]
        ['loss', 'NFC']
    """
    from featlearn.plots import step_curves

    frame = source.metrics() if isinstance(source, Run) else source
    recorded = list(dict.fromkeys(frame["name"]))
    usual = [name for name in _USUAL if name in recorded][:_PANELS]
    wanted = usual if names is None else [names] if isinstance(names, str) else list(names)
    missing = [name for name in wanted if name not in recorded]
    if missing or not wanted:
        raise InputError(
            f"names must be among the recorded metrics ({', '.join(recorded) or 'none'}); "
            f"not recorded: {', '.join(missing) or 'any'}."
        )
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name in wanted:
        panels[_TITLES.get(name, name)] = {
            str(layer) if isinstance(layer, str) else "": (rows["step"].tolist(), rows["value"].tolist())
            for layer, rows in frame[frame["name"] == name].groupby("layer", sort=False, dropna=False)
        }
    return step_curves(
        panels,
        log_scale=tuple(_TITLES[name] for name in wanted if name in _LOGARITHMIC),
        bounded=tuple(_TITLES[name] for name in wanted if name in _BOUNDED),
        title=title if title is not None or not isinstance(source, Run) else source.name,
    )
