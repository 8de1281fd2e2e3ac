"""xRFM, the nearest peer: with its settings the machine is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featlearn.rfm import RFMRegressor

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("diagonal", [False, True])
def test_predictions_and_features_are_those_of_xrfm(outputs: int, diagonal: bool) -> None:
    from xrfm.rfm_src import RFM

    rng = np.random.default_rng(0)
    X = rng.standard_normal((320, 6))
    Y = np.stack([np.sin(2 * X[:, k]) + X[:, k] * X[:, k + 1] for k in range(outputs)], axis=1)
    Y /= np.sqrt((Y[:300] ** 2).mean(0))  # ours gives every output this unit inside; xRFM takes them as they are
    rows, targets = torch.from_numpy(X).float(), torch.from_numpy(Y).float()
    peer = RFM(kernel="l2", bandwidth=5.0, device="cpu", diag=diagonal, verbose=False, tuning_metric="mse")
    peer.fit(
        (rows[:300], targets[:300]), (rows[300:], targets[300:]), iters=2, reg=0.05, verbose=False,
        early_stop_rfm=False, return_best_params=False,
    )  # fmt: skip
    ours = RFMRegressor(
        update="nfa", power=1.0, rescale="max", bandwidth=5.0, ridge=0.05 / 300, n_iter=2, diagonal=diagonal,
        validation=None, fit_intercept=False,
    ).fit(X[:300], Y[:300])  # fmt: skip
    metric = peer.M.double().numpy()
    metric = np.diag(metric) if diagonal else metric
    # xRFM computes in float32: 6e-8 times a condition number of 300 / 0.05 is 4e-4.
    assert np.abs(ours.feature_matrix_ - metric).max() < 4e-4 * np.abs(metric).max()
    predicted = peer.predict(rows[300:]).double().numpy()
    assert np.abs(ours.predict(X[300:]).reshape(predicted.shape) - predicted).max() < 4e-4 * np.abs(predicted).max()
