"""Matching of the tensor names of two checkpoints of one model that was wrapped in different ways."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

_WRAPPERS = ("module", "_orig_mod", "_forward_module", "model", "base_model", "net", "network", "state_dict")
_DEPTH = 3  # components of a prefix that only one of two checkpoints has


def match_names(names: Sequence[str], others: Collection[str]) -> dict[str, str]:
    """Match the names of tensors with those of another checkpoint.

    1. Equal names match.
    2. Of the others, names match that are equal without the prefixes of wrappers, such as ``module.`` and ``model.``,
       and with underscores instead of spaces and dashes, if each has one counterpart only.
    3. If there is no match yet, that prefix of up to three components is removed from one side, or added to it, which
       gives the most matches.

    Args:
        names: Names of the tensors.
        others: Names of the tensors of the other checkpoint.

    Returns:
        Name in the other checkpoint by name, without those that have no counterpart.

    Example:
        >>> match_names(["module.net.0.weight", "head.weight"], ["net.0.weight", "other.weight"])
        {'module.net.0.weight': 'net.0.weight'}
        >>> match_names(["h.0.weight", "h.1.weight"], ["transformer.h.0.weight", "transformer.h.1.weight"])
        {'h.0.weight': 'transformer.h.0.weight', 'h.1.weight': 'transformer.h.1.weight'}
    """
    known = set(others)
    result = {name: name for name in names if name in known}
    rest, free = [name for name in names if name not in result], known - set(result)
    ours, theirs = _by_core(rest), _by_core(free)
    for core, (name, *more) in ours.items():
        counterparts = theirs.get(core, [])
        if not more and len(counterparts) == 1:
            result[name] = counterparts[0]
    if not result:
        result = _by_prefix(names, known)
    return {name: result[name] for name in names if name in result}


def _by_core(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by what is left without the prefixes of wrappers, spaces and dashes."""
    result: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in _WRAPPERS:
            parts = parts[1:]
        result.setdefault(re.sub(r"[^\w.]", "_", ".".join(parts)), []).append(name)
    return result


def _by_prefix(names: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return the matches by the one prefix, of either side, that gives the most; none if two prefixes give as many."""
    here, there = set(names), set(known)
    counts: Counter[tuple[bool, str]] = Counter()
    for added, some, other in ((True, there, here), (False, here, there)):
        for name in some:
            parts = name.split(".")
            for depth in range(1, min(_DEPTH, len(parts) - 1) + 1):
                if ".".join(parts[depth:]) in other:
                    counts[added, ".".join(parts[:depth]) + "."] += 1
    best = counts.most_common(2)
    if not best or (len(best) > 1 and best[0][1] == best[1][1]):
        return {}
    (added, prefix), _ = best[0]
    if added:
        return {name: prefix + name for name in names if prefix + name in there}
    return {
        name: name.removeprefix(prefix) for name in names if name.startswith(prefix) and name[len(prefix) :] in there
    }
