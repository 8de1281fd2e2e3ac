"""Read images from IDX, CIFAR, NPZ and MAT files and from one folder per class, without unpickling."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featlearn.errors import InputError

_CHANNELS = (1, 3, 4)
_CIFAR_ROW = 1 + 3 * 32 * 32
_IDX_BYTES = 8  # code of unsigned bytes, the type of MNIST's files


class Images(NamedTuple):
    """Images and their classes.

    Attributes:
        pixels: Pixels, shape ``(n, channels, height, width)``, bytes or floating-point numbers from 0 to 1.
        classes: Classes as in the file, integers of shape ``(n,)``.
    """

    pixels: NDArray[Any]
    classes: NDArray[np.int64]


def as_images(pixels: NDArray[Any], classes: NDArray[Any], source: str) -> Images:
    """Check an array of images and move its channels to the front.

    Args:
        pixels: Pixels, shape ``(n, height, width)``, ``(n, height, width, channels)`` or
            ``(n, channels, height, width)`` with 1, 3 or 4 channels. If the shape is ambiguous, the channels are last.
        classes: Classes, integers of shape ``(n,)`` or ``(n, 1)``.
        source: Source of the images, for messages.

    Raises:
        InputError: Pixels or classes have another shape or type.
    """
    shape = pixels.shape
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and shape[3] in _CHANNELS:
        pixels = pixels.transpose(0, 3, 1, 2)
    elif pixels.ndim != 4 or shape[1] not in _CHANNELS:
        raise InputError(f"the images of {source} must be (n, height, width), or have 1, 3 or 4 channels, got {shape}")
    numbers = classes.reshape(-1)
    if numbers.size != classes.shape[0] or len(numbers) != len(pixels):
        raise InputError(f"the classes of {source} must be one per image, ({len(pixels)},), got shape {classes.shape}")
    if numbers.dtype.kind not in "iu":
        raise InputError(f"the classes of {source} must be integers, got {numbers.dtype}")
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind != "f":
            raise InputError(f"the pixels of {source} must be bytes or floating-point numbers, got {pixels.dtype}")
        if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):  # also if one is NaN
            raise InputError(f"the floating-point pixels of {source} must be from 0 to 1, got other values")
    return Images(pixels, numbers.astype(np.int64))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the array of an idx file of bytes, as of MNIST, gzipped or plain.

    The format is two zero bytes, the code of the type (8), the number of axes, their lengths as big-endian 32-bit
    integers, and the data.
    """
    data = path.read_bytes()
    if path.name.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path.name} is damaged or not gzipped ({error}). Download it again.") from error
    if len(data) < 4 or data[:3] != bytes([0, 0, _IDX_BYTES]):
        raise InputError(f"{path.name} must be an idx file of bytes, got {data[:4].hex(' ') or 'nothing'} at its start")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise InputError(f"{path.name} is truncated within its header. Download it again.")
    shape = tuple(int(length) for length in np.frombuffer(data, ">u4", data[3], 4))
    if len(data) != start + math.prod(shape):
        raise InputError(f"{path.name} must have {math.prod(shape)} bytes for shape {shape}, got {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_cifar(path: Path) -> Images:
    """Read a binary batch of CIFAR-10: rows of a class and 3 x 32 x 32 pixels, one byte each."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % _CIFAR_ROW:
        raise InputError(f"{path.name} must be rows of {_CIFAR_ROW} bytes, got {data.size} bytes. Download it again.")
    rows = data.reshape(-1, _CIFAR_ROW)
    if rows[:, 0].max() > 9:
        raise InputError(f"classes in {path.name} must be from 0 to 9, got {rows[:, 0].max()}")
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64))


def read_npz(path: Path) -> tuple[Images, Images | None]:
    """Read training and test images of an ``.npz`` file: arrays x_train, y_train, x_test, y_test, or X and y."""
    try:
        # Opened here, since numpy does not close a damaged file.
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            keys = list(getattr(file, "files", []))  # none for an .npy file, a single array without a name
            # Other arrays, possibly large, are not unpacked.
            arrays = {key.lower(): file[key] for key in keys if key.lower().split("_")[0] in ("x", "y")}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"{path.name} is damaged or not an .npz file of plain arrays ({reason})") from error
    x, y = ("x", "y") if "x" in arrays else ("x_train", "y_train")
    if missing := [key for key in (x, y) if key not in arrays]:
        raise InputError(f"{path.name} lacks {' and '.join(missing)}; its arrays are {', '.join(keys) or 'none'}")
    train = as_images(arrays[x], arrays[y], path.name)
    if "x_test" not in arrays or "y_test" not in arrays:
        return train, None
    test = as_images(arrays["x_test"], arrays["y_test"], path.name)
    if test.pixels.shape[1:] != train.pixels.shape[1:]:
        shapes = f"{train.pixels.shape[1:]} and {test.pixels.shape[1:]}"
        raise InputError(f"training and test images of {path.name} must have the same shape, got {shapes}")
    return train, test


def read_mat(path: Path) -> Images:
    """Read cropped digits of SVHN: X ``(32, 32, 3, n)`` bytes and y ``(n, 1)``, with 10 for the digit 0."""
    from scipy.io import loadmat  # imported here, since the import is slow

    try:
        file = loadmat(io.BytesIO(path.read_bytes()), variable_names=["X", "y"])
    except Exception as error:  # scipy raises errors of many kinds
        raise InputError(f"{path.name} is damaged or not a MATLAB file ({type(error).__name__}: {error})") from error
    if missing := [key for key in ("X", "y") if key not in file]:
        raise InputError(f"{path.name} lacks {' and '.join(missing)}")
    if file["X"].ndim != 4:
        raise InputError(f"X of {path.name} must be (height, width, channels, n), got {file['X'].shape}")
    if file["y"].dtype.kind not in "iuf" or (file["y"] != file["y"].astype(np.int64)).any():
        raise InputError(f"y of {path.name} must be integers")
    return as_images(file["X"].transpose(3, 0, 1, 2), file["y"].astype(np.int64) % 10, path.name)


_ENDINGS = (".png", ".jpg", ".jpeg", ".ppm", ".bmp")


def read_image_folder(folder: Path, size: int | None = None) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Read a folder with one folder of images per class, or with two such folders ``train`` and ``test``.

    Classes are numbered in the alphabetical order of their names. Images are gray if all of them are, otherwise RGB.

    Args:
        folder: Folder to read.
        size: Side of the square to which images are resized. None requires images of one size.

    Returns:
        Training images, test images or None, and the names of the classes.

    Raises:
        InputError: The folder has another structure, or an image cannot be read.
    """
    parts = [folder / "train", folder / "test"]
    if not all(part.is_dir() for part in parts):
        parts = [folder]
    names = _folders(parts[0])
    if len(parts) == 2 and _folders(parts[1]) != names:
        raise InputError(f"'train' and 'test' in {str(folder)!r} must hold the same folders, one per class")
    files = [[(file, number) for number, name in enumerate(names) for file in _files(part / name)] for part in parts]
    if not names or not all(files):
        raise InputError(f"{str(folder)!r} must hold one folder per class with {', '.join(_ENDINGS)} images")
    pixels = _read([file for part in files for file, _ in part], size)
    numbers = np.array([number for part in files for _, number in part], dtype=np.int64)
    cut = len(files[0])
    test = Images(pixels[cut:], numbers[cut:]) if len(parts) == 2 else None
    return Images(pixels[:cut], numbers[:cut]), test, names


def _folders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in _ENDINGS and not f.name.startswith("."))


def _read(files: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    images = [_pixels(file, size) for file in files]
    sizes = ["x".join(map(str, image.shape[:2])) for image in images]
    for file, other in zip(files, sizes, strict=True):
        if other != sizes[0]:
            raise InputError(
                f"{files[0].name} has {sizes[0]} pixels and {file.name} {other}. Pass size= to resize them."
            )
    if any(image.ndim == 3 for image in images):
        images = [image if image.ndim == 3 else np.stack([image] * 3, -1) for image in images]
        return np.stack(images).transpose(0, 3, 1, 2)
    return np.stack(images)[:, None]


def _pixels(file: Path, size: int | None) -> NDArray[np.uint8]:
    """Read the pixels of an image, shape ``(height, width)`` if it is gray, otherwise ``(height, width, 3)``."""
    from PIL import Image  # a dependency of matplotlib

    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # a conversion would clip the values at 255
                raise InputError(f"{str(file)!r} must have 8 bits per channel, got more than 8 bits")
            plain = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:  # errors of PIL
        raise InputError(f"{str(file)!r} is damaged or not an image ({error})") from error
    if size is not None:
        plain = plain.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(plain, np.uint8)
