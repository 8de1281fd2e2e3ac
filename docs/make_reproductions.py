"""Write the pages ``docs/reproductions/<paper>.md`` and their pictures from folders of `featlearn reproduce`.

Run by hand after real runs: ``python docs/make_reproductions.py reproductions reproductions-full``. If an experiment is
in several folders, the last folder counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from featlearn.papers.ledger import Record, markdown_ledger, read_records

DOCS = Path(__file__).parent
PICTURES = DOCS / "img" / "reproductions"
LARGEST = 150_000

HEADS = {
    "nfa": """# Feature learning as alignment

D. Beaglehole, I. Mitliagkas, A. Agarwala, [*Feature learning as alignment: a structural property of gradient descent in
non-linear neural networks*](https://openreview.net/forum?id=JXCe2ZcUXr).
""",
    "fact": """# Features at convergence

E. Boix-Adserà, N. Mallinar, J. B. Simon, M. Belkin, [*FACT: the Features At Convergence Theorem for neural
networks*](https://arxiv.org/abs/2507.05644), 2025.
""",
    "adaptive": """# Adaptive tangent features

D. LeJeune, S. Alemohammad, [*An adaptive tangent feature perspective of neural
networks*](https://arxiv.org/abs/2308.15478), 2023.
""",
    "spectral": """# Spectral evolution

Z. Wang, A. Engel, A. Sarwate, I. Dumitriu, T. Chiang, [*Spectral evolution and invariance in linear-width neural
networks*](https://arxiv.org/abs/2211.06506), 2022.
""",
}
"""Title and reference of each page; `featlearn.papers.experiment.PAPERS` has the keys."""


def main(folders: list[Path]) -> None:
    """Read the ledgers, copy the pictures and write one page per paper."""
    records = {record.name: (record, folder) for folder in folders for record in read_records(folder / "ledger.json")}
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    pictures: dict[str, list[tuple[str, str]]] = {}
    for record, folder in records.values():
        for source in sorted((folder / record.name).glob("*.png")):
            name = f"{record.name}-{source.stem}.png"
            _shrink(source, PICTURES / name)
            address = f"../img/reproductions/{name}"
            pictures.setdefault(record.name, []).append((source.stem.replace("-", " "), address))
    for paper in HEADS:
        chosen = [record for record, _ in records.values() if record.paper == paper]
        (DOCS / "reproductions" / f"{paper}.md").write_text(page_of(paper, chosen, pictures), encoding="utf-8")


def page_of(paper: str, records: Sequence[Record], pictures: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Return the page of one paper.

    Args:
        paper: Key of `HEADS`.
        records: Records of the paper's experiments.
        pictures: Captions and addresses of pictures, by the experiment's name.
    """
    summary, _, body = markdown_ledger(records, pictures).partition("\n")
    summary = re.sub(r"\bdiffers\b", "differ", summary).replace("of work.", "of computing time.")
    body = re.sub(r"^## .*\n", "", body, count=1, flags=re.MULTILINE)
    body = re.sub(r"^### ", "## ", body, flags=re.MULTILINE).strip()
    return f"{HEADS[paper]}\n{summary} [How to read this page](index.md#how-to-read-the-pages).\n\n{body}\n"


def _shrink(source: Path, target: Path) -> None:
    """Write a picture at most as wide as a page, with a palette, in less than `LARGEST` bytes."""
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
