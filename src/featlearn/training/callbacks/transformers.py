"""Monitor callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from featlearn.training._monitor import Monitor
from featlearn.training.trackers import needed

_Callback: Any = needed("transformers", "hf").TrainerCallback


class MonitorCallback(_Callback):  # type: ignore[misc]
    """Monitor callback for a ``transformers.Trainer``: ``Trainer(callbacks=[MonitorCallback(run="runs/a")])``.

    The monitor is created when training starts, and closed when training ends. It records each optimizer step and the
    metrics that the Trainer logs. Steps are the Trainer's ``global_step``.

    Args:
        data: Rows to measure on. None uses the first rows of the training loader.
        options: Options of `featlearn.Monitor`: ``run``, ``every``, ``budget``, ``layers``, ... Pass ``resume=True``
            if ``trainer.train(resume_from_checkpoint=...)`` continues a training whose run is in the folder ``run``.

    Attributes:
        monitor: `featlearn.Monitor` of the current training; None before the first one.
    """

    def __init__(self, data: Any = None, **options: Any) -> None:
        self._data, self._options = data, options
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the monitor and measure the initial model.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control object of the Trainer.
            kwargs: Further objects, such as ``model`` and ``train_dataloader``.
        """
        data = kwargs.get("train_dataloader") if self._data is None else self._data
        if self.monitor is not None:
            self.monitor.close("failed")  # the Trainer starts again after an error, for instance with smaller batches
        self.monitor = Monitor(kwargs["model"], data, **self._options)
        self.monitor.step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record an optimizer step.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control object of the Trainer.
            kwargs: Further objects.
        """
        if self.monitor is not None:
            self.monitor.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the metrics that the Trainer logs.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control object of the Trainer.
            logs: Metrics by name. Values that are not numbers are ignored.
            kwargs: Further objects.
        """
        if self.monitor is not None and logs:
            numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
            self.monitor.record(state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained model and close the monitor.

        Args:
            args: Training arguments.
            state: State of the Trainer.
            control: Control object of the Trainer.
            kwargs: Further objects.
        """
        if self.monitor is not None:
            self.monitor.last(state.global_step)
            self.monitor.close()
