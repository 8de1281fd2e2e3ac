"""A griffe extension: show the ``>>>`` examples of docstrings as code.

griffe knows a section "Examples:" only. Docstrings of featlearn also write "Example:", or put the lines at their end
without a heading; Markdown would take their ``>>>`` for quotations and their lists for links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADED = re.compile(r"^Example:\s*$", re.MULTILINE)
_BARE = re.compile(r"\n\n(>>> .*)\Z", re.DOTALL)


class ShowExamples(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Give the examples of an object's docstring the heading that griffe knows."""
        if obj.docstring is None:
            return
        text = _HEADED.sub("Examples:", obj.docstring.value)
        if bare := _BARE.search(text):
            lines = (f"    {line}" if line else "" for line in bare[1].splitlines())
            text = text[: bare.start()] + "\n\nExamples:\n" + "\n".join(lines)
        obj.docstring.value = text
