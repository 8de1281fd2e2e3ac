"""A report on one page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from featlearn.plots import importance_bars
from featlearn.reports import Section, write_report


def test_a_page_holds_everything_and_all_text_is_escaped(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>"
    section = Section(
        nasty,
        (nasty,),
        {nasty: pd.DataFrame({nasty: [nasty, 0.5]}, index=[nasty, "b"])},
        {nasty: importance_bars(["a"], [1.0])},
        {nasty: nasty},
        (nasty,),
    )
    path = write_report(tmp_path / "new" / "page.html", nasty, nasty, [section])
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 14  # the picture's caption is its alternative text too
    assert page.count("data:image/png;base64") == 1
    assert "0.5" in page
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
