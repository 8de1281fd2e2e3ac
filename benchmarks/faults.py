"""Faults put into short trainings, and the findings of the monitor: a confusion matrix, and false alarms.

    python -m benchmarks.faults [--seeds N] [--report] [--jobs N] [--faults NAME ...] [--architectures NAME ...]

Each training has one fault, from its start or from step 100 of 400 on. Healthy trainings vary in optimizer, learning
rate, activation, normalization and schedule. Thresholds were chosen with seeds 0 to 9, 100 to 109 and 200 to 209;
``--report`` uses 300 to 309.

The onset of a fault is the step at which it can first be seen by any means, see `visible_from`. From there on, looks
(steps with signals) and measurements are counted until the monitor names it.
The table is printed, and written to ``benchmarks/results/faults.md``.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed
from sklearn.datasets import load_digits
from torch import Tensor, nn

from featlearn import Monitor
from featlearn.training.diagnosis import Findings, severity_key

STEPS, MIDDLE, BATCH = 400, 100, 64
ARCHITECTURES = ("mlp", "cnn", "transformer")
HEALTHY = "healthy"
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "leaky": nn.LeakyReLU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One training.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        fault: Fault to inject, or `HEALTHY`.
        seed: Seed of all random choices.
        activation: Name of the activation.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``.
        lr: Learning rate.
        depth: Number of hidden layers or blocks.
        norm: Whether hidden layers are normalized.
        residual: Whether blocks of a transformer are residual.
        schedule: ``"constant"``, ``"cosine"`` or ``"warmup"``.
        clip: Largest norm of a gradient; None does not clip.
        dropout: Probability of dropout.
        onset: First step with the fault.
        usual_lr: Learning rate of the same training without the fault.
    """

    architecture: str
    fault: str
    seed: int
    activation: str = "relu"
    optimizer: str = "adam"
    lr: float = 1e-3
    depth: int = 3
    norm: bool = False
    residual: bool = True
    schedule: str = "constant"
    clip: float | None = None
    dropout: float = 0.0
    onset: int = 0
    usual_lr: float = 1e-3


@dataclass
class Outcome:
    """Findings of one training.

    Attributes:
        setup: Training.
        named: First step of each fault that was found, from the onset on.
        alarms: Faults that were found with the severity "problem" or "warning".
        first: Most severe fault at the first step with findings.
        looks: Steps at which signals were taken.
        measured: Steps at which the model was measured.
        shares: Time of signals and of measurements over the time of training.
        losses: Loss of each step.
        bulk: Median singular value of the chosen layer over that of its start, at each step.
        visible: First step at which the fault can be seen.
    """

    setup: Setup
    named: dict[str, int] = field(default_factory=dict)
    alarms: set[str] = field(default_factory=set)
    first: str = ""
    looks: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    shares: tuple[float, float] = (0.0, 0.0)
    losses: list[float] = field(default_factory=list)
    bulk: list[float] = field(default_factory=list)
    visible: int = 0

    def until_named(self, steps: Iterable[int]) -> float:
        """Return how many of some steps follow the onset until the fault was named; infinite if it was not."""
        step = self.named.get(self.setup.fault)
        return math.inf if step is None else sum(self.visible < other <= step for other in steps)


class Attention(nn.Module):
    """Self-attention with two heads."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Block of a transformer, with or without normalization and residual connections."""

    def __init__(self, d: int, setup: Setup) -> None:
        super().__init__()
        norm = (lambda: nn.LayerNorm(d)) if setup.residual else nn.Identity
        self.norm1, self.norm2, self.residual = norm(), norm(), setup.residual
        self.attention = Attention(d)
        self.up, self.act, self.down = nn.Linear(d, 4 * d), _ACTIVATIONS[setup.activation](), nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(setup.dropout)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.attention(self.norm1(x))
        x = x + y if self.residual else y
        y = self.dropout(self.down(self.act(self.up(self.norm2(x)))))
        return x + y if self.residual else y


