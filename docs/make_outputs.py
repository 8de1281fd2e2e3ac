"""Run the python blocks of the pages, and write what they print into the pages.

Run by hand: ``python docs/make_outputs.py [PAGE.md ...]``; without pages, all of them. The blocks of a page run in
order in one namespace, in a temporary folder that is removed afterwards. A ``text`` block directly after a python block
is what that block prints. A block whose first line is ``# file: name.py`` is a script: it is written to the folder and
not run. Outputs that agree with the page up to rounding stay as they are.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_TOLERANCE = 0.02


@dataclass
class Block:
    """A python block of a page.

    Attributes:
        line: Number of lines before its code.
        code: Its code.
        output: The text that the page shows as its output; None without one.
        place: Where that text begins and ends in the page.
    """

    line: int
    code: str
    output: str | None = None
    place: tuple[int, int] = (0, 0)


def blocks_of(text: str) -> list[Block]:
    """Return the python blocks of a page with their outputs."""
    blocks: list[Block] = []
    end_of_python = -1
    for match in _FENCE.finditer(text):
        language, body = match.groups()
        if language == "python":
            blocks.append(Block(text.count("\n", 0, match.start(2)), body))
            end_of_python = match.end()
            continue
        if language == "text" and end_of_python >= 0 and not text[end_of_python : match.start()].strip():
            blocks[-1].output, blocks[-1].place = body, match.span(2)
        end_of_python = -1
    return blocks


def same_output(shown: str, printed: str) -> bool:
    """Return whether two texts have the same words and whole numbers and, to a tolerance, the same other numbers."""
    shown_words, printed_words = (_NUMBER.sub("#", text).split() for text in (shown, printed))
    shown_numbers, printed_numbers = (_NUMBER.findall(text) for text in (shown, printed))
    if shown_words != printed_words or len(shown_numbers) != len(printed_numbers):
        return False
    return all(_same_number(a, b) for a, b in zip(shown_numbers, printed_numbers, strict=True))


def _same_number(shown: str, printed: str) -> bool:
    if shown.lstrip("+-").isdigit():
        return shown == printed
    return abs(float(shown) - float(printed)) <= _TOLERANCE * max(1.0, abs(float(shown)))


def run_page(path: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in a folder, and yield each block with what it printed."""
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if script := _FILE.match(block.code):
            (folder / script[1]).write_text(block.code, encoding="utf-8")
            continue
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * block.line + block.code, str(path), "exec")
        printed = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            exec(code, names)
        yield block, printed.getvalue()


def updated_page(path: Path) -> str:
    """Run a page in a temporary folder, and return its text with the outputs as printed now."""
    text, parts, end = path.read_text(encoding="utf-8"), [], 0
    with tempfile.TemporaryDirectory() as folder:
        for block, printed in run_page(path, Path(folder)):
            if block.output is not None and not same_output(block.output, printed):
                start, stop = block.place
                parts += [text[end:start], *(f"{line.rstrip()}\n" for line in printed.splitlines())]
                end = stop
    return "".join([*parts, text[end:]])


def main(names: list[str]) -> None:
    """Update the pages."""
    for path in map(Path, names) if names else sorted(DOCS.rglob("*.md")):
        new = updated_page(path)
        if new != path.read_text(encoding="utf-8"):
            path.write_text(new, encoding="utf-8")
            print(f"{path.name}: changed")


if __name__ == "__main__":
    main(sys.argv[1:])
