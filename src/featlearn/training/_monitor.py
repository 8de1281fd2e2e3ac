"""Monitor of feature learning during training.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from featlearn._utils.memory import parse_memory
from featlearn._utils.rng import Seed
from featlearn._utils.validation import as_number, as_step
from featlearn.capture import Forward, WholeCopy, check_shaped, copied, initial_model, is_sharded, preserved_rng
from featlearn.errors import InputError
from featlearn.features import in_processes
from featlearn.features.objective import Loss, WeightDecay
from featlearn.layers import unwrap
from featlearn.runs import Run
from featlearn.training._first_process import run_in_first, writes_files
from featlearn.training._identity import rows_mark
from featlearn.training._measured_model import MeasuredModel, selected_layers
from featlearn.training._measurement import Snapshot, as_directions, as_parts
from featlearn.training._plan import MeasurementPlan
from featlearn.training._plot import evolution
from featlearn.training._probe_data import take_rows
from featlearn.training._rank_means import EVERY, RankMeans
from featlearn.training._recorder import Recorder, open_run, stored_start
from featlearn.training._schedule import Every, Schedule
from featlearn.training._sharded_signals import Shards
from featlearn.training._watch import Watch
from featlearn.training.diagnosis import Diagnosis, Findings
from featlearn.training.trackers import Tracker

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_NOTES = 0.01  # share of the training time for noting weights between measurements


class Monitor:
    """Monitor of feature learning in each layer while a model trains.

    Call `step` in the training loop. At the steps selected by ``every``, and within the ``budget``, the monitor
    measures the model on a fixed set of rows. It records for each layer the NFC variants, the FACT family and the
    change of the weights; the spectrum of W with its edge, spikes, power-law exponent and phase; the same for the
    conjugate kernel of the layer's inputs; and a diagnosis (`featlearn.training.diagnose_layer`). For the whole model
    it records the spectrum of the tangent kernel. The alignment of both kernels with the labels is recorded as well.
    The monitor keeps a copy of the initial weights.

    Monitoring does not change training: gradients, random generators, training flags and buffers are restored, so the
    final weights are bit-identical with and without a monitor. Under ``torch.distributed`` each process passes its
    shard of the rows; feature sums are reduced over all processes, and process 0 measures kernels and writes the run,
    with the means of the scalars over the processes (every tenth step and at measurements). If weights are sharded
    (FSDP2), a process keeps its shards of the initial weights, and weights are gathered for each measurement only: it
    takes the memory of two whole models. Signals are taken at the steps that process 0 chooses, of its own rows.

    Args:
        model: Any module. Compiled and DistributedDataParallel modules are unwrapped, those of FSDP2 gathered.
        data: Rows to measure on, as in `featlearn.probe`. ``samples`` of them are kept and used at each measurement.
        run: Run to write: a `featlearn.runs.Run` that is open for writing, or a folder in which a run is created. If
            the folder already holds a run with steps, the new run is created beside it, in ``<folder>-2``,
            ``<folder>-3``, ..., with a warning; ``monitor.run.path`` is its folder. None keeps metrics in memory only.
            A run that the monitor opened is finished by `close` or at the end of a ``with`` block; otherwise it counts
            as interrupted.
        config: Config of the run in the folder ``run``, such as ``{"lr": 0.1}``. The dashboard shows it and uses it to
            distinguish runs.
        resume: Whether to continue the run in the folder ``run`` if it has steps: weights are compared with its
            initial weights, and steps without a number continue its count. A different config or architecture raises
            an error. A folder without a run gets a new one, so a script that restarts itself can always pass True.
        every: Steps between measurements, ``"log"`` for about eight measurements per decade, or a list of steps.
        budget: Maximum share of the training time for measurements, such as 0.05. Measurements are made smaller, with
            fewer rows, random output vectors, layers and parts, or are made later, to stay within it; the text
            ``monitor.reduced`` of the run lists what was reduced. The first measurement takes about two training
            steps. ``"auto"`` is 0.05, and measures at every step that is given by ``every``, unless that is ``"log"``.
            None sets no limit: each measurement is complete.
        measure: Parts to measure, out of ``"features"``, ``"weights"``, ``"ck"``, ``"ntk"``. None measures all four.
        initial: Model before training, or its state_dict. None uses the model as it is now.
        loss: Loss, as in `featlearn.probe`. With ``weight_decay``, FACT and relgrad are measured.
        loss_reduction: Reduction of the loss over samples, as in `featlearn.probe`.
        weight_decay: Weight decay, as in `featlearn.probe`.
        layers: Glob patterns of layer names. None selects all layers.
        outputs: Outputs to differentiate, as in `featlearn.probe`.
        directions: Directions to compare with the leading singular vectors of a layer, shape ``(k_in,)`` or
            ``(k_in, q)``, by layer name.
        matrices: Names of matrices to store in the run at each measurement: ``"nfm"``, ``"agop"``, ``"fact"``, ... and
            ``"ck"``, ``"ntk"``. ``"spectra"`` stores the measured eigenvalues as vectors named
            ``"net.0/w.eigenvalues"``, ``"net.0/ck.eigenvalues"`` and ``"ntk.eigenvalues"``: eight bytes per
            eigenvalue, as many per layer as the smaller side of W plus ``kernel_samples``.
        samples: Number of rows per process for feature matrices. None uses all the data. FACT and relgrad refer to the
            loss of *all* training rows (FACT paper, theorem 3.1). On a part of the rows, ``relgrad_noise`` estimates
            the sampling noise, and a layer is diagnosed as converged or learning only where the noise allows it.
        kernel_samples: Number of rows for kernels, at least 2.
        batch_size: Batch size when ``data`` is given as tensors. None uses 256.
        max_memory: Maximum memory of a part of a measurement, in bytes or as text such as ``"2 GB"``. None allows a
            tenth of the memory that is free now. A part that needs more memory, or more time than
            `featlearn.training.PASSES` forward and backward passes of the rows, is measured with random output
            vectors or on fewer rows, or omitted, with a warning.
        forward: Forward function, as in `featlearn.probe`.
        trackers: Trackers that receive the metrics too; see `featlearn.training.trackers`.
        generator: Generator or integer seed of the random output vectors.
        on_error: ``"warn"`` continues training when a measurement fails after the first step, or when the run or a
            tracker cannot be written (the metrics stay in memory); ``"raise"`` raises the error.

    Attributes:
        latest: Last `Snapshot`; None before the first measurement.
        budget: `Budget` with the time spent on measurements: ``monitor.budget.spent``, ``monitor.budget.used``.

    Raises:
        InputError: If an argument is not valid, or a run to continue has another config or architecture.

    Time of a measurement: one probe of ``samples`` rows, one eigendecomposition per layer, and kernels of
    ``kernel_samples`` rows. Memory: a copy of the model, the rows, and the memory of `featlearn.probe`.

    Example:
        >>> import torch, featlearn as fl
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(64, 5), torch.randn(64, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = fl.Monitor(model, (X, y), every=10)
        >>> for step in range(21):
        ...     loss = torch.nn.functional.mse_loss(model(X), y)
        ...     _ = monitor.step(loss=loss.item())
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
        >>> monitor.series("nfc", "0").index.tolist()
        [0, 10, 20]
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        run: Run | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
        resume: bool = False,
        every: Every = "log",
        budget: float | str | None = "auto",
        measure: str | Iterable[str] | None = None,
        initial: nn.Module | Mapping[str, Tensor] | None = None,
        loss: Loss | None = None,
        loss_reduction: str = "mean",
        weight_decay: WeightDecay | None = None,
        layers: str | Iterable[str] | None = None,
        outputs: str | int = "auto",
        directions: Mapping[str, Any] | None = None,
        matrices: str | Iterable[str] = ("spectra",),
        samples: int | None = 512,
        kernel_samples: int = 128,
        batch_size: int | None = None,
        max_memory: int | float | str | None = None,
        forward: Forward | None = None,
        trackers: Sequence[Tracker] = (),
        generator: Seed = None,
        on_error: str = "warn",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        original = model
        self._recorder = Recorder(None, False, (), on_error)  # replaced in the first process
        self._schedule = Schedule(every, budget)
        self.budget = self._schedule.budget
        parts = as_parts(measure)
        features: dict[str, Any] = {
            "loss": loss, "loss_reduction": loss_reduction, "weight_decay": weight_decay, "layers": layers,
            "outputs": outputs, "forward": forward, "train_mode": "eval", "generator": generator,
        }  # fmt: skip
        check_shaped(unwrap(model))
        target, copies = unwrap(model), list[WholeCopy]()
        if is_sharded(target):  # plain copies are measured, with weights that are gathered for each measurement
            copies = [WholeCopy(target, now=False)]
            model = target = copies[0].module
        checked = as_directions(directions or {}, selected_layers(model, layers))
        rows = take_rows(data, samples, kernel_samples, batch_size)
        memory = None if max_memory is None else parse_memory(max_memory)
        self._on_error = on_error
        self._writes = writes_files()
        self.latest: Snapshot | None = None
        self._last = -1
        # Before the run is opened: invalid arguments leave no files behind.
        stored, self._next = run_in_first(lambda: stored_start(run, config, resume, target))
        start = stored if initial is None else initial
        if start is None and copies:
            copies.append(WholeCopy(unwrap(original), now=True))
        self._gathered = partial(_gathered, copies)
        with preserved_rng(), self._gathered():
            if start is None:
                first = copies[1].module if copies else copied(target)
            else:
                first = initial_model(start, target, target)
        first.requires_grad_(True)
        kept = [matrices] if isinstance(matrices, str) else list(matrices)
        in_budget = self.budget.share is not None
        self._measured = MeasuredModel(model, first, rows, parts, features, checked, kept, memory, in_budget)
        with self._gathered():
            opened = run_in_first(lambda: open_run(run, config, resume, first.state_dict()), share=False)
        if self._writes:
            owns, mark = not isinstance(run, Run), rows_mark(data, rows)
            model_or_none = None if copies else target  # weights of sharded models are not compared
            self._recorder = Recorder(
                opened, owns, trackers, on_error, model_or_none, mark, selected_layers(target, layers)
            )
        self._scalars = RankMeans()
        self._numbers: dict[str, dict[str, float]] = {}  # last ones of each layer
        self._readings: dict[str, Diagnosis] = {}
        shards = Shards(unwrap(original), copies[0].gathered, self._gathered) if copies else None
        self._watch = Watch(
            model, self._measured, self._recorder, forward, self._schedule.due, self._writes, in_budget, shards
        )
        self._calls = 0
        self._noting = 0.0
        self._prepared, self._preparing = not in_budget, 0.0
        if in_budget:
            self._prepare()

    @property
    def run(self) -> Run | None:
        """Run that is written; None without one, in processes other than the first, and after `close`."""
        return self._recorder.run

    # -- in the training loop -----------------------------------------------------------------------------------------

    def step(self, step: int | None = None, **scalars: float | Tensor) -> Snapshot | None:
        """Record a training step, and measure the model if the schedule and budget allow.

        Args:
            step: Number of the step. None counts calls, from 0, or from the step after the last one of a run that is
                continued. A number that is repeated (gradient accumulation) is measured once.
            scalars: Metrics of the training, such as ``loss=...``, ``test_loss=...``. They are always recorded.

        Returns:
            The measurement, or None if the model was not measured.
        """
        if not self._calls:
            self.budget.begin()
        self._calls += 1
        return self._record_and_measure(step, scalars, last=False)

    def record(self, step: int, values: Mapping[str, float | Tensor]) -> None:
        """Record metrics of the training without measuring the model.

        Args:
            step: Number of the step.
            values: Metrics by name.
        """
        at = as_step(step)
        numbers = {name: as_number(name, value) for name, value in values.items()}
        if numbers:
            self._scalars.add(at, numbers)
        if not in_processes():
            self._write_scalars(together=False)

    def _write_scalars(self, *, together: bool) -> None:
        """Record the scalars that are kept, as means over the processes if they do it together."""
        for step, numbers in self._scalars.take(together=together).items():
            if self._writes:
                self._recorder.numbers(step, numbers)
                self._watch.record(step, numbers)

    def last(self, step: int | None = None, **scalars: float | Tensor) -> Snapshot | None:
        """Record the end of training, and measure the trained model, in the size that the budget allows.

        Args:
            step: Number of updates made. None uses the number of calls of `step`.
            scalars: Metrics of the training, as in `step`.

        Returns:
            The measurement, or None if the model was not measured.
        """
        return self._record_and_measure(step, scalars, last=True)

    def _record_and_measure(
        self, step: int | None, scalars: Mapping[str, float | Tensor], last: bool
    ) -> Snapshot | None:
        number = self._next if step is None else as_step(step)
        self._next = number + 1
        self.record(number, scalars)
        asked = number != self._last and (last or self._schedule.asks(number))
        together = in_processes() and (asked or last or number % EVERY == 0)
        if together:
            self._write_scalars(together=True)
        plan = self._plan(last) if asked else None
        wanted = plan is not None or self._schedule.due(number)
        self._watch.step(number, wanted=wanted, last=last, measured=self.budget.spent, together=together)
        snapshot = None
        if plan is not None:
            snapshot = self._measure(number, plan if isinstance(plan, MeasurementPlan) else None)
        elif asked and self._writes and self._noting <= _NOTES * self.budget.trained:
            self._note_weights()
        self._watch.decide(number)
        return snapshot

    def _plan(self, last: bool) -> MeasurementPlan | Literal["all"] | None:
        """Return the size of a measurement now, "all" for a complete one, None for no measurement."""
        if self.budget.share is None:
            return "all"
        if not self._prepared:  # the model may not have been ready when the monitor was made
            self._prepared = True
            if run_in_first(lambda: self._measured.sizing is None):
                self._prepare()
        # Clocks differ, and processes that do not measure together would deadlock: the first one decides.
        plan: MeasurementPlan | Literal["all"] | None = run_in_first(
            lambda: self._schedule.choose(
                self._measured.sizing, last, besides=self._preparing + self._watch.signals.spent
            )
        )
        return plan

    def _prepare(self) -> None:
        """Find the sizes of measurements."""
        began = time.perf_counter()
        with self._gathered():
            self._measured.prepare()
        self._preparing += time.perf_counter() - began

    def _note_weights(self) -> None:
        began = time.perf_counter()
        self._recorder.note_weights()
        self._noting += time.perf_counter() - began

    def measure(self, step: int | None = None) -> Snapshot | None:
        """Measure the model immediately, ignoring schedule and budget.

        Args:
            step: Number of the step. None uses the last recorded step, or 0 before any.

        Returns:
            The measurement, or None if it failed and ``on_error`` is "warn".
        """
        return self._measure(max(self._next - 1, 0) if step is None else as_step(step), None)

    def _measure(self, number: int, plan: MeasurementPlan | None) -> Snapshot | None:
        self._last = number  # also if it fails on one process: all must agree on the steps that are left to measure
        began = time.perf_counter()
        try:
            with preserved_rng(), self._gathered(), self._measured.limited_threads():
                snapshot = self._measured.measure(number, self._writes, plan, self._watch.observed())
        except Exception as error:  # a model can raise anything, and memory can run out
            # At the first step the error is in the arguments of the monitor, and nothing is lost yet.
            if (self.latest is None and self._calls <= 1) or self._on_error == "raise":
                raise
            self._schedule.measured(0.0)  # the next one is at the next step of the schedule
            warnings.warn(
                f"Step {number} could not be measured; training continues: {error}", UserWarning, stacklevel=3
            )
            return None
        finally:
            self.budget.pay(time.perf_counter() - began)
        snapshot = self._watch.settle(snapshot)
        seconds = time.perf_counter() - began
        cost = {"monitor.seconds": seconds, "monitor.share": self.budget.used}
        cost = {name: value for name, value in cost.items() if math.isfinite(value)}
        self.latest = snapshot = replace(snapshot, seconds=seconds, model=snapshot.model | cost)
        for name, numbers in snapshot.layers.items():
            self._numbers.setdefault(name, {}).update(numbers)
        self._readings |= snapshot.readings
        began = time.perf_counter()
        if self._writes:
            self._recorder.snapshot(snapshot)
            self._note_weights()
        else:
            self._recorder.keep(snapshot)
        self._schedule.measured(time.perf_counter() - began)
        return snapshot

    def close(self, status: Literal["finished", "failed"] = "finished", *, trained: bool = True) -> None:
        """Close the trackers, and finish the run if the monitor opened it.

        Args:
            status: Status of the run, ``"finished"`` or ``"failed"``.
            trained: Whether the model has the weights of the last step, with which a continued run is compared. False
                if others were loaded since, such as the best ones.
        """
        self._write_scalars(together=False)  # a process that has failed would wait for the others
        self._watch.close()
        self._recorder.close(status, trained)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close("finished" if error is None else "failed")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of a model that holds its monitor, such as averages of its weights, share the monitor.
        return self

    # -- results ------------------------------------------------------------------------------------------------------

    def metrics(self, *, segment: int | None = None) -> pd.DataFrame:
        """Return all metrics of the run or, without one, of this monitor.

        Args:
            segment: Number of the segment, from 1; see `featlearn.runs.Run.log`. None is the latest one.

        Returns:
            Table with the columns step, layer (missing for the whole model), name and value.
        """
        return self._recorder.metrics(segment)

    def series(self, name: str, layer: str | None = None, *, segment: int | None = None) -> pd.Series:
        """Return one metric over the steps.

        Args:
            name: Name of the metric, such as ``"nfc"``.
            layer: Name of the layer. None selects the whole model.
            segment: Number of the segment, as in `metrics`.

        Returns:
            Series of the values, indexed by step.

        Raises:
            InputError: If the metric was not recorded.
        """
        import pandas as pd

        frame = self.metrics(segment=segment)
        of_layer = frame["layer"].isna() if layer is None else frame["layer"] == layer
        rows = frame[of_layer & (frame["name"] == name)]
        if rows.empty:
            of = "the model" if layer is None else f"layer {layer!r}"
            raise InputError(f"name must be a recorded metric, but nothing was recorded for {of} as {name!r}.")
        return pd.Series(rows["value"].to_numpy(), index=pd.Index(rows["step"], name="step"), name=name)

    def table(self, columns: Iterable[str] | None = None) -> pd.DataFrame:
        """Return the last metrics and the last diagnosis of each layer, from whichever measurement they are.

        Within a budget, a measurement may leave out layers and parts, which ``monitor.latest`` does not contain then.

        Args:
            columns: Names of metrics. None selects all that were measured.

        Returns:
            Table with one row per layer, one column per metric, and the diagnosis in the column "reading".

        Raises:
            InputError: If a metric was not measured.
        """
        names = [*self._measured.layers_of_both()[0], *self._numbers]
        known = {name: self._numbers[name] for name in dict.fromkeys(names) if name in self._numbers}
        return Snapshot(max(self._last, 0), known, {}, self._readings).table(columns)

    def findings(self) -> Findings:
        """Return the present findings: faults, and remarkable states, of the layers and of the whole training.

        Findings rest on the losses that are passed to `step` or `record`, on signals that take at most 1% of the
        training time, and on measurements. Most begin when they held at two looks in a row.

        Returns:
            Findings by layer, None for the model. It prints as a report.
        """
        return self._watch.findings()

    def plot(self, names: Iterable[str] | None = None) -> Figure:
        """Plot metrics over the steps, one panel per metric and one curve per layer.

        Args:
            names: Names of the metrics. None selects up to six, as in `featlearn.training.evolution`.

        Returns:
            The figure.
        """
        return evolution(self.metrics(), names)


@contextmanager
def _gathered(copies: Iterable[WholeCopy]) -> Iterator[None]:
    """Gather the weights of sharded models for a block."""
    with ExitStack() as stack:
        for one in copies:
            stack.enter_context(one.gathered())
        yield
