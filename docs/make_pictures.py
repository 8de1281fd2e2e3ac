"""Draw the pictures of the documentation into ``docs/img``. Run by hand: ``python docs/make_pictures.py``."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from sklearn.datasets import load_digits, load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import featlearn as fl
from featlearn.adaptive import penalty_curves
from featlearn.cli._spectra_page import spectra_map
from featlearn.datasets import chain_monomial_egop, chain_monomial_task
from featlearn.models import mlp
from featlearn.papers import adaptive_comparison, spectral_case
from featlearn.plots import PALETTE, matrix_row, new_figure, save_figure, style
from featlearn.training import fit

IMAGES = Path(__file__).parent / "img"
BLUE, ORANGE, GREEN = PALETTE[:3]
INK = "#1A1A1A"


def figure_1() -> None:
    """The row of matrices of figure 1 of the NFA paper."""
    task = chain_monomial_task(n=384, d=32, r=5, generator=0)
    model = mlp([32, 128, 128, 1], scales={"0": 0.01}, generator=0)
    fit(model, (task.X, task.y), lr=0.1, steps=2000, stop_loss=1e-6)
    f = fl.probe(model, task.X)["0"]
    W = f.weights["W"][0].double()
    corrupted = W.T @ fl.corrupt(f.ptk_covariance, 0) @ W
    figure = matrix_row(
        {"EGOP": chain_monomial_egop(32, r=5), "NFM": f.nfm, "AGOP": f.agop, "corrupted AGOP": corrupted},
        subtitles={
            "AGOP": f"cosine with NFM {f.nfc:.2f}",
            "corrupted AGOP": f"cosine with NFM {fl.cosine(f.nfm, corrupted):.2f}",
        },
        crop=8,
    )
    save_figure(figure, IMAGES / "figure-1.png", dpi=110)


def evolution() -> None:
    """What becomes of each layer of the network of figure 1."""
    task = chain_monomial_task(n=384, d=32, r=5, generator=0)
    model = mlp([32, 128, 128, 1], scales={"0": 0.01}, generator=0)
    monitor = fl.Monitor(model, (task.X, task.y))
    fit(model, (task.X, task.y), lr=0.1, steps=400, monitor=monitor)
    save_figure(monitor.plot(), IMAGES / "evolution.png", dpi=110)


def quantities() -> None:
    """The matrices and the numbers of the page of quantities, for its network."""
    task = chain_monomial_task(n=256, d=16, generator=0)
    model = mlp([16, 64, 64, 1], activation="gelu", scales={"0": 0.1}, generator=0)
    data, decay = (task.X, task.y), 0.01
    with fl.Monitor(
        model, data, measure="features", layers="0", loss=nn.MSELoss(), weight_decay=decay, matrices=()
    ) as monitor:
        start = copy.deepcopy(model)
        fit(model, data, lr=0.05, momentum=0.9, steps=1500, schedule="cosine", weight_decay=decay, monitor=monitor)
    f = fl.probe(model, data, initial=start, loss=nn.MSELoss(), weight_decay=decay)["0"]
    W = f.weights["W"][0].double()
    inputs = {"NFM": f.nfm, "AGOP": f.agop, "eNFA": f.enfa, "FACT": f.fact, "EGOP": chain_monomial_egop(16)}
    outputs = {"$W W^T$": W @ W.T, "K (backward AGOP)": f.ptk_covariance, "backward eNFA": f.benfa}
    outputs["backward FACT"] = f.bfact
    units = W.norm(dim=1).argsort(descending=True)
    outputs = {name: matrix[units][:, units] for name, matrix in outputs.items()}
    for name, matrices in (("inputs", inputs), ("outputs", outputs)):
        first, *others = matrices
        subtitles = {other: f"cosine {fl.cosine(matrices[first], matrices[other]):.2f}" for other in others}
        save_figure(matrix_row(matrices, subtitles=subtitles, crop=16), IMAGES / f"quantities-{name}.png", dpi=110)
    _correlations(monitor)


def _correlations(monitor: fl.Monitor) -> None:
    """NFC and its relatives, FACT and relgrad along a training."""
    panels = {
        "correlations": {"nfc": "NFC", "centered_nfc": "centered", "double_centered_nfc": "double-centered",
                         "ptk_centered_nfc": "PTK-centered", "centered_ratio": "C/UC ratio"},
        "FACT": {"fact": "cosine of FACT", "fact_symmetric": "symmetrized", "relgrad": "relgrad"},
    }  # fmt: skip
    with style():
        fig = new_figure(8.4, 3.0)
        for ax, (title, names) in zip(fig.subplots(1, 2), panels.items(), strict=True):
            for (name, label), color in zip(names.items(), PALETTE, strict=False):
                series = monitor.series(name, "0")
                line = "--" if name in ("centered_ratio", "relgrad") else "-"
                ax.plot(series.index + 1, series, label=label, color=color, linestyle=line)
            ax.set_xscale("log")
            ax.set_ylim(top=1.3)
            ax.set_title(title)
            ax.set_xlabel("step + 1")
            ax.grid()
            ax.legend(fontsize=7)
    save_figure(fig, IMAGES / "quantities-steps.png", dpi=110)


def kernels() -> None:
    """Kernels of the network of the page of kernels before and after training, rows sorted by label."""
    task = chain_monomial_task(n=200, d=16, generator=0)
    model = mlp([16, 64, 64, 1], scales={"0": 0.1}, generator=0)
    order = task.y.flatten().argsort()
    X, y = task.X[order], task.y[order]
    rows: dict[str, Tensor] = {}
    for when in ("before", "after"):
        rows |= {f"NTK {when}": fl.ntk(model, X), f"CK {when}": fl.ck(model, X)}
        if when == "before":
            fit(model, (task.X, task.y), lr=0.1, steps=1000, stop_loss=1e-5)
    rows = {name: rows[name] for name in ("NTK before", "NTK after", "CK before", "CK after")}
    aligned = {name: f"KTA {fl.kernel_target_alignment(k, y):.2f}" for name, k in rows.items()}
    # Means of ten samples with neighboring labels: a sample more or less would hide what the kernel sees.
    means = {name: k.unflatten(1, (20, 10)).mean(2).unflatten(0, (20, 10)).mean(1) for name, k in rows.items()}
    means["labels"] = fl.label_kernel(y.unflatten(0, (20, 10)).mean(1))
    save_figure(matrix_row(means, subtitles=aligned), IMAGES / "kernels.png", dpi=110)


def theory() -> None:
    """Predicted and observed rho over the decay of the data's spectrum."""
    decays = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    n = d = 128
    result = []
    for place, decay in enumerate(decays):
        generator = torch.Generator().manual_seed(1)
        rates = 1 / (1 + torch.arange(1, d + 1, dtype=torch.float64) ** decay)
        X = torch.randn(n, d, generator=generator, dtype=torch.float64) * rates.sqrt()
        y = X[:, 0] * X[:, 1] + X[:, 1] * X[:, 2] + X[:, 2] * X[:, 0]
        result.append(fl.theory.predict_quadratic(X, y, width=256, networks=10, seed=place))
    with style():
        fig = new_figure(5.2, 3.0)
        ax = fig.subplots()
        ax.plot(decays, [f.rho for f in result], color=BLUE, label="predicted")
        errors = [f.observed_error for f in result]
        means = [f.observed_mean for f in result]
        ax.errorbar(decays, means, yerr=errors, fmt="o", color=ORANGE, markersize=4, label="ten networks")
        ax.set_xlabel("decay a of the data's spectrum")
        ax.set_ylabel("correlation at the start")
        ax.set_ylim(0.8, 1.0)
        ax.grid(axis="y")
        ax.legend(loc="lower left")
    save_figure(fig, IMAGES / "theory-rho.png", dpi=110)


