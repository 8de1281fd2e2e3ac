"""Formulas become MathML, the walks name code that exists, and the papers are linked."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
ARXIV = ("2507.05644", "2308.15478", "2211.06506")
LINKS = ("openreview.net/forum?id=JXCe2ZcUXr", *(f"arxiv.org/abs/{number}" for number in ARXIV))


def test_formulas_become_mathml_and_code_stays() -> None:
    pytest.importorskip("latex2mathml", reason="the site needs the extra 'docs'")
    from mathml import to_mathml

    page = "The $x_0$ costs `$5$`.\n\n```bash\necho $HOME $PATH\n```\n\n$$W^\\top W$$\n\nIt is 3$ and 4$.\n"
    made = to_mathml(page)
    assert made.count("<math") == 2
    assert 'display="block"' in made
    assert "`$5$`" in made
    assert "echo $HOME $PATH" in made
    assert "3$ and 4$" in made


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_formula_of_a_page_can_be_converted(page: Path) -> None:
    pytest.importorskip("latex2mathml", reason="the site needs the extra 'docs'")
    from mathml import to_mathml

    made = to_mathml(page.read_text(encoding="utf-8"))
    without_code = re.sub(r"```.*?```|`[^`]*`", "", made, flags=re.DOTALL)
    assert "$" not in re.sub(r"<math.*?</math>", "", without_code, flags=re.DOTALL)
    assert not re.search(r"<mi>\\|<mtext>\\", made), "a command that latex2mathml does not know"


def test_the_walks_name_code_that_exists() -> None:
    text = (DOCS / "development" / "walks.md").read_text(encoding="utf-8")
    stops = re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`\))?", text)
    assert len(stops) > 30
    for file, name in stops:
        path = ROOT / "src" / "featlearn" / file
        assert path.is_file(), file
        defined = {getattr(node, "name", None) for node in ast.parse(path.read_text(encoding="utf-8")).body}
        assert not name or name in defined, f"{file} does not define {name}"


@pytest.mark.parametrize("file", ["README.md", "docs/index.md", "CITATION.cff"])
def test_every_paper_is_linked(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert [link for link in LINKS if link not in text] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
