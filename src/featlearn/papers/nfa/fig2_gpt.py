"""Figures 2 (D) and 15 (B) of the NFA paper: queries, keys and values of a small GPT on Shakespeare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from featlearn._utils.rng import as_generator
from featlearn.datasets import CharacterTask, character_task
from featlearn.models import gpt
from featlearn.papers.claim import at_least, at_most, holds
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.papers.nfa.layer_trajectories import (
    draw_centered,
    final_gaps,
    final_table,
    gap_curves,
    losses_and_changes,
    measurement_steps,
    share_above,
    watch_layers,
)
from featlearn.plots import new_figure, style

__all__ = ["EXPERIMENT", "Config"]

_BLOCKS = 3
_PARTS = ("q", "k", "v")
_NAMES = [f"{part} of block {block + 1}" for block in range(_BLOCKS) for part in _PARTS]


@dataclass(frozen=True)
class Config:
    """Of the paper but for sizes: three blocks, six heads, Adam at 5e-3; nanoGPT has width 384, 256 characters."""

    text: str = "shakespeare"
    width: int = 96
    length: int = 64
    batch: int = 16
    steps: int = 300
    probed: int = 8
    measurements: int = 12
    seeds: tuple[int, ...] = (0, 1)


def _points(config: Config) -> list[dict[str, Any]]:
    shared = {name: value for name, value in asdict(config).items() if name != "seeds"}
    return [shared | {"seed": seed} for seed in config.seeds]


def _measure(
    text: str, width: int, length: int, batch: int, steps: int, probed: int, measurements: int, seed: int
) -> dict[str, Any]:
    task = character_task() if text == "shakespeare" else _counting()
    generator = as_generator(seed, "gpt training")
    model = gpt(len(task.vocabulary), length, blocks=_BLOCKS, width=width, generator=generator)
    held_out, _ = task.batch(probed, length, as_generator(0, "probe"), "test")
    layers = [f"blocks.{block}.attn.{part}" for block in range(_BLOCKS) for part in _PARTS]

    def train(told: Callable[[int, float], object]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        value = float("nan")
        for step in range(steps):
            told(step, value)
            inputs, targets = task.batch(batch, length, generator)
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            value = float(loss.detach())
        told(steps, value)

    return watch_layers(model, held_out, layers, measurement_steps(steps, measurements), train, outputs=8)


def _counting() -> CharacterTask:
    """A text for tests that needs no file: digits in turn."""
    text = torch.arange(2000) % 10
    return CharacterTask(text[:1500], text[1500:], "0123456789")


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    found = [v for _, v in outcomes]

    def deeper(values: Any) -> bool:
        gaps = gap_curves(values).mean(0)
        return float(gaps[-3:].mean()) > float(gaps[:3].mean())

    claims = (
        at_least(
            "share of layers and times with C-NFC above UC-NFC", "figure 2D", 0.9, map(share_above, found),
            reason="'consistently' in words; nine tenths are asked for",
            note="late in training the two nearly coincide in most layers, and either may be above",
        ),
        holds(
            "the gap is larger at the first measurement than at the last (mean over layers)", "figure 2D, section 3",
            (float(gap_curves(v)[0].mean()) > float(gap_curves(v)[-1].mean()) for v in found),
            note="'especially at early times'",
        ),
        holds("the gap is larger in the last block than in the first", "figure 2D, section 3", map(deeper, found)),
        at_most(
            "UC-NFC converges to C-NFC: mean gap at the end", "section 3", 0.1,
            (float(np.mean(final_gaps(v))) for v in found),
            reason="'converge at late times in most settings'; a tenth is asked for",
        ),
        at_least(
            "weights move significantly: least change at the end", "figure 15B", 0.1,
            (float(torch.as_tensor(v["weight_change_relative"])[-1].min()) for v in found),
            reason="'significantly' in words; a tenth of their size is asked for",
        ),
    )  # fmt: skip
    return Result(
        claims,
        {"end of training, mean over seeds": final_table(found, _NAMES)},
        {"figure 2 D": _figure(found), "figure 15 B": losses_and_changes({"GPT": found}, _NAMES, "layer")},
        f"Width {config.width}, pieces of {config.length} characters, batches of {config.batch}, {config.steps} steps; "
        "nanoGPT has 384, 256, 64 and 5,000. Correlations over 8 random output vectors on held-out text.",
    )


def _figure(found: Sequence[Any]) -> Figure:
    said = {"q": "query", "k": "key", "v": "value"}
    with style():
        fig = new_figure(8.0, 6.0)
        axes = fig.subplots(_BLOCKS, len(_PARTS), sharex=True, sharey=True)
        for block, line in enumerate(axes):
            for i, (ax, part) in enumerate(zip(line, _PARTS, strict=True)):
                draw_centered(ax, found, block * len(_PARTS) + i)
                if block == 0:
                    ax.set_title(said[part])
            line[0].set_ylabel(f"block {block + 1}")
        axes[0][0].legend(loc="lower right")
        for ax in axes[-1]:
            ax.set_xlabel("step")
    return fig


EXPERIMENT = Experiment(
    name="nfa-fig2-gpt",
    title="Centered and uncentered NFC of attention layers",
    covers=("figure 2 (D)", "figure 15 (B)"),
    scales={
        "smoke": Config("counting", 12, 8, 4, 6, 4, 3, (0,)),
        "quick": Config(),
        "full": Config(width=192, length=128, batch=32, steps=2000, probed=16, measurements=20, seeds=(0, 1, 2)),
    },
    points=_points,
    measure=_measure,
    conclude=_conclude,
    data=("text",),
)
