"""Command ``featlearn spectra``, which analyzes the weight matrices of a file without the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from featlearn._utils.formatting import count, pick_text
from featlearn._utils.weight_formats import weight_files
from featlearn.cli._console import print_files, print_json, print_line, result_console, text_table
from featlearn.cli._errors import handle_errors
from featlearn.cli._output_dir import check_folder, open_page, staged
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from featlearn.spectra import WeightSpectra

_DRAWN = 12
_LINES = 60
_MEANINGS = {
    "random-like": "noise with the same row and column norms, without outliers",
    "invariant bulk": "unchanged since the start",
    "bulk + spikes": "a few eigenvalues have left the bulk: learned directions",
    "heavy tail": "eigenvalues over many orders of magnitude: a power law",
    "rank collapse": "most directions are lost",
    "undecided": "none of these, too few eigenvalues, or explained by norms of rows or columns",
}


def spectra(
    source: Annotated[Path, typer.Argument(help="Weights: safetensors, a PyTorch checkpoint, npz, or a folder.")],
    initial: Annotated[Path | None, typer.Option(help="Weights before training, in the same formats.")] = None,
    layers: Annotated[list[str] | None, typer.Option(help="Glob pattern of matrices; may be repeated.")] = None,
    max_size: Annotated[int | None, typer.Option(help="Omit larger matrices: time grows with the cube.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the table.")] = Path("spectra"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Classify each weight matrix of a file as random-like, spiked, heavy-tailed or collapsed.

    Checkpoints are read without executing code. A folder of a Hugging Face
    model is accepted too. Writes spectra.csv, and index.html with figures
    of the first 12 matrices.

    Examples:
      featlearn spectra model.safetensors
      featlearn spectra trained.pt --initial start.pt --out spectra
      featlearn spectra models/gpt2 --layers "*attn*" --json
    """
    with handle_errors():
        weight_files(source)  # before torch is imported, so that a mistyped name is reported at once
        if initial is not None:
            weight_files(initial, "initial")
        check_folder(out, ("spectra.csv", "index.html"))

        from featlearn.spectra import weight_spectra

        result = weight_spectra(source, layers=layers, initial=initial, max_size=max_size, progress=True)
        if not len(result):
            reasons = [f"{row['parameter']} ({row['reason']})" for _, row in result.skipped.iterrows()]
            raise InputError(f"No weight matrix of {source.name} could be measured: {pick_text(reasons, 3)}.")
        _write(result, out, source.name, initial)
        if as_json:
            rows = result.table("all").reset_index().to_dict(orient="records")
            omitted = _omitted(result).to_dict(orient="records")
            print_json({"matrices": rows, "not_taken": omitted, "page": str(out / "index.html")})
        else:
            _print(result, out)
        if show:
            open_page(out / "index.html")


def _write(result: WeightSpectra, out: Path, name: str, initial: Path | None) -> None:
    from featlearn.reports import Section, write_report

    table = result.table("all")
    drawn = [matrix for matrix in result.values() if matrix.eigenvalues[-1] > 0][:_DRAWN]
    compared = f"compared with {initial.name}" if initial else "compared with noise of the same row and column norms"
    shown = result.table(["shape", "phase", "spikes", "spikes_mp", "alpha", "stable_rank", "effective_rank"])
    shown = shown.assign(spectral_norm=table["spectral_norm"]).astype({"spikes": float})
    shown = shown.rename(columns={"spikes_mp": "beyond MP"}).rename(columns=lambda t: t.replace("_", " "))
    alpha = (
        "spikes: eigenvalues beyond the bulk and beyond noise of the same norms; beyond MP: those beyond the "
        "Marchenko-Pastur law alone; alpha: exponent of the best-fitting power law, even if it does not fit well"
    )
    phases = {phase: meaning for phase, meaning in _MEANINGS.items() if phase in set(table["phase"])}
    part = f" of the first {len(drawn)} of {count(len(result), 'matrix', 'matrices')}"
    figures = {f"{matrix.name}: {matrix.phase.reason}": matrix.plot() for matrix in drawn}
    text = f"Eigenvalues of W^T W{part if len(result) > len(drawn) else ''}."
    sections = [
        Section("Matrices", (f"{_summary(table)}.",), {alpha: shown}, settings=phases),
        Section("Spectra", (text,), figures=figures),
    ]
    if len(omitted := _omitted(result)):
        sections.append(Section("Not measured, or only in part", (), {"": omitted.set_index("parameter")}))
    summary = f"{count(len(result), 'weight matrix', 'weight matrices')}, each {compared}."
    with staged(out) as draft:
        table.to_csv(draft / "spectra.csv")
        write_report(draft / "index.html", f"Spectra of {name}", summary, sections)


def _omitted(result: WeightSpectra) -> pd.DataFrame:
    """Return the tensors that were not measured, without vectors such as biases."""
    skipped = result.skipped[["parameter", "shape", "reason"]]
    return skipped[skipped["shape"].str.contains("x")]


def _summary(table: pd.DataFrame) -> str:
    return ", ".join(f"{number} {phase}" for phase, number in table["phase"].value_counts().items())


def _print(result: WeightSpectra, out: Path) -> None:
    console = result_console()
    table = result.table("all")
    wide = {"matrix": "name", "shape": "left", "phase": "left"}
    rows = []
    for name, row in table.head(_LINES).iterrows():
        alpha = "–" if row["alpha"] != row["alpha"] else f"{row['alpha']:.2f}"
        rows.append((str(name), row["shape"], row["phase"], alpha, row["spikes"], f"{row['stable_rank']:.1f}"))
    console.print(text_table(wide | dict.fromkeys(("alpha", "spikes", "st.rank"), "right"), rows))
    if len(table) > _LINES:
        console.print(f"... and {len(table) - _LINES} more in {out / 'spectra.csv'}", markup=False)
    print_line(console, _summary(table))
    if len(omitted := _omitted(result)):
        example = f"{omitted.iloc[0]['parameter']}: {omitted.iloc[0]['reason']}"
        print_line(console, f"{count(len(omitted), 'tensor')} not measured or only in part, such as {example}")
    console.print()
    figures = f"figures of the first {min(_DRAWN, len(table))} of {len(table)}"
    print_files(console, [(out / "index.html", figures), (out / "spectra.csv", "all columns")])
