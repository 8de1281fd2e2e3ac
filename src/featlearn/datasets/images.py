"""Find image data sets by name or path, and make tasks of some of their classes and rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import ClassificationTask
from featlearn.datasets._data_home import data_folder, not_present
from featlearn.datasets._image_io import (
    Images,
    as_images,
    joined,
    read_cifar,
    read_idx,
    read_image_folder,
    read_mat,
    read_npz,
)
from featlearn.errors import InputError

Folder = str | os.PathLike[str] | None

_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class ImageSet(NamedTuple):
    """All images of a set.

    Attributes:
        train: To learn from.
        test: To judge by; None if the set is not split.
        names: Of the classes; None if they are numbers only.
    """

    train: Images
    test: Images | None
    names: tuple[str, ...] | None = None


def read_image_set(name: str | os.PathLike[str], folder: Folder, size: int | None, download: bool) -> ImageSet:
    """Read a set, see `image_task`."""
    if download and name != "mnist":
        raise InputError(f"only 'mnist' can be downloaded, got {str(name)!r}")
    reader = _NAMED.get(name) if isinstance(name, str) else None
    if reader is not None:
        if size is not None:
            raise InputError(f"size= is for folders of images; {name!r} has a size of its own")
        return _openml_mnist() if download else reader(folder)
    path = Path(name).expanduser()
    if folder is not None:
        raise InputError(f"folder= goes with one of {', '.join(sorted(_NAMED))}, not with a path: {str(name)!r}")
    if path.is_dir():
        return ImageSet(*read_image_folder(path, size))
    if path.is_file() and path.suffix == ".npz":
        if size is not None:
            raise InputError("size= is for folders of images, not for an .npz file")
        return ImageSet(*read_npz(path))
    raise InputError(
        f"{str(name)!r} is none of {', '.join(sorted(_NAMED))}, and no .npz file or folder of images that there is"
    )


def _mnist(folder: Folder) -> ImageSet:
    where = data_folder("mnist", folder)
    stems = [f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    files = {stem: next((f for f in (where / stem, where / f"{stem}.gz") if f.is_file()), None) for stem in stems}
    if missing := [f"{stem}.gz" for stem, file in files.items() if file is None]:
        raise not_present("mnist", where, missing, "download=True fetches the set from OpenML")
    arrays = [read_idx(file) for file in files.values() if file is not None]
    return ImageSet(
        as_images(arrays[0], arrays[1], "MNIST's training set"), as_images(arrays[2], arrays[3], "MNIST's test set")
    )


def _openml_mnist() -> ImageSet:
    """From the OpenML repository: 60,000 training images and then 10,000 test images, as rows."""
    from sklearn.datasets import fetch_openml

    X, y = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff", return_X_y=True)
    images = as_images(X.reshape(-1, 28, 28).astype(np.uint8), y.astype(np.int64), "OpenML's mnist_784")
    cut = 60_000
    return ImageSet(Images(*(a[:cut] for a in images)), Images(*(a[cut:] for a in images)))


def _cifar10(folder: Folder) -> ImageSet:
    where = data_folder("cifar10", folder)
    batches = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for inner in (where, where / "cifar-10-batches-bin"):
        if all((inner / batch).is_file() for batch in batches):
            *train, test = (read_cifar(inner / batch) for batch in batches)
            return ImageSet(joined(train), test, _CIFAR_NAMES)
    if (archive := _one_npz(where)) is not None:
        return ImageSet(*read_npz(archive), _CIFAR_NAMES)
    missing = [".npz file with x_train, y_train, x_test and y_test", "binary batches " + " ".join(batches)]
    pickled = any(where.glob("**/data_batch_1"))
    hint = "the batches there are pickled, and pickles can run code: fetch 'CIFAR-10 binary version'" if pickled else ""
    raise not_present("cifar10", where, missing, hint)


def _gtsrb(folder: Folder) -> ImageSet:
    where = data_folder("gtsrb", folder)
    if (archive := _one_npz(where)) is None:
        missing = [".npz file with x_train, y_train, x_test and y_test"]
        hint = "for the original images, which differ in size, pass the path of a folder of folders and size=32"
        raise not_present("gtsrb", where, missing, hint)
    return ImageSet(*read_npz(archive))


def _one_npz(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.npz"))
    if len(found) > 1:
        raise InputError(f"{str(folder)!r} holds {', '.join(f.name for f in found)}: pass the path of the one to read")
    return found[0] if found else None


def _svhn(folder: Folder) -> ImageSet:
    where = data_folder("svhn", folder)
    files = ["train_32x32.mat", "test_32x32.mat"]
    if missing := [file for file in files if not (where / file).is_file()]:
        raise not_present("svhn", where, missing)
    train, test = (read_mat(where / file) for file in files)
    return ImageSet(train, test)


def _digits(folder: Folder) -> ImageSet:
    """Scikit-learn's 1,797 digits of 8x8 pixels, from 0 to 16."""
    from sklearn.datasets import load_digits

    if folder is not None:
        raise InputError("the digits come with scikit-learn and are in no folder: leave folder out")
    digits = load_digits()
    return ImageSet(as_images(digits.images / 16, digits.target, "scikit-learn's digits"), None)


