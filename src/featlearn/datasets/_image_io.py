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
_IDX_BYTES = 8  # the code of unsigned bytes, of which MNIST's files are


class Images(NamedTuple):
    """Images and their classes.

    Attributes:
        pixels: ``(n, channels, height, width)``, either bytes from 0 to 255 or floating-point numbers from 0 to 1.
        classes: ``(n,)`` integers, as the file has them.
    """

    pixels: NDArray[Any]
    classes: NDArray[np.int64]


def as_images(pixels: NDArray[Any], classes: NDArray[Any], source: str) -> Images:
    """Check an array of images and bring its channels to the front.

    Args:
        pixels: ``(n, height, width)``, ``(n, height, width, channels)`` or ``(n, channels, height, width)`` with 1, 3
            or 4 channels; where both readings would do, the channels are last.
        classes: ``(n,)`` or ``(n, 1)`` integers.
        source: Where they are from, for messages.
    """
    shape = pixels.shape
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and shape[3] in _CHANNELS:
        pixels = pixels.transpose(0, 3, 1, 2)
    elif pixels.ndim != 4 or shape[1] not in _CHANNELS:
        raise InputError(
            f"the images of {source} must be (n, height, width), or have 1, 3 or 4 channels besides, got {shape}"
        )
    numbers = classes.reshape(-1)
    if numbers.size != classes.shape[0] or len(numbers) != len(pixels):
        raise InputError(f"{source} has {len(pixels)} images but classes of shape {classes.shape}")
    if numbers.dtype.kind not in "iu":
        raise InputError(f"the classes of {source} must be integers, got {numbers.dtype}")
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind != "f":
            raise InputError(f"the pixels of {source} must be bytes or floating-point numbers, got {pixels.dtype}")
        if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN is neither
            raise InputError(f"the pixels of {source} are floating-point numbers and must be from 0 to 1")
    return Images(pixels, numbers.astype(np.int64))


def joined(parts: list[Images]) -> Images:
    """Several sets as one."""
    return Images(np.concatenate([p.pixels for p in parts]), np.concatenate([p.classes for p in parts]))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of bytes, as MNIST is distributed, gzipped or plain.

    Two zero bytes, the code of the type (8), the number of axes, their lengths as big-endian 32-bit integers, data.
    """
    data = path.read_bytes()
    if path.name.endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path.name} is damaged or not gzipped ({error}): fetch it again") from error
    if len(data) < 4 or data[:3] != bytes([0, 0, _IDX_BYTES]):
        raise InputError(f"{path.name} is no idx file of bytes: it starts with {data[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise InputError(f"{path.name} is cut short within its header")
    shape = tuple(int(length) for length in np.frombuffer(data, ">u4", data[3], 4))
    if len(data) != start + math.prod(shape):
        raise InputError(f"{path.name} must have {math.prod(shape)} bytes for shape {shape}, got {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_cifar(path: Path) -> Images:
    """A binary batch of CIFAR-10: rows of a class and 3 x 32 x 32 pixels, a byte each."""
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % _CIFAR_ROW:
        raise InputError(f"{path.name} must be rows of {_CIFAR_ROW} bytes, got {data.size} bytes: fetch it again")
    rows = data.reshape(-1, _CIFAR_ROW)
    if rows[:, 0].max() > 9:
        raise InputError(f"classes in {path.name} must be from 0 to 9, got {rows[:, 0].max()}")
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64))


def read_npz(path: Path) -> tuple[Images, Images | None]:
    """Training and test images of an ``.npz`` file: arrays x_train, y_train, x_test, y_test, or X and y alone."""
    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            keys = list(getattr(file, "files", []))  # an .npy file, which holds one array without a name, has none
            # Other arrays, which may be large, are not unpacked.
            arrays = {key.lower(): file[key] for key in keys if key.lower().split("_")[0] in ("x", "y")}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"{path.name} is damaged or no .npz file of plain arrays ({reason})") from error
    x, y = ("x", "y") if "x" in arrays else ("x_train", "y_train")
    if missing := [key for key in (x, y) if key not in arrays]:
        raise InputError(f"{path.name} lacks {' and '.join(missing)}: its arrays are {', '.join(keys) or 'none'}")
    train = as_images(arrays[x], arrays[y], path.name)
    if "x_test" not in arrays or "y_test" not in arrays:
        return train, None
    test = as_images(arrays["x_test"], arrays["y_test"], path.name)
    if test.pixels.shape[1:] != train.pixels.shape[1:]:
        raise InputError(
            f"training and test images of {path.name} differ: {train.pixels.shape[1:]} and {test.pixels.shape[1:]}"
        )
    return train, test


def read_mat(path: Path) -> Images:
    """SVHN's cropped digits: X ``(32, 32, 3, n)`` bytes and y ``(n, 1)``, where 10 stands for the digit 0."""
    from scipy.io import loadmat  # takes a while to import, and few need it

    try:
        file = loadmat(io.BytesIO(path.read_bytes()), variable_names=["X", "y"])
    except Exception as error:  # of any kind: scipy lets out what its parser runs into
        raise InputError(f"{path.name} is damaged or no MATLAB file ({type(error).__name__}: {error})") from error
    if missing := [key for key in ("X", "y") if key not in file]:
        raise InputError(f"{path.name} lacks {' and '.join(missing)}")
    if file["X"].ndim != 4:
        raise InputError(f"X of {path.name} must be (height, width, channels, n), got {file['X'].shape}")
    if file["y"].dtype.kind not in "iuf" or (file["y"] != file["y"].astype(np.int64)).any():
        raise InputError(f"y of {path.name} must be integers")
    return as_images(file["X"].transpose(3, 0, 1, 2), file["y"].astype(np.int64) % 10, path.name)


