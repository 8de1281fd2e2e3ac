"""Random generators from seeds; the global generator is never used."""

from __future__ import annotations

import hashlib

import torch

from featlearn.errors import InputError

Seed = torch.Generator | int | None
"""Generator, which is used and advanced, or integer seed of a new one. None is the seed 0."""


def as_generator(seed: Seed, stream: str) -> torch.Generator:
    """Return a CPU generator.

    An integer seed is mixed with the name of the stream. Otherwise a network and a data set that are both created with
    ``generator=0`` would start from the same random numbers, and the first weights would be proportional to the first
    inputs: an alignment without training.

    Args:
        seed: Generator, which is returned as it is, or integer. None is 0.
        stream: Name of the purpose of the random numbers, e.g. ``"mlp"``.

    Raises:
        InputError: If the generator is not on the CPU, or the seed is of another type.
    """
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise InputError(
                "generator must be on the CPU, so that all devices draw the same numbers, "
                f"got one on {seed.device}. Pass torch.Generator() or an integer."
            )
        return seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InputError(
            f"generator must be a torch.Generator, an integer or None, got {type(seed).__name__}: {seed!r}."
        )
    digest = hashlib.blake2b(f"{stream}:{seed or 0}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
