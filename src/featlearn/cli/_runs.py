"""Commands ``featlearn runs``, which list, show, compare, export and remove runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from featlearn._utils.formatting import count
from featlearn.cli._console import print_files, print_json, print_line, result_console, shorten, text_table
from featlearn.cli._errors import handle_errors
from featlearn.errors import InputError

if TYPE_CHECKING:
    from featlearn.runs import Run

runs = typer.Typer(help="List, show, compare, export and remove runs, which are folders on disk.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Folder = Annotated[Path, typer.Argument(help="Folder of a run.")]
_COLORS = {"finished": "green", "running": "blue", "failed": "red", "unreadable": "red", "interrupted": "yellow"}
_ROWS = 20
_USUAL = ("nfc", "centered_nfc", "centered_ratio", "weight_change", "relgrad", "fact", "enfa", "w.alpha", "w.spikes")
_TITLES = {
    "nfc": "NFC",
    "centered_nfc": "centered",
    "centered_ratio": "C/UC",
    "weight_change": "moved",
    "fact": "FACT",
    "enfa": "eNFA",
    "w.alpha": "alpha",
    "w.spikes": "spikes",
}


@runs.command("list")
def list_all(
    root: Annotated[Path, typer.Argument(help="Folder to search, including its subfolders.")] = Path(),
    as_json: _Json = False,
) -> None:
    """List the runs in a folder and its subfolders, the oldest first.

    Examples:
      featlearn runs list
      featlearn runs list experiments --json
    """
    with handle_errors():
        from featlearn.runs._catalog import run_rows

        found = run_rows(root)
        if as_json:
            names = dict.fromkeys(name for row in found for name in row)
            print_json([{name: row.get(name) for name in names} for row in found])
            return
        console = result_console()
        if not found:
            console.print(f"no runs in {root}", markup=False)
            return
        rows = []
        for row in found:
            path, status, started = Path(row["path"]), row["status"], row.get("started")
            name = str(path.relative_to(root)) if path != root and path.is_relative_to(root) else row["path"]
            local = "" if started is None else f"{started.astimezone():%Y-%m-%d %H:%M}"
            colored = Text(status, _COLORS.get(status, ""))
            rows.append((name, colored, row.get("last_step"), _duration(row.get("seconds")), local))
        columns = {"run": "name", "status": "left", "last step": "right", "time": "right", "started": "left"}
        console.print(text_table(columns, rows, count(len(found), "run")))
        for row in found:
            if row["message"]:
                print_line(console, f"{row['path']}: {row['message']}")


@runs.command()
def show(
    run: _Folder,
    every: Annotated[bool, typer.Option("--all", help="Show all metrics of the layers.")] = False,
    as_json: _Json = False,
) -> None:
    """Show a run: its config, its last metrics, and the diagnosis of each layer.

    Examples:
      featlearn runs show demo/run
      featlearn runs show demo/run --all
      featlearn runs show demo/run --json
    """
    with handle_errors():
        from featlearn._utils.validation import flat_settings
        from featlearn.runs import open_run
        from featlearn.runs.overview import overview

        opened = open_run(run)
        last, layers = _last(opened)
        readings = _readings(opened)
        segments = overview(opened.path).segments
        if as_json:
            described = {name: getattr(opened, name) for name in ("name", "status", "message", "last_step", "seconds")}
            times: dict[str, Any] = {"path": str(opened.path), "started": opened.started.isoformat()}
            times["segments"] = segments
            known = {
                layer: {name: value for name, value in of.items() if value == value} for layer, of in layers.items()
            }
            values = {"config": opened.config, "last": last, "layers": known, "readings": readings}
            print_json(times | described | values)
            return
        console = result_console()
        head = Text(opened.name, "bold").append(f"  {opened.status}", _COLORS.get(opened.status, ""))
        console.print(head.append(f", {_duration(opened.seconds)}, last step {opened.last_step}", "not bold"))
        if opened.message:
            print_line(console, opened.message)
        if segments > 1:
            print_line(console, f"latest of {segments} segments: steps went back in this run")
        if settings := flat_settings(opened.config):
            rows = [(name, _value(value)) for name, value in settings.items() if value is not None]
            console.print(text_table({"setting": "left", "value": "fold"}, rows))
        if last:
            console.print(text_table({"metric": "left", "last value": "right"}, list(last.items())))
        if layers:
            _print_layers(layers, every)
        for layer, reading in readings.items():
            print_line(
                console, Text(f"layer {layer}: ").append(reading["word"], "bold").append(f", {reading['reason']}")
            )
        for what, steps in (("matrices", opened.matrix_steps()), ("checkpoints", opened.checkpoint_steps())):
            if steps:
                console.print(f"{what} of {count(len(steps), 'step')}, the last one {steps[-1]}")


@runs.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of two or more runs.")], as_json: _Json = False
) -> None:
    """Compare the settings and the last metrics of runs.

    Examples:
      featlearn runs compare runs/a runs/b
    """
    with handle_errors():
        from featlearn.runs import compare_configs, open_run

        opened = [open_run(folder) for folder in folders]
        if len(opened) < 2:
            raise InputError(f"FOLDERS must be two or more runs, got {len(opened)}.")
        settings = compare_configs(opened)
        if settings.shape[1] < len(opened):
            raise InputError("FOLDERS must be different runs, got the same run twice.")
        last = dict(zip(settings.columns, (_last(run)[0] for run in opened), strict=True))
        names = list(dict.fromkeys(name for numbers in last.values() for name in numbers))
        if as_json:
            print_json({"settings": settings.to_dict(orient="index"), "last": last})
            return
        console = result_console()
        labels = [str(label) for label in settings.columns]
        titles = dict.fromkeys(_titles(labels), "right")
        if len(settings):
            rows = [(name, *(_value(value) for value in row)) for name, *row in settings.itertuples()]
            console.print(text_table({"setting": "left"} | dict.fromkeys(titles, "fold"), rows))
        else:
            console.print("the settings are equal")
        numbers = [(name, *(of_run.get(name) for of_run in last.values())) for name in names]
        console.print(text_table({"last value": "left"} | titles, numbers))
        for title, label in zip(titles, labels, strict=True):
            if title != label:
                print_line(console, f"{title}: {label}")


@runs.command()
def export(
    run: _Folder,
    file: Annotated[Path, typer.Argument(help="File .csv or .parquet to write.")],
    segment: Annotated[int | None, typer.Option(min=1, help="Segment to export. Default: the latest one.")] = None,
    as_json: _Json = False,
) -> None:
    """Write all metrics of a run as a table: run, step, layer, name, value.

    Examples:
      featlearn runs export demo/run numbers.csv
      featlearn runs export demo/run numbers.parquet
      featlearn runs export demo/run before.csv --segment 1
    """
    with handle_errors():
        from featlearn.runs._catalog import export_table

        rows = export_table(run, file, segment=segment)
        if as_json:
            print_json({"rows": rows, "file": str(file)})
        else:
            print_files(result_console(), [(file, count(rows, "value"))])


@runs.command()
def remove(
    run: _Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: _Json = False,
) -> None:
    """Delete a run; other files in its folder stay.

    Examples:
      featlearn runs remove runs/a
      featlearn runs remove runs/a --yes
    """
    with handle_errors("Nothing was removed."):
        from featlearn.runs import open_run
        from featlearn.runs import remove as delete

        opened = open_run(run)
        if not yes:
            question = f"Delete the run {run}, {opened.status}, last step {opened.last_step}?"
            try:
                with redirect_stdout(sys.stderr):  # the prompt writes a space to stdout
                    agreed = typer.confirm(question, err=True)
            except typer.Abort:
                if sys.stdin.isatty():
                    raise
                typer.echo(err=True)  # end the line of the question
                raise InputError("Confirmation requires a terminal. Pass --yes to remove the run.") from None
            if not agreed:
                raise typer.Abort
        delete(run)
        if as_json:
            print_json({"removed": str(run)})
        else:
            print(f"removed {run}")


def _titles(labels: list[str]) -> list[str]:
    """Return a short, unique title for each run."""
    short = [shorten(label, 24) for label in labels]
    if len({*short, "setting", "last value"}) < len(short) + 2:
        short = [f"{number}. {shorten(label, 20)}" for number, label in enumerate(labels, 1)]
    return short


def _last(run: Run) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the last value of each metric of the run itself, and those of each layer."""
    from featlearn.runs._summaries import last_values
    from featlearn.runs.overview import natural_order

    values = last_values(run.path)
    layers = sorted((layer for layer in values if layer is not None), key=natural_order)
    return values.get(None, {}), {layer: values[layer] for layer in layers}


