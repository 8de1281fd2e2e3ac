"""Use the installed package as its users do, outside of the clone: ``python check_wheel.py FOLDER``.

Run by `make test-wheel` with the Python of an environment that has the wheel and what it requires, and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

import featlearn as fl


def command(*arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("featlearn")), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(folder: Path) -> None:
    source = Path(__file__).resolve().parents[1] / "src"
    home = Path(fl.__file__).resolve().parent
    assert source not in home.parents, "featlearn was imported from the clone"
    assert fl.__version__ == importlib.metadata.version("featlearn")
    for name in ("py.typed", "dashboard/static/index.html", "reports/templates/page.html"):
        assert (home / name).is_file(), f"{name} is not in the wheel"
    os.chdir(folder)
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.standard_normal((80, 3)), columns=list("abc"))
    table.assign(y=table.a * table.b).to_csv("table.csv", index=False)
    fitted = json.loads(command("fit", "table.csv", "--target", "y", "--out", "fitted", "--json"))
    assert Path(fitted["page"]).is_file(), fitted
    command("predict", "fitted/model.safetensors", "table.csv", "--output", "predictions.csv")
    assert len(pd.read_csv("predictions.csv")) == 80
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
    save_file(model.state_dict(), "model.safetensors")
    assert "40x30" in command("spectra", "model.safetensors", "--out", "spectra")
    report = fl.probe(model, torch.randn(20, 30))
    assert report.table()["nfc"].between(0, 1).all()
    with fl.Monitor(model, torch.randn(20, 30), run="run", every=1, measure="features") as monitor:
        monitor.step(0)
    assert "run" in command("runs", "list", ".")
    print(f"featlearn {fl.__version__} works from {home}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
