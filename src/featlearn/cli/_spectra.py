"""``featlearn spectra``: the weights of a file, without the model that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._console import print_files, print_json, result_console, text_table
from featlearn.cli._errors import handle_errors
from featlearn.cli._output_dir import check_folder, open_page, staged
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from featlearn.spectra import WeightSpectra

_DRAWN = 12
_LINES = 60
_MEANINGS = {
    "random-like": "a Marchenko-Pastur bulk and nothing beyond it",
    "invariant bulk": "as at the start",
    "bulk + spikes": "a few eigenvalues have left the bulk: directions that were learned",
    "heavy tail": "eigenvalues over many orders: a power law",
    "rank collapse": "most directions are gone",
    "undecided": "none of these, too few eigenvalues to tell, or norms of rows or columns explain it",
}


def spectra(
    source: Annotated[Path, typer.Argument(help="Weights: .safetensors, .pt, .pth, .bin, .ckpt, or a folder.")],
    initial: Annotated[Path | None, typer.Option(help="The weights before training, in the same forms.")] = None,
    layers: Annotated[list[str] | None, typer.Option(help="Only matrices that match a glob; may be repeated.")] = None,
    max_size: Annotated[int | None, typer.Option(help="Leave larger matrices out: time grows with the cube.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the table.")] = Path("spectra"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON instead.")] = False,
) -> None:
    """Say of every weight matrix of a file whether it is random, has learned, or has a heavy tail.

    A checkpoint is read as tensors alone, and nothing in it is executed.
    Folders of Hugging Face models are taken as they are. Writes spectra.csv,
    and index.html with the pictures of the first 12 matrices.

    Examples:
      featlearn spectra model.safetensors
      featlearn spectra trained.pt --initial start.pt --out spectra
      featlearn spectra models/gpt2 --layers "*attn*" --json
    """
    with handle_errors():
        from featlearn.spectra import weight_spectra

        check_folder(out, ("spectra.csv", "index.html"))
        found = weight_spectra(source, layers=layers, initial=initial, max_size=max_size, progress=True)
        if not len(found):
            reasons = [f"{row['parameter']} ({row['reason']})" for _, row in found.skipped.iterrows()]
            raise InputError(f"no weight matrix of {source.name} could be measured: {pick_text(reasons, 3)}")
        _write(found, out, source.name, initial)
        if as_json:
            print_json(_numbers(found, out))
        else:
            _print(found, out)
        if show:
            open_page(out / "index.html")


def _write(found: WeightSpectra, out: Path, name: str, initial: Path | None) -> None:
    from featlearn.reports import Section, write_report

    table = found.table("all")
    drawn = [one for one in found.values() if one.eigenvalues[-1] > 0][:_DRAWN]
    compared = f"compared with {initial.name}" if initial else "compared with the Marchenko-Pastur law of its bulk"
    shown = found.table(["shape", "phase", "spikes", "alpha", "stable_rank", "effective_rank", "spectral_norm"])
    shown = shown.rename(columns=lambda title: title.replace("_", " ")).astype({"spikes": float})
    names = [phase for phase in _MEANINGS if phase in set(table["phase"])]
    sections = [
        Section(
            "Matrices",
            (f"{_summary(table)}.",),
            {"alpha: exponent of the power law that fits the tail best, whether or not it fits well": shown},
            settings={phase: _MEANINGS[phase] for phase in names},
        ),
        Section(
            "Spectra",
            (f"Eigenvalues of W^T W of the first {len(drawn)} of {count(len(found), 'matrix', 'matrices')}.",)
            if len(found) > len(drawn)
            else ("Eigenvalues of W^T W.",),
            figures={f"{one.name}: {one.phase.reason}": one.plot() for one in drawn},
        ),
    ]
    left = _left_out(found)
    if len(left):
        sections.append(Section("Not taken, or only in part", (), {"": left.set_index("parameter")}))
    with staged(out) as draft:
        table.to_csv(draft / "spectra.csv")
        write_report(
            draft / "index.html",
            f"Spectra of {name}",
            f"{count(len(found), 'weight matrix', 'weight matrices')}, each {compared}.",
            sections,
        )


def _left_out(found: WeightSpectra) -> pd.DataFrame:
    """Tensors that were not taken, without vectors: that a bias is no matrix goes without saying."""
    skipped = found.skipped[["parameter", "shape", "reason"]]
    return skipped[skipped["shape"].str.contains("x")]


def _summary(table: pd.DataFrame) -> str:
    counts = table["phase"].value_counts()
    return ", ".join(f"{number} {phase}" for phase, number in counts.items())


def _numbers(found: WeightSpectra, out: Path) -> dict[str, Any]:
    rows = found.table("all").reset_index().to_dict(orient="records")
    return {"matrices": rows, "not_taken": _left_out(found).to_dict(orient="records"), "page": str(out / "index.html")}


def _print(found: WeightSpectra, out: Path) -> None:
    console = result_console()
    table = found.table("all")
    wide = {"matrix": "name", "shape": "left", "phase": "left"}
    rows = [
        (
            str(name),
            row["shape"],
            row["phase"],
            "–" if row["alpha"] != row["alpha"] else f"{row['alpha']:.2f}",
            row["spikes"],
            f"{row['stable_rank']:.1f}",
        )
        for name, row in table.head(_LINES).iterrows()
    ]
    console.print(text_table(wide | dict.fromkeys(("alpha", "spikes", "st.rank"), "right"), rows))
    if len(table) > _LINES:
        console.print(f"... and {len(table) - _LINES} more in {out / 'spectra.csv'}", markup=False)
    console.print(f"{_summary(table)}", markup=False, soft_wrap=True)
    left = _left_out(found)
    if len(left):
        first = left.iloc[0]
        console.print(
            f"{count(len(left), 'tensor')} not taken or in part, such as {first['parameter']}: {first['reason']}",
            markup=False,
            soft_wrap=True,
        )
    console.print()
    print_files(
        console,
        [
            (out / "index.html", f"pictures of the first {min(_DRAWN, len(table))} of {len(table)}"),
            (out / "spectra.csv", "all columns"),
        ],
    )
