"""A report on one page: sections of words, tables and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from featlearn.html.page import definitions, document, frame_table, heading, paragraph, picture
from featlearn.numerics.files import whole_file

__all__ = ["Section", "write_report"]


@dataclass(frozen=True)
class Section:
    """A part of a report; everything in it is text, and shown as it is.

    Attributes:
        title: Its heading.
        words: Paragraphs at its top.
        tables: Caption to table, below the words.
        figures: Caption to figure, below the tables.
        settings: Names and values, at its end.
        remarks: Paragraphs that are less important, at its very end.
    """

    title: str
    words: tuple[str, ...] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        """Its HTML."""
        parts = [heading(self.title)]
        parts += [paragraph(text) for text in self.words]
        for caption, table in self.tables.items():
            parts.append(frame_table(table))
            if caption:
                parts.append(paragraph(caption, soft=True))
        parts += [picture(figure, caption) for caption, figure in self.figures.items()]
        if self.settings:
            parts.append(definitions(self.settings))
        parts += [paragraph(text, soft=True) for text in self.remarks]
        return parts


def write_report(path: str | os.PathLike[str], title: str, lead: str, sections: Iterable[Section]) -> Path:
    """Write a page that holds everything it needs: it can be sent by mail, and opened without a network.

    Args:
        path: The file; one that exists is replaced.
        title: Of the page.
        lead: What it is about, in a sentence or two.
        sections: Its parts.

    Returns:
        The path.
    """
    parts = [heading(title, 1), paragraph(lead, soft=True)]
    for section in sections:
        parts += section.parts()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as draft:
        draft.write_text(document(title, parts), encoding="utf-8")
    return target
