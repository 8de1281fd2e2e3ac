"""A monitor inside Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from featlearn.errors import InputError
from featlearn.training._monitor import Monitor
from featlearn.training.trackers import needed

_Callback: Any = needed("lightning.pytorch", "lightning").Callback


class MonitorCallback(_Callback):  # type: ignore[misc]
    """Watches feature learning in a ``lightning.Trainer``: ``Trainer(callbacks=[MonitorCallback(run="runs/a")])``.

    The monitor is made when training starts, told of every optimizer step with its loss, of the metrics of every
    validation, and closed when training ends. Steps are Lightning's ``global_step``.

    Args:
        data: Rows to measure on; None takes the first ones of the training loader.
        module: Path of the submodule to watch, if not the whole LightningModule (whose ``forward`` is called).
        options: Options of `featlearn.Monitor`: ``run``, ``every``, ``budget``, ``loss``, ... Pass ``resume=True``
            where ``trainer.fit(..., ckpt_path=...)`` continues a training whose run is in the folder ``run``.

    Attributes:
        monitor: The `featlearn.Monitor`, once training has begun.
    """

    def __init__(self, data: Any = None, *, module: str | None = None, **options: Any) -> None:
        self._data, self._module, self._options = data, module, options
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the monitor and measure the start."""
        data = trainer.train_dataloader if self._data is None else self._data
        try:
            model = pl_module if self._module is None else pl_module.get_submodule(self._module)
        except AttributeError as error:
            raise InputError(f"module={self._module!r} is no part of the LightningModule: {error}") from error
        if self.monitor is not None:
            self.monitor.close("failed")  # of a training that has ended without a word
        self.monitor = Monitor(model, data, **self._options)
        self.monitor.step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the monitor of a step; batches whose gradients are only added up make none."""
        assert self.monitor is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.monitor.step(trainer.global_step, loss=loss.detach())
        else:
            self.monitor.step(trainer.global_step)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Hand over what the validation has measured."""
        if self.monitor is not None and not trainer.sanity_checking:
            self.monitor.record(trainer.global_step, _numbers(trainer.callback_metrics))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the trained model and close the monitor."""
        if self.monitor is not None:
            self.monitor.last(trainer.global_step)
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close what is open; the run is marked as failed."""
        if self.monitor is not None:
            self.monitor.close("failed")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
