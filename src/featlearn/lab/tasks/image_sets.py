"""Sets of images by name or by path: which files they are in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featlearn.errors import InputError
from featlearn.lab.tasks.folders import data_folder, not_present
from featlearn.lab.tasks.image_files import Images, as_images, joined, read_cifar, read_idx, read_mat, read_npz
from featlearn.lab.tasks.image_folders import read_image_folder

__all__ = ["ImageSet", "read_image_set"]

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
