"""``featlearn runs``: what is in the run store."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from featlearn._utils.formatting import count
from featlearn.cli._console import print_files, print_json, result_console, shorten, text_table
from featlearn.cli._errors import handle_errors
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from featlearn.runs import Run

runs = typer.Typer(help="List, show, compare, export and remove runs, which are folders on disk.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")]
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
    root: Annotated[Path, typer.Argument(help="Folder to look in, with all folders below it.")] = Path(),
    as_json: _Json = False,
) -> None:
    """List the runs at or under a folder, the oldest first.

    Examples:
      featlearn runs list
      featlearn runs list experiments --json
    """
    with handle_errors():
        from featlearn.runs import list_runs

        table = list_runs(root)
        if as_json:
            print_json(table.to_dict(orient="records"))
            return
        console = result_console()
        if not len(table):
            console.print(f"no runs in {root}", markup=False)
            return
        rows = [
            (
                _below(row["path"], root),
                Text(row["status"], _COLORS.get(row["status"], "")),
                row["last_step"],
                _duration(row["seconds"]),
                ""
                if row["started"] != row["started"]
                else f"{row['started'].to_pydatetime().astimezone():%Y-%m-%d %H:%M}",
            )
            for row in table.to_dict(orient="records")
        ]
        columns = {"run": "name", "status": "left", "last step": "right", "took": "right", "started": "left"}
        console.print(text_table(columns, rows, count(len(table), "run")))
        for row in table[table["message"].fillna("") != ""].to_dict(orient="records"):
            console.print(f"{row['path']}: {row['message']}", markup=False, soft_wrap=True)


@runs.command()
def show(
    run: _Folder,
    every: Annotated[bool, typer.Option("--all", help="Every number of the layers.")] = False,
    as_json: _Json = False,
) -> None:
    """Show a run: its settings, its last numbers, and what was read off each layer.

    Examples:
      featlearn runs show demo/run
      featlearn runs show demo/run --all
      featlearn runs show demo/run --json
    """
    with handle_errors():
        from featlearn._utils.validation import flat_settings
        from featlearn.runs import open_run

        opened = open_run(run)
        own, layers = _last(opened)
        readings = _readings(opened)
        settings = flat_settings(opened.config)
        if as_json:
            numbers = {str(layer): row.dropna().to_dict() for layer, row in layers.iterrows()}
            print_json(
                _described(opened) | {"config": opened.config, "last": own, "layers": numbers, "readings": readings}
            )
            return
        console = result_console()
        head = Text(opened.name, "bold").append(f"  {opened.status}", _COLORS.get(opened.status, ""))
        console.print(head.append(f", {_duration(opened.seconds)}, last step {opened.last_step}", "not bold"))
        if opened.message:
            console.print(opened.message, markup=False, soft_wrap=True)
        if settings:
            rows = [(name, _value(value)) for name, value in settings.items() if value is not None]
            console.print(text_table({"setting": "left", "value": "fold"}, rows))
        if own:
            console.print(text_table({"number": "left", "last value": "right"}, list(own.items())))
        if len(layers):
            _print_layers(layers, every)
        for layer, told in readings.items():
            line = Text(f"layer {layer}: ").append(told["word"], "bold").append(f", {told['reason']}")
            console.print(line, soft_wrap=True)
        steps = {"matrices": opened.matrix_steps(), "checkpoints": opened.checkpoint_steps()}
        for what, at in steps.items():
            if at:
                console.print(f"{what} of {count(len(at), 'step')}, the last one {at[-1]}")


@runs.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of two runs or more.")], as_json: _Json = False
) -> None:
    """Compare runs: the settings in which they differ, and their last numbers.

    Examples:
      featlearn runs compare runs/a runs/b
    """
    with handle_errors():
        from featlearn.runs import compare_configs, open_run

        opened = [open_run(folder) for folder in folders]
        if len(opened) < 2:
            raise InputError("two runs or more are compared: name another folder")
        settings = compare_configs(opened)
        if settings.shape[1] < len(opened):
            raise InputError("the same run was named twice: name different ones")
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
            console.print("their settings are the same")
        numbers = [(name, *(own.get(name) for own in last.values())) for name in names]
        console.print(text_table({"last value": "left"} | titles, numbers))
        for title, label in zip(titles, labels, strict=True):
            if title != label:
                console.print(f"{title}: {label}", markup=False, soft_wrap=True)


@runs.command()
def export(
    run: _Folder, file: Annotated[Path, typer.Argument(help="A .csv or .parquet file.")], as_json: _Json = False
) -> None:
    """Write all numbers of a run as a table: run, step, layer, name, value.

    Examples:
      featlearn runs export demo/run numbers.csv
      featlearn runs export demo/run numbers.parquet
    """
    with handle_errors():
        from featlearn.runs import export as write
        from featlearn.runs import open_run

        opened = open_run(run)
        write(opened, file)
        rows = len(opened.metrics())
        if as_json:
            print_json({"rows": rows, "file": str(file)})
        else:
            print_files(result_console(), [(file, count(rows, "number"))])


@runs.command()
def remove(
    run: _Folder, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: _Json = False
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
            told = f"{run}, {opened.status}, last step {opened.last_step}"
            try:
                with redirect_stdout(sys.stderr):  # a space of the question would be among results
                    agreed = typer.confirm(f"Delete the run {told}?", err=True)
            except typer.Abort:
                if sys.stdin.isatty():
                    raise
                typer.echo(err=True)  # ends the line of the question
                raise InputError("nobody is there to be asked: pass --yes to remove the run") from None
            if not agreed:
                raise typer.Abort
        delete(run)
        if as_json:
            print_json({"removed": str(run)})
        else:
            print(f"removed {run}")


def _titles(labels: list[str]) -> list[str]:
    """A title a run, short, and none of them twice: a table has a column a title."""
    short = [shorten(label, 24) for label in labels]
    if len({*short, "setting", "last value"}) < len(short) + 2:
        short = [f"{number}. {shorten(label, 20)}" for number, label in enumerate(labels, 1)]
    return short


def _described(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "name": run.name,
        "status": run.status,
        "message": run.message,
        "started": run.started.isoformat(),
        "last_step": run.last_step,
        "seconds": run.seconds,
    }


def _last(run: Run) -> tuple[dict[str, float], pd.DataFrame]:
    """The last value of each name: of the run itself, and in a table with a row a layer."""
    table = run.metrics()
    table = table.drop_duplicates(["layer", "name"], keep="last")
    own = table[table["layer"].isna()]
    layered = table[table["layer"].notna()]
    order = list(dict.fromkeys(layered["layer"]))
    wide = layered.pivot_table(index="layer", columns="name", values="value", dropna=False)
    return dict(zip(own["name"], own["value"], strict=True)), wide.reindex(order) if len(layered) else wide


def _readings(run: Run) -> dict[str, dict[str, str]]:
    texts = run.texts()
    found: dict[str, dict[str, str]] = {}
    for layer, name, value in zip(texts["layer"], texts["name"], texts["value"], strict=True):
        if layer is not None and name in ("reading", "reason"):
            found.setdefault(layer, {"word": "", "reason": ""})["word" if name == "reading" else "reason"] = value
    return found


def _print_layers(layers: pd.DataFrame, every: bool) -> None:
    """The numbers of layers: those that say most, or all of them, a few columns at a time."""
    console = result_console()
    title = "layer"
    if list(layers.columns) == ["importance"]:  # of a feature machine, whose layers are its features
        title, layers = "feature", layers.sort_values("importance", ascending=False)
    names = [str(name) for name in layers.columns]
    usual = [name for name in _USUAL if name in names] or names
    room = max(console.width - 5 - max(len(shorten(str(layer))) for layer in layers.index), 20)
    groups: list[list[str]] = [[]]
    for name in names if every else usual:
        if sum(max(len(_TITLES.get(n, n)), 6) + 3 for n in [*groups[-1], name]) > room and groups[-1]:
            groups.append([])
        groups[-1].append(name)
    shown = groups if every else groups[:1]
    rows = list(layers.index) if every else list(layers.index[:_ROWS])
    for group in shown:
        columns = {title: "left"} | {_TITLES.get(name, name): "right" for name in group}
        console.print(text_table(columns, [(shorten(str(layer)), *layers.loc[layer, group]) for layer in rows]))
    hidden = len(names) - sum(map(len, shown)), len(layers) - len(rows)
    told = [count(n, what) for n, what in zip(hidden, ("column", title), strict=True) if n]
    if told:
        console.print(f"{' and '.join(told)} more with --all", style="dim")


def _below(path: str, root: Path) -> str:
    inner = Path(path)
    return str(inner.relative_to(root)) if inner != root and inner.is_relative_to(root) else path


def _local(moment: Any) -> str:
    """A moment on the clock of this machine; nothing for one that is not known."""
    return "" if moment != moment else f"{moment.to_pydatetime().astimezone():%Y-%m-%d %H:%M}"


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
