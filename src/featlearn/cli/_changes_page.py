"""Page and table of ``featlearn spectra --against``: the changes of all matrices between two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn._utils.formatting import count, short_number
from featlearn.cli._console import print_line, result_console, text_table
from featlearn.cli._output_dir import staged
from featlearn.cli._spectra_page import LINES, print_page, print_summary, summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from featlearn.spectra import WeightChange, WeightChanges

_COLORS = {
    "unchanged": "#EFEFEF",
    "equal up to rounding": "#DCE6EE",
    "rescaled": "#B9DDB0",
    "low-rank": "#F4B393",
    "partly low-rank": "#F7E0A3",
    "full-rank": "#BFD7EA",
    "changed": "#CFCFCF",
    "zeroed": "#E8A0B4",
    "new": "#D6C2E0",
    "other shape": "#C9B3D9",
    "not comparable": "#E3B7B7",
}
_MEANINGS = {
    "unchanged": "all entries are equal",
    "equal up to rounding": "the difference is that of rounding to a coarser dtype",
    "rescaled": "a multiple of the base",
    "low-rank": "a few directions hold nearly all of the change, as for LoRA",
    "partly low-rank": "directions beyond the noise of the change hold at least half of it, the rest is spread",
    "full-rank": "spread over all directions",
    "changed": "too few directions to judge the rank of the change",
    "zeroed": "all entries are zero now",
    "new": "not in the base",
    "other shape": "another shape in the base",
    "not comparable": "NaN, infinite or quantized entries",
}
_MAP = (
    "One row per matrix in the order of the file. Pale is the least of a column, dark the largest. Ranks are shares of "
    "the number of directions; the angle is the largest principal angle in degrees between the leading singular "
    "directions of both matrices, as many as the base has spikes, or 3; the overlap is the mean squared cosine of the "
    "leading directions of the difference with those of the base. Angle and overlap are the larger ones of both sides."
)
_CAPTION = (
    "change: Frobenius norm of the difference over that of the base; rank: directions of the difference beyond its own "
    "noise; 90 / 99%: directions that hold this share of its energy; directions: whether the leading directions of the "
    "difference are among those of the base (old) or not (new); spectrum and alpha: phase and exponent before and after"
)


def write_changes(result: WeightChanges, out: Path, name: str, base: str, figures: int) -> None:
    """Write the page and the table of the changes between two files.

    Args:
        result: Changes of all matrices.
        out: Folder to write to.
        name: Name of the trained file.
        base: Name of the base.
        figures: Number of matrices to draw.
    """
    from featlearn.reports import Section, write_report

    table = result.table("all")
    shown = table[["shape", "verdict", "relative_change", "rank"]].astype({"rank": float})
    ranks = table[["rank_90", "rank_99"]].astype("string").fillna("–")
    shown = shown.rename(columns={"relative_change": "change"}).assign(
        **{"90 / 99%": ranks["rank_90"] + " / " + ranks["rank_99"]},
        directions=table["directions"],
        spectrum=[_phases(row) for _, row in table.iterrows()],
        alpha=_pairs(table, "alpha"),
    )
    verdicts = {verdict: text for verdict, text in _MEANINGS.items() if verdict in set(table["verdict"])}
    drawn = _most_changed(result, figures)
    sections = [
        Section(
            "Layer map",
            tuple(filter(None, (f"{summary(table['verdict'])}.", _unrelated(result)))),
            figures={_MAP: changes_map(table)},
            settings=verdicts,
        ),
        Section("Changes", (), {_CAPTION: shown}),
    ]
    if drawn:
        possible = sum(change.difference is not None for change in result.values())
        part = (
            f"The {len(drawn)} of {possible} matrices with the largest relative change. "
            if len(drawn) < possible
            else ""
        )
        text = (
            f"{part}Left: eigenvalues of D^T D for the difference D, with the noise of its row and column norms. "
            "Right: eigenvalues of the trained matrix against those of the base; unchanged ones are on the diagonal."
        )
        captions = {f"{c.name}: {c.verdict}: {c.reason}": c.plot() for c in drawn}
        sections.append(Section("Largest changes", (text,), figures=captions))
    if len(skipped := result.skipped):
        listed = skipped[["parameter", "shape", "reason"]].set_index("parameter")
        sections.append(Section("Not compared as matrices", (), {"": listed}))
    lead = f"{count(len(result), 'weight matrix', 'weight matrices')} of {name}, each compared with {base}."
    with staged(out) as draft:
        table.to_csv(draft / "changes.csv")
        write_report(draft / "index.html", f"Changes from {base} to {name}", lead, sections)


def changes_map(table: pd.DataFrame) -> Figure:
    """Draw the layer map of all changes.

    Args:
        table: Table of all columns.
    """
    from featlearn.plots import layer_map

    columns: dict[str, Any] = {
        "verdict": table["verdict"],
        "relative change": table["relative_change"],
        "rank beyond noise": table["rank"],
        "90% rank / size": table["rank_90"].astype(float) / table["eigenvalues"],
        "effective rank / size": table["effective_rank"] / table["eigenvalues"],
        "angle of leading": table[["left_angle", "right_angle"]].max(axis=1).round(3),
        "overlap with base": table[["left_overlap", "right_overlap"]].max(axis=1),
    }
    return layer_map(list(table.index), columns, colors=_COLORS)


def print_changes(result: WeightChanges, out: Path, figures: int) -> None:
    """Print the table of the changes between two files.

    Args:
        result: Changes of all matrices.
        out: Folder of the page.
        figures: Number of matrices on the page at most.
    """
    console = result_console()
    table = result.table("all")
    columns = {"matrix": "name", "shape": "left", "verdict": "left"} | dict.fromkeys(("change", "rank", "90%"), "right")
    rows = [
        (str(name), row["shape"], row["verdict"], row["relative_change"], row["rank"], row["rank_90"])
        for name, row in table.head(LINES).iterrows()
    ]
    console.print(text_table(columns, rows))
    print_summary(console, table["verdict"], out / "changes.csv")
    if text := _unrelated(result):
        print_line(console, text)
    moved = [f"{name}: {_phases(row)}" for name, row in table.iterrows() if " → " in _phases(row)]
    if moved:
        print_line(console, f"{count(len(moved), 'phase')} changed, such as {moved[0]}")
    skipped = result.skipped
    for part, single, several in (
        ("only in the base", "tensor only in the base", "tensors only in the base"),
        ("changed by", "tensor that is not a matrix changed", "tensors that are not matrices changed"),
    ):
        some = skipped[skipped["reason"].str.contains(part, regex=False)]
        if len(some):
            print_line(console, f"{count(len(some), single, several)}, such as {some.iloc[0]['parameter']}")
    console.print()
    print_page(console, out / "changes.csv", len(_most_changed(result, figures)), len(table))


def _unrelated(result: WeightChanges) -> str:
    """Return a sentence about matrices whose entries are uncorrelated with the base; empty if there are none."""
    compared = sum(change.base is not None for change in result.values())
    some = sum(change.is_unrelated for change in result.values())
    text = (
        f"{some} of {count(compared, 'matrix', 'matrices')} are uncorrelated with the base, as of separate trainings."
    )
    return text if some else ""


def _most_changed(result: WeightChanges, most: int) -> list[WeightChange]:
    """Return the matrices that have changed most, with a difference to draw."""
    changed = [change for change in result.values() if change.difference is not None and change.difference.null]
    return sorted(changed, key=lambda change: -change.relative_change)[:most]


def _phases(row: pd.Series[Any]) -> str:
    before, after = row["phase_base"], row["phase_trained"]
    return f"{before} → {after}" if before and after and before != after else after or before


def _pairs(table: pd.DataFrame, quantity: str) -> list[str]:
    """Return a number before and after as texts; once if it is the same."""
    columns = (table[f"{quantity}_{label}"].astype(float) for label in ("base", "trained"))
    texts = ([short_number(value) for value in column] for column in columns)
    return [a if a == b else b if a == "–" else f"{a} → {b}" for a, b in zip(*texts, strict=True)]
