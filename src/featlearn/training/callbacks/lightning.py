"""Monitor callback for Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from featlearn.errors import InputError
from featlearn.training._monitor import Monitor
from featlearn.training.callbacks._settings import describe_optimizers, describe_schedules, versions_of, with_config
from featlearn.training.trackers import needed

_Callback: Any = needed("lightning.pytorch", "lightning").Callback

_TRAINER = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
_FREE = ("trainer.max_epochs", "trainer.max_steps")


class MonitorCallback(_Callback):  # type: ignore[misc]
    """Monitor callback for a ``lightning.Trainer``: ``Trainer(callbacks=[MonitorCallback(run="runs/a")])``.

    The monitor is created when training starts, and closed when training ends. It records each optimizer step with its
    loss, and the metrics of each validation. Steps are Lightning's ``global_step``.

    The config of the run gets the hyperparameters of ``save_hyperparameters``, the settings of the trainer, the
    optimizer, its schedule and versions, under the names ``hparams``, ``trainer``, ``optimizer``, ``schedule`` and
    ``versions``. A ``config`` that is passed takes precedence. Tokens, passwords and the path of the home folder are
    not stored.

    Args:
        data: Rows to measure on. None uses the first rows of the training loader.
        module: Path of the submodule to monitor. None monitors the whole LightningModule (its ``forward`` is called).
        options: Options of `featlearn.Monitor`: ``run``, ``every``, ``budget``, ``loss``, ... Pass ``resume=True``
            if ``trainer.fit(..., ckpt_path=...)`` continues a training whose run is in the folder ``run``.

    Attributes:
        monitor: `featlearn.Monitor` of the current training; None before the first one.
    """

    def __init__(self, data: Any = None, *, module: str | None = None, **options: Any) -> None:
        self._data, self._module, self._options = data, module, options
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor and measure the initial model.

        Args:
            trainer: Trainer.
            pl_module: LightningModule that is trained.

        Raises:
            InputError: If ``module`` is not a submodule.
        """
        data = trainer.train_dataloader if self._data is None else self._data
        try:
            model = pl_module if self._module is None else pl_module.get_submodule(self._module)
        except AttributeError as error:
            raise InputError(
                f"module must be a submodule of the LightningModule, got {self._module!r}: {error}."
            ) from error
        if self.monitor is not None:
            self.monitor.close("failed")  # of an earlier training that was not ended
        collected = {
            "hparams": dict(getattr(pl_module, "hparams", None) or {}),
            "trainer": {name: getattr(trainer, name, None) for name in _TRAINER},
            "optimizer": describe_optimizers(trainer.optimizers),
            "versions": versions_of("torch", "lightning", "featlearn"),
        }
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        if schedules:
            collected["schedule"] = describe_schedules(schedules)
        reduced = any(isinstance(schedule, ReduceLROnPlateau) for schedule in schedules)

        def free(name: str) -> bool:
            return name in _FREE or (reduced and name.startswith("optimizer.") and name.endswith(".lr"))

        self.monitor = Monitor(model, data, **with_config(self._options, collected, free))
        self.monitor.step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record a step. Batches whose gradients are accumulated keep the number of the step.

        Args:
            trainer: Trainer.
            pl_module: LightningModule that is trained.
            outputs: Loss, or mapping with the loss, of the training step.
            batch: Batch of the training step.
            batch_idx: Number of the batch in the epoch.
        """
        assert self.monitor is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        scalars = {"loss": loss.detach()} if isinstance(loss, Tensor) and loss.numel() == 1 else {}
        self.monitor.step(trainer.global_step, **scalars)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics of a validation.

        Args:
            trainer: Trainer with the metrics.
            pl_module: LightningModule that is trained.
        """
        if self.monitor is not None and not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.monitor.record(trainer.global_step, metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the trained model and close the monitor.

        Args:
            trainer: Trainer.
            pl_module: LightningModule that is trained.
        """
        if self.monitor is not None:
            self.monitor.last(trainer.global_step)
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the monitor and mark its run as failed.

        Args:
            trainer: Trainer.
            pl_module: LightningModule that is trained.
            exception: Error that ended the training.
        """
        if self.monitor is not None:
            self.monitor.close("failed")
