import math

import pytest
import torch

from featlearn.datasets._modular_arithmetic import circulant_share, modular_task
from featlearn.errors import InputError


def pairs(X, p):
    assert torch.equal(X.sum(1), torch.full((len(X),), 2.0, dtype=X.dtype))
    return X[:, :p].argmax(1).tolist(), X[:, p:].argmax(1).tolist()


@pytest.mark.parametrize(
    ("operation", "obeyed"),
    [
        ("add", lambda a, b, c: (a + b) % 7 == c),
        ("subtract", lambda a, b, c: (a - b) % 7 == c),
        ("multiply", lambda a, b, c: (a * b) % 7 == c),
        ("divide", lambda a, b, c: (b * c) % 7 == a),
    ],
)
def test_labels_and_split(operation, obeyed):
    task = modular_task(7, operation, train_fraction=0.6, generator=0)
    seen = []
    for X, y in ((task.X, task.y), (task.X_test, task.y_test)):
        a, b = pairs(X, 7)
        seen += zip(a, b, strict=True)
        assert all(obeyed(*triple) for triple in zip(a, b, y.tolist(), strict=True))
        assert y.dtype == torch.int64
        assert 0 <= int(y.min()) <= int(y.max()) <= 6
    everything = {(a, b) for a in range(7) for b in range(7) if operation != "divide" or b}
    assert len(seen) == len(everything)
    assert set(seen) == everything
    assert len(task.X) == int(0.6 * len(everything))
    assert task.classes == 7


def test_the_papers_sizes_seeds_and_dtype():
    state = torch.get_rng_state()
    task, same, other = (modular_task(generator=seed) for seed in (0, 0, 1))
    assert task.X.shape == (1860, 122)
    assert task.X_test.shape == (1861, 122)
    assert torch.equal(task.X, same.X)
    assert not torch.equal(task.X, other.X)
    assert modular_task(5, dtype=torch.float64).X.dtype == torch.float64
    assert modular_task(4, "multiply", train_fraction=1.0).X_test.shape == (0, 8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"p": 1}, "got 1"),
        ({"p": 5.0}, "got 5.0"),
        ({"operation": "power"}, "'add', 'subtract', 'multiply', 'divide', got 'power'"),
        ({"p": 9, "operation": "divide"}, "prime"),
        ({"train_fraction": 0.0}, "train_fraction"),
        ({"p": 2, "train_fraction": 0.1}, "4 pairs"),
        ({"train_fraction": 1.5}, "1.5"),
        ({"train_fraction": math.nan}, "nan"),
    ],
)
def test_bad_arguments(settings, words):
    with pytest.raises(InputError, match=words):
        modular_task(**settings)


def wrapped(first, sign):
    """Entry (i, j) is first[(i + sign j) mod p], one by one."""
    p = len(first)
    return torch.stack([torch.stack([first[(i + sign * j) % p] for j in range(p)]) for i in range(p)])


@pytest.mark.parametrize("sign", [-1, 1])
def test_circulant_blocks_of_both_orientations_score_1(sign):
    block = wrapped(torch.randn(13, generator=torch.Generator().manual_seed(0), dtype=torch.float64), sign)
    assert circulant_share(block) == pytest.approx(1, abs=1e-12)
    assert circulant_share(1e200 * block) == pytest.approx(1, abs=1e-12)
    assert circulant_share(block.numpy() + 5) == pytest.approx(1, abs=1e-12)


def test_the_share_is_that_of_the_least_squares_projection():
    generator = torch.Generator().manual_seed(1)
    p = 6
    block = torch.randn(p, p, generator=generator, dtype=torch.float64) + 3
    shares = []
    for sign in (-1, 1):
        basis = torch.stack([wrapped(row, sign).flatten() for row in torch.eye(p, dtype=torch.float64)], 1)
        rest = (block - block.mean()).flatten()
        best = torch.linalg.lstsq(basis, rest[:, None]).solution
        shares.append(float((basis @ best).square().sum() / rest.square().sum()))
    assert shares[0] != pytest.approx(shares[1], rel=0.01)
    assert circulant_share(block) == pytest.approx(max(shares), rel=1e-12)
    assert circulant_share(block.mT.flip(0)) == pytest.approx(max(shares), rel=1e-12)  # swaps the orientations


def test_noise_scores_chance_and_a_constant_nothing():
    generator = torch.Generator().manual_seed(2)
    noise = [circulant_share(torch.randn(61, 61, generator=generator) + 100) for _ in range(20)]
    assert sum(noise) / 20 == pytest.approx(1 / 62, rel=0.3)
    assert math.isnan(circulant_share(torch.full((5, 5), 0.1)))
    assert math.isnan(circulant_share(torch.zeros(5, 5)))
    # A big constant under a little noise is no evidence either.
    assert circulant_share(torch.randn(61, 61, generator=generator, dtype=torch.float64) * 1e-6 + 1) < 0.05


def test_a_block_without_any_circulant_part_scores_0():
    # Rows of one sign alternate with rows of the other: every diagonal has mean 0.
    block = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 4)
    assert circulant_share(block) == 0


@pytest.mark.parametrize("block", [torch.zeros(3), torch.zeros(2, 3), torch.zeros(0, 0), torch.full((2, 2), math.inf)])
def test_bad_blocks(block):
    with pytest.raises(InputError, match="block"):
        circulant_share(block)
