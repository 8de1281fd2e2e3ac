"""The classification tables of the UCI repository as Fernandez-Delgado et al. (2014) laid them out."""

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

from featlearn.datasets._data_home import data_folder, not_present
from featlearn.errors import InputError

_ARCHIVE = "uci121_official.tar.xz"
_INDEX = "index.csv"
_TUNING, _FOLDS = "conxuntos.dat", "conxuntos_kfold.dat"

Split = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows to learn from and rows to judge by, from 0 on."""


@dataclass(frozen=True, eq=False)
class UCITable:
    """A table with its official splits.

    Attributes:
        name: As in the archive, e.g. ``"abalone"``.
        X: ``(n, d)`` numbers as the archive has them: categories are coded as integers, and columns are standardized
            over all rows, test rows included, but for monks-1, monks-2, monks-3 and spectf, which are on another scale.
        y: ``(n,)`` classes from 0 to ``classes - 1``.
        classes: Number of classes.
        folds: Four (train, test) splits of the rows. The four test sets are drawn one by one and overlap.
        tuning: A (train, validation) split into halves, for the choice of parameters. It cuts across the folds: who
            learns anything from it has seen test rows of every fold.
    """

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.int64]
    classes: int
    folds: list[Split]
    tuning: Split


def uci_names(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the tables in the archive, in alphabetical order.

    Args:
        folder: That holds ``uci121_official.tar.xz``; by default ``uci121`` in the folder that the environment
            variable FEATLEARN_DATA names, or else in featlearn's part of the user's cache folder.
    """
    archive = _find_archive(folder)
    index = archive.with_name(_INDEX)
    if index.is_file():  # saves unpacking the archive
        frame = pd.read_csv(index)
        if "name" not in frame.columns:
            raise InputError(f"{str(index)!r} must have a column 'name', got {list(frame.columns)}: delete the file")
        return sorted(map(str, frame["name"]))
    return sorted({name for name, file, _ in _members(archive) if file == f"{name}.txt"})


def uci_table(name: str, folder: str | os.PathLike[str] | None = None) -> UCITable:
    """One table of the archive; `uci_tables` reads many in one pass.

    Of sets in two files it is the first, the training file, to which the splits belong: several of the test files
    are standardized on their own.

    Args:
        name: One of `uci_names`.
        folder: As in `uci_names`.
    """
    return next(uci_tables([name], folder))


def uci_tables(names: Iterable[str] | None = None, folder: str | os.PathLike[str] | None = None) -> Iterator[UCITable]:
    """Tables of the archive one after the other, in the archive's order, from one pass over it.

    Nothing is written to disk, and no more than a table is held.

    Args:
        names: Some of `uci_names`, in any order; all if None.
        folder: As in `uci_names`.
    """
    archive = _find_archive(folder)
    known = uci_names(archive.parent)
    if isinstance(names, str):
        raise InputError(f"names must be a list of names, got {names!r}: pass [{names!r}] or call uci_table")
    wanted = set(known if names is None else names)
    if unknown := sorted(wanted - set(known)):
        close = difflib.get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "uci_names() lists them"
        raise InputError(f"the archive has no table {', '.join(map(repr, unknown))} among its {len(known)}: {hint}")
    return _wanted_tables(archive, wanted)


def _find_archive(folder: str | os.PathLike[str] | None) -> Path:
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
        found = parts.setdefault(name, {})
        found[file] = read()
        if not _missing(name, found):
            try:
                table = _parse(name, parts.pop(name))
            except InputError:
                raise
            except ValueError as error:  # of pandas and of int()
                raise _damaged(name, str(error)) from error
            yield table
            waiting.remove(name)
            if not waiting:
                return
    if waiting:
        name = min(waiting)
        raise InputError(
            f"{archive.name} is incomplete: {name!r} lacks {', '.join(_missing(name, parts.get(name, {})))}"
        )


def _missing(name: str, found: dict[str, bytes]) -> list[str]:
    """Files of a table that have not come by yet; which one holds the rows is told in the description."""
    description = f"{name}.txt"
    rows = _entry(name, found[description], "fich1") if description in found else "a table of rows"
    return [file for file in (description, rows, _TUNING, _FOLDS) if file not in found]


def _members(archive: Path) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """(folder, file name, reader) of every regular file; as a stream, since xz has no way to jump.

    A reader must be called before the next file is asked for.
    """
    try:
        # Unpacked by lzma, which says when a file is cut short; tarfile alone would take that for its end.
        with lzma.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as stream:
            for member in stream:
                path = PurePosixPath(member.name)
                if member.isfile() and len(path.parts) > 1:
                    yield path.parent.name, path.name, partial(_content, stream, member)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise InputError(f"{str(archive)!r} is damaged or no .tar.xz archive ({error}): fetch it again") from error


def _content(stream: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = stream.extractfile(member)
    return b"" if opened is None else opened.read()


def _entry(name: str, description: bytes, key: str) -> str:
    found = re.search(rf"^\s*{key}\s*=\s*(\S+)", description.decode("latin-1"), re.MULTILINE)
    if found is None:
        raise _damaged(name, f"{name}.txt has no entry {key!r}")
    return found[1]


def _damaged(name: str, what: str) -> InputError:
    return InputError(f"the archive's table {name!r} is damaged: {what}")


def _parse(name: str, files: dict[str, bytes]) -> UCITable:
    description = files[f"{name}.txt"]
    n, d, classes = (int(_entry(name, description, key)) for key in ("n_patrons1", "n_entradas", "n_clases"))
    rows = _entry(name, description, "fich1")
    # The first column counts the rows; the header leaves it without a name.
    frame = pd.read_csv(io.BytesIO(files[rows]), sep="\t", index_col=0)
    if frame.shape != (n, d + 1):
        raise _damaged(name, f"{rows} must be {n} rows of {d} inputs and a class, got {frame.shape}")
    values = frame.to_numpy(np.float64)
    y = values[:, -1].astype(np.int64)
    if not np.isfinite(values).all():
        raise _damaged(name, f"{rows} has missing or infinite entries")
    if (y != values[:, -1]).any() or y.min() < 0 or y.max() >= classes:
        raise _damaged(name, f"classes in {rows} must be integers from 0 to {classes - 1}")
    return UCITable(
        name=name,
        X=np.ascontiguousarray(values[:, :-1]),
        y=y,
        classes=classes,
        folds=_splits(name, _FOLDS, files[_FOLDS], 4, n),
        tuning=_splits(name, _TUNING, files[_TUNING], 1, n)[0],
    )


def _splits(name: str, file: str, text: bytes, count: int, n: int) -> list[Split]:
    """Splits of n rows: two lines of indices each, from 0 on."""
    lines = [np.array(line.split(), dtype=np.int64) for line in text.splitlines() if line.strip()]
    if len(lines) != 2 * count:
        raise _damaged(name, f"{file} must have {2 * count} lines, got {len(lines)}")
    splits = list(zip(lines[::2], lines[1::2], strict=True))
    for split in splits:
        if not np.array_equal(np.sort(np.concatenate(split)), np.arange(n)):
            raise _damaged(name, f"a split in {file} does not have each of the {n} rows exactly once")
    return splits
