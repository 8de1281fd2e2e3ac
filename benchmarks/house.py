"""Measure how the source is laid out, against what it was and what it should be: files, lines, imports.

Run as ``python -m benchmarks.house``; ``--packages`` prints the code lines of each package instead. Nothing here is a
timing.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import featlearn

SOURCE = Path(featlearn.__file__).parent


def modules() -> dict[str, Path]:
    """Return the files of all modules by their names."""
    files = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = ("featlearn", *file.relative_to(SOURCE).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def code_lines(file: Path) -> int:
    """Return the number of lines that hold code, without docstrings, comments and blanks."""
    text = file.read_text(encoding="utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for line in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                texts |= set(range(line.lineno, (line.end_lineno or line.lineno) + 1))
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def imported_by(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of featlearn that a module imports; names that a package exports are the package's."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def not_private(known: dict[str, Path]) -> list[str]:
    """Return the modules of the library that no other package imports and whose name has no underscore."""
    users: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        for other in imported_by(name, file, known):
            if other in users:
                users[other].add(name.split(".")[1] if "." in name else "")
    return [
        name
        for name, file in known.items()
        if name.count(".") >= 2
        and file.name != "__init__.py"
        and name.split(".")[1] not in ("papers", "_utils")
        and not name.rsplit(".", 1)[1].startswith("_")
        and not users[name] - {name.split(".")[1]}
    ]


def loaded(code: str) -> list[str]:
    """Return the modules of featlearn, and scikit-learn if it is among them, that a program has loaded at its end."""
    show = (
        "import sys; print('\\n'.join(m for m in sys.modules if m.partition('.')[0] == 'featlearn' or m == 'sklearn'))"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line == "sklearn" or line.startswith("featlearn")]


FIT = """
import numpy as np, pandas as pd, warnings
from featlearn.cli import app
rng = np.random.default_rng(0)
frame = pd.DataFrame(rng.standard_normal((60, 3)), columns=list("abc"))
frame.assign(y=frame.a * frame.b).to_csv({folder!r} + "/table.csv", index=False)
arguments = ["--target", "y", "--out", {folder!r} + "/out", "--json"]
try:
    app(["fit", {folder!r} + "/table.csv", *arguments], standalone_mode=False)
except SystemExit:
    pass
"""


def print_packages(known: dict[str, Path]) -> None:
    """Print the code lines of each package, the largest first."""
    sizes = Counter[str]()
    for name, file in known.items():
        sizes[name.split(".")[1] if "." in name else "featlearn"] += code_lines(file)
    for package, lines in sizes.most_common():
        print(f"{package:12s} {lines:6,d}")


def main() -> None:
    """Print the table."""
    known = modules()
    if "--packages" in sys.argv[1:]:
        return print_packages(known)
    library = {name: file for name, file in known.items() if not name.startswith("featlearn.papers")}
    private = [n for n in library if any(part.startswith("_") for part in n.split(".")) and not n.endswith("__main__")]
    with tempfile.TemporaryDirectory() as folder:
        fit = loaded(FIT.format(folder=folder))
    cosine = loaded("import featlearn as fl; fl.cosine")
    longest = max(known.items(), key=lambda pair: lines_of(pair[1]))
    lines = sum(map(code_lines, known.values()))
    loaded_by_fit = [m for m in fit if m != "sklearn"]
    rows = [
        ("library files, papers apart", "229", "<= 190", len(library)),
        ("private ones", "0", "", len(private)),
        ("neither private nor imported by another package", "", "none", ", ".join(not_private(known)) or "none"),
        ("files of papers", "65", "", len(known) - len(library)),
        ("code lines", "29,952", "<= 27,052", f"{lines:,}"),
        ("of these in papers", "7,615", "", f"{sum(code_lines(f) for n, f in known.items() if n not in library):,}"),
        ("longest file", "506 lines", "<= 400", f"{lines_of(longest[1])} lines ({longest[0]})"),
        ("modules that `featlearn fit` loads", "272", "<= 110", len(loaded_by_fit)),
        ("of papers among them", "47", "0", len([m for m in fit if m.startswith("featlearn.papers")])),
        ("modules that `fl.cosine` loads", "50", "<= 12", len([m for m in cosine if m != "sklearn"])),
        ("scikit-learn among them", "yes", "no", "yes" if "sklearn" in cosine else "no"),
    ]
    print(f"{'':50s} {'before':>10s} {'target':>10s}  now")
    for name, before, target, now in rows:
        print(f"{name:50s} {before:>10s} {target:>10s}  {now}")


def lines_of(file: Path) -> int:
    """Return the number of lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
