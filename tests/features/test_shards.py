"""Probes of data in shards: the numbers of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from featlearn.features import probe_shards

G = torch.Generator().manual_seed(0)
X = torch.randn(90, 5, generator=G, dtype=torch.float64)
Y = torch.randint(3, (90,), generator=G)
CUTS = [(0, 17), (17, 17), (17, 60), (60, 90)]
OPTIONS: dict[str, Any] = {"loss": nn.CrossEntropyLoss(reduction="none"), "weight_decay": 0.1}


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def expected() -> pd.DataFrame:
    return fl.probe(net(), (X, Y), initial=net(1), **OPTIONS).table("all")


def assert_same(report: fl.Report) -> None:
    assert report.samples == 90
    numbers = [
        table.drop(columns="relgrad_noise").select_dtypes("number") for table in (report.table("all"), expected())
    ]
    assert numbers[0].shape[1] > 10
    pd.testing.assert_frame_equal(*numbers, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("jobs", [1, 2])
def test_shards_add_up_to_the_whole(jobs: int) -> None:
    shards = [(X[a:b], Y[a:b]) for a, b in CUTS]
    assert_same(probe_shards(net(), shards, n_jobs=jobs, batch_size=16, initial=net(1), **OPTIONS))


def test_loaders_with_workers_and_functions() -> None:
    loaders = [DataLoader(TensorDataset(X[a:b], Y[a:b]), batch_size=8, num_workers=1) for a, b in ((0, 40), (40, 90))]
    assert_same(probe_shards(net(), loaders, initial=net(1), **OPTIONS))
    functions = [lambda a=a, b=b: {"x": X[a:b], "label": Y[a:b]} for a, b in ((0, 40), (40, 90))]
    report = probe_shards(net(), functions, prepare=lambda d: (d["x"], d["label"]), initial=net(1), **OPTIONS)
    assert_same(report)


def test_each_shard_has_random_vectors_of_its_own() -> None:
    same = [X[:30], X[:30]]
    report = probe_shards(net(), same, outputs=4)
    one = fl.probe(net(), X[:30], outputs=4)
    exact = fl.probe(net(), X[:30], outputs="exact")
    assert report["0"].nfc != one["0"].nfc
    assert report["0"].nfc == pytest.approx(exact["0"].nfc, abs=0.2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shards": []}, "at least one batch"),
        ({"shards": [X[:0]]}, "at least one batch"),
        ({"n_jobs": 0}, "n_jobs must be"),
        ({"backend": "spark"}, "backend must be"),
        ({"generator": torch.Generator()}, "generator must be an integer"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with pytest.raises(fl.InputError, match=match):
        probe_shards(**{"model": net(), "shards": [X], **options})


@pytest.mark.slow  # a cluster takes half a minute to start
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_ray_data_on_a_cluster() -> None:
    import ray

    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        rows = [{"x": x, "y": int(y)} for x, y in zip(X.numpy(), Y, strict=True)]
        shards = ray.data.from_items(rows).split(3)

        def prepare(columns: dict[str, Any]) -> Any:
            return columns["x"].double(), columns["y"]

        options = {"prepare": prepare, "batch_size": 16, "initial": net(1)}
        report = probe_shards(net(), shards, n_jobs=2, backend="ray", **options, **OPTIONS)
    finally:
        ray.shutdown()
    assert_same(report)