_NAMED: dict[str, Callable[[Folder], ImageSet]] = {
    "cifar10": _cifar10,
    "digits": _digits,
    "gtsrb": _gtsrb,
    "mnist": _mnist,
    "svhn": _svhn,
}


Standardize = Literal["pixels", "channels", "images"]
"""What gets mean 0 and standard deviation 1: every pixel, every channel, or every image."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageTask(ClassificationTask):
    """A `ClassificationTask` of images; X is ``(n, channels * height * width)``, or not flattened.

    Attributes:
        image_shape: ``(channels, height, width)``: ``X.view(-1, *image_shape)`` are images.
        class_names: A name a class; the set's own numbers if it has no names.
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]


@renamed_arguments(standardise="standardize")
def image_task(
    name: str | os.PathLike[str],
    n: int | None = None,
    n_test: int | None = None,
    *,
    classes: Sequence[int | str] | None = None,
    standardize: Standardize | None = None,
    flatten: bool = True,
    size: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    download: bool = False,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> ImageTask:
    """Images with pixels from 0 to 1, rows drawn at random without replacement, from files that the user has.

    Training and test images are drawn from the set's own two parts. A set that is not split (digits, some files)
    is shuffled and cut: n rows to train on, n_test of the others to test on.

    Nothing is unpickled: CIFAR-10 is read from its binary batches or from an ``.npz`` file, not from the batches for
    Python.

    Args:
        name: ``"mnist"`` (the four idx files, gzipped or plain), ``"cifar10"`` (binary batches or one ``.npz``),
            ``"gtsrb"`` (one ``.npz``), ``"svhn"`` (the two ``.mat`` files of cropped digits) or ``"digits"`` (comes
            with scikit-learn); or the path of an ``.npz`` file with x_train, y_train, x_test, y_test or with X and y;
            or that of a folder which has a folder a class with images in it, perhaps within ``train`` and ``test``.
        n: Number of training images; None takes all (four fifths of a set that is not split and has no n_test).
            With the same seed a smaller n is the beginning of a larger one.
        n_test: Number of test images; None takes all, or what n leaves of a set that is not split.
        classes: The classes to keep, by number or by name: ``(2, 3)`` makes 2 the class 0 and 3 the class 1.
        standardize: What gets mean 0 and standard deviation 1: ``"pixels"``, each over the n training images (NFA
            paper, appendix J), ``"channels"``, each over all pixels of these, or ``"images"``, each on its own
            (adaptive tangent features, appendix). What does not vary is 0. None leaves pixels from 0 to 1.
        flatten: Whether an image is a vector, its channels one after the other.
        size: Side to which the images of a folder are resized.
        folder: That holds the files of a named set; by default its name in the folder that the environment variable
            FEATLEARN_DATA names, or else in featlearn's part of the user's cache folder.
        download: Whether to fetch MNIST from OpenML instead, through scikit-learn, which keeps a copy.
        generator: Generator or integer seed of the draw.
        dtype: Of the images; torch's default if None.

    Raises:
        DataNotPresent: The files of a named set are not there; the message says which to put where.

    >>> task = image_task("digits", 100, 50, classes=(2, 3))
    >>> task.X.shape, task.image_shape, task.class_names
    (torch.Size([100, 64]), (1, 8, 8), ('2', '3'))
    """
    if standardize not in (None, "pixels", "channels", "images"):
        raise InputError(f"standardize must be 'pixels', 'channels', 'images' or None, got {standardize!r}")
    found = read_image_set(name, folder, size, download)
    numbers, names = _chosen(found, classes)
    train, test = _rows(found, numbers, n, n_test, as_generator(generator, "images"))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    X, X_test = (_scaled(part.pixels, dtype) for part in (train, test))
    if standardize is not None:
        X, X_test = _standardized(X, X_test, standardize)
    channels, height, width = X.shape[1:]
    return ImageTask(
        X=(X.flatten(1) if flatten else X).to(dtype),
        y=_positions(train.classes, numbers),
        X_test=(X_test.flatten(1) if flatten else X_test).to(dtype),
        y_test=_positions(test.classes, numbers),
        classes=len(numbers),
        image_shape=(channels, height, width),
        class_names=names,
    )


def _chosen(found: ImageSet, classes: Sequence[int | str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Numbers of the classes to keep, in the order asked for, and their names."""
    present = np.unique(np.concatenate([part.classes for part in (found.train, found.test) if part is not None]))
    names = {int(i): str(i) if found.names is None else _named(found.names, int(i)) for i in present}
    if classes is None:
        return present, tuple(names.values())
    if isinstance(classes, str) or not classes:
        raise InputError(f"classes must be one or more numbers or names, such as (2, 3), got {classes!r}")
    by_name = {word: number for number, word in names.items()}
    numbers = [by_name.get(c) if isinstance(c, str) else c for c in classes]
    for asked, number in zip(classes, numbers, strict=True):
        if number not in names:
            raise InputError(f"there is no class {asked!r}: the classes are {', '.join(map(repr, by_name))}")
    kept = [number for number in numbers if number is not None]
    if len(set(kept)) < len(kept):
        raise InputError(f"classes must differ, got {tuple(classes)!r}")
    return np.array(kept, dtype=np.int64), tuple(names[number] for number in kept)


def _named(names: tuple[str, ...], number: int) -> str:
    if not 0 <= number < len(names):
        raise InputError(f"classes must be from 0 to {len(names) - 1}, got {number}")
    return names[number]


def _rows(
    found: ImageSet, numbers: NDArray[np.int64], n: int | None, n_test: int | None, generator: torch.Generator
) -> tuple[Images, Images]:
    """Shuffled rows of the classes to keep, cut to the numbers asked for."""
    train = _shuffled(found.train, numbers, generator)
    if found.test is not None:
        # Shuffled after the training rows, which are then the same for every n_test.
        test = _shuffled(found.test, numbers, generator)
    else:
        if n is None:
            n = len(train) - (len(train) // 5 if n_test is None else n_test)
        train, test = train[: max(n, 0)], train[max(n, 0) :]
    rows = []
    for part, images, chosen, asked, least in (
        ("training", found.train, train, n, 2),
        ("test", found.test or found.train, test, n_test, 0),
    ):
        count = len(chosen) if asked is None else asked
        if not least <= count <= len(chosen):
            raise InputError(f"from {least} to {len(chosen)} {part} images of these classes can be drawn, not {count}")
        rows.append(Images(images.pixels[chosen[:count]], images.classes[chosen[:count]]))
    return rows[0], rows[1]


def _shuffled(images: Images, numbers: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.int64]:
    rows = np.flatnonzero(np.isin(images.classes, numbers))
    order: NDArray[np.int64] = torch.randperm(len(rows), generator=generator).numpy()
    return rows[order]


def _positions(classes: NDArray[np.int64], numbers: NDArray[np.int64]) -> Tensor:
    """Which of the numbers each class is."""
    order = np.argsort(numbers)
    return torch.from_numpy(order[np.searchsorted(numbers, classes, sorter=order)])


def _scaled(pixels: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Pixels from 0 to 1, in at least single precision."""
    working = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = torch.from_numpy(np.ascontiguousarray(pixels)).to(working)
    return scaled.div_(255) if pixels.dtype == np.uint8 else scaled


def _standardized(X: Tensor, X_test: Tensor, what: Standardize) -> tuple[Tensor, Tensor]:
    if what == "images":
        return tuple(_divided(part, part, (1, 2, 3)) for part in (X, X_test))  # type: ignore[return-value]
    axes = (0,) if what == "pixels" else (0, 2, 3)
    return _divided(X, X, axes), _divided(X_test, X, axes)


def _divided(images: Tensor, like: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Images less the mean, over the standard deviation, of others along some axes."""
    if not len(images):
        return images
    std, mean = torch.std_mean(like, axes, correction=0, keepdim=True)
    varies = std > 1e-6  # one step of one pixel in 60,000 images makes 2e-5
    return (images - mean) / std.where(varies, 1) * varies