def penalties() -> None:
    """Figure 2 of the adaptive-tangent paper."""
    v = torch.linspace(0, 3, 200).numpy()
    names = {"v^2": "$v^2$: lazy", "square": "$(v-1)^2$", "absolute": "$|v-1|$"}
    names["square and absolute"] = "$(v-1)^2$ inputs, $|v-1|$ outputs"
    with style():
        fig = new_figure(5.2, 3.0)
        ax = fig.subplots()
        for (name, values), color in zip(penalty_curves(v).items(), ("#4D4D4D", *PALETTE), strict=False):
            ax.plot(v, values, color=color, label=names[name], linestyle="--" if name == "v^2" else "-")
        ax.set_ylim(0, 5)
        ax.set_xlim(0, 3)
        ax.set_xlabel("singular value of the change")
        ax.set_ylabel("effective penalty")
        ax.grid(axis="y")
        ax.legend(loc="upper left")
    save_figure(fig, IMAGES / "penalties.png", dpi=110)


def adapted_kernels() -> None:
    """Kernels of fresh points, sorted by label, and the comparison with lazy and trained networks."""
    X = torch.randn(230, 12, generator=torch.Generator().manual_seed(0)).numpy()
    y = torch.tanh(2 * torch.tensor(X[:, 0])).numpy()
    fresh = 150 + y[150:].argsort()

    def network(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
        return mlp([features, 128, outputs], bias=True, generator=generator)

    def kernel(scale: float | str) -> Tensor:
        model = fl.AdaptiveTangentRegressor(network, scale=scale, random_state=0).fit(X[:150], y[:150])
        k = torch.tensor(model.adapted_kernel(X[fresh]))
        return k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()

    labels = torch.tensor(y[fresh]).double()
    labels -= labels.mean()
    kernels = {"initial kernel": kernel(float("inf")), "adapted kernel": kernel("loo")}
    alignment = {name: f"alignment {fl.kernel_target_alignment(k, labels):.2f}" for name, k in kernels.items()}
    # A few large points would fade the others.
    shown = {name: k.clamp(max=float(k.flatten().quantile(0.99))) for name, k in kernels.items()}
    figure = matrix_row({**shown, "labels": fl.label_kernel(labels)}, subtitles=alignment)
    save_figure(figure, IMAGES / "adapted-kernels.png", dpi=110)
    save_figure(adaptive_comparison().plot(), IMAGES / "adaptive-comparison.png", dpi=110)


def phases() -> None:
    """A spectrum in each phase: three cases of table 1 of the spectral paper at half size, and one of weight decay."""
    cases = {case: spectral_case(case, generator=0) for case in (1, 3, 4)}
    result = {
        "invariant": (cases[1].weights.phase(), "case 1, gradient descent: $W^T W/h$"),
        "spike": (cases[3].weights.phase(), "case 3, SGD at a large rate: $W^T W/h$"),
        "heavy-tail": (cases[4].ck.phase(), "case 4, Adam: the conjugate kernel"),
    }
    task = chain_monomial_task(n=2000, d=64, r=5, generator=0)
    model = mlp([64, 128, 1], activation="quadratic", generator=0)
    before = fl.spectra.weight_eigenvalues(model.get_parameter("0.weight"))
    fit(model, (task.X, task.y), optimizer="adam", lr=3e-3, steps=3000, weight_decay=1e-3, schedule="cosine")
    after = fl.spectra.weight_eigenvalues(model.get_parameter("0.weight"))
    result["collapse"] = (fl.spectra.phase(before, after), "weight decay, a task of five inputs: $W^T W/h$")
    for name, (phase, title) in result.items():
        print(f"{name}: {phase}")
        save_figure(phase.plot(title), IMAGES / f"phase-{name}.png", dpi=110)
    save_figure(fl.spectra.power_law(cases[4].ck.trained).plot(), IMAGES / "tail.png", dpi=110)


def layer_maps() -> None:
    """The map of all matrices of a network of nine layers, trained on the digits."""
    X, y = load_digits(return_X_y=True)
    data = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
    model = mlp([64, *[160] * 8, 10], generator=0)
    fit(model, data, optimizer="adam", lr=1e-3, steps=60, loss="cross_entropy")
    result = fl.weight_spectra(model)
    save_figure(spectra_map(result, result.table("all")), IMAGES / "layer-map.png", dpi=110)


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two dense layers, each beside a skip connection."""
        z = self.norm_1(x)
        x = x + self.attn(z, z, z, need_weights=False)[0]
        down: Tensor = self.down(torch.relu(self.up(self.norm_2(x))))
        return x + down


class Transformer(nn.Module):
    """Says whether the first token of a sequence comes up again."""

    def __init__(self, tokens: int, length: int, width: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.block_0, self.block_1 = Block(width), Block(width)
        self.head = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """One number a sequence, read at its first place."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        y: Tensor = self.head(self.block_1(self.block_0(x))[:, 0])
        return y


def reports() -> None:
    """`Report.plot` of a small transformer, before and after training."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 10, (2000, 7), generator=generator)
    y = 2 * (ids[:, 1:] == ids[:, :1]).any(1, keepdim=True).float() - 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(10, 7)
    start = copy.deepcopy(model)
    save_figure(fl.probe(model, ids).plot(), IMAGES / "report-before.png", dpi=110)
    history = fit(model, (ids, y), optimizer="adam", lr=2e-3, epochs=40, batch_size=64, generator=0)
    print(f"transformer: loss {history.final_loss:.4f} in {history.seconds:.0f} s")
    report = fl.probe(model, ids, initial=start)
    save_figure(report.plot(), IMAGES / "report-after.png", dpi=110)


def flow() -> None:
    """A layer as (W, x, h), and the way from data to numbers."""
    with style():
        fig = new_figure(8.0, 3.1)
        ax = fig.subplots()
        ax.set(xlim=(0, 16), ylim=(0.7, 6.6), aspect="equal")
        ax.set_axis_off()
        _layer(ax)
        _steps(ax)
    save_figure(fig, IMAGES / "flow.png", dpi=120)


def _layer(ax: Axes) -> None:
    """The upper half: one layer inside a model, forwards and backwards."""
    y = 5.6
    _box(ax, 0.9, y, 1.5, "data", "#FFFFFF")
    _box(ax, 3.5, y, 1.7, "layers\nbelow", "#F0F0F0")
    _box(ax, 7.5, y, 1.7, "W", "#DCEBF5", size=15)
    _box(ax, 11.5, y, 1.7, "layers\nabove", "#F0F0F0")
    _box(ax, 14.9, y, 1.7, "output\nf", "#FFFFFF")
    for left, right, label in (
        (1.75, 2.55, ""),
        (4.45, 6.55, "$x$"),
        (8.45, 10.55, "$h = W x$"),
        (12.45, 13.95, ""),
    ):
        _arrow(ax, (left, y + 0.2), (right, y + 0.2), BLUE)
        ax.text((left + right) / 2, y + 0.42, label, ha="center", va="bottom", color=BLUE, fontsize=11)
    for right, left, label in ((13.95, 12.45, ""), (10.55, 8.45, r"$J = \partial f / \partial h$")):
        _arrow(ax, (right, y - 0.25), (left, y - 0.25), ORANGE)
        ax.text((left + right) / 2, y - 0.45, label, ha="center", va="top", color=ORANGE, fontsize=11)


def _steps(ax: Axes) -> None:
    """The lower half: what becomes of x and J."""
    y = 1.9
    titles = ("capture", "sums", "matrices", "numbers", "report")
    texts = (
        "$x$ and $J$ of\nall layers at once",
        "$K = \\frac{1}{n}\\sum J J^T$\nbatch by batch",
        "$F = W^T W$\n$G = W^T K W$",
        "NFC, FACT,\nratios, ...",
        "table, picture,\nfiles",
    )
    centers = [1.55, 4.85, 8.05, 11.25, 14.4]
    for center, title, text in zip(centers, titles, texts, strict=True):
        _box(ax, center, y, 2.75 if center < 2 else 2.5, "", "#FFFFFF", height=2.0)
        ax.text(center, y + 0.68, title, ha="center", va="center", fontsize=9, weight="bold", color=GREEN)
        ax.text(center, y - 0.3, text, ha="center", va="center", fontsize=9, color=INK, linespacing=1.5)
    for left, right in pairwise(centers):
        _arrow(ax, (left + (1.45 if left < 2 else 1.32), y), (right - 1.32, y), INK)
    # From the layer down to the capture.
    ax.plot([9.5, 9.5, 1.55], [4.55, 3.75, 3.75], color="#8C8C8C", linewidth=1.0, linestyle=(0, (4, 2)))
    ax.plot([5.5, 5.5], [5.6, 3.75], color="#8C8C8C", linewidth=1.0, linestyle=(0, (4, 2)))
    _arrow(ax, (1.55, 3.75), (1.55, 3.0), "#8C8C8C")


def packages() -> None:
    """Draw the packages from bottom to top; each imports only those below it."""
    rows = [
        (("_utils, errors", "files, JSON, validation, exceptions"),),
        (("linalg", "matrices, operators"), ("plots", "figures from arrays")),
        (("layers", "weights as matrices, inputs and outputs as rows"),),
        (("capture", "the only package that runs a model"),),
        (("features", "NFM, AGOP, FACT, NFC"),),
        (("kernels", "NTK, CK, PTK"),),
        (("spectra", "laws, spikes, tails, phases"),),
        (("optim", "SLO"), ("adaptive", "tangent features"), ("theory", "predictions")),
        (("datasets", "tasks, tables, images, text"), ("models", "small networks")),
        (("rfm", "recursive feature machines"),),
        (("runs", "SQLite and safetensors"),),
        (("training", "monitor, callbacks, trackers"),),
        (("reports", "HTML files"), ("dashboard", "local web pages"), ("cli", "commands")),
        (("papers", "experiments, claims, ledger"),),
    ]
    with style():
        fig = new_figure(7.2, 6.4)
        ax = fig.subplots()
        ax.set(xlim=(0, 12), ylim=(-0.1, len(rows)))
        ax.set_axis_off()
        for y, row in enumerate(rows):
            width = 12 / len(row)
            for i, (name, text) in enumerate(row):
                color = {"capture": "#FBE3D2", "papers": "#E2F2EC"}.get(name, "#EAF2F8")
                x = (i + 0.5) * width
                _box(ax, x, y + 0.43, width - 0.15, "", color, height=0.82)
                ax.text(x, y + 0.58, name, ha="center", va="center", fontsize=9, weight="bold", color=INK)
                ax.text(x, y + 0.26, text, ha="center", va="center", fontsize=7.5, color="#4D4D4D")
    save_figure(fig, IMAGES / "packages.png", dpi=110)


def wine() -> None:
    """What a recursive feature machine learns of the wine table."""
    X, y = load_wine(return_X_y=True, as_frame=True)
    X, _, y, _ = train_test_split(X, y, stratify=y, random_state=0)
    machine = fl.make_tabular(fl.RFMClassifier()).fit(X, y)["estimator"]
    save_figure(machine.plot_features(), IMAGES / "rfm-wine.png", dpi=110)


def _box(ax: Axes, x: float, y: float, width: float, text: str, color: str, height: float = 1.3, size: int = 9) -> None:
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.15", facecolor=color, edgecolor="#4D4D4D"
        )
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=INK)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    )


if __name__ == "__main__":
    flow()
    packages()
    figure_1()
    evolution()
    quantities()
    kernels()
    theory()
    penalties()
    adapted_kernels()
    reports()
    phases()
    layer_maps()
    wine()
