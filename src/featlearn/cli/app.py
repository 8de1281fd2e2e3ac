"""Commands; each one prints for people and leaves the work to the library."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from featlearn import __version__
from featlearn.cli.reproduce import reproduce
from featlearn.errors import FeatlearnError
from featlearn.features import Report
from featlearn.lab.experiments import (
    ChainAlignment,
    SpectralEvolution,
    WineFeatures,
    chain_alignment,
    spectral_case,
    wine_features,
)
from featlearn.plots import save_figure
from featlearn.runs import Run, remove
from featlearn.training import evolution

__all__ = ["app"]

app = typer.Typer(help="Measure feature learning.", no_args_is_help=True, add_completion=False)


app.command()(reproduce)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"featlearn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure feature learning."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of data, network and rotations.")] = 0,
) -> None:
    """Train two small networks, probe one and look at the spectrum of the other; fit a feature machine to a table."""
    began = time.perf_counter()
    try:
        if (out / "run").exists():
            remove(out / "run")  # of the demo before
        with Run.create(out / "run", {"task": "chain monomial", "lr": 0.1}, seed=seed) as run:
            result = chain_alignment(seed=seed, run=run, progress=True)
        watched = save_figure(evolution(run, title="the chain monomial"), out / "evolution.png")
        features = save_figure(result.plot(), out / "features.png")
        layers = save_figure(result.after.plot(["nfc", "centered_nfc"]), out / "layers.png")
        result.after.save(out / "report")
        student = spectral_case(3, (500, 375, 250), lr=18.0, seed=seed, progress=True)
        spectrum = save_figure(student.weights.phase().plot("spectrum of $W^T W/h$"), out / "spectrum.png")
        wines = wine_features(seed=seed)
        table = save_figure(wines.plot(), out / "wine.png")
    except (FeatlearnError, OSError) as error:
        raise SystemExit(f"featlearn: {error}") from error
    seconds = time.perf_counter() - began

    console = Console(highlight=False, soft_wrap=True)
    console.print("\n[bold]The chain monomial[/bold], y = x1 x2 + x2 x3 + ... + x5 x1, in 32 dimensions")
    console.print(
        f"{result.after.samples} points, two hidden ReLU layers, {len(result.history.step)} steps of gradient "
        f"descent: loss {result.history.final_loss:.0e}, test {result.test_loss:.2f}\n"
    )
    console.print(_layer_table(result.before, result.after))
    console.print(_reading(result))
    console.print(_layer_words(run))
    console.print("[bold]A two-layer network and its teacher[/bold], y = s(x . b) + noise, by SGD at a large rate")
    console.print(_spectral_reading(student))
    console.print("[bold]A table of wines[/bold], three cultivars told apart by a recursive feature machine")
    console.print(_table_reading(wines))
    for path, what in (
        (features, "EGOP, NFM, AGOP and corrupted AGOP"),
        (layers, "correlations by layer"),
        (watched, "what became of each layer, step by step"),
        (spectrum, "eigenvalues of the weights before and after"),
        (table, "feature matrix of the wine table"),
        (out / "report", "featlearn.Report.load reads it"),
        (out / "run", "featlearn.runs.open reads it"),
    ):
        console.print(f"  {path!s:{len(str(features)) + 1}s} [dim]{what}[/dim]")
    console.print(f"[dim]{seconds:.1f} s[/dim]")


def _reading(result: ChainAlignment) -> str:
    """What the numbers say, in words."""
    low, high = min(result.corrupted_nfc), max(result.corrupted_nfc)
    return (
        f"\nThe first layer's weights align with the gradients through them: NFC {result.after['0'].nfc:.2f}.\n"
        f"With random eigenvectors in place of K's own it falls to {result.mean_corrupted_nfc:.2f} "
        f"({low:.2f} to {high:.2f}).\n"
        f"K is far from the identity: its eigenvalues deviate by {result.spread:.1f} times their mean.\n"
    )


def _layer_words(run: Run) -> str:
    """What the monitor says of each layer at the end of the run."""
    words, reasons = run.texts("reading"), run.texts("reason")
    steps = len(set(words["step"]))
    last: dict[str, str] = {
        layer: f"[bold]{word}[/bold], {reason}"
        for layer, word, reason in zip(words["layer"], words["value"], reasons["value"], strict=True)
    }
    lines = [f"  layer {layer}: {text}" for layer, text in last.items()]
    return f"The monitor looked {steps} times and says at the end:\n" + "\n".join(lines) + "\n"


def _spectral_reading(student: SpectralEvolution) -> str:
    """What became of the spectrum, in words."""
    before, after = student.weights.alignment
    return (
        f"The weights' spectrum is {student.weights.phase()}.\n"
        f"Cosine of the leading direction with b: {before:.2f} before, {after:.2f} after training.\n"
        f"Test error {student.test_error:.3f}; the kernel machine of the initial network {student.lazy_error:.3f}.\n"
    )


def _table_reading(wines: WineFeatures) -> str:
    """What the machine has learnt, in words."""
    first, second, third = wines.leading
    return (
        f"Accuracy {wines.score:.2f} on wines that it has not seen; plain kernel regression {wines.baseline:.2f}.\n"
        f"It looks at {first}, {second} and {third} most; iteration {wines.machine.best_iteration_} is kept.\n"
    )


def _layer_table(before: Report, after: Report) -> Table:
    """A row a layer: correlations before and after training."""
    table = Table(header_style="bold")
    for column in ("layer", "shape"):
        table.add_column(column)
    for column in ("NFC before", "after", "centred", "C/UC", "moved"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, features in after.items():
        numbers = (
            f"{before[name].nfc:.3f}",
            f"{features.nfc:.3f}",
            f"{features.centered_nfc:.3f}",
            f"{features.centered_ratio:.3f}",
            f"{features.weight_change:.2f}",
        )
        table.add_row(name, f"{features.shape[1]} x {features.shape[2]}", *numbers)
    table.caption = "C/UC: share of the change in the NFC; moved: |W - W0| / |W0|"
    return table
