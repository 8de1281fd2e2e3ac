"""Take the pictures of the dashboard into ``docs/img``. Run by hand: ``python docs/make_dashboard_pictures.py``.

Needs the extra ``dashboard``, and chromium on the PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from queue import Queue

from PIL import Image, ImageChops
from sklearn.datasets import load_wine
from torch import nn

import featlearn as fl
from featlearn.dashboard import serve
from featlearn.datasets import chain_monomial_task
from featlearn.models import mlp
from featlearn.runs import Run
from featlearn.training import fit
from featlearn.training.rfm_run import log_machine, machine_config

IMAGES = Path(__file__).parent / "img"
WIDTH, HEIGHT = 1280, 1800
DECAY = 1e-3
SWEEP = (0.01, 0.03, 0.1, 0.3)


def main() -> None:
    """Train, fit, serve the runs and photograph their pages."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        train(runs / "chain-small-init", width=128, scale=0.01)
        train(runs / "chain-standard-init", width=128, scale=1.0)
        fit_wine(runs / "wine")
        diverge(runs / "diverged")
        (runs / "copied-halfway").mkdir()
        (runs / "copied-halfway" / "run.db").write_bytes(b"half of a file" * 100)
        for lr in SWEEP:
            for seed in range(3):
                train(runs / "sweep" / f"lr-{lr:g}-seed-{seed}", width=64, scale=0.1, steps=200, lr=lr, seed=seed)
        addresses: Queue[str] = Queue()
        threading.Thread(target=serve, args=(runs,), kwargs={"port": 0, "ready": addresses.put}, daemon=True).start()
        address = addresses.get(timeout=60)
        monitor = train(runs / "chain-wide", width=512, scale=0.01, steps=240, close=False)
        with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
            ids = {run["name"]: run["id"] for run in json.load(answer)["runs"]}
        columns = "column=s%3Alr&column=m%3Abest%3Aloss"
        photograph(f"{address}#/runs?filter=chain&{columns}&group=s%3Alr&open=0.3", IMAGES / "dashboard-groups.png")
        photograph(f"{address}#/runs?filter=seed%3Dnone", IMAGES / "dashboard-runs.png")
        photograph(f"{address}#/sweeps?filter=sweep&axis=lr&axis=seed", IMAGES / "dashboard-sweeps.png")
        photograph(f"{address}#/run/{ids['chain-small-init']}", IMAGES / "dashboard-run.png")
        photograph(f"{address}#/run/{ids['chain-small-init']}/map?metric=nfc", IMAGES / "dashboard-map.png")
        photograph(f"{address}#/run/{ids['chain-small-init']}/spectra", IMAGES / "dashboard-spectra.png")
        photograph(f"{address}#/run/{ids['wine']}", IMAGES / "dashboard-rfm.png")
        monitor.close()


def train(
    path: Path, width: int, scale: float, steps: int = 600, lr: float = 0.1, seed: int | None = None, close: bool = True
) -> fl.Monitor:
    """Train a network on the chain monomial with a monitor."""
    task = chain_monomial_task(n=384, d=32, r=5, generator=0)
    model = mlp([32, width, width, 1], scales={"0": scale}, generator=seed or 0)
    config = {"task": "chain monomial", "lr": lr, "weight_decay": DECAY, "net": {"width": width, "first_scale": scale}}
    config |= {} if seed is None else {"seed": seed}
    # Trainings of a second: within a share of their time, they would hardly be measured.
    options = {"loss": nn.MSELoss(), "weight_decay": DECAY, "budget": None}
    monitor = fl.Monitor(model, (task.X, task.y), run=path, config=config, **options)
    fit(model, (task.X, task.y), lr=lr, steps=steps, weight_decay=DECAY, monitor=monitor)
    if close:
        monitor.close()
    return monitor


def fit_wine(path: Path) -> None:
    """Fit a feature machine, and write its run."""
    X, y = load_wine(return_X_y=True, as_frame=True)
    machine = fl.make_tabular(fl.RFMClassifier(patience=None)).fit(X, y)["estimator"]
    names = machine.feature_names()
    with Run.create(path, machine_config(machine, names, "cultivar"), name="wine") as run:
        log_machine(run, machine, names)


def diverge(path: Path) -> None:
    """Write a run that ends with an error."""
    with suppress(FloatingPointError), Run.create(path, {"task": "chain monomial", "lr": 30}) as run:
        for step in range(20):
            run.log(step, {"loss": 10.0**step})
        raise FloatingPointError("the loss is not finite")


def photograph(address: str, path: Path) -> None:
    """Save a page as a picture, without the empty space below it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium must be on the PATH.")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    size = [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=6000", f"--screenshot={path}"]
    subprocess.run([chromium, *options, *size, address], check=True, capture_output=True, timeout=120)
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    ground = Image.new("RGB", picture.size, picture.getpixel((5, picture.height - 5)))
    box = ImageChops.difference(picture, ground).getbbox()
    assert box is not None
    picture.crop((0, 0, WIDTH, min(box[3] + 20, HEIGHT))).quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


if __name__ == "__main__":
    main()
