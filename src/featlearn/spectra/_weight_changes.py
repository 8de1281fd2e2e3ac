"""Comparison of the weights of two checkpoints, matrix by matrix, and the tensors that were not compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featlearn._utils.formatting import count, pick_text
from featlearn._utils.progress import progress_bar
from featlearn.errors import InputError
from featlearn.spectra._matrix_reading import Found, left_out, out_of_range, select_matrices
from featlearn.spectra._matrix_results import MatrixResults, TensorCoverage
from featlearn.spectra._name_matching import match_names
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra._tensor_matrices import Matrix, find_matrices
from featlearn.spectra._weight_change import Verdict, WeightChange, measure_change
from featlearn.spectra._weight_spectrum import measure_matrix
from featlearn.spectra.tensor_readers import Source, open_source

if TYPE_CHECKING:
    import pandas as pd

_USUAL = (
    "shape",
    "verdict",
    "relative_change",
    "relative_spectral_change",
    "rank",
    "rank_90",
    "rank_99",
    "stable_rank",
    "effective_rank",
    "phase_base",
    "phase_trained",
    "left_angle",
    "right_angle",
    "left_overlap",
    "right_overlap",
    "directions",
    "notes",
)
_SHOWN = ("shape", "verdict", "relative_change", "rank", "rank_90", "phase_base", "phase_trained")
_COUNTS = ("rank", "rank_90", "rank_99", "spikes", "spikes_base", "spikes_trained", "subspace_size")


class WeightChanges(MatrixResults[WeightChange]):
    """Changes of the weights of a model, by name of the matrix: the result of `compare_weights`.

    Attributes:
        tensors: Coverage of each tensor of both checkpoints.
    """

    def __repr__(self) -> str:
        shown = self.table(_SHOWN)
        counts = {name: shown[name].astype("string") for name in ("rank", "rank_90")}
        heading = f"Changes of {count(len(self), 'weight matrix', 'weight matrices')}"
        return self._described(heading, shown.assign(**counts))

    def table(self, columns: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Return a table with one row per matrix.

        ``relative_change`` and ``relative_spectral_change`` are the Frobenius and the spectral norm of the difference
        over those of the base. ``rank`` counts the directions of the difference beyond its own noise; ``rank_90`` and
        ``rank_99`` hold 90% and 99% of its energy; ``stable_rank`` and ``effective_rank`` are of the difference, too.
        ``left_angle`` and ``right_angle`` are the largest principal angles in degrees between the leading
        ``subspace_size`` directions of both weights, ``left_overlap`` and ``right_overlap`` the mean squared cosines of
        the leading directions of the difference with those of the base.

        Args:
            columns: Name of a column, names of several, or ``"all"``. None selects the most important ones.

        Returns:
            The table, indexed by the name of the matrix. Values that cannot be measured are missing.

        Raises:
            InputError: If a column does not exist.
        """
        return self._selected(columns, _USUAL, _COUNTS)


