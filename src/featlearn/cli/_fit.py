"""Command ``featlearn fit``, which fits a recursive feature machine to a table."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._console import print_files, print_json, print_line, result_console, text_table
from featlearn.cli._errors import handle_errors
from featlearn.cli._output_dir import check_folder, check_run, open_page, staged
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from featlearn.reports import Section

_SHOWN, _NAMED = 8, 12
_KINDS = ("number", "category", "date")
_FILES = ("model.safetensors", "features.png", "importances.csv", "run", "index.html")


class Task(StrEnum):
    """Task of a fit."""

    auto = "auto"
    regression = "regression"
    classification = "classification"


class Update(StrEnum):
    """Update rule of the features."""

    fact = "fact"
    geometric = "fact-geometric"
    nfa = "nfa"
    none = "none"


@dataclass(frozen=True)
class Fitted:
    """Result of a fit.

    Attributes:
        model: Pipeline, fitted to all rows.
        table: Name of the file.
        target: Name of the column to predict.
        task: "classification" or "regression".
        why: Reason for this task.
        rows: Number of rows.
        score: Score of the model in each fold, named by the metric; None without cross-validation.
        baseline: Score without learned features in each fold; None if the model has none.
        seconds: Time of the fit, in seconds.
    """

    model: Any
    table: str
    target: str
    task: str
    why: str
    rows: int
    score: pd.Series[float] | None
    baseline: pd.Series[float] | None
    seconds: float

    @property
    def machine(self) -> Any:
        """Fitted estimator."""
        return self.model["estimator"]

    def importances(self) -> pd.Series[float]:
        """Return the shares of the feature matrix's diagonal, the largest first."""
        import pandas as pd

        shares = pd.Series(self.machine.feature_importances_, index=self.machine.feature_names())
        return shares.sort_values(ascending=False, kind="stable")


