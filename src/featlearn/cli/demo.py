"""``featlearn demo``: show the library's main results in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from featlearn.cli._console import print_files, print_json, result_console, text_table
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
_WINES = "A table of wines", "three cultivars told apart by a recursive feature machine"
_RUN = {"task": "chain monomial", "lr": 0.1}
_FILES = (
    "run", "report", "features.png", "layers.png", "evolution.png", "spectrum.png", "wine.png", "index.html",
)  # fmt: skip
_COLUMNS = "C/UC: share of the change in the NFC; moved: |W - W0| / |W0|"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, network and rotations.")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead.")] = False,
) -> None:
    """Train two small networks, probe one and look at the spectrum of the other; fit a feature machine to a table.

    Writes pictures, a run, a report and one page with everything,
    index.html, which needs no network.

    Examples:
      featlearn demo
      featlearn demo --out tour --seed 1 --open
    """
    began = time.perf_counter()
    with handle_errors(f"What is in {out} may be of this demo and of the one before."):
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
            remove(out / "run")  # of the demo before
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
            f"What featlearn demo has made with seed {seed}, in {time.perf_counter() - began:.0f} s.",
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

    def say(text: str | Text) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(Text("\n").append(_CHAIN[0], "bold").append(f", {_CHAIN[1]}"))
    say(f"{_training(chain)}\n")
    console.print(_layer_table(chain.before, chain.after))
    say("\n" + "\n".join(_reading(chain)) + "\n")
    console.print(_layer_words(run), soft_wrap=True)
    say(Text(_STUDENT[0], "bold").append(f", {_STUDENT[1]}"))
    say("\n".join(_spectral_reading(student)) + "\n")
    say(Text(_WINES[0], "bold").append(f", {_WINES[1]}"))
    say("\n".join(_table_reading(wines)) + "\n")
    told = (
        ("features.png", "EGOP, NFM, AGOP and corrupted AGOP"),
        ("layers.png", "correlations by layer"),
        ("evolution.png", "what became of each layer, step by step"),
        ("spectrum.png", "eigenvalues of the weights before and after"),
        ("wine.png", "feature matrix of the wine table"),
        ("report", "featlearn.Report.load reads it"),
        ("run", "featlearn.runs.open reads it"),
        ("index.html", "all of it on one page"),
    )
    print_files(console, [(out / name, what) for name, what in told])
    console.print(f"[dim]{seconds:.1f} s[/dim]")


def _sections(
    chain: ChainAlignment, student: SpectralEvolution, wines: WineFeatures, run: Run, figures: dict[str, Figure]
) -> list[Section]:
    from featlearn.reports import Section

    top = _importances(wines)
    return [
        Section(
            _CHAIN[0],
            (f"{_CHAIN[1]}. {_training(chain)}.", " ".join(_reading(chain))),
            {_COLUMNS: _layer_frame(chain.before, chain.after)},
            {
                "What the labels depend on (EGOP), the weights (NFM), the gradients through them (AGOP), and the "
                "AGOP with random eigenvectors in place of K's own": figures["features"],
                "Correlations by layer": figures["layers"],
            },
        ),
        Section(
            "The same training, watched",
            (f"The monitor looked {len(set(run.texts('reading')['step']))} times, and says at the end:",),
            {"": _readings(run)},
            {"Each layer, step by step": figures["evolution"]},
        ),
        Section(
            _STUDENT[0],
            (f"{_STUDENT[1]}.", " ".join(_spectral_reading(student))),
            figures={"Eigenvalues of the first layer's weights before and after training": figures["spectrum"]},
        ),
        Section(
            _WINES[0],
            (f"{_WINES[1].capitalize()}.", " ".join(_table_reading(wines))),
            {"Shares of the feature matrix's diagonal, the five largest": top},
            {"The feature matrix, and its diagonal": figures["wine"]},
        ),
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


def _reading(result: ChainAlignment) -> list[str]:
    """What the numbers say, in words."""
    low, high = min(result.corrupted_nfc), max(result.corrupted_nfc)
    return [
        f"The first layer's weights align with the gradients through them: NFC {result.after['0'].nfc:.2f}.",
        f"With random eigenvectors in place of K's own it falls to {result.mean_corrupted_nfc:.2f} "
        f"({low:.2f} to {high:.2f}).",
        f"K is far from the identity: its eigenvalues deviate by {result.spread:.1f} times their mean.",
    ]


def _readings(run: Run) -> pd.DataFrame:
    """What the monitor says of each layer at the end of the run."""
    import pandas as pd

    words, reasons = run.texts("reading"), run.texts("reason")
    last = dict(zip(words["layer"], zip(words["value"], reasons["value"], strict=True), strict=True))
    return pd.DataFrame.from_dict(last, orient="index", columns=["it is", "because"]).rename_axis("layer")


def _layer_words(run: Run) -> Text:
    found = Text(f"The monitor looked {len(set(run.texts('reading')['step']))} times and says at the end:\n")
    for layer, (word, reason) in _readings(run).iterrows():
        found.append(f"  layer {layer}: ").append(word, "bold").append(f", {reason}\n")
    return found


def _spectral_reading(student: SpectralEvolution) -> list[str]:
    """What became of the spectrum, in words."""
    before, after = student.weights.alignment
    return [
        f"The weights' spectrum is {student.weights.phase()}.",
        f"Cosine of the leading direction with b: {before:.2f} before, {after:.2f} after training.",
        f"Test error {student.test_error:.3f}; the kernel machine of the initial network {student.lazy_error:.3f}.",
    ]


def _table_reading(wines: WineFeatures) -> list[str]:
    """What the machine has learned, in words."""
    first, second, third = wines.leading
    return [
        f"Accuracy {wines.score:.2f} on wines that it has not seen; plain kernel regression {wines.baseline:.2f}.",
        f"It looks at {first}, {second} and {third} most; iteration {wines.machine.best_iteration_} is kept.",
    ]


def _importances(wines: WineFeatures) -> pd.DataFrame:
    import pandas as pd

    shares = pd.Series(wines.machine.feature_importances_, index=wines.machine.feature_names())
    top = shares.sort_values(ascending=False).head(5)
    return pd.DataFrame({"importance": top}).rename_axis("measurement")


def _layer_frame(before: Report, after: Report) -> pd.DataFrame:
    """A row a layer: correlations before and after training."""
    import pandas as pd

    rows = {
        name: (
            f"{features.shape[1]} x {features.shape[2]}", before[name].nfc, features.nfc, features.centered_nfc,
            features.centered_ratio, features.weight_change,
        )
        for name, features in after.items()
    }  # fmt: skip
    columns = ["shape", "NFC before", "after", "centered", "C/UC", "moved"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("layer")


def _layer_table(before: Report, after: Report) -> Group:
    columns = {"layer": "left", "shape": "left"} | dict.fromkeys(
        ("NFC before", "after", "centered", "C/UC", "moved"), "right"
    )
    rows = [
        (name, shape, *(f"{value:.3f}" for value in numbers[:-1]), f"{numbers[-1]:.2f}")
        for name, shape, *numbers in _layer_frame(before, after).itertuples()
    ]
    return text_table(columns, rows, _COLUMNS)


@dataclass(frozen=True, eq=False)
class WineFeatures:
    """Recursive feature machine of the wines, and how well it predicts.

    Attributes:
        machine: Fitted estimator.
        score: Accuracy on a quarter of the wines, left out of the fit.
        baseline: Accuracy of plain kernel regression on the same wines.
    """

    machine: RFMClassifier
    score: float
    baseline: float

    @property
    def leading(self) -> list[str]:
        """The three measurements that count most, in words."""
        order = (-self.machine.feature_importances_).argsort(kind="stable")[:3]
        return [self.machine.feature_names()[i].replace("_", " ") for i in order]

    def plot(self) -> Figure:
        """The feature matrix and its diagonal."""
        return self.machine.plot_features()


def wine_features(seed: int = 0) -> WineFeatures:
    """Fit the machine, and plain kernel regression, to three quarters of the wines.

    Args:
        seed: Of the split.
    """
    from sklearn.datasets import load_wine
    from sklearn.model_selection import train_test_split

    from featlearn.rfm import RFMClassifier, make_tabular

    X, y = load_wine(return_X_y=True, as_frame=True)
    X, X_test, y, y_test = train_test_split(X, y, stratify=y, random_state=seed)
    fitted = [make_tabular(RFMClassifier(update=update)).fit(X, y) for update in ("fact", "none")]
    score, baseline = (float(model.score(X_test, y_test)) for model in fitted)
    return WineFeatures(fitted[0]["estimator"], score, baseline)
