"""Find image data sets by name or path, and create tasks of some of their classes and images.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478 (adaptive tangent features).
"""

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
from featlearn._utils.validation import check_option
from featlearn.datasets._base import ClassificationTask, data_folder, not_present
from featlearn.datasets._image_io import Images, as_images, read_cifar, read_idx, read_image_folder, read_mat, read_npz
from featlearn.errors import InputError

Folder = str | os.PathLike[str] | None

_CIFAR_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class ImageSet(NamedTuple):
    """All images of a data set.

    Attributes:
        train: Training images.
        test: Test images. None if the set is not split.
        names: Names of the classes. None if classes are numbers only.
    """

    train: Images
    test: Images | None
    names: tuple[str, ...] | None = None


def read_image_set(name: str | os.PathLike[str], folder: Folder, size: int | None, download: bool) -> ImageSet:
    """Read a data set; `image_task` describes the arguments."""
    known = ", ".join(sorted(_NAMED))
    if download and name != "mnist":
        raise InputError(f"download=True requires name 'mnist', got {str(name)!r}")
    reader = _NAMED.get(name) if isinstance(name, str) else None
    path = Path(name).expanduser()
    if size is not None and (reader is not None or (path.is_file() and path.suffix == ".npz")):
        raise InputError(f"size= is for folders of images, got {str(name)!r}. Omit it.")
    if reader is not None:
        return _openml_mnist() if download else reader(folder)
    if folder is not None:
        raise InputError(f"folder= requires one of the names {known}, got the path {str(name)!r}")
    if path.is_dir():
        return ImageSet(*read_image_folder(path, size))
    if path.is_file() and path.suffix == ".npz":
        return ImageSet(*read_npz(path))
    raise InputError(f"name must be one of {known}, an existing .npz file or a folder of images, got {str(name)!r}")


