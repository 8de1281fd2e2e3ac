"""The live monitor: what happens to the features of every layer while a model trains."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from featlearn._utils.memory import available_memory, parse_memory
from featlearn._utils.rng import Seed
from featlearn._utils.validation import as_number, as_step
from featlearn.capture import Forward, at_rest, check_shaped, copied, initial_model, matching_layers, preserved_rng
from featlearn.errors import FeatlearnError, InputError
from featlearn.features import FeatureAccumulator, in_processes
from featlearn.features.objective import Loss, WeightDecay
from featlearn.layers import Layer, find_layers, select_layers, unwrap
from featlearn.runs import Run
from featlearn.training import _measurement as measuring
from featlearn.training._measurement import Snapshot, as_directions, as_parts
from featlearn.training._plan import MeasurementPlan, plan_measurement, sharing_of, sizes_of
from featlearn.training._plot import evolution
from featlearn.training._probe_data import take_rows
from featlearn.training._recorder import Recorder, open_run, stored_start
from featlearn.training._schedule import Budget, Every, step_rule
from featlearn.training.trackers import Tracker


class Monitor:
    """Watches feature learning while a model trains, layer by layer.

    Call `step` in the training loop. At the steps that ``every`` names, and within the ``budget``, it measures the
    model on some rows of data and records for each layer: the NFC variants and the FACT family, the change of the
    weights; the spectrum of W, its edge, spikes, power-law exponent and phase; the same of the conjugate kernel of the
    layer's inputs and of the tangent kernel of the model, with their alignment to the labels; and a reading in plain
    words (`featlearn.training.diagnose_layer`). It keeps a copy of the initial weights.

    Training is not disturbed: gradients, random generators, training flags and buffers are as they were, so that the
    trained weights are the same to the bit with and without a monitor. Under ``torch.distributed`` each process
    gives its own shard of rows; feature sums are reduced over all, process 0 measures kernels and writes.

    Args:
        model: Any module; compiled and DistributedDataParallel ones are unwrapped.
        data: Rows to measure on, as `featlearn.probe` takes them; ``samples`` of them are kept, and are the same
            each time.
        run: Where to write: a `featlearn.runs.Run` that is open for writing, or a folder, in which a run is made. If
            the folder holds a run with steps already, the new run is made beside it, in ``<folder>-2``,
            ``<folder>-3``, ..., with a warning; ``monitor.run.path`` is its folder. None keeps numbers in memory only.
            A run that the monitor has opened is finished by `close`, or at the end of a ``with`` block; otherwise it
            counts as interrupted.
        config: Config of the run in the folder ``run``, such as ``{"lr": 0.1}``: the dashboard shows it, and tells runs
            apart by it.
        resume: Whether to continue the run in the folder ``run``, if it has steps: weights are compared with its
            initial weights, and steps that are not numbered are counted on. A config or architecture other than the
            run's is refused. A folder without a run gets a new one, so that a script that restarts itself can always
            pass True.
        every: Steps between measurements, ``"log"`` for about eight a decade, or a list of steps.
        budget: Share of the training time that measuring may take, such as 0.05; see `featlearn.training.Budget`.
        measure: Of ``"features"``, ``"weights"``, ``"ck"``, ``"ntk"``; None takes all four.
        initial: The model before training, or its state_dict, if it is not the model as it is now.
        loss: As in `featlearn.probe`; with ``weight_decay`` FACT and relgrad are measured.
        loss_reduction: As in `featlearn.probe`.
        weight_decay: As in `featlearn.probe`.
        layers: Globs of layer names; None takes all.
        outputs: As in `featlearn.probe`.
        directions: Layer name -> directions ``(k_in,)`` or ``(k_in, q)`` that its leading singular vectors are
            compared with.
        matrices: Names of matrices to keep in the run at each measurement: ``"nfm"``, ``"agop"``, ``"fact"``, ... and
            ``"ck"``, ``"ntk"``. ``"spectra"`` keeps the eigenvalues that are measured anyway, as the vectors
            ``"net.0/w.eigenvalues"``, ``"net.0/ck.eigenvalues"`` and ``"ntk.eigenvalues"``: eight bytes for each of
            the smaller side of W and of ``kernel_samples``, a layer.
        samples: Rows for feature matrices, of each process; None takes all the data. FACT and relgrad are about the
            loss of *all* training rows (FACT paper, theorem 3.1): on a part of them ``relgrad_noise`` is the noise
            that this causes, and no layer is called converged, or not converged, where the noise does not allow it.
        kernel_samples: Rows for kernels.
        batch_size: Rows a batch, for data given as tensors.
        max_memory: Bytes, or text as ``"2 GB"``, that a part of a measurement may take; None is a tenth of what is
            free at the first one. A part that would take more, or longer than `featlearn.training.PASSES` forward and
            backward passes of the probe rows, is measured with random output vectors, on fewer rows, or left out;
            one warning says which.
        forward: As in `featlearn.probe`.
        trackers: Where numbers go besides; see `featlearn.training.trackers`.
        generator: Generator or seed of the output sketch.
        on_error: ``"warn"`` goes on training when a measurement fails after the first step, or the run or a tracker
            cannot be written (the numbers stay in `metrics`); ``"raise"`` does not.

    Attributes:
        latest: The last `Snapshot`; None before the first.
        budget: What measuring has cost: ``monitor.budget.spent``, ``.used``.

    Time of a measurement: one probe of ``samples`` rows, an eigendecomposition a layer, and kernels of
    ``kernel_samples`` rows. Memory: a copy of the model, the rows, and what `featlearn.probe` needs.

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
        budget: float | None = None,
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
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._recorder = Recorder(None, False, (), on_error)  # all that other processes than the first have
        self._due = step_rule(every)
        self.budget = Budget(budget)
        self._parts = as_parts(measure)
        self._model, self._forward, self._globs = model, forward, layers
        self._features: dict[str, Any] = {
            "loss": loss, "loss_reduction": loss_reduction, "weight_decay": weight_decay, "layers": layers,
            "outputs": outputs, "forward": forward, "train_mode": "eval", "generator": generator,
        }  # fmt: skip
        check_shaped(unwrap(model))
        self._directions = as_directions(directions or {}, self._layers(model))
        self._matrices = [matrices] if isinstance(matrices, str) else list(matrices)
        self._rows = take_rows(data, samples, kernel_samples, batch_size)
        self._max_memory = None if max_memory is None else parse_memory(max_memory)
        self._plan: MeasurementPlan | None = None
        self._on_error = on_error
        self._writes = not in_processes() or torch.distributed.get_rank() == 0
        self._start: measuring.Start | None = None
        self.latest: Snapshot | None = None
        self._last = -1
        # Before the run is opened: a start that is refused leaves nothing behind.
        stored, self._next = self._by_the_first(lambda: stored_start(run, config, resume, unwrap(model)))
        self._initial = self._start_model(initial, stored)
        opened = self._by_the_first(lambda: open_run(run, config, resume, self._initial.state_dict()), tell=False)
        if self._writes:
            self._recorder = Recorder(opened, not isinstance(run, Run), trackers, on_error)
        self._told = 0

    @property
    def run(self) -> Run | None:
        """The run that is written; None without one, in other processes than the first, and after `close`."""
        return self._recorder.run

    # -- in the training loop -----------------------------------------------------------------------------------------

    def step(self, step: int | None = None, **scalars: float | Tensor) -> Snapshot | None:
        """Tell the monitor of a step; it measures if the step is one to measure at.

        Args:
            step: Number of the step; None counts calls, from 0, or from the step after the last one of a run that is
                continued. A number that was just told (gradient accumulation) is measured once.
            scalars: Numbers of the training, such as ``loss=...``, ``test_loss=...``; always recorded.

        Returns:
            The measurement, or None where none was made.
        """
        number = self._tell(step)
        if not self._told:
            self.budget.begin()
        self._told += 1
        self.record(number, scalars)
        if number == self._last or not self._agreed(self._due(number) and self.budget.allows()):
            return None
        return self.measure(number)

    def record(self, step: int, values: Mapping[str, float | Tensor]) -> None:
        """Write numbers of the training down without measuring.

        Args:
            step: Number of the step.
            values: Name -> number.
        """
        at = as_step(step)
        numbers = {name: as_number(name, value) for name, value in values.items()}
        if numbers and self._writes:
            self._recorder.numbers(at, numbers)

    def last(self, step: int | None = None, **scalars: float | Tensor) -> Snapshot | None:
        """Tell the monitor that training is over: the trained model is measured, if the budget has room for it.

        Args:
            step: Number of updates made; None is the number of calls.
            scalars: As in `step`.
        """
        number = self._tell(step)
        self.record(number, scalars)
        if number == self._last or not self._agreed(self.budget.allows()):
            return None
        return self.measure(number)

    def measure(self, step: int | None = None) -> Snapshot | None:
        """Measure now, whatever the schedule and the budget say.

        Args:
            step: Number of the step; None is the last one told, and 0 before any.
        """
        number = max(self._next - 1, 0) if step is None else as_step(step)
        # Also where it fails, on one process perhaps: all must agree on what is left to measure.
        self._last = number
        began = time.perf_counter()
        try:
            with preserved_rng():
                found = self._measured(number)
        except Exception as error:  # a model can raise anything, and memory can run out
            # At the first step the mistake is in how the monitor was made, and nothing is lost yet.
            if (self.latest is None and self._told <= 1) or self._on_error == "raise":
                raise
            warnings.warn(f"step {number} could not be measured, training goes on: {error}", UserWarning, stacklevel=2)
            return None
        finally:
            self.budget.pay(time.perf_counter() - began)
        found = replace(found, seconds=time.perf_counter() - began)
        self.latest = found
        began = time.perf_counter()
        if self._writes:
            cost = {"monitor.seconds": found.seconds, "monitor.share": self.budget.used}
            self._recorder.snapshot(found, {name: value for name, value in cost.items() if math.isfinite(value)})
        else:
            self._recorder.keep(found)
        self.budget.pay(time.perf_counter() - began, again=True)
        return found

    def close(self, status: Literal["finished", "failed"] = "finished") -> None:
        """End: the trackers are closed, and the run, if the monitor opened it.

        Args:
            status: Of the run, ``"finished"`` or ``"failed"``.
        """
        self._recorder.close(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close("finished" if error is None else "failed")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Of a model that holds its monitor copies are made, such as averages of its weights: they are not watched.
        return self

    # -- what was seen ------------------------------------------------------------------------------------------------

    def metrics(self) -> pd.DataFrame:
        """All numbers of the run, or, without one, since this monitor was made: columns step, layer, name, value."""
        return self._recorder.metrics()

    def series(self, name: str, layer: str | None = None) -> pd.Series:
        """One number over the steps.

        Args:
            name: Of the number, ``"nfc"``.
            layer: Whose; None is the whole model.
        """
        frame = self.metrics()
        own = frame["layer"].isna() if layer is None else frame["layer"] == layer
        found = frame[own & (frame["name"] == name)]
        if found.empty:
            raise InputError(f"nothing called {name!r} was recorded for {'the model' if layer is None else layer!r}")
        return pd.Series(found["value"].to_numpy(), index=pd.Index(found["step"], name="step"), name=name)

    def plot(self, names: Iterable[str] | None = None) -> Figure:
        """A picture of the numbers over the steps, a curve a layer; see `featlearn.training.evolution`."""
        return evolution(self.metrics(), names)

    # -- parts of a measurement ---------------------------------------------------------------------------------------

    def _measured(self, step: int) -> Snapshot:
        layers, first = self._layers(self._model), self._layers(self._initial)
        matching_layers(layers.values(), first.values())
        numbers: dict[str, dict[str, float]] = {name: {} for name in layers}
        whole: dict[str, float] = {}
        phases: dict[tuple[str | None, str], Any] = {}
        matrices: dict[str, Tensor] = {}
        plan = self._planned(layers)
        if "features" in plan.parts:
            options = self._features | {"outputs": plan.outputs, "max_memory": plan.memory}
            total = FeatureAccumulator(self._model, initial=self._initial, **options)
            report, found = measuring.feature_numbers(total, self._rows, plan)
            for name, values in found.items():
                numbers[name].update(values)
            matrices |= measuring.matrices_of(report, [n for n in self._matrices if n not in measuring.BESIDES])
        if self._writes:
            if self._start is None:
                self._start = measuring.make_start(self._initial, first, self._rows, plan, self._forward)
            if "weights" in plan.parts:
                with at_rest(unwrap(self._model)), at_rest(self._initial):
                    found, of, kept = measuring.weight_numbers(layers, first, self._start, self._directions)
                for name, values in found.items():
                    numbers[name] = values | numbers[name]
                phases |= of
                matrices |= measuring.wanted_of(kept, self._matrices)
            kernels, of, kept = measuring.kernel_numbers(
                self._model, list(layers), self._rows, self._start, plan, self._forward
            )
            for owner, values in kernels.items():
                (whole if owner is None else numbers[owner]).update(values)
            phases |= of
            matrices |= measuring.wanted_of(kept, self._matrices)
        numbers = {name: values for name, values in numbers.items() if values}
        part = self._rows.part or plan.feature_rows < self._rows.samples
        readings = measuring.read(layers, numbers, phases, part)
        return Snapshot(step, numbers, whole, readings, phases, matrices)

    def _planned(self, layers: Mapping[str, Layer]) -> MeasurementPlan:
        """Plan the measurements, once: later ones must be of the same rows as the start."""
        if self._plan is None:
            failure: Exception | None = None
            plan: MeasurementPlan | None = None
            if self._writes:
                try:
                    memory = self._max_memory or available_memory() // 10
                    sizes = sizes_of(self._model, self._rows, self._forward)
                    parts = frozenset(self._parts)
                    sharing = None
                    if "features" in parts:
                        sharing = sharing_of(self._model, self._rows, sizes, memory, self._forward, self._globs)
                    plan = plan_measurement(
                        unwrap(self._model), layers, sizes, self._rows, parts, self._features, memory, sharing
                    )
                except Exception as error:  # whatever the model says; other processes would wait for the plan
                    failure = error
            plan, told = self._told_by_the_first((plan, str(failure)))
            if failure is not None:
                raise failure
            if plan is None:
                raise InputError(f"process 0 could not measure: {told}")
            self._plan = plan
            if plan.notes and self._writes:
                warnings.warn(plan.warning(), UserWarning, stacklevel=5)
        return self._plan

    def _layers(self, model: nn.Module) -> dict[str, Layer]:
        return {layer.name: layer for layer in select_layers(find_layers(unwrap(model)), self._globs)}

    def _agreed(self, mine: bool) -> bool:
        """Whether all measure: clocks differ, and processes that did not measure together would wait for ever."""
        return mine if self.budget.share is None else bool(self._told_by_the_first(mine))

    def _told_by_the_first(self, mine: Any) -> Any:
        """What process 0 knows, in all processes: only it reads the run and looks at its clock."""
        if not in_processes():
            return mine
        told: list[Any] = [mine]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def _by_the_first(self, work: Callable[[], Any], tell: bool = True) -> Any:
        """Do something in process 0 only; the others get its result, if it is told, or its error.

        Without the error they would wait forever for a process that has ended.
        """
        done, error = None, None
        if self._writes:
            try:
                done = work()
            except Exception as trouble:  # whatever it is, the others must hear of it
                error = trouble
        kind = type(error) if isinstance(error, FeatlearnError) else FeatlearnError
        told, failed = self._told_by_the_first((done if tell else None, error and (kind, str(error))))
        if error is not None:
            raise error
        if failed is not None:
            raise failed[0](f"process 0: {failed[1]}")
        return told if tell else done

    # -- the start ----------------------------------------------------------------------------------------------------

    def _start_model(
        self, initial: nn.Module | Mapping[str, Tensor] | None, stored: Mapping[str, Tensor] | None
    ) -> nn.Module:
        """The model before training: as given, as the run has it, or as it is now."""
        own = unwrap(self._model)
        if initial is None:
            initial = stored
        with preserved_rng():
            start = copied(own) if initial is None else initial_model(initial, own, own)
        return start.requires_grad_(True)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell(self, step: int | None) -> int:
        number = self._next if step is None else as_step(step)
        self._next = number + 1
        return number
