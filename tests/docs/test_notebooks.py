"""The notebooks of the documentation run and print what they show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from make_notebooks import NOTEBOOKS, run  # noqa: E402
from make_outputs import same_output  # noqa: E402


def printed(notebook: object) -> list[str]:
    """Return the printed text of each cell, and the plain form of tables; pictures are left out."""
    texts = []
    for cell in notebook.cells:  # type: ignore[attr-defined]
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if not text.startswith("<"):
                texts.append(text)
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_a_picture_and_no_warning(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    kinds = [kind for cell in stored.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "image/png" in kinds
    assert not re.search(r"(Warning|Traceback|/site-packages/)", nbformat.writes(stored))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    for before, now in zip(printed(stored), printed(run(path)), strict=True):
        assert same_output(before, now), f"{before}\n---\n{now}"