def compare_weights(
    trained: Source,
    base: Source,
    *,
    layers: str | Iterable[str] | None = None,
    min_size: int = 2,
    max_size: int | None = None,
    progress: bool = False,
) -> WeightChanges:
    """Compare the weights of two checkpoints of one model matrix by matrix, such as before and after fine-tuning.

    The difference ``D = A - B`` of a trained weight A and its base B has a verdict:

    - "unchanged": all entries are equal.
    - "equal up to rounding": D is that of rounding to a coarser dtype, such as bfloat16.
    - "rescaled": ``A = c B`` up to rounding.
    - "low-rank": a few directions hold at least 90% of the energy of D, as for LoRA. They are the directions beyond the
      edge of noise with the row and column norms of D (`profile_null`); ``rank`` is their number.
    - "partly low-rank": directions beyond the noise hold at least half of the energy.
    - "full-rank": the change is spread over all directions.
    - "changed": the matrix has fewer than 8 directions, too few to judge the rank.
    - "zeroed", "new" (not in the base), "other shape" and "not comparable" (NaN, infinite).

    The leading k directions of A and B, k being the number of spikes of B or 3 if it has none, are compared by their
    principal angles, and the leading directions of D with those of B: their overlap states whether training acts in old
    directions or in new ones.

    Tensors are matched by name, without the prefixes of wrappers such as ``module.`` and ``model.`` where this is
    unambiguous, and split into matrices as by `weight_spectra`. One tensor of each checkpoint is in memory at a time,
    with their difference and a few copies in float64.

    Unlike ``weight_spectra(trained, initial=...)``, which judges the spectrum of A by that of the random start of
    training, the base can be any checkpoint, and the difference itself is analyzed.

    Args:
        trained: Model, state dict or file of weights, in any of the forms of `weight_spectra`.
        base: Weights to compare with, in any of these forms.
        layers: Glob pattern, or patterns, of the names of matrices to compare. None compares all.
        min_size: Smallest number of eigenvalues of a matrix, at least 1. Smaller matrices are left out.
        max_size: Largest smaller side of a matrix, because time grows with its cube. None has no limit.
        progress: Whether to show a progress bar.

    Returns:
        The changes by name of the matrix, and the coverage of all tensors of both checkpoints.

    Raises:
        InputError: If a source cannot be read, the checkpoints have no matrix of the same name and shape in common, a
            pattern of `layers` matches no matrix, or a size is smaller than 1.

    References:
        Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang & Chen (2022), "LoRA: low-rank adaptation of large language models",
        https://arxiv.org/abs/2106.09685, section 7.

    Example:
        >>> import torch
        >>> from featlearn.spectra import compare_weights
        >>> generator = torch.Generator().manual_seed(0)
        >>> base = {f"{name}.weight": torch.randn(80, 60, generator=generator) for name in "abc"}
        >>> tuned = {name: weight.clone() for name, weight in base.items()}
        >>> tuned["b.weight"] += torch.randn(80, 4, generator=generator) @ torch.randn(4, 60, generator=generator)
        >>> tuned["c.weight"] += 0.1 * torch.randn(80, 60, generator=generator)
        >>> [(name, change.verdict, change.rank) for name, change in compare_weights(tuned, base).items()]
        [('a', 'unchanged', 0.0), ('b', 'low-rank', 4.0), ('c', 'full-rank', 0.0)]
    """
    if min_size < 1 or (max_size is not None and max_size < 1):
        raise InputError(f"min_size and max_size must be at least 1, got {min_size} and {max_size}.")
    tensors, others = find_matrices(open_source(trained, "trained")), open_source(base, "base")
    wanted = select_matrices(tensors, layers, "trained")
    pairs = _pairs([tensor for tensor, _, _ in tensors], others)
    _check_common(tensors, others, pairs)
    changes: dict[str, WeightChange] = {}
    coverage: list[TensorCoverage] = []
    with progress_bar(len(wanted), "changes", progress) as advance:
        for tensor, matrices, unfit in tensors:
            other = pairs.get(tensor.name)
            reasons = [unfit, *(left_out(m, wanted, min_size, max_size) for m in matrices)]
            asked = [m for m, reason in zip(matrices, reasons[1:], strict=True) if not reason]
            taken = _compared(tensor, asked, other) if asked else {}
            changes |= taken
            if not matrices:
                reasons.append(_vector_change(tensor, other))
            reason = "; ".join(dict.fromkeys(filter(None, reasons)))
            coverage += [
                TensorCoverage(part.name, part.shape, part.dtype, tuple(taken), reason, tensor.tied)
                for part in tensor.parts or (tensor,)
            ]
            advance(sum(m.name in wanted for m in matrices))
    coverage += _removed([tensor for tensor, _, _ in tensors], others, pairs)
    return WeightChanges(changes, coverage)


def _pairs(tensors: Sequence[StoredTensor], others: Sequence[StoredTensor]) -> dict[str, StoredTensor]:
    """Return the counterpart of each tensor by name; tied tensors are found by any of their names."""
    known = {name: other for other in others for name in (other.name, *other.tied) if other.dtype}
    names = [name for tensor in tensors if tensor.dtype for name in (tensor.name, *tensor.tied)]
    matched = match_names(names, known)
    result = {}
    for tensor in tensors:
        other = next((matched[name] for name in (tensor.name, *tensor.tied) if name in matched), None)
        if other is not None:
            result[tensor.name] = known[other]
    return result