def fit(
    table: Annotated[Path, typer.Argument(help="File .csv, .tsv (.gz) or .parquet, with a header.")],
    target: Annotated[str, typer.Option(help="Column to predict.")],
    task: Annotated[Task, typer.Option(help="auto: strings, booleans and few integers are classes.")] = Task.auto,
    update: Annotated[Update, typer.Option(help="Feature update rule; none is kernel ridge regression.")] = Update.fact,
    cv: Annotated[int, typer.Option(help="Number of cross-validation folds; 0 for none.")] = 5,
    drop: Annotated[list[str] | None, typer.Option(help="Column to omit; may be repeated.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="NAME=number, category or date: kind of a column; may be repeated.")
    ] = None,
    centers: Annotated[int | None, typer.Option(help="Number of Nystrom centers, for over 10,000 rows.")] = None,
    iterations: Annotated[int, typer.Option(help="Maximum number of feature updates.")] = 5,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of folds and centers.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("fit"),
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit a recursive feature machine to a table, and score it by cross-validation.

    Numbers, categories, booleans and missing values are accepted. Numbers
    stored as text are recognized; dates, names and identifiers are left
    out, each with a line that says so. Writes
    model.safetensors (for featlearn predict), a report, a figure, and a run
    for the dashboard. Scores are on held-out rows, with their standard
    deviation over folds, next to those of the same model without features.

    Examples:
      featlearn fit wine.csv --target cultivar
      featlearn fit houses.parquet --target price --drop id --out houses
      featlearn fit houses.csv --target price --column zip=category
      featlearn fit large.csv --target y --centers 2000 --cv 3
    """
    with handle_errors():
        check_folder(out, _FILES)
        check_run(out / "run", {"kind": "rfm"})
        kinds = _kinds(column or ())
        fitted = _fit(table, target, task.value, update.value, cv, tuple(drop or ()), kinds, centers, iterations, seed)
        _write(fitted, out)
        if as_json:
            print_json(_numbers(fitted, out))
        else:
            _print(fitted, out)
        if show:
            open_page(out / "index.html")


def _fit(
    path: Path, target: str, task: str, update: str, cv: int, drop: tuple[str, ...], kinds: dict[str, str],
    centers: int | None, iterations: int, seed: int,
) -> Fitted:  # fmt: skip
    from featlearn._utils.progress import progress_bar
    from featlearn.datasets.tables import read_frugally, read_whole, split_target, target_values
    from featlearn.rfm import RFMClassifier, RFMRegressor, make_tabular

    began = time.perf_counter()
    frame = read_whole(path) if centers is None else read_frugally(path, exact=target)
    X, series = split_target(frame, target, drop, path.name)
    del frame
    y, task, why = target_values(series, task)
    splits = splits_of(y, cv, task, seed)
    if len(y) <= ONE_CORE_ROWS:
        use_one_core()
    kind = RFMClassifier if task == "classification" else RFMRegressor

    def make(how: str) -> Any:
        estimator = kind(update=how, n_iter=iterations, centers=centers, random_state=seed)
        return make_tabular(estimator, columns=kinds or None)

    rounds = 1 if update == "none" else 2
    with progress_bar(rounds * len(splits) + 1, "fits") as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="column ['\"]")  # notes about columns are part of the result
        model = make(update).fit(X, y)  # first, so that errors in the table are raised at once
        advance()
        score = _scores(make(update), X, y, splits, task, advance) if splits else None
        baseline = _scores(make("none"), X, y, splits, task, advance) if splits and rounds > 1 else None
    return Fitted(model, path.name, target, task, why, len(y), score, baseline, time.perf_counter() - began)


def _kinds(given: Iterable[str]) -> dict[str, str]:
    """Return the kinds of columns of ``--column NAME=KIND``."""
    kinds = {}
    for text in given:
        name, equals, kind = text.rpartition("=")
        if not equals or kind not in _KINDS:
            raise InputError(f"--column must be NAME={pick_text(_KINDS)}, got {text!r}.")
        kinds[name] = kind
    return kinds


def splits_of(y: NDArray[Any], folds: int, task: str, seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return shuffled folds as (train, test) rows, stratified by class for a classification."""
    import numpy as np
    from sklearn.model_selection import KFold, StratifiedKFold

    if folds == 0:
        return []
    if folds < 2 or len(y) < 2 * folds:
        raise InputError(
            f"--cv must be 0 (no cross-validation) or from 2 to {len(y) // 2} folds for {count(len(y), 'row')}, "
            f"got {folds}."
        )
    if task == "regression":
        return list(KFold(folds, shuffle=True, random_state=seed).split(y))
    labels, rows = np.unique(y, return_counts=True)
    if folds > rows.max():
        raise InputError(f"No class has as many as {folds} rows. Pass --cv {max(int(rows.max()), 2)} or 0.")
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(np.zeros(len(y)), y))
    if any(len(np.unique(y[train])) < 2 for train, _ in splits):
        rare = int(rows.argmin())
        raise InputError(
            f"The class {labels.tolist()[rare]!r} has {count(int(rows[rare]), 'row')} only, and a fold without it has "
            "a single class. Pass --cv 0."
        )
    return splits


def _scores(
    model: Any, X: pd.DataFrame, y: NDArray[Any], splits: list[Any], task: str, advance: Callable[[], None]
) -> pd.Series[float]:
    """Return the accuracy of a classification, or the R² of a regression, in each fold."""
    import pandas as pd
    from sklearn.model_selection import cross_validate

    scores: list[float] = []
    for split in splits:  # one by one, for the progress bar
        scores += cross_validate(model, X, y, cv=[split], error_score="raise")["test_score"].tolist()
        advance()
    return pd.Series(scores, name="accuracy" if task == "classification" else "R²")


def _write(fitted: Fitted, out: Path) -> None:
    from featlearn.plots import save_figure
    from featlearn.reports import write_report
    from featlearn.rfm import save_tabular
    from featlearn.runs import Run
    from featlearn.training.rfm_run import log_machine, machine_config

    machine, names = fitted.machine, fitted.machine.feature_names()
    settings = {"table": fitted.table, "rows": fitted.rows}
    about = {"target": fitted.target, "task": fitted.task, **settings, "score": _summary(fitted.score)}
    figure = machine.plot_features()
    with staged(out) as draft:
        save_tabular(draft / "model.safetensors", fitted.model, about)
        save_figure(figure, draft / "features.png")
        fitted.importances().rename("importance").rename_axis("feature").to_csv(draft / "importances.csv")
        config = machine_config(machine, names, fitted.target, settings)
        with Run.create(draft / "run", config, name=f"fit of {fitted.target}") as run:
            log_machine(run, machine, names)
            if fitted.score is not None:
                run.log(int(machine.best_iteration_), {"cv_score": fitted.score.mean(), "cv_std": fitted.score.std()})
        write_report(
            draft / "index.html",
            f"{fitted.target}, from {fitted.table}",
            f"A recursive feature machine for {count(fitted.rows, 'row')}: {fitted.task}, because {fitted.why}. "
            f"{fitted.seconds:.1f} s.",
            _sections(fitted, figure),
        )


def _sections(fitted: Fitted, figure: Any) -> list[Section]:
    import pandas as pd

    from featlearn.reports import Section

    machine, sections = fitted.machine, []
    if fitted.score is not None:
        folds = pd.DataFrame(_rows(fitted)).T.rename(columns=lambda fold: f"fold {fold + 1}")
        table = folds.assign(mean=folds.mean(axis=1), deviation=folds.std(axis=1))
        table = table[["mean", "deviation", *folds.columns]].rename_axis(str(fitted.score.name))
        sections.append(Section("Score on held-out rows", tuple(_verdict(fitted)), {"": table}))
    top = fitted.importances().head(10)
    shares = pd.DataFrame({"importance": top}).rename_axis("feature")
    text = (
        "The feature matrix M defines the distance between rows. Its diagonal is the importance of each feature; its "
        "other entries show which features act together."
    )
    title = f"Shares of the diagonal, {len(top)} of {count(len(machine.feature_names()), 'feature')}"
    sections.append(
        Section("Feature importances", (text,), {title: shares}, {"The feature matrix, and its diagonal": figure})
    )
    # The table has one target: the standardized error is the same error in another unit.
    history = machine.history_.drop(columns="standardized_error").rename(columns={"effective_rank": "effective rank"})
    text = f"Iteration 0 has no learned features. Iteration {machine.best_iteration_} is selected: its error is lowest."
    corners = ", with classes as corners of a simplex" if fitted.task == "classification" else ""
    sections.append(Section("Iterations", (text,), {f"error: mean squared error on held-out rows{corners}": history}))
    listed = {title: ", ".join(names) for title, names in _columns_by_kind(fitted.model).items()}
    notes = tuple(map(_as_option, fitted.model["table"].notes_.values()))
    sections.append(Section("Columns of the table", notes, settings=listed))
    return sections


def _columns_by_kind(model: Any) -> dict[str, list[str]]:
    """Return the names of the columns of the table by the way in which they are read."""
    from featlearn.rfm import column_kinds

    kinds, listed = column_kinds(model), {}
    for title, kind in (("numbers", "number"), ("categories", "category"), ("not used", "unused")):
        if names := [name for name in kinds if kinds[name] == kind]:
            listed[title] = names
    return listed


def _as_option(note: str) -> str:
    """Return a note about a column with the option of this command instead of the argument."""
    return re.sub(r"Pass columns=\{(['\"])(.*)\1: '(\w+)'\}", r"Pass --column \2=\3", note)


def _rows(fitted: Fitted) -> dict[str, pd.Series[float]]:
    """Return the scores of the model and of the baseline by their titles, if there are any."""
    rows = {f"features learned by {fitted.machine.update}": fitted.score, "no features learned": fitted.baseline}
    return {title: scores for title, scores in rows.items() if scores is not None}


def _summary(scores: pd.Series[float] | None) -> dict[str, Any] | None:
    """Return the scores as JSON types."""
    if scores is None:
        return None
    metric = str(scores.name).lower().replace("²", "2")
    return {"metric": metric, "mean": float(scores.mean()), "std": float(scores.std()), "folds": scores.tolist()}


def _verdict(fitted: Fitted) -> list[str]:
    """Return a sentence that compares the score with the baseline, if there is one."""
    score, baseline = fitted.score, fitted.baseline
    if score is None or baseline is None:
        return []
    gains = score - baseline
    better, same = int((gains > 0).sum()), int((gains == 0).sum())
    also = f", equal in {same}" if same else ""
    return [
        f"Learning features changes the {score.name} by {score.mean() - baseline.mean():+.4f} on average: better in "
        f"{better} of {count(len(gains), 'fold')}{also}."
    ]


def _numbers(fitted: Fitted, out: Path) -> dict[str, Any]:
    from featlearn.rfm import column_kinds

    machine = fitted.machine
    return {
        "target": fitted.target,
        "task": fitted.task,
        "rows": fitted.rows,
        "features": len(machine.feature_names()),
        "columns": column_kinds(fitted.model),
        "notes": list(map(_as_option, fitted.model["table"].notes_.values())),
        "update": machine.update,
        "kept_iteration": int(machine.best_iteration_),
        "validation_error": float(machine.validation_error_),
        "score": _summary(fitted.score),
        "baseline": _summary(fitted.baseline),
        "importances": fitted.importances().to_dict(),
        "model": str(out / "model.safetensors"),
        "page": str(out / "index.html"),
        "run": str(out / "run"),
        "seconds": round(fitted.seconds, 1),
    }


def _print(fitted: Fitted, out: Path) -> None:
    console = result_console()
    print_line(console, Text(fitted.target, "bold").append(f" of {fitted.table}: {fitted.task}", "not bold"))
    features = len(fitted.machine.feature_names())
    print_line(console, f"{count(fitted.rows, 'row')}, {count(features, 'feature')}; {fitted.why}\n")
    for title, names in _columns_by_kind(fitted.model).items():
        print_line(console, f"{title}: {pick_text(names, _NAMED)}")
    for note in fitted.model["table"].notes_.values():
        print_line(console, _as_option(note))
    print_line(console, "")
    if fitted.score is not None:
        rows = [(title, f"{scores.mean():.4f} ± {scores.std():.4f}") for title, scores in _rows(fitted).items()]
        caption = f"mean ± standard deviation over {count(len(fitted.score), 'fold')}"
        console.print(text_table({"": "left", f"{fitted.score.name} on held-out rows": "right"}, rows, caption))
        for line in _verdict(fitted):
            console.print(line, markup=False)
        console.print()
    rows = [(str(name), f"{share:.3f}") for name, share in fitted.importances().head(_SHOWN).items()]
    caption = f"{min(_SHOWN, features)} of {features}; iteration {fitted.machine.best_iteration_} is selected"
    console.print(text_table({"feature": "name", "importance": "right"}, rows, caption))
    console.print()
    files = {
        "model.safetensors": "for featlearn predict",
        "index.html": "report",
        "features.png": "feature matrix",
        "importances.csv": "importance of each feature",
        "run": "for featlearn dashboard",
    }
    print_files(console, [(out / name, what) for name, what in files.items()])
    console.print(f"[dim]{fitted.seconds:.1f} s[/dim]")


ONE_CORE_ROWS = 2000
"""Maximum number of rows of a table that is fitted on one core: two cores were not faster (63 seconds each)."""


def use_one_core() -> None:
    """Restrict torch to one core: for small matrices, threads on a busy machine wait for each other.

    With two other programs running on two cores, a demo of 18 seconds took eight minutes, and a fit of 400 rows nine.
    """
    import torch

    torch.set_num_threads(1)
