"""Comparison of a model and its rows with those of the run that they continue."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, SequentialSampler

from featlearn.capture import map_tensors, preserved_rng, sliceable
from featlearn.errors import FeatlearnError
from featlearn.runs import Run
from featlearn.training._probe_data import ProbeRows

Weights = dict[str, list[float]]
"""By parameter: precision of its dtype, norm, and projections on random signs."""

_CHUNK = 65_536
_PROJECTIONS = 8
_NEW = 1.2  # distance from the initial weights over their norm, above which they are those of another model
_LEAST_TOLERANCE = 1e-5  # relative; sums of other devices differ by less
_SAMPLED = 4096  # entries of each tensor of a batch that are hashed
_LOOKS = 8  # at a row: a random flip is missed once in 128 times
_NOTED, _SHOWN = "weights", 3


def weights_record(tensors: Mapping[str, Any]) -> Weights:
    """Return norms and random projections of floating-point tensors, which identify weights in little space.

    Time: one pass over the weights. Memory: half a megabyte for a part of a tensor.

    Args:
        tensors: Parameters by name. Prefixes of wrappers (``module.``, ``_orig_mod.``) are removed.
    """
    result: Weights = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedParameter):
            continue
        flat = tensor.detach()
        if not flat.dtype.is_floating_point and not flat.is_complex():
            continue
        eps = torch.finfo(flat.dtype).eps
        flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
        flat = flat.cpu() if flat.device.type == "mps" else flat  # without float64
        signs = _signs(flat.device)
        sums = torch.zeros(_PROJECTIONS + 1, dtype=torch.float64, device=flat.device)
        for number, part in enumerate(torch.split(flat, _CHUNK)):
            values = part.double()
            sums[0] += values.dot(values)
            # Other signs in each part, so that parts cannot change places.
            sums[1:] += (values @ signs[: len(part)]).roll(number) * (-1) ** (number // _PROJECTIONS)
        square, *projections = sums.tolist()
        result[plain_name(name)] = [eps, math.sqrt(square), *projections]
    return result


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


@cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (_CHUNK, _PROJECTIONS), generator=generator).mul(2).sub(1).double().to(device)


def rows_mark(data: Any, rows: ProbeRows) -> str | None:
    """Return a hash of the rows that a monitor measures on; None if they are random.

    Args:
        data: Data of the monitor. The rows of a loader that shuffles, or augments at random, differ at each launch.
        rows: Rows that were kept of it.
    """
    fixed = sliceable(data) or isinstance(data, list | tuple | Mapping)
    if not fixed and not (isinstance(data, DataLoader) and isinstance(data.sampler, SequentialSampler)):
        return None
    if isinstance(data, DataLoader) and _is_random(data):
        return None
    digest = hashlib.blake2b(digest_size=8)

    def add(tensor: Tensor) -> None:
        digest.update(str(tuple(tensor.shape)).encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().resolve_conj().resolve_neg()
        digest.update(str(sample.tolist()).encode())

    for raw in rows.batches:
        map_tensors(raw, add)
    return f"{rows.samples} rows, {digest.hexdigest()}"


def _is_random(loader: DataLoader[Any]) -> bool:
    """Return whether the first row of a loader is another one each time, as with random augmentation."""
    looks: list[list[Tensor]] = []
    with preserved_rng():
        for _ in range(_LOOKS):
            looks.append([])
            try:
                map_tensors(loader.dataset[0], looks[-1].append)
            except Exception:  # a data set can raise anything, and may have no rows by number
                return False
    return any(
        len(look) != len(looks[0]) or not all(torch.equal(a, b) for a, b in zip(look, looks[0], strict=True))
        for look in looks[1:]
    )


def note_weights(run: Run, model: nn.Module, *, closed: bool) -> None:
    """Store the record of the weights of a model in a run.

    Args:
        run: Run that is open for writing.
        model: Model that is trained.
        closed: Whether the training has ended properly with these weights.
    """
    step = run.last_step
    if step is not None:
        record = {"step": step, "closed": closed, "weights": weights_record(dict(model.named_parameters()))}
        run.save_note(_NOTED, record)


class Continuation:
    """Comparison of a model with the run that it continues: last weights, last checkpoint and initial weights.

    Args:
        run: Run with steps of an earlier process, open for writing.
        model: Model that continues it.
        mark: Hash of the rows, of `rows_mark`.
    """

    def __init__(self, run: Run, model: nn.Module, mark: str | None) -> None:
        self._path, self._model, self._last = run.path, model, run.next_step - 1
        self._names = [plain_name(name) for name, _ in model.named_parameters()]
        noted, self._start = run.note(_NOTED), run.initial()
        references = [(noted["step"], "at the end", noted["weights"])] if isinstance(noted, dict) else []
        self._closed = isinstance(noted, dict) and bool(noted["closed"]) and noted["step"] == self._last
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                stored = Run.open(run.path).checkpoint()  # for reading: nothing is logged again because of it
            except FeatlearnError:  # all are damaged; a training that loads one raises
                stored = None
        self._checkpoint = None if stored is None else stored[0]
        if stored is not None and (inside := next(self._models_in(stored[1]), None)) is not None:
            references.append((stored[0], "in the checkpoint", weights_record(inside)))
        self._references: list[tuple[int, str, Weights]] = sorted(references, key=lambda reference: reference[0])
        self._initial = {} if self._start is None else weights_record(self._start)
        before = run.note("rows")
        self._rows = ""
        if before is not None and mark is not None and before != mark:
            self._rows = f"the measured rows differ ({before} before, {mark} now)"
        self._created = weights_record(dict(model.named_parameters()))
        self._agreed = not self._differing(self._last + 1, self._created)

    def message(self, step: int) -> str:
        """Return a sentence that says what differs, or an empty string.

        The weights may have been loaded before the monitor was created or after it; either is enough.

        Args:
            step: First step that is recorded.
        """
        weights = self._differing(step, weights_record(dict(self._model.named_parameters())))
        if not self._is_initial():
            agreed = self._agreed if step >= self._last else not self._differing(step, self._created)
            weights = "" if agreed else weights
        reasons = "; ".join(reason for reason in (weights, self._rows) if reason)
        if not reasons:
            return ""
        return (
            f"This training does not continue the run in {str(self._path)!r}, which has steps up to {self._last}: "
            f"{reasons} (load the weights of the run before training, or omit resume=True to start a new run)"
        )

    def _differing(self, step: int, now: Weights) -> str:
        if self._is_initial():
            moved = [ref for *_, ref in self._references if _differing(ref, self._initial, 1e-12)]
            # A restart at step 0 begins a segment, which is reported.
            if self._last > 0 and step > 0 and (moved or not self._references):
                return "the model has the initial weights, as at step 0"
            return ""
        if step < self._last:  # of an earlier state, of which only a checkpoint can be known
            return "".join(self._described(now, *ref) for ref in self._references if ref[0] == step == self._checkpoint)
        if not self._references or any(not _differing(now, ref) for *_, ref in self._references):
            return ""
        at, where, last = self._references[-1]
        if self._closed or (at >= self._last and at == self._checkpoint):
            return self._described(now, at, where, last)
        # The run was killed after these weights. Those of its end are not as far from them as a new model is.
        if not self._initial:
            return ""
        limit = (1 + (self._last - at + 1) / max(at, 1)) ** 2 * _distance(self._initial, last)
        if not _differing(self._initial, last):  # the record is that of the start: a new model is sqrt(2) norms away
            limit = _NEW * _size(last)
        if _distance(now, last) > limit:
            return self._described(now, at, "in the record", last)
        return ""

    def _described(self, now: Weights, step: int, where: str, then: Weights) -> str:
        differing = _differing(now, then)
        if not differing:
            return ""
        shapes = {plain_name(name): tuple(p.shape) for name, p in self._model.named_parameters()}
        shown = [f"{name} {shapes[name]} by {share:.2g} of its norm" for name, share in differing[:_SHOWN]]
        more = [f"{len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
        return f"the weights differ from those {where} of step {step} ({', '.join([*shown, *more])})"

    def _is_initial(self) -> bool:
        if self._start is None:
            return False
        start = {plain_name(name): value for name, value in self._start.items()}
        pairs = [(p.detach().cpu(), start.get(plain_name(name))) for name, p in self._model.named_parameters()]
        return bool(pairs) and all(
            isinstance(before, Tensor) and torch.equal(before.cpu().to(now.dtype), now) for now, before in pairs
        )

    def _models_in(self, state: Any) -> Iterator[dict[str, Tensor]]:
        """Yield the mappings in a state that have all parameters of the model."""
        if isinstance(state, Mapping):
            tensors = {plain_name(str(name)): value for name, value in state.items() if isinstance(value, Tensor)}
            if tensors and tensors.keys() >= set(self._names):
                yield {name: tensors[name] for name in self._names}
            for inner in state.values():
                yield from self._models_in(inner)


def _differing(now: Weights, then: Weights, least: float | None = None) -> list[tuple[str, float]]:
    """Return the parameters that differ by more than the precision of their dtypes, and by which share of the norm."""
    result = []
    for name in now:
        if name not in then:
            continue
        (eps, norm, *ours), (other, size, *theirs) = now[name], then[name]
        tolerance = max(8 * eps, 8 * other, _LEAST_TOLERANCE) if least is None else least
        gaps = [abs(norm - size), *(abs(a - b) for a, b in zip(ours, theirs, strict=True))]
        both_nan = math.isnan(norm) and math.isnan(size)
        if not both_nan and not max(gaps) <= tolerance * max(norm, size):
            gap = math.sqrt(sum(gap**2 for gap in gaps[1:]) / len(gaps[1:]))
            result.append((name, gap / max(norm, size, 1e-300)))
    return result


def _size(weights: Weights) -> float:
    """Return the norm of all weights."""
    return math.sqrt(sum(norm**2 for _, norm, *_ in weights.values()))


def _distance(a: Weights, b: Weights) -> float:
    """Return an estimate of the distance of weights, over all parameters."""
    squares = [(x - y) ** 2 for name in a.keys() & b.keys() for x, y in zip(a[name][2:], b[name][2:], strict=True)]
    return math.sqrt(sum(squares) / _PROJECTIONS)