def _readings(run: Run) -> dict[str, dict[str, str]]:
    from featlearn.runs.overview import words

    result: dict[str, dict[str, str]] = {}
    for (layer, name), intervals in words(run.path, ("reading", "reason")).items():
        if layer is not None:
            key = "word" if name == "reading" else "reason"
            result.setdefault(layer, {"word": "", "reason": ""})[key] = intervals[-1][2]
    return result


def _print_layers(layers: dict[str, dict[str, float]], every: bool) -> None:
    """Print the main metrics of layers, or all of them, in tables that fit the terminal."""
    console = result_console()
    title = "layer"
    names = sorted({name for values in layers.values() for name in values})
    if names == ["importance"]:  # of a recursive feature machine, whose layers are its features
        title = "feature"
        layers = dict(sorted(layers.items(), key=lambda item: -item[1]["importance"]))
    usual = [name for name in _USUAL if name in names] or names
    room = max(console.width - 5 - max(len(shorten(layer)) for layer in layers), 20)
    groups: list[list[str]] = [[]]
    for name in names if every else usual:
        if sum(max(len(_TITLES.get(n, n)), 6) + 3 for n in [*groups[-1], name]) > room and groups[-1]:
            groups.append([])
        groups[-1].append(name)
    shown = groups if every else groups[:1]
    rows = list(layers) if every else list(layers)[:_ROWS]
    for group in shown:
        columns = {title: "left"} | {_TITLES.get(name, name): "right" for name in group}
        console.print(text_table(columns, [(shorten(layer), *map(layers[layer].get, group)) for layer in rows]))
    hidden = len(names) - sum(map(len, shown)), len(layers) - len(rows)
    if more := [count(n, what) for n, what in zip(hidden, ("column", title), strict=True) if n]:
        console.print(f"{' and '.join(more)} more with --all", style="dim")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:6])) + (f" and {len(value) - 6} more" if len(value) > 6 else "")
    return "–" if value is None or value != value else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None or seconds != seconds:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
