"""SLO inside the trainers of other libraries, offline and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from featlearn.models import mlp
from featlearn.optim import SLO, AdaptiveSLO

STEPS = 6


def points() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(24, 5, generator=g)
    return X, X[:, :2] * X[:, 1:3]


def make_optimizer(kind: str, model: nn.Module, data: Any) -> SLO:
    if kind == "SLO":
        return SLO.for_layers(model, 0.02, {"*0*": 5.0, "*": 0.5}, eps=0.01, momentum=0.5)
    return AdaptiveSLO(model, data, lr=0.005, every=2)


def by_hand(kind: str, model: nn.Module, batches: list[tuple[Tensor, Tensor]], probed: Any) -> SLO:
    optimizer = make_optimizer(kind, model, probed)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    for X, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), y).backward()
        optimizer.step()
        schedule.step()
    return optimizer


# Lightning asks for more workers on machines with more cores, and uses a part of torch's pytree that is deprecated.
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("kind", ["SLO", "adaptive"])
def test_lightning(kind: str, tmp_path: Path) -> None:

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp([5, 8, 6, 2], bias=True, generator=0)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            X, y = batch
            return nn.functional.mse_loss(self(X), y)

        def configure_optimizers(self) -> dict[str, Any]:
            self.own = make_optimizer(kind, self.net, points())
            schedule = {"scheduler": CosineAnnealingLR(self.own, STEPS), "interval": "step"}
            return {"optimizer": self.own, "lr_scheduler": schedule}

    X, y = points()
    module = Module()
    lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
    ).fit(module, DataLoader(TensorDataset(X, y), batch_size=8))
    twin = mlp([5, 8, 6, 2], bias=True, generator=0)
    batches = list(zip(X.split(8), y.split(8), strict=True)) * 2
    hand = by_hand(kind, twin, batches, points())
    for p, q in zip(module.net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)
    if isinstance(hand, AdaptiveSLO):
        assert module.own.steps == STEPS
        assert module.own.speeds == hand.speeds
        assert 20.0 in hand.speeds.values()


class Regressor(nn.Module):
    """What the Trainer of transformers asks of a model: keywords in, a dict with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp([5, 8, 6, 2], bias=True, generator=0)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.net(x)
        return {"logits": out} if labels is None else {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.X, self.y = points()

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.X[i], "labels": self.y[i]}


@pytest.mark.parametrize("kind", ["SLO", "adaptive"])
def test_transformers(kind: str, tmp_path: Path) -> None:
    model = Regressor()
    optimizer = make_optimizer(kind, model.net, points())
    schedule = LambdaLR(optimizer, lambda k: 1 / (1 + k))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
    )
    before = [p.detach().clone() for p in model.parameters()]
    with torch.random.fork_rng(devices=[]):  # the Trainer seeds the global generators
        transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, schedule)).train()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == pytest.approx((0.02 if kind == "SLO" else 0.005) / (1 + STEPS))
    # A step is at most lr times the speed, over all steps together.
    rates = [1 / (1 + k) for k in range(STEPS)]
    bound = 0.02 * 5 * sum(rates) if kind == "SLO" else 0.005 * 20 * sum(rates)
    for p, q in zip(model.parameters(), before, strict=True):
        assert float((p - q).detach().norm()) <= bound
    if isinstance(optimizer, AdaptiveSLO):
        assert optimizer.steps == STEPS
        assert sorted(optimizer.speeds.values()) == [0.05, 0.05, 20.0]