def _mnist(folder: Folder) -> ImageSet:
    where = data_folder("mnist", folder)
    stems = [f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    files = {stem: next((f for f in (where / stem, where / f"{stem}.gz") if f.is_file()), None) for stem in stems}
    if missing := [f"{stem}.gz" for stem, file in files.items() if file is None]:
        raise not_present("mnist", where, missing, "download=True downloads the set from OpenML")
    X, y, X_test, y_test = (read_idx(file) for file in files.values() if file is not None)
    return ImageSet(as_images(X, y, "MNIST's training set"), as_images(X_test, y_test, "MNIST's test set"))


def _openml_mnist() -> ImageSet:
    """Download 60,000 training images and 10,000 test images from OpenML."""
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
            return ImageSet(Images(*map(np.concatenate, zip(*train, strict=True))), test, _CIFAR_NAMES)
    if (archive := _one_npz(where)) is not None:
        return ImageSet(*read_npz(archive), _CIFAR_NAMES)
    missing = [".npz file with x_train, y_train, x_test and y_test", "binary batches " + " ".join(batches)]
    pickled = any(where.glob("**/data_batch_1"))
    hint = "the batches there are pickled, and pickles can run code: get 'CIFAR-10 binary version'" if pickled else ""
    raise not_present("cifar10", where, missing, hint)


def _gtsrb(folder: Folder) -> ImageSet:
    where = data_folder("gtsrb", folder)
    if (archive := _one_npz(where)) is None:
        missing = [".npz file with x_train, y_train, x_test and y_test"]
        hint = "for the original images of different sizes, pass the path of a folder of folders and size=32"
        raise not_present("gtsrb", where, missing, hint)
    return ImageSet(*read_npz(archive))


def _one_npz(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.npz"))
    if len(files) > 1:
        raise InputError(f"{str(folder)!r} holds {', '.join(f.name for f in files)}. Pass the path of one of them.")
    return files[0] if files else None


def _svhn(folder: Folder) -> ImageSet:
    where = data_folder("svhn", folder)
    files = ["train_32x32.mat", "test_32x32.mat"]
    if missing := [file for file in files if not (where / file).is_file()]:
        raise not_present("svhn", where, missing)
    train, test = (read_mat(where / file) for file in files)
    return ImageSet(train, test)


def _digits(folder: Folder) -> ImageSet:
    """Load the 1,797 digits of scikit-learn: 8x8 pixels from 0 to 16."""
    from sklearn.datasets import load_digits

    if folder is not None:
        raise InputError(f"folder must be None for 'digits', which are part of scikit-learn, got {str(folder)!r}")
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
"""Unit of standardization: each pixel, each channel or each image has mean 0 and standard deviation 1."""
_AXES = {"pixels": (0,), "channels": (0, 2, 3), "images": (1, 2, 3)}


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageTask(ClassificationTask):
    """`ClassificationTask` of images; X has shape ``(n, channels * height * width)`` unless it is not flattened.

    Attributes:
        image_shape: Shape ``(channels, height, width)`` of an image: ``X.view(-1, *image_shape)`` are images.
        class_names: Name of each class; its number in the data set if there are no names.
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
    """Create a task of images with pixels from 0 to 1, drawn at random without replacement from local files.

    Training and test images are drawn from the two parts of the data set. A set that is not split (digits, some files)
    is shuffled and cut: n images for training, n_test of the others for testing.

    Nothing is unpickled: CIFAR-10 is read from its binary batches or from an ``.npz`` file, not from the batches for
    Python.

    Args:
        name: Name of the data set: ``"mnist"`` (the four idx files, gzipped or plain), ``"cifar10"`` (binary batches or
            one ``.npz``), ``"gtsrb"`` (one ``.npz``), ``"svhn"`` (the two ``.mat`` files of cropped digits) or
            ``"digits"`` (part of scikit-learn); or the path of an ``.npz`` file with x_train, y_train, x_test, y_test
            or with X and y; or the path of a folder with one folder of images per class, optionally inside ``train``
            and ``test``.
        n: Number of training images, at least 2. None uses all, or four fifths of a set that is not split if n_test is
            None too. With the same seed, images of a smaller n are the first ones of a larger n.
        n_test: Number of test images. None uses all, or the rest of a set that is not split.
        classes: Classes to keep, by number or name: ``(2, 3)`` makes 2 the class 0 and 3 the class 1. None keeps all.
        standardize: Unit with mean 0 and standard deviation 1: ``"pixels"``, each over the n training images (NFA
            paper, appendix J), ``"channels"``, each over all pixels of these images, or ``"images"``, each image by
            itself (adaptive tangent features, appendix). Constant units become 0. None keeps pixels from 0 to 1.
        flatten: Whether images are flattened to vectors, channel by channel.
        size: Side in pixels to which the images of a folder are resized. None requires images of one size.
        folder: Folder of the files of a named data set. None is its name in the folder of the environment variable
            FEATLEARN_DATA, or else in the folder ``featlearn`` of the user's cache.
        download: Whether MNIST is downloaded from OpenML instead, by scikit-learn, which caches it.
        generator: Generator or integer seed of the draw. None is seed 0.
        dtype: Type of the images. None is torch's default.

    Returns:
        The task.

    Raises:
        DataNotPresent: Files of a named data set are missing.
        InputError: An argument is not allowed, or a file cannot be read.

    Example:
        >>> task = image_task("digits", 100, 50, classes=(2, 3))
        >>> task.X.shape, task.image_shape, task.class_names
        (torch.Size([100, 64]), (1, 8, 8), ('2', '3'))
    """
    check_option("standardize", standardize, (*_AXES, None))
    images = read_image_set(name, folder, size, download)
    numbers, names = _chosen(images, classes)
    train, test = _rows(images, numbers, n, n_test, as_generator(generator, "images"))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    X, X_test = (_scaled(part.pixels, dtype) for part in (train, test))
    channels, height, width = X.shape[1:]
    if standardize is not None:
        axes, alone = _AXES[standardize], standardize == "images"
        X, X_test = (_standardized(part, part if alone else X, axes) for part in (X, X_test))
    X, X_test = ((part.flatten(1) if flatten else part).to(dtype) for part in (X, X_test))
    y, y_test = (_positions(part.classes, numbers) for part in (train, test))
    shape, count = (channels, height, width), len(numbers)
    return ImageTask(X=X, y=y, X_test=X_test, y_test=y_test, classes=count, image_shape=shape, class_names=names)


def _chosen(images: ImageSet, classes: Sequence[int | str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the numbers of the classes to keep, in the requested order, and their names."""
    present = np.unique(np.concatenate([part.classes for part in (images.train, images.test) if part is not None]))
    if images.names is not None and len(present) and not 0 <= present[0] <= present[-1] < len(images.names):
        number = present[0] if present[0] < 0 else present[-1]
        raise InputError(f"classes must be from 0 to {len(images.names) - 1}, got {number}")
    names = {int(i): str(i) if images.names is None else images.names[i] for i in present}
    if classes is None:
        return present, tuple(names.values())
    if isinstance(classes, str) or not classes:
        raise InputError(f"classes must be one or more numbers or names, such as (2, 3), got {classes!r}")
    by_name = {name: number for number, name in names.items()}
    kept: list[int] = []
    for asked in classes:
        number = by_name.get(asked) if isinstance(asked, str) else asked
        if number is None or number not in names:
            raise InputError(f"classes must be among {', '.join(map(repr, by_name))}, got {asked!r}")
        kept.append(number)
    if len(set(kept)) < len(kept):
        raise InputError(f"classes must differ, got {tuple(classes)!r}")
    return np.array(kept, dtype=np.int64), tuple(names[number] for number in kept)


def _rows(
    images: ImageSet, numbers: NDArray[np.int64], n: int | None, n_test: int | None, generator: torch.Generator
) -> tuple[Images, Images]:
    """Shuffle the images of the classes to keep, and cut them to the requested numbers."""
    train = _shuffled(images.train, numbers, generator)
    if images.test is not None:
        # Test images are shuffled last: their number does not change the training images.
        test = _shuffled(images.test, numbers, generator)
    else:
        if n is None:
            n = len(train) - (len(train) // 5 if n_test is None else n_test)
        train, test = train[: max(n, 0)], train[max(n, 0) :]
    rows = []
    drawn = (("n", images.train, train, n, 2), ("n_test", images.test or images.train, test, n_test, 0))
    for argument, part, chosen, asked, least in drawn:
        count = len(chosen) if asked is None else asked
        if not least <= count <= len(chosen):
            raise InputError(f"{argument} must be from {least} to {len(chosen)} images of these classes, got {count}")
        rows.append(Images(part.pixels[chosen[:count]], part.classes[chosen[:count]]))
    return rows[0], rows[1]


def _shuffled(images: Images, numbers: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.int64]:
    rows = np.flatnonzero(np.isin(images.classes, numbers))
    order: NDArray[np.int64] = torch.randperm(len(rows), generator=generator).numpy()
    return rows[order]


def _positions(classes: NDArray[np.int64], numbers: NDArray[np.int64]) -> Tensor:
    """Return the position of each class among the numbers."""
    order = np.argsort(numbers)
    return torch.from_numpy(order[np.searchsorted(numbers, classes, sorter=order)])


def _scaled(pixels: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return pixels from 0 to 1, in at least single precision."""
    working = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = torch.from_numpy(np.ascontiguousarray(pixels)).to(working)
    return scaled.div_(255) if pixels.dtype == np.uint8 else scaled


def _standardized(images: Tensor, like: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Standardize images by the mean and standard deviation of other images along some axes."""
    if not len(images):
        return images
    std, mean = torch.std_mean(like, axes, correction=0, keepdim=True)
    varies = std > 1e-6  # one step of one pixel in 60,000 images gives 2e-5
    return (images - mean) / std.where(varies, 1) * varies
