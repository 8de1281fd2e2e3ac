"""Classification tables of the UCI repository with the splits of Fernandez-Delgado et al.

References:
    Fernandez-Delgado, Cernadas, Barro & Amorim (2014), "Do we need hundreds of classifiers to solve real world
    classification problems?", https://jmlr.org/papers/v15/delgado14a.html.
"""

from __future__ import annotations

import difflib
import io
import lzma
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from featlearn.datasets._base import data_folder, not_present
from featlearn.errors import InputError

_ARCHIVE = "uci121_official.tar.xz"
_INDEX = "index.csv"
_TUNING, _FOLDS = "conxuntos.dat", "conxuntos_kfold.dat"

Split = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Row numbers, from 0, of the training rows and of the test or validation rows."""
_PathLike = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class UCITable:
    """Table of the UCI archive with its official splits.

    Attributes:
        name: Name of the table in the archive, e.g. ``"abalone"``.
        X: Inputs as in the archive, shape ``(n, d)``. Categories are coded as integers, and columns are standardized
            over all rows, including test rows, except for monks-1, monks-2, monks-3 and spectf (other scales).
        y: Classes, integers from 0 to ``classes - 1``, shape ``(n,)``.
        classes: Number of classes.
        folds: Four (train, test) splits of the rows. The four test sets are drawn independently and overlap.
        tuning: Split (train, validation) into halves, for the selection of parameters. It contains test rows of all
            folds, so anything learned from it depends on them.
    """

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.int64]
    classes: int
    folds: list[Split]
    tuning: Split


def uci_names(folder: _PathLike | None = None) -> list[str]:
    """Return the names of the tables in the archive.

    Args:
        folder: Folder of ``uci121_official.tar.xz``. None is ``uci121`` in the folder of the environment variable
            FEATLEARN_DATA, or else in the folder ``featlearn`` of the user's cache.

    Returns:
        Names in alphabetical order.

    Raises:
        DataNotPresent: The archive is missing.
        InputError: The archive is damaged.
    """
    archive = _find_archive(folder)
    index = archive.with_name(_INDEX)
    if index.is_file():  # saves unpacking the archive
        frame = pd.read_csv(index)
        if "name" not in frame.columns:
            raise InputError(f"{str(index)!r} must have a column 'name', got {list(frame.columns)}. Delete the file.")
        return sorted(map(str, frame["name"]))
    return sorted({name for name, file, _ in _members(archive) if file == f"{name}.txt"})


def uci_table(name: str, folder: _PathLike | None = None) -> UCITable:
    """Read one table of the archive; `uci_tables` reads many in one pass.

    Of data sets with two files, only the training file is read. The splits belong to it, and several of the test files
    are standardized separately.

    Args:
        name: Name of the table, one of `uci_names`.
        folder: Folder of ``uci121_official.tar.xz``. None is the default folder of `uci_names`.

    Returns:
        The table.

    Raises:
        DataNotPresent: The archive is missing.
        InputError: The archive has no such table, or is damaged.
    """
    return next(uci_tables([name], folder))


def uci_tables(names: Iterable[str] | None = None, folder: _PathLike | None = None) -> Iterator[UCITable]:
    """Iterate over tables in the order of the archive, in one pass over it.

    Nothing is written to disk, and one table is held in memory at a time.

    Args:
        names: Names of the tables, from `uci_names`, in any order. None reads all.
        folder: Folder of ``uci121_official.tar.xz``. None is the default folder of `uci_names`.

    Returns:
        Iterator over the tables.

    Raises:
        DataNotPresent: The archive is missing.
        InputError: The archive has no such table, or is damaged.
    """
    archive = _find_archive(folder)
    known = uci_names(archive.parent)
    if isinstance(names, str):
        raise InputError(f"names must be a list of names, got {names!r}. Pass [{names!r}] or call uci_table.")
    wanted = set(known if names is None else names)
    if unknown := sorted(wanted - set(known)):
        close = difflib.get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "uci_names() lists them"
        raise InputError(f"the archive has no table {', '.join(map(repr, unknown))} among its {len(known)}: {hint}")
    return _wanted_tables(archive, wanted)


def _find_archive(folder: _PathLike | None) -> Path:
    archive = data_folder("uci121", folder) / _ARCHIVE
    if not archive.is_file():
        raise not_present("uci121", archive.parent, [_ARCHIVE])
    return archive


def _wanted_tables(archive: Path, wanted: set[str]) -> Iterator[UCITable]:
    waiting = set(wanted)
    parts: dict[str, dict[str, bytes]] = {}
    for name, file, read in _members(archive):
        if name not in waiting or not file.endswith((".dat", ".txt")):
            continue
        files = parts.setdefault(name, {})
        files[file] = read()
        if not _missing(name, files):
            try:
                table = _parse(name, parts.pop(name))
            except InputError:
                raise
            except ValueError as error:  # from pandas and int()
                raise _damaged(name, str(error)) from error
            yield table
            waiting.remove(name)
            if not waiting:
                return
    if waiting:
        name = min(waiting)
        missing = ", ".join(_missing(name, parts.get(name, {})))
        raise InputError(f"{archive.name} is incomplete: {name!r} lacks {missing}")


def _missing(name: str, files: dict[str, bytes]) -> list[str]:
    """Return the files of a table that are still missing; its description names the file of the rows."""
    description = f"{name}.txt"
    rows = _entry(name, files[description], "fich1") if description in files else "a table of rows"
    return [file for file in (description, rows, _TUNING, _FOLDS) if file not in files]


def _members(archive: Path) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield folder, file name and reader of each regular file, as a stream, since xz has no random access.

    A reader must be called before the iterator advances.
    """
    try:
        # Unpacked by lzma, which detects a truncated file; tarfile would take it for the end of the archive.
        with lzma.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as stream:
            for member in stream:
                path = PurePosixPath(member.name)
                if member.isfile() and len(path.parts) > 1:
                    yield path.parent.name, path.name, partial(_content, stream, member)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise InputError(
            f"{str(archive)!r} is damaged or not a .tar.xz archive ({error}). Download it again."
        ) from error


