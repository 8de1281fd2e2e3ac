"""Tests of spikes: false positives on noise, planted signals around the threshold, and the scale at the edge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from featlearn.errors import InputError
from featlearn.spectra import bbp_threshold, conjugate_kernel_law, edge_scale, marchenko_pastur, spikes

H, D = 300, 150


def spectrum(theta: float, seed: int) -> np.ndarray:
    """Return the eigenvalues of (W + theta u v^T)^T (W + theta u v^T) / H."""
    draw = np.random.default_rng(seed)
    u, v = (x / np.linalg.norm(x) for x in (draw.standard_normal(H), draw.standard_normal(D)))
    w = draw.standard_normal((H, D)) + theta * np.outer(u, v)
    return np.linalg.eigvalsh(w.T @ w / H)


@pytest.mark.parametrize(("rows", "columns"), [(400, 100), (100, 400), (300, 300), (5000, 7)])
def test_scale_is_johnstones(rows: int, columns: int) -> None:
    law = marchenko_pastur(rows, columns, variance=0.4, scale=33.0)
    h, d = math.sqrt(rows), math.sqrt(columns)
    expected = 0.4 / 33.0 * (h + d) * (1 / h + 1 / d) ** (1 / 3)
    assert edge_scale(law, columns) == pytest.approx(expected, rel=1e-6)


def test_scale_of_a_conjugate_kernel_without_linear_part() -> None:
    assert edge_scale(conjugate_kernel_law(1e-3, 300, 700, 200), 300) == pytest.approx(
        edge_scale(marchenko_pastur(700, 300), 300), rel=1e-4
    )


def test_noise_has_tracy_widom_scores_and_no_spikes() -> None:
    law = marchenko_pastur(H, D)
    noise = [spectrum(0.0, seed) for seed in range(60)]
    scores = np.array([(values[-1] - law.edges[1]) / edge_scale(law, D) for values in noise])
    # Tracy-Widom of real matrices: mean -1.21, deviation 1.27; four standard errors of sixty draws, and a finite size.
    assert abs(scores.mean() + 1.21) < 4 * 1.27 / math.sqrt(60) + 0.2
    assert 0.85 < scores.std() < 1.75
    assert not any(len(spikes(values, law)) for values in noise)


def test_a_signal_shows_beyond_the_threshold_only() -> None:
    law, critical = marchenko_pastur(H, D), bbp_threshold(H, D)
    for seed in range(5):
        assert len(spikes(spectrum(0.7 * critical, seed), law)) == 0
        strong = 2 * critical
        values = spectrum(strong, seed)
        result = spikes(values, law)
        assert result.indices.tolist() == [D - 1]
        assert result.values.tolist() == [values[-1]]
        assert result.scores[0] > 4
        predicted = (strong**2 + H) * (strong**2 + D) / strong**2 / H
        # A spike fluctuates by 2 theta / H and less, times a standard normal.
        assert result.values[0] == pytest.approx(predicted, abs=4 * 2 * strong / H)


def test_at_the_threshold_the_spike_is_the_edge() -> None:
    theta = bbp_threshold(H, D, variance=0.3)
    edge = marchenko_pastur(H, D, variance=0.3, scale=1).edges[1]
    assert (theta**2 + 0.3 * H) * (theta**2 + 0.3 * D) / theta**2 == pytest.approx(edge)


def test_order_margin_and_size() -> None:
    law = marchenko_pastur(H, D)
    right, scale = law.edges[1], edge_scale(law, D)
    values = torch.tensor([right + 5 * scale, 1.0, right + 9 * scale, right + 3 * scale], dtype=torch.float64)
    result = spikes(values, law, size=D)
    assert result.indices.tolist() == [2, 0]
    assert result.scores.tolist() == pytest.approx([9, 5])
    assert result.threshold == pytest.approx(right + 4 * scale)
    assert (result.edge, len(result)) == (right, 2)
    assert len(spikes(values, law, size=D, margin=2.0)) == 3
    assert edge_scale(law, 8 * D) == pytest.approx(scale / 4)


def test_bad_input_is_refused() -> None:
    law = marchenko_pastur(H, D)
    for values, options, message in [
        ([], {}, "not empty"),
        ([[1.0]], {}, "vector"),
        ([1.0, math.nan], {}, "1 of 2 eigenvalues are NaN"),
        ([1.0, 2.0], {"size": 1}, "size must be at least the number of eigenvalues, 2, got 1"),
        ([1.0], {"margin": -1.0}, "margin"),
    ]:
        with pytest.raises(InputError, match=message):
            spikes(values, law, **options)
    with pytest.raises(InputError, match="rows must be positive"):
        bbp_threshold(0, 1)
    with pytest.raises(InputError, match="size must be"):
        edge_scale(law, 0)
