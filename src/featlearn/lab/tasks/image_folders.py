"""Images as files, a folder a class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.lab.tasks.image_files import Images

__all__ = ["read_image_folder"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".ppm", ".bmp")


def read_image_folder(folder: Path, size: int | None = None) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Images of a folder that has a folder a class, or two folders ``train`` and ``test`` which have.

    Classes are numbered in the alphabetical order of their names. Images are grey if all of them are, else RGB.

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
    """``(height, width)`` of a grey image, ``(height, width, 3)`` of any other."""
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
