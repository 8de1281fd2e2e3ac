"""Every python block of the documentation and of README runs, and prints what the page says.

The blocks of a page run in order in one namespace, in an empty folder (see ``docs/make_outputs.py``). Words and whole
numbers must agree, other numbers to a tolerance, because a trained network differs a little between machines. A page
that holds ``<!-- slow -->`` is left to `make test-slow`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import featlearn as fl

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
sys.path.insert(0, str(DOCS))

from make_outputs import blocks_of, run_page, same_output, updated_page  # noqa: E402


def check_page(path: Path, folder: Path) -> None:
    """Run a page in a folder; what it writes by a relative name lands there."""
    for block, printed in run_page(path, folder):
        assert block.output is None or same_output(block.output, printed), (
            f"{path.name}, line {block.line}: the page says\n{block.output}\nand the code prints\n{printed}"
        )


def _pages() -> list[object]:
    return [
        pytest.param(
            path,
            id=path.relative_to(DOCS if DOCS in path.parents else ROOT).with_suffix("").as_posix(),
            marks=[pytest.mark.slow] if "<!-- slow -->" in path.read_text(encoding="utf-8") else [],
        )
        for path in [ROOT / "README.md", *PAGES]
        if blocks_of(path.read_text(encoding="utf-8"))
    ]


def written_in_the_root() -> set[str]:
    """What lies in the repository's root and its docs, without caches and hidden files."""
    inside = [entry for folder in (ROOT, DOCS) for entry in os.scandir(folder)]
    return {entry.path for entry in inside if not entry.name.startswith(".") and entry.name != "__pycache__"}


@pytest.mark.parametrize("path", _pages())
def test_blocks_of_the_page_run(path: Path, tmp_path: Path) -> None:
    before = written_in_the_root()
    with torch.random.fork_rng(devices=[]):
        check_page(path, tmp_path)
    assert written_in_the_root() == before


def test_what_a_page_writes_lies_in_its_folder_alone(tmp_path: Path) -> None:
    before = written_in_the_root()
    page = tmp_path / "page.md"
    lines = ["from pathlib import Path", "Path('runs').mkdir()", "Path('spectrum.png').write_text('a picture')"]
    page.write_text("\n".join(["```python", *lines, "```", "", "```python", "# file: train.py", "pass", "```", ""]))
    (tmp_path / "folder").mkdir()
    here = Path.cwd()
    check_page(page, tmp_path / "folder")
    assert Path.cwd() == here
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"runs", "spectrum.png", "train.py"}
    assert written_in_the_root() == before


def test_no_page_has_left_anything_in_the_root() -> None:
    left = [
        path.name for path in ROOT.iterdir() if path.name == "runs" or path.suffix in (".safetensors", ".png", ".db")
    ]
    assert left == []
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert not [line for line in ignored if "runs" in line or line.endswith((".safetensors", ".png", ".db"))]


def test_outputs_are_written_into_a_page_and_nothing_is_left(tmp_path: Path) -> None:
    before = written_in_the_root()
    page = tmp_path / "page.md"
    lines = ["```python", "open('made.txt', 'w').close()", "print(1.001)", "```", "", "```text", "1.0", "```"]
    more = ["", "```python", "print('new', 2)", "```", "", "```text", "old 2", "```", "end", ""]
    page.write_text("\n".join(lines + more))
    assert updated_page(page) == page.read_text().replace("old 2", "new 2")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert written_in_the_root() == before


def test_blocks_are_found_with_their_output() -> None:
    page = "# T\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```bash\nls\n```\n\n"
    page += "```python\nx = 1\n```\n\nWords.\n\n```text\n2\n```\n"
    first, second = blocks_of(page)
    assert (first.line, first.code, first.output) == (3, "print(1)\n", "1\n")
    assert second.output is None


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("nfc 0.95\n", "nfc  0.951", True),
        ("nfc 0.95", "nfc 0.85", False),
        ("rank 6", "rank 7", False),
        ("rank 6", "order 6", False),
        ("1.0 2.0", "1.0", False),
        ("32x16", "32x16", True),
        ("nan", "nan", True),
    ],
)
def test_outputs_are_compared_word_by_word(said: str, printed: str, same: bool) -> None:
    assert same_output(said, printed) is same


def test_pictures_exist_and_are_small() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.resolve() for path in (DOCS / "img").rglob("*.png")}
    assert all(path.stat().st_size < 150_000 for path in shown)


def test_every_page_is_in_the_menu() -> None:
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.(?:md|ipynb)", menu))
    written = [*PAGES, *DOCS.rglob("*.ipynb")]
    assert listed == {path.relative_to(DOCS).as_posix() for path in written}


def test_no_page_asks_the_network_for_scripts_or_styles() -> None:
    for page in PAGES:
        assert not re.search(r"<(script|link|img|iframe)\b", page.read_text(encoding="utf-8")), page


def test_the_reference_names_what_exists_and_all_that_is_public() -> None:
    named = {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)}
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    reported = {name.rpartition(".")[2] for name in named}
    missing = [name for name in fl.__all__ if name not in reported and not inspect.ismodule(getattr(fl, name))]
    assert not missing, "public names without a place in the reference"
