"""Files of a command: all of them, or none."""

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

# What may be replaced: folders with nothing else in them, and files of common names that begin like ours.
_FOLDERS = {
    "run": re.compile(
        r"run\.db(-wal|-shm|-journal)?|run\.lock|(matrices|checkpoints|initial)(/(0|[1-9][0-9]*)\.safetensors)?"
    ),
    "report": re.compile(r"report\.json|matrices-[0-9a-f]{12}\.safetensors"),
}
_MARKS = {"index.html": b"content=\"default-src 'none'; img-src data:", "model.safetensors": b'"featlearn"'}
_MARKED = 400  # bytes of a file, within which its mark stands


def check_folder(out: Path, names: Iterable[str] = ()) -> None:
    """Refuse, before anything is computed, a folder that results cannot go to.

    Args:
        out: The folder, which need not exist.
        names: Files and folders in it that will be replaced; what featlearn has not written is refused.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{str(out)!r} is a file: choose another folder with --out")
    nearest = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{str(nearest)!r} cannot be written to: choose another folder with --out")
    for name in names:
        if os.path.lexists(out / name) and (foreign := _foreign(out / name)):
            raise InputError(f"{str(foreign)!r} is there and was not written by this command: choose another --out")


def check_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to replace a run that has other settings than these, or that is being written.

    Args:
        folder: Of the run; there may be none.
        settings: Some of its config, which show what command has made it.
    """
    from featlearn.runs import open_run

    if not (folder / "run.db").exists():
        return
    run = open_run(folder)
    if any(run.config.get(name) != value for name, value in settings.items()):
        raise InputError(f"the run in {str(folder)!r} was not written by this command: choose another --out")
    if run.status == "running":
        raise InputError(f"the run in {str(folder)!r} is being written: wait for its end, or choose another --out")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A draft folder within ``out``; what the block writes there moves to ``out`` when it ends well.

    Files and folders of the same names are replaced, if `check_folder` lets them. If the block is stopped, or the
    moves are, the draft goes, what was there is there again, and ``out`` goes if it was not there before.
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
            raise  # what could not be moved back stays
        shutil.rmtree(draft, ignore_errors=True)
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    shutil.rmtree(draft, ignore_errors=True)


def _foreign(path: Path) -> Path | None:
    """What would be lost of somebody else's if the path were replaced: itself, or something in it; None for nothing."""
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
    """Show a page in the user's browser; one that cannot be started is no trouble, the page is named anyway."""
    import webbrowser

    webbrowser.open(page.absolute().as_uri())