class Transformer(nn.Module):
    """Transformer that reads the rows of an image as tokens."""

    def __init__(self, setup: Setup, d: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, d)
        self.position = nn.Parameter(0.3 * torch.randn(8, d))
        self.blocks = nn.Sequential(*(Block(d, setup) for _ in range(setup.depth)))
        self.norm, self.head = nn.LayerNorm(d) if setup.residual else nn.Identity(), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(x.unflatten(1, (8, 8))) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


class Centered(nn.Module):
    """Output of a model minus that at its start, scaled: training stays close to the linear regime."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.net, self.scale = model, scale
        self._start = [copy.deepcopy(model).requires_grad_(False)]  # in a list, so that it is not a part of the model

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        with torch.no_grad():
            start = self._start[0](x)
        return self.scale * (self.net(x) - start)


def make_model(setup: Setup) -> nn.Module:
    """Return the model of a training, with ten outputs for images of 8 x 8 pixels."""
    if setup.architecture == "transformer":
        return Transformer(setup)
    act = _ACTIVATIONS[setup.activation]
    parts: list[nn.Module] = []
    if setup.architecture == "mlp":
        width = 256 if setup.fault == "lazy layer" else 64
        for i in range(setup.depth):
            parts += [nn.Linear(64 if i == 0 else width, width)]
            parts += [nn.BatchNorm1d(width)] if setup.norm else []
            parts += [act(), nn.Dropout(setup.dropout)] if setup.dropout else [act()]
        return nn.Sequential(*parts, nn.Linear(width, 10))
    channels = 16
    for i in range(setup.depth):
        parts += [nn.Conv2d(1 if i == 0 else channels, channels, 3, padding=1)]
        parts += [nn.BatchNorm2d(channels)] if setup.norm else []
        parts += [act()] if i else [act(), nn.AvgPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *parts, nn.Flatten(), nn.Linear(16 * channels, 10))


def hidden_layers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the layers that an activation follows, in the order of the model."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if ups := [m.up for m in model.modules() if isinstance(m, Block)]:
        return ups
    return layers[:-1]


def draw_setup(architecture: str, fault: str, seed: int) -> Setup:
    """Return a training of varied settings; those that a fault needs are fixed."""
    rng = torch.Generator().manual_seed(1000 * seed + 7 * ARCHITECTURES.index(architecture) + len(fault))

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=rng))]

    optimizer = pick("sgd", "momentum", "adam", "adamw")
    adaptive = optimizer.startswith("adam")
    lr = pick(1e-3, 2e-3) if adaptive else pick(0.1, 0.2) if optimizer == "sgd" else pick(0.01, 0.03)
    lr = lr / 2 if architecture == "transformer" and not adaptive else lr
    setup = Setup(architecture, fault, seed, optimizer=optimizer, lr=lr, usual_lr=lr, activation=pick("relu", "gelu"))
    middle = pick(0, MIDDLE)
    if fault == HEALTHY:
        return replace(
            setup,
            activation=pick("relu", "gelu", "tanh", "leaky", "silu"),
            lr=lr * pick(0.5, 1.0, 2.0),
            depth=pick(2, 3, 4),
            norm=pick(False, True),
            schedule=pick("constant", "cosine", "warmup"),
            clip=pick(None, 1.0),
            dropout=pick(0.0, 0.1),
        )
    changes: dict[str, dict[str, Any]] = {
        "dead units": {"activation": "relu", "onset": middle},
        "dead layer": {"activation": "relu", "onset": middle},
        "vanishing gradients": {"activation": "sigmoid", "depth": 8, "residual": False},
        "exploding gradients": {"depth": 6, "residual": False},
        "divergence": {"onset": MIDDLE},
        "learning rate too high": {"lr": (100 if architecture == "transformer" else 30) * lr},
        "learning rate too low": {"lr": lr / 3000},
        "lazy layer": {"optimizer": "sgd", "lr": {"mlp": 0.5, "cnn": 2.0, "transformer": 0.3}[architecture]},
        "rank collapse": {"onset": MIDDLE},
        "saturation": {"activation": "tanh", "onset": middle},
    }
    return replace(setup, **changes.get(fault, {}))


def train(setup: Setup, *, watched: bool = True) -> Outcome:
    """Train with a fault, and return the findings of a monitor.

    Args:
        setup: Training.
        watched: Whether there is a monitor.
    """
    generator = torch.Generator().manual_seed(setup.seed)
    torch.manual_seed(setup.seed)
    X, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    X, y = ((X - X.mean()) / X.std()).float(), y.long()
    model: nn.Module = make_model(setup)
    fault, lr, begun = setup.fault, setup.lr, False
    layers = hidden_layers(model)
    # A layer with others before it, so that the fault is not at the inputs alone.
    chosen = layers[int(torch.randint(len(layers), (1,), generator=generator))]
    if fault == "shuffled labels":
        y = y[torch.randperm(len(y), generator=generator)]
    if fault == "lazy layer":
        model, lr = Centered(model, 100.0), lr / 100.0**2
    if fault == "exploding gradients":
        with torch.no_grad():
            for layer in (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)):
                layer.weight.mul_(10)
    missing = {id(p) for p in chosen.parameters()} if fault == "frozen layer" else set()
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
        "momentum": lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9),
    }  # fmt: skip
    optimizer = kinds[setup.optimizer]([p for p in model.parameters() if id(p) not in missing], lr=lr)
    ascent, decay, low_rank = False, 0.0, False
    outcome, usual = Outcome(setup), bulk_of(chosen.weight)
    monitor = Monitor(model, (X, y), samples=128, budget=0.05) if watched else None
    began = time.perf_counter()
    for step in range(STEPS):
        if not begun and step >= setup.onset and fault != HEALTHY:
            begun = True
            if fault in ("dead units", "dead layer"):
                kill_units(
                    chosen, 1.0 if fault == "dead layer" else 0.7 + 0.25 * float(torch.rand((), generator=generator))
                )
            elif fault == "saturation":
                with torch.no_grad():
                    chosen.weight.mul_(60 if isinstance(chosen, nn.Conv2d) else 20)
            elif fault == "divergence":
                ascent = setup.seed % 2 == 0
                lr *= 1.0 if ascent else 300.0
            elif fault == "rank collapse":
                low_rank = setup.seed % 2 == 0
                decay = 0.0 if low_rank else 0.06
        for group in optimizer.param_groups:
            group["lr"] = lr * scheduled(setup.schedule, step)
        rows = torch.randint(len(X), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
        outcome.losses.append(float(loss.detach()))
        if monitor is not None:
            monitor.step(step, loss=loss)
            note(outcome, monitor.findings(), step)
        optimizer.zero_grad()
        (-loss if ascent else loss).backward()
        if setup.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
        with torch.no_grad():
            if decay:
                for p in model.parameters():
                    p.mul_(1 - decay)
            if low_rank:
                chosen.weight.copy_(of_rank_one(chosen.weight))
            if fault == "rank collapse":
                outcome.bulk.append(bulk_of(chosen.weight) / usual)
    if monitor is None:
        return outcome
    monitor.last(STEPS)
    note(outcome, monitor.findings(), STEPS)
    seconds = time.perf_counter() - began
    signals, measured = monitor._watch.signals.spent, monitor.budget.spent
    outcome.shares = signals / (seconds - signals - measured), measured / (seconds - signals - measured)
    frame = monitor.metrics()
    for name, steps in (("signal.gradient_norm", outcome.looks), ("monitor.seconds", outcome.measured)):
        steps += sorted(frame["step"][frame["name"] == name].unique().tolist())
    outcome.visible = visible_from(outcome)
    return outcome


def visible_from(outcome: Outcome) -> int:
    """Return the first step at which a fault can be seen by any means, from losses and weights alone.

    A change of weights shows at once, and a layer that the optimizer leaves out after the first update. The loss
    diverges when it is not finite or three times its start, and a layer can be called lazy when the loss is half of it.
    The rank has collapsed when the median singular value is below 5% of that at the start. Learning rates and shuffled
    labels show when the same training without the fault has lost a fifth of its loss.
    """
    setup = outcome.setup
    losses = outcome.losses
    by_twin = ("learning rate too high", "learning rate too low", "shuffled labels")
    if setup.fault in by_twin:
        losses = train(replace(setup, fault=HEALTHY, lr=setup.usual_lr), watched=False).losses
    start = statistics.median(losses[:3])
    levels = [statistics.median(losses[max(0, step - 7) : step + 1]) for step in range(len(losses))]
    seen: dict[str, Iterable[bool]] = {
        "divergence": (not loss < 3 * start for loss in losses),
        "lazy layer": (level < start / 2 for level in levels),
        "rank collapse": (not bulk > 0.05 for bulk in outcome.bulk),
        "frozen layer": (step > 0 for step in range(STEPS)),
    }
    if setup.fault in by_twin:
        seen[setup.fault] = (level < 0.8 * start for level in levels)
    steps = (step for step, now in enumerate(seen.get(setup.fault, ())) if now and step >= setup.onset)
    return next(steps, setup.onset)


def bulk_of(weight: Tensor) -> float:
    """Return the median singular value of a weight matrix; NaN if it is not finite."""
    matrix = weight.detach().flatten(1)
    return float(torch.linalg.svdvals(matrix).median()) if bool(torch.isfinite(matrix).all()) else math.nan


def kill_units(layer: nn.Linear | nn.Conv2d, share: float) -> None:
    """Give a share of the units of a layer biases that no input exceeds."""
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias[: int(share * len(layer.bias))] = -100.0


def of_rank_one(weight: Tensor) -> Tensor:
    """Return the nearest matrix of rank one."""
    u, s, v = torch.linalg.svd(torch.nan_to_num(weight.flatten(1)), full_matrices=False)
    return (s[0] * u[:, :1] @ v[:1]).view_as(weight)


def scheduled(schedule: str, step: int) -> float:
    """Return the factor of the learning rate at a step."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return min(1.0, (step + 1) / 40) if schedule == "warmup" else 1.0


