"""Command ``featlearn predict``, which writes the predictions of a fitted model for a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._console import print_files, print_json, print_line, result_console
from featlearn.cli._errors import handle_errors, print_notice
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def predict(
    model: Annotated[Path, typer.Argument(help="Folder of featlearn fit, or its model.safetensors.")],
    table: Annotated[Path, typer.Argument(help="File .csv, .tsv (.gz) or .parquet, with a header.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File .csv to write.")] = Path("predictions.csv"),
    proba: Annotated[bool, typer.Option("--proba", help="Add the probability of each class.")] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Number of rows in memory at a time.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Predict the target of each row of a table, in its order.

    Columns are matched by name. A missing column of the training is an
    error; other columns are ignored. The table is read in chunks, so it
    may be larger than memory.

    Examples:
      featlearn predict fit new.csv -o out.csv
      featlearn predict fit/model.safetensors new.parquet -o out.csv --proba
    """
    with handle_errors(f"{output} is not changed."):
        from featlearn._utils.atomic import atomic_write
        from featlearn.rfm import load_tabular

        pipeline, about = load_tabular(model / "model.safetensors" if model.is_dir() else model)
        if output.suffix.lower() != ".csv":
            raise InputError(f"--output must be a file that ends in .csv, got {output.name!r}.")
        if output.exists() and table.exists() and output.samefile(table):
            raise InputError(f"--output must not be the table itself, got {str(output)!r}. Choose another file.")
        if proba and not hasattr(pipeline["estimator"], "classes_"):
            raise InputError("--proba requires a model of classes, but this model predicts numbers.")
        target = str(about.get("target", "prediction"))
        if proba and target in (shares := [f"P({label})" for label in pipeline["estimator"].classes_.tolist()]):
            raise InputError(
                f"The target {target} is also the name of a probability, one of {pick_text(shares)}. Omit --proba."
            )
        rows = 0
        with _folder_for(output), atomic_write(output) as draft:
            for part in _aligned(pipeline, table, target, chunk):
                predictions = _predictions(pipeline, part, target, proba)
                predictions.to_csv(draft, index=False, mode="a" if rows else "w", header=not rows)
                rows += len(predictions)
                columns = list(predictions.columns)
            if not rows:
                raise InputError(f"{table.name} must have at least one row below its header.")
        if as_json:
            print_json({"rows": rows, "columns": columns, "target": target, "output": str(output)})
        else:
            print_line(console := result_console(), f"{count(rows, 'row')}: {pick_text(columns, 8)}")
            print_files(console, [(output, f"predictions of {target}")])


@contextmanager
def _folder_for(output: Path) -> Iterator[None]:
    """Create the folder of a file, and delete it if the block raises and it did not exist before."""
    made = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another process has written to it meanwhile
            for folder in made:
                folder.rmdir()
        raise


def _aligned(pipeline: Any, table: Path, target: str, rows: int) -> Iterator[pd.DataFrame]:
    """Read the table in chunks, with the columns that the model was fitted to; the file is opened once."""
    from featlearn.datasets.tables import parts_of
    from featlearn.rfm import column_kinds

    kinds = column_kinds(pipeline)

    def used(names: list[str]) -> list[str]:
        if missing := [name for name, kind in kinds.items() if name not in names and kind != "unused"]:
            raise InputError(
                f"{table.name} lacks {count(len(missing), 'column')} of the training: "
                f"{pick_text(map(repr, missing), 10)}; it has {pick_text(map(repr, names), 10)}."
            )
        if other := [name for name in names if name not in kinds and name != target]:
            print_notice(
                f"{count(len(other), 'column')} ignored, not in the training: {pick_text(map(repr, other), 5)}"
            )
        return [name for name in kinds if name in names]

    # Categories stay strings: a chunk that contains only 01 and 02 would otherwise be read as the numbers 1 and 2.
    texts = {name: str for name, kind in kinds.items() if kind == "category"}
    for part in parts_of(table, texts, used, rows):
        if len(part):
            yield part.reindex(columns=list(kinds))  # only unused columns can be missing here


def _predictions(pipeline: Any, part: pd.DataFrame, target: str, proba: bool) -> pd.DataFrame:
    import pandas as pd

    if not proba:
        return pd.DataFrame({target: pipeline.predict(part)})
    classes, shares = pipeline["estimator"].classes_, pipeline.predict_proba(part)
    probabilities = {f"P({label})": shares[:, i] for i, label in enumerate(classes.tolist())}
    return pd.DataFrame({target: classes[shares.argmax(axis=1)]} | probabilities)
