"""Names picked by globs."""

from __future__ import annotations

import pytest

from featlearn._utils.patterns import parse_patterns, pick_values, select_matching
from featlearn.errors import InputError

NAMES = ["net.0", "net.2", "head"]


def test_names_keep_their_own_order() -> None:
    assert select_matching(["head", "net.*"], NAMES, "layers", "layer") == NAMES
    assert select_matching(["*.2"], NAMES, "layers", "layer") == ["net.2"]


def test_the_first_glob_that_matches_decides() -> None:
    assert pick_values({"net.0": 1, "*": 2}, NAMES, "scales", "layer") == {"net.0": 1, "net.2": 2, "head": 2}
    assert pick_values({"head": 1}, NAMES, "scales", "layer") == {"head": 1}


def test_slips() -> None:
    with pytest.raises(InputError, match=r"layers='net\.1' matches no layer; there are 3, for instance net\.[02]"):
        select_matching(["net.*", "net.1"], NAMES, "layers", "layer")
    for bad in (0, [0], None):
        with pytest.raises(InputError, match="layers must be a glob"):
            parse_patterns(bad, "layers")
    with pytest.raises(InputError, match="must contain at least one pattern"):
        parse_patterns([], "layers")