_ENDINGS = (".png", ".jpg", ".jpeg", ".ppm", ".bmp")


def read_image_folder(folder: Path, size: int | None = None) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Images of a folder that has a folder a class, or two folders ``train`` and ``test`` which have.

    Classes are numbered in the alphabetical order of their names. Images are gray if all of them are, else RGB.

    Args:
        folder: That holds the folders.
        size: Side of the square to which images are resized; None asks that all have one size.

    Returns:
        Training images, test images if they are apart, and the names of the classes.
    """
    parts = [folder / "train", folder / "test"]
    if not all(part.is_dir() for part in parts):
        parts = [folder]
    names = _folders(parts[0])
    if len(parts) == 2 and _folders(parts[1]) != names:
        raise InputError(f"'train' and 'test' in {str(folder)!r} must hold the same folders, one a class")
    found = [[(file, number) for number, name in enumerate(names) for file in _files(part / name)] for part in parts]
    if not names or not all(found):
        raise InputError(f"{str(folder)!r} must hold a folder a class with {', '.join(_ENDINGS)} images in it")
    pixels = _read([file for part in found for file, _ in part], size)
    numbers = np.array([number for part in found for _, number in part], dtype=np.int64)
    cut = len(found[0])
    test = Images(pixels[cut:], numbers[cut:]) if len(parts) == 2 else None
    return Images(pixels[:cut], numbers[:cut]), test, names


def _folders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in _ENDINGS and not f.name.startswith("."))


def _read(files: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    images = [_pixels(file, size) for file in files]
    first = images[0]
    for file, image in zip(files, images, strict=True):
        if image.shape[:2] != first.shape[:2]:
            raise InputError(
                f"{files[0].name} has {_size(first)} pixels and {file.name} {_size(image)}: pass size= to resize them"
            )
    if any(image.ndim == 3 for image in images):
        images = [image if image.ndim == 3 else np.stack([image] * 3, -1) for image in images]
        return np.stack(images).transpose(0, 3, 1, 2)
    return np.stack(images)[:, None]


def _size(image: NDArray[Any]) -> str:
    return "x".join(map(str, image.shape[:2]))


def _pixels(file: Path, size: int | None) -> NDArray[np.uint8]:
    """``(height, width)`` of a gray image, ``(height, width, 3)`` of any other."""
    from PIL import Image  # which matplotlib brings along

    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # a conversion would cut the values off at 255
                raise InputError(f"{str(file)!r} has more than 8 bits a pixel: save it with 8")
            plain = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:  # PIL raises them all
        raise InputError(f"{str(file)!r} is damaged or no image ({error})") from error
    if size is not None:
        plain = plain.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(plain, np.uint8)
