"""Write one of each file that featlearn keeps, with what it must say when a later version opens it.

Run once per version whose files must stay readable, as ``python tests/written_files/make_files.py <folder>``. The files
are committed, and `tests/test_written_files.py` opens them with the code of today.
"""

from __future__ import annotations

import contextlib
import copy
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import featlearn as fl
from featlearn.training import fit


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2]], dim=1)


def report(folder: Path) -> dict[str, Any]:
    model, initial = network(), network(1)
    result = fl.probe(model, rows(), initial=initial, loss=lambda f, y: (f - y).square().sum(1), weight_decay=0.1)
    result.save(folder / "report")
    table = result.table(["nfc", "centered_nfc", "fact", "enfa", "relgrad"])
    return {"table": table.drop(columns=["kind", "shape", "flags"]).to_dict("index"), "samples": result.samples}


def run_of_a_monitor(folder: Path) -> dict[str, Any]:
    model = network()
    with fl.Monitor(
        model, rows(), run=folder / "monitored", config={"lr": 0.1, "net": {"width": 6}}, every=4
    ) as monitor:
        fit(model, rows(), lr=0.1, steps=8, generator=0, monitor=monitor)
    run = fl.runs.open(folder / "monitored")
    return {
        "status": run.status,
        "config": run.config,
        "last_step": run.last_step,
        "nfc": run.series("nfc", "0").tolist(),
        "readings": run.texts("reading")["value"].tolist(),
        "matrices": {name: list(m.shape) for name, m in run.matrices(4).items()},
    }


def run_with_a_checkpoint(folder: Path) -> dict[str, Any]:
    """Eight of sixteen updates: the rest is made by the code that opens it."""
    whole = network()
    history = fit(whole, rows(), lr=0.05, momentum=0.9, steps=16, batch_size=6, generator=3)
    model = network()

    def stop(step: int, loss: float) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fit(
            model, rows(), lr=0.05, momentum=0.9, steps=16, batch_size=6, generator=3, run=folder / "checkpointed",
            checkpoint_every=4, callback=stop,
        )  # fmt: skip
    return {
        "losses": history.loss.tolist(),
        "bias": whole[2].bias.tolist(),
    }


def machines(folder: Path) -> dict[str, Any]:
    x, y = (t.double().numpy() for t in rows())
    regressor = fl.RFMRegressor(n_iter=2, random_state=0).fit(x, y)
    regressor.save(folder / "regressor.safetensors")
    classifier = fl.RFMClassifier(n_iter=1, random_state=0).fit(x, np.where(y[:, 1] > 0, "up", "down"))
    classifier.save(folder / "classifier.safetensors")
    return {
        "regressor": regressor.predict(x[:5]).tolist(),
        "feature_matrix": regressor.feature_matrix_.tolist(),
        "classifier": classifier.predict_proba(x[:5]).tolist(),
        "classes": classifier.classes_.tolist(),
    }


def table() -> tuple[pd.DataFrame, np.ndarray]:
    x, y = rows()
    frame = pd.DataFrame(
        {
            "length": x[:, 0].double().numpy(),
            "color": pd.Categorical(np.where(x[:, 1] > 0, "red", "blue")),
            "good": x[:, 2].numpy() > 0,
            "gaps": np.where(x[:, 3].numpy() > 1, np.nan, x[:, 3].double().numpy()),
        }
    )
    return frame, y[:, 1].double().numpy()


def pipeline(folder: Path) -> dict[str, Any]:
    frame, target = table()
    model = fl.make_tabular(fl.RFMRegressor(n_iter=1, random_state=0)).fit(frame, target)
    fl.save_tabular(folder / "pipeline.safetensors", model, {"target": "y"})
    return {"predictions": model.predict(frame[:5]).tolist()}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    # Runs keep the command and the platform; these files are passed on.
    sys.argv, platform.release = ["make_files.py"], lambda: "-"
    torch.set_num_threads(1)
    expected = {
        make.__name__: copy.deepcopy(make(folder))
        for make in (report, run_of_a_monitor, run_with_a_checkpoint, machines, pipeline)
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
