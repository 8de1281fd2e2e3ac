"""xRFM called as its manual does, for comparison: a fifth of the training rows is its validation set."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split

DEFAULT: dict[str, Any] = {}
"""What the package does unasked."""
TABARENA = {
    "model": {
        "kernel": "l2", "bandwidth": 10.0, "exponent": 1.0, "diag": True, "bandwidth_mode": "constant"
    },
    "fit": {"reg": 1e-3, "iters": 5, "early_stop_rfm": True, "early_stop_multiplier": 1.05, "solver": "solve"},
    "classification_mode": "prevalence",
}  # fmt: skip
"""Its settings in the TabArena benchmark, where nothing is tuned."""


def grid() -> list[dict[str, Any]]:
    """Twelve settings around its default: bandwidths, ridges, diagonal and full M."""
    return [
        {
            "model": {
                "kernel": "l2", "bandwidth": bandwidth, "exponent": 1.0, "diag": diagonal, "bandwidth_mode": "constant"
            },
            "fit": {"reg": reg, "iters": 5, "early_stop_rfm": True},
        }
        for bandwidth in (3.0, 10.0, 30.0)
        for reg in (1e-3, 1e-1)
        for diagonal in (True, False)
    ]  # fmt: skip


class XRFM:
    """A fitted xRFM."""

    def __init__(self, X: Any, y: Any, classifier: bool, settings: dict[str, Any], seed: int) -> None:
        from xrfm import xRFM

        self.classifier = classifier
        train, judge = train_test_split(
            np.arange(len(X)), test_size=0.2, random_state=seed, stratify=y if classifier else None
        )
        self.mean, self.scale = (0.0, 1.0) if classifier else (float(y[train].mean()), float(y[train].std()))
        targets = torch.as_tensor(y if classifier else (y - self.mean) / self.scale)
        targets = targets.long() if classifier else targets.float().reshape(-1, 1)
        rows = torch.as_tensor(X).float()
        reported = {key: value for key, value in settings.items() if key not in ("model", "fit")}
        if "model" in settings:
            reported["rfm_params"] = {"model": dict(settings["model"]), "fit": dict(settings["fit"])}
        state = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # it seeds the global generators
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            self.model = xRFM(device="cpu", verbose=False, random_state=seed, n_threads=1, **reported)
            self.model.fit(rows[train], targets[train], rows[judge], targets[judge])
        self.judged = self.score(X[judge], y[judge])
        np.random.set_state(state[0])  # noqa: NPY002
        torch.set_rng_state(state[1])

    def score(self, X: Any, y: Any) -> float:
        """Accuracy or R2."""
        with contextlib.redirect_stdout(io.StringIO()):
            result = np.asarray(self.model.predict(torch.as_tensor(X).float()))
        if self.classifier:
            return float((result.reshape(-1) == y).mean())
        residuals = y - (result.reshape(-1) * self.scale + self.mean)
        return 1.0 - float((residuals**2).sum() / ((y - y.mean()) ** 2).sum())
