"""Verifies random configs of the fuzzer, of which none may differ:

    python -m tests.verify.random_configs [--seed 1] [--cells 60] [--first 0]

Status 1: one does. A refused layout counts as one that the product has looked at.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from meshtrain.verify.ranks import ForkedRanks
from meshtrain.verify.report import name_of, where
from meshtrain.verify.session import DIFFERENT, Outcome, Subject, Verification
from tests.fuzz.cells import BASE, STEPS, Cell, drawn, overrides


def verified(cell: Cell, folder: Path) -> Outcome:
    layout = cell.first["layout"]
    others = {key: value for key, value in cell.first.items() if key != "layout"}
    keys = overrides(cell.experiment | others)
    verification = Verification(
        subject=Subject(BASE, keys, [], STEPS, "float64"),
        ranks=ForkedRanks(),
        folder=folder,
        layouts=[layout],
    )
    verification.begin()
    return verification.verify(layout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verify.random_configs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number in range(options.first, options.cells):
        cell = drawn(options.seed, number)
        with tempfile.TemporaryDirectory() as folder:
            outcome = verified(cell, Path(folder))
        counts[outcome.status] += 1
        about = f"{options.seed}/{number} {name_of(outcome.layout)}: {outcome.status}"
        if outcome.status == DIFFERENT:
            about += f" {where(outcome)} {outcome.kind}: {outcome.reason}\n{cell.to_yaml()}"
        print(about, flush=True)
    print(dict(counts))
    return 1 if counts[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())
