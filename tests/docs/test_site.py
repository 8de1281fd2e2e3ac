"""Formulas become MathML, the walks name code that exists, and the papers are linked."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from mathml import to_mathml  # noqa: E402
from narrow_pages import keep_short_code, mark_wide_figures, wrap_sentences  # noqa: E402

ARXIV = ("2507.05644", "2308.15478", "2211.06506")
LINKS = ("openreview.net/forum?id=JXCe2ZcUXr", *(f"arxiv.org/abs/{number}" for number in ARXIV))


def test_formulas_become_mathml_and_code_stays() -> None:
    page = "The $x_0$ costs `$5$`.\n\n```bash\necho $HOME $PATH\n```\n\n$$W^\\top W$$\n\nIt is 3$ and 4$.\n"
    made = to_mathml(page)
    assert made.count("<math") == 2
    assert 'display="block"' in made
    assert "`$5$`" in made
    assert "echo $HOME $PATH" in made
    assert "3$ and 4$" in made


def test_a_formula_keeps_the_punctuation_mark_that_follows_it() -> None:
    made = to_mathml("For $x$, and (as $y$). Then [$z$](page.md).\n")
    assert re.findall(r"</math>(.*?)</span>", made) == [",", ").", ""]
    assert "](page.md)" in made


def test_short_inline_code_is_marked() -> None:
    made = keep_short_code("<code>--json</code> <code>a b</code> <pre><code><span>x</span></code></pre>")
    assert made == '<code class="short">--json</code> <code>a b</code> <pre><code><span>x</span></code></pre>'


def test_printed_sentences_are_wrapped_and_tables_are_not() -> None:
    block = '<div class="highlight"><pre><span></span><code>{}\n</code></pre></div>'
    table, sentence = block.format("a  b\n" * 50), block.format("word " * 20)
    made = wrap_sentences(table + sentence)
    assert made == table + sentence.replace("highlight", "highlight sentences")


def test_wide_figures_are_marked() -> None:
    figures = '<img alt="a" src="../img/flow.png" /> <img alt="b" src="../img/tail.png" />'
    made = mark_wide_figures(figures, DOCS / "guides")
    assert made == figures.replace('<img alt="a"', '<img class="wide" alt="a"')


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_formula_of_a_page_can_be_converted(page: Path) -> None:
    made = to_mathml(page.read_text(encoding="utf-8"))
    without_code = re.sub(r"```.*?```|`[^`]*`", "", made, flags=re.DOTALL)
    assert "$" not in re.sub(r"<math.*?</math>", "", without_code, flags=re.DOTALL)
    formulas = re.findall(r"<math.*?</math>", made, re.DOTALL)
    assert not [made for made in formulas if "\\" in made], "a command that latex2mathml does not know"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings of mkdocs are errors."""
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_takes_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?https?://[^>]*>", text) == [], page
        assert "api.github.com" not in text
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?://|@import", style.read_text(encoding="utf-8")), style


def test_formulas_tables_and_notebooks_are_in_the_site(site: Path) -> None:
    concepts = (site / "concepts" / "index.html").read_text(encoding="utf-8")
    assert concepts.count("<math") > 20
    assert "$" not in re.sub(r"<(script|style).*?</\1>", "", concepts, flags=re.DOTALL)
    notebook = (site / "notebooks" / "probe-a-transformer.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in notebook
    assert (site / "fonts" / "stix-two-math.woff2").stat().st_size > 100_000


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
