"""Files of a command: all of them, or none."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from featlearn.errors import InputError

__all__ = ["check_folder", "open_page", "staged"]


def check_folder(out: Path, folders: Mapping[str, str] | None = None) -> None:
    """Refuse, before anything is computed, a folder that results cannot go to.

    Args:
        out: The folder, which need not exist.
        folders: Folders in it that will be replaced, and a file that shows each of them to be ours.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{str(out)!r} is a file: choose another folder with --out")
    nearest = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{str(nearest)!r} cannot be written to: choose another folder with --out")
    for name, mark in (folders or {}).items():
        if (out / name).exists() and not (out / name / mark).exists():
            raise InputError(f"{str(out / name)!r} is there and was not written by this command: choose another --out")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A draft folder within ``out``; what the block writes there moves to ``out`` when it ends well.

    Files and folders of the same names are replaced. If the block is stopped the draft goes, and so does ``out`` if
    it was not there before.
    """
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    draft = out / f".draft-{uuid.uuid4().hex[:12]}"
    draft.mkdir()
    try:
        yield draft
        old = draft / "replaced"
        old.mkdir()
        for made in sorted(draft.iterdir()):
            if made == old:
                continue
            if (out / made.name).is_dir():
                (out / made.name).replace(old / made.name)  # a folder cannot be put in the place of another
            made.replace(out / made.name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    shutil.rmtree(draft, ignore_errors=True)


def open_page(page: Path) -> None:
    """Show a page in the user's browser; one that cannot be started is no trouble, the page is named anyway."""
    import webbrowser

    webbrowser.open(page.absolute().as_uri())
