"""Runs for the tests of the dashboard: small, quick, and with names that nobody should trust."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from featlearn.runs import Run

EVIL = "<b>x</b><img src=x onerror=window.broken=1>"
FEATURES = ["alcohol", "<i>hue</i>", "ash"]


def trained_run(folder: Path, name: str = "run", lr: float = 0.1, steps: int = 12, layers: int = 2) -> Run:
    """A run as a monitor leaves it; still open for writing."""
    run = Run.create(folder / name, {"lr": lr, "net": {"width": 8}, "odd": math.nan})
    for step in range(steps):
        log_step(run, step, layers)
    return run


def log_step(run: Run, step: int, layers: int = 2) -> None:
    """A step of a training, measured."""
    generator = np.random.default_rng(step)
    names = [EVIL if layer == 0 else f"net.{layer}" for layer in range(layers)]
    table: dict[str | None, dict[str, float | str]] = {
        None: {"loss": 1 / (step + 1), "strange": math.inf if step % 2 else math.nan, "ntk.phase": "undecided"}
    }
    for layer in names:
        table[layer] = {
            "nfc": step / 20, "fact": 0.5, "w.alpha": 2.5, "w.edge": 3.0, "w.spikes": 1.0, "reading": "learning",
            "reason": "the weights have moved", "w.phase": "invariant bulk" if step < 4 else "bulk + spikes",
        }  # fmt: skip
    run.log_layers(step, table)
    if step % 3 == 0:
        matrices = {}
        for place, layer in enumerate(names):
            bulk = np.linalg.svd(np.random.default_rng(place).standard_normal((120, 60)) / 10, compute_uv=False) ** 2
            bulk[0] *= 1 + step
            signed = torch.from_numpy(generator.standard_normal((20, 20)))
            matrices |= {
                f"{layer}/agop": signed @ signed.T, f"{layer}/w.eigenvalues": torch.from_numpy(bulk),
            }  # fmt: skip
        run.save_matrices(step, matrices)


def log_findings(run: Run, steps: int = 12) -> None:
    """Findings of two layers and of the model, as the diagnosis stores them."""

    def finding(fault: str, severity: str, evidence: str) -> str:
        content = {"fault": fault, "severity": severity, "confidence": 0.9, "evidence": evidence}
        return json.dumps([content | {"advice": f"look at <b>{fault}</b>"}])

    dead = finding("dead units", "problem", "6 of 8 units never fire")
    run.ignore_order()
    for step in range(2, steps):
        run.log(step, {"findings": finding("lazy layer", "warning", EVIL)}, layer=EVIL)
        if 3 <= step <= 8:
            run.log(step, {"findings": dead if step < 8 else "[]"}, layer="net.1")
    run.log(5, {"findings": finding("loss spike", "note", "the loss rose from 0.2 to 3")})
    run.log(6, {"findings": "[]"})
    run._any_order = False


def feature_machine_run(folder: Path, name: str = "wine") -> Run:
    """A run of a recursive feature machine, by its contract."""
    config = {"kind": "rfm", "features": FEATURES, "target": "cultivar", "task": "classification", "update": "fact"}
    with Run.create(folder / name, config) as run:
        for step in range(3):
            run.log(step, {"score": step / 3, "ridge": 1e-3})
            run.save_matrices(step, {"feature_matrix": torch.eye(3) * (step + 1)})
        for place, feature in enumerate(FEATURES):
            run.log(2, {"importance": place / 3}, layer=feature)
    return run


def folder_of_runs(folder: Path) -> Path:
    """Two trained runs, a feature machine, a damaged folder and a ledger."""
    for name, lr in (("first", 0.1), ("second", 0.2)):
        trained_run(folder, name, lr).finish()
    feature_machine_run(folder)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.db").write_bytes(b"no database")
    (folder / "ledger.json").write_text(LEDGER)
    return folder


OLD_LEDGER = """{"schema_version": 1, "experiments": [{"name": "nfa-fig1", "title": "figure", "paper": "nfa",
"covers": ["figure 1"], "scale": "smoke", "seconds": 1.0, "trouble": "", "remarks": "", "claims": [
{"text": "NFC <b>of</b> the first layer", "where": "figure 1", "relation": "about", "published": 0.93,
 "measured": [0.92], "tolerance": 0.03, "reason": "", "note": "", "missing": "", "verdict": "reproduced"},
{"text": "NFC at random", "where": "figure 1", "relation": "about", "published": 0.53,
 "measured": [0.9], "tolerance": 0.03, "reason": "", "note": "", "missing": "", "verdict": "differs"}]}]}"""
LEDGER = (
    OLD_LEDGER.replace('"schema_version": 1', '"schema_version": 3')
    .replace('"paper": "nfa"', '"paper": "nfa", "paper_title": "Feature learning as alignment (NFA)", "stale": false')
    .replace('"published": 0.93', '"published": 0.93, "published_text": "0.93", "measured_text": "0.92"')
    .replace('"published": 0.53', '"published": 0.53, "published_text": "0.53", "measured_text": "0.9"')
)