def _content(stream: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = stream.extractfile(member)
    return b"" if opened is None else opened.read()


def _entry(name: str, description: bytes, key: str) -> str:
    match = re.search(rf"^\s*{key}\s*=\s*(\S+)", description.decode("latin-1"), re.MULTILINE)
    if match is None:
        raise _damaged(name, f"{name}.txt has no entry {key!r}")
    return match[1]


def _damaged(name: str, what: str) -> InputError:
    return InputError(f"the archive's table {name!r} is damaged: {what}")


def _parse(name: str, files: dict[str, bytes]) -> UCITable:
    description = files[f"{name}.txt"]
    n, d, classes = (int(_entry(name, description, key)) for key in ("n_patrons1", "n_entradas", "n_clases"))
    rows = _entry(name, description, "fich1")
    # The first column numbers the rows and has no name in the header.
    frame = pd.read_csv(io.BytesIO(files[rows]), sep="\t", index_col=0)
    if frame.shape != (n, d + 1):
        raise _damaged(name, f"{rows} must be {n} rows of {d} inputs and a class, got {frame.shape}")
    values = frame.to_numpy(np.float64)
    y = values[:, -1].astype(np.int64)
    if not np.isfinite(values).all():
        raise _damaged(name, f"{rows} has missing or infinite entries")
    if (y != values[:, -1]).any() or y.min() < 0 or y.max() >= classes:
        raise _damaged(name, f"classes in {rows} must be integers from 0 to {classes - 1}")
    folds, (tuning,) = (_splits(name, file, files[file], count, n) for file, count in ((_FOLDS, 4), (_TUNING, 1)))
    return UCITable(name, np.ascontiguousarray(values[:, :-1]), y, classes, folds, tuning)


def _splits(name: str, file: str, text: bytes, count: int, n: int) -> list[Split]:
    """Parse splits of n rows, two lines of row numbers each, from 0."""
    lines = [np.array(line.split(), dtype=np.int64) for line in text.splitlines() if line.strip()]
    if len(lines) != 2 * count:
        raise _damaged(name, f"{file} must have {2 * count} lines, got {len(lines)}")
    splits = list(zip(lines[::2], lines[1::2], strict=True))
    for split in splits:
        if not np.array_equal(np.sort(np.concatenate(split)), np.arange(n)):
            raise _damaged(name, f"a split in {file} does not have each of the {n} rows exactly once")
    return splits
