"""Figures 2 (D) and 15 (B) of the NFA paper: queries, keys and values of a small GPT on Shakespeare.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figures 2 (D) and 15 (B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from featlearn._utils.rng import as_generator
from featlearn.datasets import CharacterTask, character_task
from featlearn.models import gpt
from featlearn.papers._figures import label_outer, panels
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.nfa import layer_trajectories as trajectories

_BLOCKS = 3
_PARTS = ("q", "k", "v")
_NAMES = [f"{part} of block {block + 1}" for block in range(_BLOCKS) for part in _PARTS]


@dataclass(frozen=True)
class Config:
    """Configuration of the paper but for sizes: three blocks, six heads, Adam at 5e-3.

    nanoGPT has a width of 384 and pieces of 256 characters.
    """

    text: str = "shakespeare"
    width: int = 96
    length: int = 64
    batch: int = 16
    steps: int = 300
    probed: int = 8
    measurements: int = 12
    seeds: tuple[int, ...] = (0, 1)


def _measure(
    text: str, width: int, length: int, batch: int, steps: int, probed: int, measurements: int, seed: int
) -> Values:
    task = character_task() if text == "shakespeare" else _counting()
    generator = as_generator(seed, "gpt training")
    model = gpt(len(task.vocabulary), length, blocks=_BLOCKS, width=width, generator=generator)
    held_out, _ = task.batch(probed, length, as_generator(0, "probe"), "test")
    layers = [f"blocks.{block}.attn.{part}" for block in range(_BLOCKS) for part in _PARTS]

    def train(callback: Callable[[int, float], object]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        value = float("nan")
        for step in range(steps):
            callback(step, value)
            inputs, targets = task.batch(batch, length, generator)
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            value = float(loss.detach())
        callback(steps, value)

    return trajectories.watch_layers(
        model, held_out, layers, trajectories.measurement_steps(steps, measurements), train, outputs=8
    )


def _counting() -> CharacterTask:
    """Return a text for tests that requires no file: digits in turn."""
    text = torch.arange(2000) % 10
    return CharacterTask(text[:1500], text[1500:], "0123456789")


@experiment(
    "nfa-fig2-gpt",
    "Centered and uncentered NFC of attention layers",
    covers=("figure 2 (D)", "figure 15 (B)"),
    smoke=Config("counting", 12, 8, 4, 6, 4, 3, (0,)),
    quick=Config(),
    full=Config(width=192, length=128, batch=32, steps=2000, probed=16, measurements=20, seeds=(0, 1, 2)),
    measure=_measure,
    data=("text",),
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    runs = outcomes.values
    claims = (
        trajectories.mostly_above("figure 2D", runs).remark(
            "late in training the two nearly coincide in most layers, and either may be above"
        ),
        trajectories.larger_early("figure 2D, section 3", runs),
        trajectories.larger_deep(
            "the gap is larger in the last block than in the first", "figure 2D, section 3", runs, 3
        ),
        trajectories.converges(runs),
        trajectories.moves("weights move significantly: least change at the end", "figure 15B", runs, torch.min),
    )
    return Result(
        claims,
        {"end of training, mean over seeds": trajectories.final_table(runs, _NAMES)},
        {"figure 2 D": _figure(runs), "figure 15 B": trajectories.losses_and_changes({"GPT": runs}, _NAMES, "layer")},
        f"Width {config.width}, pieces of {config.length} characters, batches of {config.batch}, {config.steps} steps; "
        "nanoGPT has 384, 256, 64 and 5,000. Correlations over 8 random output vectors on held-out text.",
    )


def _figure(runs: Sequence[Values]) -> Figure:
    fig, axes = panels(8.0, 6.0, _BLOCKS, len(_PARTS), sharex=True, sharey=True)
    for i, ax in enumerate(axes.flat):
        trajectories.draw_centered(ax, runs, i)
    label_outer(axes, "step", ("query", "key", "value"), [f"block {block + 1}" for block in range(_BLOCKS)])
    axes[0][0].legend(loc="lower right")
    return fig