def note(outcome: Outcome, findings: Findings, step: int) -> None:
    """Add the present findings to those of a training."""
    present = [finding for of_layer in findings.values() for finding in of_layer]
    if step < outcome.setup.onset:
        return
    for finding in present:
        outcome.named.setdefault(finding.fault, step)
        if finding.severity != "note":
            outcome.alarms.add(finding.fault)
    if present and not outcome.first:
        outcome.first = min(present, key=severity_key).fault


def run_all(setups: Iterable[Setup], jobs: int, verbose: bool) -> list[Outcome]:
    """Return the outcomes of trainings, in parallel processes if there are several jobs."""
    outcomes = []
    for o in Parallel(n_jobs=jobs, return_as="generator")(delayed(_train_alone)(setup) for setup in setups):
        outcomes.append(o)
        if verbose:
            s, shares = o.setup, " ".join(f"{share:.1%}" for share in o.shares)
            settings = f"{s.optimizer:9}{s.lr:8.2g} {s.activation:8}{s.onset:4}"
            found = o.named or o.first  # the text of an error, if there was one
            loss = o.losses[-1] if o.losses else math.nan
            print(f"{s.fault:24}{s.architecture:12}{s.seed:4} {settings} loss {loss:8.3g} "
                  f"looks {len(o.looks)} time {shares} visible {o.visible} {found}", flush=True)  # fmt: skip
    return outcomes


