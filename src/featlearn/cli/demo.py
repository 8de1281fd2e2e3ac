"""Command ``featlearn demo``, which shows the main results of the library in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from featlearn.cli._console import print_files, print_json, print_line, result_console, text_table
from featlearn.cli._errors import handle_errors
from featlearn.cli._fit import use_one_core
from featlearn.cli._output_dir import check_folder, check_run, open_page

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Group

    from featlearn.features import Report
    from featlearn.reports import Section
    from featlearn.rfm import RFMClassifier
    from featlearn.runs import Run
    from featlearn.training.chain_alignment import ChainAlignment
    from featlearn.training.two_layer import SpectralEvolution

_CHAIN = "The chain monomial", "y = x1 x2 + x2 x3 + ... + x5 x1, in 32 dimensions"
_STUDENT = "A two-layer network and its teacher", "y = s(x . b) + noise, by SGD at a large rate"
_WINES = "A table of wines", "three cultivars classified by a recursive feature machine"
_RUN = {"task": "chain monomial", "lr": 0.1}
_FILES = (
    "run", "report", "features.png", "layers.png", "evolution.png", "spectrum.png", "wine.png", "index.html",
)  # fmt: skip
_COLUMNS = "C/UC: share of the change in the NFC; moved: |W - W0| / |W0|"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures and the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, network and rotations.")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Train two small networks and fit a recursive feature machine to a table.

    Probes one network and analyzes the spectrum of the other. Writes
    figures, a run, a report, and the page index.html, which works offline.

    Examples:
      featlearn demo
      featlearn demo --out tour --seed 1 --open
    """
    began = time.perf_counter()
    with handle_errors(f"Files in {out} may be of this demo and of an earlier one."):
        from featlearn.plots import save_figure
        from featlearn.reports import write_report
        from featlearn.runs import Run, remove
        from featlearn.training import evolution
        from featlearn.training.chain_alignment import chain_alignment
        from featlearn.training.two_layer import spectral_case

        use_one_core()
        check_folder(out, _FILES)
        check_run(out / "run", _RUN)
        if (out / "run" / "run.db").exists():
            remove(out / "run")  # of an earlier demo
        with Run.create(out / "run", _RUN, seed=seed) as run:
            chain = chain_alignment(generator=seed, run=run, progress=True)
        student = spectral_case(3, (500, 375, 250), lr=18.0, generator=seed, progress=True)
        wines = wine_features(seed=seed)
        figures = {
            "features": chain.plot(),
            "layers": chain.after.plot(["nfc", "centered_nfc"]),
            "evolution": evolution(run, title="the chain monomial"),
            "spectrum": student.weights.phase().plot("spectrum of $W^T W/h$"),
            "wine": wines.plot(),
        }
        for name, figure in figures.items():
            save_figure(figure, out / f"{name}.png")
        chain.after.save(out / "report")
        page = write_report(
            out / "index.html",
            "Feature learning in three small examples",
            f"Results of featlearn demo with seed {seed}, in {time.perf_counter() - began:.0f} s.",
            _sections(chain, student, wines, run, figures),
        )
        seconds = time.perf_counter() - began
        if as_json:
            print_json(_numbers(chain, student, wines) | {"page": str(page), "seconds": round(seconds, 1)})
        else:
            _print(chain, student, wines, run, out, seconds)
        if show:
            open_page(page)


