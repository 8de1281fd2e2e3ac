"""Watch over a training: signals and losses, recorded beside the measurements."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from featlearn.capture import Forward, ModelSession, as_batch, map_tensors
from featlearn.training._activation_signals import look_at_activations
from featlearn.training._diagnostician import Diagnostician
from featlearn.training._label_test import label_p_value
from featlearn.training._layer_rules import LEARNED
from featlearn.training._loss_history import REVISED_EVERY, LossHistory
from featlearn.training._measured_model import MeasuredModel
from featlearn.training._measurement import Observed, Snapshot
from featlearn.training._recorder import Recorder
from featlearn.training._sharded_signals import ShardedSignals, Shards
from featlearn.training._signals import FREE_SECONDS, Look, Signals
from featlearn.training._training_rules import has_diverged
from featlearn.training.diagnosis import Finding, Findings

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
        limited: Whether the time of signals at the steps of the schedule is limited.
        shards: Sharded model that ``model`` is a plain copy of; its processes take signals together. None if it is not
            sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        measured: MeasuredModel,
        recorder: Recorder,
        forward: Forward | None,
        due: Callable[[int], bool],
        active: bool,
        limited: bool = True,
        shards: Shards | None = None,
    ) -> None:
        free = FREE_SECONDS if limited else math.inf
        on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        make = Signals if shards is None else partial(ShardedSignals, shards)
        self.signals = make(
            model,
            measured.layers_of_both,
            measured.rows,
            forward,
            due,
            work=time.process_time if on_cpu else None,
            free_seconds=free,
        )
        self.losses = LossHistory()
        self._measured, self._forward = measured, forward
        self._diagnostician = Diagnostician(self.losses, self._test_labels)
        self._pending: Look | None = None
        self._latest: Look | None = None
        self._stored = self._before = Findings()
        self._recorder, self._active = recorder, active
        self._sharded = shards is not None
        self._looks = active or self._sharded
        self._loss_name: str | None = None
        self._jumped = self._revised = False
        self._learned = False  # whether the loss has fallen far

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
        self._jumped = self.losses.add(numbers[name])
        if self._jumped:
            self._recorder.numbers(step, {"signal.loss_spike": 1.0})
        self._revised |= self.losses.count % REVISED_EVERY == 0

    def step(self, step: int, *, wanted: bool, last: bool, measured: float, together: bool = True) -> None:
        """Take and record signals if the step is due, see `Signals.step`.

        Args:
            step: Training step.
            wanted: Whether to look at this step if the time allows.
            last: Whether training has ended.
            measured: Time of all measurements so far, in seconds.
            together: Whether the processes of a sharded model decide at this step.
        """
        if not self._looks:
            return
        learned = self.losses.level() < LEARNED * self.losses.start
        wanted |= self._jumped or (learned and not self._learned)  # events after which a fault may show
        self._jumped, self._learned = False, self._learned or learned
        try:
            look = self.signals.step(step, wanted=wanted, last=last, measured=measured, together=together)
        except Exception as error:  # a model can raise anything
            self._looks = False
            self._stop(step, error)
            return
        if look is not None and self._active:
            self._latest = self._pending = look
            with self.signals.paying():
                self._recorder.table(step, look.table())

    def observed(self) -> Observed:
        """Return the signals that the diagnoses of a measurement take into account."""
        look = self._latest
        if look is None:
            return Observed(diverged=has_diverged(self.losses))
        layers = {name: numbers for name, numbers in look.table().items() if name is not None}
        return Observed(layers, look.outputs, has_diverged(self.losses))

    def settle(self, snapshot: Snapshot) -> Snapshot:
        """Return a measurement with its findings, and with phases that do not change back and forth.

        Args:
            snapshot: Measurement.
        """
        if not self._active:
            return snapshot
        try:
            snapshot = self._diagnostician.measured(snapshot)
            return replace(snapshot, findings=self._changed_findings())
        except Exception as error:
            self._stop(snapshot.step, error)
            return snapshot

    def decide(self, step: int) -> None:
        """Store the findings of a look at which nothing was measured, or of new losses.

        Args:
            step: Training step.
        """
        if not self._active or (self._pending is None and not self._revised):
            return
        with self.signals.paying():
            try:
                looked = self._pending is not None
                findings = self._changed_findings()
                if looked and self._diagnostician.suspects:
                    self.signals.look_soon()
            except Exception as error:
                self._stop(step, error)
                return
            # Only new, worse, better or ended ones: the numbers of the others change at each look.
            if findings.summary() != self._before.summary():
                self._recorder.table(step, {name: {"findings": text} for name, text in findings.texts().items()})

    def findings(self) -> Findings:
        """Return the present findings."""
        return self._diagnostician.findings()

    def close(self) -> None:
        """Remove what the watch has attached to the model."""
        self.signals.close()

    def _changed_findings(self) -> Findings:
        """Return the present findings, with empty lists where there were some before."""
        if self._pending is not None:
            self._diagnostician.look(self._pending)
        elif self._revised:
            self._diagnostician.new_losses()
        self._pending, self._revised = None, False
        present = self._diagnostician.findings()
        cleared: dict[str | None, list[Finding]] = {
            name: [] for name, findings in self._stored.items() if findings and name not in present
        }
        self._before, self._stored = self._stored, Findings(present | cleared)
        return self._stored

    def _test_labels(self) -> float | None:
        """Return the p-value of labels that do not depend on the inputs, nor on the features of the initial model."""
        rows = self._measured.rows
        if rows.kernel_targets is None:
            return None
        inputs: list[Tensor] = []
        map_tensors(
            [as_batch(raw, torch.device("cpu"), parts=None).inputs for raw in rows.kernel_batches], inputs.append
        )
        floats = [x.flatten(1) for x in inputs if x.is_floating_point()]
        samples = [torch.cat(floats)] if floats and len(floats) == len(inputs) else []
        if not self._sharded:  # a pass needs the other processes
            with suppress(Exception):  # a model can raise anything; the inputs are left
                session = ModelSession(
                    self._measured.initial, forward=self._forward, train_mode="eval", operations=True
                )
                layers = self._measured.layers_of_both()[1]
                features = look_at_activations(session, layers, rows.kernel_batches).features
                samples += [] if features is None else [features]
        values = [label_p_value(x, rows.kernel_targets) for x in samples]
        known = [p for p in values if p is not None]
        return min(1.0, len(known) * min(known)) if known else None  # Bonferroni

    def _stop(self, step: int, error: Exception) -> None:
        if isinstance(self.signals, ShardedSignals):
            self.signals.end()  # the other processes still wait for this one
        else:
            self._looks = False
        if not self._active:  # the first process warns
            return
        self._active = False
        self.close()
        message = f"Signals are not taken from step {step} on; training continues: {error}"
        warnings.warn(message, UserWarning, stacklevel=5)
