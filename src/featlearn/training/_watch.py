"""Watch over a training: signals and losses, recorded beside the measurements."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from torch import nn

from featlearn.capture import Forward
from featlearn.training._loss_history import LossHistory
from featlearn.training._measured_model import MeasuredModel
from featlearn.training._recorder import Recorder
from featlearn.training._signals import Signals

_LOSSES = ("loss", "train_loss", "training_loss", "train/loss")


class Watch:
    """Watch over a training, which takes signals and records them. Its errors never end the training.

    Args:
        model: Model in training.
        measured: The same model with its initial state and rows.
        recorder: Recorder of the monitor.
        forward: Forward function, as in `featlearn.probe`.
        due: Function that returns whether a step is to be measured.
        active: Whether this process takes signals.
    """

    def __init__(
        self,
        model: nn.Module,
        measured: MeasuredModel,
        recorder: Recorder,
        forward: Forward | None,
        due: Callable[[int], bool],
        active: bool,
    ) -> None:
        self.signals = Signals(model, measured.layers_of_both, measured.rows, forward, due)
        self.losses = LossHistory()
        self._recorder, self._active = recorder, active
        self._loss_name: str | None = None

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take note of the loss among the metrics of a step.

        Args:
            step: Training step.
            numbers: Metrics by name.
        """
        name = self._loss_name or next((name for name in _LOSSES if name in numbers), None)
        if not self._active or name is None or name not in numbers:
            return
        self._loss_name = name
        if self.losses.add(numbers[name]):
            self._recorder.numbers(step, {"signal.loss_spike": 1.0})

    def step(self, step: int, *, wanted: bool, last: bool, measured: float) -> None:
        """Take and record signals if the step is due, see `Signals.step`.

        Args:
            step: Training step.
            wanted: Whether to look at this step if the time allows.
            last: Whether training has ended.
            measured: Time of all measurements so far, in seconds.
        """
        if not self._active:
            return
        try:
            look = self.signals.step(step, wanted=wanted, last=last, measured=measured)
            if look is not None:
                self._recorder.table(step, look.table())
        except Exception as error:  # a model can raise anything
            self._active = False
            self.close()
            message = f"Signals are not taken from step {step} on; training continues: {error}"
            warnings.warn(message, UserWarning, stacklevel=4)

    def close(self) -> None:
        """Remove what the watch has attached to the model."""
        self.signals.close()
