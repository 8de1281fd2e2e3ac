"""``featlearn predict``: a table and a fitted machine make a table of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._console import print_files, print_json, result_console
from featlearn.cli._errors import handle_errors, print_notice
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def predict(
    model: Annotated[Path, typer.Argument(help="A model.safetensors of featlearn fit.")],
    table: Annotated[Path, typer.Argument(help="A .csv, .tsv (.gz) or .parquet file with a header.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .csv file to write.")] = Path("predictions.csv"),
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of each class.")] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Rows in memory at a time.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON instead.")] = False,
) -> None:
    """Predict the target of each row of a table, in its order.

    Columns are found by name. One that the model needs and the table lacks
    is an error, further ones are left aside. The table is read in parts:
    it may be larger than memory.

    Examples:
      featlearn predict fit/model.safetensors new.csv -o out.csv
      featlearn predict fit/model.safetensors new.parquet -o out.csv --proba
    """
    with handle_errors(f"{output} is as it was."):
        from featlearn._utils.atomic import atomic_write
        from featlearn.rfm import load_tabular

        pipeline, about = load_tabular(model)
        if output.suffix.lower() != ".csv":
            raise InputError(f"predictions are written to a file that ends in .csv, got {output.name!r}")
        if output.exists() and table.exists() and output.samefile(table):
            raise InputError(f"{str(output)!r} is the table itself: choose another file with -o")
        if proba and not hasattr(pipeline["estimator"], "classes_"):
            raise InputError("--proba is for classes, and this model predicts numbers")
        target = str(about.get("target", "prediction"))
        if proba and target in (shares := [f"P({label})" for label in pipeline["estimator"].classes_.tolist()]):
            raise InputError(
                f"the target is called {target}, as are probabilities of {pick_text(shares)}: without --proba"
            )
        rows = 0
        with _folder_for(output), atomic_write(output) as draft:
            for part in _aligned(pipeline, table, target, chunk):
                found = _predictions(pipeline, part, target, proba)
                found.to_csv(draft, index=False, mode="a" if rows else "w", header=not rows)
                rows += len(found)
                columns = list(found.columns)
            if not rows:
                raise InputError(f"{table.name} has a header and no rows")
        if as_json:
            print_json({"rows": rows, "columns": columns, "target": target, "output": str(output)})
        else:
            console = result_console()
            console.print(f"{count(rows, 'row')}: {pick_text(columns, 8)}", markup=False, soft_wrap=True)
            print_files(console, [(output, f"predictions of {target}")])


@contextmanager
def _folder_for(output: Path) -> Iterator[None]:
    """The folder of a file, which goes again if the block does not end well and it was not there before."""
    made = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # somebody has put something there meanwhile
            for folder in made:
                folder.rmdir()
        raise


def _aligned(pipeline: Any, table: Path, target: str, rows: int) -> Iterator[pd.DataFrame]:
    """Read the table in parts, with the columns that the model was fitted to; the file is opened once."""
    from featlearn.datasets.tables import parts_of
    from featlearn.rfm import column_kinds

    kinds = column_kinds(pipeline)

    def used(names: list[str]) -> list[str]:
        missing = [name for name, kind in kinds.items() if name not in names and kind != "unused"]
        if missing:
            raise InputError(
                f"{table.name} lacks {count(len(missing), 'column')} of the training: "
                f"{pick_text(map(repr, missing), 10)}; it has {pick_text(map(repr, names), 10)}"
            )
        if further := [name for name in names if name not in kinds and name != target]:
            print_notice(
                f"{count(len(further), 'column')} left aside, not of the training: {pick_text(map(repr, further), 5)}"
            )
        return [name for name in kinds if name in names]

    # Categories stay texts: a part with nothing but 01 and 02 in it would else hold the numbers 1 and 2.
    texts = {name: str for name, kind in kinds.items() if kind == "category"}
    for part in parts_of(table, texts, used, rows):
        if len(part):
            yield part.reindex(columns=list(kinds))  # only columns that are not used can be missing here


def _predictions(pipeline: Any, part: pd.DataFrame, target: str, proba: bool) -> pd.DataFrame:
    import pandas as pd

    if not proba:
        return pd.DataFrame({target: pipeline.predict(part)})
    machine = pipeline["estimator"]
    shares = pipeline.predict_proba(part)
    found = {target: machine.classes_[shares.argmax(axis=1)]}
    return pd.DataFrame(found | {f"P({label})": shares[:, i] for i, label in enumerate(machine.classes_.tolist())})
