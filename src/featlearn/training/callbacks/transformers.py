"""A monitor inside the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

from featlearn.training._monitor import Monitor
from featlearn.training.trackers import needed

_Callback: Any = needed("transformers", "hf").TrainerCallback


class MonitorCallback(_Callback):  # type: ignore[misc]
    """Watches feature learning in a ``transformers.Trainer``: ``Trainer(callbacks=[MonitorCallback(run="runs/a")])``.

    The monitor is made when training starts, told of every optimizer step, of all that the Trainer logs, and closed
    when training ends. Steps are the Trainer's ``global_step``.

    Args:
        data: Rows to measure on; None takes the first ones of the training loader.
        options: Options of `featlearn.Monitor`: ``run``, ``every``, ``budget``, ``layers``, ... Pass ``resume=True``
            where ``trainer.train(resume_from_checkpoint=...)`` continues a training whose run is in the folder ``run``.

    Attributes:
        monitor: The `featlearn.Monitor`, once training has begun.
    """

    def __init__(self, data: Any = None, **options: Any) -> None:
        self._data, self._options = data, options
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the monitor and measure the start."""
        data = kwargs.get("train_dataloader") if self._data is None else self._data
        if self.monitor is not None:
            self.monitor.close("failed")  # the Trainer begins again after an error: with smaller batches, for instance
        self.monitor = Monitor(kwargs["model"], data, **self._options)
        self.monitor.step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the monitor of an optimizer step."""
        if self.monitor is not None:
            self.monitor.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Hand over what the Trainer logs."""
        if self.monitor is not None and logs:
            numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
            self.monitor.record(state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained model and close the monitor."""
        if self.monitor is not None:
            self.monitor.last(state.global_step)
            self.monitor.close()
