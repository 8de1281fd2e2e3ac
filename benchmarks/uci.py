"""Accuracy on the UCI sets, a line a set: ``python -m benchmarks.uci --data FOLDER``; see ``--help``.

The folder holds ``index.csv`` and the archive of the sets (`featlearn.datasets.uci_tables`). A table that exists is
gone on with: sets that it holds are not fitted again.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch

from featlearn.datasets import uci_tables
from featlearn.papers.fact.table3 import PROTOCOLS, uci_accuracy

COLUMNS = ("name", "rows", "features", "classes", "mean", "fold0", "fold1", "fold2", "fold3", "iterations", "seconds")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder of the sets")
    options.add_argument("--out", type=Path, default=Path("benchmarks/results/uci.csv"))
    options.add_argument("--protocol", choices=PROTOCOLS, default="clean")
    options.add_argument("--update", default="fact")
    options.add_argument(
        "--most-rows", type=int, default=3000, help="training rows of a fold; larger sets are left out"
    )
    options.add_argument("--every", type=int, default=1, help="take every n-th set by size (3 and 3000 rows: 33 sets)")
    options.add_argument("--first", type=int, default=0, help="place of the first of them")
    given = options.parse_args()
    torch.set_num_threads(1)
    done = {}
    if given.out.exists():
        with given.out.open(newline="", encoding="utf-8") as stored:
            done = {row["name"]: float(row["mean"]) for row in csv.DictReader(stored)}
    tables = [table for table in uci_tables(folder=given.data) if len(table.folds[0][0]) <= given.most_rows]
    tables.sort(key=lambda table: (len(table.folds[0][0]), table.name))
    tables = tables[given.first :: given.every]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a", newline="", encoding="utf-8") as stored:
        writer = csv.writer(stored)
        if not done:
            writer.writerow(COLUMNS)
        for table in tables:
            if table.name in done:
                continue
            began = time.perf_counter()
            result = uci_accuracy(table, given.protocol, update=given.update)
            done[table.name] = result.mean
            seconds = time.perf_counter() - began
            scores = [f"{score:.4f}" for score in result.folds]
            kept = " ".join(map(str, result.iterations))
            row = [table.name, len(table.X), table.X.shape[1], table.classes, f"{result.mean:.4f}", *scores, kept,
                   f"{seconds:.1f}"]  # fmt: skip
            writer.writerow(row)
            stored.flush()
            print(f"{table.name:32s} {100 * result.mean:6.2f}  ({seconds:.1f} s)", flush=True)
    mean = 100 * np.mean([done[table.name] for table in tables])
    print(f"{len(tables)} sets, {given.protocol} protocol, update {given.update}: mean accuracy {mean:.2f}")


if __name__ == "__main__":
    main()