def _check_common(tensors: Sequence[Found], others: Sequence[StoredTensor], pairs: Mapping[str, StoredTensor]) -> None:
    """Raise InputError if no matrix has the same name and shape in both checkpoints."""
    named = [(tensor, pairs[tensor.name]) for tensor, matrices, _ in tensors if matrices and tensor.name in pairs]
    if any(tensor.shape == other.shape for tensor, other in named):
        return
    if named:
        tensor, other = named[0]
        raise InputError(
            "trained and base must be checkpoints of one model, but no matrix has the same shape in both: "
            f"{tensor.name!r} is {_shape(tensor)} in trained and {_shape(other)} in base."
        )
    ours, theirs = (
        pick_text([repr(t.name[:80]) for t in some if len(t.shape) > 1], 2) or "none"
        for some in ([tensor for tensor, _, _ in tensors], others)
    )
    adapter = any(".lora_" in tensor.name for tensor, _, _ in tensors)
    hint = " trained is a LoRA adapter: merge it into its model first (merge_and_unload of PEFT)." if adapter else ""
    raise InputError(
        "trained and base must be checkpoints of one model, but no matrix has the same name in both: "
        f"trained has {ours}, base has {theirs}.{hint}"
    )


def _compared(tensor: StoredTensor, matrices: Sequence[Matrix], other: StoredTensor | None) -> dict[str, WeightChange]:
    """Return the changes of the matrices of a tensor."""
    read = tensor.read()
    base, verdict, reason = _counterpart(tensor, read, other)
    notes = [tensor.note]
    if other is not None and other.name not in (tensor.name, *tensor.tied):
        notes.append(f"compared with {other.name!r} of the base")
    measurable = base is None and not out_of_range(read)
    result: dict[str, WeightChange] = {}
    for m in matrices:
        known: dict[str, Any] = {
            "notes": tuple(filter(None, (m.note, *notes))),
            "base_parameter": "" if other is None else other.name,
        }
        if base is not None:
            result[m.name] = measure_change(m, tensor.name, m.view(read), m.view(base), **known)
            continue
        if measurable:  # the trained matrix is measured, even though there is nothing to compare it with
            known["trained"] = measure_matrix(m.view(read), m.name, m.kind, tensor.name)
        result[m.name] = WeightChange(m.name, m.shape, verdict, reason, **known)
    return result


def _counterpart(tensor: StoredTensor, read: Tensor, other: StoredTensor | None) -> tuple[Tensor | None, Verdict, str]:
    """Return the tensor of the base, or None with a verdict and its reason."""
    if other is None:
        return None, "new", "the base has no tensor of this name"
    if other.shape != tensor.shape:
        return None, "other shape", f"the tensor is {_shape(tensor)}, and {_shape(other)} in the base"
    if other.reason:
        return None, "not comparable", f"in the base: {other.reason}"
    if problem := out_of_range(read):
        return None, "not comparable", f"{problem} in the trained checkpoint"
    base = other.read()
    if not base.is_floating_point():
        return None, "not comparable", f"dtype {other.dtype} in the base"
    if problem := out_of_range(base):
        return None, "not comparable", f"{problem} in the base"
    return base, "changed", ""


def _vector_change(tensor: StoredTensor, other: StoredTensor | None) -> str:
    """Return how a tensor that is not a matrix has changed; empty if it cannot be compared."""
    if not tensor.dtype or tensor.reason or not tensor.shape:
        return ""
    if other is None:
        return "not in the base"
    if other.shape != tensor.shape:
        return f"{_shape(other)} in the base"
    if other.reason or not other.dtype:
        return ""
    first, second = tensor.read().double(), other.read().double()
    if torch.equal(first, second):
        return "unchanged"
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        return "NaN or infinite entries"
    return f"changed by {_relative(first, second):.2g} of its norm"


def _relative(first: Tensor, second: Tensor) -> float:
    norm = float(second.norm())
    return float((first - second).norm()) / norm if norm else float("inf")


def _removed(
    tensors: Sequence[StoredTensor], others: Sequence[StoredTensor], pairs: Mapping[str, StoredTensor]
) -> list[TensorCoverage]:
    """Return the tensors of the base that were not compared, because they have no counterpart of their own."""
    used = {other.name for other in pairs.values()}
    tied = {name: tensor.name for tensor in tensors for name in tensor.tied}
    result = []
    for other in others:
        if other.name in used or not other.dtype:
            continue
        same = next((tied[name] for name in (other.name, *other.tied) if name in tied), None)
        reason = "only in the base" if same is None else f"in the base only: tied to {same!r} in the trained checkpoint"
        result += [
            TensorCoverage(part.name, part.shape, part.dtype, (), reason, other.tied)
            for part in other.parts or (other,)
        ]
    return result


def _shape(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
