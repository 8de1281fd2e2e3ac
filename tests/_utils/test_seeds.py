import pytest
import torch

from featlearn._utils.rng import as_generator
from featlearn.errors import InputError


def draw(generator):
    return torch.randn(5, generator=generator).tolist()


def test_integers_and_streams():
    assert draw(as_generator(3, "a")) == draw(as_generator(3, "a"))
    assert draw(as_generator(None, "a")) == draw(as_generator(0, "a"))
    draws = {tuple(draw(as_generator(seed, s))) for seed in (-1, 0, 1, 2**70) for s in ("a", "b")}
    assert len(draws) == 8


def test_a_generator_is_used_as_it_is():
    generator = torch.Generator()
    assert as_generator(generator, "a") is generator


@pytest.mark.parametrize("seed", ["3", 1.0, True])
def test_other_things_are_refused(seed):
    with pytest.raises(InputError, match="generator must be"):
        as_generator(seed, "a")
