"""Run the notebooks of ``docs/notebooks`` and keep what they print and draw.

Run by hand after a change: ``python docs/make_notebooks.py``. ``tests/docs/test_notebooks.py`` runs them again and
compares what they print.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in a temporary folder, and return it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ from run to run
    return notebook


if __name__ == "__main__":
    for file in NOTEBOOKS:
        nbformat.write(run(file), file)
        print(file.name)
