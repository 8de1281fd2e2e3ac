"""Write ``docs/reproductions.md`` and its pictures from folders of `featlearn reproduce`.

Run by hand after real runs: ``python docs/make_reproductions.py reproductions reproductions-full``. Of an experiment
that is in several folders, the last one counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from featlearn.papers.ledger import markdown_ledger, read_records

DOCS = Path(__file__).parent
PICTURES = DOCS / "img" / "reproductions"
LARGEST = 150_000

HEAD = """# Reproductions

Every table and figure of the papers that a CPU can hold, by one command each: `featlearn reproduce NAME`, or all of
them by `make reproduce`. This page is written from real runs: experiments that a CPU holds at the papers' own sizes
are shown at the scale *full* (`make reproduce-full`), the others at *quick*. *Tolerance* is how far the mean over seeds
may be from the published number; where it comes from is said on each experiment's own page, which the command writes.

Where a paper says something in words ("close to 1", "high"), the number that is asked for is ours. *Quick* runs are
small, and say little about what happens at the paper's own size; what was not tried there says so.

"""


def main(folders: list[Path]) -> None:
    """Read the ledgers, and take the pictures along."""
    found = {record.name: (record, folder) for folder in folders for record in read_records(folder / "ledger.json")}
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    pictures: dict[str, list[tuple[str, str]]] = {}
    for record, folder in found.values():
        for source in sorted((folder / record.name).glob("*.png")):
            name = f"{record.name}-{source.stem}.png"
            _shrink(source, PICTURES / name)
            pictures.setdefault(record.name, []).append((source.stem.replace("-", " "), f"img/reproductions/{name}"))
    (DOCS / "reproductions.md").write_text(
        HEAD + markdown_ledger([record for record, _ in found.values()], pictures), encoding="utf-8"
    )


def _shrink(source: Path, target: Path) -> None:
    """At most as wide as a page, with a palette: a fifth of the bytes, and never more than a page should carry."""
    for width in (900, 700, 500):
        with Image.open(source) as opened:
            picture = opened.convert("RGB")
        if picture.width > width:
            picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
        picture.quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
        if target.stat().st_size < LARGEST:
            return


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
