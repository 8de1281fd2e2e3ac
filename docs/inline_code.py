"""A hook of mkdocs: keep short inline code, such as ``--json``, in one line; browsers break it after a hyphen."""

from __future__ import annotations

import re
from typing import Any

_SHORT = re.compile(r"<code>([^<\s]{1,24})</code>")


def keep_short_code(html: str) -> str:
    """Return HTML with a class on each short inline code, whose style forbids line breaks."""
    return _SHORT.sub(r'<code class="short">\1</code>', html)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the short inline code of a page after Markdown has been converted."""
    return keep_short_code(html)
