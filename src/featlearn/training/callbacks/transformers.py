"""Monitor callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from featlearn.training._monitor import Monitor
from featlearn.training.callbacks._settings import describe_optimizers, versions_of, with_config
from featlearn.training.trackers import needed

_Callback: Any = needed("transformers", "hf").TrainerCallback

_ALWAYS = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "num_train_epochs",
    "max_steps",
)  # fmt: skip
_COMPARED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "optim",
    "weight_decay", "adam_", "lr_scheduler", "warmup_", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16",
)  # fmt: skip
# Files, logging, and objects that the Trainer itself makes.
_OMITTED = (
    "output_dir", "logging_", "log_", "run_name", "project", "trackio_", "hub_", "push_to_hub", "report_to",
    "resume_from_checkpoint", "local_rank", "disable_tqdm", "save_", "do_", "accelerator_config", "parallelism_config",
    "ddp_timeout", "debug",
)  # fmt: skip


class MonitorCallback(_Callback):  # type: ignore[misc]
    """Monitor callback for a ``transformers.Trainer``: ``Trainer(callbacks=[MonitorCallback(run="runs/a")])``.

    The monitor is created when training starts, and closed when training ends. It records each optimizer step and the
    metrics that the Trainer logs. Steps are the Trainer's ``global_step``.

    The config of the run gets the training arguments that differ from their defaults, the optimizer and versions, under
    the names ``arguments``, ``optimizer`` and ``versions``. A ``config`` that is passed takes precedence. Tokens,
    passwords and the path of the home folder are not stored.

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
        optimizer = kwargs.get("optimizer")
        collected = {
            "arguments": _arguments(args),
            "optimizer": describe_optimizers([] if optimizer is None else [optimizer]),
            "versions": versions_of("torch", "transformers", "featlearn"),
        }
        self.monitor = Monitor(kwargs["model"], data, **with_config(self._options, collected, _is_free))
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
            self.monitor.close(trained=not getattr(args, "load_best_model_at_end", False))


def _is_free(name: str) -> bool:
    section, _, argument = name.partition(".")
    return section == "arguments" and not argument.startswith(_COMPARED)


def _arguments(args: Any) -> dict[str, Any]:
    """Return the training arguments that differ from their defaults, and the usual ones in any case."""
    result = {}
    for field in dataclasses.fields(args):
        if field.name.startswith(_OMITTED):
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(args, field.name, None)
        if field.name in _ALWAYS or value != default:
            result[field.name] = value
    return result