def _print(
    chain: ChainAlignment, student: SpectralEvolution, wines: WineFeatures, run: Run, out: Path, seconds: float
) -> None:
    console = result_console()
    print_line(console, Text("\n").append(_CHAIN[0], "bold").append(f", {_CHAIN[1]}"))
    print_line(console, f"{_training(chain)}\n")
    console.print(_layer_table(chain.before, chain.after))
    print_line(console, "\n" + "\n".join(_chain_summary(chain)) + "\n")
    diagnoses = Text(_monitor_summary(run) + "\n")
    for layer, (word, reason) in _diagnoses(run).iterrows():
        diagnoses.append(f"  layer {layer}: ").append(word, "bold").append(f", {reason}\n")
    print_line(console, diagnoses)
    for (title, subtitle), lines in ((_STUDENT, _student_summary(student)), (_WINES, _wine_summary(wines))):
        print_line(console, Text(title, "bold").append(f", {subtitle}"))
        print_line(console, "\n".join(lines) + "\n")
    files = (
        ("features.png", "EGOP, NFM, AGOP and corrupted AGOP"),
        ("layers.png", "correlations by layer"),
        ("evolution.png", "metrics of each layer over the steps"),
        ("spectrum.png", "eigenvalues of the weights before and after"),
        ("wine.png", "feature matrix of the wine table"),
        ("report", "for featlearn.Report.load"),
        ("run", "for featlearn.runs.open"),
        ("index.html", "all results on one page"),
    )
    print_files(console, [(out / name, what) for name, what in files])
    console.print(f"[dim]{seconds:.1f} s[/dim]")


def _sections(
    chain: ChainAlignment, student: SpectralEvolution, wines: WineFeatures, run: Run, figures: dict[str, Figure]
) -> list[Section]:
    from featlearn.reports import Section

    chain_text = (f"{_CHAIN[1]}. {_training(chain)}.", " ".join(_chain_summary(chain)))
    chain_table = {_COLUMNS: _layer_frame(chain.before, chain.after)}
    chain_figures = {
        "Dependence of the labels on the inputs (EGOP), the weights (NFM), the gradients (AGOP), and the AGOP with "
        "random eigenvectors of K": figures["features"],
        "Correlations by layer": figures["layers"],
    }
    evolution = {"Metrics of each layer over the steps": figures["evolution"]}
    spectrum = {"Eigenvalues of the first layer's weights before and after training": figures["spectrum"]}
    wine_text = (f"{_WINES[1].capitalize()}.", " ".join(_wine_summary(wines)))
    wine_table = {"Shares of the feature matrix's diagonal, the five largest": _importances(wines)}
    wine_figure = {"The feature matrix, and its diagonal": figures["wine"]}
    return [
        Section(_CHAIN[0], chain_text, chain_table, chain_figures),
        Section("The same training, monitored", (_monitor_summary(run),), {"": _diagnoses(run)}, evolution),
        Section(_STUDENT[0], (f"{_STUDENT[1]}.", " ".join(_student_summary(student))), figures=spectrum),
        Section(_WINES[0], wine_text, wine_table, wine_figure),
    ]


def _numbers(chain: ChainAlignment, student: SpectralEvolution, wines: WineFeatures) -> dict[str, Any]:
    return {
        "chain": {
            "layers": _layer_frame(chain.before, chain.after).reset_index().to_dict(orient="records"),
            "corrupted_nfc": chain.mean_corrupted_nfc,
            "spread": chain.spread,
            "loss": chain.history.final_loss,
            "test_loss": chain.test_loss,
        },
        "student": {
            "phase": str(student.weights.phase()),
            "alignment": student.weights.alignment,
            "test_error": student.test_error,
            "lazy_error": student.lazy_error,
        },
        "wine": {"accuracy": wines.score, "baseline": wines.baseline, "leading": wines.leading},
    }


def _training(chain: ChainAlignment) -> str:
    return (
        f"{chain.after.samples} points, two hidden ReLU layers, {len(chain.history.step)} steps of gradient "
        f"descent: loss {chain.history.final_loss:.0e}, test {chain.test_loss:.2f}"
    )


def _chain_summary(result: ChainAlignment) -> list[str]:
    low, high = min(result.corrupted_nfc), max(result.corrupted_nfc)
    return [
        f"The weights of the first layer align with their gradients: NFC {result.after['0'].nfc:.2f}.",
        f"With random eigenvectors of K, the NFC decreases to {result.mean_corrupted_nfc:.2f} "
        f"({low:.2f} to {high:.2f}).",
        f"K is far from the identity: its eigenvalues deviate by {result.spread:.1f} times their mean.",
    ]


