"""A hook of mkdocs: turn ``$...$`` and ``$$...$$`` into MathML when the site is built, so that no script is needed."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

# Code first: a dollar sign in a fence or between backticks is not math.
_TOKEN = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+)[^\n]*\n.*?^(?P=fence)[ ]*$|`+[^`\n]+`+)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])(?P<mark>[.,;:!?)]*)",
    re.MULTILINE | re.DOTALL,
)


def to_mathml(markdown: str) -> str:
    """Return a page with its formulas as MathML; code stays as it is."""
    return _TOKEN.sub(_convert, markdown)


def _convert(match: re.Match[str]) -> str:
    if match["block"] is not None:
        return f'<div class="formula">{convert(match["block"].strip(), display="block")}</div>'
    if match["inline"] is not None:
        # Within a span, since Markdown takes a line that starts with <math> for a block of HTML.
        # The punctuation mark is in the span too, or a narrow page would break the line before it.
        return f'<span class="formula">{convert(match["inline"])}{match["mark"]}</span>'
    return match[0]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Convert the formulas of a page before Markdown reads it."""
    return to_mathml(markdown)
