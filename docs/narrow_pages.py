"""A hook of mkdocs: mark short inline code, printed sentences and wide figures, for their style in ``css/site.css``."""

from __future__ import annotations

import re
import struct
from html import unescape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
WIDE = 700
"""Width in pixels above which the labels of a figure cannot be read on a phone, unless it scrolls."""

LONG = 86
"""Number of characters per line of code on a wide screen."""

_SHORT = re.compile(r"<code>([^<\s]{1,24})</code>")
# Plain text, without the spans of highlighted code.
_OUTPUT = re.compile(r'<div class="highlight">(?=<pre><span></span><code>(?P<text>[^<]*)</code>)')
_FIGURE = re.compile(r'<img (?=[^>]*src="(?P<source>[^":]+\.png)")')


def keep_short_code(html: str) -> str:
    """Return HTML with a class on each short inline code, such as ``--json``; browsers break it after a hyphen."""
    return _SHORT.sub(r'<code class="short">\1</code>', html)


def wrap_sentences(html: str) -> str:
    """Return HTML with a class on each printed output with a line of more than `LONG` characters, which is wrapped.

    Printed tables are narrower; they keep their lines.
    """

    def mark(match: re.Match[str]) -> str:
        is_long = any(len(line) > LONG for line in unescape(match["text"]).splitlines())
        return '<div class="highlight sentences">' if is_long else match[0]

    return _OUTPUT.sub(mark, html)


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
    return mark_wide_figures(wrap_sentences(keep_short_code(html)), (DOCS / page.file.src_uri).parent)