def _train_alone(setup: Setup) -> Outcome:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # measurements of diverged models
        try:
            return train(setup)
        except Exception as error:  # counts as a fault without a name
            return Outcome(setup, first=f"{type(error).__name__}: {error}")


def report(outcomes: list[Outcome]) -> str:
    """Return the tables as markdown."""
    faulty = [o for o in outcomes if o.setup.fault != HEALTHY]
    healthy = [o for o in outcomes if o.setup.fault == HEALTHY]
    faults = list(dict.fromkeys(o.setup.fault for o in faulty))
    others = sorted({name for o in outcomes for name in o.named} - set(faults))
    names = [*faults, *others]
    lines = ["Share of trainings with an injected fault (rows) in which a fault was named (columns), in percent.", ""]
    lines += ["| injected | " + " | ".join(names) + " | named | first | in two looks | in two measurements | steps |"]
    lines += ["|---|" + "---|" * (len(names) + 5)]
    for fault in [*faults, *([HEALTHY] if healthy else [])]:
        own = [o for o in outcomes if o.setup.fault == fault]
        counts = Counter(name for o in own for name in o.named)
        cells = [f"{100 * counts[name] / len(own):.0f}" if counts[name] else "" for name in names]
        named = [o for o in own if fault in o.named]
        if fault == HEALTHY:
            cells += [""] * 5
        else:
            steps = sorted(o.named[fault] - o.visible for o in named)
            cells += [f"**{len(named) / len(own):.0%}**", f"{sum(o.first == fault for o in own) / len(own):.0%}"]
            cells += [f"{share:.0%}" for share in in_two(own)]
            cells += [str(steps[len(steps) // 2]) if steps else ""]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    if faulty:
        named_share = sum(o.setup.fault in o.named for o in faulty) / len(faulty)
        looks, measurements = in_two(faulty)
        first = sum(o.first == o.setup.fault for o in faulty) / len(faulty)
        lines += ["", f"Named: {named_share:.1%} of {len(faulty)} faults; within two looks of the onset: {looks:.1%}, "
                  f"within two measurements: {measurements:.1%}; named first: {first:.1%}. Shuffled labels are to be "
                  "named by the end."]  # fmt: skip
        for architecture in dict.fromkeys(o.setup.architecture for o in faulty):
            own = [o for o in faulty if o.setup.architecture == architecture]
            lines.append(f"{architecture}: {sum(o.setup.fault in o.named for o in own) / len(own):.1%} named.")
    if healthy:
        false = sum(bool(o.alarms) for o in healthy) / len(healthy)
        lines += [
            f"False alarms: {false:.1%} of {len(healthy)} healthy trainings have a problem or a warning at any step."
        ]
    return "\n".join(lines)


def in_two(outcomes: list[Outcome]) -> tuple[float, float]:
    """Return the shares of faults that were named within two looks, and two measurements, of the onset."""
    looks = sum(o.until_named(o.looks) <= 2 for o in outcomes) / len(outcomes)
    return looks, sum(o.until_named(o.measured) <= 2 for o in outcomes) / len(outcomes)


def main() -> None:
    """Run the benchmark."""
    known = [
        "dead units", "dead layer", "vanishing gradients", "exploding gradients", "divergence",
        "learning rate too high", "learning rate too low", "lazy layer", "rank collapse", "shuffled labels",
        "frozen layer", "saturation", HEALTHY,
    ]  # fmt: skip
    parser = argparse.ArgumentParser(description="Faults in short trainings, and the findings of the monitor.")
    parser.add_argument("--seeds", type=int, default=10, help="Number of seeds per fault and architecture.")
    parser.add_argument("--report", action="store_true", help="Use the seeds of the report, from 300 on.")
    parser.add_argument("--jobs", type=int, default=1, help="Number of parallel processes.")
    parser.add_argument("--faults", nargs="*", choices=known, default=known, help="Faults to inject.")
    parser.add_argument("--architectures", nargs="*", choices=ARCHITECTURES, default=ARCHITECTURES, help="Models.")
    parser.add_argument("--verbose", action="store_true", help="Print each training.")
    options = parser.parse_args()
    start = 300 if options.report else 0
    setups = [
        draw_setup(architecture, fault, seed)
        for fault in options.faults
        for architecture in options.architectures
        for seed in range(start, start + options.seeds)
    ]
    began = time.perf_counter()
    outcomes = run_all(setups, options.jobs, options.verbose)
    text = report(outcomes)
    seeds = f"Seeds {start} to {start + options.seeds - 1}, {len(setups)} trainings of {STEPS} steps"
    text += f"\n\n{seeds}, {time.perf_counter() - began:.0f} s.\n"
    print(text)
    out = Path(__file__).parent / "results" / "faults.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
