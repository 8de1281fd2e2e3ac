"""Every experiment at its smallest: that it runs, and what it hands on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from featlearn.papers.claim import VERDICTS
from featlearn.papers.experiment import PAPERS, SCALES, Experiment
from featlearn.papers.registry import all_experiments
from featlearn.papers.runner import reproduce
from featlearn.plots import save_figure

NAMES = list(all_experiments())


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    assert not plt.get_fignums()  # figures belong to results, not to pyplot


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_described(name: str) -> None:
    experiment = all_experiments()[name]
    assert experiment.paper in PAPERS
    assert experiment.title
    assert experiment.covers
    assert set(experiment.scales) == set(SCALES)
    for scale in SCALES:
        config = experiment.config(scale)
        assert dataclasses.is_dataclass(config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, None)
        assert json.dumps(experiment.settings(config))
        points = experiment.points(config)
        assert len({experiment.key(point) for point in points}) == len(points) > 0


_KEYS = """
from featlearn.papers.registry import all_experiments
for experiment in all_experiments().values():
    for point in experiment.points(experiment.config("quick")):
        print(experiment.key(point))
"""


def test_keys_are_the_same_in_every_process() -> None:
    """Or nothing would be found again."""
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(_KEYS, {})
    test_rows = subprocess.run([sys.executable, "-c", _KEYS], capture_output=True, text=True, check=True).stdout
    assert len(test_rows.split()) >= len(NAMES)
    assert here.getvalue() == test_rows


def test_no_figure_is_covered_twice() -> None:
    covered = [(e.paper, place) for e in all_experiments().values() for place in e.covers]
    assert len(set(covered)) == len(covered)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_its_smallest(name: str, tmp_path: Path) -> None:
    (measured,) = reproduce([name], "smoke", folder=tmp_path)
    assert not measured.missing_data, measured.trouble  # the smallest needs no files
    result = measured.result
    assert result is not None
    assert result.claims
    for claim in result.claims:
        assert claim.verdict in VERDICTS
        assert claim.text and claim.where and claim.published_text and claim.measured_text  # noqa: PT018
        if claim.relation == "about" and not claim.missing:
            assert claim.reason, f"{claim.text}: say where the tolerance comes from"
    assert result.figures
    for title, figure in result.figures.items():
        assert save_figure(figure, tmp_path / f"{abs(hash(title))}.png").stat().st_size > 1000
    for table in result.tables.values():
        assert isinstance(table, pd.DataFrame)
        assert len(table)
    _no_point_is_measured_twice(measured.experiment, tmp_path)


def _no_point_is_measured_twice(experiment: Experiment, folder: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    reproduce([experiment.name], "smoke", folder=folder, progress=lambda *news: reported.append(news))
    count = len(experiment.points(experiment.config("smoke")))
    assert reported == [(experiment.name, 0, count), (experiment.name, count, count)]
