"""A hook of mkdocs: mark short inline code and wide figures, which ``css/site.css`` styles for narrow pages."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
WIDE = 700
"""Width in pixels above which the labels of a figure cannot be read on a phone, unless it scrolls."""

_SHORT = re.compile(r"<code>([^<\s]{1,24})</code>")
_FIGURE = re.compile(r'<img (?=[^>]*src="(?P<source>[^":]+\.png)")')


def keep_short_code(html: str) -> str:
    """Return HTML with a class on each short inline code, such as ``--json``; browsers break it after a hyphen."""
    return _SHORT.sub(r'<code class="short">\1</code>', html)


def mark_wide_figures(html: str, folder: Path) -> str:
    """Return HTML with a class on each figure that is wider than `WIDE` pixels.

    Args:
        html: Content of a page.
        folder: Folder of the page, from which the addresses of figures start.
    """

    def mark(match: re.Match[str]) -> str:
        return '<img class="wide" ' if _width(folder / match["source"]) > WIDE else match[0]

    return _FIGURE.sub(mark, html)


def _width(picture: Path) -> int:
    """Return the width in the header of a PNG file."""
    with picture.open("rb") as file:
        return int(struct.unpack(">I", file.read(20)[16:])[0])


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Mark a page after Markdown has been converted."""
    return mark_wide_figures(keep_short_code(html), (DOCS / page.file.src_uri).parent)
