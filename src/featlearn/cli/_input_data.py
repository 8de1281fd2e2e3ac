"""Data of commands: tables, arrays, images and text files, as one batch for a model."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._model_loader import check_file, is_hugging_face, load_weights
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

_IMAGES = ("mnist", "cifar10", "gtsrb", "svhn", "digits")
_TABLES = ("iris", "wine", "breast_cancer", "diabetes")
_TOKENS = 64


@dataclass(frozen=True)
class Data:
    """Data on which a model is measured.

    Attributes:
        batch: Tensor, tuple ``(X, y)``, or dict of tokens.
        rows: Number of samples.
        about: Description of the data.
    """

    batch: Any
    rows: int
    about: str


def load_data(
    name: str,
    model: nn.Module,
    *,
    target: str | None = None,
    rows: int | None = None,
    standardize: bool = False,
    labeled: bool = False,
    classes: bool = False,
    tokenizer: Path | None = None,
    seed: int = 0,
) -> Data:
    """Read data for a model.

    Args:
        name: Table .csv, .tsv or .parquet; .npz or .safetensors file with X and optionally y; .txt file for a Hugging
            Face model; or name of a data set.
        model: Model that takes the data. Images are not flattened for convolutions, and integers are tokens for
            embeddings.
        target: Target column of a table. None has no target.
        rows: Maximum number of rows, drawn at random. None uses all.
        standardize: Whether to scale each column or pixel to mean 0 and standard deviation 1.
        labeled: Whether a loss is measured, which requires a target.
        classes: Whether the target must be classes, which are integers.
        tokenizer: Folder of a tokenizer, for text.
        seed: Seed of the random rows.

    Raises:
        InputError: If the data cannot be read, or do not match the model or the loss.
    """
    X: Tensor
    y: Tensor | None
    suffix = "".join(Path(name).suffixes[-2:]).lower()
    if suffix.endswith(".txt"):
        return _text(Path(name), model, tokenizer, rows, labeled)
    if name in _IMAGES:
        X, y = _images(name, model)
    elif name in _TABLES:
        X, y = _bundled(name)
    elif suffix.endswith((".npz", ".safetensors")):
        X, y = _arrays(Path(name))
    elif suffix.endswith((".csv", ".tsv", ".gz", ".parquet")):
        X, y = _table(Path(name), target)
    else:
        raise InputError(
            "--data must be a .csv, .tsv, .parquet, .npz, .safetensors or .txt file, or one of "
            f"{', '.join((*_IMAGES, *_TABLES))}; got {name!r}."
        )
    if classes and y is not None and y.is_floating_point():
        if not bool((y == y.round()).all()):
            raise InputError(f"cross_entropy requires classes, but the target of {name} has non-integer values.")
        y = y.long()
    if labeled and y is None:
        raise InputError(f"--loss requires a target, but {name} has none. Pass --target, or store y next to X.")
    if y is not None and len(y) != len(X):
        raise InputError(f"X and y of {name} must have the same number of rows, got {len(X)} and {len(y)}.")
    if rows is not None and rows < len(X):
        chosen = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:rows].sort().values
        X, y = X[chosen], None if y is None else y[chosen]
    X = _as_inputs(X, model)
    if standardize and X.is_floating_point():
        std, mean = torch.std_mean(X, 0, correction=0, keepdim=True)
        X = (X - mean) / std.where(std > 1e-12, 1)
    batch = X if y is None else (X, y)
    return Data(batch, len(X), f"{count(len(X), 'row')} of {Path(name).name}, inputs of shape {_shape(X)}")


def _mean_squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over outputs of squared differences, as torch.nn.MSELoss; classes become one-hot."""
    if not target.is_floating_point() and target.ndim == 1 and output.ndim == 2 and output.shape[1] > 1:
        target = nn.functional.one_hot(target.long(), output.shape[1])
    return (output - target.to(output.dtype).reshape(output.shape)).square().reshape(len(output), -1).mean(1)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of classes, or of the next token if the outputs are tokens."""
    if output.ndim == 3:
        return nn.functional.cross_entropy(output[:, :-1].mT, target[:, 1:], reduction="none").mean(1)
    return nn.functional.cross_entropy(output, target.long(), reduction="none")


LOSSES = {"mse": _mean_squares, "cross_entropy": _cross_entropy}
"""Losses by name, with one value per sample."""


def _images(name: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    from featlearn.datasets import image_task

    convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    task = image_task(name, flatten=not convolutions)
    return task.X, task.y


def _bundled(name: str) -> tuple[Tensor, Tensor]:
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return torch.from_numpy(X), torch.from_numpy(y)


def _arrays(path: Path) -> tuple[Tensor, Tensor | None]:
    check_file(path)
    arrays: dict[str, Any]
    if path.suffix.lower() == ".npz":
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {key: torch.from_numpy(np.ascontiguousarray(stored[key])) for key in stored.files}
        except (ValueError, OSError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path.name} cannot be read as an .npz file of numbers: {error}") from error
    else:
        arrays = load_weights(path)
    if "X" not in arrays:
        raise InputError(f"{path.name} must contain X, and y for a loss; it has {pick_text(arrays) or 'nothing'}.")
    return arrays["X"], arrays.get("y")


def _table(path: Path, target: str | None) -> tuple[Tensor, Tensor | None]:
    import pandas as pd

    from featlearn.datasets.tables import read_whole, split_target

    frame = read_whole(path)
    y = None
    if target is not None:
        frame, series = split_target(frame, target, (), path.name)
        y = torch.from_numpy(_numbers(series))
    if texts := [str(name) for name, column in frame.items() if not pd.api.types.is_numeric_dtype(column.dtype)]:
        raise InputError(
            f"The columns of {path.name} must be numbers, but these are not: {pick_text(texts)}. Convert them as in "
            "training, and save X and y as .npz."
        )
    if gaps := [str(name) for name, column in frame.items() if column.isna().any()]:
        raise InputError(f"Columns of {path.name} have missing values: {pick_text(gaps)}. Fill them as in training.")
    return torch.from_numpy(frame.to_numpy(dtype=np.float64, copy=True)), y


def _numbers(series: pd.Series[Any]) -> NDArray[Any]:
    """Return the targets as numbers; strings are numbered in their order."""
    import pandas as pd

    from featlearn.datasets.tables import target_values

    if not pd.api.types.is_numeric_dtype(series.dtype) or pd.api.types.is_bool_dtype(series.dtype):
        values, task, _ = target_values(series, "auto")
        return values if task == "regression" else np.unique(values, return_inverse=True)[1]
    values = series.to_numpy(dtype=np.float64, copy=True)
    if not np.isfinite(values).all():
        raise InputError(f"The target {series.name!r} must be finite, but has infinite values. Remove their rows.")
    whole = (values % 1 == 0).all() and np.abs(values).max() < 2**53
    return values.astype(np.int64) if whole else values


def _text(path: Path, model: nn.Module, tokenizer: Path | None, rows: int | None, labeled: bool) -> Data:
    if not is_hugging_face(model) or tokenizer is None:
        raise InputError(f"{path.name} is text, which requires a Hugging Face folder as model. Pass X as .npz instead.")
    check_file(path)
    import transformers

    try:
        cutter = transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{str(tokenizer)!r} has no tokenizer. Save it there with save_pretrained.") from error
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} must be text in UTF-8.") from error
    if not lines:
        raise InputError(f"{path.name} must have at least one line of text, but is empty.")
    longest = min(_TOKENS, int(getattr(model.config, "max_position_embeddings", None) or _TOKENS))
    if "SequenceClassification" in type(model).__name__:
        lines = lines if rows is None else lines[:rows]
        cutter.pad_token = cutter.pad_token or cutter.eos_token
        batch = dict(cutter(lines, padding=True, truncation=True, max_length=longest, return_tensors="pt"))
        return Data(batch, len(lines), f"{count(len(lines), 'line')} of {path.name}")
    # Blocks of equal length, as in the training of language models: padding would count as output.
    ids = [token for line in lines for token in cutter(line)["input_ids"]]
    longest = min(longest, len(ids))
    blocks = len(ids) // longest if rows is None else min(rows, len(ids) // longest)
    tokens = torch.tensor(ids[: blocks * longest]).view(blocks, longest)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if labeled:
        batch["labels"] = tokens
    return Data(batch, blocks, f"{count(blocks, 'block')} of {longest} tokens of {path.name}")


def _as_inputs(X: Tensor, model: nn.Module) -> Tensor:
    """Return the inputs in the model's precision; integers stay integers for embeddings."""
    if not X.is_floating_point() and any(isinstance(module, nn.Embedding) for module in model.modules()):
        return X.long()
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return X.to(torch.float32 if first is None else first.dtype)


def _shape(X: Tensor) -> str:
    return "x".join(map(str, X.shape[1:])) or "1"
