"""Page and table of ``featlearn spectra``: a map of all matrices, and figures of the most notable ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn._utils.formatting import count
from featlearn.cli._console import print_files, print_line, result_console, text_table
from featlearn.cli._output_dir import staged

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

    from featlearn.spectra import WeightSpectra, WeightSpectrum

LINES = 60
"""Rows of a table that are printed to the terminal."""

PHASE_COLORS = {
    "random-like": "#BFD7EA",
    "invariant bulk": "#BFD7EA",
    "bulk + spikes": "#F4B393",
    "heavy tail": "#F7E0A3",
    "rank collapse": "#E8A0B4",
    "undecided": "#DADADA",
}
_MEANINGS = {
    "random-like": "noise with the same row and column norms, without outliers",
    "invariant bulk": "unchanged since the start",
    "bulk + spikes": "a few eigenvalues have left the bulk: learned directions",
    "heavy tail": "eigenvalues over many orders of magnitude: a power law",
    "rank collapse": "most directions are lost",
    "undecided": "none of these, too few eigenvalues, or explained by norms of rows or columns",
}
_ORDER = ("rank collapse", "heavy tail", "bulk + spikes", "undecided", "random-like", "invariant bulk")


def write_spectra(result: WeightSpectra, out: Path, name: str, initial: Path | None, figures: int) -> None:
    """Write the page and the table of the spectra of a file.

    Args:
        result: Spectra of all matrices.
        out: Folder to write to.
        name: Name of the file.
        initial: File of the initial weights; None if there is none.
        figures: Number of matrices to draw.
    """
    from featlearn.reports import Section, write_report

    table = result.table("all")
    compared = f"compared with {initial.name}" if initial else "compared with noise of the same row and column norms"
    shown = result.table(["shape", "phase", "spikes", "spikes_mp", "alpha", "stable_rank", "effective_rank"])
    shown = shown.assign(spectral_norm=table["spectral_norm"]).astype({"spikes": float})
    shown = shown.rename(columns={"spikes_mp": "beyond MP"}).rename(columns=lambda t: t.replace("_", " "))
    alpha = (
        "spikes: eigenvalues beyond the bulk and beyond noise of the same norms; beyond MP: those beyond the "
        "Marchenko-Pastur law alone; alpha: exponent of the best-fitting power law, even if it does not fit well"
    )
    phases = {phase: meaning for phase, meaning in _MEANINGS.items() if phase in set(table["phase"])}
    drawn = notable(result, figures)
    sections = [
        Section(
            "Layer map",
            (f"{summary(table['phase'])}.",),
            figures={"One row per matrix in the order of the file. Pale is the least of a column, dark the largest; "
                     "ranks are shares of the number of eigenvalues, and the distance from noise is that of the bulk "
                     "from noise with the same row and column norms.": spectra_map(result, table)},
            settings=phases,
        ),
        Section("Matrices", (), {alpha: shown}),
    ]  # fmt: skip
    if drawn:
        captions = {f"{m.name}: {m.phase_name}: {m.phase.reason}": m.plot(explain=False) for m in drawn}
        sections.append(Section("Spectra", (f"Eigenvalues of W^T W. {_chosen(drawn, result)}",), figures=captions))
    if len(skipped := omitted(result)):
        sections.append(Section("Not measured, or only in part", (), {"": skipped.set_index("parameter")}))
    lead = f"{count(len(result), 'weight matrix', 'weight matrices')}, each {compared}."
    with staged(out) as draft:
        table.to_csv(draft / "spectra.csv")
        write_report(draft / "index.html", f"Spectra of {name}", lead, sections)


def notable(result: WeightSpectra, most: int) -> list[WeightSpectrum]:
    """Return the matrices that are drawn: those of the rarest phases, and the farthest beyond noise, first.

    Args:
        result: Spectra of all matrices.
        most: Number of matrices at most. Zero matrices are left out.
    """

    def rank(matrix: WeightSpectrum) -> tuple[int, float]:
        limit = matrix.eigenvalues[-1] if matrix.null is None else matrix.null.limit
        return _ORDER.index(matrix.phase_name), -float(matrix.eigenvalues[-1] / limit)

    return sorted((m for m in result.values() if m.eigenvalues[-1] > 0), key=rank)[:most]


def _chosen(drawn: Sequence[WeightSpectrum], result: WeightSpectra) -> str:
    """Return which matrices are drawn, and why."""
    if len(drawn) == len(result):
        return "Collapses, heavy tails and spikes come first."
    every, taken = (Counter(m.phase_name for m in some) for some in (result.values(), drawn))
    parts = [f"{taken[p]} of {every[p]} {p}" for p in _ORDER if taken[p]]
    return (
        f"{len(drawn)} of {count(len(result), 'matrix', 'matrices')} are drawn: collapses, heavy tails and spikes "
        "first, and of each phase those whose largest eigenvalue is farthest beyond the edge of noise "
        f"({', '.join(parts)}). The option --figures draws more."
    )


def spectra_map(result: WeightSpectra, table: pd.DataFrame) -> Figure:
    """Draw the layer map of all spectra.

    Args:
        result: Spectra of all matrices.
        table: Table of all columns.
    """
    from featlearn.plots import layer_map

    columns: dict[str, Any] = {
        "phase": table["phase"],
        "spikes": table["spikes"],
        "alpha": table["alpha"],
        "stable rank / size": table["stable_rank"] / table["eigenvalues"],
        "effective rank / size": table["effective_rank"] / table["eigenvalues"],
        "spectral norm": table["spectral_norm"],
        "distance from noise": [matrix.noise_distance for matrix in result.values()],
    }
    return layer_map(list(result), columns, colors=PHASE_COLORS)


def omitted(result: WeightSpectra) -> pd.DataFrame:
    """Return the tensors that were not measured, without vectors such as biases."""
    skipped = result.skipped[["parameter", "shape", "reason"]]
    return skipped[skipped["shape"].str.contains("x")]


def summary(texts: pd.Series[str]) -> str:
    """Return how often each text occurs, the most frequent first."""
    return ", ".join(f"{number} {text}" for text, number in texts.value_counts().items())


def print_spectra(result: WeightSpectra, out: Path, figures: int) -> None:
    """Print the table of the spectra of a file.

    Args:
        result: Spectra of all matrices.
        out: Folder of the page.
        figures: Number of matrices on the page at most.
    """
    console = result_console()
    table = result.table("all")
    wide = {"matrix": "name", "shape": "left", "phase": "left"}
    rows = []
    for name, row in table.head(LINES).iterrows():
        alpha = "–" if row["alpha"] != row["alpha"] else f"{row['alpha']:.2f}"
        rows.append((str(name), row["shape"], row["phase"], alpha, row["spikes"], f"{row['stable_rank']:.1f}"))
    console.print(text_table(wide | dict.fromkeys(("alpha", "spikes", "st.rank"), "right"), rows))
    print_summary(console, table["phase"], out / "spectra.csv")
    if len(skipped := omitted(result)):
        example = f"{skipped.iloc[0]['parameter']}: {skipped.iloc[0]['reason']}"
        print_line(console, f"{count(len(skipped), 'tensor')} not measured or only in part, such as {example}")
    console.print()
    print_page(console, out / "spectra.csv", len(notable(result, figures)), len(table))


def print_summary(console: Console, verdicts: pd.Series[str], file: Path) -> None:
    """Print how often each verdict occurs, and where the rows are that were not printed.

    Args:
        console: Console of results.
        verdicts: Verdict on each matrix.
        file: File of all rows.
    """
    if len(verdicts) > LINES:
        console.print(f"... and {len(verdicts) - LINES} more in {file}", markup=False)
    print_line(console, summary(verdicts))


def print_page(console: Console, file: Path, drawn: int, total: int) -> None:
    """Print the files that were written.

    Args:
        console: Console of results.
        file: File of all rows, beside the page.
        drawn: Number of matrices with a figure.
        total: Number of matrices.
    """
    text = f"layer map, figures of {drawn} of {total}" if drawn else "layer map"
    print_files(console, [(file.parent / "index.html", text), (file, "all columns")])
