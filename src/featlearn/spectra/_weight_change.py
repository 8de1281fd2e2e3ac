"""Change of one weight matrix between two checkpoints, with its rank, directions and a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError
from featlearn.linalg.ranks import effective_rank, stable_rank
from featlearn.spectra._compare import histogram, qq
from featlearn.spectra._difference_rank import DifferenceRank, difference_rank
from featlearn.spectra._matrix_reading import out_of_range
from featlearn.spectra._rounding import common_dtype, inner_product, is_multiple, rounded_to, rounding_energy
from featlearn.spectra._subspaces import Subspaces, compare_subspaces
from featlearn.spectra._tensor_matrices import Matrix
from featlearn.spectra._weight_spectrum import WeightSpectrum, measure_matrix
from featlearn.spectra.matrix_norms import relative_norms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

Verdict = Literal[
    "unchanged",
    "equal up to rounding",
    "rescaled",
    "low-rank",
    "partly low-rank",
    "full-rank",
    "changed",
    "zeroed",
    "new",
    "other shape",
    "not comparable",
]

_FEWEST = 8  # directions below which the rank of a change is not judged
_FEW, _MOST_OF, _HALF_OF, _NEARLY_ALL = 0.25, 0.9, 0.5, 0.99  # shares: of directions; of the energy
_CLOSE = 1e-3  # difference of a factor from 1, below which the difference is printed
_TRIMMED, _ROUNDED = 1.1, 1.5  # energy of a rest, over the expected one of rounding
_FACTOR = 0.1  # largest share of the energy of a difference that a factor does not explain
_UNRELATED = 4.0  # cosine of two weights in units of that of independent entries
_DEFAULT, _LARGEST = 3, 16  # leading directions without spikes, and at most
_WIDE = 20.0  # largest eigenvalue over the median, from which on axes are logarithmic


@dataclass(frozen=True, eq=False)
class WeightChange:
    """Change of one weight matrix from B (base) to A (trained). Numbers that cannot be measured are NaN.

    Attributes:
        name: Name of the matrix.
        shape: Shape ``(groups, rows, columns)``.
        verdict: One of "unchanged", "equal up to rounding", "rescaled", "low-rank", "partly low-rank", "full-rank",
            "changed" (too few directions to judge the rank), "zeroed", "new", "other shape" and "not comparable".
        reason: Evidence for the verdict.
        trained: Spectrum of A. None if it could not be measured.
        base: Spectrum of B. None if it is not there, has another shape or could not be measured.
        difference: Spectrum of ``A - B``. None if it is zero, or there is no B.
        relative_change: ``|A - B|_F / |B|_F``; infinite if B is zero and A is not.
        scale: Factor c of the best fit ``A = c B``.
        cosine: Cosine ``<A, B>_F / (|A|_F |B|_F)`` of the entries.
        rank: Number of directions of the difference beyond its own noise, or the number that holds 99% of its energy
            for a low-rank change without such noise.
        rank_share: Share of the energy of the difference in these directions.
        subspaces: Leading directions of A and B and of the difference. None if one of them is zero.
        base_parameter: Name of the tensor in the base.
        notes: Notes on the matrix, such as assumptions about its shape.
    """

    name: str
    shape: tuple[int, int, int]
    verdict: Verdict
    reason: str
    trained: WeightSpectrum | None = field(default=None, repr=False)
    base: WeightSpectrum | None = field(default=None, repr=False)
    difference: WeightSpectrum | None = field(default=None, repr=False)
    relative_change: float = math.nan
    scale: float = math.nan
    cosine: float = math.nan
    rank: float = math.nan
    rank_share: float = math.nan
    subspaces: Subspaces | None = field(default=None, repr=False)
    base_parameter: str = ""
    notes: tuple[str, ...] = ()

    @property
    def relative_spectral_change(self) -> float:
        """Spectral norm of the difference over that of B; infinite if B is zero and A is not."""
        if self.difference is None or self.base is None:
            return 0.0 if self.verdict == "unchanged" else math.nan
        return relative_norms((self.difference.spectral_norm,), (self.base.spectral_norm,))[0]

    @property
    def is_unrelated(self) -> bool:
        """True if the entries of A and B are uncorrelated, as those of two trainings from different starts."""
        groups, rows, columns = self.shape
        enough = groups * min(rows, columns) >= _FEWEST
        return enough and abs(self.cosine) < _UNRELATED / math.sqrt(groups * rows * columns)

    def energy_rank(self, share: float) -> float:
        """Return the smallest number of directions that holds a share of the energy of the difference.

        Args:
            share: Share of the sum of squared entries, between 0 and 1.

        Returns:
            The number of directions; 0 if the matrix has not changed, NaN if it could not be compared.
        """
        if self.difference is None:
            return 0.0 if self.verdict == "unchanged" else math.nan
        falling = np.cumsum(self.difference.eigenvalues[::-1])
        return float(np.searchsorted(falling, share * falling[-1] * (1 - 1e-12)) + 1)

    def numbers(self) -> dict[str, object]:
        """Return all columns of the table as a dict.

        Returns:
            Value of each column by name; NaN if it cannot be measured.
        """
        groups, rows, columns = self.shape
        difference, spaces = self.difference, self.subspaces
        result: dict[str, object] = {
            "shape": f"{rows}x{columns}" if groups == 1 else f"{groups} x {rows}x{columns}",
            "eigenvalues": groups * min(rows, columns),
            "verdict": self.verdict,
            "relative_change": self.relative_change,
            "relative_spectral_change": self.relative_spectral_change,
            "scale": self.scale,
            "cosine": self.cosine,
            "rank": self.rank,
            "rank_share": self.rank_share,
            "rank_90": self.energy_rank(0.9),
            "rank_99": self.energy_rank(0.99),
            "stable_rank": math.nan if difference is None else stable_rank(difference.eigenvalues),
            "effective_rank": math.nan if difference is None else effective_rank(difference.eigenvalues),
            "noise_edge": math.nan if difference is None or difference.null is None else difference.null.edge,
            "spikes": math.nan if difference is None or difference.null is None else len(difference.null.spikes),
        }
        for label, spectrum in (("base", self.base), ("trained", self.trained)):
            known = {} if spectrum is None else spectrum.numbers()
            result[f"phase_{label}"] = known.get("phase", "")
            for quantity in ("alpha", "spikes", "spectral_norm"):
                result[f"{quantity}_{label}"] = known.get(quantity, math.nan)
        return result | {
            "subspace_size": math.nan if spaces is None else spaces.size,
            "subspace_choice": "" if spaces is None else spaces.choice,
            "left_angle": math.nan if spaces is None else spaces.left.largest_angle,
            "right_angle": math.nan if spaces is None else spaces.right.largest_angle,
            "left_overlap": math.nan if spaces is None else spaces.left.overlap,
            "right_overlap": math.nan if spaces is None else spaces.right.overlap,
            "left_chance": math.nan if spaces is None else spaces.left.chance,
            "right_chance": math.nan if spaces is None else spaces.right.chance,
            "directions": "" if spaces is None else spaces.directions,
            "reason": self.reason,
            "parameter": "" if self.trained is None else self.trained.parameter,
            "base_parameter": self.base_parameter,
            "notes": "; ".join(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join([f"{self.name} ({self.numbers()['shape']}): {self.verdict}: {self.reason}", *self.notes])

    def plot(self, title: str | None = None) -> Figure:
        """Draw the spectrum of the difference with the edge of its noise, and the quantiles of both weights.

        Args:
            title: Title of the figure. None uses the name of the matrix and the verdict.

        Returns:
            The figure.

        Raises:
            InputError: If the matrix has not changed, or could not be compared.
        """
        from featlearn.plots import spectrum_histogram

        if self.difference is None or self.base is None or self.trained is None:
            raise InputError(f"The matrix {self.name!r} has no change to draw: {self.verdict}.")
        values = self.difference.eigenvalues
        positive = values[values > 0]
        log = bool(positive[-1] > _WIDE * np.median(values) or self.verdict == "low-rank")
        bins = histogram(values, log=log)
        curve, edges = self.difference.noise_curve()
        spikes = () if self.difference.null is None else [spike.value for spike in self.difference.null.spikes]
        pairs = qq(self.base.eigenvalues, self.trained.eigenvalues)
        return spectrum_histogram(
            (bins.edges, bins.density),
            density=curve,
            edge={"edge of its noise": edges[_NOISE]} if _NOISE in edges else None,
            spikes=spikes,
            qq=(pairs.initial, pairs.trained),
            log=log,
            title=title or f"{self.name}: {self.verdict}",
            xlabel="eigenvalue of the difference",
            labels=("", "difference", "noise"),
            qq_labels=("eigenvalue, base", "eigenvalue, trained"),
        )


_NOISE = "edge of noise with its norms"


def measure_change(
    matrix: Matrix,
    parameter: str,
    trained: Tensor,
    base: Tensor,
    *,
    notes: tuple[str, ...] = (),
    base_parameter: str = "",
) -> WeightChange:
    """Measure the change of a matrix between two checkpoints.

    Args:
        matrix: Matrix of the trained checkpoint.
        parameter: Name of its tensor.
        trained: Weight A, shape ``(groups, h, d)``, finite.
        base: Weight B of the same shape, finite.
        notes: Notes for the report.
        base_parameter: Name of the tensor in the base.

    Returns:
        The change with all its numbers.
    """
    if trained.dtype != base.dtype:
        names = (str(w.dtype).removeprefix("torch.") for w in (base, trained))
        notes = (*notes, f"stored as {' and '.join(names)}")
    wide = common_dtype(trained, base)
    difference = trained.to(wide) - base.to(wide)
    same = not difference.any()
    before = _spectrum(matrix, parameter, base)
    after = before if same else _spectrum(matrix, parameter, trained)
    known = {"trained": after, "base": before, "notes": notes, "base_parameter": base_parameter}
    if same:
        text = "all entries are zero in both" if not before.eigenvalues[-1] > 0 else "all entries are equal"
        return _change(matrix, "unchanged", text, relative_change=0.0, scale=1.0, cosine=1.0, rank=0.0, **known)
    square, changed = inner_product(base, base), inner_product(difference, difference)
    known["relative_change"] = change = relative_norms((math.sqrt(changed),), (math.sqrt(square),))[0]
    if dtype := rounded_to(trained, base):
        text = f"the difference, {change:.2g} of the norm, is that of rounding to {dtype}"
        return _change(matrix, "equal up to rounding", text, scale=1.0, **known)
    if problem := out_of_range(difference):
        return _change(matrix, "not comparable", f"the difference has {problem}", **known)
    product, other = inner_product(trained, base), inner_product(trained, trained)
    known["scale"] = scale = product / square if square else math.nan
    if square and other:
        known["cosine"] = max(-1.0, min(1.0, product / math.sqrt(square) / math.sqrt(other)))
    known["difference"] = spectrum = _spectrum(matrix, parameter, difference)
    rank = DifferenceRank(0, math.nan, False)
    if spectrum.null is not None:
        rank = difference_rank(difference, spectrum.eigenvalues, spectrum.null)
    if min(before.eigenvalues[-1], after.eigenvalues[-1]) > 0:
        size, choice = _subspace_size(before, matrix.eigenvalues)
        leading = min(max(rank.rank, 1), _LARGEST)
        known["subspaces"] = compare_subspaces(trained, base, difference, size, choice, leading)
    elif square:
        return _change(matrix, "zeroed", "all entries of the trained matrix are zero", **known)
    # A difference of the size of rounding is not one by a factor.
    rest = other - 2 * scale * product + scale**2 * square
    if square and rest <= _FACTOR * changed and is_multiple(trained, base, scale):
        more = f"(1 {'+' if scale > 1 else '-'} {abs(scale - 1):.1e})"
        factor = f"{scale:.4g}" if abs(scale - 1) > _CLOSE else more
        text = f"the trained matrix is {factor} times the base, up to rounding"
        return _change(matrix, "rescaled", text, **known)
    result = _change(matrix, "changed", "", rank=float(rank.rank), rank_share=rank.share, **known)
    return _judged(result, rank, trained)


def _change(matrix: Matrix, verdict: Verdict, reason: str, **known: object) -> WeightChange:
    return WeightChange(matrix.name, matrix.shape, verdict, reason, **known)  # type: ignore[arg-type]


def _spectrum(matrix: Matrix, parameter: str, weight: Tensor) -> WeightSpectrum:
    return measure_matrix(weight, matrix.name, matrix.kind, parameter)


def _subspace_size(base: WeightSpectrum, size: int) -> tuple[int, str]:
    """Return the number of leading directions that are compared, and its origin."""
    spikes = 0 if base.null is None else len(base.null.spikes)
    if spikes:
        return min(spikes, _LARGEST), "spikes of the base" if spikes <= _LARGEST else "largest spikes of the base"
    return min(_DEFAULT, size), "default, the base has no spikes"


def _judged(result: WeightChange, rank: DifferenceRank, trained: Tensor) -> WeightChange:
    """Return a change with the verdict on its rank."""
    assert result.difference is not None
    values = result.difference.eigenvalues
    n, r90, r99 = values.size, result.energy_rank(0.9), result.energy_rank(0.99)
    energy = f"90% of the energy is in {r90:.0f} and 99% in {r99:.0f} of {n} directions"
    where = _where(result.subspaces)
    if result.is_unrelated:
        where += f"; the entries of both are uncorrelated (cosine {result.cosine:.2f}), as those of separate trainings"
    if rank.exact:
        text = f"LoRA-like, of rank {rank.rank} of {n} exactly{where}"
        return replace(result, verdict="low-rank", reason=text)
    if n < _FEWEST:
        return replace(result, reason=f"{n} directions are too few to judge the rank of the change")
    # A rounded change of low rank has further directions, which are those of the rounding.
    within, rounding = _rank_up_to_rounding(values, rank.rank, rounding_energy(trained))
    if 0 < within < rank.rank and rank.share >= _MOST_OF:
        rank = DifferenceRank(within, float(values[-within:].sum() / values.sum()), False)
        result = replace(result, rank=float(rank.rank), rank_share=rank.share)
    beyond = f"{rank.rank} of {n} directions beyond the noise of the difference hold {rank.share:.1%} of its energy"
    if rank.rank and (rank.share >= _NEARLY_ALL or (rank.share >= _MOST_OF and rank.rank <= _FEW * n) or rounding):
        also = ", and the rest is rounding" if rounding else ""
        return replace(
            result, verdict="low-rank", reason=f"LoRA-like, of rank about {rank.rank}: {beyond}{also}{where}"
        )
    if r99 <= _FEW * n:
        text = f"of rank about {r99:.0f}: {energy}{where}"
        return replace(result, verdict="low-rank", reason=text, rank=r99, rank_share=0.99)
    if rank.rank and rank.share >= _HALF_OF:
        return replace(result, verdict="partly low-rank", reason=f"{beyond}, the rest is spread: {energy}{where}")
    text = "no direction is beyond the noise of the difference" if not rank.rank else beyond
    return replace(result, verdict="full-rank", reason=f"spread over all directions: {energy}; {text}{where}")


def _rank_up_to_rounding(values: Array, rank: int, rounding: float) -> tuple[int, bool]:
    """Return the number of directions without those that rounding explains, and whether it explains all others.

    Args:
        values: Eigenvalues of the difference, ascending.
        rank: Number of directions beyond the noise.
        rounding: Expected energy of rounding errors.
    """
    rest = np.concatenate([[0.0], np.cumsum(values)])[::-1]  # energy without the largest 0, 1, 2, ... eigenvalues
    fewest = int((rest > _TRIMMED * rounding).sum())
    return min(fewest, rank), bool(rank and rest[rank] <= _ROUNDED * rounding)


def _where(spaces: Subspaces | None) -> str:
    """Return in which directions of the base the change is; empty if unknown."""
    texts = {
        "old": "in old directions, the leading ones of the base",
        "new": "in new directions, not the leading ones of the base",
        "partly old": "partly in the leading directions of the base",
    }
    if spaces is None or not spaces.directions:
        return ""
    overlaps = f"overlap {spaces.left.overlap:.2f} left and {spaces.right.overlap:.2f} right"
    chances = f"by chance {spaces.left.chance:.2f} and {spaces.right.chance:.2f}"
    return f"; {texts[spaces.directions]} ({overlaps}, {chances})"