def _diagnoses(run: Run) -> pd.DataFrame:
    """Return the diagnosis of each layer at the end of the run."""
    import pandas as pd

    words, reasons = run.texts("reading"), run.texts("reason")
    last = dict(zip(words["layer"], zip(words["value"], reasons["value"], strict=True), strict=True))
    return pd.DataFrame.from_dict(last, orient="index", columns=["diagnosis", "reason"]).rename_axis("layer")


def _monitor_summary(run: Run) -> str:
    return f"The monitor measured {len(set(run.texts('reading')['step']))} times. Diagnoses at the end:"


def _student_summary(student: SpectralEvolution) -> list[str]:
    before, after = student.weights.alignment
    return [
        f"The spectrum of the weights is {student.weights.phase()}.",
        f"Cosine of the leading direction with b: {before:.2f} before, {after:.2f} after training.",
        f"Test error {student.test_error:.3f}; kernel regression of the initial network {student.lazy_error:.3f}.",
    ]


def _wine_summary(wines: WineFeatures) -> list[str]:
    first, second, third = wines.leading
    return [
        f"Accuracy {wines.score:.2f} on held-out wines; plain kernel regression {wines.baseline:.2f}.",
        f"The most important features are {first}, {second} and {third}; iteration {wines.machine.best_iteration_} "
        "is selected.",
    ]


def _importances(wines: WineFeatures) -> pd.DataFrame:
    import pandas as pd

    shares = pd.Series(wines.machine.feature_importances_, index=wines.machine.feature_names())
    top = shares.sort_values(ascending=False).head(5)
    return pd.DataFrame({"importance": top}).rename_axis("measurement")


def _layer_frame(before: Report, after: Report) -> pd.DataFrame:
    """Return the correlations of each layer before and after training."""
    import pandas as pd

    rows = {}
    for name, layer in after.items():
        metrics = before[name].nfc, layer.nfc, layer.centered_nfc, layer.centered_ratio, layer.weight_change
        rows[name] = (f"{layer.shape[1]} x {layer.shape[2]}", *metrics)
    columns = ["shape", "NFC before", "after", "centered", "C/UC", "moved"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("layer")


def _layer_table(before: Report, after: Report) -> Group:
    frame = _layer_frame(before, after)
    columns = {"layer": "left", "shape": "left"} | dict.fromkeys(frame.columns[1:], "right")
    rows = [
        (name, shape, *(f"{value:.3f}" for value in numbers[:-1]), f"{numbers[-1]:.2f}")
        for name, shape, *numbers in frame.itertuples()
    ]
    return text_table(columns, rows, _COLUMNS)


@dataclass(frozen=True, eq=False)
class WineFeatures:
    """Recursive feature machine of the wines, and its accuracy.

    Attributes:
        machine: Fitted estimator.
        score: Accuracy on a held-out quarter of the wines.
        baseline: Accuracy of plain kernel regression on the same wines.
    """

    machine: RFMClassifier
    score: float
    baseline: float

    @property
    def leading(self) -> list[str]:
        """Names of the three most important features."""
        order = (-self.machine.feature_importances_).argsort(kind="stable")[:3]
        return [self.machine.feature_names()[i].replace("_", " ") for i in order]

    def plot(self) -> Figure:
        """Plot the feature matrix and its diagonal."""
        return self.machine.plot_features()


def wine_features(seed: int = 0) -> WineFeatures:
    """Fit a recursive feature machine, and plain kernel regression, to three quarters of the wines.

    Args:
        seed: Seed of the split.
    """
    from sklearn.datasets import load_wine
    from sklearn.model_selection import train_test_split

    from featlearn.rfm import RFMClassifier, make_tabular

    X, y = load_wine(return_X_y=True, as_frame=True)
    X, X_test, y, y_test = train_test_split(X, y, stratify=y, random_state=seed)
    fitted = [make_tabular(RFMClassifier(update=update)).fit(X, y) for update in ("fact", "none")]
    score, baseline = (float(model.score(X_test, y_test)) for model in fitted)
    return WineFeatures(fitted[0]["estimator"], score, baseline)
