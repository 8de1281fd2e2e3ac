"""One rule for seeds: explicit generators, never the global one."""

from __future__ import annotations

import hashlib

import torch

from featlearn.errors import InputError

Seed = torch.Generator | int | None
"""What a random function takes: a generator is used and advanced, an integer or None (0) makes a new one."""


def as_generator(seed: Seed, stream: str) -> torch.Generator:
    """A CPU generator from a generator (returned as it is), an integer, or None (the integer 0).

    An integer is mixed with the name of the stream. Without that, a network and a data set both made with
    ``generator=0`` would start from the same random numbers, so that the first weights would be the first
    inputs up to a factor: an alignment that no training has made.

    Args:
        seed: Generator, integer, or None.
        stream: What the numbers are for, e.g. ``"mlp"``.
    """
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise InputError(
                f"the generator must be on the CPU, so that every device draws the same numbers; "
                f"it is on {seed.device}: pass torch.Generator() or an integer"
            )
        return seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InputError(
            f"generator must be a torch.Generator, an integer or None, got {type(seed).__name__}: {seed!r}"
        )
    digest = hashlib.blake2b(f"{stream}:{seed or 0}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
