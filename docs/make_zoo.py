"""Measure the architectures of the zoo, and write the table of ``docs/development/zoo.md``.

Run by hand: ``python docs/make_zoo.py``. The zoo is in ``tests/zoo``. It needs transformers, peft and timm; torchvision
is not needed (``pip install --no-deps timm``).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import transformers

import featlearn as fl
from featlearn.features import Report

DOCS = Path(__file__).parent
PAGE = DOCS / "development" / "zoo.md"
sys.path.insert(0, str(DOCS.parent / "tests"))

from zoo.architectures import ZOO, Architecture  # noqa: E402

TITLES = {"torch": "Plain PyTorch", "peft": "peft", "transformers": "transformers", "timm": "timm"}
HEADER = "| Architecture | Weights | Covered | Layers | Left out |\n|---|---:|---:|---:|---|"
AUTOGRAD_OFF = "called with autograd off"
CHECKS = {"coverage": "coverage", "batches": "batch sizes", "unused": "unused parameters"}
ROLES = {"embedding": "embedding", "constant": "constant", "unused": "not used"}
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of tables -->)", re.DOTALL)


def main() -> None:
    """Measure all architectures and replace the tables of the page."""
    transformers.logging.set_verbosity_error()
    rows: dict[str, list[str]] = {library: [] for library in TITLES}
    for architecture in ZOO.values():
        rows[architecture.library].append(row(architecture))
    tables = "".join(
        f"\n## {TITLES[library]}\n\n{HEADER}\n" + "\n".join(lines) + "\n" for library, lines in rows.items()
    )
    tables += "\n## Known failures\n\nThese checks fail at present:\n\n" + known_failures()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLES.sub(lambda _: f"{tables}\n", page), encoding="utf-8")


def known_failures() -> str:
    """Return a table of the checks that fail at present."""
    names: dict[tuple[str, str], list[str]] = {}
    for architecture in ZOO.values():
        for check, reason in architecture.known.items():
            names.setdefault((CHECKS[check], reason), []).append(architecture.name)
    rows = (f"| {check} | {', '.join(several)} | {reason} |" for (check, reason), several in names.items())
    return "| Check | Architectures | Reason |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def row(architecture: Architecture) -> str:
    """Return the row of an architecture.

    Args:
        architecture: Entry of the zoo.
    """
    model, data = architecture.make()
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    try:
        report = fl.probe(model, data, **architecture.options)
    except fl.UnsupportedModelError:
        return f"| {architecture.name} | {weights:,} | refused | | its samples act on each other |"
    blocked = {name for name, features in report.items() if AUTOGRAD_OFF in features.flags}
    covered = f"{report.covered:.1%}".replace(".0%", "%")
    return f"| {architecture.name} | {weights:,} | {covered} | {len(report)} | {left_out(report, blocked)} |"


def left_out(report: Report, blocked: set[str]) -> str:
    """Return the parameters that are not measured, as text: a number and the reason of each kind.

    Args:
        report: Report of the architecture.
        blocked: Names of the layers that were called with autograd off.
    """
    kinds = Counter[str]()
    for parameter in report.parameters:
        if not parameter.taken:
            reason = parameter.reason.partition(",")[0]
            kinds[ROLES.get(parameter.role, reason)] += 1
        elif blocked.issuperset(parameter.layers):
            kinds["computed with autograd off"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


if __name__ == "__main__":
    main()
