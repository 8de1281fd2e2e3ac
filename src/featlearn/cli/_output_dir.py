"""Output folder of a command, written as a whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featlearn.errors import InputError

# Folders may be replaced if they contain only these files, and files of common names if they contain a mark.
_FOLDERS = {
    "run": re.compile(
        r"run\.db(-wal|-shm|-journal)?|run\.lock|(matrices|checkpoints|initial)(/(0|[1-9][0-9]*)\.safetensors)?"
    ),
    "report": re.compile(r"report\.json|matrices-[0-9a-f]{12}\.safetensors"),
}
_MARKS = {"index.html": b"content=\"default-src 'none'; img-src data:", "model.safetensors": b'"featlearn"'}
_MARKED = 400  # bytes at the start of a file that contain its mark


def check_folder(out: Path, names: Iterable[str] = ()) -> None:
    """Raise InputError, before anything is computed, if results cannot be written to a folder.

    Args:
        out: Folder, which need not exist.
        names: Files and folders in it that will be replaced; those that featlearn has not written are refused.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out must be a folder, but {str(out)!r} is a file. Choose another folder.")
    nearest = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError(f"--out must be a writable folder, but {str(nearest)!r} is not. Choose another folder.")
    for name in names:
        if os.path.lexists(out / name) and (foreign := _foreign(out / name)):
            raise InputError(f"{str(foreign)!r} exists and was not written by this command. Choose another --out.")


def check_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError if a run to be replaced has other settings than these, or is being written.

    Args:
        folder: Folder of the run, which need not exist.
        settings: Part of the config, which identifies the command that has written the run.
    """
    from featlearn.runs import open_run

    if not (folder / "run.db").exists():
        return
    run = open_run(folder)
    if any(run.config.get(name) != value for name, value in settings.items()):
        raise InputError(f"The run in {str(folder)!r} was not written by this command. Choose another --out.")
    if run.status == "running":
        raise InputError(f"The run in {str(folder)!r} is being written. Wait for its end, or choose another --out.")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a draft folder within ``out``, whose files are moved to ``out`` at the end of the block.

    Files and folders of the same names are replaced if `check_folder` allows it. If the block or the moves fail, the
    draft is deleted, replaced files are restored, and ``out`` is deleted if it did not exist before.
    """
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    draft = out / f".draft-{uuid.uuid4().hex[:12]}"
    new, old = draft / "new", draft / "old"
    draft.mkdir()
    try:
        new.mkdir()
        old.mkdir()
        yield new
        names = sorted(os.listdir(new))
        check_folder(out, names)
        try:
            for name in names:
                if os.path.lexists(out / name):
                    (out / name).replace(old / name)
                (new / name).replace(out / name)
        except BaseException:
            for name in names:
                if not (new / name).exists():
                    (out / name).replace(new / name)
                if (old / name).exists():
                    (old / name).replace(out / name)
            raise
    except BaseException:
        if old.exists() and os.listdir(old):
            raise  # files that could not be moved back stay in the draft
        shutil.rmtree(draft, ignore_errors=True)
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    shutil.rmtree(draft, ignore_errors=True)


def _foreign(path: Path) -> Path | None:
    """Return a path that featlearn has not written: the path itself or one in it; None if there is none."""
    ours = _FOLDERS.get(path.name)
    if path.is_symlink() or path.is_dir() != (ours is not None):
        return path
    if ours is not None:
        inner = (Path(place) / name for place, folders, files in os.walk(path) for name in (*folders, *files))
        return next((p for p in inner if p.is_symlink() or not ours.fullmatch(p.relative_to(path).as_posix())), None)
    if path.name in _MARKS:
        with open(path, "rb") as file:
            return None if _MARKS[path.name] in file.read(_MARKED) else path
    return None


def open_page(page: Path) -> None:
    """Open a page in the browser, if there is one; the command prints the file name anyway."""
    import webbrowser

    webbrowser.open(page.absolute().as_uri())
